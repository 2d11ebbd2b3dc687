"""A vector env whose workers may crash, hang or be killed: the caller gets the same results as if nothing had happened.

    venv = SupervisedVectorEnv([lambda: gym.make("CartPole-v1")] * 64)
    observations, infos = venv.reset(seed=0)
    observations, rewards, terminated, truncated, infos = venv.step(actions)

It speaks gymnasium's VectorEnv and gives what SyncVectorEnv gives, to the bit. A few workers step several environments
each, into memory they share with this process. Every worker's environments are snapshotted now and then, and the
actions since are kept. When a worker is lost, another takes its place: it restores the snapshot, makes the same steps
again, must arrive at the same observations, and goes on. Environments that cannot be snapshotted are replayed from
their last seeded reset while that is near; failing that, their episode is truncated, and infos["worker_restarted"] says
why. Nobody waits for ever: a call without progress beyond its deadline ends its worker.

With `workers=0`, or where "auto" finds that processes would only cost time, everything happens in this process, as
fast, but with nothing to save it from a crash.
"""

from __future__ import annotations

import operator
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from looplab.errors import LabError
from looplab.rl.diagnostics import SlowStepDetector, WorkerReport, rss_bytes
from looplab.rl.group import NOTHING, Answer, Env, EnvGroup, Order
from looplab.rl.process import GRACE, UNTESTED, Lost, WorkerProcess, preload, start_lock, write_stacks
from looplab.rl.shared import DTYPES, SECONDS, TESTING, TYPES, Array, Block, Frame, Tree, copy_in, each, leaves
from looplab.rl.snapshot import global_generators

MOST_REPLAY = 10_000
"""Steps that are kept, and at most made again, for environments that cannot be snapshotted."""
WORTH = 70e-6
"""Seconds that a step of all environments must save before processes are worth having; see benchmarks/vector.py."""
SNAPSHOT_SHARE = 0.02
"""Where snapshots are slow they are taken less often, so that they cost no more than this share of the time."""
_copy = operator.methodcaller("copy")


class EnvError(LabError):
    """An environment fails by itself, again and again: the message has its number and the worker's traceback."""


class SupervisedVectorEnv(VectorEnv[Any, Any, Any]):
    """See the module. Spaces are Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of them.

    Actions are taken in the type of their space. Workers know the environments that are registered with gymnasium, but
    do not import the trainer's script: functions and classes of that travel with `env_fns`. With "fork" a worker
    also ends with the thread that made it; with "forkserver" with this process alone.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env]],
        *,
        workers: int | Literal["auto"] = "auto",
        context: Literal["forkserver", "fork"] = "forkserver",
        info_fields: Sequence[str] = (),
        reset_deadline: float = 60.0,
        step_deadline: float = 15.0,
        snapshot_every: int = 200,
        max_restarts: int = 5,
        restart_window: float = 300.0,
        on_error: Literal["raise", "truncate"] = "raise",
        start_delay: float = 0.0,
        serialise_start: bool | str | os.PathLike[str] = False,
        prewarm: bool = False,
        slow_step: float | None = None,
        slow_threshold: int = 5,
        slow_window: float = 120.0,
        diagnostics_dir: str | os.PathLike[str] | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        copy: bool = True,
    ) -> None:
        """
        env_fns: one for each environment; they travel to the workers by cloudpickle.
        workers: how many processes; 0 for none, "auto" for as many as cores, or none where they would lose time.
        info_fields: infos that are numbers and come in most steps; they travel in the shared memory.
        reset_deadline, step_deadline: seconds for one call of one environment (building it counts as a reset).
        snapshot_every: steps between snapshots; 0 for none at all.
        max_restarts: of one worker within `restart_window` seconds; one more is an EnvError.
        on_error: what follows when an environment fails twice in the same step: an EnvError, or its episode is cut off.
        start_delay, serialise_start: seconds between starts of workers; one after the other, with a lock between all
            processes that name the same file (True: one file for all of this user).
        prewarm: make and close one environment in this process first, for what is built once on a machine.
        slow_step, slow_threshold, slow_window: so many steps slower than this within the window, and the worker's
            stacks are written to `diagnostics_dir`.
        copy: whether observations are copies; if not, they are valid until the step after the next.
        """
        if not env_fns:
            self.closed = True
            raise LabError("a vector env needs an environment", hint="give env_fns a function for each")
        self.closed = False
        self.num_envs = len(env_fns)
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self._owner = os.getpid()
        self._handles: list[WorkerProcess] = []
        self._group: EnvGroup | None = None
        self._makers, self._fields, self._copy = list(env_fns), tuple(info_fields), copy
        self._every, self._max_restarts, self._restart_window = snapshot_every, max_restarts, restart_window
        self._on_error, self._folder = on_error, Path(diagnostics_dir) if diagnostics_dir is not None else None
        self._failed: str | None = None
        self._inexact: str | None = UNTESTED
        self._turn = 0
        self._log: deque[Order | Tree] = deque()
        """What was done since the oldest snapshot; a plain step is its actions alone."""
        self._done = 0
        """Orders done so far; the log holds those from `_oldest` on."""
        self._oldest = 0
        self._interval = snapshot_every
        self._since = 0
        self._seeds: list[int | None] = [None] * self.num_envs
        self._cut: dict[int, str] = {}
        """Environments whose state was lost outside of a step: the next one truncates them."""
        self._steps = 0
        if prewarm:
            env_fns[0]().close()
        count = self._choose(env_fns[0]) if workers == "auto" else min(int(workers), self.num_envs)
        if count == 0:
            self._build_here()
            return
        deadlines = (reset_deadline, step_deadline)
        bounds = [self.num_envs * i // count for i in range(count + 1)]
        self._memory = os.memfd_create("looplab-vector")
        registered = [spec for spec in gym.registry.values() if not str(spec.entry_point).startswith("gymnasium.")]
        preload(context)
        for i in range(count):
            slow = SlowStepDetector(slow_threshold, slow_window)
            handle = WorkerProcess(i, bounds[i], bounds[i + 1], context, deadlines, slow_step, slow)
            start = (count, self.num_envs, cloudpickle.dumps((registered, self._makers[handle.first : handle.end])))
            handle.plan = (*start, self.autoreset_mode, self._fields, self._memory)
            handle.stack_folder = self._folder
            self._handles.append(handle)
        try:
            self._start_all(start_delay, serialise_start)
        except BaseException:
            self.close()
            raise

    def _choose(self, make: Callable[[], Env]) -> int:
        """As many workers as cores, or 0 if the time they save is less than what they cost."""
        count = min(len(os.sched_getaffinity(0)), self.num_envs)
        env = make()
        with global_generators():
            env.reset(seed=0)
            env.action_space.seed(0)
            times: list[float] = []
            until = time.perf_counter() + 0.2
            while len(times) < 200 and ((began := time.perf_counter()) < until or len(times) < 3):
                over = env.step(env.action_space.sample())
                times.append(time.perf_counter() - began)
                if over[2] or over[3]:
                    env.reset()
        env.close()
        saved = self.num_envs * float(np.median(times)) * (1 - 1 / count)
        return count if saved > WORTH else 0

    def _build_here(self) -> None:
        group = EnvGroup(self._makers, 0, self.autoreset_mode, self._fields)
        group.envs = [make() for make in self._makers]
        one = group.envs[0]
        for i, env in enumerate(group.envs):
            if (env.observation_space, env.action_space) != (one.observation_space, one.action_space):
                raise LabError(f"environment {i} has other spaces than environment 0")
        self._describe(one.observation_space, one.action_space, one.metadata, one.render_mode)
        self._block = Block((one.observation_space, one.action_space), self.num_envs, 1, len(self._fields))
        group.attach(self._block, 0)
        self._group = group

    def _start_all(self, delay: float, serialise: bool | str | os.PathLike[str]) -> None:
        described: list[tuple[Any, ...]] = []
        for handle in self._handles:
            if delay and handle.index:
                time.sleep(delay)
            with start_lock(serialise):
                handle.start()
                if serialise:
                    described.append(self._built(handle))
        if not serialise:
            described = [self._built(handle) for handle in self._handles]
        for handle, (observed, acted, *_) in zip(self._handles, described, strict=True):
            if (observed, acted) != described[0][:2]:
                raise LabError(f"environment {handle.first} has other spaces than environment 0")
        self._describe(*described[0])
        self._spaces = (self.single_observation_space, self.single_action_space)
        count = len(self._handles)
        self._block = Block(self._spaces, self.num_envs, count, len(self._fields), self._memory, create=True)
        for handle in self._handles:
            handle.cell = self._block.cells[handle.index].data
            handle.ask(self._spaces)

    def _built(self, handle: WorkerProcess) -> tuple[Any, ...]:
        """What a new worker says of its environments; it gets a second chance, like every other."""
        while True:
            try:
                return tuple(handle.wait()[1:])
            except Lost as lost:
                if lost.kind == "error":
                    raise EnvError(f"environment {lost.env} cannot be built:\n{lost.trace}") from None
                self._note(handle, lost)
                handle.start()

    def _describe(self, observed: Any, acted: Any, metadata: dict[str, Any], render_mode: str | None) -> None:
        self.single_observation_space, self.single_action_space = observed, acted
        self.observation_space = batch_space(observed, self.num_envs)
        self.action_space = batch_space(acted, self.num_envs)
        self.metadata = {**metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = render_mode

    @property
    def workers(self) -> int:
        """How many processes there are; 0 if the environments live in this one."""
        return len(self._handles)

    # What gymnasium asks for

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tree, dict[str, Any]]:
        """Reset all environments, or those of options["reset_mask"]; an int seeds them with seed, seed + 1, …"""
        seeds = [None] * self.num_envs if seed is None else seed
        seeds = [seeds + i for i in range(self.num_envs)] if isinstance(seeds, int | np.integer) else list(seeds)
        if len(seeds) != self.num_envs:
            raise LabError(f"reset needs a seed for each of {self.num_envs} environments, not {len(seeds)}")
        mask = None
        if options is not None and "reset_mask" in options:
            options = dict(options)
            mask = options.pop("reset_mask")
            if getattr(mask, "dtype", None) != np.bool_ or mask.shape != (self.num_envs,) or not mask.any():
                raise LabError(f"reset_mask must be {self.num_envs} bools in an array, one of them true at least")
        chosen = np.ones(self.num_envs, np.bool_) if mask is None else mask
        for i in np.flatnonzero(chosen):
            if seeds[i] is None and self._seeds[i] is None:  # a seed of its own, so that it can be done again
                seeds[i] = int(np.random.SeedSequence().generate_state(1)[0])
            given = seeds[i]
            if given is not None:
                self._seeds[i] = seeds[i] = int(given)
            self._cut.pop(int(i), None)
        answers = self._do(Order("reset", seeds=tuple(seeds), options=options, mask=mask))
        return self._observations(), self._infos(answers)

    def step(self, actions: Any) -> tuple[Tree, Array, Array, Array, dict[str, Any]]:
        """Step all environments; those that have ended are reset as the autoreset mode says."""
        frame = self._block.frames[self._turn]
        if self.autoreset_mode is AutoresetMode.DISABLED and (frame.terminated | frame.truncated).any():
            raise LabError("an environment has ended", hint='reset it: options={"reset_mask": …}')
        copy_in(self._block.actions, actions, "actions")
        kept = each(_copy, self._block.actions) if self._handles else None
        if self._cut:
            skip, self._cut = self._cut, {}
            answers = self._do(Order("step", actions=kept, skip=skip))
        else:
            answers = self._do(kept)
        self._steps += 1
        frame = self._block.frames[self._turn]
        ends = frame.rewards.copy(), frame.terminated.copy(), frame.truncated.copy()
        return self._observations(), *ends, self._infos(answers)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or get an attribute."""
        answers = self._do(Order("call", name=name, arguments=(args, kwargs)))
        for answer in answers:
            if answer.unknown is not None:
                raise AttributeError(answer.unknown)
        return tuple(value for answer in answers for value in answer.values)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment: a list or tuple has one value for each."""
        given = values if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(given) != self.num_envs:
            raise LabError(f"set_attr needs {self.num_envs} values, one for each environment, not {len(given)}")
        self._do(Order("set", name=name, arguments=tuple(given)))

    def render(self) -> tuple[Any, ...]:
        """A picture of every environment."""
        return self.call("render")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seeds of the environments."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of the random generators of the environments."""
        return self.get_attr("np_random")

    def close_extras(self, **kwargs: Any) -> None:
        """End the workers; those that do not close their environments at once are killed."""
        if os.getpid() != self._owner:
            return  # a forked copy: the workers are not ours
        if self._group is not None:
            self._group.close()
        for handle in self._handles:
            handle.ask(("close",), patient=False)
        until = time.monotonic() + GRACE
        for handle in self._handles:
            handle.finish(until)
        if self._handles:
            os.close(self._memory)
            self._handles = []

    # What a trainer needs to go on exactly where it was

    def state_dict(self) -> dict[str, Any]:
        """All environments and what was last returned, in the form of looplab.rl.snapshot."""
        for why in [handle.exact for handle in self._handles] or [self._inexact]:
            if why is not None:
                raise LabError(f"these environments have no snapshots: {why}")
        answers = self._do(Order("snapshot"))
        envs, due = [], []
        for answer in answers:
            states, ended, _ = pickle.loads(answer.snapshot or b"")  # noqa: S301 (from our own worker)
            envs += states
            due += ended
        frame = self._block.frames[self._turn]
        shown = [array.copy() for array in (*leaves(frame.observations), frame.rewards)]
        flags = [frame.terminated.copy(), frame.truncated.copy()]
        seeds = [None if seed is None else str(seed) for seed in self._seeds]
        return {"version": 1, "envs": envs, "due": due, "frame": [*shown, *flags], "seeds": seeds, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> Tree:
        """Go on from there, with the same environments and any number of workers. Returns the last observations."""
        if len(state["envs"]) != self.num_envs:
            raise LabError(f"that state has {len(state['envs'])} environments, this vector env has {self.num_envs}")
        answers = self._do(Order("load", arguments=tuple(zip(state["envs"], state["due"], strict=True))))
        for answer in answers:
            if answer.inexact is not None:
                raise LabError(f"these environments cannot take a state: {answer.inexact}")
        frame = self._block.frames[self._turn]
        arrays = [*leaves(frame.observations), frame.rewards, frame.terminated, frame.truncated]
        for array, saved in zip(arrays, state["frame"], strict=True):
            array[...] = saved
        self._seeds = [None if seed is None else int(seed) for seed in state["seeds"]]
        self._steps = state["steps"]
        self._cut = {}
        return self._observations()

    def diagnostics(self) -> list[WorkerReport]:
        """How each worker is doing; one report without a pid if there are none."""
        if self._group is not None:
            last = self._block.cells[0][SECONDS] * 1e3
            envs = tuple(range(self.num_envs))
            return [WorkerReport(0, envs, None, self._steps, 0, (), 0, 0, last, rss_bytes(None), "not needed")]
        return [handle.report(self._steps) for handle in self._handles]

    # Orders, and what happens when a worker is lost over one

    def _do(self, what: Order | Tree) -> Sequence[Answer]:
        """Have all workers do it, an order or just a step with these actions; whoever is lost is replaced."""
        if self.closed or self._failed is not None:
            raise LabError(self._failed or "this vector env is closed", hint="make a new one")
        order: Order | None = what if isinstance(what, Order) else None
        before, at = self._turn, 1 - self._turn
        writes = order is None or order.kind in ("step", "reset")
        self._since += 1
        snap = self._every > 0 and (self._since >= self._interval or (order is not None and order.kind != "call"))
        answers = []
        try:
            if self._group is not None:
                answers.append(self._do_here(order, at, before))
            for handle in self._handles:
                handle.give(order, at, snap)
            for handle in self._handles:
                try:
                    answer = handle.wait()
                except Lost as lost:
                    order = order or Order("step", actions=what)
                    answer = self._recover(handle, order, at, snap, lost)
                answers.append(answer)
        except EnvError as error:
            self._failed = f"this vector env has failed: {error.message.splitlines()[0]}"
            raise
        except BaseException:  # Ctrl-C, for example: the next order finds them gone, and begins where this one did
            for handle in self._handles:
                handle.kill()
            raise
        if writes:
            self._turn = at
        if self._handles:
            self._keep(order, what, answers, snap)
        return answers

    def _do_here(self, order: Order | None, at: int, before: int) -> Answer:
        """The same, where there are no workers: an error of an environment goes to the caller as it is."""
        assert self._group is not None
        if order is None:
            infos = self._group.step(at, before)
            return Answer(infos) if infos else NOTHING
        test = self._inexact == UNTESTED and self._every > 0 and order.kind in ("reset", "load")
        answer = self._group.perform(order, at, before, order.kind == "snapshot", test)
        if test:
            self._inexact = answer.inexact
        return answer

    def _keep(self, order: Order | None, what: Order | Tree, answers: list[Answer], snap: bool) -> None:
        """Remember what a replay needs: the snapshots that have just come, or else the order."""
        self._log.append(what if order is None else order)
        self._done += 1
        if order is None and not snap:
            if self._done - self._oldest > MOST_REPLAY:
                self._trim()
            return
        anew = order is not None and order.kind == "reset" and order.mask is None and None not in order.seeds
        for handle, answer in zip(self._handles, answers, strict=True):
            if handle.exact == UNTESTED and order is not None and order.kind in ("reset", "load"):
                handle.exact = answer.inexact if self._every > 0 else "snapshot_every is 0"
            if answer.snapshot is not None:
                handle.base, handle.base_at, handle.anew = answer.snapshot, self._done, None
                wanted = answer.seconds / (SNAPSHOT_SHARE * max(handle.cell[SECONDS], 1e-6)) if self._steps else 0
                self._interval = int(min(max(self._every, wanted), max(self._every, MOST_REPLAY)))
            elif anew:
                handle.base, handle.base_at, handle.anew = None, self._done - 1, None
        if snap:
            self._since = 0
        self._trim()

    def _trim(self) -> None:
        """Forget orders that no replay needs, or may need any more."""
        for handle in self._handles:
            if handle.base_at is not None and self._done - handle.base_at > max(MOST_REPLAY, self._interval):
                handle.base_at = None
        self._oldest = min((h.base_at for h in self._handles if h.base_at is not None), default=self._done)
        while len(self._log) > self._done - self._oldest:
            self._log.popleft()

    def _recover(self, handle: WorkerProcess, order: Order, at: int, snap: bool, lost: Lost) -> Answer:
        """Replace the worker, bring its environments to where they were, and have it do the order after all."""
        failures: list[Lost] = []
        replays = 0
        stage = "order"
        while True:
            self._note(handle, lost)
            if stage == "order":
                failures.append(lost)
                self._blame(handle, order, failures)
            elif stage == "replay":
                replays += 1
            try:
                stage = "build"
                self._revive(handle)
                stage = "replay"
                why = self._replay(handle, at) if replays < 2 else f"it fails when replayed: {lost.reason}"
                if why is not None:
                    self._begin_anew(handle, order, f"{failures[0].reason}; {why}")
                stage = "order"
                handle.give(order, at, snap or (self._every > 0 and handle.exact is None and bool(order.skip)))
                return handle.wait()  # type: ignore[no-any-return]
            except Lost as again:
                lost = again

    def _revive(self, handle: WorkerProcess) -> None:
        """A new process with new environments, ready for orders."""
        handle.start()
        if tuple(handle.wait()[1:3]) != self._spaces:
            raise EnvError(f"the environments of worker {handle.index} have other spaces after its restart")
        handle.ask(self._spaces)

    def _blame(self, handle: WorkerProcess, order: Order, failures: list[Lost]) -> None:
        """Decide whether an environment fails by itself, and what follows."""
        lost = failures[-1]
        if lost.phase == TESTING:
            if sum(failure.phase == TESTING for failure in failures) > 1:
                handle.exact = f"they were tested, and {lost.reason}"
            return
        twice = len(failures) > 1 and failures[-2].env == lost.env and failures[-2].kind == lost.kind
        if not twice or lost.env is None:
            return
        if self._on_error == "truncate" and order.kind == "step":
            order.skip[lost.env] = f"{lost.reason}, twice in the same step"
        elif lost.kind == "error":
            what = f"environment {lost.env} raised an error, twice in the same {order.kind}"
            raise EnvError(f"{what}:\n{lost.trace}")

    def _note(self, handle: WorkerProcess, lost: Lost) -> None:
        """Count the loss; too many of them are an error."""
        handle.kill()
        now = time.monotonic()
        handle.reasons.append(lost.reason)
        handle.restarts += 1
        handle.times.append(now)
        while handle.times[0] < now - self._restart_window:
            handle.times.popleft()
        if self._folder is not None and lost.trace:
            write_stacks(self._folder, f"worker_{handle.index}_lost", lost.reason, lost.trace)
        if len(handle.times) > self._max_restarts:
            envs = f"{handle.first} to {handle.end - 1}" if lost.env is None else str(lost.env)
            often = f"{len(handle.times)} times in {self._restart_window:g} s"
            text = f"worker {handle.index} was lost {often}, with environment {envs}: {lost.reason}"
            raise EnvError(f"{text}\n{lost.trace or '(no traceback)'}")

    def _replay(self, handle: WorkerProcess, at: int) -> str | None:
        """Bring a new worker to where the lost one was; why not, if that cannot be."""
        if handle.base_at is None:
            return f"its episode cannot be replayed: no snapshot ({handle.exact}), and over {MOST_REPLAY} steps"
        kept = list(self._log)[len(self._log) - (self._done - handle.base_at) :]
        orders = [what if isinstance(what, Order) else Order("step", actions=what) for what in kept]
        if handle.anew is not None:
            handle.ask(("anew", handle.anew))
            handle.wait()
        handle.ask(("replay", handle.base, [order.share(handle.first, handle.end) for order in orders], at))
        why: str | None = handle.wait()
        if why is not None:
            return f"its snapshot cannot be restored: {why}"
        handle.replayed += sum(order.kind == "step" for order in orders)
        if any(order.kind in ("step", "reset") for order in orders):
            frames: list[Frame] = [frame.share(handle.first, handle.end) for frame in self._block.frames]
            if not frames[0].same(frames[1]):
                return "it is not reproducible: the same actions gave other observations"
        return None

    def _begin_anew(self, handle: WorkerProcess, order: Order, why: str) -> None:
        """There is no way back: new episodes, and the caller is told with the next step."""
        if order.kind != "reset" or order.mask is not None:
            cut = order.skip if order.kind == "step" else self._cut
            spared = np.zeros(self.num_envs, np.bool_) if order.mask is None else order.mask
            cut.update({i: why for i in range(handle.first, handle.end) if not spared[i]})
        seeds = [np.random.SeedSequence((self._seeds[i] or 0, self._done)) for i in range(handle.first, handle.end)]
        handle.anew = [int(seed.generate_state(1)[0]) for seed in seeds]
        handle.base, handle.base_at = None, self._done
        handle.kill()  # the replay has left its traces
        self._revive(handle)
        handle.ask(("anew", handle.anew))
        handle.wait()

    # Results

    def _observations(self) -> Tree:
        shown = self._block.frames[self._turn].observations
        return each(_copy, shown) if self._copy else each(lambda array: array, shown)

    def _infos(self, answers: Sequence[Answer]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        others = [pair for answer in answers for pair in answer.infos]
        frame = self._block.frames[self._turn]
        if self._fields and frame.kinds.any():
            if any(name in info for _, info in others for name in self._fields):
                return self._mixed_infos(frame, others)
            for name, values, kinds in zip(self._fields, frame.values, frame.kinds, strict=True):
                mask = kinds != 0
                if mask.any():
                    infos[name], infos[f"_{name}"] = values.astype(DTYPES[kinds[mask.argmax()]]), mask
        for i, info in others:
            infos = self._add_info(infos, info, i)
        return infos

    def _mixed_infos(self, frame: Frame, others: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        """A named field that is a number here and something else there: as gymnasium adds it, one by one."""
        infos: dict[str, Any] = {}
        for i in range(self.num_envs):
            for f, name in enumerate(self._fields):
                kind = frame.kinds[f, i]
                if kind:
                    infos = self._add_info(infos, {name: TYPES[kind](frame.values[f, i])}, i)
            for _, info in (pair for pair in others if pair[0] == i):
                infos = self._add_info(infos, info, i)
        return infos
