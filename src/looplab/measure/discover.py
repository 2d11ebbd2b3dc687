"""Which files of a run's folder hold metrics, and one reader over all of them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from looplab.config.lab import StudyConfig
from looplab.errors import LabError
from looplab.measure.base import Batch, Curve, MetricSource
from looplab.measure.json_file import JsonFile
from looplab.measure.splits import KIND_OF
from looplab.measure.summary import ALIASES
from looplab.runs.folder import RECORD
from looplab.untrusted import UntrustedError, clean_line, mend_text

KINDS = ("jsonl", "wandb", "tensorboard", "csv", "stdout", "trainer_summary")
"""What a user can name, the most trusted first: where two kinds know the same metric, the earlier one is believed."""

_PARTS = {"wandb": ("wandb", "wandb_history", "wandb_summary")}
_AUTO = ("jsonl", "wandb", "wandb_history", "tensorboard", "csv", "stdout", "trainer_summary", "wandb_summary")
CURVES = frozenset({"jsonl", "wandb", "wandb_history", "tensorboard", "csv"})

_BY_NAME = {
    "metrics.jsonl": "jsonl",
    "train.log": "stdout",
    "trainer_summary.json": "trainer_summary",
    "wandb-history.jsonl": "wandb_history",
    "wandb-summary.json": "wandb_summary",
}
_CSV = re.compile(r"(?:progress|metrics|log|history|results|monitor)\.csv")
IGNORED = frozenset(
    {
        "checkpoints",
        "checkpoint",
        "ckpt",
        "ckpts",
        "media",
        "node_modules",
        "__pycache__",
        "venv",
        "site-packages",
        "code",
    }
)
_RESTART = re.compile(r"version_\d+|(?:offline-)?run-.+")

LONGEST_NAME = 1_000
"""Characters of a metric's name; a longer one is not a name."""
MAX_DEPTH = 5
MAX_FOLDERS = 256
MAX_ENTRIES = 10_000
_EVERY_S = 0.5
_FEW_FOLDERS = 16
_CLOCK_TICK_NS = 50_000_000


def find_sources(
    run_dir: Path, kinds: Sequence[str] | Literal["auto"] = "auto", *, stdout_patterns: Sequence[str] = ()
) -> list[MetricSource]:
    """The sources in a run's folder and below it, the most trusted first."""
    return Reader(run_dir, kinds, stdout_patterns=stdout_patterns).sources()


def reader_of(study: StudyConfig, run_dir: Path | str, *, with_held_out: bool = False) -> Reader:
    """The reader of a run of this study. What is held out stays out: nobody but the judge may look at it."""
    measure = study.measure
    hidden = (study.holdout.metric,) if study.holdout is not None and not with_held_out else ()
    return Reader(run_dir, measure.sources, measure.aliases, measure.stdout, hidden)


class _Entry(NamedTuple):
    """A source with its place in the order."""

    rank: int
    """The place of its kind."""
    path: str
    """Restarted runs sort by it."""
    series: str
    """Files of one kind and series continue each other; two series do not."""
    prefix: str
    """Goes before its names."""
    source: MetricSource


class Reader:
    """All that a run measured, from whatever files it leaves, as they appear and grow.

    A metric that several kinds of file know is taken from the most trusted kind alone. If that one turns up late, it
    takes over after the last step that was already returned. Printed text and a bare W&B summary are read only as
    long as no file with curves has rows, unless they were asked for by name.
    """

    __slots__ = (
        "_entries",
        "_failed",
        "_fallbacks",
        "_folders",
        "_has_curves",
        "_hidden",
        "_last_steps",
        "_looked",
        "_owners",
        "_paths",
        "_preference",
        "_ranks",
        "_record",
        "_rename",
        "_run_dir",
        "_stdout_patterns",
        "behind",
        "last_step",
    )

    def __init__(
        self,
        run_dir: Path | str,
        kinds: Sequence[str] | Literal["auto"] = "auto",
        aliases: Mapping[str, Sequence[str]] | Literal["act_ot"] | None = None,
        stdout_patterns: Sequence[str] = (),
        hidden: Collection[str] = (),
    ) -> None:
        self._run_dir = os.fspath(run_dir)
        self._hidden = hidden
        self._ranks, self._fallbacks = _ranks(kinds)
        if isinstance(aliases, str):
            aliases = ALIASES
        self._rename = {other: name for name, others in (aliases or {}).items() for other in others}
        self._preference = {
            other: place for others in (aliases or {}).values() for place, other in enumerate(others, 1)
        }
        self._stdout_patterns = stdout_patterns
        self._entries: list[_Entry] = []
        self._paths: set[str] = set()
        self._failed: set[str] = set()
        """Files that are not read any more."""
        self._folders: dict[str, tuple[int, int]] = {}
        self._record: str | None = None
        """The folder with looplab's own files about the run, if it has one."""
        self._looked = 0.0
        self._owners: dict[str, tuple[int, str, str]] = {}
        self._last_steps: dict[str, float] = {}
        self._has_curves = False
        self.last_step: float | None = None
        """The largest step seen."""
        self.behind = False
        """Whether the last poll ran out of time before all was read."""

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        """The points that are new, by canonical name; `final` and `until` as in `MetricSource.poll`.

        Never raises: a file that cannot be read is left alone from then on, and `problems` says why. However often
        the time runs out, the points are the same: a less trusted file is read after the more trusted ones.
        """
        self._look(final)
        self.behind = False
        out: Batch = {}
        for entry in self._entries:
            source = entry.source
            kind = source.kind
            if (kind in self._fallbacks and self._has_curves) or entry.path in self._failed:
                continue
            if isinstance(source, JsonFile):
                source.at_step = self.last_step
            try:
                batch = source.poll(final, until)
            except Exception as error:  # noqa: BLE001 (whatever is in a file of a run is that run's problem)
                source.problem = describe(error)
                self._failed.add(entry.path)
                continue
            if batch:
                if kind in CURVES:
                    self._has_curves = True
                self._take(entry, batch, out)
            if source.behind:
                self.behind = True
                break
        for name in self._hidden:
            out.pop(name, None)
        return out

    @property
    def problems(self) -> dict[str, str]:
        """Files that could not be read as they should be, relative to the run folder, and why."""
        return {
            mend_text(os.path.relpath(entry.path, self._run_dir)): entry.source.problem
            for entry in self._entries
            if entry.source.problem is not None
        }

    def is_doubtful(self, name: str) -> bool:
        """Whether a metric was read from a file with a problem: its last value may not be the last."""
        owner = self._owners.get(name)
        return owner is not None and any(
            entry.source.problem is not None and (entry.rank, entry.series) == owner[:2] for entry in self._entries
        )

    def sources(self) -> list[MetricSource]:
        """What has been found so far, the most trusted first."""
        self._look(True)
        return [entry.source for entry in self._entries]

    @property
    def skipped(self) -> int:
        """How many records could not be read, over all files."""
        return sum(entry.source.skipped for entry in self._entries)

    def _take(self, entry: _Entry, batch: Batch, out: Batch) -> None:
        items = [(mend_text(entry.prefix + name), curve) for name, curve in batch.items() if len(name) <= LONGEST_NAME]
        if self._rename:
            items.sort(key=lambda item: self._preference.get(item[0], 0))
        for raw, curve in items:
            name = self._rename.get(raw, raw)
            owner = self._owners.get(name)
            me = (entry.rank, entry.series, raw)
            if owner != me:
                if owner is None:
                    self._owners[name] = me
                elif entry.rank < owner[0]:
                    self._owners[name] = me
                    curve = _after(curve, self._last_steps[name])
                elif not self._closes(entry, owner):
                    continue
            if not curve.steps:
                continue
            if name in out:
                out[name].extend(curve)
            else:
                out[name] = curve
            last = curve.steps[-1]
            self._last_steps[name] = last
            if self.last_step is None or last > self.last_step:
                self.last_step = last

    def _closes(self, entry: _Entry, owner: tuple[int, str, str]) -> bool:
        """What the trainer itself says at the end is surer than its prints: it becomes their last point."""
        return entry.source.kind == "trainer_summary" and owner[0] == self._ranks.get("stdout")

    def _look(self, final: bool) -> None:
        """Find new files; a folder is listed again only when its modification time has changed."""
        if not self._folders:
            self._list(self._run_dir, 0)
            return
        if len(self._folders) > _FEW_FOLDERS and not final:
            now = time.monotonic()
            if now - self._looked < _EVERY_S:
                return
            self._looked = now
        for folder, (changed, depth) in list(self._folders.items()):
            try:
                if os.stat(folder).st_mtime_ns == changed:
                    continue
            except OSError:
                del self._folders[folder]
                continue
            self._list(folder, depth)

    def _list(self, folder: str, depth: int) -> None:
        try:
            changed = os.stat(folder).st_mtime_ns
            with os.scandir(folder) as listing:
                entries = list(islice(listing, MAX_ENTRIES))
        except OSError:
            # Not there yet, or removed this moment.
            return
        # File systems stamp in ticks: what is written within the same tick would not change the stamp again.
        self._folders[folder] = (changed if time.time_ns() - changed > _CLOCK_TICK_NS else -1, depth)
        if depth == 0 and any(entry.name == RECORD for entry in entries):
            record = os.path.join(folder, RECORD)
            self._record = record if os.path.exists(os.path.join(record, "run.json")) else self._record
        below = []
        for entry in entries:
            name = entry.name
            kind = self._kind_of(name, folder, depth)
            if kind is not None:
                if kind in self._ranks and entry.path not in self._paths and _is_file(entry):
                    self._add(kind, entry.path, folder)
            elif (
                depth < MAX_DEPTH
                and "." not in name[:1]
                and name not in IGNORED
                and entry.is_dir(follow_symlinks=False)
            ):
                below.append(name)
        if "latest-run" in below and len(below) > 1 and os.path.basename(folder) == "wandb":
            # A copy that followed the link: the same run once more.
            below.remove("latest-run")
        for name in sorted(below):
            path = os.path.join(folder, name)
            if path not in self._folders and len(self._folders) < MAX_FOLDERS:
                self._list(path, depth + 1)

    def _kind_of(self, name: str, folder: str, depth: int) -> str | None:
        """The kind of a file; None for what holds no metrics. Of looplab's own files only the log is read, and it is
        the only log: a `train.log` elsewhere is one that the trainer writes for itself."""
        if name == "train.log":
            return "stdout" if (folder == self._record if self._record else depth == 0) else None
        return None if folder == self._record else kind_of(name)

    def _add(self, kind: str, path: str, folder: str) -> None:
        self._paths.add(path)
        source = _make(kind, Path(path), self._stdout_patterns)
        series = os.path.basename(path) if kind in ("jsonl", "csv") else ""
        self._entries.append(_Entry(self._ranks[kind], path, series, self._prefix(kind, folder), source))
        self._entries.sort(key=lambda entry: (entry.rank, entry.path))

    def _prefix(self, kind: str, folder: str) -> str:
        """What sets apart the same names in several folders: `train/` and `validation/`, or a folder below another."""
        if kind not in ("jsonl", "csv", "tensorboard") or folder == self._run_dir:
            return ""
        above = [
            entry_folder
            for entry in self._entries
            if entry.source.kind == kind and folder.startswith((entry_folder := os.path.dirname(entry.path)) + os.sep)
        ]
        name = os.path.basename(folder)
        if above and not _RESTART.fullmatch(name):
            return os.path.relpath(folder, min(above, key=len)).replace(os.sep, "/") + "/"
        return f"{name}/" if name in KIND_OF else ""


def describe(error: Exception) -> str:
    """Return what went wrong in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, LabError | UntrustedError):
        return clean_line(str(error), 300)
    return clean_line(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, 300)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself
        return False


def _after(curve: Curve, step: float) -> Curve:
    kept = [(at, value) for at, value in zip(curve.steps, curve.values, strict=True) if at > step]
    return Curve([at for at, _ in kept], [value for _, value in kept])


def kind_of(name: str) -> str | None:
    kind = _BY_NAME.get(name)
    if kind is not None:
        return kind
    if name.endswith(".wandb"):
        return "wandb" if name.startswith("run-") else None
    if name.endswith(".csv"):
        return "csv" if _CSV.fullmatch(name) else None
    if name.startswith("events.out.tfevents.") and not name.endswith(".profile-empty"):
        return "tensorboard"
    return None


def _make(kind: str, path: Path, stdout_patterns: Sequence[str]) -> MetricSource:
    """The source for a file; its module is loaded only now, since most runs have one kind."""
    match kind:
        case "jsonl":
            from looplab.measure.jsonl import JsonlSource

            return JsonlSource(path)
        case "wandb":
            from looplab.measure.wandb_log import WandbSource

            return WandbSource(path)
        case "wandb_history":
            from looplab.measure.wandb_legacy import WandbHistorySource

            return WandbHistorySource(path)
        case "wandb_summary":
            from looplab.measure.wandb_legacy import WandbSummarySource

            return WandbSummarySource(path)
        case "tensorboard":
            from looplab.measure.tensorboard import TensorBoardSource

            return TensorBoardSource(path)
        case "csv":
            from looplab.measure.csv import CsvSource

            return CsvSource(path)
        case "trainer_summary":
            from looplab.measure.trainer_summary import TrainerSummarySource

            return TrainerSummarySource(path)
        case _:
            from looplab.measure.stdout import StdoutSource

            return StdoutSource(path, stdout_patterns)


_auto_ranks = {kind: rank for rank, kind in enumerate(_AUTO)}


def _ranks(kinds: Sequence[str] | Literal["auto"]) -> tuple[dict[str, int], frozenset[str]]:
    """The order of trust, and which kinds are read only for want of better ones."""
    if kinds == "auto":
        return _auto_ranks, frozenset({"stdout", "wandb_summary"})
    for kind in kinds:
        if kind not in KINDS:
            raise LabError(f"measure knows no source {kind!r}", hint=f"use auto or some of: {', '.join(KINDS)}")
    parts = [part for kind in kinds for part in _PARTS.get(kind, (kind,))]
    return {part: rank for rank, part in enumerate(parts)}, frozenset({"wandb_summary"})
