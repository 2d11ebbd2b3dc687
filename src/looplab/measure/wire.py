"""The protobuf wire format, as far as metric files need it, so that neither wandb nor TensorFlow has to be there."""

from __future__ import annotations

from collections.abc import Iterator
from struct import unpack_from
from typing import NamedTuple

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
LARGEST = 16 << 20
"""Bytes of a record; a larger one is skipped without being parsed."""
MOST_FIELDS = 200_000


class WireError(ValueError):
    """These bytes are not a message."""


class WireField(NamedTuple):
    """One field of a message, not yet interpreted."""

    number: int
    kind: int
    """`VARINT`, `FIXED64`, `LENGTH` or `FIXED32`."""
    value: int
    """The number of a varint; for the others 0, since only the caller knows what the bytes mean."""
    start: int
    """Where the bytes of the value begin."""
    end: int
    """Where they end."""


class DecodeBudget:
    """How many more fields of a record are read, in all its messages together: a crafted one may hold millions."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MOST_FIELDS


def fields(
    data: bytes, start: int = 0, end: int | None = None, budget: DecodeBudget | None = None
) -> Iterator[WireField]:
    """The fields of the message in `data[start:end]`."""
    stop = len(data) if end is None else end
    place = start
    while place < stop:
        if budget is not None:
            budget.left -= 1
            if budget.left < 0:
                raise WireError("too many fields")
        tag, place = varint(data, place, stop)
        kind = tag & 7
        if kind == VARINT:
            value, after = varint(data, place, stop)
            yield WireField(tag >> 3, kind, value, place, after)
        else:
            if kind == LENGTH:
                length, place = varint(data, place, stop)
                after = place + length
            elif kind in (FIXED64, FIXED32):
                after = place + (8 if kind == FIXED64 else 4)
            else:
                raise WireError(f"wire type {kind}")
            if after > stop:
                raise WireError("a field runs over the end of its message")
            yield WireField(tag >> 3, kind, 0, place, after)
        place = after


def varint(data: bytes, place: int, stop: int) -> tuple[int, int]:
    """The number at `place` and where it ends."""
    value = shift = 0
    while place < stop and shift < 70:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, place
        shift += 7
    raise WireError("a number runs over the end of its message")


def text(data: bytes, field: WireField) -> str:
    return data[field.start : field.end].decode("utf-8", "replace")


def signed(value: int) -> int:
    """An int64 or int32, which is negative if its top bit is set."""
    return value - (1 << 64) if value >> 63 else value


def zigzag(value: int) -> int:
    """A sint64, whose sign is its lowest bit."""
    return (value >> 1) ^ -(value & 1)


def double(data: bytes, field: WireField) -> float:
    if field.kind != FIXED64:
        raise WireError("a double has eight bytes")
    value: float = unpack_from("<d", data, field.start)[0]
    return value
