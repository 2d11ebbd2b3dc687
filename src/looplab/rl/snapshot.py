"""Snapshots of envs as plain values, and their restoration, in the same or another process.

    state = snapshot(env)
    restore(other, state)      # `other` was made by the same function and has been reset once

An env, or any object inside it, may implement `snapshot()` and `restore(state)` itself. Everything else is walked
attribute by attribute, through the chain of wrappers: numbers, strings, arrays, lists, tuples, dicts, sets and deques
of those, random generators, the generators of spaces, MuJoCo's data and model, and Python objects made of them. What
cannot change is left out: functions, classes, modules, specs, locks. Anything else is refused by name, so that nothing
is silently forgotten; `find_snapshot_defect` replays some steps to check that no state is hidden.

The form: None, bool, int (64 bits), float, str, bytes, NumPy arrays (never of objects) and lists represent themselves;
everything else is a dict with the key "kind". So a snapshot can be stored as JSON and arrays, without pickle.
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
"""Types whose values do not change; only their names are stored, to detect that another value has taken their place."""
RENDERING_MODULES = ("gymnasium.envs.mujoco.mujoco_rendering", "dm_control.viewer")
BIT_GENERATORS = {"PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"}
MODEL_CONSTANTS = ("mesh", "tex", "skin", "bvh", "name", "text", "paths", "oct")
"""Prefixes of large attributes of a MuJoCo model that no task changes."""
DATA_PER_CONTACT = ("efc_", "iefc_", "island_", "map_", "contact")
"""Prefixes of attributes of MuJoCo's data whose size depends on the contacts; every step recomputes them first."""


class SnapshotError(LabError):
    """An env cannot be snapshotted or restored; the message names the part that is to blame."""


class Snapshotting(Protocol):
    """Interface of envs, and objects in them, that snapshot themselves."""

    def snapshot(self) -> State:
        """Return everything that the next steps depend on, in the form of this module."""

    def restore(self, state: State) -> None:
        """Return to a snapshot, which another instance may have taken."""


def snapshot(env: gym.Env[Any, Any]) -> State:
    """Return everything that the next steps of `env` depend on; SnapshotError if a part of it is not supported."""
    return _Snapshotter().take(env, type(env).__name__)


def restore(env: gym.Env[Any, Any], state: State) -> None:
    """Return `env` to a snapshot; after an error its state is undefined."""
    _Restorer().restore(state, env, type(env).__name__)


def states_equal(one: State, other: State) -> bool:
    """Return whether two snapshots are equal to the bit; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        same_type = one.dtype == other.dtype and one.shape == other.shape
        return bool(same_type) and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(states_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(states_equal, one, other))
    return bool(one == other) or (one != one and other != other)


def find_snapshot_defect(
    env: gym.Env[Any, Any], steps: int = 8, on_step: Callable[[], None] = lambda: None
) -> str | None:
    """Return why snapshots of `env`, which was just reset, are not exact; None if they are, and `env` is unchanged.

    Plays the same random actions twice, from the reset and from a few steps later: a step may leave more state behind
    than a reset.

    Args:
        env: The env.
        steps: Steps to play from each of the two moments.
        on_step: Called before each step, to report progress.
    """
    space = copy.deepcopy(env.action_space)
    space.seed(0)
    action_parts = [[space.sample() for _ in range(steps)] for _ in range(2)]
    with preserve_global_rngs():
        try:
            moments, results = [_Moment(env)], [_play(env, action_parts[0], on_step)]
            if len(results[0]) == steps and not any(results[0][-1][2:]):  # the episode has not ended
                moments.append(_Moment(env))
                results.append(_play(env, action_parts[1], on_step))
            for moment, actions, first in zip(moments, action_parts, results, strict=False):
                moment.return_to(env)
                if not states_equal(first, _play(env, actions, on_step)):
                    return "the same actions from the same snapshot led to other results: some state is hidden"
            moments[0].return_to(env)
            restored = states_equal(moments[0].state, snapshot(env))
        except SnapshotError as error:
            return error.message
    return None if restored else "the restored state differs from the snapshot"


class _Moment:
    """The state of an env and of the process's global random generators."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.state = snapshot(env)
        self._python_rng, self._numpy_rng = random.getstate(), np.random.get_state()

    def return_to(self, env: gym.Env[Any, Any]) -> None:
        restore(env, self.state)
        random.setstate(self._python_rng)
        np.random.set_state(self._numpy_rng)


@contextlib.contextmanager
def preserve_global_rngs() -> Iterator[None]:
    """Restore the process's global random generators on exit: they belong to the trainer."""
    python_rng, numpy_rng = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_rng)
        np.random.set_state(numpy_rng)


def _play(env: gym.Env[Any, Any], actions: list[Any], on_step: Callable[[], None]) -> State:
    """Step through the actions until the episode ends; return the results as a snapshot."""
    results = []
    for action in actions:
        on_step()
        obs, reward, terminated, truncated, _ = env.step(action)
        result = [obs, float(reward), bool(terminated), bool(truncated)]
        results.append(_Snapshotter().take(result, "result"))
        if terminated or truncated:
            break
    return results


class _Snapshotter:
    """One walk over an object graph. Objects are numbered, so that shared references stay shared."""

    def __init__(self) -> None:
        self._number_of: dict[int, int] = {}
        """Number of each visited object, by id."""
        self._visited: list[Any] = []
        """Keeps visited objects alive: the id of a deleted object may be reused."""

    def take(self, value: Any, path: str) -> State:
        """Return the node of a value. `path` names it in errors."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"kind": "int", "hex": hex(value)}
        if kind is not np.ndarray and issubclass(kind, CONSTANT):
            return {"kind": "constant", "name": _constant_name(value)}
        if isinstance(value, np.generic):
            return {"kind": "scalar", "value": self._array(np.asarray(value), path)}
        if isinstance(value, enum.Enum):
            return {"kind": "enum", "name": value.name}
        if isinstance(value, tuple):
            return {"kind": "tuple", "items": [self.take(item, f"{path}[{i}]") for i, item in enumerate(value)]}
        if id(value) in self._number_of:
            return {"kind": "same", "as": self._number_of[id(value)]}
        self._number_of[id(value)] = len(self._number_of)
        self._visited.append(value)
        return self._take_new(value, path)

    def _take_new(self, value: Any, path: str) -> State:
        """Return the node of an object that is visited for the first time."""
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
        if hasattr(kind, "snapshot") and hasattr(kind, "restore"):  # Snapshotting; an isinstance check would take 5 µs
            return {"kind": "own", "state": value.snapshot()}
        if isinstance(value, gym.Space):
            return {
                "kind": "space",
                "generators": [self.take(space._np_random, path) for space in _nested_spaces(value)],
            }
        if kind.__module__ in RENDERING_MODULES:
            return {"kind": "picture"}
        physics = _mujoco_simulation(value)
        if physics is not None:
            return _take_mujoco(*physics)
        model = _mujoco_model(value)
        if model is not None:
            return {"kind": "model", "state": _take_model(model)}
        state = {name: self.take(item, f"{path}.{name}") for name, item in _attributes(value, path).items()}
        return {"kind": "object", "type": kind.__qualname__, "state": state}

    def _array(self, value: Any, path: str) -> Any:
        if value.dtype.hasobject:
            raise SnapshotError(f"{path} is an array of Python objects", hint=HINT)
        return value.copy()


HINT = "implement snapshot() and restore(state) in the environment, or remove this from it"


class _Restorer:
    """Rebuilds values in the order of the walk."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        """Restored objects by number."""

    def restore(self, node: State, current: Any, path: str) -> Any:
        """Return the value of a node. `current` is the present value in its place, which is reused if possible."""
        if type(node) in PLAIN or type(node) is int:
            return node
        if isinstance(node, np.ndarray):
            self._objects.append(node.copy())
            return self._objects[-1]
        if isinstance(node, list):
            return self._restore_items([], node, current, path)
        restore_kind = getattr(self, f"_restore_{node['kind']}", None)
        if restore_kind is None:
            raise SnapshotError(f"{path} has the unknown kind {node['kind']!r} in this snapshot")
        return restore_kind(node, current, path)

    def _restore_items(self, new: Any, nodes: list[State], current: Any, path: str) -> Any:
        self._objects.append(new)
        old = list(current) if isinstance(current, list | deque) and len(current) == len(nodes) else [None] * len(nodes)
        for i, node in enumerate(nodes):
            new.append(self.restore(node, old[i], f"{path}[{i}]"))
        return new

    def _restore_constant(self, node: State, current: Any, path: str) -> Any:
        if not isinstance(current, CONSTANT) or _constant_name(current) != node["name"]:
            raise SnapshotError(f"{path} was {node['name']} and is something else here", hint=HINT)
        return current

    def _restore_picture(self, node: State, current: Any, path: str) -> Any:
        self._objects.append(current)
        return current

    def _restore_enum(self, node: State, current: Any, path: str) -> Any:
        if not isinstance(current, enum.Enum):
            raise SnapshotError(
                f"{path} was {node['name']} of an enumeration, and is not an enumeration here", hint=HINT
            )
        return type(current)[node["name"]]

    def _restore_int(self, node: State, current: Any, path: str) -> int:
        return int(node["hex"], 16)

    def _restore_scalar(self, node: State, current: Any, path: str) -> Any:
        return node["value"][()]

    def _restore_same(self, node: State, current: Any, path: str) -> Any:
        return self._objects[node["as"]]

    def _restore_tuple(self, node: State, current: Any, path: str) -> Any:
        nodes = node["items"]
        old = current if isinstance(current, tuple) and len(current) == len(nodes) else (None,) * len(nodes)
        items = [self.restore(item, old[i], f"{path}[{i}]") for i, item in enumerate(nodes)]
        named = getattr(type(current), "_make", None)
        return tuple(items) if named is None else named(items)

    def _restore_dict(self, node: State, current: Any, path: str) -> Any:
        new: dict[Any, Any] = OrderedDict() if node["ordered"] else {}
        self._objects.append(new)
        old = current if isinstance(current, dict) else {}
        for key_node, item in node["items"]:
            key = self.restore(key_node, None, path)
            new[key] = self.restore(item, old.get(key), f"{path}[{key!r}]")
        return new

    def _restore_deque(self, node: State, current: Any, path: str) -> Any:
        return self._restore_items(deque(maxlen=node["most"]), node["items"], current, path)

    def _restore_set(self, node: State, current: Any, path: str) -> Any:
        number = len(self._objects)
        self._objects.append(None)
        items = [self.restore(item, None, path) for item in node["items"]]
        self._objects[number] = frozenset(items) if node["frozen"] else set(items)
        return self._objects[number]

    def _restore_generator(self, node: State, current: Any, path: str) -> Any:
        number = len(self._objects)
        self._objects.append(current)
        state = self.restore(node["state"], None, path)
        if state["bit_generator"] not in BIT_GENERATORS:
            raise SnapshotError(f"{path} needs the unknown generator {state['bit_generator']!r}")
        if (
            not isinstance(current, np.random.Generator)
            or type(current.bit_generator).__name__ != state["bit_generator"]
        ):
            current = np.random.Generator(getattr(np.random, state["bit_generator"])())
        current.bit_generator.state = state
        self._objects[number] = current
        return current

    def _restore_random_state(self, node: State, current: Any, path: str) -> Any:
        new = current if isinstance(current, np.random.RandomState) else np.random.RandomState()
        self._objects.append(new)
        new.set_state(self.restore(node["state"], None, path))
        return new

    def _restore_random(self, node: State, current: Any, path: str) -> Any:
        new = current if type(current) is random.Random else random.Random()  # noqa: S311 (games, not secrets)
        self._objects.append(new)
        new.setstate(self.restore(node["state"], None, path))
        return new

    def _restore_own(self, node: State, current: Any, path: str) -> Any:
        if not hasattr(current, "restore"):
            raise SnapshotError(f"{path} has no restore(state) here, but had a snapshot()")
        self._objects.append(current)
        current.restore(node["state"])
        return current

    def _restore_space(self, node: State, current: Any, path: str) -> Any:
        spaces = list(_nested_spaces(current)) if isinstance(current, gym.Space) else []
        if len(spaces) != len(node["generators"]):
            raise SnapshotError(f"{path} is not the space that was snapshotted")
        self._objects.append(current)
        for space, state in zip(spaces, node["generators"], strict=True):
            space._np_random = self.restore(state, space._np_random, path)
        return current

    def _restore_physics(self, node: State, current: Any, path: str) -> Any:
        physics = _mujoco_simulation(current)
        if physics is None:
            raise SnapshotError(f"{path} is not a MuJoCo simulation here")
        self._objects.append(current)
        _restore_mujoco(*physics, node)
        return current

    def _restore_model(self, node: State, current: Any, path: str) -> Any:
        model = _mujoco_model(current)
        if model is None:
            raise SnapshotError(f"{path} is not a MuJoCo model here")
        self._objects.append(current)
        _restore_arrays(model, node["state"])
        return current

    def _restore_object(self, node: State, current: Any, path: str) -> Any:
        if type(current).__qualname__ != node["type"]:
            here = type(current).__qualname__
            raise SnapshotError(f"{path} was a {node['type']} and is a {here} here", hint=HINT)
        self._objects.append(current)
        attributes = vars(current)
        restored = {
            name: self.restore(item, attributes.get(name), f"{path}.{name}") for name, item in node["state"].items()
        }
        attributes.clear()
        attributes.update(restored)
        return current


def _constant_name(value: Any) -> str:
    if isinstance(value, PurePath | np.dtype | range | slice):
        return str(value)
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)


def _attributes(value: Any, path: str) -> dict[str, Any]:
    """Return the attributes of an object that consists of nothing else, as `copy` sees it; SnapshotError otherwise."""
    kind = type(value)
    if getattr(kind, "__getstate__", None) is EzPickle.__getstate__:
        return dict(vars(value))  # its pickle holds its constructor arguments, not its state
    if all(getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__", "__getstate__")):
        try:
            parts = value.__reduce_ex__(2)
        except TypeError:
            parts = ()  # it holds memory outside Python
        state = parts[2] if len(parts) > 2 else None
        if parts and not any(parts[3:]) and parts[1] == (kind,) and (state is None or isinstance(state, dict)):
            return state or {}
    raise SnapshotError(f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be snapshotted", hint=HINT)


def _nested_spaces(space: gym.Space[Any]) -> Iterator[gym.Space[Any]]:
    yield space
    inner = getattr(space, "spaces", ())
    for part in inner.values() if isinstance(inner, dict) else inner:
        yield from _nested_spaces(part)


def _mujoco_simulation(value: Any) -> tuple[Any, Any] | None:
    """Return MuJoCo's (model, data) if `value` is dm_control's physics or MuJoCo's data; imports neither."""
    mujoco, control = sys.modules.get("mujoco"), sys.modules.get("dm_control.mujoco.engine")
    if control is not None and isinstance(value, control.Physics):
        return value.model.ptr, value.data.ptr
    if mujoco is not None and isinstance(value, mujoco.MjData):
        return value.model, value
    return None


def _mujoco_model(value: Any) -> Any:
    mujoco = sys.modules.get("mujoco")
    return value if mujoco is not None and isinstance(value, mujoco.MjModel) else None


def _take_model(model: Any) -> dict[str, Any]:
    """Return the arrays of a model: tasks change them, so they belong to the state."""
    return _take_arrays(model, MODEL_CONSTANTS)


def _take_arrays(thing: Any, without: tuple[str, ...]) -> dict[str, Any]:
    """Return copies of all array attributes whose names do not start with one of `without`."""
    values = {name: getattr(thing, name) for name in dir(thing) if not name.startswith(("_", *without))}
    return {name: value.copy() for name, value in values.items() if isinstance(value, np.ndarray) and value.size}


def _restore_arrays(thing: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        current = getattr(thing, name, None)
        if current is None or current.shape != value.shape:
            raise SnapshotError(f"the MuJoCo model here is different: its {name} has another shape")
        current[...] = value


def _take_mujoco(model: Any, data: Any) -> State:
    mujoco = sys.modules["mujoco"]
    spec = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(model, spec))
    mujoco.mj_getState(model, data, state, spec)
    return {
        "kind": "physics",
        "state": state,
        "model": _take_model(model),
        "derived": _take_arrays(data, DATA_PER_CONTACT),
    }


def _restore_mujoco(model: Any, data: Any, node: State) -> None:
    mujoco = sys.modules["mujoco"]
    spec = mujoco.mjtState.mjSTATE_INTEGRATION
    if len(node["state"]) != mujoco.mj_stateSize(model, spec):
        raise SnapshotError("the MuJoCo model here is different: its state has another size")
    _restore_arrays(model, node["model"])
    mujoco.mj_setState(model, data, node["state"], spec)
    mujoco.mj_forward(model, data)  # recomputes what follows from the state: positions, contacts, sensors
    mujoco.mj_setState(model, data, node["state"], spec)  # mj_forward has changed the solver's warm start
    _restore_arrays(data, node["derived"])  # some derived values lag behind by a step, and tasks read them
