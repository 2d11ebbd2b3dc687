"""W&B settings of a run: the same in every round, with all of its files inside the lab.

They reach a trainer in two ways: by environment variables, and by the W&B keys of its own config. Arguments of
`wandb.init` override variables, so a trainer that passes the mode of its config on (as LeRobot does) would ignore the
variables.
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
TABLE_KEYS = {"enable": ("enable", "enabled"), "mode": ("mode",), "entity": ("entity",), "project": ("project",),
              "disable_artifact": ("disable_artifact",)}  # fmt: skip
"""Setting → names of its key in a table `wandb`, such as LeRobot's."""
TOP_LEVEL_KEYS = {"enable": ("wandb", "use_wandb"), "mode": ("wandb_mode",), "entity": ("wandb_entity",),
                  "project": ("wandb_project", "wandb_project_name")}  # fmt: skip
"""Setting → names of its key in a config without such a table, such as PufferLib's."""
OFF: dict[object, str] = {
    False: "false",
    "false": "false",
    "offline": "offline",
    "disabled": "disabled",
    "dryrun": "offline",
}


def find_keys(settings: WandbConfig | None, config: Mapping[str, Any]) -> dict[str, Concrete]:
    """Return the paths of the config's own W&B keys, by setting: `enable`, `mode`, `entity`, `project`,
    `disable_artifact`.

    Keys that the lab file names need not be in the config, but their parent table must be.

    Raises:
        LabError: The config has no place for a key that the lab file names.
    """
    if settings is None or settings.keys == "none":
        return {}
    if isinstance(settings.keys, dict):
        return {setting: _locate_key(config, key) for setting, key in settings.keys.items()}
    return known_keys(config)


def _locate_key(config: Mapping[str, Any], key: str) -> Concrete:
    paths = find(config, key) or [(*parent, parse(key)[-1]) for parent in find_parents(config, key)]
    if len(paths) != 1:
        raise LabError(f"track.wandb.keys: {key} does not fit into the config", hint="name a key of the config")
    return paths[0]


def known_keys(config: Mapping[str, Any]) -> dict[str, Concrete]:
    """Return the W&B keys that are recognised by name: those of the topmost table `wandb`, else top-level keys."""
    table = min(_wandb_tables(config, ()), key=len, default=None)
    if table is None:
        return {setting: (name,) for setting, names in TOP_LEVEL_KEYS.items() for name in names
                if name in config and (setting != "enable" or isinstance(config[name], bool))}  # fmt: skip
    return {setting: (*table, name) for setting, names in TABLE_KEYS.items() for name in names
            if has(config, (*table, name))}  # fmt: skip


def _wandb_tables(config: Mapping[str, Any], parent: Concrete) -> Iterator[Concrete]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            if key == TABLE:
                yield (*parent, key)
            yield from _wandb_tables(value, (*parent, key))


def values_of(settings: WandbConfig | None, config: Mapping[str, Any]) -> dict[Concrete, Any]:
    """Return the values to write into the config: one for each of its W&B keys that the lab file sets."""
    if settings is None:
        return {}
    values = {
        "enable": settings.mode != "disabled",
        "mode": settings.mode,
        "entity": settings.entity,
        "project": settings.project,
        "artifacts": settings.artifacts,
        "disable_artifact": not settings.artifacts,
    }
    keys = find_keys(settings, config)
    return {path: values[setting] for setting, path in keys.items() if values[setting] is not None}


def with_values(config: dict[str, Any], values: Mapping[Concrete, Any]) -> dict[str, Any]:
    """Return a copy of the config with these values; the config itself if it already has them."""
    if all(has(config, path) and get(config, path) == value for path, value in values.items()):
        return config
    changed = copy.deepcopy(config)
    for path, value in values.items():
        set_(changed, path, value)
    return changed


def without(config: Mapping[str, Any], paths: Sequence[Concrete]) -> Mapping[str, Any]:
    """Return a copy of the config without these keys; the config itself if it has none of them."""
    present = [path for path in paths if has(config, path)]
    if not present:
        return config
    reduced = copy.deepcopy(dict(config))
    for path in present:
        delete(reduced, path)
    return reduced


def why_not_online(
    settings: WandbConfig | None, launch: LaunchConfig, config: Mapping[str, Any], extra: Sequence[str] = ()
) -> str | None:
    """Return why a run of this config would not log to W&B online, with the key responsible; None if it would.

    Args:
        settings: The W&B settings of the lab file; None: there are none.
        launch: How the trainer is launched.
        config: The config as the trainer gets it.
        extra: Arguments added to the command.
    """
    if settings is not None and settings.mode != "online":
        return f"track.wandb.mode is {settings.mode}"
    words = [*launch.command, *extra]
    variable = launch.env.get("WANDB_MODE") or ("disabled" if launch.env.get("WANDB_DISABLED") else None)
    if variable in OFF:
        return f"launch.env sets WANDB_MODE: {variable}"
    keys = known_keys(config)
    if settings is not None and isinstance(settings.keys, dict):
        keys |= find_keys(settings, config)
    online = settings is not None
    for setting in ("enable", "mode"):
        key = show(keys[setting]) if setting in keys else f"{TABLE}.{setting}"
        argument = _option_value(words, key)
        if argument is not None:
            if (word := argument.lower()) in OFF or word == "0":
                return f"the command sets {key}={argument}"
            online = online or (setting == "mode" and argument == "online")
        elif setting in keys and has(config, keys[setting]):
            value = get(config, keys[setting])
            if launch.config.as_ != "file" and launch.config.leaves_out(keys[setting]):
                if setting == "enable":
                    return f"launch.config.skip keeps {key} from the trainer"
                continue
            if isinstance(value, bool | str) and value in OFF:
                return f"{key} is {OFF[value]} in the config"
            online = online or value == "online"
    return None if online else "nothing enables it"


def _option_value(words: Sequence[str], key: str) -> str | None:
    """Return the last value that a command gives to an option or a Hydra key; `true` for an option without a value;
    None if it does not set it."""
    option = re.compile(rf"(?:--|\+{{0,2}}){re.escape(key).replace('_', '[-_]')}(?:=(.*))?", re.DOTALL)
    value = None
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        match = option.fullmatch(word)
        if match is not None and (word.startswith("--") or match[1] is not None):
            value = match[1] if match[1] is not None else "true" if following.startswith("-") else following
    return value


def wandb_environment(settings: WandbConfig | None, lab: Path, run_dir: str, study: str, run_id: str) -> dict[str, str]:
    """Return the `WANDB_*` variables of a run; none without settings."""
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
        # What can be disabled from outside: uploads of models by Transformers, and of code by wandb itself.
        env |= {"WANDB_LOG_MODEL": "false", "WANDB_DISABLE_CODE": "true"}
    return env


def has_wandb_key(env: Mapping[str, str]) -> bool:
    """Return whether wandb would find an API key: in the environment, or where `wandb login` stores it."""
    if env.get("WANDB_API_KEY"):
        return True
    host = urlparse(env.get("WANDB_BASE_URL", DEFAULT_SERVER)).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
