"""`events.out.tfevents.*`, TensorBoard's event files, read without TensorFlow or TensorBoard.

The file is a row of TFRecords (length, checksum of the length, message, checksum of the message); each message is an
`Event` with a step and the values of some tags. Scalars come as a plain number or as a tensor of one element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct, error, unpack_from
from typing import NamedTuple

from looplab.measure import wire
from looplab.measure.base import Batch, Curve
from looplab.measure.tail import Tail

_HEAD = 12
_FOOT = 4
_LARGEST = 1 << 30
_LENGTH = Struct("<Q")
_CRC = Struct("<I")
_FLOAT = Struct("<f")

# Numbers of fields: Event, Summary.Value, SummaryMetadata, TensorProto.
_STEP, _SUMMARY = 2, 5
_TAG, _SIMPLE_VALUE, _TENSOR, _METADATA = 1, 2, 8, 9
_DTYPE, _SHAPE, _CONTENT = 1, 2, 4
_PLUGIN_DATA, _PLUGIN_NAME = 1, 1

_CONTENT_FORMATS = {
    1: "<f",
    2: "<d",
    3: "<i",
    4: "<B",
    5: "<h",
    6: "<b",
    9: "<q",
    10: "<?",
    17: "<H",
    19: "<e",
    22: "<I",
    23: "<Q",
}
"""How one element looks in `tensor_content`, by data type."""
_BFLOAT16, _HALF = 14, 19
_FLOAT_VAL, _DOUBLE_VAL, _HALF_VAL = 5, 6, 13
_INTEGER_VALS = frozenset({7, 10, 11, 16, 17})
"""`int_val`, `int64_val`, `bool_val`, `uint32_val`, `uint64_val`."""


class RecordFile:
    """Whole TFRecords of a growing file; where one is damaged, reading goes on at the next that is sound."""

    __slots__ = ("_on_restart", "_rest", "_sound", "_tail", "skipped")

    def __init__(self, path: Path, on_restart: Callable[[], None]) -> None:
        self._tail = Tail(path, self._restart)
        self._on_restart = on_restart
        self._rest = b""
        self._sound: set[bytes] = set()
        self.skipped = 0

    @property
    def position(self) -> int:
        return self._tail.position

    def blocks(self) -> Iterator[list[tuple[bytes, int, int]]]:
        """Lists of new records, each as the bytes that hold it and where in them its message begins and ends."""
        for chunk in self._tail.chunks():
            yield self._split(self._rest + chunk if self._rest else chunk)

    def _restart(self) -> None:
        self._rest = b""
        self._on_restart()

    def _split(self, data: bytes) -> list[tuple[bytes, int, int]]:
        records = []
        place, size = 0, len(data)
        sound = self._sound
        while place + _HEAD <= size:
            head = data[place : place + _HEAD]
            # Most records have one of a few lengths, so that their heads need no new sum.
            if head not in sound and not self._check(head):
                self.skipped += 1
                place = self._resume(data, place + 1)
                continue
            start = place + _HEAD
            end = start + _LENGTH.unpack_from(head)[0]
            if end + _FOOT > size:
                break
            records.append((data, start, end))
            place = end + _FOOT
        self._rest = data[place:]
        return records
