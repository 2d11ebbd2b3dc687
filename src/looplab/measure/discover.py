"""Discovery of the metric files in a run folder, and one reader for all of them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from looplab import plugins
from looplab.config.lab import StudyConfig
from looplab.errors import LabError
from looplab.measure.base import Batch, Curve, MetricSource, SourcePlugin
from looplab.measure.json_file import JsonFile
from looplab.measure.splits import KIND_OF
from looplab.runs.folder import RECORD
from looplab.untrusted import UntrustedError, clean_line, mend_text

KINDS = ("jsonl", "wandb", "tensorboard", "csv", "stdout", "log_file", "trainer_state", "trainer_summary")
"""Kinds that a user can name, most trusted first: a metric in files of two kinds is read from the earlier one."""

_PARTS = {"wandb": ("wandb", "wandb_history", "wandb_summary")}
_AUTO = (
    *("jsonl", "wandb", "wandb_history", "tensorboard", "csv", "stdout", "log_file"),
    *("trainer_state", "trainer_summary", "wandb_summary"),
)
CURVES = frozenset({"jsonl", "wandb", "wandb_history", "tensorboard", "csv"})

_BY_NAME = {
    "metrics.jsonl": "jsonl",
    "trainer_state.json": "trainer_state",
    "trainer_summary.json": "trainer_summary",
    "all_results.json": "trainer_summary",
    "wandb-history.jsonl": "wandb_history",
    "wandb-summary.json": "wandb_summary",
}
_CSV = re.compile(
    r"(?i)(?:[\w.-]*[_.-])?(?:progress|metrics|logs?|history|results?|monitor|losses|scores)\.[ct]sv|progress\.txt"
)
_MONITOR = re.compile(r"(?i)(?:[\w.-]*[_.-])?monitor\.csv")
"""Episodes of the training, as environments write them; evaluations are printed, or in other files."""
_JSONL = re.compile(r"(?i)(?:[\w.-]*[_-])?(?:metrics|logs?|history|progress|scalars|losses)\.(?:jsonl|ndjson)")
_RESULTS = re.compile(r"(?i)(?:[\w.-]*[_-])?(?:metrics|results?|scores?|history|evaluation|scalars|logs?)\.json")
"""Files that trainers write at their end, or to which they add a line from time to time."""
_LOG = re.compile(r"(?i)(?!debug)[\w.-]*\.log|(?:[\w.-]*[_-])?logs?(?:[_-][\w.-]*)?\.txt")
"""Text that trainers write in addition to their output, or instead of it; W&B has its own `debug.log`."""
_BARE_LOG = re.compile(r"(?i)(?:(?:train|training|val|valid|test|eval)[_-])?log")
"""The same, in a file without a suffix."""
IGNORED = frozenset({
    "checkpoints", "checkpoint", "ckpt", "ckpts", "media", "node_modules", "__pycache__", "venv", "site-packages",
    "code",
})  # fmt: skip
_RESTART = re.compile(r"version_\d+|(?:offline-)?run-.+|\d{10}\.\d+")
"""Folders without a meaning for their metrics: of restarts, and those that `add_hparams` names after the time."""

MAX_NAME = 1_000
"""Maximum length of a metric's name, in characters; longer ones are ignored."""
MAX_DEPTH = 5
"""Levels of folders below the run folder that are searched."""
MAX_FOLDERS = 256
MAX_ENTRIES = 10_000
"""Entries of a folder that are examined."""
_RESCAN_S = 0.5
_FEW_FOLDERS = 16
"""With more folders, they are checked for new files only every `_RESCAN_S` seconds."""
_CLOCK_TICK_NS = 50_000_000
"""Resolution of file timestamps, in nanoseconds."""


def reader_of(study: StudyConfig, run_dir: Path | str, *, with_held_out: bool = False) -> Reader:
    """Return the reader of a run of this study, without the held-out metric, which only the judge may see."""
    measure = study.measure
    held_out = () if study.holdout is None else (study.holdout.metric,)
    hidden = () if with_held_out else held_out
    objective = study.objective
    wanted = {*held_out, *measure.goals}
    if objective is not None:
        wanted |= {objective.metric} | ({objective.then.metric} if objective.then is not None else set())
    return Reader(run_dir, measure.sources, measure.aliases, measure.stdout, hidden, wanted, inputs=study.launch.links)


class _Entry(NamedTuple):
    """A source and its position in the order of trust."""

    rank: int
    """The rank of its kind; 0 is the most trusted."""
    path: str
    """Orders the files of restarted runs."""
    series: str
    """Files of the same kind and series continue each other."""
    prefix: str
    """Prefix of its metric names."""
    source: MetricSource


class Reader:
    """Reads the metrics of a run from all its files, as they appear and grow.

    A metric in files of several kinds is read from the most trusted kind only. If that kind appears late, it takes over
    after the last step that was returned. Printed text, log files and a bare W&B summary are read only while no file
    with curves has rows, and log files only if no metric was printed, unless they are named explicitly.
    """

    __slots__ = (
        "_entries",
        "_failed",
        "_fallbacks",
        "_folders",
        "_has_curves",
        "_has_printed",
        "_hidden",
        "_inputs",
        "_last_steps",
        "_owners",
        "_paths",
        "_plugins",
        "_preference",
        "_ranks",
        "_record",
        "_rename",
        "_run_dir",
        "_scanned",
        "_stdout_patterns",
        "_wanted",
        "_wanted_by_canonical",
        "behind",
        "last_step",
    )

    def __init__(
        self,
        run_dir: Path | str,
        kinds: Sequence[str] | Literal["auto"] = "auto",
        aliases: Mapping[str, Sequence[str]] | None = None,
        stdout_patterns: Sequence[str] = (),
        hidden: Collection[str] = (),
        wanted: Collection[str] = (),
        *,
        inputs: Collection[str] = (),
    ) -> None:
        """
        Args:
            run_dir: The folder of the run.
            kinds: The kinds of files to read, most trusted first.
            aliases: Canonical metric names, each with its other names in order of preference.
            stdout_patterns: The user's regular expressions for printed metrics.
            hidden: Metrics that are not returned.
            wanted: Metrics that the study names. A name that differs from one of them only in `_`, `/`, `.` and spaces
                is returned under it, unless several do.
            inputs: Links in the run folder to files that the trainer reads, relative to it.

        Raises:
            LabError: A kind is not known.
        """
        self._run_dir = os.fspath(run_dir)
        self._hidden = hidden
        self._inputs = frozenset(os.path.normpath(f"{self._run_dir}/{name}") for name in inputs)
        self._ranks, self._fallbacks = _ranks(kinds)
        self._plugins: dict[str, SourcePlugin] = {
            kind: plugins.load("sources", kind) for kind in self._ranks if kind not in _auto_ranks
        }
        self._rename = {other: name for name, others in (aliases or {}).items() for other in others}
        self._preference = {other: rank for others in (aliases or {}).values() for rank, other in enumerate(others, 1)}
        self._stdout_patterns = stdout_patterns
        self._wanted = frozenset(wanted)
        self._wanted_by_canonical = {_canonical(name): name for name in wanted}
        self._entries: list[_Entry] = []
        self._paths: set[str] = set()
        self._failed: set[str] = set()
        """Files that are no longer read."""
        self._folders: dict[str, tuple[int, int]] = {}
        self._record: str | None = None
        """The folder with looplab's own files about the run; None if there is none."""
        self._scanned = 0.0
        self._owners: dict[str, tuple[int, str, str]] = {}
        self._last_steps: dict[str, float] = {}
        self._has_curves = self._has_printed = False
        self.last_step: float | None = None
        """The largest step so far; None if there is none."""
        self.behind = False
        """Whether the last poll ran out of time before the end."""

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        """Return new points by canonical name; for the arguments see `MetricSource.poll`.

        Never raises: a file that cannot be read is ignored from then on, and `problems` says why. The points do not
        depend on how often time runs out: less trusted files are read after more trusted ones.
        """
        self._scan(final)
        self.behind = False
        out: Batch = {}
        for entry in self._entries:
            source = entry.source
            kind = source.kind
            if entry.path in self._failed or (kind in self._fallbacks and self._has_curves):
                continue
            if kind == "log_file" and "log_file" in self._fallbacks and self._has_printed:
                continue
            if isinstance(source, JsonFile):
                source.at_step = self.last_step
            try:
                batch = source.poll(final, until)
            except (Exception, SystemExit) as error:  # noqa: BLE001 (a bad file must not stop the study)
                source.problem = describe(error)
                self._failed.add(entry.path)
                continue
            if batch:
                if (kind in CURVES and not _MONITOR.fullmatch(os.path.basename(entry.path))) or kind in self._plugins:
                    self._has_curves = True
                self._has_printed = self._has_printed or kind == "stdout"
                self._merge(entry, batch, out)
            if source.behind:
                self.behind = True
                break
        if self._hidden:
            hidden = {_canonical(name) for name in self._hidden}
            out = {name: curve for name, curve in out.items() if _canonical(name) not in hidden}
        return out

    @property
    def problems(self) -> dict[str, str]:
        """Files that could not be read completely, relative to the run folder, and why."""
        return {
            mend_text(os.path.relpath(entry.path, self._run_dir)): entry.source.problem
            for entry in self._entries
            if entry.source.problem is not None
        }

    def is_doubtful(self, name: str) -> bool:
        """Return whether a metric was read from a file with a problem, so that its last value may be missing."""
        owner = self._owners.get(name)
        return owner is not None and any(
            entry.source.problem is not None and (entry.rank, entry.series) == owner[:2] for entry in self._entries
        )

    def source_of(self, name: str) -> MetricSource | None:
        """Return the source that a metric is read from, the last of several files; None: it was not measured."""
        owner = self._owners.get(name)
        found = [
            entry.source for entry in self._entries if owner is not None and (entry.rank, entry.series) == owner[:2]
        ]
        return found[-1] if found else None

    def sources(self) -> list[MetricSource]:
        """Return all sources in the run folder, most trusted first."""
        self._scan(True)
        return [entry.source for entry in self._entries]

    @property
    def skipped(self) -> int:
        """The number of records in all files that could not be read."""
        return sum(entry.source.skipped for entry in self._entries)

    def _merge(self, entry: _Entry, batch: Batch, out: Batch) -> None:
        """Add the points of one source to `out`, except for metrics that a more trusted source owns."""
        # A table with `train/loss` and `val/loss` in a folder `train` is not of one split.
        has_splits = entry.source.kind == "csv" and any(name.partition("/")[0].lower() in KIND_OF for name in batch)
        prefix = "" if has_splits else entry.prefix
        items = [(mend_text(prefix + name), curve) for name, curve in batch.items() if len(name) <= MAX_NAME]
        if self._rename:
            items.sort(key=lambda item: self._preference.get(item[0], 0))
        likely = self._find_wanted(entry, [raw for raw, _ in items]) if self._wanted else {}
        for raw, curve in items:
            name = self._rename.get(raw) or likely.get(raw, raw)
            owner = self._owners.get(name)
            key = (entry.rank, entry.series, raw)
            if entry.source.kind == "trainer_state" and name in self._last_steps:
                curve = _after(curve, self._last_steps[name])  # each checkpoint has the whole history
            if owner != key:
                if owner is None:
                    self._owners[name] = key
                elif entry.rank < owner[0]:
                    self._owners[name] = key
                    curve = _after(curve, self._last_steps[name])
                elif not self._completes(entry, owner):
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

    def _find_wanted(self, entry: _Entry, names: Sequence[str]) -> dict[str, str]:
        """Return the names that are one of the study's metrics, apart from `_`, `/`, `.` and `^`, and that metric."""
        found: dict[str, list[str]] = {}
        for raw in names:
            if raw not in self._rename and (metric := self._wanted_by_canonical.get(_canonical(raw))):
                found.setdefault(raw if raw in self._wanted else metric, []).append(raw)
        chosen = {}
        for metric, raws in found.items():
            owner = self._owners.get(metric)
            if owner is None and len(raws) == 1:
                chosen[raws[0]] = metric
            elif owner is not None and owner[:2] == (entry.rank, entry.series):
                chosen[owner[2]] = metric
        return chosen

    def _completes(self, entry: _Entry, owner: tuple[int, str, str]) -> bool:
        """Return whether a source adds a last point to another's curve: the trainer's summary, to printed metrics."""
        source = entry.source
        is_summary = isinstance(source, JsonFile) and source.kind == "trainer_summary" and not source.has_rows
        return is_summary and owner[0] == self._ranks.get("stdout")

    def _scan(self, final: bool) -> None:
        """Find new files; a folder is listed again only if its modification time has changed."""
        if not self._folders:
            self._scan_folder(self._run_dir, 0)
            return
        if len(self._folders) > _FEW_FOLDERS and not final:
            now = time.monotonic()
            if now - self._scanned < _RESCAN_S:
                return
            self._scanned = now
        for folder, (changed, depth) in list(self._folders.items()):
            try:
                if os.stat(folder).st_mtime_ns == changed:
                    continue
            except OSError:
                del self._folders[folder]
                continue
            self._scan_folder(folder, depth)

    def _scan_folder(self, folder: str, depth: int) -> None:
        try:
            changed = os.stat(folder).st_mtime_ns
            with os.scandir(folder) as listing:
                entries = list(islice(listing, MAX_ENTRIES))
        except OSError:
            # Not created yet, or just removed.
            return
        # Timestamps have a coarse resolution: a file added within the same tick would not change the timestamp.
        self._folders[folder] = (changed if time.time_ns() - changed > _CLOCK_TICK_NS else -1, depth)
        if depth == 0 and any(entry.name == RECORD for entry in entries):
            record = os.path.join(folder, RECORD)
            self._record = record if os.path.exists(os.path.join(record, "run.json")) else self._record
        subfolders = []
        for entry in entries:
            name = entry.name
            kind = self._kind_of(name, folder, depth)
            if kind is not None:
                if (
                    kind in self._ranks
                    and entry.path not in self._paths
                    and not self._is_input(entry)
                    and _is_file(entry)
                ):
                    self._add(kind, entry.path, folder)
            elif (
                depth < MAX_DEPTH
                and "." not in name[:1]
                and name not in IGNORED
                and entry.is_dir(follow_symlinks=False)
            ):
                subfolders.append(name)
        if "latest-run" in subfolders and len(subfolders) > 1 and os.path.basename(folder) == "wandb":
            # A copy of the link's target: the same run again.
            subfolders.remove("latest-run")
        for name in sorted(subfolders):
            path = os.path.join(folder, name)
            if path not in self._folders and len(self._folders) < MAX_FOLDERS:
                self._scan_folder(path, depth + 1)

    def _is_input(self, entry: os.DirEntry[str]) -> bool:
        """Return whether an entry is a link that looplab made to a file that the trainer reads."""
        return entry.path in self._inputs and entry.is_symlink()

    def _kind_of(self, name: str, folder: str, depth: int) -> str | None:
        """Return the kind of a file; None if it has no metrics.

        Only the `train.log` in looplab's own folder is read as printed text (without such a folder, the one in the run
        folder); any other was written by the trainer itself.
        """
        if name == "train.log" and (folder == self._record if self._record else depth == 0):
            return "stdout"
        if folder == self._record:
            return None
        found = kind_of(name)
        if found is None or found not in self._ranks:
            return next((kind for kind, plugin in self._plugins.items() if plugin.matches(name)), found)
        return found

    def _add(self, kind: str, path: str, folder: str) -> None:
        self._paths.add(path)
        plugin = self._plugins.get(kind)
        wanted = {*self._wanted, *self._rename}
        source = _open_source(kind, Path(path), self._stdout_patterns, wanted) if plugin is None else plugin(Path(path))
        series = os.path.basename(path) if kind in ("jsonl", "csv", "log_file") else ""
        self._entries.append(_Entry(self._ranks[kind], path, series, self._prefix(kind, folder), source))
        self._entries.sort(key=lambda entry: (entry.rank, entry.path))

    def _prefix(self, kind: str, folder: str) -> str:
        """Return a prefix for names that occur in several folders, such as `train/` and `validation/`."""
        if kind not in ("jsonl", "csv", "tensorboard") or folder == self._run_dir:
            return ""
        parents = [
            entry_folder
            for entry in self._entries
            if entry.source.kind == kind and folder.startswith((entry_folder := os.path.dirname(entry.path)) + os.sep)
        ]
        name = os.path.basename(folder)
        if parents and not _RESTART.fullmatch(name):
            return os.path.relpath(folder, min(parents, key=len)).replace(os.sep, "/") + "/"
        return f"{name}/" if name in KIND_OF else ""


def describe(error: BaseException) -> str:
    """Return an exception as a short text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, LabError | UntrustedError):
        return clean_line(str(error), 300)
    return clean_line(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, 300)


def _canonical(name: str) -> str:
    return name.translate(_SEPARATORS)


_SEPARATORS = str.maketrans("/. ", "___") | {ord("^"): None, ord("²"): "2"}


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself
        return False


def _after(curve: Curve, step: float) -> Curve:
    """Return the points after a step."""
    rest = [(at, value) for at, value in zip(curve.steps, curve.values, strict=True) if at > step]
    return Curve([at for at, _ in rest], [value for _, value in rest])


def kind_of(name: str) -> str | None:
    """Return the kind of a file by its name; None if it has no metrics."""
    kind = _BY_NAME.get(name)
    if kind is not None:
        return kind
    if name.endswith(".wandb"):
        return "wandb" if name.startswith("run-") else None
    if name.lower().endswith((".csv", ".tsv", ".txt", ".log")):
        return "csv" if _CSV.fullmatch(name) else "log_file" if _LOG.fullmatch(name) else None
    if name.lower().endswith((".jsonl", ".ndjson")):
        return "jsonl" if _JSONL.fullmatch(name) else None
    if name.endswith(".json"):
        return "trainer_summary" if _RESULTS.fullmatch(name) else None
    if name.startswith("events.out.tfevents.") and not name.endswith(".profile-empty"):
        return "tensorboard"
    return "log_file" if _BARE_LOG.fullmatch(name) else None


def _open_source(kind: str, path: Path, stdout_patterns: Sequence[str], wanted: Collection[str]) -> MetricSource:
    """Return the source for a file. Its module is imported on demand, since most runs have one kind."""
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
        case "trainer_state":
            from looplab.measure.trainer_state import TrainerStateSource

            return TrainerStateSource(path)
        case "trainer_summary":
            from looplab.measure.trainer_summary import TrainerSummarySource

            return TrainerSummarySource(path)
        case "log_file":
            from looplab.measure.stdout import LogFileSource

            return LogFileSource(path, stdout_patterns, wanted)
        case _:
            from looplab.measure.stdout import StdoutSource

            return StdoutSource(path, stdout_patterns, wanted)


_auto_ranks = {kind: rank for rank, kind in enumerate(_AUTO)}


def _ranks(kinds: Sequence[str] | Literal["auto"]) -> tuple[dict[str, int], frozenset[str]]:
    """Return the rank of each kind, and the kinds that are read only if there is no file with curves."""
    if kinds == "auto":
        return _auto_ranks, frozenset({"stdout", "log_file", "trainer_state", "wandb_summary"})
    for kind in kinds:
        if kind not in KINDS and kind not in plugins.names("sources"):
            known = ", ".join((*KINDS, *plugins.names("sources")))
            raise LabError(f"measure has no source {kind!r}", hint=f"use auto or some of: {known}")
    parts = [part for kind in kinds for part in _PARTS.get(kind, (kind,))]
    return {part: rank for rank, part in enumerate(parts)}, frozenset({"wandb_summary"})
