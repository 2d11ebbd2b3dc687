"""A vector env whose workers may crash, hang or be killed without any effect on the results.

    envs = SupervisedVectorEnv([lambda: gym.make("CartPole-v1")] * 64)
    observations, infos = envs.reset(seed=0)
    observations, rewards, terminated, truncated, infos = envs.step(actions)

It implements Gymnasium's VectorEnv and returns what SyncVectorEnv returns, to the bit. A few workers step several envs
each, into memory shared with this process. The envs of every worker are snapshotted regularly, and the actions since
are kept. A lost worker is replaced: the new one restores the snapshot, replays the steps since, must arrive at the same
observations, and continues. Envs without exact snapshots are replayed from their last seeded reset if that is not too
long ago; otherwise their episode is truncated, and infos["worker_restarted"] contains the reason. No wait is unbounded:
a worker that makes no progress before its deadline is killed.

With `workers=0`, or if "auto" finds that processes would cost more time than they save, all envs run in this process:
equally fast, but without protection from crashes.
"""

from __future__ import annotations

import operator
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from looplab.errors import LabError
from looplab.rl.diagnostics import RestartLog, WorkerReport, rss_bytes
from looplab.rl.group import EMPTY_REPLY, Env, EnvCommand, EnvGroup, EnvReply, IndexedInfos
from looplab.rl.process import (
    GRACE_SECONDS,
    UNTESTED,
    WorkerLost,
    WorkerProcess,
    preload_fork_server,
    start_lock,
    write_stacks,
)
from looplab.rl.shared import (
    INFO_DTYPES,
    INFO_TYPES,
    STEP_SECONDS,
    TESTING,
    Array,
    ArrayTree,
    SharedBlock,
    StepFrame,
    map_tree,
    tree_leaves,
    write_batch,
)
from looplab.rl.snapshot import preserve_global_rngs
from looplab.rl.vector_settings import VectorEnvSettings

MAX_REPLAY = 10_000
"""Steps that are kept, and at most replayed, for envs without exact snapshots."""
MIN_SAVED_SECONDS = 70e-6
"""Time that workers must save per step of all envs to be worth having; see benchmarks/vector.py."""
MAX_SNAPSHOT_SHARE = 0.02
"""Slow snapshots are taken less often, so that they cost at most this fraction of the time."""
_copy_array = operator.methodcaller("copy")


class EnvError(LabError):
    """An env fails repeatedly on its own; the message contains its index and the worker's traceback."""


class CommandLog:
    """The commands since the oldest snapshot that may still be needed, for replays."""

    def __init__(self) -> None:
        self.completed = 0
        """Commands completed so far; the log holds the last `len(self)` of them."""
        self._commands: deque[EnvCommand | ArrayTree] = deque()
        """A plain step is stored as its actions alone."""

    def __len__(self) -> int:
        return len(self._commands)

    def append(self, command: EnvCommand | ArrayTree) -> None:
        self._commands.append(command)
        self.completed += 1

    def since(self, completed: int) -> list[EnvCommand]:
        """Return the commands after the first `completed` ones."""
        recent = list(self._commands)[len(self._commands) - (self.completed - completed) :]
        return [command if isinstance(command, EnvCommand) else _step_with(command) for command in recent]

    def forget_before(self, completed: int) -> None:
        """Forget the first `completed` commands."""
        while len(self._commands) > self.completed - completed:
            self._commands.popleft()


def _step_with(actions: ArrayTree) -> EnvCommand:
    return EnvCommand("step", actions=actions)


class SupervisedVectorEnv(VectorEnv[Any, Any, Any]):
    """See the module. Spaces are Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of them.

    Actions must have the dtype of their space. Workers know the envs that are registered with Gymnasium but do not
    import the trainer's script: its functions and classes are pickled with `env_fns`.
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], Env]], settings: VectorEnvSettings | None = None, **options: Any
    ) -> None:
        """
        Args:
            env_fns: One function per env; they are sent to the workers by cloudpickle.
            settings: Settings; None for the defaults.
            options: Fields of `VectorEnvSettings` as keyword arguments; they override `settings`.

        Raises:
            LabError: There are no envs, or their spaces differ.
            EnvError: An env cannot be built.
        """
        if not env_fns:
            self.closed = True
            raise LabError("a vector env needs at least one env", hint="pass one function per env as env_fns")
        self.closed = False
        self.settings = settings = replace(settings or VectorEnvSettings(), **options)
        self.num_envs = len(env_fns)
        self.autoreset_mode = AutoresetMode(settings.autoreset_mode)
        self._owner_pid = os.getpid()
        self._workers: list[WorkerProcess] = []
        self._local_group: EnvGroup | None = None
        """The envs, if they run in this process."""
        self._env_fns, self._info_fields = list(env_fns), tuple(settings.info_fields)
        self._diagnostics_dir = None if settings.diagnostics_dir is None else Path(settings.diagnostics_dir)
        self._restart_log = RestartLog(self._diagnostics_dir)
        self._failure: str | None = None
        """Why this vector env can no longer be used; None while it can."""
        self._local_snapshot_defect: str | None = UNTESTED
        self._frame = 0
        """Index of the frame with the results last returned."""
        self._log = CommandLog()
        self._snapshot_interval = settings.snapshot_every
        self._since_snapshot = 0
        """Commands since the last snapshot."""
        self._seeds: list[int | None] = [None] * self.num_envs
        self._pending_truncations: dict[int, str] = {}
        """Envs whose state was lost outside a step, and why; the next step truncates them."""
        self._steps = 0
        if settings.prewarm:
            env_fns[0]().close()
        automatic = settings.workers == "auto"
        count = self._choose_workers(env_fns[0]) if automatic else min(int(settings.workers), self.num_envs)
        if count == 0:
            self._build_local_envs()
            return
        self._make_workers(count)
        try:
            self._start_workers()
        except BaseException:
            self.close()
            raise

    def _choose_workers(self, env_fn: Callable[[], Env]) -> int:
        """Return the number of cores, or 0 if workers would cost more time than they save."""
        count = min(len(os.sched_getaffinity(0)), self.num_envs)
        env = env_fn()
        with preserve_global_rngs():
            env.reset(seed=0)
            env.action_space.seed(0)
            times: list[float] = []
            deadline = time.perf_counter() + 0.2
            while len(times) < 200 and ((start := time.perf_counter()) < deadline or len(times) < 3):
                _, _, terminated, truncated, _ = env.step(env.action_space.sample())
                times.append(time.perf_counter() - start)
                if terminated or truncated:
                    env.reset()
        env.close()
        saved = self.num_envs * float(np.median(times)) * (1 - 1 / count)
        return count if saved > MIN_SAVED_SECONDS else 0

    def _build_local_envs(self) -> None:
        group = EnvGroup(self._env_fns, 0, self.autoreset_mode, self._info_fields)
        one = group.build()
        self._set_spaces(one.observation_space, one.action_space, one.metadata, one.render_mode)
        spaces = (one.observation_space, one.action_space)
        self._block = SharedBlock(spaces, self.num_envs, workers=1, info_fields=len(self._info_fields))
        group.attach(self._block, 0)
        self._local_group = group

    def _make_workers(self, count: int) -> None:
        bounds = [self.num_envs * i // count for i in range(count + 1)]
        self._memory_fd = os.memfd_create("looplab-vector")
        registered = [spec for spec in gym.registry.values() if not str(spec.entry_point).startswith("gymnasium.")]
        preload_fork_server(self.settings.context)
        for i in range(count):
            envs = range(bounds[i], bounds[i + 1])
            worker = WorkerProcess(
                i, self.settings, envs=envs, workers=count, num_envs=self.num_envs, memory_fd=self._memory_fd,
                env_fns=cloudpickle.dumps((registered, self._env_fns[envs.start : envs.stop])),
            )  # fmt: skip
            self._workers.append(worker)

    def _start_workers(self) -> None:
        serialise = self.settings.serialise_start
        descriptions: list[tuple[Any, ...]] = []
        for worker in self._workers:
            if self.settings.start_delay and worker.index:
                time.sleep(self.settings.start_delay)
            with start_lock(serialise):
                worker.start()
                if serialise:
                    descriptions.append(self._wait_until_built(worker))
        if not serialise:
            descriptions = [self._wait_until_built(worker) for worker in self._workers]
        for worker, (observation_space, action_space, *_) in zip(self._workers, descriptions, strict=True):
            if (observation_space, action_space) != descriptions[0][:2]:
                raise LabError(f"the spaces of environment {worker.first} differ from those of environment 0")
        self._set_spaces(*descriptions[0])
        self._spaces = (self.single_observation_space, self.single_action_space)
        self._block = SharedBlock(
            self._spaces, self.num_envs, workers=len(self._workers), info_fields=len(self._info_fields),
            fd=self._memory_fd, create=True,
        )  # fmt: skip
        for worker in self._workers:
            worker.status = self._block.status[worker.index].data
            worker.send_message(self._spaces)

    def _wait_until_built(self, worker: WorkerProcess) -> tuple[Any, ...]:
        """Return a new worker's description of its envs, restarting it if it is lost."""
        while True:
            try:
                return tuple(worker.wait()[1:])
            except WorkerLost as lost:
                if lost.kind == "error":
                    raise EnvError(f"environment {lost.env} cannot be built:\n{lost.trace}") from None
                self._record_loss(worker, lost)
                worker.start()

    def _set_spaces(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        metadata: dict[str, Any],
        render_mode: str | None,
    ) -> None:
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, self.num_envs)
        self.action_space = batch_space(action_space, self.num_envs)
        self.metadata = {**metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = render_mode

    @property
    def workers(self) -> int:
        """Number of worker processes; 0 if the envs run in this process."""
        return len(self._workers)

    # Gymnasium's interface

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ArrayTree, dict[str, Any]]:
        """Reset all envs, or those of options["reset_mask"]; an int seeds them with seed, seed + 1, …"""
        seeds = [None] * self.num_envs if seed is None else seed
        seeds = [seeds + i for i in range(self.num_envs)] if isinstance(seeds, int | np.integer) else list(seeds)
        if len(seeds) != self.num_envs:
            raise LabError(f"reset needs one seed per env ({self.num_envs}), not {len(seeds)}")
        mask = None
        if options is not None and "reset_mask" in options:
            options = dict(options)
            mask = options.pop("reset_mask")
            if getattr(mask, "dtype", None) != np.bool_ or mask.shape != (self.num_envs,) or not mask.any():
                raise LabError(f"reset_mask must be an array of {self.num_envs} bools, at least one of them true")
        chosen = np.ones(self.num_envs, np.bool_) if mask is None else mask
        for i in np.flatnonzero(chosen):
            if seeds[i] is None and self._seeds[i] is None:  # a seed makes the reset replayable
                seeds[i] = int(np.random.SeedSequence().generate_state(1)[0])
            new_seed = seeds[i]
            if new_seed is not None:
                self._seeds[i] = seeds[i] = int(new_seed)
            self._pending_truncations.pop(int(i), None)
        replies = self._execute(EnvCommand("reset", seeds=tuple(seeds), options=options, mask=mask))
        return self._observations(), self._infos(replies)

    def step(self, actions: Any) -> tuple[ArrayTree, Array, Array, Array, dict[str, Any]]:
        """Step all envs; those that have ended are reset according to the autoreset mode."""
        frame = self._block.frames[self._frame]
        if self.autoreset_mode is AutoresetMode.DISABLED and (frame.terminated | frame.truncated).any():
            raise LabError("an environment has ended", hint='reset it: options={"reset_mask": …}')
        write_batch(self._block.actions, actions, "actions")
        actions_copy = map_tree(_copy_array, self._block.actions) if self._workers else None
        if self._pending_truncations:
            truncate, self._pending_truncations = self._pending_truncations, {}
            replies = self._execute(EnvCommand("step", actions=actions_copy, truncate=truncate))
        else:
            replies = self._execute(actions_copy)
        self._steps += 1
        frame = self._block.frames[self._frame]
        results = frame.rewards.copy(), frame.terminated.copy(), frame.truncated.copy()
        return self._observations(), *results, self._infos(replies)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or return an attribute of every env."""
        replies = self._execute(EnvCommand("call", name=name, arguments=(args, kwargs)))
        for reply in replies:
            if reply.attribute_error is not None:
                raise AttributeError(reply.attribute_error)
        return tuple(value for reply in replies for value in reply.values)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every env."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env; a list or tuple has one value per env."""
        per_env = values if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(per_env) != self.num_envs:
            raise LabError(f"set_attr needs one value per env ({self.num_envs}), not {len(per_env)}")
        self._execute(EnvCommand("set", name=name, arguments=tuple(per_env)))

    def render(self) -> tuple[Any, ...]:
        """Return an image of every env."""
        return self.call("render")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """Seeds of the envs."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of the envs' random generators."""
        return self.get_attr("np_random")

    def close_extras(self, **kwargs: Any) -> None:
        """End the workers; those that do not close their envs in time are killed."""
        if os.getpid() != self._owner_pid:
            return  # a forked copy of this process does not own the workers
        if self._local_group is not None:
            self._local_group.close()
        for worker in self._workers:
            worker.send_message(("close",), block=False)
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in self._workers:
            worker.close(deadline)
        if self._workers:
            os.close(self._memory_fd)
            self._workers = []

    # Checkpoints and diagnostics

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all envs and the last results, in the form of looplab.rl.snapshot.

        Raises:
            LabError: The envs have no exact snapshots.
        """
        for defect in [worker.snapshot_defect for worker in self._workers] or [self._local_snapshot_defect]:
            if defect is not None:
                raise LabError(f"these environments have no snapshots: {defect}")
        replies = self._execute(EnvCommand("snapshot"))
        envs, needs_reset = [], []
        for reply in replies:
            group_states, group_needs_reset, _ = pickle.loads(reply.snapshot or b"")  # noqa: S301 (from our own worker)
            envs += group_states
            needs_reset += group_needs_reset
        results = [array.copy() for array in self._frame_arrays()]
        seeds = [None if seed is None else str(seed) for seed in self._seeds]
        return {
            "version": 1, "envs": envs, "due": needs_reset, "frame": results, "seeds": seeds, "steps": self._steps,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> ArrayTree:
        """Continue from a saved state, with the same envs and any number of workers; return the last observations.

        Raises:
            LabError: The number of envs differs, or the envs have no exact snapshots.
        """
        if len(state["envs"]) != self.num_envs:
            raise LabError(f"the state has {len(state['envs'])} environments, this vector env has {self.num_envs}")
        states = tuple(zip(state["envs"], state["due"], strict=True))
        for reply in self._execute(EnvCommand("load", arguments=states)):
            if reply.snapshot_defect is not None:
                raise LabError(f"the state of these environments cannot be restored: {reply.snapshot_defect}")
        for array, saved in zip(self._frame_arrays(), state["frame"], strict=True):
            array[...] = saved
        self._seeds = [None if seed is None else int(seed) for seed in state["seeds"]]
        self._steps = state["steps"]
        self._pending_truncations = {}
        return self._observations()

    def _frame_arrays(self) -> list[Array]:
        """Return the arrays with the results last returned, in the order of a saved state."""
        frame = self._block.frames[self._frame]
        return [*tree_leaves(frame.observations), frame.rewards, frame.terminated, frame.truncated]

    @property
    def restarts(self) -> int:
        """Workers replaced so far, including those that earlier processes recorded in `diagnostics_dir`."""
        return self._restart_log.count

    def diagnostics(self) -> list[WorkerReport]:
        """Return a report on each worker; one report without a pid if the envs run in this process."""
        if self._local_group is None:
            return [worker.report(self._steps) for worker in self._workers]
        report = WorkerReport(
            worker=0, envs=tuple(range(self.num_envs)), pid=None, steps=self._steps, restarts=0, reasons=(), replayed=0,
            slow_steps=0, last_step_ms=self._block.status[0][STEP_SECONDS] * 1e3, rss_bytes=rss_bytes(None),
            snapshots="not needed",
        )  # fmt: skip
        return [report]

    # Execution and recovery

    def _execute(self, request: EnvCommand | ArrayTree) -> Sequence[EnvReply]:
        """Have all workers execute a command, replacing workers that are lost.

        Args:
            request: A command, or the actions of a plain step.
        """
        if self.closed or self._failure is not None:
            raise LabError(self._failure or "this vector env is closed", hint="make a new one")
        command: EnvCommand | None = request if isinstance(request, EnvCommand) else None
        last_frame, frame = self._frame, 1 - self._frame
        writes_frame = command is None or command.kind in ("step", "reset")
        self._since_snapshot += 1
        take_snapshot = self.settings.snapshot_every > 0 and (
            self._since_snapshot >= self._snapshot_interval or (command is not None and command.kind != "call")
        )
        replies = []
        try:
            if self._local_group is not None:
                replies.append(self._execute_locally(command, frame, last_frame))
            for worker in self._workers:
                worker.send_command(command, frame, take_snapshot)
            for worker in self._workers:
                try:
                    reply = worker.wait()
                except WorkerLost as lost:
                    command = command or _step_with(request)
                    reply = self._recover(worker, command, frame, take_snapshot, lost)
                replies.append(reply)
        except EnvError as error:
            self._failure = f"this vector env has failed: {error.message.splitlines()[0]}"
            raise
        except BaseException:  # for example Ctrl-C: the next command replaces the workers and replays
            for worker in self._workers:
                worker.kill()
            raise
        if writes_frame:
            self._frame = frame
        if self._workers:
            self._update_log(command, request, replies, take_snapshot)
        return replies

    def _execute_locally(self, command: EnvCommand | None, frame: int, last_frame: int) -> EnvReply:
        """Execute a command in this process; exceptions of an env reach the caller unchanged."""
        assert self._local_group is not None
        if command is None:
            infos = self._local_group.step(frame, last_frame)
            return EnvReply(infos) if infos else EMPTY_REPLY
        untested = self._local_snapshot_defect == UNTESTED
        test_snapshots = untested and self.settings.snapshot_every > 0 and command.kind in ("reset", "load")
        take_snapshot = command.kind == "snapshot"
        reply = self._local_group.execute(command, frame, last_frame, take_snapshot, test_snapshots)
        if test_snapshots:
            self._local_snapshot_defect = reply.snapshot_defect
        return reply

    def _update_log(
        self,
        command: EnvCommand | None,
        request: EnvCommand | ArrayTree,
        replies: list[EnvReply],
        take_snapshot: bool,
    ) -> None:
        """Keep what a replay needs: the new snapshots, or else the command."""
        self._log.append(request if command is None else command)
        if command is None and not take_snapshot:
            if len(self._log) > MAX_REPLAY:
                self._trim_log()
            return
        every = self.settings.snapshot_every
        seeded_reset = (
            command is not None and command.kind == "reset" and command.mask is None and None not in command.seeds
        )
        for worker, reply in zip(self._workers, replies, strict=True):
            if worker.snapshot_defect == UNTESTED and command is not None and command.kind in ("reset", "load"):
                worker.snapshot_defect = reply.snapshot_defect if every > 0 else "snapshot_every is 0"
            if reply.snapshot is not None:
                worker.snapshot, worker.snapshot_at, worker.reset_seeds = reply.snapshot, self._log.completed, None
                step_seconds = max(worker.status[STEP_SECONDS], 1e-6)
                affordable = reply.snapshot_seconds / (MAX_SNAPSHOT_SHARE * step_seconds) if self._steps else 0
                self._snapshot_interval = int(min(max(every, affordable), max(every, MAX_REPLAY)))
            elif seeded_reset:
                worker.snapshot, worker.snapshot_at, worker.reset_seeds = None, self._log.completed - 1, None
        if take_snapshot:
            self._since_snapshot = 0
        self._trim_log()

    def _trim_log(self) -> None:
        """Forget commands that no replay needs, and give up replays that would be too long."""
        completed = self._log.completed
        for worker in self._workers:
            longest = max(MAX_REPLAY, self._snapshot_interval)
            if worker.snapshot_at is not None and completed - worker.snapshot_at > longest:
                worker.snapshot_at = None
        oldest = min((w.snapshot_at for w in self._workers if w.snapshot_at is not None), default=completed)
        self._log.forget_before(oldest)

    def _recover(
        self, worker: WorkerProcess, command: EnvCommand, frame: int, take_snapshot: bool, lost: WorkerLost
    ) -> EnvReply:
        """Replace a lost worker, return its envs to where they were, and have it execute the command."""
        failures: list[WorkerLost] = []
        failed_replays = 0
        stage = "command"
        while True:
            self._record_loss(worker, lost)
            if stage == "command":
                failures.append(lost)
                self._handle_repeated_failure(worker, command, failures)
            elif stage == "replay":
                failed_replays += 1
            try:
                stage = "build"
                self._restart(worker)
                stage = "replay"
                problem = self._replay(worker, frame) if failed_replays < 2 else f"its replay fails: {lost.reason}"
                if problem is not None:
                    self._start_new_episodes(worker, command, f"{failures[0].reason}; {problem}")
                stage = "command"
                has_snapshots = self.settings.snapshot_every > 0 and worker.snapshot_defect is None
                worker.send_command(command, frame, take_snapshot or (has_snapshots and bool(command.truncate)))
                return worker.wait()  # type: ignore[no-any-return]
            except WorkerLost as next_lost:
                lost = next_lost

    def _restart(self, worker: WorkerProcess) -> None:
        """Start a new process with new envs, ready for commands."""
        worker.start()
        if tuple(worker.wait()[1:3]) != self._spaces:
            raise EnvError(f"the spaces of worker {worker.index} have changed after its restart")
        worker.send_message(self._spaces)

    def _handle_repeated_failure(self, worker: WorkerProcess, command: EnvCommand, failures: list[WorkerLost]) -> None:
        """Decide whether an env fails on its own; if so, truncate its episode or raise EnvError."""
        lost = failures[-1]
        if lost.phase == TESTING:
            if sum(failure.phase == TESTING for failure in failures) > 1:
                worker.snapshot_defect = f"testing them failed: {lost.reason}"
            return
        twice = len(failures) > 1 and failures[-2].env == lost.env and failures[-2].kind == lost.kind
        if not twice or lost.env is None:
            return
        if self.settings.on_error == "truncate" and command.kind == "step":
            command.truncate[lost.env] = f"{lost.reason}, twice in the same step"
        elif lost.kind == "error":
            failure = f"environment {lost.env} raised an error, twice in the same {command.kind}"
            raise EnvError(f"{failure}:\n{lost.trace}")

    def _record_loss(self, worker: WorkerProcess, lost: WorkerLost) -> None:
        """Kill the worker and count its loss; raise EnvError if there are too many."""
        worker.kill()
        now = time.monotonic()
        worker.reasons.append(lost.reason)
        worker.restarts += 1
        self._restart_log.add(worker.index, lost.reason)
        worker.restart_times.append(now)
        window = self.settings.restart_window
        while worker.restart_times[0] < now - window:
            worker.restart_times.popleft()
        if self._diagnostics_dir is not None and lost.trace:
            write_stacks(self._diagnostics_dir, f"worker_{worker.index}_lost", lost.reason, lost.trace)
        if len(worker.restart_times) > self.settings.max_restarts:
            envs = f"{worker.first} to {worker.end - 1}" if lost.env is None else str(lost.env)
            often = f"{len(worker.restart_times)} times in {window:g} s"
            text = f"worker {worker.index} was lost {often}, with environment {envs}: {lost.reason}"
            raise EnvError(f"{text}\n{lost.trace or '(no traceback)'}")

    def _replay(self, worker: WorkerProcess, frame: int) -> str | None:
        """Return a new worker's envs to where the lost worker's were; return why that is impossible, or None."""
        if worker.snapshot_at is None:
            defect = worker.snapshot_defect
            return f"its episode cannot be replayed: no snapshot ({defect}) for over {MAX_REPLAY} steps"
        commands = self._log.since(worker.snapshot_at)
        if worker.reset_seeds is not None:
            worker.send_message(("reset_all", worker.reset_seeds))
            worker.wait()
        share = [command.slice_envs(worker.first, worker.end) for command in commands]
        worker.send_message(("replay", worker.snapshot, share, frame))
        problem: str | None = worker.wait()
        if problem is not None:
            return f"its snapshot cannot be restored: {problem}"
        worker.replayed += sum(command.kind == "step" for command in commands)
        if any(command.kind in ("step", "reset") for command in commands):
            frames: list[StepFrame] = [each.slice_envs(worker.first, worker.end) for each in self._block.frames]
            if not frames[0].equals(frames[1]):
                return "it is not reproducible: the same actions led to other observations"
        return None

    def _start_new_episodes(self, worker: WorkerProcess, command: EnvCommand, reason: str) -> None:
        """Reset the envs of a worker that cannot be replayed; the next step truncates their episodes."""
        if command.kind != "reset" or command.mask is not None:
            truncations = command.truncate if command.kind == "step" else self._pending_truncations
            reset = np.zeros(self.num_envs, np.bool_) if command.mask is None else command.mask
            truncations.update({i: reason for i in range(worker.first, worker.end) if not reset[i]})
        completed = self._log.completed
        sequences = [np.random.SeedSequence((self._seeds[i] or 0, completed)) for i in range(worker.first, worker.end)]
        worker.reset_seeds = [int(sequence.generate_state(1)[0]) for sequence in sequences]
        worker.snapshot, worker.snapshot_at = None, completed
        worker.kill()  # the failed replay has changed its envs
        self._restart(worker)
        worker.send_message(("reset_all", worker.reset_seeds))
        worker.wait()

    # Results

    def _observations(self) -> ArrayTree:
        observations = self._block.frames[self._frame].observations
        return map_tree(_copy_array if self.settings.copy else lambda array: array, observations)

    def _infos(self, replies: Sequence[EnvReply]) -> dict[str, Any]:
        """Return the infos of all envs in Gymnasium's form."""
        infos: dict[str, Any] = {}
        others = [pair for reply in replies for pair in reply.infos]
        frame = self._block.frames[self._frame]
        if self._info_fields and frame.info_codes.any():
            if any(name in info for _, info in others for name in self._info_fields):
                return self._mixed_infos(frame, others)
            for name, values, codes in zip(self._info_fields, frame.info_values, frame.info_codes, strict=True):
                mask = codes != 0
                if mask.any():
                    infos[name], infos[f"_{name}"] = values.astype(INFO_DTYPES[codes[mask.argmax()]]), mask
        for i, info in others:
            infos = self._add_info(infos, info, i)
        return infos

    def _mixed_infos(self, frame: StepFrame, others: IndexedInfos) -> dict[str, Any]:
        """Add infos one by one, as Gymnasium does, for a field that is numeric in some envs and not in others."""
        infos: dict[str, Any] = {}
        for i in range(self.num_envs):
            for f, name in enumerate(self._info_fields):
                code = frame.info_codes[f, i]
                if code:
                    infos = self._add_info(infos, {name: INFO_TYPES[code](frame.info_values[f, i])}, i)
            for _, info in (pair for pair in others if pair[0] == i):
                infos = self._add_info(infos, info, i)
        return infos
