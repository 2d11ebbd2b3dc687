"""A group of envs, stepped one after the other into the shared block: in a worker, or in the trainer itself.

An `EnvCommand` contains everything needed to repeat it; an `EnvReply` is what it returned beyond the shared block.
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
    ENV,
    IDLE,
    INFO_TYPE_CODES,
    MAX_EXACT_INT,
    PHASE,
    PROGRESS,
    RESETTING,
    STEP_SECONDS,
    STEPPING,
    TESTING,
    Array,
    ArrayTree,
    SharedBlock,
    StepFrame,
    copy_row,
    map_tree,
    write_rows,
)
from looplab.rl.snapshot import SnapshotError, find_snapshot_defect, restore, snapshot, states_equal

Env = gym.Env[Any, Any]
IndexedInfos = list[tuple[int, dict[str, Any]]]
"""Infos with the index of their env, in the order in which Gymnasium would add them."""

FLOAT_CODES = {INFO_TYPE_CODES[float], INFO_TYPE_CODES[np.float64], INFO_TYPE_CODES[np.float32]}


@dataclass(frozen=True)
class EnvCommand:
    """One operation on all envs, or on a worker's share of them; kept so that it can be replayed."""

    kind: str
    """step, reset, call, set, snapshot or load."""
    actions: ArrayTree = None
    """step: one row per env, if the step is replayed; otherwise they are in the shared block."""
    truncate: dict[int, str] = field(default_factory=dict)
    """step: envs to truncate instead of stepping them, and why."""
    seeds: Sequence[int | None] = ()
    """reset: one per env."""
    options: dict[str, Any] | None = None
    """reset: options for the envs."""
    mask: Array | None = None
    """reset: which envs to reset; None: all."""
    name: str = ""
    """call, set: name of the attribute."""
    arguments: tuple[Any, ...] = ()
    """call: positional and keyword arguments; set, load: one value per env."""

    def slice_envs(self, first: int, end: int) -> EnvCommand:
        """Return the command for the envs from `first` to before `end`."""
        return replace(
            self,
            actions=None if self.actions is None else map_tree(lambda array: array[first:end], self.actions),
            truncate={i: reason for i, reason in self.truncate.items() if first <= i < end},
            seeds=self.seeds[first:end],
            mask=None if self.mask is None else self.mask[first:end],
            arguments=self.arguments if self.kind == "call" else self.arguments[first:end],
        )


@dataclass(frozen=True)
class EnvReply:
    """The result of a command, beyond what is in the shared block."""

    infos: Sequence[tuple[int, dict[str, Any]]] = ()
    """Infos that are not in the shared block."""
    values: tuple[Any, ...] = ()
    """call: one return value per env."""
    snapshot: bytes | None = None
    """Snapshot of the group after the command, if requested."""
    snapshot_seconds: float = 0.0
    """Time that the snapshot took."""
    snapshot_defect: str | None = None
    """Why these envs have no exact snapshots, if that was tested now."""
    attribute_error: str | None = None
    """call: message of the AttributeError, if the envs lack the attribute."""


EMPTY_REPLY = EnvReply()


class EnvGroup:
    """Steps envs one after the other, like Gymnasium's SyncVectorEnv, into the frames of a shared block."""

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env]],
        first: int,
        autoreset_mode: AutoresetMode,
        info_fields: Sequence[str],
    ) -> None:
        """
        Args:
            env_fns: One function per env of the group.
            first: Index of the group's first env.
            autoreset_mode: When ended envs are reset.
            info_fields: Numeric info fields that go into the shared block.
        """
        self.env_fns, self.first, self.info_fields = env_fns, first, tuple(info_fields)
        self.autoreset_mode = autoreset_mode
        self.envs: list[Env] = []
        self.needs_reset = [False] * len(env_fns)
        """Which envs have ended and are reset in the next step."""
        self.owns_global_rngs = False
        """Whether the process's global random generators belong to these envs, and so to their snapshots."""
        self._progress = 0.0

    def build(self, on_built: Callable[[], object] = lambda: None) -> Env:
        """Make the envs and return the first; `on_built` is called after each.

        Raises:
            LabError: Their spaces differ.
        """
        for env_fn in self.env_fns:
            self.envs.append(env_fn())
            on_built()
        one = self.envs[0]
        for i, env in enumerate(self.envs, self.first):
            if (env.observation_space, env.action_space) != (one.observation_space, one.action_space):
                raise LabError(f"the spaces of environment {i} differ from those of environment {self.first}")
        return one

    def attach(self, block: SharedBlock, worker: int) -> None:
        """Use this block for actions, results and status."""
        end = self.first + len(self.env_fns)
        self._frames = [frame.slice_envs(self.first, end) for frame in block.frames]
        self._actions = map_tree(lambda array: array[self.first : end], block.actions)
        self._status = block.status[worker].data

    def execute(
        self, command: EnvCommand, frame: int, last_frame: int, take_snapshot: bool, test_snapshots: bool
    ) -> EnvReply:
        """Execute a command.

        Args:
            command: The command, for this group's envs.
            frame: Index of the frame to write results into.
            last_frame: Index of the frame with the previous results.
            take_snapshot: Return a snapshot of the group after the command.
            test_snapshots: Test whether snapshots are exact (reset and load only).
        """
        self._status[PHASE] = STEPPING
        reply = EMPTY_REPLY
        if command.kind == "step":
            reply = EnvReply(self.step(frame, last_frame, command.actions, command.truncate))
        elif command.kind == "reset":
            infos, defect = self._reset(command, self._frames[frame], self._frames[last_frame], test_snapshots)
            reply = EnvReply(infos, snapshot_defect=defect)
        elif command.kind == "load":
            reply = EnvReply(snapshot_defect=self._load(command.arguments, test_snapshots))
        elif command.kind == "call":
            reply = self._call(command)
        elif command.kind == "set":
            for env, value in zip(self.envs, command.arguments, strict=True):
                env.set_wrapper_attr(command.name, value)
        if take_snapshot and reply.snapshot_defect is None:
            start = time.perf_counter()
            data = self.snapshot()
            reply = replace(reply, snapshot=data, snapshot_seconds=time.perf_counter() - start)
        self._status[PHASE] = IDLE
        return reply

    def step(
        self,
        frame: int,
        last_frame: int,
        actions: ArrayTree = None,
        truncate: dict[int, str] | None = None,
    ) -> IndexedInfos:
        """Step every env, or reset it if it has ended, and return the infos that do not fit into the block.

        Args:
            frame: Index of the frame to write results into.
            last_frame: Index of the frame with the previous results.
            actions: One row per env; None: those in the shared block.
            truncate: Envs to truncate instead of stepping them, and why.
        """
        start = time.perf_counter()
        progress = self._progress
        infos: IndexedInfos = []
        observations, rewards, terminations, truncations = [], [], [], []
        status, needs_reset = self._status, self.needs_reset
        same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        rows = self._split_actions(self._actions if actions is None else actions)
        out, last = self._frames[frame], self._frames[last_frame]
        status[PHASE] = STEPPING
        if self.info_fields:
            out.info_values.fill(0)
            out.info_codes.fill(0)
        for i, env in enumerate(self.envs):
            progress += 1
            status[PROGRESS] = progress
            status[ENV] = i
            if truncate and self.first + i in truncate:
                obs, reward, terminated, truncated = copy_row(last.observations, i), 0.0, False, True
                info: dict[str, Any] = {"worker_restarted": truncate[self.first + i]}
            elif needs_reset[i]:  # only in NEXT_STEP mode
                obs, info = self._reset_one(env)
                reward, terminated, truncated = 0.0, False, False
            else:
                obs, reward, terminated, truncated, info = env.step(rows[i])  # type: ignore[assignment]
            ended = terminated or truncated
            if ended and same_step:
                infos.append((self.first + i, {"final_obs": obs, "final_info": info}))
                obs, info = self._reset_one(env)
            needs_reset[i] = bool(ended) and not same_step
            if info:
                self._store_info(infos, i, info, out)
            observations.append(obs)
            rewards.append(reward)
            terminations.append(terminated)
            truncations.append(truncated)
        write_rows(out.observations, observations)
        out.rewards[...] = rewards
        out.terminated[...] = terminations
        out.truncated[...] = truncations
        self._progress = progress
        status[STEP_SECONDS] = time.perf_counter() - start
        status[PHASE] = IDLE
        return infos

    def _reset_one(self, env: Env, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._status[PHASE] = RESETTING
        obs, info = env.reset(**kwargs)
        self._status[PHASE] = STEPPING
        return obs, info

    def _reset(
        self, command: EnvCommand, out: StepFrame, last: StepFrame, test_snapshots: bool
    ) -> tuple[IndexedInfos, str | None]:
        """Reset envs; return their infos and, if tested, why snapshots are not exact."""
        infos: IndexedInfos = []
        observations = []
        defect = None
        out.info_values.fill(0)
        out.info_codes.fill(0)
        for i, seed in enumerate(command.seeds):
            self._report_progress(i)
            if command.mask is not None and not command.mask[i]:
                observations.append(copy_row(last.observations, i))
                continue
            obs, info = self._reset_one(self.envs[i], seed=seed, options=command.options)
            _check_fits(out.observations, obs, "the observation")
            self.needs_reset[i] = False
            new_defect = self._test_snapshots(i) if test_snapshots and defect is None else None
            if new_defect is not None:
                defect = new_defect
                obs, info = self._reset_one(self.envs[i], seed=seed, options=command.options)
            self._store_info(infos, i, info, out)
            observations.append(obs)
        write_rows(out.observations, observations)
        out.rewards[...], out.terminated[...], out.truncated[...] = 0.0, False, False
        return infos, defect

    def _test_snapshots(self, i: int) -> str | None:
        """Return why env `i`, which was just reset, has no exact snapshots; it is then replaced by a new env."""
        self._status[PHASE] = TESTING
        defect = find_snapshot_defect(self.envs[i], on_step=lambda: self._report_progress(i))
        if defect is not None:
            self.envs[i].close()
            self.envs[i] = self.env_fns[i]()
        self._status[PHASE] = STEPPING
        return defect

    def _report_progress(self, i: int) -> None:
        self._progress += 1
        self._status[PROGRESS], self._status[ENV] = self._progress, i

    def _store_info(self, infos: IndexedInfos, i: int, info: dict[str, Any], out: StepFrame) -> None:
        """Write the numeric info fields into the block and append the rest to `infos`."""
        if self.info_fields:
            info = dict(info)
            for f, name in enumerate(self.info_fields):
                value = info.get(name)
                code = INFO_TYPE_CODES.get(type(value), 0)
                if code and (code in FLOAT_CODES or -MAX_EXACT_INT <= value <= MAX_EXACT_INT):  # type: ignore[operator]
                    out.info_values[f, i], out.info_codes[f, i] = value, code
                    del info[name]
        if info:
            infos.append((self.first + i, info))

    def _split_actions(self, tree: ArrayTree) -> list[Any]:
        """Return one action per env, copied: an env may keep its action."""
        if isinstance(tree, dict | tuple):
            return [copy_row(tree, i) for i in range(len(self.env_fns))]
        return list(tree.copy())

    def _call(self, command: EnvCommand) -> EnvReply:
        try:
            attributes = [env.get_wrapper_attr(command.name) for env in self.envs]
        except AttributeError as error:
            return EnvReply(attribute_error=str(error))
        args, kwargs = command.arguments
        return EnvReply(values=tuple(value(*args, **kwargs) if callable(value) else value for value in attributes))

    def snapshot(self) -> bytes:
        """Return the state of the whole group, for `restore`."""
        rngs = (random.getstate(), np.random.get_state()) if self.owns_global_rngs else None
        return pickle.dumps(([snapshot(env) for env in self.envs], self.needs_reset, rngs), pickle.HIGHEST_PROTOCOL)

    def restore(self, data: bytes) -> None:
        """Return to a snapshot; SnapshotError if that fails."""
        states, needs_reset, rngs = pickle.loads(data)  # noqa: S301 (from our own parent, which has it from a worker)
        self._load(list(zip(states, needs_reset, strict=True)), False)
        if rngs is not None:
            random.setstate(rngs[0])
            np.random.set_state(rngs[1])

    def _load(self, states: Sequence[tuple[Any, bool]], test_snapshots: bool) -> str | None:
        """Restore every env; return why snapshots are not exact, if tested."""
        for i, (state, needs_reset) in enumerate(states):
            self._report_progress(i)
            self._reset_one(self.envs[i], seed=0)  # creates what an env creates in its first reset
            defect = self._test_snapshots(i) if test_snapshots else None
            if defect is not None:
                return defect
            restore(self.envs[i], state)
            if not states_equal(snapshot(self.envs[i]), state):
                raise SnapshotError(f"the state of environment {self.first + i} differs after restore(state)")
            self.needs_reset[i] = needs_reset
        return None

    def reset_all(self, seeds: Sequence[int]) -> None:
        """Reset every env with its seed, without reporting results."""
        for i, seed in enumerate(seeds):
            self._report_progress(i)
            self._reset_one(self.envs[i], seed=seed)

    def close(self) -> None:
        for env in self.envs:
            env.close()


def _check_fits(rows: ArrayTree, item: Any, name: str) -> None:
    """Raise LabError if an observation does not have the shape and dtype of its space."""
    if isinstance(rows, dict | tuple):
        for key in rows if isinstance(rows, dict) else range(len(rows)):
            _check_fits(rows[key], item[key], f"{name}[{key!r}]")
        return
    array = np.asarray(item)
    if array.shape != rows.shape[1:] or not np.can_cast(array.dtype, rows.dtype, "same_kind"):
        space = f"{rows.dtype}{rows.shape[1:]}"
        raise LabError(f"{name} is {array.dtype}{array.shape}, but its space is {space}", hint="change one of them")
