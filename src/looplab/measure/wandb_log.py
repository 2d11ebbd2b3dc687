"""`run-<id>.wandb`, the transaction log of a Weights & Biases run, read without wandb.

The file is a 7-byte head and then a LevelDB log: blocks of 32 KiB, in them pieces of records with a checksum, and
each record a protobuf message. Offline runs keep history, config and summary nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Any, TypeVar
from zlib import crc32

import orjson

from looplab.measure import wire
from looplab.measure.base import Batch
from looplab.measure.rows import RowAccumulator
from looplab.measure.tail import Tail

BLOCK = 32 * 1024
_FILE_HEAD = 7
_PIECE_HEAD = Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_KIND_CRC = [crc32(bytes([kind])) for kind in range(5)]

# Numbers of fields in W&B's records, and how some of them look in the bytes: number and wire type.
_HISTORY, _SUMMARY, _CONFIG, _RUN, _EXIT = 2, 3, 5, 17, 18
_NUM_TAG, _HISTORY_TAG, _SUMMARY_TAG, _STEP_TAG = 0x08, 0x12, 0x1A, 0x12
_VALUE_JSON_TAG = b"\x82\x01"

Name = TypeVar("Name")


class RecordLog:
    """Whole records of a growing log; a record that is damaged is dropped, and reading goes on after it."""

    __slots__ = ("_doubtful", "_next", "_offset", "_on_restart", "_pieces", "_rest", "_tail", "skipped")

    def __init__(self, path: Path, on_restart: Callable[[], None]) -> None:
        self._tail = Tail(path, self._restart)
        self._on_restart = on_restart
        self.skipped = 0
        self._begin()

    def _begin(self) -> None:
        self._rest = b""
        self._offset = 0  # of the first byte of `_rest` in the file
        self._next = _FILE_HEAD  # where in the file the next piece begins; beyond what is there if a block is skipped
        self._pieces: list[bytes] = []
        self._doubtful = False

    def _restart(self) -> None:
        self._begin()
        self._on_restart()

    @property
    def position(self) -> int:
        return self._tail.position

    @property
    def behind(self) -> bool:
        return self._tail.behind

    def blocks(self, until: float | None = None) -> Iterator[list[bytes]]:
        """Lists of new records."""
        for chunk in self._tail.chunks(until):
            yield self._split(self._rest + chunk if self._rest else chunk)

    def _split(self, data: bytes) -> list[bytes]:
        """The whole records in `data`, whose first byte is at `_offset` in the file; what is torn is kept."""
        records = []
        offset, size = self._offset, len(data)
        place = self._next - offset
        unpack = _PIECE_HEAD.unpack_from
        while place + 7 <= size:
            left = BLOCK - (offset + place) % BLOCK
            if left < 7:
                place += left  # too short for a head: padding
                continue
            checksum, length, kind = unpack(data, place)
            after = place + 7 + length
            if 7 + length > left or not _FULL <= kind <= _LAST:
                if checksum or length or kind:  # all zero is unwritten space
                    self._drop()
                self._doubtful = False
                place += left
                continue
            if after > size:
                break
            piece = data[place + 7 : after]
            if crc32(piece, _KIND_CRC[kind]) != checksum:
                # The length may be sound and the next piece good. Two bad ones in a row: only the next block helps.
                place = place + left if self._doubtful else after
                self._doubtful = not self._doubtful
                self._drop()
                continue
            self._doubtful = False
            place = after
            if kind == _FULL:
                records.append(piece)
            elif kind == _FIRST:
                self._pieces = [piece]
            elif len(self._pieces) > wire.LARGEST // BLOCK:
                self._drop()
            elif self._pieces:
                self._pieces.append(piece)
                if kind == _LAST:
                    records.append(b"".join(self._pieces))
                    self._pieces = []
        self._next = offset + place
        self._offset = offset + min(place, size)
        self._rest = data[place:]
        return records

    def _drop(self) -> None:
        self.skipped += 1
        self._pieces = []


class WandbSource:
    """The history of a run; nested values are called `outer.inner`, as W&B shows them."""

    kind = "wandb"
    problem: str | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unreadable = 0
        self._log = RecordLog(path, self._restart)
        self._rows = RowAccumulator(".", step_names=("_step",))
        self._names: dict[bytes, str] = {}
        self._has_media = False

    @property
    def skipped(self) -> int:
        return self._log.skipped + self._unreadable

    @property
    def position(self) -> int:
        return self._log.position

    @property
    def behind(self) -> bool:
        return self._log.behind

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        batch: Batch = {}
        for records in self._log.blocks(until):
            self._rows.fold_rows([row for record in records if (row := self._row(record))], batch)
        return batch

    def _restart(self) -> None:
        self._rows.reset()

    def _row(self, record: bytes) -> dict[str, Any] | None:
        """The row of a history record; nothing for records of other kinds."""
        try:
            found = _history(record)
            return self._read_row(record, *found) if found else None
        except (ValueError, IndexError, RecursionError):
            self._unreadable += 1
            return None

    def _read_row(self, data: bytes, start: int, end: int) -> dict[str, Any]:
        cut = _cut(data, start, end, self._names)
        if cut is None:
            return self._decode_row(data, start, end)
        names, values = cut
        row = dict(zip(names, _parse(b"[" + b",".join(values) + b"]"), strict=True))
        if "_step" not in row:
            return self._decode_row(data, start, end)
        return _without_media(row) if self._has_media else row

    def _decode_row(self, data: bytes, start: int, end: int) -> dict[str, Any]:
        """Any row, item by item."""
        row: dict[str, Any] = {}
        step = None
        budget = wire.DecodeBudget()
        for part in wire.fields(data, start, end, budget):
            if part.number == 1:
                path, value, key = _item(data, part, budget)
                row[self._learn(path, key)] = value
            elif part.number == 2:
                inner = next(wire.fields(data, part.start, part.end, budget), None)
                step = wire.signed(inner.value) if inner is not None else 0
        if step is not None:
            row.setdefault("_step", step)
        return _without_media(row) if self._has_media else row

    def _learn(self, path: list[str], key: bytes) -> str:
        """Remember what the bytes of a name stand for; a run has few names, and they come again in every row."""
        name = ".".join(path)
        if len(path) > 1 and path[-1] == "_type":
            self._has_media = True
        if key and len(self._names) < 10_000:
            self._names[key] = name
        return name


def _cut(data: bytes, start: int, end: int, known: Mapping[bytes, Name]) -> tuple[list[Name], list[bytes]] | None:
    """Names and JSON values of a message of items, if all its names are known and all its items short; else nothing.

    Such a message is cut at the tag between name and value, which is several times faster than to decode it. In a
    long item the bytes of the tag may also be a length: what follows is then no known name.
    """
    head, *parts = data[start:end].split(_VALUE_JSON_TAG)
    try:
        # Of each part: the length of a value, the value, then tag and length of the next item, and its name.
        names = [known[head[2:]], *[known[part[part[0] + 3 :]] for part in parts[:-1]]]
        last = parts[-1]
        step = last[last[0] + 1 :]
        if step and (step[0] != _STEP_TAG or step[1] + 2 != len(step)):
            return None
    except (KeyError, IndexError):
        return None
    return names, [part[1 : part[0] + 1] for part in parts]


def _history(record: bytes) -> tuple[int, int] | None:
    """Where the history in a record is, if it has one."""
    place = 0
    if record[0] == _NUM_TAG:
        place = 2
        while record[place - 1] >= 0x80:
            place += 1
    if record[place] == _SUMMARY_TAG:
        return None  # as many as rows of history: not worth a closer look
    if record[place] == _HISTORY_TAG:
        length, start = wire.varint(record, place + 1, len(record))
        return start, start + length
    for part in wire.fields(record, place, budget=wire.DecodeBudget()):
        if part.number == _HISTORY:
            return part.start, part.end
    return None


def _item(data: bytes, item: wire.WireField, budget: wire.DecodeBudget | None = None) -> tuple[list[str], Any, bytes]:
    """One item of history, config or summary: the path of its name, its value, and the bytes that say the name.

    The bytes are empty unless the name comes first and a JSON value follows, as nearly always.
    """
    path: list[str] = []
    value: Any = None
    key = b""
    for part in wire.fields(data, item.start, item.end, budget):
        match part.number:
            case 1 | 2:
                path.append(wire.text(data, part))
            case 4:
                value = bool(part.value)
            case 5:
                value = wire.zigzag(part.value)
            case 6:
                value = wire.double(data, part)
            case 7:
                value = wire.text(data, part)
            case 8:
                value = _parse(data[part.start : part.end])
            case 16:
                value = _parse(data[part.start : part.end])
                key = data[item.start : data.rfind(_VALUE_JSON_TAG, item.start, part.start)]
    return path, value, key


def _parse(value: bytes) -> Any:
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return json.loads(value)  # knows NaN and Infinity


def _without_media(row: dict[str, Any]) -> dict[str, Any]:
    """The row without what belongs to pictures, histograms and tables: their sizes are not metrics."""
    media = tuple(name.removesuffix("_type") for name in row if name.endswith("._type"))
    return {name: value for name, value in row.items() if not name.startswith(media)} if media else row


@dataclass(slots=True)
class WandbRun:
    """What a W&B run says of itself."""

    id: str = ""
    """The id in `run-<id>.wandb`."""
    entity: str = ""
    """The user or team; empty if the run was offline and named none."""
    project: str = ""
    """The project."""
    name: str = ""
    """The display name."""
    group: str = ""
    """The group, if any."""
    job_type: str = ""
    """The job type, if any."""
    notes: str = ""
    """Notes, if any."""
    tags: list[str] = field(default_factory=list)
    """Tags, if any."""
    sweep_id: str = ""
    """The sweep the run belongs to, if any."""
    started: float | None = None
    """When the run began, in seconds since 1970."""
    exit_code: int | None = None
    """How the run ended; none if it did not say, as when it was killed or is still going."""
    config: dict[str, Any] = field(default_factory=dict)
    """The config, with all later changes, without W&B's own entry."""
    summary: dict[str, Any] = field(default_factory=dict)
    """The last value of each metric, or what the run put in its place; nested as it was logged."""


_RUN_TEXTS = {1: "id", 2: "entity", 3: "project", 6: "group", 7: "job_type", 8: "name", 9: "notes", 12: "sweep_id"}


def read_wandb_meta(path: Path) -> WandbRun:
    """Names, config and summary of a run, from its `.wandb` file; what is damaged or missing is left out."""
    reader = _MetaReader()
    log = RecordLog(path, lambda: None)
    for records in log.blocks():
        for record in records:
            try:
                reader.note(record)
            except (ValueError, IndexError, RecursionError):
                continue
    return reader.result()


class _MetaReader:
    """Gathers what the records of a log say of the run; values are parsed once, at the end."""

    def __init__(self) -> None:
        self._run = WandbRun()
        self._known: dict[bytes, tuple[str, ...]] = {}
        self._logged: dict[tuple[str, ...], bytes] = {}
        self._summary: dict[tuple[str, ...], bytes] = {}

    def result(self) -> WandbRun:
        for path, value in (self._logged | self._summary).items():
            with suppress(ValueError, RecursionError):
                _put(self._run.summary, path, _parse(value))
        self._run.config.pop("_wandb", None)
        self._run.summary.pop("_wandb", None)
        return self._run

    def note(self, record: bytes) -> None:
        for part in wire.fields(record):
            if part.number == _HISTORY:
                self._note_values(record, part, self._logged)
            elif part.number == _SUMMARY:
                self._note_values(record, part, self._summary)
            elif part.number == _CONFIG:
                _update(record, part, self._run.config)
            elif part.number == _RUN:
                _note_run(record, part, self._run)
            elif part.number == _EXIT:
                codes = [inner.value for inner in wire.fields(record, part.start, part.end) if inner.number == 1]
                self._run.exit_code = wire.signed(codes[0]) if codes else 0

    def _note_values(self, record: bytes, message: wire.WireField, into: dict[tuple[str, ...], bytes]) -> None:
        cut = _cut(record, message.start, message.end, self._known)
        if cut is not None:
            into.update(zip(*cut, strict=True))
            return
        for part in wire.fields(record, message.start, message.end):
            if part.kind != wire.LENGTH:
                continue
            names, value, key = _item(record, part)
            path = tuple(names)
            if part.number == 2:
                into.pop(path, None)  # a removed entry; in history the step, which has no name
            elif part.number == 1:
                into[path] = json.dumps(value).encode()
                if key:
                    self._known[key] = path


def _note_run(record: bytes, message: wire.WireField, run: WandbRun) -> None:
    for part in wire.fields(record, message.start, message.end):
        if part.number in _RUN_TEXTS:
            setattr(run, _RUN_TEXTS[part.number], wire.text(record, part))
        elif part.number == 4:
            _update(record, part, run.config)
        elif part.number == 5:
            _update(record, part, run.summary)
        elif part.number == 10:
            run.tags.append(wire.text(record, part))
        elif part.number == 17:
            seconds = {inner.number: inner.value for inner in wire.fields(record, part.start, part.end)}
            run.started = seconds.get(1, 0) + seconds.get(2, 0) / 1e9


def _update(record: bytes, message: wire.WireField, values: dict[str, Any]) -> None:
    for part in wire.fields(record, message.start, message.end):
        if part.number == 1:
            _put(values, *_item(record, part)[:2])
        elif part.number == 2:
            _remove(values, _item(record, part)[0])


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        inner = values.get(name)
        if not isinstance(inner, dict):
            inner = values[name] = {}
        values = inner
    if path:
        values[path[-1]] = value


def _remove(values: dict[str, Any], path: Sequence[str]) -> None:
    for name in path[:-1]:
        inner = values.get(name)
        if not isinstance(inner, dict):
            return
        values = inner
    if path:
        values.pop(path[-1], None)
