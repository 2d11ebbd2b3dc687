"""A trainer's state as JSON and named tensors, and back: what lets a checkpoint do without pickle.

A state is any nesting of dicts, lists and tuples around tensors (torch or numpy), numbers, strings, bools, None and
bytes. `flatten` gives a tree that is strict JSON and the tensors by their names; `unflatten` is its inverse. Lists,
strings, finite floats, ints of up to 64 bits and dicts whose keys are all strings stand in the tree as themselves;
everything else is an object with "$", which says what it is:

    {"$": "tensor", "name": "model/0.weight", "kind": "torch"}     kind: torch, numpy, scalar (numpy's), bytes
    {"$": "tuple", "items": [0.9, 0.999]}
    {"$": "dict", "items": [[0, "a key that is no string"], [1, "…"]]}
    {"$": "counter", "items": [[30, 1]]}                           a collections.Counter, as MultiStepLR has one
    {"$": "int", "hex": "0x1ffffffffffffffffff"}
    {"$": "float", "text": "nan"}

Dicts of all other kinds (OrderedDict, defaultdict) come back as plain dicts. Anything else is refused by its place.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from looplab.errors import LabError

_LARGEST = 1 << 63
"""Ints from here on are written in hex: readers of JSON other than Python's would round them."""


def flatten(state: Any) -> tuple[Any, dict[str, Any]]:
    """The tree and the tensors of a state. The tensors are those of the state itself, not copies."""
    tensors: dict[str, Any] = {}
    return _encode(state, "", tensors), tensors


def unflatten(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """The state that `flatten` gave these for."""
    return rebuild(tree, lambda name, kind: tensors[name])


def rebuild(tree: Any, tensor: Callable[[str, str], Any]) -> Any:
    """`unflatten` with the tensors made when they are reached: `tensor(name, kind)`."""
    if isinstance(tree, list):
        return [rebuild(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get("$")
    if kind is None:
        return {key: rebuild(value, tensor) for key, value in tree.items()}
    if kind == "tensor":
        return tensor(tree["name"], tree["kind"])
    if kind == "tuple":
        return tuple(rebuild(item, tensor) for item in tree["items"])
    if kind in ("dict", "counter"):
        pairs = {rebuild(key, tensor): rebuild(value, tensor) for key, value in tree["items"]}
        return Counter(pairs) if kind == "counter" else pairs
    if kind == "int":
        return int(tree["hex"], 16)
    if kind == "float":
        return float(tree["text"])
    raise LabError(f"the state holds a {kind!r}, which is not known here", hint="it was written by a newer looplab")


def kind_of(value: object) -> str | None:
    """torch, numpy, scalar or bytes, for what is stored as a tensor. Imports neither torch nor numpy."""
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


def _encode(value: Any, place: str, tensors: dict[str, Any]) -> Any:
    if value is None or isinstance(value, bool) or type(value) is str:
        return value
    if type(value) is int:
        return value if -_LARGEST <= value < _LARGEST else {"$": "int", "hex": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$": "float", "text": repr(value)}
    if type(value) is list:
        return [_encode(item, f"{place}/{number}", tensors) for number, item in enumerate(value)]
    if type(value) is tuple:
        items = [_encode(item, f"{place}/{number}", tensors) for number, item in enumerate(value)]
        return {"$": "tuple", "items": items}
    if isinstance(value, dict):
        if type(value) is not Counter and all(type(key) is str and key != "$" for key in value):
            return {key: _encode(item, f"{place}/{key}", tensors) for key, item in value.items()}
        pairs = [[_key(key, place), _encode(item, f"{place}/{key}", tensors)] for key, item in value.items()]
        return {"$": "counter" if type(value) is Counter else "dict", "items": pairs}
    kind = kind_of(value)
    if kind is None:
        raise LabError(
            f"the state has a {type(value).__name__} at {place[1:] or 'its top'}, which a checkpoint cannot hold",
            hint="give it as a dict, list or tuple of tensors, numbers, strings, bools, None and bytes",
        )
    name = _free_name(place[1:] or "state", tensors)
    tensors[name] = value
    return {"$": "tensor", "name": name, "kind": kind}


def _key(key: object, place: str) -> Any:
    """A key as JSON. Tensors are no keys: they compare by what they are, not by what they hold."""
    if type(key) is tuple:
        return {"$": "tuple", "items": [_key(item, place) for item in key]}
    if not (key is None or type(key) in (bool, int, float, str)):
        raise LabError(
            f"the state has a key of type {type(key).__name__} at {place[1:] or 'its top'}",
            hint="keys are strings, numbers, bools, None, or tuples of these",
        )
    return _encode(key, place, {})


def _free_name(place: str, taken: Mapping[str, Any]) -> str:
    """The place as a name that is valid UTF-8, is not taken, and means nothing else to readers of safetensors."""
    name = base = place.encode("utf-8", "replace").decode("utf-8")
    number = 1
    while name in taken or name == "__metadata__":
        number += 1
        name = f"{base}#{number}"
    return name
