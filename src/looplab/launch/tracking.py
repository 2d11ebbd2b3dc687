"""W&B settings of a run: the same in every round, with everything it writes kept inside the lab.

They reach a trainer in two ways: by environment variables, and by the W&B keys of its own config. Arguments of
`wandb.init` win over variables, so a trainer that passes its config's mode on (as LeRobot does) would not notice
the variables.
"""

from __future__ import annotations

import copy
import netrc
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from looplab.config.lab import LaunchConfig, WandbConfig
from looplab.config.paths import Concrete, delete, find, find_parents, get, has, parse, set_, show
from looplab.errors import LabError

CACHE = ".wandb_cache"
DEFAULT_SERVER = "https://api.wandb.ai"
TABLE = "wandb"
IN_TABLE = {"enable": ("enable", "enabled"), "mode": ("mode",), "entity": ("entity",), "project": ("project",),
            "disable_artifact": ("disable_artifact",)}  # fmt: skip
"""The keys of a table `wandb`, such as LeRobot's."""
AT_TOP = {"enable": ("wandb", "use_wandb"), "mode": ("wandb_mode",), "entity": ("wandb_entity",),
          "project": ("wandb_project", "wandb_project_name")}  # fmt: skip
"""The keys of a config without such a table, such as PufferLib's."""
OFF: dict[object, str] = {
    False: "false",
    "false": "false",
    "offline": "offline",
    "disabled": "disabled",
    "dryrun": "offline",
}


def find_keys(settings: WandbConfig | None, config: Mapping[str, Any]) -> dict[str, Concrete]:
    """The config's own W&B keys, by what they say: `enable`, `mode`, `entity`, `project`, `disable_artifact`.

    Keys that the lab file names need not be in the config, but the table that they belong to must be.
    """
    if settings is None or settings.keys == "none":
        return {}
    if isinstance(settings.keys, dict):
        return {what: _named(config, key) for what, key in settings.keys.items()}
    return known_keys(config)


def _named(config: Mapping[str, Any], key: str) -> Concrete:
    places = find(config, key) or [(*at, parse(key)[-1]) for at in find_parents(config, key)]
    if len(places) != 1:
        raise LabError(f"track.wandb.keys: there is no place for {key} in the config", hint="name a key of the config")
    return places[0]


def known_keys(config: Mapping[str, Any]) -> dict[str, Concrete]:
    """The W&B keys found by their names: those of the table `wandb` nearest to the top, or those at the top."""
    table = min(_tables(config, ()), key=len, default=None)
    if table is None:
        return {what: (name,) for what, names in AT_TOP.items() for name in names
                if name in config and (what != "enable" or isinstance(config[name], bool))}  # fmt: skip
    return {what: (*table, name) for what, names in IN_TABLE.items() for name in names if has(config, (*table, name))}


def _tables(config: Mapping[str, Any], trail: Concrete) -> Iterator[Concrete]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            if key == TABLE:
                yield (*trail, key)
            yield from _tables(value, (*trail, key))


def values_of(settings: WandbConfig | None, config: Mapping[str, Any]) -> dict[Concrete, Any]:
    """What is written into the config: a value for each of its W&B keys of which the lab file says anything."""
    if settings is None:
        return {}
    said = {
        "enable": settings.mode != "disabled",
        "mode": settings.mode,
        "entity": settings.entity,
        "project": settings.project,
        "artifacts": settings.artifacts,
        "disable_artifact": not settings.artifacts,
    }
    return {place: said[what] for what, place in find_keys(settings, config).items() if said[what] is not None}


def with_values(config: dict[str, Any], values: Mapping[Concrete, Any]) -> dict[str, Any]:
    """A copy of the config with these values; the config itself if it has them already."""
    if all(has(config, place) and get(config, place) == value for place, value in values.items()):
        return config
    changed = copy.deepcopy(config)
    for place, value in values.items():
        set_(changed, place, value)
    return changed


def without(config: Mapping[str, Any], places: Sequence[Concrete]) -> Mapping[str, Any]:
    """A copy of the config without these keys; the config itself if it has none of them."""
    there = [place for place in places if has(config, place)]
    if not there:
        return config
    left = copy.deepcopy(dict(config))
    for place in there:
        delete(left, place)
    return left


def why_not_online(
    settings: WandbConfig | None, launch: LaunchConfig, config: Mapping[str, Any], extra: Sequence[str] = ()
) -> str | None:
    """Why a run of this config would not log to W&B online, with the key that says so; None if it would.

    Args:
        config: As the trainer gets it.
        extra: The arguments that the command gets in addition.
    """
    if settings is not None and settings.mode != "online":
        return f"track.wandb.mode is {settings.mode}"
    words = [*launch.command, *extra]
    variable = launch.env.get("WANDB_MODE") or ("disabled" if launch.env.get("WANDB_DISABLED") else None)
    if variable in OFF:
        return f"launch.env says WANDB_MODE: {variable}"
    keys = known_keys(config)
    if settings is not None and isinstance(settings.keys, dict):
        keys |= find_keys(settings, config)
    online = settings is not None
    for what in ("enable", "mode"):
        key = show(keys[what]) if what in keys else f"{TABLE}.{what}"
        given = _argument(words, key)
        if given is not None:
            if (word := given.lower()) in OFF or word == "0":
                return f"the command says {key}={given}"
            online = online or (what == "mode" and given == "online")
        elif what in keys and has(config, keys[what]):
            value = get(config, keys[what])
            if launch.config.as_ != "file" and launch.config.leaves_out(keys[what]):
                if what == "enable":
                    return f"launch.config.skip keeps {key} from the trainer"
                continue
            if isinstance(value, bool | str) and value in OFF:
                return f"{key} is {OFF[value]} in the config"
            online = online or value == "online"
    return None if online else "nothing says so"


def _argument(words: Sequence[str], key: str) -> str | None:
    """The last value that a command gives to an option, or to a Hydra key; `true` for an option without a value."""
    option = re.compile(rf"(?:--|\+{{0,2}}){re.escape(key).replace('_', '[-_]')}(?:=(.*))?", re.DOTALL)
    found = None
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        match = option.fullmatch(word)
        if match is not None and (word.startswith("--") or match[1] is not None):
            found = match[1] if match[1] is not None else "true" if following.startswith("-") else following
    return found


def wandb_environment(settings: WandbConfig | None, lab: Path, run_dir: str, study: str, run_id: str) -> dict[str, str]:
    if settings is None:
        return {}
    cache = str(lab / CACHE)
    env = {
        "WANDB_MODE": settings.mode,
        "WANDB_DIR": run_dir,
        "WANDB_CACHE_DIR": cache,
        "WANDB_CONFIG_DIR": cache,
        "WANDB_DATA_DIR": cache,
        "WANDB_ARTIFACT_DIR": f"{cache}/artifacts",
        "WANDB_NAME": f"{study}-{run_id}",
        "WANDB_RUN_GROUP": study,
        "WANDB_ERROR_REPORTING": "false",
    }
    if settings.entity:
        env["WANDB_ENTITY"] = settings.entity
    if settings.project:
        env["WANDB_PROJECT"] = settings.project
    if not settings.artifacts:
        # What can be switched off from outside: uploads of models by Transformers, and of code by wandb itself.
        env |= {"WANDB_LOG_MODEL": "false", "WANDB_DISABLE_CODE": "true"}
    return env


def has_wandb_key(env: Mapping[str, str]) -> bool:
    """Whether wandb would find a key: in the environment, or where `wandb login` puts it."""
    if env.get("WANDB_API_KEY"):
        return True
    host = urlparse(env.get("WANDB_BASE_URL", DEFAULT_SERVER)).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
