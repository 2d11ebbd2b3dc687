"""Summaries of run folders, one or thousands."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from looplab.measure.discover import Reader
from looplab.measure.summary import Directions, Goal, MetricSummary, Summariser

_MIN_POOL_SIZE = 16 << 20
"""Number of bytes above which starting a process pool pays off."""

_FILES = re.compile(r"metrics\.jsonl|(?:progress|metrics)\.csv|trainer_summary\.json|events\.out\.tfevents\..+")
_WANDB_RUN = re.compile(r"(?:offline-)?run-.+|latest-run")
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "eval", "dev"})
"""Subfolders in which trainers put the splits of one run."""
_SKIPPED = frozenset({"checkpoints", "checkpoint", "node_modules", "__pycache__", "venv", "site-packages"})


@dataclass(frozen=True, slots=True)
class FolderReading:
    """Options for reading run folders."""

    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Canonical metric names, each with its other names."""
    goals: Mapping[str, Goal] = field(default_factory=dict)
    """Directions of metrics whose names do not tell."""

    def reader(self, run_dir: Path) -> Reader:
        return Reader(run_dir, aliases=self.aliases)


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the run folders below the root; the root itself only if it is one and contains no other."""
    runs: dict[str, None] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in _SKIPPED)
        if folder == str(root) or not _is_run(folder, folders, files):
            continue
        folders.clear()  # subfolders belong to this run
        parent, name = os.path.split(folder)
        runs[parent if name in _SPLITS and parent != str(root) else folder] = None
    if not runs and _is_run(str(root), names_in(root), names_in(root)):
        runs[str(root)] = None
    yield from map(Path, runs)


def _is_run(folder: str, folders: list[str], files: list[str]) -> bool:
    if any(map(_FILES.fullmatch, files)):
        return True
    return "wandb" in folders and any(map(_WANDB_RUN.fullmatch, names_in(Path(folder, "wandb"))))


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder; an empty list if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:  # not a folder, or not readable
        return []


def summarise_many(
    run_dirs: Iterable[Path], reading: FolderReading | None = None, *, jobs: int | None = None
) -> dict[Path, dict[str, MetricSummary]]:
    """Return the summary of each metric of each run.

    Args:
        run_dirs: The folders of the runs.
        reading: How to read them; None: the defaults.
        jobs: The number of processes; None: the number of cores.
    """
    reading = reading or FolderReading()
    folders = list(run_dirs)
    jobs = min(jobs or os.cpu_count() or 1, len(folders))
    if jobs < 2 or sum(_size(run_dir, reading) for run_dir in folders) < _MIN_POOL_SIZE:
        return {run_dir: _summarise(run_dir, reading) for run_dir in folders}
    # Spawn, not fork: the caller may have threads.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        chunk = max(1, min(32, len(folders) // (4 * jobs)))
        found = pool.map(_summarise, folders, [reading] * len(folders), chunksize=chunk)
        return dict(zip(folders, found, strict=True))


def _size(run_dir: Path, reading: FolderReading) -> int:
    """Return the size of the metric files of a folder, in bytes."""
    size = 0
    for source in reading.reader(run_dir).sources():
        with suppress(OSError):
            size += source.path.stat().st_size
    return size


def _summarise(run_dir: Path, reading: FolderReading) -> dict[str, MetricSummary]:
    summariser = Summariser(Directions(reading.goals), kept=1)
    summariser.add(reading.reader(run_dir).poll())
    return summariser.result()
