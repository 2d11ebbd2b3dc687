"""Training state as JSON plus named tensors, and back, so that checkpoints need no pickle.

A state is any nesting of dicts, lists and tuples of tensors (torch or numpy), numbers, strings, bools, None and bytes.
`flatten` returns a tree that is strict JSON, and the tensors by name; `unflatten` is its inverse. In the tree, lists,
strings, finite floats, 64-bit ints and dicts with string keys are stored as they are. Everything else is an object with
the key "$", which names its type:

    {"$": "tensor", "name": "model/0.weight", "kind": "torch"}     kind: torch, numpy, scalar (numpy's), bytes
    {"$": "tuple", "items": [0.9, 0.999]}
    {"$": "dict", "items": [[0, "keys that are not strings"], [1, "…"]]}
    {"$": "counter", "items": [[30, 1]]}                           a collections.Counter, as in MultiStepLR
    {"$": "int", "hex": "0x1ffffffffffffffffff"}
    {"$": "float", "text": "nan"}

Other dict types (OrderedDict, defaultdict) come back as plain dicts. Any other type is a LabError with its path.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from looplab.errors import LabError

_INT64_LIMIT = 1 << 63
"""Larger ints are stored in hex: JSON readers other than Python's would round them."""


def flatten(state: Any) -> tuple[Any, dict[str, Any]]:
    """Return the tree and the tensors of a state. The tensors are not copied."""
    tensors: dict[str, Any] = {}
    return _encode(state, "", tensors), tensors


def unflatten(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Rebuild a state from what `flatten` returned."""
    return rebuild(tree, lambda name, kind: tensors[name])


def rebuild(tree: Any, load_tensor: Callable[[str, str], Any]) -> Any:
    """Like `unflatten`, but load each tensor on demand with `load_tensor(name, kind)`."""
    if isinstance(tree, list):
        return [rebuild(item, load_tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get("$")
    if kind is None:
        return {key: rebuild(value, load_tensor) for key, value in tree.items()}
    if kind == "tensor":
        return load_tensor(tree["name"], tree["kind"])
    if kind == "tuple":
        return tuple(rebuild(item, load_tensor) for item in tree["items"])
    if kind in ("dict", "counter"):
        pairs = {rebuild(key, load_tensor): rebuild(value, load_tensor) for key, value in tree["items"]}
        return Counter(pairs) if kind == "counter" else pairs
    if kind == "int":
        return int(tree["hex"], 16)
    if kind == "float":
        return float(tree["text"])
    raise LabError(f"the state contains an unknown type: {kind!r}", hint="it was written by a newer looplab")


def tensor_kind(value: object) -> str | None:
    """Return "torch", "numpy", "scalar" (numpy's) or "bytes" for values stored as tensors, None for all others.

    Imports neither torch nor numpy: a value of theirs can only exist if they are imported already.
    """
    if isinstance(value, bytes):
        return "bytes"
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return "torch"
    if numpy is not None and isinstance(value, numpy.ndarray):
        return "numpy"
    if numpy is not None and isinstance(value, numpy.generic):
        return "scalar"
    return None


def _encode(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    if value is None or isinstance(value, bool) or type(value) is str:
        return value
    if type(value) is int:
        return value if -_INT64_LIMIT <= value < _INT64_LIMIT else {"$": "int", "hex": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$": "float", "text": repr(value)}
    if type(value) is list:
        return [_encode(item, f"{path}/{number}", tensors) for number, item in enumerate(value)]
    if type(value) is tuple:
        items = [_encode(item, f"{path}/{number}", tensors) for number, item in enumerate(value)]
        return {"$": "tuple", "items": items}
    if isinstance(value, dict):
        if type(value) is not Counter and all(type(key) is str and key != "$" for key in value):
            return {key: _encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
        pairs = [[_encode_key(key, path), _encode(item, f"{path}/{key}", tensors)] for key, item in value.items()]
        return {"$": "counter" if type(value) is Counter else "dict", "items": pairs}
    kind = tensor_kind(value)
    if kind is None:
        raise LabError(
            f"a checkpoint cannot store the {type(value).__name__} at {path[1:] or 'the top level'}",
            hint="use dicts, lists and tuples of tensors, numbers, strings, bools, None and bytes",
        )
    name = _unique_name(path[1:] or "state", tensors)
    tensors[name] = value
    return {"$": "tensor", "name": name, "kind": kind}


def _encode_key(key: object, path: str) -> Any:
    """Encode a dict key as JSON. Tensors are not allowed: they compare by identity, not by value."""
    if type(key) is tuple:
        return {"$": "tuple", "items": [_encode_key(item, path) for item in key]}
    if not (key is None or type(key) in (bool, int, float, str)):
        raise LabError(
            f"the state has a key of type {type(key).__name__} at {path[1:] or 'the top level'}",
            hint="keys must be strings, numbers, bools, None, or tuples of these",
        )
    return _encode(key, path, {})


def _unique_name(path: str, taken: Mapping[str, Any]) -> str:
    """Turn a path into a tensor name: valid UTF-8, unique, and not reserved by safetensors."""
    name = base = path.encode("utf-8", "replace").decode("utf-8")
    number = 1
    while name in taken or name == "__metadata__":
        number += 1
        name = f"{base}#{number}"
    return name
