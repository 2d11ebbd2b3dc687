"""Tensors in the safetensors format: eight bytes that say how long the header is, the header in JSON, the raw data.

Written by hand because of the way it is used: all tensors are first copied into one buffer that is kept for the next
checkpoint, which is the only time that a trainer waits; the buffer then goes to the disk as it is. Tensors stand in the
order of the size of their elements, largest first, so that each is aligned without gaps, which the format forbids.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from looplab.errors import LabError
from looplab.trainkit.state import kind_of

DTYPES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "complex64": ("C64", 8),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1), "bool": ("BOOL", 1),
}  # fmt: skip
"""What torch and numpy call a type, what safetensors calls it, and the bytes of an element."""
_NAMES = {code: name for name, (code, _) in DTYPES.items()}
_TORCH_ONLY = frozenset(("bfloat16", "float8_e4m3fn", "float8_e5m2"))
_PIECE = 4 << 20
"""Bytes that are moved at once."""
_MUCH = 16 << 20
"""Bytes from which on a second thread helps."""
_ALIGNED = 64
"""The data begins at a multiple of this many bytes."""


class CorruptCheckpoint(LabError):
    """A file that is not what was once written."""


@dataclass(frozen=True)
class Piece:
    """Where a tensor lies in a file."""

    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]
    """Empty for a single value."""
    begin: int
    """Its first byte, from the start of the file."""
    end: int
    """The byte after its last."""


def pack(tensors: Mapping[str, Any], buffer: bytearray | None = None) -> tuple[bytearray, int]:
    """A whole file in memory, in `buffer` where that is large enough, and how many bytes it has."""
    kinds = {name: _describe(name, tensor) for name, tensor in tensors.items()}
    order = sorted(kinds, key=lambda name: (-DTYPES[kinds[name][0]][1], name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        dtype, shape = kinds[name]
        code, width = DTYPES[dtype]
        size = width * prod(shape)
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNED)
    start = 8 + len(header)
    if buffer is None or len(buffer) < start + at:
        buffer = bytearray(start + at)
    buffer[:start] = len(header).to_bytes(8, "little") + header
    _copy({name: tensors[name] for name in order}, buffer, start)
    return buffer, start + at


def contents(data: Any, file: str) -> dict[str, Piece]:
    """What lies where in the bytes of a file."""
    try:
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(bytes(data[8 : 8 + length]))
        entries.pop("__metadata__", None)
        pieces = {}
        for name, entry in entries.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            pieces[name] = Piece(entry["dtype"], tuple(entry["shape"]), begin, end)
            width = DTYPES[_NAMES[entry["dtype"]]][1]
            if not 8 + length <= begin <= end <= len(data) or end - begin != width * prod(entry["shape"]):
                raise CorruptCheckpoint(f"the tensor {name} has no place in the file", file=file)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpoint("the header of the tensors cannot be read", file=file) from error
    return pieces


def take(data: Any, piece: Piece, kind: str) -> Any:
    """A copy of one tensor, as the kind that it was: torch, numpy, scalar or bytes."""
    name, count = _NAMES[piece.dtype], prod(piece.shape)
    if kind == "bytes":
        return bytes(data[piece.begin : piece.end])
    if kind == "torch":
        torch = _module("torch")
        if count == 0:
            return torch.empty(piece.shape, dtype=getattr(torch, name))
        flat = torch.frombuffer(data, dtype=getattr(torch, name), count=count, offset=piece.begin)
        return flat.reshape(piece.shape).clone()
    numpy = _module("numpy")
    array = numpy.frombuffer(data, dtype=numpy.dtype(name).newbyteorder("<"), count=count, offset=piece.begin)
    array = array.astype(name).reshape(piece.shape)  # a copy, in the order of this machine
    return array[()] if kind == "scalar" else array


def _module(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LabError(f"the checkpoint holds tensors of {name}, which is not installed") from error


def _describe(place: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    kind = kind_of(tensor)
    if kind == "bytes":
        return "uint8", (len(tensor),)
    dtype = str(tensor.dtype).removeprefix("torch.") if kind == "torch" else tensor.dtype.name
    plain = tensor.layout is sys.modules["torch"].strided if kind == "torch" else dtype not in _TORCH_ONLY
    if dtype not in DTYPES or not plain or getattr(tensor, "is_meta", False):
        what = dtype if plain else f"{getattr(tensor, 'layout', 'numpy')} {dtype}"
        raise LabError(f"the state has a tensor of {what} at {place}, which a checkpoint cannot hold")
    return dtype, tuple(tensor.shape)


def _copy(tensors: Mapping[str, Any], buffer: bytearray, at: int) -> None:
    """Put the data of all tensors into the buffer, one after the other."""
    import ctypes

    base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    if sys.byteorder != "little":
        raise LabError("checkpoints are little-endian, and this machine is not")
    moves: list[tuple[int, int, int]] = []
    alive = []  # what was made only to be copied
    for tensor in tensors.values():
        kind = kind_of(tensor)
        if kind == "bytes":
            buffer[at : at + len(tensor)] = tensor
            at += len(tensor)
            continue
        if kind == "torch":
            tensor = tensor.detach()
            if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
            source = tensor.data_ptr()
        else:
            numpy = sys.modules["numpy"]
            tensor = numpy.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("="))
            source = tensor.ctypes.data
        alive.append(tensor)
        moves += [(base + at + i, source + i, min(_PIECE, tensor.nbytes - i)) for i in range(0, tensor.nbytes, _PIECE)]
        at += tensor.nbytes
    # One plain move is half again as fast as the copies of torch, and a trainer waits for it; where there is much to
    # move, a second core helps (a move holds no lock of Python's).
    if len(moves) < 2 or sum(size for *_, size in moves) < _MUCH or not _cores() > 1:
        _move(moves)
        return
    import threading

    other = threading.Thread(target=_move, args=(moves[::2],))
    other.start()
    _move(moves[1::2])
    other.join()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _move(moves: list[tuple[int, int, int]]) -> None:
    import ctypes

    for target, source, size in moves:
        ctypes.memmove(target, source, size)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from looplab.trainkit.deprecated import renamed

        return renamed(__name__, name)
