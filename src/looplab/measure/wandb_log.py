"""`run-<id>.wandb`, the transaction log of a Weights & Biases run, read without wandb.

The file is a 7-byte header followed by a LevelDB log: blocks of 32 KiB with fragments of records, each with a checksum;
each record is a protobuf message. Offline runs store history, config and summary nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Any
from zlib import crc32

import orjson

from looplab.measure import wire
from looplab.measure.base import Batch
from looplab.measure.rows import RowAccumulator
from looplab.measure.tail import Tail

BLOCK = 32 * 1024
_FILE_HEADER = 7
_FRAGMENT_HEADER = Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_KIND_CRC = [crc32(bytes([kind])) for kind in range(5)]

# Field numbers of W&B's records, and the encoded tags (number and wire type) of some.
_HISTORY, _CONFIG, _RUN = 2, 5, 17
_NUM_TAG, _HISTORY_TAG, _SUMMARY_TAG, _STEP_TAG = 0x08, 0x12, 0x1A, 0x12
_VALUE_JSON_TAG = b"\x82\x01"


class RecordLog:
    """Complete records of a growing log; a damaged record is dropped, and reading continues after it."""

    __slots__ = ("_fragments", "_last_was_bad", "_next", "_offset", "_on_restart", "_rest", "_tail", "skipped")

    def __init__(self, path: Path, on_restart: Callable[[], None]) -> None:
        self._tail = Tail(path, self._restart)
        self._on_restart = on_restart
        self.skipped = 0
        self._reset()

    def _reset(self) -> None:
        self._rest = b""
        self._offset = 0  # position of `_rest` in the file
        self._next = _FILE_HEADER  # position of the next fragment; may be beyond the end if a block is skipped
        self._fragments: list[bytes] = []
        self._last_was_bad = False

    def _restart(self) -> None:
        self._reset()
        self._on_restart()

    @property
    def behind(self) -> bool:
        return self._tail.behind

    def blocks(self, until: float | None = None) -> Iterator[list[bytes]]:
        """Yield lists of new records."""
        for chunk in self._tail.chunks(until):
            yield self._split(self._rest + chunk if self._rest else chunk)

    def _split(self, data: bytes) -> list[bytes]:
        """Return the complete records in `data`, which begins at `_offset` in the file; the rest is buffered."""
        records = []
        offset, size = self._offset, len(data)
        position = self._next - offset
        unpack = _FRAGMENT_HEADER.unpack_from
        while position + 7 <= size:
            left = BLOCK - (offset + position) % BLOCK
            if left < 7:
                position += left  # too short for a header: padding
                continue
            checksum, length, kind = unpack(data, position)
            after = position + 7 + length
            if 7 + length > left or not _FULL <= kind <= _LAST:
                if checksum or length or kind:  # all zeros: unwritten space
                    self._drop()
                self._last_was_bad = False
                position += left
                continue
            if after > size:
                break
            fragment = data[position + 7 : after]
            if crc32(fragment, _KIND_CRC[kind]) != checksum:
                # The length may still be right. After two bad fragments in a row, continue at the next block.
                position = position + left if self._last_was_bad else after
                self._last_was_bad = not self._last_was_bad
                self._drop()
                continue
            self._last_was_bad = False
            position = after
            if kind == _FULL:
                records.append(fragment)
            elif kind == _FIRST:
                self._fragments = [fragment]
            elif len(self._fragments) > wire.MAX_RECORD // BLOCK:
                self._drop()
            elif self._fragments:
                self._fragments.append(fragment)
                if kind == _LAST:
                    records.append(b"".join(self._fragments))
                    self._fragments = []
        self._next = offset + position
        self._offset = offset + min(position, size)
        self._rest = data[position:]
        return records

    def _drop(self) -> None:
        self.skipped += 1
        self._fragments = []


class WandbSource:
    """The history of a run; nested values are named `outer.inner`, as in W&B."""

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
        """Return the row of a history record; None for other records."""
        try:
            span = _find_history(record)
            return self._read_row(record, *span) if span else None
        except (ValueError, IndexError, RecursionError):
            self._unreadable += 1
            return None

    def _read_row(self, data: bytes, start: int, end: int) -> dict[str, Any]:
        items = _split_items(data, start, end, self._names)
        if items is None:
            return self._decode_row(data, start, end)
        names, values = items
        row = dict(zip(names, _parse_json(b"[" + b",".join(values) + b"]"), strict=True))
        if "_step" not in row:
            return self._decode_row(data, start, end)
        return _without_media(row) if self._has_media else row

    def _decode_row(self, data: bytes, start: int, end: int) -> dict[str, Any]:
        """Decode any row, item by item."""
        row: dict[str, Any] = {}
        step = None
        budget = wire.DecodeBudget()
        for part in wire.fields(data, start, end, budget):
            if part.number == 1:
                path, value, key = _decode_item(data, part, budget)
                row[self._remember_name(path, key)] = value
            elif part.number == 2:
                inner = next(wire.fields(data, part.start, part.end, budget), None)
                step = wire.signed(inner.value) if inner is not None else 0
        if step is not None:
            row.setdefault("_step", step)
        return _without_media(row) if self._has_media else row

    def _remember_name(self, path: list[str], key: bytes) -> str:
        """Cache the name of its encoded bytes: a run has few names, and they are repeated in every row."""
        name = ".".join(path)
        if len(path) > 1 and path[-1] == "_type":
            self._has_media = True
        if key and len(self._names) < 10_000:
            self._names[key] = name
        return name


def _split_items(data: bytes, start: int, end: int, known: Mapping[bytes, str]) -> tuple[list[str], list[bytes]] | None:
    """Return names and JSON values of a message if all its names are known and all its items are short; else None.

    Such a message is split at the tag between name and value, which is several times faster than decoding. In a long
    item the bytes of the tag may also be a length: no known name follows then.
    """
    first, *parts = data[start:end].split(_VALUE_JSON_TAG)
    try:
        # Each part: the length of a value, the value, tag and length of the next item, and its name.
        names = [known[first[2:]], *[known[part[part[0] + 3 :]] for part in parts[:-1]]]
        last = parts[-1]
        step = last[last[0] + 1 :]
        if step and (step[0] != _STEP_TAG or step[1] + 2 != len(step)):
            return None
    except (KeyError, IndexError):
        return None
    return names, [part[1 : part[0] + 1] for part in parts]


def _find_history(record: bytes) -> tuple[int, int] | None:
    """Return start and end of the history in a record; None if it has none."""
    position = 0
    if record[0] == _NUM_TAG:
        position = 2
        while record[position - 1] >= 0x80:
            position += 1
    if record[position] == _SUMMARY_TAG:
        return None  # as frequent as history, so skipped quickly
    if record[position] == _HISTORY_TAG:
        length, start = wire.varint(record, position + 1, len(record))
        return start, start + length
    for part in wire.fields(record, position, budget=wire.DecodeBudget()):
        if part.number == _HISTORY:
            return part.start, part.end
    return None


def _decode_item(
    data: bytes, item: wire.WireField, budget: wire.DecodeBudget | None = None
) -> tuple[list[str], Any, bytes]:
    """Decode one item of history, config or summary into the path of its name, its value, and its encoded name.

    The encoded name is empty unless the name comes first and a JSON value follows, which is the usual case.
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
                value = _parse_json(data[part.start : part.end])
            case 16:
                value = _parse_json(data[part.start : part.end])
                key = data[item.start : data.rfind(_VALUE_JSON_TAG, item.start, part.start)]
    return path, value, key


def _parse_json(value: bytes) -> Any:
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return json.loads(value)  # accepts NaN and Infinity


def _without_media(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without the entries of images, histograms and tables, such as their sizes."""
    media = tuple(name.removesuffix("_type") for name in row if name.endswith("._type"))
    return {name: value for name, value in row.items() if not name.startswith(media)} if media else row


def read_wandb_config(path: Path) -> dict[str, Any]:
    """Return the config of a run with its later changes, without W&B's own entry; damaged records are skipped."""
    config: dict[str, Any] = {}
    for records in RecordLog(path, config.clear).blocks():
        for record in records:
            with suppress(ValueError, IndexError, RecursionError):
                for part in wire.fields(record):
                    if part.number == _CONFIG:
                        _apply_update(record, part, config)
                    elif part.number == _RUN:
                        for inner in wire.fields(record, part.start, part.end):
                            if inner.number == 4:
                                _apply_update(record, inner, config)
    config.pop("_wandb", None)
    return config


def _apply_update(record: bytes, message: wire.WireField, values: dict[str, Any]) -> None:
    for part in wire.fields(record, message.start, message.end):
        if part.number == 1:
            _set_nested(values, *_decode_item(record, part)[:2])
        elif part.number == 2:
            _remove_nested(values, _decode_item(record, part)[0])


def _set_nested(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        inner = values.get(name)
        if not isinstance(inner, dict):
            inner = values[name] = {}
        values = inner
    if path:
        values[path[-1]] = value


def _remove_nested(values: dict[str, Any], path: Sequence[str]) -> None:
    for name in path[:-1]:
        inner = values.get(name)
        if not isinstance(inner, dict):
            return
        values = inner
    if path:
        values.pop(path[-1], None)
