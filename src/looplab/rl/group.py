"""Some environments, stepped one after the other into the shared block: in a worker, or in the trainer itself.

An `Order` is one thing to do with them, and says all that is needed to do it again; an `Answer` is what it gave.
"""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from looplab.errors import LabError
from looplab.rl.shared import (
    COUNT,
    ENV,
    EXACT,
    IDLE,
    KINDS,
    PHASE,
    RESETTING,
    SECONDS,
    STEPPING,
    TESTING,
    Array,
    Block,
    Frame,
    Tree,
    each,
    put,
    row,
)
from looplab.rl.snapshot import SnapshotError, equal, find_snapshot_defect, restore, snapshot

Env = gym.Env[Any, Any]
Infos = list[tuple[int, dict[str, Any]]]
"""Infos with the number of their environment, in the order in which gymnasium would add them."""

FLOATS = {KINDS[float], KINDS[np.float64], KINDS[np.float32]}


@dataclass(frozen=True)
class Order:
    """One thing to do with all environments, or with a worker's share of them; kept, so that it can be done again."""

    kind: str
    """step, reset, call, set, snapshot or load."""
    actions: Tree = None
    """For a step that is replayed: a row for each environment. Otherwise they are in the block."""
    skip: dict[int, str] = field(default_factory=dict)
    """Environments that are truncated instead of stepped, and why."""
    seeds: Sequence[int | None] = ()
    """For a reset: one for each environment."""
    options: dict[str, Any] | None = None
    """For a reset."""
    mask: Array | None = None
    """For a reset: of which environments; all without it."""
    name: str = ""
    """Of the attribute to call or set."""
    arguments: tuple[Any, ...] = ()
    """For a call: positional and named ones; for set and load: a value for each environment."""

    def share(self, first: int, end: int) -> Order:
        """The part for some of the environments."""
        return replace(
            self,
            actions=None if self.actions is None else each(lambda array: array[first:end], self.actions),
            skip={i: why for i, why in self.skip.items() if first <= i < end},
            seeds=self.seeds[first:end],
            mask=None if self.mask is None else self.mask[first:end],
            arguments=self.arguments if self.kind == "call" else self.arguments[first:end],
        )


@dataclass(frozen=True)
class Answer:
    """What an order gave, besides what stands in the block."""

    infos: Sequence[tuple[int, dict[str, Any]]] = ()
    """Those that do not stand in the block."""
    values: tuple[Any, ...] = ()
    """What a call returned, one for each environment."""
    snapshot: bytes | None = None
    """Of the share, after the order, if asked for."""
    seconds: float = 0.0
    """What the snapshot took."""
    inexact: str | None = None
    """Why these environments cannot be snapshotted, if that was tested now."""
    unknown: str | None = None
    """Said of a name that they do not have."""


NOTHING = Answer()


class EnvGroup:
    """Some environments, stepped one after the other as gymnasium's SyncVectorEnv would, into the frames of a block."""

    def __init__(self, makers: Sequence[Callable[[], Env]], first: int, mode: AutoresetMode, fields: Sequence[str]):
        self.makers, self.first, self.mode, self.fields = makers, first, mode, tuple(fields)
        self.envs: list[Env] = []
        self.due = [False] * len(makers)
        """Which environments have ended and are to be reset."""
        self.shared_generators = False
        """Whether the process's own random generators belong to these environments, and so to their snapshots."""
        self._count = 0.0

    def attach(self, block: Block, worker: int) -> None:
        """Write into this block from now on."""
        end = self.first + len(self.makers)
        self._frames = [frame.share(self.first, end) for frame in block.frames]
        self._actions = each(lambda array: array[self.first : end], block.actions)
        self._cell = block.cells[worker].data

    def perform(self, order: Order, at: int, before: int, snap: bool, test: bool) -> Answer:
        """Do it; results go into frame `at`, what does not change comes from frame `before`."""
        self._cell[PHASE] = STEPPING
        answer = NOTHING
        if order.kind == "step":
            answer = Answer(self.step(at, before, order.actions, order.skip))
        elif order.kind == "reset":
            infos, inexact = self._reset(order, self._frames[at], self._frames[before], test)
            answer = Answer(infos, inexact=inexact)
        elif order.kind == "load":
            answer = Answer(inexact=self._load(order.arguments, test))
        elif order.kind == "call":
            answer = self._call(order)
        elif order.kind == "set":
            for env, value in zip(self.envs, order.arguments, strict=True):
                env.set_wrapper_attr(order.name, value)
        if snap and answer.inexact is None:
            began = time.perf_counter()
            data = self.snapshot()
            answer = replace(answer, snapshot=data, seconds=time.perf_counter() - began)
        self._cell[PHASE] = IDLE
        return answer

    def step(self, at: int, before: int, given: Tree = None, skip: dict[int, str] | None = None) -> Infos:
        """Step every environment, or reset it if that is due, with the given actions or those in the block."""
        began = time.perf_counter()
        count = self._count
        infos: Infos = []
        observations, rewards, ends, cuts = [], [], [], []
        cell, due, same_step = self._cell, self.due, self.mode is AutoresetMode.SAME_STEP
        actions, out, prev = (
            self._rows(self._actions if given is None else given),
            self._frames[at],
            self._frames[before],
        )
        cell[PHASE] = STEPPING
        if self.fields:
            out.values.fill(0)
            out.kinds.fill(0)
        for i, env in enumerate(self.envs):
            count += 1
            cell[COUNT] = count
            cell[ENV] = i
            if skip and self.first + i in skip:
                seen, reward, end, cut = row(prev.observations, i), 0.0, False, True
                info: dict[str, Any] = {"worker_restarted": skip[self.first + i]}
            elif due[i]:  # only in the mode NEXT_STEP: the others never leave it so
                seen, info = self._reset_one(env)
                reward, end, cut = 0.0, False, False
            else:
                seen, reward, end, cut, info = env.step(actions[i])  # type: ignore[assignment]
            over = end or cut
            if over and same_step:
                infos.append((self.first + i, {"final_obs": seen, "final_info": info}))
                seen, info = self._reset_one(env)
            due[i] = bool(over) and not same_step
            if info:
                self._tell(infos, i, info, out)
            observations.append(seen)
            rewards.append(reward)
            ends.append(end)
            cuts.append(cut)
        put(out.observations, observations)
        out.rewards[...] = rewards
        out.terminated[...] = ends
        out.truncated[...] = cuts
        self._count = count
        cell[SECONDS] = time.perf_counter() - began
        cell[PHASE] = IDLE
        return infos

    def _reset_one(self, env: Env, **how: Any) -> tuple[Any, dict[str, Any]]:
        self._cell[PHASE] = RESETTING
        seen, info = env.reset(**how)
        self._cell[PHASE] = STEPPING
        return seen, info

    def _reset(self, order: Order, out: Frame, prev: Frame, test: bool) -> tuple[Infos, str | None]:
        infos: Infos = []
        observations = []
        inexact = None
        out.values.fill(0)
        out.kinds.fill(0)
        for i, seed in enumerate(order.seeds):
            self._mark(i)
            if order.mask is not None and not order.mask[i]:
                observations.append(row(prev.observations, i))
                continue
            seen, info = self._reset_one(self.envs[i], seed=seed, options=order.options)
            _check(out.observations, seen, "the observation")
            self.due[i] = False
            why = self._test(i) if test and inexact is None else None
            if why is not None:
                inexact = why
                seen, info = self._reset_one(self.envs[i], seed=seed, options=order.options)
            self._tell(infos, i, info, out)
            observations.append(seen)
        put(out.observations, observations)
        out.rewards[...], out.terminated[...], out.truncated[...] = 0.0, False, False
        return infos, inexact

    def _test(self, i: int) -> str | None:
        """Why environment `i`, just reset, cannot be snapshotted; it is a new one then, not reset."""
        self._cell[PHASE] = TESTING
        why = find_snapshot_defect(self.envs[i], on_step=lambda: self._mark(i))
        if why is not None:
            self.envs[i].close()
            self.envs[i] = self.makers[i]()
        self._cell[PHASE] = STEPPING
        return why

    def _mark(self, i: int) -> None:
        self._count += 1
        self._cell[COUNT], self._cell[ENV] = self._count, i

    def _tell(self, infos: Infos, i: int, info: dict[str, Any], out: Frame) -> None:
        """Numbers that were named go into the block, the rest into `infos`."""
        if self.fields:
            info = dict(info)
            for f, name in enumerate(self.fields):
                value = info.get(name)
                kind = KINDS.get(type(value), 0)
                if kind and (kind in FLOATS or -EXACT <= value <= EXACT):  # type: ignore[operator]
                    out.values[f, i], out.kinds[f, i] = value, kind
                    del info[name]
        if info:
            infos.append((self.first + i, info))

    def _rows(self, tree: Tree) -> list[Any]:
        """One action for each environment, out of memory that will not change under it."""
        if isinstance(tree, dict | tuple):
            return [row(tree, i) for i in range(len(self.makers))]
        return list(tree.copy())

    def _call(self, order: Order) -> Answer:
        try:
            found = [env.get_wrapper_attr(order.name) for env in self.envs]
        except AttributeError as error:
            return Answer(unknown=str(error))
        positional, named = order.arguments
        return Answer(values=tuple(value(*positional, **named) if callable(value) else value for value in found))

    def snapshot(self) -> bytes:
        """All of the group, for `restore`."""
        chances = (random.getstate(), np.random.get_state()) if self.shared_generators else None
        return pickle.dumps(([snapshot(env) for env in self.envs], self.due, chances), pickle.HIGHEST_PROTOCOL)

    def restore(self, data: bytes) -> None:
        """Become what the group was at that snapshot; SnapshotError if that fails."""
        states, due, chances = pickle.loads(data)  # noqa: S301 (from our own parent, which has it from a worker)
        self._load(list(zip(states, due, strict=True)), False)
        if chances is not None:
            random.setstate(chances[0])
            np.random.set_state(chances[1])

    def _load(self, states: Sequence[tuple[Any, bool]], test: bool) -> str | None:
        for i, (state, due) in enumerate(states):
            self._mark(i)
            self._reset_one(self.envs[i], seed=0)  # what an environment makes in its first reset must be there
            why = self._test(i) if test else None
            if why is not None:
                return why
            restore(self.envs[i], state)
            if not equal(snapshot(self.envs[i]), state):
                raise SnapshotError(f"environment {self.first + i} is not what was taken after restore(state)")
            self.due[i] = due
        return None

    def begin(self, seeds: Sequence[int]) -> None:
        """Reset everything, because there was no way back to what the environments were."""
        for i, seed in enumerate(seeds):
            self._mark(i)
            self._reset_one(self.envs[i], seed=seed)

    def close(self) -> None:
        for env in self.envs:
            env.close()


def _check(rows: Tree, item: Any, what: str) -> None:
    if isinstance(rows, dict | tuple):
        for name in rows if isinstance(rows, dict) else range(len(rows)):
            _check(rows[name], item[name], f"{what}[{name!r}]")
        return
    array = np.asarray(item)
    if array.shape != rows.shape[1:] or not np.can_cast(array.dtype, rows.dtype, "same_kind"):
        space = f"{rows.dtype}{rows.shape[1:]}"
        raise LabError(f"{what} is {array.dtype}{array.shape}, but the space says {space}", hint="mend one of them")
