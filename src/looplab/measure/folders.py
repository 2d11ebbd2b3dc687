"""Summaries of whole run folders, of one or of thousands; what has not changed since last time is not read again."""

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

from looplab.measure.discover import Reader
from looplab.measure.summary import Directions, Goal, MetricSummary, Summariser

CACHE_NAME = ".measure-cache.json"
_VERSION = 1
_WORTH_A_POOL = 16 << 20
"""Bytes to read from which on it pays to start processes."""

_FILES = re.compile(r"metrics\.jsonl|(?:progress|metrics)\.csv|trainer_summary\.json|events\.out\.tfevents\..+")
_WANDB_RUN = re.compile(r"(?:offline-)?run-.+|latest-run")
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "eval", "dev"})
"""Folders in which trainers put the parts of one run."""
_SKIPPED = frozenset({"checkpoints", "checkpoint", "node_modules", "__pycache__", "venv", "site-packages"})

Signature = list[tuple[str, int, int]]
"""Each metric file of a folder: relative path, size, time of last change in ns."""


@dataclass(frozen=True, slots=True)
class FolderReading:
    """How run folders are read."""

    kinds: tuple[str, ...] | Literal["auto"] = "auto"
    """Which sources, the most trusted first; see `discover.KINDS`."""
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Canonical metric names, each with the other names that mean the same."""
    goals: Mapping[str, Goal] = field(default_factory=dict)
    """Which way is better where the name does not tell."""
    stdout_patterns: tuple[str, ...] = ()
    """The user's patterns for printed metrics."""
    tail: int = 0
    """How many last values each summary holds, for `mean(k)`."""
    final: bool = False
    """Whether the trainers ended by themselves, so that a last line without its newline counts."""

    def fingerprint(self) -> str:
        """What a cached summary must agree in."""
        return sha256(orjson.dumps(astuple(self), option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]

    def reader(self, run_dir: Path) -> Reader:
        return Reader(run_dir, self.kinds, self.aliases, self.stdout_patterns)


def find_runs(root: Path) -> Iterator[Path]:
    """The folders of runs below the root; the root itself only if it is one and holds no other."""
    found: dict[str, None] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in _SKIPPED)
        if folder == str(root) or not _is_run(folder, folders, files):
            continue
        folders.clear()  # what lies below belongs to this run
        above, name = os.path.split(folder)
        found[above if name in _SPLITS and above != str(root) else folder] = None
    if not found and _is_run(str(root), names_in(root), names_in(root)):
        found[str(root)] = None
    yield from map(Path, found)


def _is_run(folder: str, folders: list[str], files: list[str]) -> bool:
    if any(map(_FILES.fullmatch, files)):
        return True
    return "wandb" in folders and any(map(_WANDB_RUN.fullmatch, names_in(Path(folder, "wandb"))))


def names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # not a folder, or not ours to read
        return []


def summarise_folder(
    run_dir: Path, reading: FolderReading | None = None, *, cache: Path | None = None
) -> dict[str, MetricSummary]:
    """The summary of each metric of one run; with a cache file, only read if something changed."""
    return summarise_many([run_dir], reading, jobs=1, cache=cache)[run_dir]


def summarise_many(
    run_dirs: Iterable[Path],
    reading: FolderReading | None = None,
    *,
    jobs: int | None = None,
    cache: Path | None = None,
) -> dict[Path, dict[str, MetricSummary]]:
    """The summaries of many runs. `jobs` processes share what must be read; by default as many as there are cores."""
    reading = reading or FolderReading()
    store = _Cache(cache, reading.fingerprint()) if cache is not None else None
    result: dict[Path, dict[str, MetricSummary]] = {}
    changed: dict[Path, Signature] = {}
    for run_dir in run_dirs:
        signature = _signature(run_dir, reading)
        known = store.get(run_dir, signature) if store is not None else None
        result[run_dir] = known if known is not None else {}
        if known is None:
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
    if jobs < 2 or size < _WORTH_A_POOL:
        return [_read(run_dir, reading) for run_dir in changed]
    # Spawned, not forked: the caller may have threads.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        chunk = max(1, min(32, len(changed) // (4 * jobs)))
        return list(pool.map(_read, changed, [reading] * len(changed), chunksize=chunk))


def _read(run_dir: Path, reading: FolderReading) -> dict[str, MetricSummary]:
    summariser = Summariser(Directions(reading.goals), kept=max(1, reading.tail))
    summariser.add(reading.reader(run_dir).poll(reading.final))
    return summariser.result(tail=reading.tail)


class _Cache:
    """One JSON file for many runs, replaced as a whole; a cache that cannot be read is an empty one."""

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
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            file.write(orjson.dumps({**self._head, "runs": runs}))
        temporary.replace(self._path)

    def _name(self, run_dir: Path) -> str:
        """The run's path from where the cache is, so that the whole tree can be moved."""
        return os.path.relpath(run_dir, self._root)


def _as_list(summary: MetricSummary) -> list[Any]:
    *values, tail = astuple(summary)
    return [*values, [str(value) for value in tail]]
