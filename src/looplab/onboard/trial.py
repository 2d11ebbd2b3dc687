"""One trial run: `looplab try`. It belongs to a separate study, so that nothing is compared with it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Any, Literal

from looplab.config.lab import RUN_FOLDER, BudgetConfig, LabConfig, Require, StudyConfig, derived_study
from looplab.config.paths import flatten
from looplab.errors import LabError
from looplab.ledger.view import RunRow
from looplab.measure.base import Batch, Curve
from looplab.measure.discover import CURVES, kind_of, reader_of
from looplab.measure.summary import is_clock, plain_name
from looplab.onboard.base import Script, ScriptSetting
from looplab.onboard.diagnose import LINES, Diagnosis, FailedProgram, diagnose, last_line
from looplab.onboard.knobs import suggest, words_of
from looplab.onboard.output_folder import must_be_new
from looplab.onboard.scripts import find_script, is_program, module_file
from looplab.onboard.written import MAX_ENTRIES, WrittenFile, files_below, unread_files
from looplab.runs import folder as run_folder
from looplab.runs.logs import read_tail

Goal = Literal["min", "max"]
SUFFIX = ".try"
MODE = "try"
TRY_S = 300.0
"""Default time limit of a try in seconds."""
INHERITED = (
    "anchor",
    "base",
    "case",
    "data",
    "derive",
    "deterministic",
    "evaluator",
    "executor",
    "flags",
    "keep_going",
    "measure",
    "mix",
    "needs_exec",
    "normalise",
    "pipeline",
    "resources",
    "retry",
    "round_size",
    "seed",
    "slots",
    "stages",
    "suite",
    "track",
)


def try_study(lab: LabConfig, study: StudyConfig, edits: Sequence[str], seconds: float | None) -> StudyConfig:
    """Return the study of a single run: launch and sources of the real one, without objective, knobs and judge.

    Nothing is searched, so a short run may have values that no knob would take.

    Args:
        edits: What to change in the base config, for this run alone.
        seconds: How long the run may take; None: as long as the study allows.
    """
    name = study.name + SUFFIX
    if name in lab.studies:
        raise LabError(f"the lab has a study {name!r}, the name reserved for tries of {study.name!r}", hint="rename it")
    launch = study.launch if seconds is None else study.launch.model_copy(update={"timeout": seconds})
    return derived_study(
        study,
        INHERITED,
        name=name,
        launch=launch,
        modes={MODE: list(edits)},
        knobs={},
        constraints=[],
        objective=None,
        holdout=None,
        proposers=[],
        warm_start=None,
        probe=None,
        watch=[],
        judge=None,
        budget=BudgetConfig(),
        require=Require(),
    )


# -- what a run measured

SOURCES = {
    "jsonl": "metrics.jsonl",
    "wandb": "W&B",
    "wandb_history": "W&B",
    "wandb_summary": "W&B summary",
    "tensorboard": "TensorBoard",
    "csv": "CSV",
    "stdout": "printed",
    "log_file": "log file",
    "trainer_state": "trainer_state.json",
    "trainer_summary": "summary file",
}
"""Kind of metric source → its name for people."""
MIN_POINTS = 6
"""Minimum number of points for an estimate of the noise."""


@dataclass(frozen=True, slots=True)
class MeasuredMetric:
    """A metric, as observed in one run."""

    name: str
    source: str
    """Where it was found: `TensorBoard`, `printed`, …"""
    file: str | None
    """The file, relative to the run folder; None: several."""
    points: int
    first: float | None
    last: float | None
    every_steps: float | None
    """Usual distance of two points, in steps of the trainer; None: fewer than two points."""
    per_minute: float | None
    noise: float | None
    """Typical jump between neighbouring points relative to the range of the curve; None: too few points."""
    is_count: bool = False
    """Whether it counts up evenly in whole numbers, as the index of a loop does."""


def measured_metrics(study: StudyConfig, run: RunRow, run_dir: Path) -> list[MeasuredMetric]:
    """Return the metrics of an ended run, those with most points first."""
    reader = reader_of(study, run_dir)
    batch: Batch = reader.poll(final=run.signal is None)
    minutes = run.seconds / 60 if run.seconds else None
    found = []
    for name, curve in batch.items():
        source = reader.source_of(name)
        file = os.path.relpath(source.path, run_dir) if source is not None else None
        values = [value for value in curve.values if math.isfinite(value)]
        kind = source.kind if source is not None else ""
        found.append(
            MeasuredMetric(
                name=name,
                source=SOURCES.get(kind, kind),
                file="train.log" if kind == "stdout" else file,
                points=len(values),
                first=values[0] if values else None,
                last=values[-1] if values else None,
                every_steps=_distance(curve),
                per_minute=len(values) / minutes if minutes else None,
                noise=_noise(values),
                is_count=_is_count(values),
            )
        )
    return sorted(found, key=lambda metric: -metric.points)


def _distance(curve: Curve) -> float | None:
    distances = [later - earlier for earlier, later in pairwise(curve.steps) if later > earlier]
    return statistics.median(distances) if distances else None


def _is_count(values: Sequence[float]) -> bool:
    distances = {later - earlier for earlier, later in pairwise(values)}
    return len(values) > 2 and len(distances) == 1 and min(distances) > 0 and values[0].is_integer()


def _noise(values: Sequence[float]) -> float | None:
    """Return the median jump over the later half of a curve, as a standard deviation relative to the curve's range."""
    spread = max(values) - min(values) if values else 0.0
    if len(values) < MIN_POINTS or not 0 < spread < math.inf:
        return None
    late = values[len(values) // 2 :]
    jumps = [abs(later - earlier) for earlier, later in pairwise(late)]
    # The median of |a - b| is 0.954 standard deviations for two normal values.
    return statistics.median(jumps) / 0.954 / spread


# -- how long a full run takes

COUNTED = re.compile(
    r"(?i)\b(?P<what>epochs?|steps?|global_step|iter|iters|iteration|iterations|updates?|episodes?|rounds?|timesteps?"
    r"|trials?|folds?)\b\W{0,6}(?P<done>\d[\d,]*)\s*(?:/|of)\s*(?P<total>\d[\d,]*)"
)
EPOCH = re.compile(r"(?i)\bepoch\b\W{0,6}(?P<done>\d+)")


def lengths(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the settings of a config that say how long to train."""
    return {
        name: float(value)
        for name, value in flatten(config).items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and value > 0
        and suggest(ScriptSetting(name, "int", int(value))).role == "length"
    }


def share_done(log: str, step: float | None, wanted: Mapping[str, float]) -> float | None:
    """Return how much of its length a run that was stopped has done, from 0 to 1; None if that is not known.

    Args:
        log: The end of its output.
        step: Its largest step.
        wanted: The lengths of its config.
    """
    counted = list(COUNTED.finditer(log))
    for kind in ("epoch", ""):
        for found in reversed(counted):
            done, total = (int(found[key].replace(",", "")) for key in ("done", "total"))
            if found["what"].lower().startswith(kind) and 0 < done <= total and total > 1:
                return done / total
    epochs = next((total for name, total in wanted.items() if {"epoch", "epochs"} & set(words_of(name))), None)
    numbers = [int(found["done"]) for found in EPOCH.finditer(log)]
    if epochs is not None and numbers:
        done = numbers[-1] + (min(numbers) == 0)
        return done / epochs if 0 < done <= epochs else None
    others = [total for name, total in wanted.items() if not {"epoch", "epochs"} & set(words_of(name))]
    if epochs is None and len(others) == 1 and step is not None and 0 < step <= others[0]:
        return step / others[0]
    return None


def full_run_seconds(
    seconds: float, share: float | None, tried: Mapping[str, float], full: Mapping[str, float]
) -> float | None:
    """Return about how long a run of the base config takes; None if that is not known.

    Args:
        seconds: How long the try ran.
        share: How much of its own length it has done.
        tried: The lengths of its config.
        full: Those of the base config.
    """
    if share is None:
        return None
    ratio = math.prod(full[name] / value for name, value in tried.items() if name in full)
    return seconds / share * ratio


# -- everything about one run


@dataclass(frozen=True, slots=True)
class Observation:
    """What one run showed."""

    study: str
    run: str
    seed: int | None
    status: str
    seconds: float | None
    command: tuple[str, ...]
    metrics: tuple[MeasuredMetric, ...]
    settings: Mapping[str, Any]
    """Its config, flat."""
    limit_s: float | None
    """How long it was allowed to run."""
    ended_by: str | None
    """What ended it when its time was over: `itself`, `SIGTERM` or `SIGKILL`; None: it was not stopped."""
    ended_after_s: float | None
    """How long that took."""
    peak_memory_mb: float | None
    full_run_s: float | None
    wrote: tuple[WrittenFile, ...]
    unread: tuple[str, ...]
    """Files that may hold its results, in formats that are not read."""
    must_be_new: bool | None
    """Whether its output folder must not exist; None: not known."""
    last_line: str
    diagnosis: Diagnosis | None
    """Why it failed."""

    @property
    def measured_elsewhere(self) -> list[str]:
        """Files outside its folder that have metrics: tables, event files."""
        kinds = (*CURVES, "trainer_summary")
        return [one.file for one in self.wrote if kind_of(os.path.basename(one.file)) in kinds]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def observe(
    lab: LabConfig, trial: StudyConfig, run: RunRow, base: Mapping[str, Any], wrote: Sequence[WrittenFile]
) -> Observation:
    """Return what an ended run showed.

    Args:
        base: The base config, without the edits of the try.
        wrote: Files that it wrote outside its folder.
    """
    run_dir = run_folder.study_folder(lab.folder, trial.name) / run.id
    summary = run_folder.read_json(run_dir, "summary.json", strict=False)
    config = run_folder.read_json(run_dir, "config.json", strict=False)
    log = read_tail(run_folder.record_file(run_dir, "train.log"), lines=LINES)
    message = next((note for note in summary.get("notes", ()) if isinstance(note, str)), "")
    argv = run_folder.read_json(run_dir, "run.json", strict=False).get("argv")
    command = tuple(map(str, argv)) if isinstance(argv, list) else ()
    status = run.status or run.state
    limit = trial.launch.timeout
    tried = lengths(config)
    step = summary.get("steps")
    share = 1.0 if status == "ok" else share_done(log, step, tried) if status in ("timeout", "stopped") else None
    memory = summary.get("max_rss_mb")
    diagnosis = diagnose_run(lab.folder, trial, run) if status == "failed" else None
    ended_by = ended_after = None
    if status == "timeout" and limit is not None and run.seconds is not None:
        ended_by = {None: "itself", 15: "SIGTERM", 9: "SIGKILL"}.get(run.signal, f"signal {run.signal}")
        ended_after = max(0.0, run.seconds - limit)
    return Observation(
        study=trial.name,
        run=run.id,
        seed=run.seed,
        status=status,
        seconds=run.seconds,
        command=command,
        metrics=tuple(measured_metrics(trial, run, run_dir)),
        settings=flatten(config) | _seed_beside_config(trial, run),
        limit_s=limit,
        ended_by=ended_by,
        ended_after_s=ended_after,
        peak_memory_mb=float(memory) if isinstance(memory, int | float) else None,
        full_run_s=None if run.seconds is None else full_run_seconds(run.seconds, share, tried, lengths(base)),
        wrote=tuple(wrote),
        unread=unread_files([*files_below(run_dir), *(one.file for one in wrote)]),
        must_be_new=must_be_new(
            trial.launch,
            script_of(lab, trial.launch.command),
            status=status,
            kind=diagnosis.kind if diagnosis is not None else None,
            new_files=[one.file for one in wrote if one.is_new],
        ),
        last_line=last_line(log) or last_line(message),
        diagnosis=diagnosis,
    )


def _seed_beside_config(trial: StudyConfig, run: RunRow) -> dict[str, Any]:
    """Return the seed of a run as a setting if it reaches the trainer outside its config; empty: it does not."""
    texts = (*trial.launch.command, *trial.launch.env.values())
    return {"seed": run.seed} if run.seed is not None and any("{seed}" in text for text in texts) else {}


def diagnose_run(lab: Path, study: StudyConfig, run: RunRow) -> Diagnosis | None:
    """Return why a run failed; None if it is not known."""
    run_dir = run_folder.study_folder(lab, study.name) / run.id
    log = read_tail(run_folder.record_file(run_dir, "train.log"), lines=LINES)
    notes = run_folder.read_json(run_dir, "summary.json", strict=False).get("notes", ())
    argv = run_folder.read_json(run_dir, "run.json", strict=False).get("argv")
    return diagnose(
        FailedProgram(
            text=log if log.strip() else "\n".join(map(str, notes)),
            code=run.exit_code,
            signal=run.signal,
            script=script_name([str(word) for word in argv] if isinstance(argv, list) else []),
            settings=tuple(flatten(run_folder.read_json(run_dir, "config.json", strict=False))),
            own=own_modules(lab),
            in_run_dir=study.launch.cwd == RUN_FOLDER,
        )
    )


def script_name(command: Sequence[str]) -> str:
    """Return the name of the script in a command."""
    for i, word in enumerate(command):
        if word == "-m" and i + 1 < len(command):
            return f"-m {command[i + 1]}"
        if word.endswith((".py", ".sh")) and not word.endswith("with_config.py"):
            return os.path.basename(word)
    return os.path.basename(command[0]) if command else "the script"


def own_modules(folder: Path) -> frozenset[str]:
    """Return the names of the modules and packages of a project, two levels deep."""
    names = set()
    for pattern in ("*.py", "*/*.py"):
        for path in islice(folder.glob(pattern), MAX_ENTRIES):
            names |= {path.stem, *path.relative_to(folder).parts[:-1]}
    return frozenset(names)


# -- two runs

Comparison = Literal["same config, same numbers", "same config, other numbers", "no difference", "difference"]


def compare(one: Observation, other: Observation) -> Comparison | None:
    """Return whether two runs measured the same; None if they have no metric in common.

    Times, and metrics that only repeat a setting, are left out: a script that prints its options has not used them yet.
    """
    ours, theirs = ({metric.name: metric for metric in run.metrics} for run in (one, other))
    echoed = set(map(plain_name, one.settings))
    shared = [name for name in ours if name in theirs and not is_clock(name) and plain_name(name) not in echoed]
    if not shared:
        return None
    same = all(
        (ours[name].first, ours[name].last, ours[name].points)
        == (theirs[name].first, theirs[name].last, theirs[name].points)
        for name in shared
    )
    if one.settings == other.settings:
        return "same config, same numbers" if same else "same config, other numbers"
    return "no difference" if same else "difference"


def script_of(lab: LabConfig, command: Sequence[str]) -> Script | None:
    """Return the Python script that a command starts; None if it is not known."""
    for i, word in enumerate(command):
        if word == "-m" and i + 1 < len(command):
            name, python = command[i + 1], shutil.which(command[0]) or sys.executable
            with contextlib.suppress(LabError):
                return Script(lab.folder, tuple(command), module_file(name, lab.folder, python), python, module=name)
        elif word.endswith(".py") and not word.endswith("with_config.py") and (lab.folder / word).is_file():
            return Script(lab.folder, tuple(command), lab.folder / word, "python")
    if command and is_program(command[0], lab.folder):
        commands = takewhile(lambda word: not word.startswith("-") and "{" not in word, command)
        return find_script(list(commands), lab.folder)
    return None
