"""`events.out.tfevents.*`, TensorBoard's event files, read without TensorFlow or TensorBoard.

The file is a sequence of TFRecords (length, checksum of the length, message, checksum of the message); each message is
an `Event` with a time, a step and the values of some tags. A scalar is a plain number or a tensor with one element.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import xor
from pathlib import Path
from typing import NamedTuple

from looplab.measure import wire
from looplab.measure.base import Batch, Curve
from looplab.measure.tail import Tail

_HEADER, _FOOTER = 12, 4
_NOT_ZERO = re.compile(rb"[^\0]")
_MAX_CHECKED = 4096
"""Maximum size of messages whose checksum is verified: scalars are small, and a large image would take a second."""

# Field numbers of Event, Summary.Value and TensorProto; and the encoded tags of two fields.
_STEP, _SUMMARY = 2, 5
_TAG, _SIMPLE_VALUE, _TENSOR, _METADATA = 1, 2, 8, 9
_DTYPE, _SHAPE, _CONTENT, _FLOAT_VAL, _DOUBLE_VAL, _HALF_VAL = 1, 2, 4, 5, 6, 13
_INTEGER_VALS = frozenset({7, 10, 11, 16, 17})  # int, int64, bool, uint32, uint64
_TIME_TAG, _STEP_TAG = 0x09, 0x10

_BFLOAT16 = 14
_FORMATS = {1: "f", 2: "d", 3: "i", 4: "B", 5: "h", 6: "b", 9: "q", 10: "?", 17: "H", 19: "e", 22: "I", 23: "Q"}
"""Data type → struct format of one element in `tensor_content`."""


class RecordFile:
    """Complete TFRecords of a growing file; after a damaged header, reading continues at the next valid one."""

    __slots__ = ("_lengths", "_lost", "_on_restart", "_rest", "_skip", "_tail", "skipped")

    def __init__(self, path: Path, on_restart: Callable[[], None]) -> None:
        self._tail = Tail(path, self._restart)
        self._on_restart = on_restart
        self._rest = b""
        self._skip = 0  # bytes of an oversized message that are still to be skipped
        self._lost = False
        self._lengths: dict[bytes, int] = {}
        self.skipped = 0

    @property
    def behind(self) -> bool:
        return self._tail.behind

    def blocks(self, until: float | None = None) -> Iterator[list[bytes]]:
        """Yield lists of new messages, each followed by its checksum, which is not verified yet."""
        for chunk in self._tail.chunks(until):
            skipped, self._skip = self._skip, max(0, self._skip - len(chunk))
            if self._skip == 0:
                chunk = chunk[skipped:] if skipped else chunk
                yield self._split(self._rest + chunk if self._rest else chunk)

    def _restart(self) -> None:
        self._rest = b""
        self._skip = 0
        self._lost = False
        self._on_restart()

    def _split(self, data: bytes) -> list[bytes]:
        messages: list[bytes] = []
        known = self._lengths
        position, size = 0, len(data)
        while position + _HEADER <= size:
            # Records have few different lengths, so few headers need a checksum.
            header = data[position : position + _HEADER]
            length = known.get(header)
            if length is None:
                length = self._read_length(header)
                if length is None:
                    position = self._find_header(data, position)
                    continue
                self._lost = False
            end = position + _HEADER + length + _FOOTER
            if length > wire.MAX_RECORD:
                self.skipped += 1
                self._skip = max(0, end - size)
                position = end
                continue
            if end > size:
                break
            messages.append(data[position + _HEADER : end])
            position = end
        self._rest = data[position:]
        return messages

    def _read_length(self, header: bytes) -> int | None:
        """Return the length in a header; None if its checksum is wrong."""
        if _mask(_crc(header[:8])) != int.from_bytes(header[8:], "little"):
            return None
        length = int.from_bytes(header[:8], "little")
        if len(self._lengths) < 10_000:
            self._lengths[header] = length
        return length

    def _find_header(self, data: bytes, position: int) -> int:
        """Return where the next header after `position` may be: lengths are small, so their upper bytes are zero."""
        if not self._lost:
            self._lost = True
            self.skipped += 1
        zeros = data.find(b"\0\0\0\0", position + 5)
        if zeros < 0:  # a header may begin in the last bytes
            return max(position + 1, len(data) - 7)
        # No header is all zeros, which a power failure may leave in a file.
        after = _NOT_ZERO.search(data, zeros)
        return max(zeros - 4, (after.start() if after else len(data)) - _HEADER + 1)


class _Tag:
    """The curve of one tag, and the template whose events are still to be added to it."""

    __slots__ = ("curve", "waiting")

    def __init__(self) -> None:
        self.curve = Curve()
        self.waiting: _Template | None = None


class _Template:
    """Events with one scalar of the same tag and format, which differ only in time, step and value.

    They are collected and decoded together: columns are unpacked at once, and one checksum is computed for all. Since
    CRCs are linear, the checksum of the XOR of the messages is the XOR of their checksums.
    """

    __slots__ = ("after", "before", "format", "messages", "size", "step_end", "tag")

    def __init__(self, tag: _Tag, before: bytes, format: str, after: bytes) -> None:
        self.tag = tag
        self.before = before  # the bytes between step and value
        self.format = format
        self.after = after
        self.messages: list[bytes] = []  # each followed by its checksum
        self.size = 0  # of each message; 0 while there is none
        self.step_end = 0  # where the step ends in each message

    def read(self) -> tuple[list[int], Sequence[float]] | None:
        """Return steps and values of the collected messages; None if one of them does not fit or is damaged."""
        varint = max(0, self.step_end - 10)
        layout = f"<{10 if varint else 9}x{'B' * varint}{len(self.before)}s{self.format}{len(self.after)}sI"
        if struct.calcsize(layout) != self.size:
            return None
        columns = zip(*struct.iter_unpack(layout, b"".join(self.messages)), strict=True)
        *step_bytes, before, values, after, sums = columns
        if set(before) != {self.before} or set(after) != {self.after} or not _checksums_match(self.messages, sums):
            return None
        steps = [0] * len(values)
        for index, column in enumerate(step_bytes):
            steps = [step | (byte & 0x7F) << 7 * index for step, byte in zip(steps, column, strict=True)]
        return list(map(wire.signed, steps)) if varint > 9 else steps, values


class TensorBoardSource:
    """The scalars of one event file, as written by TensorBoard, TensorFlow, PyTorch or tensorboardX."""

    kind = "tensorboard"
    problem: str | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unreadable = 0
        self._file = RecordFile(path, self._reset)
        self._reset()

    def _reset(self) -> None:
        self._tags: dict[str, _Tag] = {}
        self._templates: dict[bytes, _Template] = {}
        self._other_plugins: set[str] = set()

    @property
    def skipped(self) -> int:
        return self._file.skipped + self._unreadable

    @property
    def behind(self) -> bool:
        return self._file.behind

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        for messages in self._file.blocks(until):
            self._add(messages)
        batch: Batch = {}
        for name, tag in self._tags.items():
            if tag.curve.values:
                batch[name], tag.curve = tag.curve, Curve()
        return batch

    def _add(self, messages: list[bytes]) -> None:
        """Add events. Nearly all match a template, which is looked up by the bytes up to the end of the tag."""
        templates = self._templates
        for message in messages:
            step_end = 9
            template = None
            size = len(message)
            if size > 20 and message[0] == _TIME_TAG:
                try:
                    if message[9] == _STEP_TAG:
                        step_end = 11
                        while message[step_end - 1] >= 0x80:
                            step_end += 1
                    # Assumes one byte each for the lengths of summary, value and tag; else no template is found.
                    template = templates.get(message[step_end : step_end + 6 + message[step_end + 5]])
                except IndexError:
                    step_end = size  # damaged
            if template is None:
                self._decode(message, step_end)
                continue
            if template.size != size or template.step_end != step_end:
                self._add_waiting(template.tag)
                template.tag.waiting = template
                template.size, template.step_end = size, step_end
            template.messages.append(message)
        for tag in self._tags.values():
            self._add_waiting(tag)

    def _add_waiting(self, tag: _Tag) -> None:
        template = tag.waiting
        if template is None:
            return
        decoded = template.read()
        messages, template.messages = template.messages, []
        template.size = 0
        tag.waiting = None
        if decoded is None:
            for message in messages:
                self._decode(message)
            return
        tag.curve.steps.extend(map(float, decoded[0]))
        tag.curve.values.extend(map(float, decoded[1]))

    def _decode(self, message: bytes, step_end: int | None = None) -> None:
        """Decode any event. If `step_end`, the end of its step, is given, a single scalar becomes a template."""
        end = len(message) - _FOOTER
        try:
            if not _checksum_matches(message):
                raise wire.WireError("checksum")
            step, scalars = _decode_event(message, end, self._other_plugins)
        except (ValueError, struct.error):
            self._unreadable += 1
            return
        for scalar in scalars:
            tag = self._tags.setdefault(scalar.tag, _Tag())
            self._add_waiting(tag)
            tag.curve.add(step, scalar.value)
            if (
                step_end is not None
                and len(scalars) == 1
                and step_end + 6 <= scalar.start
                and len(self._templates) < 10_000
            ):
                key = message[step_end : step_end + 6 + message[step_end + 5]]
                after = message[scalar.start + struct.calcsize(scalar.format) : end]
                self._templates[key] = _Template(tag, message[step_end : scalar.start], scalar.format, after)


class _Scalar(NamedTuple):
    """One value of an event."""

    tag: str
    value: float
    format: str = ""
    """The struct format of its bytes; empty if their number varies."""
    start: int = -1
    """Position of its bytes; -1 if their number varies."""


def _decode_event(data: bytes, end: int, other_plugins: set[str]) -> tuple[float, list[_Scalar]]:
    """Return the step and the scalars of an event; tags of other plugins are added to `other_plugins`."""
    step = 0
    scalars: list[_Scalar] = []
    budget = wire.DecodeBudget()
    for part in wire.fields(data, 0, end, budget):
        if part.number == _STEP and part.kind == wire.VARINT:
            step = wire.signed(part.value)
        elif part.number == _SUMMARY and part.kind == wire.LENGTH:
            for value in wire.fields(data, part.start, part.end, budget):
                if value.number == 1 and value.kind == wire.LENGTH:
                    scalar = _decode_value(data, value, other_plugins, budget)
                    if scalar is not None:
                        scalars.append(scalar)
    return float(step), scalars


def _decode_value(
    data: bytes, message: wire.WireField, other_plugins: set[str], budget: wire.DecodeBudget
) -> _Scalar | None:
    tag = ""
    plain = tensor = None
    for part in wire.fields(data, message.start, message.end, budget):
        if part.number == _TAG:
            tag = wire.text(data, part)
        elif part.number == _SIMPLE_VALUE and part.kind == wire.FIXED32:
            plain = part
        elif part.number == _TENSOR and part.kind == wire.LENGTH:
            tensor = part
        elif part.number == _METADATA and _plugin_name(data, part, budget) not in ("", "scalars"):
            other_plugins.add(tag)
    if plain is not None:
        return _Scalar(tag, struct.unpack_from("<f", data, plain.start)[0], "f", plain.start)
    if tensor is None or tag in other_plugins:
        return None
    return _decode_tensor(data, tensor, tag, budget)


def _plugin_name(data: bytes, metadata: wire.WireField, budget: wire.DecodeBudget) -> str:
    for part in wire.fields(data, metadata.start, metadata.end, budget):
        if part.number == 1 and part.kind == wire.LENGTH:
            for inner in wire.fields(data, part.start, part.end, budget):
                if inner.number == 1:
                    return wire.text(data, inner)
    return ""


def _decode_tensor(data: bytes, tensor: wire.WireField, tag: str, budget: wire.DecodeBudget) -> _Scalar | None:
    """Return the element of a one-element tensor; None for a larger one, such as a histogram."""
    dtype = 0
    content: wire.WireField | None = None
    for part in wire.fields(data, tensor.start, tensor.end, budget):
        if part.number == _DTYPE:
            dtype = part.value
        elif part.number == _SHAPE and _count_elements(data, part, budget) != 1:
            return None
        elif part.number in (_CONTENT, _FLOAT_VAL, _DOUBLE_VAL, _HALF_VAL) or part.number in _INTEGER_VALS:
            content = part
    if content is None:
        return None
    size = content.end - content.start
    format = {_CONTENT: _FORMATS.get(dtype, ""), _FLOAT_VAL: "f", _DOUBLE_VAL: "d"}.get(content.number, "")
    if format:
        if size != struct.calcsize(format):
            return None
        return _Scalar(tag, float(struct.unpack_from("<" + format, data, content.start)[0]), format, content.start)
    if content.number == _CONTENT:
        if dtype != _BFLOAT16 or size != 2:
            return None
        bits = int.from_bytes(data[content.start : content.end], "little")
        return _Scalar(tag, _bfloat16(bits))
    bits = content.value if content.kind == wire.VARINT else wire.varint(data, content.start, content.end)[0]
    if content.number == _HALF_VAL:
        return _Scalar(tag, _bfloat16(bits) if dtype == _BFLOAT16 else struct.unpack("<e", struct.pack("<H", bits))[0])
    return _Scalar(tag, float(wire.signed(bits)))


def _count_elements(data: bytes, shape: wire.WireField, budget: wire.DecodeBudget) -> int:
    count = 1
    for dimension in wire.fields(data, shape.start, shape.end, budget):
        if dimension.number == 2 and dimension.kind == wire.LENGTH:
            inner = wire.fields(data, dimension.start, dimension.end, budget)
            sizes = [part.value for part in inner if part.number == 1]
            count *= min(sizes[0], 2) if sizes else 0  # only "more than one" matters
            count = min(count, 2)
    return count


def _bfloat16(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", (bits & 0xFFFF) << 16))[0]
    return value


def _make_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _make_table()


def _crc(data: bytes, start: int = 0xFFFFFFFF) -> int:
    """CRC-32C."""
    table = _TABLE
    crc = start
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ start


_MASK_DELTA = 0xA282EAD8


def _mask(crc: int) -> int:
    """Return a checksum as stored in TFRecords."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _checksum_matches(message: bytes) -> bool:
    """Return whether a message matches the checksum at its end; large ones are not checked."""
    if len(message) > _MAX_CHECKED:
        return True
    return _mask(_crc(message[:-_FOOTER])) == int.from_bytes(message[-_FOOTER:], "little")


def _checksums_match(messages: Sequence[bytes], masked: Sequence[int]) -> bool:
    """Return whether all messages, of equal size and each followed by its checksum, match their checksums."""
    together = reduce(xor, map(int.from_bytes, messages)).to_bytes(len(messages[0]))[:-_FOOTER]
    rotated = reduce(xor, [(one - _MASK_DELTA) & 0xFFFFFFFF for one in masked])
    # The initial and final values of the CRC cancel out in pairs.
    crc = _crc(together, 0xFFFFFFFF if len(messages) % 2 else 0)
    return (crc >> 15 | crc << 17) & 0xFFFFFFFF == rotated
