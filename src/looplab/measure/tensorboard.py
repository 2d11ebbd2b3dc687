"""`events.out.tfevents.*`, TensorBoard's event files, read without TensorFlow or TensorBoard.

The file is a row of TFRecords (length, checksum of the length, message, checksum of the message); each message is an
`Event` with a time, a step and the values of some tags. A scalar is a plain number or a tensor of one element.
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

_HEAD, _FOOT = 12, 4
_NOT_ZERO = re.compile(rb"[^\0]")
_LARGEST_TO_SUM = 4096
"""Messages up to this size are summed: scalars are small, and Python would take a second for a large picture."""

# Numbers of fields of Event, of Summary.Value, and of TensorProto; and two as they look in the bytes.
_STEP, _SUMMARY = 2, 5
_TAG, _SIMPLE_VALUE, _TENSOR, _METADATA = 1, 2, 8, 9
_DTYPE, _SHAPE, _CONTENT, _FLOAT_VAL, _DOUBLE_VAL, _HALF_VAL = 1, 2, 4, 5, 6, 13
_INTEGER_VALS = frozenset({7, 10, 11, 16, 17})  # of int, int64, bool, uint32, uint64
_TIME_TAG, _STEP_TAG = 0x09, 0x10

_BFLOAT16 = 14
_FORMS = {1: "f", 2: "d", 3: "i", 4: "B", 5: "h", 6: "b", 9: "q", 10: "?", 17: "H", 19: "e", 22: "I", 23: "Q"}
"""How one element looks in `tensor_content`, by data type."""


class RecordFile:
    """Whole TFRecords of a growing file; after a damaged head, reading goes on at the next that is sound."""

    __slots__ = ("_lengths", "_lost", "_on_restart", "_rest", "_skip", "_tail", "skipped")

    def __init__(self, path: Path, on_restart: Callable[[], None]) -> None:
        self._tail = Tail(path, self._restart)
        self._on_restart = on_restart
        self._rest = b""
        self._skip = 0  # bytes of a large message that are still to come
        self._lost = False
        self._lengths: dict[bytes, int] = {}
        self.skipped = 0

    @property
    def position(self) -> int:
        return self._tail.position

    @property
    def behind(self) -> bool:
        return self._tail.behind

    def blocks(self, until: float | None = None) -> Iterator[list[bytes]]:
        """Lists of new messages, each with its checksum at its end, not yet checked."""
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
        place, size = 0, len(data)
        while place + _HEAD <= size:
            # Records have few different lengths, so that few heads need a sum.
            head = data[place : place + _HEAD]
            length = known.get(head)
            if length is None:
                length = self._length(head)
                if length is None:
                    place = self._search(data, place)
                    continue
                self._lost = False
            end = place + _HEAD + length + _FOOT
            if length > wire.LARGEST:
                self.skipped += 1
                self._skip = max(0, end - size)
                place = end
                continue
            if end > size:
                break
            messages.append(data[place + _HEAD : end])
            place = end
        self._rest = data[place:]
        return messages

    def _length(self, head: bytes) -> int | None:
        """The length that a head tells, if its sum is right."""
        if _mask(_crc(head[:8])) != int.from_bytes(head[8:], "little"):
            return None
        length = int.from_bytes(head[:8], "little")
        if len(self._lengths) < 10_000:
            self._lengths[head] = length
        return length

    def _search(self, data: bytes, place: int) -> int:
        """Where after `place` the next head may be: lengths are small, so that their upper bytes are zero."""
        if not self._lost:
            self._lost = True
            self.skipped += 1
        zeros = data.find(b"\0\0\0\0", place + 5)
        if zeros < 0:  # the head may still begin in the last bytes
            return max(place + 1, len(data) - 7)
        # No head is all zeros, which is what a power cut may leave of a file.
        after = _NOT_ZERO.search(data, zeros)
        return max(zeros - 4, (after.start() if after else len(data)) - _HEAD + 1)


class _Tag:
    """The curve of one tag, and the template whose events wait to be added to it."""

    __slots__ = ("curve", "waiting")

    def __init__(self) -> None:
        self.curve = Curve()
        self.waiting: _Template | None = None


class _Template:
    """Events with one scalar, of the same tag and the same form, which differ in time, step and value alone.

    They are gathered and read together. Columns are unpacked at once; and one checksum is taken for all, over the
    exclusive or of the messages, which is the exclusive or of their checksums, since CRCs are linear.
    """

    __slots__ = ("after", "before", "form", "messages", "place", "size", "tag")

    def __init__(self, tag: _Tag, before: bytes, form: str, after: bytes) -> None:
        self.tag = tag
        self.before = before  # what is between step and value
        self.form = form
        self.after = after
        self.messages: list[bytes] = []  # each with its checksum
        self.size = 0  # of each of them; 0 while none waits
        self.place = 0  # where in each of them the step ends

    def read(self) -> tuple[list[int], Sequence[float]] | None:
        """Steps and values of the gathered messages; nothing if one of them is not as it should be."""
        varint = max(0, self.place - 10)
        layout = f"<{10 if varint else 9}x{'B' * varint}{len(self.before)}s{self.form}{len(self.after)}sI"
        if struct.calcsize(layout) != self.size:
            return None
        columns = zip(*struct.iter_unpack(layout, b"".join(self.messages)), strict=True)
        *step_bytes, before, values, after, sums = columns
        if set(before) != {self.before} or set(after) != {self.after} or not _sums_are_right(self.messages, sums):
            return None
        steps = [0] * len(values)
        for index, column in enumerate(step_bytes):
            steps = [step | (byte & 0x7F) << 7 * index for step, byte in zip(steps, column, strict=True)]
        return list(map(wire.signed, steps)) if varint > 9 else steps, values


class TensorBoardSource:
    """The scalars of one event file, as TensorBoard, TensorFlow, PyTorch or tensorboardX write them."""

    kind = "tensorboard"
    problem: str | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unreadable = 0
        self._file = RecordFile(path, self._forget)
        self._forget()

    def _forget(self) -> None:
        self._tags: dict[str, _Tag] = {}
        self._templates: dict[bytes, _Template] = {}
        self._other_plugins: set[str] = set()

    @property
    def skipped(self) -> int:
        return self._file.skipped + self._unreadable

    @property
    def position(self) -> int:
        return self._file.position

    @property
    def behind(self) -> bool:
        return self._file.behind

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        for messages in self._file.blocks(until):
            self._read(messages)
        batch: Batch = {}
        for name, tag in self._tags.items():
            if tag.curve.values:
                batch[name], tag.curve = tag.curve, Curve()
        return batch

    def _read(self, messages: list[bytes]) -> None:
        """Read events: nearly all follow a template, which is found by the bytes up to the end of the tag."""
        templates = self._templates
        for message in messages:
            place = 9
            template = None
            size = len(message)
            if size > 20 and message[0] == _TIME_TAG:
                try:
                    if message[9] == _STEP_TAG:
                        place = 11
                        while message[place - 1] >= 0x80:
                            place += 1
                    # The lengths of summary, value and tag take a byte each, or no template is found.
                    template = templates.get(message[place : place + 6 + message[place + 5]])
                except IndexError:
                    place = size  # damaged
            if template is None:
                self._decode(message, place)
                continue
            if template.size != size or template.place != place:
                self._add_waiting(template.tag)
                template.tag.waiting = template
                template.size, template.place = size, place
            template.messages.append(message)
        for tag in self._tags.values():
            self._add_waiting(tag)

    def _add_waiting(self, tag: _Tag) -> None:
        template = tag.waiting
        if template is None:
            return
        found = template.read()
        messages, template.messages = template.messages, []
        template.size = 0
        tag.waiting = None
        if found is None:
            for message in messages:
                self._decode(message)
            return
        tag.curve.steps.extend(map(float, found[0]))
        tag.curve.values.extend(map(float, found[1]))

    def _decode(self, message: bytes, place: int | None = None) -> None:
        """Read any event. If `place`, where its step ends, is known, one with a lone scalar becomes a template."""
        end = len(message) - _FOOT
        try:
            if not _sum_is_right(message):
                raise wire.WireError("checksum")
            step, scalars = _scalars(message, end, self._other_plugins)
        except (ValueError, struct.error):
            self._unreadable += 1
            return
        for scalar in scalars:
            tag = self._tags.setdefault(scalar.tag, _Tag())
            self._add_waiting(tag)
            tag.curve.add(step, scalar.value)
            if place is not None and len(scalars) == 1 and place + 6 <= scalar.start and len(self._templates) < 10_000:
                key = message[place : place + 6 + message[place + 5]]
                after = message[scalar.start + struct.calcsize(scalar.form) : end]
                self._templates[key] = _Template(tag, message[place : scalar.start], scalar.form, after)


class _Scalar(NamedTuple):
    """One value of an event."""

    tag: str
    value: float
    form: str = ""
    """How its bytes are unpacked; empty if their number varies."""
    start: int = -1
    """Where its bytes begin; -1 if their number varies."""


def _scalars(data: bytes, end: int, other_plugins: set[str]) -> tuple[float, list[_Scalar]]:
    """The step of an event and its scalars; tags found to be something else are added to `other_plugins`."""
    step = 0
    scalars: list[_Scalar] = []
    budget = wire.DecodeBudget()
    for part in wire.fields(data, 0, end, budget):
        if part.number == _STEP and part.kind == wire.VARINT:
            step = wire.signed(part.value)
        elif part.number == _SUMMARY and part.kind == wire.LENGTH:
            for value in wire.fields(data, part.start, part.end, budget):
                if value.number == 1 and value.kind == wire.LENGTH:
                    scalar = _scalar(data, value, other_plugins, budget)
                    if scalar is not None:
                        scalars.append(scalar)
    return float(step), scalars


def _scalar(data: bytes, message: wire.WireField, other_plugins: set[str], budget: wire.DecodeBudget) -> _Scalar | None:
    tag = ""
    plain = tensor = None
    for part in wire.fields(data, message.start, message.end, budget):
        if part.number == _TAG:
            tag = wire.text(data, part)
        elif part.number == _SIMPLE_VALUE and part.kind == wire.FIXED32:
            plain = part
        elif part.number == _TENSOR and part.kind == wire.LENGTH:
            tensor = part
        elif part.number == _METADATA and _plugin(data, part, budget) not in ("", "scalars"):
            other_plugins.add(tag)
    if plain is not None:
        return _Scalar(tag, struct.unpack_from("<f", data, plain.start)[0], "f", plain.start)
    if tensor is None or tag in other_plugins:
        return None
    return _of_tensor(data, tensor, tag, budget)


def _plugin(data: bytes, metadata: wire.WireField, budget: wire.DecodeBudget) -> str:
    for part in wire.fields(data, metadata.start, metadata.end, budget):
        if part.number == 1 and part.kind == wire.LENGTH:
            for inner in wire.fields(data, part.start, part.end, budget):
                if inner.number == 1:
                    return wire.text(data, inner)
    return ""


def _of_tensor(data: bytes, tensor: wire.WireField, tag: str, budget: wire.DecodeBudget) -> _Scalar | None:
    """The element of a tensor that has one; a tensor of more is a histogram or the like."""
    dtype = 0
    found: wire.WireField | None = None
    for part in wire.fields(data, tensor.start, tensor.end, budget):
        if part.number == _DTYPE:
            dtype = part.value
        elif part.number == _SHAPE and _elements(data, part, budget) != 1:
            return None
        elif part.number in (_CONTENT, _FLOAT_VAL, _DOUBLE_VAL, _HALF_VAL) or part.number in _INTEGER_VALS:
            found = part
    if found is None:
        return None
    size = found.end - found.start
    form = {_CONTENT: _FORMS.get(dtype, ""), _FLOAT_VAL: "f", _DOUBLE_VAL: "d"}.get(found.number, "")
    if form:
        if size != struct.calcsize(form):
            return None
        return _Scalar(tag, float(struct.unpack_from("<" + form, data, found.start)[0]), form, found.start)
    if found.number == _CONTENT:
        if dtype != _BFLOAT16 or size != 2:
            return None
        bits = int.from_bytes(data[found.start : found.end], "little")
        return _Scalar(tag, _bfloat16(bits))
    bits = found.value if found.kind == wire.VARINT else wire.varint(data, found.start, found.end)[0]
    if found.number == _HALF_VAL:
        return _Scalar(tag, _bfloat16(bits) if dtype == _BFLOAT16 else struct.unpack("<e", struct.pack("<H", bits))[0])
    return _Scalar(tag, float(wire.signed(bits)))


def _elements(data: bytes, shape: wire.WireField, budget: wire.DecodeBudget) -> int:
    count = 1
    for dimension in wire.fields(data, shape.start, shape.end, budget):
        if dimension.number == 2 and dimension.kind == wire.LENGTH:
            inner = wire.fields(data, dimension.start, dimension.end, budget)
            sizes = [part.value for part in inner if part.number == 1]
            count *= min(sizes[0], 2) if sizes else 0  # more than one is all that matters
            count = min(count, 2)
    return count


def _bfloat16(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", (bits & 0xFFFF) << 16))[0]
    return value


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


def _crc(data: bytes, start: int = 0xFFFFFFFF) -> int:
    """CRC-32C."""
    table = _TABLE
    crc = start
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ start


_MASK_DELTA = 0xA282EAD8


def _mask(crc: int) -> int:
    """A checksum as TFRecords store it."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _sum_is_right(message: bytes) -> bool:
    """Whether a message has the checksum at its end; a large one is believed."""
    if len(message) > _LARGEST_TO_SUM:
        return True
    return _mask(_crc(message[:-_FOOT])) == int.from_bytes(message[-_FOOT:], "little")


def _sums_are_right(messages: Sequence[bytes], masked: Sequence[int]) -> bool:
    """Whether all messages, of the same size and each with its checksum at its end, are as they were written."""
    together = reduce(xor, map(int.from_bytes, messages)).to_bytes(len(messages[0]))[:-_FOOT]
    rotated = reduce(xor, [(one - _MASK_DELTA) & 0xFFFFFFFF for one in masked])
    # What a CRC begins and ends with cancels out in pairs.
    crc = _crc(together, 0xFFFFFFFF if len(messages) % 2 else 0)
    return (crc >> 15 | crc << 17) & 0xFFFFFFFF == rotated
