"""Tensors in the safetensors format: the length of the header (8 bytes), the header (JSON), the raw data.

This is not the safetensors library, because a checkpoint must stall the trainer as little as possible: all tensors are
copied into one buffer, which is reused by the next checkpoint and written to disk in the background. The copy is the
only time the trainer waits. Tensors are sorted by element size, largest first, so that each is aligned without padding,
which the format forbids.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from looplab.errors import LabError
from looplab.trainkit.state import tensor_kind

DTYPES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "complex64": ("C64", 8),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1), "bool": ("BOOL", 1),
}  # fmt: skip
"""dtype in torch and numpy → dtype in safetensors, bytes per element."""
_DTYPE_OF_CODE = {code: name for name, (code, _) in DTYPES.items()}
_TORCH_ONLY = frozenset(("bfloat16", "float8_e4m3fn", "float8_e5m2"))
_COPY_CHUNK = 4 << 20
"""Bytes per memmove."""
_PARALLEL_COPY = 16 << 20
"""Bytes from which a second copying thread pays off."""
_ALIGNMENT = 64
"""The data starts at a multiple of this many bytes."""


class CorruptCheckpoint(LabError):
    """A checkpoint file is missing, truncated or altered."""


@dataclass(frozen=True)
class TensorEntry:
    """Type, shape and position of one tensor in a file."""

    dtype: str
    """Its name in safetensors: F32, …"""
    shape: tuple[int, ...]
    """Empty for a scalar."""
    begin: int
    """Offset of its first byte in the file."""
    end: int
    """Offset after its last byte."""


def pack(tensors: Mapping[str, Any], buffer: bytearray | None = None) -> tuple[bytearray, int]:
    """Serialize tensors to a safetensors file in memory.

    Args:
        tensors: Torch tensors, numpy arrays or scalars, or bytes, by name.
        buffer: A buffer to reuse if it is large enough.

    Returns:
        The buffer (`buffer` or a new one) and the size of the file in it, in bytes.
    """
    types = {name: _dtype_and_shape(name, tensor) for name, tensor in tensors.items()}
    order = sorted(types, key=lambda name: (-DTYPES[types[name][0]][1], name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        dtype, shape = types[name]
        code, width = DTYPES[dtype]
        size = width * prod(shape)
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    start = 8 + len(header)
    if buffer is None or len(buffer) < start + offset:
        buffer = bytearray(start + offset)
    buffer[:start] = len(header).to_bytes(8, "little") + header
    _copy_into(buffer, start, [tensors[name] for name in order])
    return buffer, start + offset


def read_header(data: Any, file: str) -> dict[str, TensorEntry]:
    """Return the tensors' entries by name. Raises CorruptCheckpoint, which names `file`, if the header is invalid."""
    try:
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(bytes(data[8 : 8 + length]))
        entries.pop("__metadata__", None)
        header = {}
        for name, entry in entries.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            header[name] = TensorEntry(entry["dtype"], tuple(entry["shape"]), begin, end)
            width = DTYPES[_DTYPE_OF_CODE[entry["dtype"]]][1]
            if not 8 + length <= begin <= end <= len(data) or end - begin != width * prod(entry["shape"]):
                raise CorruptCheckpoint(f"the header entry of the tensor {name} is invalid", file=file)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpoint("the header is invalid", file=file) from error
    return header


def read_tensor(data: Any, entry: TensorEntry, kind: str) -> Any:
    """Return a copy of one tensor as its original `kind`: torch, numpy, scalar or bytes."""
    dtype, count = _DTYPE_OF_CODE[entry.dtype], prod(entry.shape)
    if kind == "bytes":
        return bytes(data[entry.begin : entry.end])
    if kind == "torch":
        torch = _import("torch")
        if count == 0:
            return torch.empty(entry.shape, dtype=getattr(torch, dtype))
        flat = torch.frombuffer(data, dtype=getattr(torch, dtype), count=count, offset=entry.begin)
        return flat.reshape(entry.shape).clone()
    numpy = _import("numpy")
    array = numpy.frombuffer(data, dtype=numpy.dtype(dtype).newbyteorder("<"), count=count, offset=entry.begin)
    array = array.astype(dtype).reshape(entry.shape)  # a copy, in native byte order
    return array[()] if kind == "scalar" else array


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LabError(f"the checkpoint contains {name} tensors, but {name} is not installed") from error


def _dtype_and_shape(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    kind = tensor_kind(tensor)
    if kind == "bytes":
        return "uint8", (len(tensor),)
    dtype = str(tensor.dtype).removeprefix("torch.") if kind == "torch" else tensor.dtype.name
    is_dense = tensor.layout is sys.modules["torch"].strided if kind == "torch" else dtype not in _TORCH_ONLY
    if dtype not in DTYPES or not is_dense or getattr(tensor, "is_meta", False):
        what = dtype if is_dense else f"{getattr(tensor, 'layout', 'numpy')} {dtype}"
        raise LabError(f"a checkpoint cannot store the {what} tensor at {name}")
    return dtype, tuple(tensor.shape)


def _copy_into(buffer: bytearray, offset: int, tensors: Sequence[Any]) -> None:
    """Copy the tensors' data into the buffer, back to back from `offset`."""
    import ctypes

    base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    if sys.byteorder != "little":
        raise LabError("checkpoints need a little-endian machine")
    moves: list[tuple[int, int, int]] = []
    alive = []  # keeps temporary copies from being freed before they are moved
    for tensor in tensors:
        kind = tensor_kind(tensor)
        if kind == "bytes":
            buffer[offset : offset + len(tensor)] = tensor
            offset += len(tensor)
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
        for start in range(0, tensor.nbytes, _COPY_CHUNK):
            moves.append((base + offset + start, source + start, min(_COPY_CHUNK, tensor.nbytes - start)))
        offset += tensor.nbytes
    # The trainer waits for this. memmove is 1.5 times as fast as torch's copy, and releases the GIL, so that a second
    # thread helps with large states.
    if len(moves) < 2 or sum(size for *_, size in moves) < _PARALLEL_COPY or not _cores() > 1:
        _memmove(moves)
        return
    import threading

    other = threading.Thread(target=_memmove, args=(moves[::2],))
    other.start()
    _memmove(moves[1::2])
    other.join()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memmove(moves: list[tuple[int, int, int]]) -> None:
    import ctypes

    for target, source, size in moves:
        ctypes.memmove(target, source, size)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from looplab.trainkit.deprecated import renamed

        return renamed(__name__, name)
