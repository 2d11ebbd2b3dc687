"""What an environment is at this moment, as plain values, and how to make it so again, in this process or another.

    state = snapshot(env)
    restore(other, state)      # `other` was made by the same function and reset once

An environment, or any object inside of it, may say itself what it is: `snapshot()` and `restore(state)`. For the rest a
walker takes attributes one by one through the chain of wrappers: numbers, text, arrays, lists, tuples, dicts, sets and
deques of those, random generators, the generators of spaces, MuJoCo's data and model, and Python objects made of them.
What cannot change is left out: functions, classes, modules, specs, locks. Anything else is refused with its name, so
that nothing is forgotten silently; `find_snapshot_defect` replays some steps to check that nothing is hidden.

The form: None, bool, int (64 bits), float, str, bytes, numpy arrays (never of objects) and lists stand for themselves;
everything else is a dict with the key "kind". So it can be stored as JSON beside arrays, without pickle.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import logging
import random
import re
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import EzPickle

from looplab.errors import LabError

State = Any
"""A snapshot, or a part of one, in the form described above."""

PLAIN = {type(None), bool, float, str, bytes}
CONSTANT = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, functools.partial,
    np.ufunc, np.dtype, EnvSpec, PurePath, re.Pattern, range, slice, logging.Logger, type(threading.Lock()),
    type(threading.RLock()),
)  # fmt: skip
"""What does not change by itself; that another one has taken its place is seen by its name."""
CONSTANT_MODULES = ("gymnasium.envs.mujoco.mujoco_rendering", "dm_control.viewer")
BIT_GENERATORS = {"PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"}
BULKY = ("mesh", "tex", "skin", "bvh", "name", "text", "paths", "oct")
"""Parts of a MuJoCo model that are large, and that no task changes."""
VARYING = ("efc_", "iefc_", "island_", "map_", "contact")
"""Parts of MuJoCo's data that have as many rows as there happen to be contacts; every step begins by making them."""


class SnapshotError(LabError):
    """This environment, or this part of it, cannot be taken or made again; the message says which part."""


class Snapshotting(Protocol):
    """What an environment, or an object in it, may offer instead of being walked through."""

    def snapshot(self) -> State:
        """All that the next steps depend on, in the form of this module."""

    def restore(self, state: State) -> None:
        """Become what `snapshot` described; the object may be another one than that which was asked."""


def snapshot(env: gym.Env[Any, Any]) -> State:
    """All that the next steps of `env` depend on. SnapshotError if some of it is unknown to the walker."""
    return _Taker().take(env, type(env).__name__)


def restore(env: gym.Env[Any, Any], state: State) -> None:
    """Make `env` what it was at the snapshot; after an error it is undefined."""
    _Maker().make(state, env, type(env).__name__)


def equal(one: State, other: State) -> bool:
    """Whether two snapshots say the same, to the bit; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return bool(alike) and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other) or (one != one and other != other)


def find_snapshot_defect(
    env: gym.Env[Any, Any], steps: int = 8, on_step: Callable[[], None] = lambda: None
) -> str | None:
    """Why snapshots of `env`, which was just reset, are not exact; None if they are, and `env` is as it was.

    Plays the same random actions twice, from here and from a few steps on: what a step leaves behind may be more than
    what a reset does. `on_step` is called before each step, to show that it goes on.
    """
    space = copy.deepcopy(env.action_space)
    space.seed(0)
    parts = [[space.sample() for _ in range(steps)] for _ in range(2)]
    with global_generators():
        try:
            moments, played = [_Moment(env)], [_play(env, parts[0], on_step)]
            if len(played[0]) == steps and not any(played[0][-1][2:]):  # the episode has not ended
                moments.append(_Moment(env))
                played.append(_play(env, parts[1], on_step))
            for moment, actions, first in zip(moments, parts, played, strict=False):
                moment.again(env)
                if not equal(first, _play(env, actions, on_step)):
                    return "the same actions from the same snapshot gave other results: some of its state is hidden"
            moments[0].again(env)
            restored = equal(moments[0].state, snapshot(env))
        except SnapshotError as error:
            return error.message
    return None if restored else "what was restored is not what was taken"


class _Moment:
    """An environment and the process's own random generators, to come back to."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.state = snapshot(env)
        self._chances = random.getstate(), np.random.get_state()

    def again(self, env: gym.Env[Any, Any]) -> None:
        restore(env, self.state)
        random.setstate(self._chances[0])
        np.random.set_state(self._chances[1])


@contextlib.contextmanager
def global_generators() -> Iterator[None]:
    """Leaves the process's own random generators as they were: they are the trainer's."""
    state, numbers = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)


def _play(env: gym.Env[Any, Any], actions: list[Any], on_step: Callable[[], None]) -> State:
    seen = []
    for action in actions:
        on_step()
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append(_Taker().take([observation, float(reward), bool(terminated), bool(truncated)], "result"))
        if terminated or truncated:
            break
    return seen


class _Taker:
    """One walk: what was met before is named by its number, so that two names of one array stay two names of one."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}
        self._alive: list[Any] = []

    def take(self, value: Any, path: str) -> State:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"kind": "int", "hex": hex(value)}
        if kind is not np.ndarray and issubclass(kind, CONSTANT):
            return {"kind": "constant", "name": _name(value)}
        if isinstance(value, np.generic):
            return {"kind": "scalar", "value": self._array(np.asarray(value), path)}
        if isinstance(value, enum.Enum):
            return {"kind": "enum", "name": value.name}
        if isinstance(value, tuple):
            return {"kind": "tuple", "items": [self.take(item, f"{path}[{i}]") for i, item in enumerate(value)]}
        if id(value) in self._met:
            return {"kind": "same", "as": self._met[id(value)]}
        self._met[id(value)] = len(self._met)
        self._alive.append(value)  # an id is free again when its object is gone
        return self._first(value, path)

    def _first(self, value: Any, path: str) -> State:
        kind = type(value)
        if kind is np.ndarray:
            return self._array(value, path)
        if kind is list:
            return [self.take(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if kind in (dict, OrderedDict):
            pairs = [[self.take(key, path), self.take(item, f"{path}[{key!r}]")] for key, item in value.items()]
            return {"kind": "dict", "ordered": kind is OrderedDict, "items": pairs}
        if kind is deque:
            return {"kind": "deque", "most": value.maxlen, "items": [self.take(item, path) for item in value]}
        if kind in (set, frozenset):
            items = [self.take(item, path) for item in sorted(value, key=repr)]
            return {"kind": "set", "frozen": kind is frozenset, "items": items}
        if kind is np.random.Generator:
            return {"kind": "generator", "state": self.take(dict(value.bit_generator.state), path)}
        if kind is np.random.RandomState:
            return {"kind": "random_state", "state": self.take(value.get_state(legacy=False), path)}
        if kind is random.Random:
            return {"kind": "random", "state": self.take(value.getstate(), path)}
        if hasattr(kind, "snapshot") and hasattr(kind, "restore"):  # Snapshotting; isinstance would take 5 µs
            return {"kind": "own", "state": value.snapshot()}
        if isinstance(value, gym.Space):
            return {"kind": "space", "generators": [self.take(space._np_random, path) for space in _spaces(value)]}
        if kind.__module__ in CONSTANT_MODULES:
            return {"kind": "picture"}
        physics = _physics(value)
        if physics is not None:
            return _take_physics(*physics)
        model = _model(value)
        if model is not None:
            return {"kind": "model", "state": _take_model(model)}
        state = {name: self.take(item, f"{path}.{name}") for name, item in _attributes(value, path).items()}
        return {"kind": "object", "type": kind.__qualname__, "state": state}

    def _array(self, value: Any, path: str) -> Any:
        if value.dtype.hasobject:
            raise SnapshotError(f"{path} is an array of Python objects", hint=HINT)
        return value.copy()


HINT = "give the environment snapshot() and restore(state), or leave this out of it"


class _Maker:
    """The way back, in the same order as the walk."""

    def __init__(self) -> None:
        self._made: list[Any] = []

    def make(self, node: State, there: Any, path: str) -> Any:
        """The value that `node` describes; `there` is what stands in its place now, and is used where it can be."""
        if type(node) in PLAIN or type(node) is int:
            return node
        if isinstance(node, np.ndarray):
            self._made.append(node.copy())
            return self._made[-1]
        if isinstance(node, list):
            return self._fill([], node, there, path)
        make = getattr(self, f"_{node['kind']}", None)
        if make is None:
            raise SnapshotError(f"{path} has the unknown kind {node['kind']!r} in this snapshot")
        return make(node, there, path)

    def _fill(self, new: Any, nodes: list[State], there: Any, path: str) -> Any:
        self._made.append(new)
        old = list(there) if isinstance(there, list | deque) and len(there) == len(nodes) else [None] * len(nodes)
        for i, node in enumerate(nodes):
            new.append(self.make(node, old[i], f"{path}[{i}]"))
        return new

    def _constant(self, node: State, there: Any, path: str) -> Any:
        if not isinstance(there, CONSTANT) or _name(there) != node["name"]:
            raise SnapshotError(f"{path} was {node['name']} and is another here", hint=HINT)
        return there

    def _picture(self, node: State, there: Any, path: str) -> Any:
        self._made.append(there)
        return there

    def _enum(self, node: State, there: Any, path: str) -> Any:
        if not isinstance(there, enum.Enum):
            raise SnapshotError(f"{path} was {node['name']} of an enumeration, and is none here", hint=HINT)
        return type(there)[node["name"]]

    def _int(self, node: State, there: Any, path: str) -> int:
        return int(node["hex"], 16)

    def _scalar(self, node: State, there: Any, path: str) -> Any:
        return node["value"][()]

    def _same(self, node: State, there: Any, path: str) -> Any:
        return self._made[node["as"]]

    def _tuple(self, node: State, there: Any, path: str) -> Any:
        nodes = node["items"]
        old = there if isinstance(there, tuple) and len(there) == len(nodes) else (None,) * len(nodes)
        items = [self.make(item, old[i], f"{path}[{i}]") for i, item in enumerate(nodes)]
        named = getattr(type(there), "_make", None)
        return tuple(items) if named is None else named(items)

    def _dict(self, node: State, there: Any, path: str) -> Any:
        new: dict[Any, Any] = OrderedDict() if node["ordered"] else {}
        self._made.append(new)
        old = there if isinstance(there, dict) else {}
        for key_node, item in node["items"]:
            key = self.make(key_node, None, path)
            new[key] = self.make(item, old.get(key), f"{path}[{key!r}]")
        return new

    def _deque(self, node: State, there: Any, path: str) -> Any:
        return self._fill(deque(maxlen=node["most"]), node["items"], there, path)

    def _set(self, node: State, there: Any, path: str) -> Any:
        place = len(self._made)
        self._made.append(None)
        items = [self.make(item, None, path) for item in node["items"]]
        self._made[place] = frozenset(items) if node["frozen"] else set(items)
        return self._made[place]

    def _generator(self, node: State, there: Any, path: str) -> Any:
        place = len(self._made)
        self._made.append(there)
        state = self.make(node["state"], None, path)
        if state["bit_generator"] not in BIT_GENERATORS:
            raise SnapshotError(f"{path} needs the unknown generator {state['bit_generator']!r}")
        if not isinstance(there, np.random.Generator) or type(there.bit_generator).__name__ != state["bit_generator"]:
            there = np.random.Generator(getattr(np.random, state["bit_generator"])())
        there.bit_generator.state = state
        self._made[place] = there
        return there

    def _random_state(self, node: State, there: Any, path: str) -> Any:
        new = there if isinstance(there, np.random.RandomState) else np.random.RandomState()
        self._made.append(new)
        new.set_state(self.make(node["state"], None, path))
        return new

    def _random(self, node: State, there: Any, path: str) -> Any:
        new = there if type(there) is random.Random else random.Random()  # noqa: S311 (games, not secrets)
        self._made.append(new)
        new.setstate(self.make(node["state"], None, path))
        return new

    def _own(self, node: State, there: Any, path: str) -> Any:
        if not hasattr(there, "restore"):
            raise SnapshotError(f"{path} has no restore(state) here, but had a snapshot()")
        self._made.append(there)
        there.restore(node["state"])
        return there

    def _space(self, node: State, there: Any, path: str) -> Any:
        spaces = list(_spaces(there)) if isinstance(there, gym.Space) else []
        if len(spaces) != len(node["generators"]):
            raise SnapshotError(f"{path} is not the space that was taken")
        self._made.append(there)
        for space, state in zip(spaces, node["generators"], strict=True):
            space._np_random = self.make(state, space._np_random, path)
        return there

    def _physics(self, node: State, there: Any, path: str) -> Any:
        physics = _physics(there)
        if physics is None:
            raise SnapshotError(f"{path} is no MuJoCo simulation here")
        self._made.append(there)
        _make_physics(*physics, node)
        return there

    def _model(self, node: State, there: Any, path: str) -> Any:
        model = _model(there)
        if model is None:
            raise SnapshotError(f"{path} is no MuJoCo model here")
        self._made.append(there)
        _make_arrays(model, node["state"])
        return there

    def _object(self, node: State, there: Any, path: str) -> Any:
        if type(there).__qualname__ != node["type"]:
            here = type(there).__qualname__
            raise SnapshotError(f"{path} was a {node['type']} and is a {here} here", hint=HINT)
        self._made.append(there)
        attributes = vars(there)
        made = {name: self.make(item, attributes.get(name), f"{path}.{name}") for name, item in node["state"].items()}
        attributes.clear()
        attributes.update(made)
        return there


def _name(value: Any) -> str:
    if isinstance(value, PurePath | np.dtype | range | slice):
        return str(value)
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)


def _attributes(value: Any, path: str) -> dict[str, Any]:
    """The attributes of an object that is nothing but its attributes, as `copy` sees it; refused otherwise."""
    kind = type(value)
    if getattr(kind, "__getstate__", None) is EzPickle.__getstate__:
        return dict(vars(value))  # a pickle of it holds what it was made with, and not what it is
    if all(getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__", "__getstate__")):
        try:
            parts = value.__reduce_ex__(2)
        except TypeError:
            parts = ()  # it holds memory that Python does not know
        state = parts[2] if len(parts) > 2 else None
        if parts and not any(parts[3:]) and parts[1] == (kind,) and (state is None or isinstance(state, dict)):
            return state or {}
    raise SnapshotError(f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be taken", hint=HINT)


def _spaces(space: gym.Space[Any]) -> Iterator[gym.Space[Any]]:
    yield space
    inner = getattr(space, "spaces", ())
    for part in inner.values() if isinstance(inner, dict) else inner:
        yield from _spaces(part)


def _physics(value: Any) -> tuple[Any, Any] | None:
    """MuJoCo's (model, data) if `value` is dm_control's physics or MuJoCo's data; without an import of either."""
    mujoco, control = sys.modules.get("mujoco"), sys.modules.get("dm_control.mujoco.engine")
    if control is not None and isinstance(value, control.Physics):
        return value.model.ptr, value.data.ptr
    if mujoco is not None and isinstance(value, mujoco.MjData):
        return value.model, value
    return None


def _model(value: Any) -> Any:
    mujoco = sys.modules.get("mujoco")
    return value if mujoco is not None and isinstance(value, mujoco.MjModel) else None


def _take_model(model: Any) -> dict[str, Any]:
    """Tasks draw targets into the model itself, so it belongs to the state, too."""
    return _take_arrays(model, BULKY)


def _take_arrays(thing: Any, without: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(thing, name) for name in dir(thing) if not name.startswith(("_", *without))}
    return {name: value.copy() for name, value in values.items() if isinstance(value, np.ndarray) and value.size}


def _make_arrays(thing: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        there = getattr(thing, name, None)
        if there is None or there.shape != value.shape:
            raise SnapshotError(f"the MuJoCo model here is another one: its {name} differs")
        there[...] = value


def _take_physics(model: Any, data: Any) -> State:
    mujoco = sys.modules["mujoco"]
    what = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(model, what))
    mujoco.mj_getState(model, data, state, what)
    return {"kind": "physics", "state": state, "model": _take_model(model), "derived": _take_arrays(data, VARYING)}


def _make_physics(model: Any, data: Any, node: State) -> None:
    mujoco = sys.modules["mujoco"]
    what = mujoco.mjtState.mjSTATE_INTEGRATION
    if len(node["state"]) != mujoco.mj_stateSize(model, what):
        raise SnapshotError("the MuJoCo model here is another one: its state has another size")
    _make_arrays(model, node["model"])
    mujoco.mj_setState(model, data, node["state"], what)
    mujoco.mj_forward(model, data)  # positions in space, contacts, sensors: what follows from the state
    mujoco.mj_setState(model, data, node["state"], what)  # forward has moved the solver's warm start
    _make_arrays(data, node["derived"])  # a step leaves some of that behind as it was before, and tasks read it
