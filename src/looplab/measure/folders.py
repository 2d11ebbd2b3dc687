"""Summaries of run folders, one or thousands, with a cache for unchanged ones."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, field
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import orjson

from looplab.config.files import write_atomic
from looplab.measure.discover import Reader
from looplab.measure.summary import Directions, Goal, MetricSummary, Summariser

CACHE_NAME = ".measure-cache.json"
_VERSION = 1
_MIN_POOL_SIZE = 16 << 20
"""Number of bytes above which starting a process pool pays off."""

_FILES = re.compile(r"metrics\.jsonl|(?:progress|metrics)\.csv|trainer_summary\.json|events\.out\.tfevents\..+")
_WANDB_RUN = re.compile(r"(?:offline-)?run-.+|latest-run")
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "eval", "dev"})
"""Subfolders in which trainers put the splits of one run."""
_SKIPPED = frozenset({"checkpoints", "checkpoint", "node_modules", "__pycache__", "venv", "site-packages"})

Signature = list[tuple[str, int, int]]
"""Relative path, size in bytes and modification time in ns of each metric file of a folder."""


@dataclass(frozen=True, slots=True)
class FolderReading:
    """Options for reading run folders."""

    kinds: tuple[str, ...] | Literal["auto"] = "auto"
    """The kinds of sources, most trusted first; see `discover.KINDS`."""
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Canonical metric names, each with its other names."""
    goals: Mapping[str, Goal] = field(default_factory=dict)
    """Directions of metrics whose names do not tell."""
    stdout_patterns: tuple[str, ...] = ()
    """The user's patterns for printed metrics."""
    tail: int = 0
    """The number of last values in each summary, for `mean(k)`."""
    final: bool = False
    """Whether the trainers exited by themselves, so that a last line without its newline counts."""

    def fingerprint(self) -> str:
        """Return a hash of the options; a cached summary is valid only for the same hash."""
        return sha256(orjson.dumps(astuple(self), option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]

    def reader(self, run_dir: Path) -> Reader:
        return Reader(run_dir, self.kinds, self.aliases, self.stdout_patterns)


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
    run_dirs: Iterable[Path],
    reading: FolderReading | None = None,
    *,
    jobs: int | None = None,
    cache: Path | None = None,
) -> dict[Path, dict[str, MetricSummary]]:
    """Return the summary of each metric of each run.

    Args:
        run_dirs: The folders of the runs.
        reading: How to read them; None: the defaults.
        jobs: The number of processes; None: the number of cores.
        cache: A cache file; None: no cache.
    """
    reading = reading or FolderReading()
    store = _Cache(cache, reading.fingerprint()) if cache is not None else None
    result: dict[Path, dict[str, MetricSummary]] = {}
    changed: dict[Path, Signature] = {}
    for run_dir in run_dirs:
        signature = _signature(run_dir, reading)
        cached = store.get(run_dir, signature) if store is not None else None
        result[run_dir] = cached if cached is not None else {}
        if cached is None:
            changed[run_dir] = signature
    for run_dir, summaries in zip(changed, _read_all(changed, reading, jobs or os.cpu_count() or 1), strict=True):
        result[run_dir] = summaries
        if store is not None:
            store.put(run_dir, changed[run_dir], summaries)
    if store is not None and changed:
        store.save()
    return result


def _signature(run_dir: Path, reading: FolderReading) -> Signature:
    signature = []
    for source in reading.reader(run_dir).sources():
        try:
            status = source.path.stat()
        except OSError:
            continue
        signature.append((os.path.relpath(source.path, run_dir), status.st_size, status.st_mtime_ns))
    return signature


def _read_all(
    changed: Mapping[Path, Signature], reading: FolderReading, jobs: int
) -> Iterable[dict[str, MetricSummary]]:
    size = sum(file[1] for signature in changed.values() for file in signature)
    jobs = min(jobs, len(changed))
    if jobs < 2 or size < _MIN_POOL_SIZE:
        return [_summarise(run_dir, reading) for run_dir in changed]
    # Spawn, not fork: the caller may have threads.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        chunk = max(1, min(32, len(changed) // (4 * jobs)))
        return list(pool.map(_summarise, changed, [reading] * len(changed), chunksize=chunk))


def _summarise(run_dir: Path, reading: FolderReading) -> dict[str, MetricSummary]:
    summariser = Summariser(Directions(reading.goals), kept=max(1, reading.tail))
    summariser.add(reading.reader(run_dir).poll(reading.final))
    return summariser.result(tail=reading.tail)


class _Cache:
    """One JSON file for many runs, replaced atomically; an unreadable cache is empty."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        self._root = path.parent
        self._runs: dict[str, Any] = {}
        try:
            content = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            content = None
        self._head = {"version": _VERSION, "reading": fingerprint}
        if isinstance(content, dict) and {key: content.get(key) for key in self._head} == self._head:
            self._runs = content.get("runs", {})

    def get(self, run_dir: Path, signature: Signature) -> dict[str, MetricSummary] | None:
        entry = self._runs.get(self._name(run_dir))
        if entry is None or entry["files"] != [list(file) for file in signature]:
            return None
        summaries = {}
        for name, (*values, tail) in entry["metrics"].items():
            values.append(tuple(map(float, tail)))
            summaries[name] = MetricSummary(*values)
        return summaries

    def put(self, run_dir: Path, signature: Signature, summaries: Mapping[str, MetricSummary]) -> None:
        self._runs[self._name(run_dir)] = {
            "files": signature,
            "metrics": {name: _as_list(summary) for name, summary in summaries.items()},
        }

    def save(self) -> None:
        runs = {name: entry for name, entry in self._runs.items() if (self._root / name).is_dir()}
        write_atomic(self._path, orjson.dumps({**self._head, "runs": runs}), sync=False)

    def _name(self, run_dir: Path) -> str:
        """Return the run's path relative to the cache, so that the whole tree can be moved."""
        return os.path.relpath(run_dir, self._root)


def _as_list(summary: MetricSummary) -> list[Any]:
    *values, tail = astuple(summary)
    return [*values, [str(value) for value in tail]]
