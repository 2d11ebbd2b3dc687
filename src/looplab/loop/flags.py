"""Flags of `looplab run` that apply to one call: edits of every config (`--steps 2000`), W&B, and proposers.

The training length and the arguments after `--` are the conditions of a run. Judge, best run, search, rules and pruners
compare only runs with equal conditions.
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
from looplab.ledger.roles import Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.measure.run_metrics import is_better, tie_break_value
from looplab.runs.folder import hash_bytes, study_folder
from looplab.runs.redact import redact_argv

if TYPE_CHECKING:
    from looplab.loop.setup import RunOptions, Setup

LENGTH = "steps"
"""Flag that sets the training length."""
DIGITS = 12
"""Length of the hash of the conditions in a run's `point`, in characters."""


@dataclass(frozen=True, slots=True)
class FlagEdit:
    """A flag of the call, translated into an edit of every config."""

    flag: str
    edit: str
    changes: bool
    """Whether the edit changes a value in any base config."""

    def describe(self) -> str:
        return f"{self.flag}: edit {self.edit}"


def edits_of_flags(
    keys_of_flags: Mapping[str, str], flags: Sequence[str], configs: Mapping[str, Mapping[str, Any]]
) -> list[FlagEdit]:
    """Translate flags such as `steps=2000` into edits.

    Args:
        keys_of_flags: Config keys by flag, from `flags` in the lab file.
        configs: Base configs by name; the key must be the same in all of them.

    Raises:
        LabError: A config has no such key or several, or the key differs between configs.
    """
    edits = []
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
        edits.append(FlagEdit(f"--{name} {value}", edit, any(now != int(value) for now in values.values())))
    return edits


def _find_key(named: str | None, flag: str, config_name: str, config: Mapping[str, Any]) -> Concrete:
    """Return the path that a flag edits.

    This is the key that the lab file names, else a key with the flag's name that is at the top level or unique.

    Args:
        named: Key from the lab file; None if it names none.

    Raises:
        LabError: There is no such key, or several.
    """
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
    suggestion = f"; similar: {', '.join(near)}" if near else ""
    hint = _hint(flag, near[0] if near else "KEY")
    raise LabError(f"--{flag}: {config_name} has no key {_plain(flag)}{suggestion}", hint=hint)


def _near(flag: str, places: Sequence[Concrete]) -> list[str]:
    """Return up to 6 keys that the flag may mean: their last component contains its first word, or is similar to it."""
    words = _plain(flag).split("_")
    last = {show(place): _plain(place[-1]) for place in places}
    holding = [key for key, name in last.items() if words[0] in name or words[0].rstrip("s") in name.split("_")]
    similar = difflib.get_close_matches(_plain(flag), list(last.values()), 3, 0.7)
    return list(dict.fromkeys([*holding, *(key for key, name in last.items() if name in similar)]))[:6]


def _hint(flag: str, key: str) -> str:
    return f"name the key in lab.yaml: flags: {{{flag}: {key}}}"


def _is_number(value: Any) -> bool:
    """Return whether a value may be replaced by a number; None counts as an unset one."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _plain(name: Any) -> str:
    """Return a name in lower case, with underscores."""
    return str(name).replace("-", "_").lower()


# -- flags that change the study


def apply_options(study: StudyConfig, options: RunOptions) -> tuple[StudyConfig, list[str]]:
    """Apply the options of the call to the study.

    Returns:
        The changed study, and a sentence on each change.

    Raises:
        LabError: An option does not fit the study.
    """
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
        settings = ", ".join(f"{key}: {value}" for key, value in wandb.items())
        notes.append(f"{' '.join(_wandb_flags(options))}: track.wandb {{{settings}}}")
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
            f"--decide: the next rounds are proposed by {who}"
            if options.decide
            else "--no-decide: only given configs and people's proposals run"
        )
    return (study.model_copy(update=update) if update else study), notes


def _wandb_flags(options: RunOptions) -> list[str]:
    """Return the W&B flags of the call, as typed."""
    return [
        *(["--wandb-online"] if options.wandb_online else []),
        *([f"--wandb-entity {options.wandb_entity}"] if options.wandb_entity is not None else []),
        *([f"--wandb-project {options.wandb_project}"] if options.wandb_project is not None else []),
    ]


# -- conditions


def hash_conditions(extra: Sequence[str], edits: Sequence[FlagEdit]) -> str:
    """Return a short hash of the conditions of a call; empty if it has no extra arguments and the default length."""
    length = [edit.edit for edit in edits if edit.changes and edit.flag.startswith(f"--{LENGTH} ")]
    if not extra and not length:
        return ""
    return hash_bytes(canonical_json([redact_argv(extra), length]))[:DIGITS]


def current_conditions(study: StudyConfig, record: StudyLedger) -> str:
    """Return the conditions under which the study currently compares runs."""
    if study.judge is not None:
        return str((record.judge_state() or {}).get("conditions", ""))
    best = record.best()
    latest = record.runs(limit=1)
    return best.conditions if best is not None else latest[0].conditions if latest else ""


def switch_conditions(setup: Setup, record: StudyLedger) -> str | None:
    """Switch the study to the conditions of this call.

    The judge's state under the former conditions is stored, and restored when they return.

    Returns:
        A sentence on the change; None if the conditions are the same or there are no runs yet.
    """
    now, before = setup.conditions, current_conditions(setup.study, record)
    if setup.options.alone or now == before:
        return None
    with record.ledger.write():
        if setup.study.judge is not None:
            former = record.judge_state() or {}
            others = dict(former.get("others", {}))
            others[before] = {key: value for key, value in former.items() if key not in ("conditions", "others")}
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
    return f"runs of this call are trained with {how}; they are not compared with runs that are trained differently"


def describe_conditions(setup: Setup) -> str:
    """Return the conditions of this call as edits and arguments, with secrets hidden."""
    words = [*setup.edits, *redact_argv(setup.options.extra)]
    return " ".join(words) if setup.conditions else "no extra arguments"


def best_run(study: StudyConfig, record: StudyLedger, conditions: str, outputs: Path) -> RunRow | None:
    """Return the best run of a study without a judge; None if no run qualifies.

    This is the successful run with the best objective under these conditions that is neither imported nor void. Ties
    are broken by `objective.then`.
    """
    measured = [
        run
        for run in record.runs(status="ok")
        if run.objective is not None
        and run.role != Role.IMPORTED
        and run.verdict != "void"
        and run.conditions == conditions
    ]
    objective = study.objective
    if objective is None or not measured:
        return None
    best = (max if objective.goal == "max" else min)(measured, key=lambda run: run.objective or 0.0)
    value = best.objective or 0.0
    for run in measured if objective.then is not None else ():
        if run.objective == best.objective:
            ours, theirs = (tie_break_value(objective.then, outputs / one.id) for one in (run, best))
            if is_better(objective, (value, ours), (value, theirs)):
                best = run
    return best
