"""Configs and metrics of runs that other tools recorded.

Supported are folders (of the autopilot, LeRobot, W&B, TensorBoard, Lightning, Hydra or any trainer that writes metrics
and a config) and Optuna storages. They are never modified. What cannot be read is reported, not raised.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from looplab.config.files import read_config
from looplab.config.lab import StudyConfig
from looplab.errors import LabError
from looplab.measure.discover import Reader, describe
from looplab.measure.folders import find_runs, names_in
from looplab.measure.summary import Directions, MetricSummary, Summariser, objective_value
from looplab.untrusted import UntrustedError, clean_line, dump_json, mend, real_path

CONFIGS = (
    "record/config.json", "config.json", "config.yaml", "config.yml", "config.toml", ".hydra/config.yaml",
    "train_config.json", "hparams.yaml", "params.json", "args.json", "args.yaml", "files/config.yaml",
)  # fmt: skip
"""Paths of a run's config, relative to its folder, as used by trainers and tools."""
CONFIG_PATTERNS = ("checkpoints/*/pretrained_model/train_config.json", "wandb/*/files/config.yaml")
OVERRIDE = "override.json"
"""The changes of an autopilot proposal, relative to the base config."""
MAX_MATCHES = 64
"""Files that match a pattern and are read."""
MAX_STORAGE = 2 << 30
"""Maximum size of an Optuna storage, in bytes."""
_WANDB_RUN = re.compile(r"(?:offline-)?run-.+")
_TRACES = (*CONFIGS[1:6], OVERRIDE, "run.json")
"""Files that identify a folder without metrics as a run."""


@dataclass(frozen=True, slots=True)
class ForeignRun:
    """A run of another tool."""

    kind: str
    """folder | optuna"""
    source: str
    """Its path, or the storage and the number of the trial."""
    digest: str
    """A hash of the files that were read."""
    config: dict[str, Any]
    """The config as the tool recorded it."""
    config_from: str
    """The file from which the config was read."""
    objective: float | None
    status: str = "ok"
    """ok | failed"""
    metrics: dict[str, MetricSummary] = field(default_factory=dict)
    steps: float | None = None
    files: tuple[Path, ...] = ()
    """The files that were read from its folder."""
    is_flat: bool = False
    """Whether the config keys are bare names without sections, as in an Optuna study."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A folder or trial that cannot be imported."""

    source: str
    why: str


Count = Callable[[Mapping[str, Any]], int]
"""Counts the study's knobs in a config; the file with the most becomes the run's config."""


def run_folders(root: Path) -> list[Path]:
    """Return the run folders below a folder, or the folder itself, including runs without metrics."""
    if _has_wandb_file(root):
        return [root]
    inner = [root / name for name in sorted(names_in(root)) if _WANDB_RUN.fullmatch(name)]
    if root.name == "wandb" and inner:
        return [path for path in inner if path.is_dir()]
    runs = list(find_runs(root))
    if runs == [root] and (root / "wandb").is_dir():
        several = [path for path in sorted((root / "wandb").iterdir()) if _WANDB_RUN.fullmatch(path.name)]
        others = {name for name in names_in(root) if name.endswith((".jsonl", ".csv", ".json"))}
        if len(several) > 1 and not others:
            return several  # W&B keeps all runs of a project in one folder
    return sorted({*runs, *_without_metrics(root, runs)})


def _has_wandb_file(folder: Path) -> bool:
    return any(name.startswith("run-") and name.endswith(".wandb") for name in names_in(folder))


def _without_metrics(root: Path, runs: Sequence[Path]) -> Iterator[Path]:
    """Yield siblings of the runs, or the root, that look like a run but have no metrics."""
    parents = {path.parent for path in runs if path != root} or {root}
    candidates = [parent / name for parent in sorted(parents) for name in sorted(names_in(parent))]
    for path in [*candidates, *([] if runs else [root])]:
        if path not in runs and path.is_dir() and any((path / trace).is_file() for trace in _TRACES):
            yield path


def read_folder(path: Path, study: StudyConfig, mapped: Mapping[str, str], count: Count) -> ForeignRun | Unreadable:
    """Read a run from its folder.

    Args:
        mapped: The tool's names of metrics and config keys → the study's names.
        count: Counts the knobs in a config.
    """
    try:
        return _read_folder(path, study, mapped, count)
    except (LabError, UntrustedError, OSError, ValueError, RecursionError) as error:
        return Unreadable(str(path), describe(error))


def _read_folder(path: Path, study: StudyConfig, mapped: Mapping[str, str], count: Count) -> ForeignRun | Unreadable:
    hidden = (study.holdout.metric,) if study.holdout is not None else ()
    reader = Reader(path, "auto", _aliases(study, mapped), study.measure.stdout, hidden)
    summariser = Summariser(Directions(study.goals), kept=study.last_values)
    summariser.add(reader.poll(final=True))
    while reader.behind:
        summariser.add(reader.poll(final=True))
    metrics = summariser.result()
    sources = [source.path for source in reader.sources() if source.path.is_file()]
    if not metrics:
        problems = "; ".join(f"{name}: {why}" for name, why in reader.problems.items())
        return Unreadable(str(path), f"no metrics can be read ({problems})" if problems else _why_no_metrics(path))
    notes = [f"{name} could not be read completely: {why}" for name, why in reader.problems.items()]
    best: tuple[int, dict[str, Any], str, Path | None] = (-1, {}, "", None)
    for config, name, file in _configs(path, sources, notes):
        hits = count(config)
        if hits > best[0]:
            best = (hits, config, name, file)
    _, config, name, file = best
    if not name:
        notes.append("it has no config")
    value = None
    objective = study.objective
    if objective is not None and not reader.is_doubtful(objective.metric):
        value = objective_value(summariser, objective.metric, objective.at)
    files = tuple(dict.fromkeys([*sources, *([file] if file is not None else [])]))
    return ForeignRun(
        "folder", str(path), _digest(path, files), config, name, value, metrics=metrics, steps=reader.last_step,
        files=files, is_flat=name == "hparams", notes=tuple(notes),
    )  # fmt: skip


def _why_no_metrics(path: Path) -> str:
    present = [name for name in ("trainer_summary.json", "metrics.jsonl") if (path / name).exists()]
    if present:
        return f"{present[0]} has no metrics"
    return "it has no trainer_summary.json, metrics.jsonl, CSV, W&B or TensorBoard file"


def _aliases(study: StudyConfig, mapped: Mapping[str, str]) -> dict[str, list[str]]:
    aliases = {name: list(others) for name, others in study.measure.aliases.items()}
    for theirs, ours in mapped.items():
        aliases.setdefault(ours, []).insert(0, theirs)
    return aliases


def _configs(
    path: Path, sources: Sequence[Path], notes: list[str]
) -> Iterator[tuple[dict[str, Any], str, Path | None]]:
    """Yield every config in the folder, with the name and path of its file."""
    files = [path / name for name in CONFIGS]
    for pattern in CONFIG_PATTERNS:
        files += sorted(path.glob(pattern))[-MAX_MATCHES:]
    for file in files:
        if file.is_file():
            try:
                yield _unwrapped(read_config(file)), os.path.relpath(file, path), file
            except (LabError, UntrustedError, OSError, ValueError) as error:
                notes.append(f"{os.path.relpath(file, path)} cannot be read: {describe(error)}")
    for file in sources:
        if file.suffix == ".wandb":
            from looplab.measure.wandb_log import read_wandb_config

            config = mend(read_wandb_config(file))
            if config:
                yield config, os.path.relpath(file, path), file
        elif file.name.startswith("events.out.tfevents."):
            from looplab.measure.hparams import read_hparams

            hparams = mend(read_hparams(file))
            if hparams:
                yield hparams, "hparams", file
    override = path / OVERRIDE
    if override.is_file():
        with suppress(LabError, UntrustedError, OSError, ValueError):
            config = read_config(override)
            if not {"edits", "proposer"} <= config.keys():  # not looplab's own, which has edits
                yield config, OVERRIDE, override


def _unwrapped(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without the wrapping of W&B's `config.yaml`: `{lr: {desc: null, value: 0.1}}`."""
    if "wandb_version" not in config and "_wandb" not in config:
        return config
    return {
        key: value["value"]
        for key, value in config.items()
        if key not in ("wandb_version", "_wandb") and isinstance(value, dict) and "value" in value
    }


def _digest(path: Path, files: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for file in sorted(files):
        with file.open("rb") as stream:
            total.update(os.path.relpath(file, path).encode(errors="replace") + b"\0")
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


# -- Optuna


def read_optuna(storage: str, name: str | None, study: StudyConfig) -> tuple[list[ForeignRun], list[Unreadable]]:
    """Read the trials of a study in an Optuna storage: `sqlite:///file.db`, or a journal file.

    Raises:
        LabError: Optuna is not installed, there is no such storage or study, or its objective differs from the lab's.
    """
    try:
        import optuna
    except ImportError:
        raise LabError("Optuna is not installed", hint="pip install 'looplab[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    file = Path(storage.removeprefix("sqlite:///").removeprefix("journal:"))
    if "://" in str(file) or not file.is_file():
        raise LabError(f"there is no storage {storage}", hint="sqlite:///FILE, or a journal file")
    if file.stat().st_size > MAX_STORAGE:
        raise LabError(f"{file} is larger than {MAX_STORAGE >> 30} GB")
    with tempfile.TemporaryDirectory(prefix="looplab-optuna-") as folder:
        copy = Path(folder) / "storage"
        shutil.copyfile(file, copy)  # a copy, since Optuna writes to storages that it opens
        for suffix in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{file}{suffix}", f"{copy}{suffix}")
        try:
            opened = _open_storage(storage, copy)
            names = [one.study_name for one in opened.get_all_studies()]
            if name is None and len(names) != 1:
                raise LabError(f"{storage} has {len(names)} studies", hint=f"--optuna-study: {', '.join(names[:8])}")
            if name is not None and name not in names:
                raise LabError(f"{storage} has no study {name!r}", hint=f"it has {', '.join(names[:8]) or 'none'}")
            loaded = optuna.load_study(study_name=name or names[0], storage=opened)
            return _trials(loaded, f"{real_path(file)}#{name or names[0]}", study)
        except LabError:
            raise
        except Exception as error:
            raise LabError(f"{storage} cannot be read: {describe(error)}") from error


def _open_storage(storage: str, copy: Path) -> Any:
    from optuna.storages import JournalStorage, RDBStorage

    with copy.open("rb") as stream:
        is_sqlite = stream.read(15) == b"SQLite format 3"
    if is_sqlite:
        return RDBStorage(f"sqlite:///{copy}")
    if storage.startswith("sqlite:"):
        raise LabError(f"{storage} is not an SQLite database")
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(copy)))


def _trials(loaded: Any, where: str, study: StudyConfig) -> tuple[list[ForeignRun], list[Unreadable]]:
    objective = study.objective
    index = _objective_index(loaded, study)
    goal = loaded.directions[index].name.lower()
    if objective is not None and goal != ("maximize" if objective.goal == "max" else "minimize"):
        raise LabError(
            f"the Optuna study {loaded.study_name!r} is set to {goal}, but the goal of this study is {objective.goal}",
            hint="their objectives differ",
        )
    runs, unreadable = [], []
    for trial in loaded.get_trials(deepcopy=False):
        source = f"{where}#{trial.number}"
        state = trial.state.name
        if state not in ("COMPLETE", "FAIL", "PRUNED") or not trial.params:
            unreadable.append(Unreadable(source, f"its state is {state}" if trial.params else "it has no parameters"))
            continue
        value = float(trial.values[index]) if state == "COMPLETE" and trial.values else None
        config = mend(dict(trial.params))
        content = dump_json([where, trial.number, config, value, state], sort_keys=True)
        metrics: dict[str, MetricSummary] = {}
        if value is not None and objective is not None:
            metrics[objective.metric] = MetricSummary(value, value, value, 0.0, None, None, 1, 0, False, 0.0)
        runs.append(
            ForeignRun(
                "optuna", source, hashlib.sha256(content.encode()).hexdigest(), config, "its parameters", value,
                "failed" if state == "FAIL" else "ok", metrics, is_flat=True,
                notes=("Optuna pruned it",) if state == "PRUNED" else (),
            )
        )  # fmt: skip
    return runs, unreadable


def _objective_index(loaded: Any, study: StudyConfig) -> int:
    """Return the index of the study's objective among the values of a trial."""
    if len(loaded.directions) == 1:
        return 0
    names = list(loaded.metric_names or ())
    metric = study.objective.metric if study.objective is not None else ""
    if metric in names:
        return names.index(metric)
    listed = clean_line(", ".join(map(str, names)) or "without names", 200)
    raise LabError(f"the Optuna study has {len(loaded.directions)} objectives ({listed}), none of which is {metric!r}")
