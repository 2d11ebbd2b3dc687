"""The flags of `looplab run` that hold for one call: edits of every config (`--steps 2000`), W&B, who decides.

Runs of calls that train for other lengths, or with other arguments after `--`, are trained under other conditions. They
are compared among themselves only: by the judge, as the best run, by search, rules and pruners.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.config.edits import Edit, Op
from looplab.config.files import canonical_json
from looplab.config.lab import StudyConfig, WandbConfig
from looplab.config.paths import Concrete, find, get, leaves, show
from looplab.errors import LabError
from looplab.judge.base import JudgeState
from looplab.ledger.study import IMPORTED, RunRow, StudyLedger
from looplab.measure.run_metrics import is_better, tie_break_value
from looplab.runs.folder import hash_bytes, study_folder
from looplab.runs.redact import redact_argv

if TYPE_CHECKING:
    from looplab.loop.setup import RunOptions, Setup

LENGTH = "steps"
"""The flag that says how long a run trains."""
DIGITS = 12
"""Characters of the hash of the conditions in a run's `point`."""


@dataclass(frozen=True, slots=True)
class FlagEdit:
    """A flag of the call, as an edit of every config."""

    flag: str
    edit: str
    changes: bool
    """Whether a base config has another value."""

    def describe(self) -> str:
        return f"{self.flag}: edit {self.edit}"


def edits_of_flags(
    keys_of_flags: Mapping[str, str], flags: Sequence[str], configs: Mapping[str, Mapping[str, Any]]
) -> list[FlagEdit]:
    """Return the edits that flags such as `steps=2000` stand for.

    Args:
        keys_of_flags: What the lab file says under `flags`.
        configs: The base configs by their names; the key must be the same in all of them.

    Raises:
        LabError: A config has no such key, or several.
    """
    found = []
    for text in flags:
        name, _, value = text.partition("=")
        places = {
            config_name: _find_key(keys_of_flags.get(name), name, config_name, config)
            for config_name, config in configs.items()
        }
        keys = sorted({show(place) for place in places.values()})
        if len(keys) > 1:
            named = ", ".join(f"{show(place)} in {config_name}" for config_name, place in places.items())
            raise LabError(f"--{name}: the configs have different keys for it: {named}", hint=_hint(name, keys[0]))
        values = {config_name: get(configs[config_name], place) for config_name, place in places.items()}
        edit = str(Edit(keys[0], Op.SET, int(value)))
        found.append(FlagEdit(f"--{name} {value}", edit, any(now != int(value) for now in values.values())))
    return found


def _find_key(named: str | None, flag: str, config_name: str, config: Mapping[str, Any]) -> Concrete:
    """The place that a flag edits: the one that the lab file names, else a key of its name: at the top, or the only
    one."""
    if named is not None:
        places = find(config, named)
        if len(places) != 1:
            raise LabError(f"flags.{flag}: {config_name} has {'no' if not places else 'several'} {named}")
        return places[0]
    values = dict(leaves(config))
    every = list(values)
    same = [place for place in every if _plain(place[-1]) == _plain(flag) and _is_number(values[place])]
    if len(same) > 1:
        same = [place for place in same if len(place) == 1] or same
    if len(same) == 1:
        return same[0]
    if same:
        names = ", ".join(map(show, same))
        raise LabError(f"--{flag}: {config_name} has several such keys: {names}", hint=_hint(flag, show(same[0])))
    near = _near(flag, every)
    said = f"; similar: {', '.join(near)}" if near else ""
    hint = _hint(flag, near[0] if near else "KEY")
    raise LabError(f"--{flag}: {config_name} has no key {_plain(flag)}{said}", hint=hint)


def _near(flag: str, places: Sequence[Concrete]) -> list[str]:
    """Keys that the flag may mean: those whose last part contains a word of it, or is similar."""
    words = _plain(flag).split("_")
    last = {show(place): _plain(place[-1]) for place in places}
    holding = [key for key, name in last.items() if words[0] in name or words[0].rstrip("s") in name.split("_")]
    similar = difflib.get_close_matches(_plain(flag), list(last.values()), 3, 0.7)
    return list(dict.fromkeys([*holding, *(key for key, name in last.items() if name in similar)]))[:6]


def _hint(flag: str, key: str) -> str:
    return f"say in lab.yaml which key it is: flags: {{{flag}: {key}}}"


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _plain(name: Any) -> str:
    return str(name).replace("-", "_").lower()


# -- flags that change the study


def apply_options(study: StudyConfig, options: RunOptions) -> tuple[StudyConfig, list[str]]:
    """Return the study as this call wants it, and a sentence on each change."""
    update: dict[str, Any] = {}
    notes = []
    wandb = {
        **({"mode": "online"} if options.wandb_online else {}),
        **({"entity": options.wandb_entity} if options.wandb_entity is not None else {}),
        **({"project": options.wandb_project} if options.wandb_project is not None else {}),
    }
    if wandb:
        given = study.track.wandb.model_dump() if study.track.wandb is not None else {}
        update["track"] = study.track.model_copy(update={"wandb": WandbConfig.model_validate({**given, **wandb})})
        said = ", ".join(f"{key}: {value}" for key, value in wandb.items())
        notes.append(f"{' '.join(_wandb_flags(options))}: track.wandb {{{said}}}")
    if options.variants is not None:
        if all(entry.rules is None for entry in study.proposers):
            raise LabError(
                f"--variants-per-run: study {study.name!r} has no rules", hint="name them: proposers: [{rules: file}]"
            )
        update["proposers"] = [
            entry if entry.rules is None else entry.model_copy(update={"variants": options.variants})
            for entry in study.proposers
        ]
        notes.append(f"--variants-per-run {options.variants}: proposers.rules {{variants: {options.variants}}}")
    if options.decide is not None:
        names = [next(iter(entry.model_fields_set - {"variants"})) for entry in study.proposers if entry.queue is None]
        who = ", ".join(names) or "nobody: the study has no rules, search or agent"
        notes.append(
            f"--decide: the next rounds are decided by {who}"
            if options.decide
            else "--no-decide: only configs and proposals of people are run"
        )
    return (study.model_copy(update=update) if update else study), notes


def _wandb_flags(options: RunOptions) -> list[str]:
    return [
        *(["--wandb-online"] if options.wandb_online else []),
        *([f"--wandb-entity {options.wandb_entity}"] if options.wandb_entity is not None else []),
        *([f"--wandb-project {options.wandb_project}"] if options.wandb_project is not None else []),
    ]


# -- conditions


def hash_conditions(extra: Sequence[str], edits: Sequence[FlagEdit]) -> str:
    """Return a short hash of what runs must have in common to be compared; empty for a call without such flags."""
    length = [edit.edit for edit in edits if edit.changes and edit.flag.startswith(f"--{LENGTH} ")]
    if not extra and not length:
        return ""
    return hash_bytes(canonical_json([redact_argv(extra), length]))[:DIGITS]


def current_conditions(study: StudyConfig, record: StudyLedger) -> str:
    """The conditions under which the study compares runs at the moment."""
    if study.judge is not None:
        return str((record.judge_state() or {}).get("conditions", ""))
    best = record.best()
    latest = record.runs(limit=1)
    return best.conditions if best is not None else latest[0].conditions if latest else ""


def switch_conditions(setup: Setup, record: StudyLedger) -> str | None:
    """Compare from now on only runs under the conditions of this call; return a sentence if these are other ones.

    What was decided under the former conditions is put aside and taken up again when they come back.
    """
    now, before = setup.conditions, current_conditions(setup.study, record)
    if setup.options.alone or now == before:
        return None
    with record.ledger.write():
        if setup.study.judge is not None:
            kept = record.judge_state() or {}
            others = dict(kept.get("others", {}))
            others[before] = {key: value for key, value in kept.items() if key not in ("conditions", "others")}
            judge_state = others.pop(now, None) or JudgeState().as_dict()
            record.set_judge_state({**judge_state, "conditions": now, "others": others})
            champion = judge_state.get("champion")
            best = record.run(champion) if champion else None
        else:
            outputs = study_folder(setup.lab, setup.study.name)
            best = best_run(setup.study, record, now, outputs)
        if (best and best.id) != ((old := record.best()) and old.id):
            record.set_best(best.id if best else None, best.objective if best else None)
    if not record.runs():
        return None
    how = describe_conditions(setup)
    return f"runs of this call are trained with {how}; they are not compared with runs that are trained otherwise"


def describe_conditions(setup: Setup) -> str:
    words = [*setup.edits, *redact_argv(setup.options.extra)]
    return " ".join(words) if setup.conditions else "no extra arguments"


def best_run(study: StudyConfig, record: StudyLedger, conditions: str, outputs: Path) -> RunRow | None:
    """Without a judge, the best run is the best measured one under these conditions that nobody has declared void."""
    measured = [
        run
        for run in record.runs(status="ok")
        if run.objective is not None and run.role != IMPORTED and run.verdict != "void" and run.conditions == conditions
    ]
    wanted = study.objective
    if wanted is None or not measured:
        return None
    best = (max if wanted.goal == "max" else min)(measured, key=lambda run: run.objective or 0.0)
    value = best.objective or 0.0
    for run in measured if wanted.then is not None else ():
        if run.objective == best.objective:
            ours, theirs = (tie_break_value(wanted.then, outputs / one.id) for one in (run, best))
            if is_better(wanted, (value, ours), (value, theirs)):
                best = run
    return best
