"""The part of the protobuf wire format that metric files need, so that wandb and TensorFlow are not required."""

from __future__ import annotations

from collections.abc import Iterator
from struct import unpack_from
from typing import NamedTuple

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
MAX_RECORD = 16 << 20
"""Maximum size of a record, in bytes; a larger one is skipped without being parsed."""
MAX_FIELDS = 200_000
"""Maximum number of fields of a record."""


class WireError(ValueError):
    """The bytes are not a valid message."""


class WireField(NamedTuple):
    """One field of a message, not yet interpreted."""

    number: int
    kind: int
    """`VARINT`, `FIXED64`, `LENGTH` or `FIXED32`."""
    value: int
    """The value of a varint; 0 for other kinds, whose bytes the caller interprets."""
    start: int
    """Start of the value's bytes."""
    end: int
    """End of the value's bytes."""


class DecodeBudget:
    """The number of fields that may still be read in a record and its messages: a crafted one may have millions."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_FIELDS


def fields(
    data: bytes, start: int = 0, end: int | None = None, budget: DecodeBudget | None = None
) -> Iterator[WireField]:
    """Yield the fields of the message in `data[start:end]`."""
    stop = len(data) if end is None else end
    position = start
    while position < stop:
        if budget is not None:
            budget.left -= 1
            if budget.left < 0:
                raise WireError("too many fields")
        tag, position = varint(data, position, stop)
        kind = tag & 7
        if kind == VARINT:
            value, after = varint(data, position, stop)
            yield WireField(tag >> 3, kind, value, position, after)
        else:
            if kind == LENGTH:
                length, position = varint(data, position, stop)
                after = position + length
            elif kind in (FIXED64, FIXED32):
                after = position + (8 if kind == FIXED64 else 4)
            else:
                raise WireError(f"wire type {kind}")
            if after > stop:
                raise WireError("a field exceeds its message")
            yield WireField(tag >> 3, kind, 0, position, after)
        position = after


def varint(data: bytes, position: int, stop: int) -> tuple[int, int]:
    """Return the varint at `position` and the position after it."""
    value = shift = 0
    while position < stop and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position
        shift += 7
    raise WireError("a varint exceeds its message")


def text(data: bytes, field: WireField) -> str:
    return data[field.start : field.end].decode("utf-8", "replace")


def signed(value: int) -> int:
    """Interpret a varint as an int64 or int32."""
    return value - (1 << 64) if value >> 63 else value


def zigzag(value: int) -> int:
    """Interpret a varint as a sint64 (zigzag encoding)."""
    return (value >> 1) ^ -(value & 1)


def double(data: bytes, field: WireField) -> float:
    if field.kind != FIXED64:
        raise WireError("a double has eight bytes")
    value: float = unpack_from("<d", data, field.start)[0]
    return value
