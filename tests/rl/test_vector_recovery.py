"""Workers that are killed, stopped, crash or raise: the caller notices nothing, or is told the truth."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import psutil
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.conftest import PATIENCE_S

from looplab import recipes
from looplab.errors import LabError
from looplab.rl import EnvError, SupervisedVectorEnv

cloudpickle.register_pickle_by_value(sys.modules[__name__])
Make = Callable[[], gym.Env[Any, Any]]
STOPPED_S = 2.0
"""The deadline of a step where workers are stopped (SIGSTOP): each of them costs as much."""
SHARED = ("sem.", "psm_", "pym-", "looplab")
"""How Python and looplab name shared memory."""
Faults = dict[int, str]
"""What happens at which step of an environment."""


def strike(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "segfault":
        faulthandler._sigsegv()
    if kind == "exit":
        os._exit(3)
    if kind == "hang":
        time.sleep(1000)
    if kind == "error":
        raise RuntimeError("the emulator lost its cartridge")


class Faulty(gym.Wrapper[Any, Any, Any, Any]):
    """Goes wrong at given steps: once, if there is a folder to remember it by, otherwise always."""

    def __init__(self, env: gym.Env[Any, Any], faults: Faults, folder: Path | None = None) -> None:
        super().__init__(env)
        self.faults, self.folder, self.count = faults, folder, 0

    def step(self, action: Any) -> Any:
        self.count += 1
        self._maybe(self.count)
        result = self.env.step(action)
        self._maybe(-self.count)  # after the step, too: the lost worker had gone on already
        return result

    def reset(self, **how: Any) -> Any:
        self._maybe(0)
        return self.env.reset(**how)

    def _maybe(self, at: int) -> None:
        if at in self.faults:
            if self.folder is not None:
                mark = self.folder / str(at)
                if mark.exists():
                    return
                mark.touch()
            strike(self.faults[at])


class Sealed(gym.Env[Any, Any]):
    """Counts where no walker can see it, in a closure; deterministic unless told otherwise."""

    observation_space = Box(-1e9, 1e9, (1,), np.float64)
    action_space = Discrete(5)

    def __init__(self, chance: bool = False) -> None:
        self.chance = chance
        self.hidden = (value for value in [0.0])  # a generator: no one can copy it
        self._total = [0.0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._total[0] = float(self.np_random.random())
        return np.array(self._total), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._total[0] += float(action) + (float.fromhex(os.urandom(4).hex()) if self.chance else 0.0)
        return np.array(self._total), 1.0, bool(self.np_random.random() < 0.02), False, {}


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def faulty(make: Make, faults: Faults, folder: Path | None) -> Make:
    if folder is not None:
        folder.mkdir(exist_ok=True)
    return lambda: Faulty(make(), faults, folder)


def play(venv: Any, steps: int, seed: int = 3) -> list[Any]:
    chance = np.random.default_rng(seed)
    seen = [venv.reset(seed=seed)]
    for _ in range(steps):
        seen.append(venv.step(chance.integers(0, venv.single_action_space.n, venv.num_envs)))
    return seen


def same(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, np.ndarray) and one.dtype == object:
        return all(map(same, one, two))
    return bool(np.array_equal(one, two))


@contextmanager
def supervised(makers: list[Make], **settings: Any) -> Iterator[SupervisedVectorEnv]:
    given = {"workers": 2, "max_restarts": 1000, "snapshot_every": 13, "step_deadline": 60.0, **settings}
    venv = SupervisedVectorEnv(makers, **given)
    try:
        yield venv
    finally:
        venv.close()


def restarts(venv: SupervisedVectorEnv) -> int:
    return sum(report.restarts for report in venv.diagnostics())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_faults_at_random_steps_change_nothing(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    mode = chance.choice([AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
    makers: list[Make] = []
    for i in range(4):
        steps = chance.sample(range(17, 100), 2)  # before that snapshots are tested
        kinds = ["kill", "segfault", "error", "exit"] + ["stop"] * (i == seed % 4)
        faults = {step * chance.choice([1, -1]): chance.choice(kinds) for step in steps}
        makers.append(faulty(cartpole, faults, tmp_path / str(i)))
    expected = play(SyncVectorEnv([cartpole] * 4, autoreset_mode=mode), 120)
    with supervised(makers, autoreset_mode=mode, step_deadline=STOPPED_S) as venv:
        assert same(play(venv, 120), expected)
        assert restarts(venv) >= 7  # eight faults; two may fall upon the first one's deadline
        assert {report.snapshots for report in venv.diagnostics()} == {"exact"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
def test_a_worker_hit_from_outside_between_steps_is_replaced(number: signal.Signals) -> None:
    expected = play(SyncVectorEnv([cartpole] * 4), 60)
    with supervised([cartpole] * 4, step_deadline=STOPPED_S) as venv:
        chance = np.random.default_rng(3)
        seen = [venv.reset(seed=3)]
        for k in range(60):
            if k in (0, 20, 26, 27):
                pid = venv.diagnostics()[k % 2].pid
                assert pid is not None
                os.kill(pid, number)
            seen.append(venv.step(chance.integers(0, 2, 4)))
        assert same(seen, expected)
        assert restarts(venv) >= 4
        assert sum(report.replayed for report in venv.diagnostics()) > 0


def test_a_worker_lost_once_while_its_snapshots_are_tested_is_tested_again(tmp_path: Path) -> None:
    expected = play(SyncVectorEnv([cartpole] * 2), 30)
    with supervised([cartpole, faulty(cartpole, {5: "kill"}, tmp_path / "f")], workers=1) as venv:
        assert same(play(venv, 30), expected)
        assert venv.diagnostics()[0].snapshots == "exact"


def test_snapshots_that_crash_are_done_without() -> None:
    class Brittle(gym.Wrapper[Any, Any, Any, Any]):
        def snapshot(self) -> Any:
            return [1]

        def restore(self, state: Any) -> None:
            strike("segfault")

    expected = play(SyncVectorEnv([cartpole] * 2), 30)
    with supervised([cartpole, lambda: Brittle(cartpole())], workers=1) as venv:
        assert same(play(venv, 30), expected)
        assert "SIGSEGV while testing snapshots of environment 1" in venv.diagnostics()[0].snapshots


def test_both_workers_lost_at_once_are_replaced() -> None:
    expected = play(SyncVectorEnv([cartpole] * 4), 30)
    with supervised([cartpole] * 4) as venv:
        chance = np.random.default_rng(3)
        seen = [venv.reset(seed=3)]
        for k in range(30):
            for report in venv.diagnostics() if k == 17 else []:
                os.kill(report.pid or 0, signal.SIGKILL)
            seen.append(venv.step(chance.integers(0, 2, 4)))
        assert same(seen, expected)


def test_a_worker_lost_in_a_reset_is_replaced(tmp_path: Path) -> None:
    expected = play(SyncVectorEnv([cartpole] * 2), 10)
    makers = [faulty(cartpole, {0: kind}, tmp_path / kind) for kind in ("kill", "hang")]
    with supervised(makers, reset_deadline=4.0) as venv:
        assert same(play(venv, 10), expected)
        assert all(report.restarts for report in venv.diagnostics())
        assert "resetting environment 1" in venv.diagnostics()[1].reasons[0]


needs_dm_control = pytest.mark.skipif(
    importlib.util.find_spec("dm_control") is None, reason="dm_control has no wheels for this version of Python"
)


class Swim(gym.Env[Any, Any]):
    """dm_control's fish: its target is drawn into the model, its generator belongs to the task."""

    observation_space = Box(-np.inf, np.inf, (24,), np.float64)
    action_space = Box(-1, 1, (5,), np.float64)

    def __init__(self) -> None:
        from dm_control import suite

        self.game = suite.load("fish", "swim", task_kwargs={"random": 0})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.game.task.random.seed(seed)
        return self._see(self.game.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        now = self.game.step(action)
        return self._see(now), float(now.reward), False, now.last(), {}

    def _see(self, now: Any) -> Any:
        return np.concatenate([np.ravel(part) for part in now.observation.values()])


def ant() -> gym.Env[Any, Any]:
    """Its reward depends on what the last step has left in the simulation, not on its state alone."""
    return gym.make("Ant-v5")


@pytest.mark.parametrize("every", [1, 13])
@pytest.mark.parametrize("make", [pytest.param(Swim, marks=needs_dm_control), ant])
def test_a_mujoco_world_goes_on_exactly_after_a_crash(make: Make, every: int, tmp_path: Path) -> None:
    sync = SyncVectorEnv([make, make])
    actions = np.random.default_rng(0).uniform(-1, 1, (60, *sync.action_space.shape)).astype(sync.action_space.dtype)
    expected = [sync.reset(seed=4), *map(sync.step, actions)]
    makers = [make, faulty(make, {30: "segfault", 47: "kill"}, tmp_path / "f")]
    with supervised(makers, workers=1, snapshot_every=every) as venv:
        assert same([venv.reset(seed=4), *map(venv.step, actions)], expected)
        assert restarts(venv) == 2
        assert venv.diagnostics()[0].snapshots == "exact"


def test_the_fish_of_the_recipe_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(recipes.__file__).parent / "fish"))
    from fish_gym import FishEnv

    expected = play(SyncVectorEnv([FishEnv] * 3), 60)
    with supervised([FishEnv, faulty(FishEnv, {20: "kill"}, tmp_path / "f"), FishEnv]) as venv:
        assert same(play(venv, 60), expected)
        assert restarts(venv) == 1
    for name in ("fish_gym", "fish_env", "evaluate"):
        sys.modules.pop(name, None)


def test_an_environment_without_snapshots_is_replayed_from_its_last_seeded_reset(tmp_path: Path) -> None:
    expected = play(SyncVectorEnv([Sealed] * 2), 150)
    with supervised([faulty(Sealed, {70: "kill", 110: "segfault"}, tmp_path / "f"), Sealed]) as venv:
        assert same(play(venv, 150), expected)
        one, _ = venv.diagnostics()
        assert one.restarts == 2
        assert one.replayed > 150
        assert "hidden" in one.snapshots


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_environment_that_cannot_be_repeated_is_truncated_and_says_why(mode: AutoresetMode, tmp_path: Path) -> None:
    def odd() -> gym.Env[Any, Any]:
        return Sealed(chance=True)

    makers = [faulty(odd, {30: "kill"}, tmp_path / "f"), odd, cartpole_like, cartpole_like]
    sync = play(SyncVectorEnv([cartpole_like] * 4, autoreset_mode=mode), 40)
    with supervised(makers, autoreset_mode=mode) as venv:
        seen = play(venv, 40)
    at = next(k for k, step in enumerate(seen) if k and step[3].any())
    hit = seen[at]
    assert hit[3].tolist() == [True, True, False, False]
    why = hit[4]["final_info"]["worker_restarted"] if mode is AutoresetMode.SAME_STEP else hit[4]["worker_restarted"]
    assert "SIGKILL" in why[0]
    assert "not reproducible" in why[0]
    last = hit[4]["final_obs"][0] if mode is AutoresetMode.SAME_STEP else hit[0][0]
    assert same(last, seen[at - 1][0][0])
    after = seen[at + (mode is AutoresetMode.NEXT_STEP)][0][:2]
    assert (after < 1).all()  # a new episode
    for mine, theirs in zip(seen[1:], sync[1:], strict=True):
        assert same(mine[0][2:], theirs[0][2:])  # the other worker's went on


def cartpole_like() -> gym.Env[Any, Any]:
    return Sealed()


def test_an_environment_that_raises_twice_is_reported_with_its_traceback() -> None:
    with supervised([cartpole, faulty(cartpole, {8: "error"}, None)]) as venv:
        with pytest.raises(EnvError, match="environment 1 raised an error, twice") as caught:
            play(venv, 20)
        assert "the emulator lost its cartridge" in str(caught.value)
        assert "in strike" in str(caught.value)
        with pytest.raises(LabError, match="has failed"):
            venv.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("kind", ["error", "segfault"])
def test_an_environment_that_fails_by_itself_can_be_truncated_instead(kind: str) -> None:
    makers = [cartpole, faulty(cartpole, {8: kind, 15: kind}, None), cartpole]
    expected = play(SyncVectorEnv([cartpole] * 3), 30)
    with supervised(makers, workers=1, on_error="truncate") as venv:
        seen = play(venv, 30)
    assert seen[8][3].tolist() == [False, True, False]
    assert seen[8][4]["_worker_restarted"].tolist() == [False, True, False]
    assert "twice in the same step" in seen[8][4]["worker_restarted"][1]
    for mine, theirs in zip(seen[1:], expected[1:], strict=True):
        for part in range(4):
            assert same(mine[part][[0, 2]], theirs[part][[0, 2]])  # its neighbours in the same worker


def test_a_crash_loop_ends_with_an_error_that_names_the_environment() -> None:
    with supervised([cartpole, cartpole, faulty(cartpole, {5: "segfault"}, None)], workers=1, max_restarts=3) as venv:
        with pytest.raises(EnvError, match="lost 4 times in 300 s, with environment 2") as caught:
            play(venv, 20)
        assert "SIGSEGV" in str(caught.value)
        assert "in strike" in str(caught.value)  # where the native code was called


def test_a_reset_that_never_ends_is_an_error_at_last() -> None:
    with supervised([faulty(cartpole, {0: "hang"}, None)], workers=1, reset_deadline=3.0, max_restarts=1) as venv:
        with pytest.raises(EnvError, match="resetting environment 0") as caught:
            venv.reset(seed=0)
        assert "in strike" in str(caught.value)


def test_a_state_can_be_taken_after_a_loss_and_lost_workers_take_it(tmp_path: Path) -> None:
    makers = [faulty(cartpole, {20: "kill", 33: "kill"}, tmp_path / "f"), cartpole]
    expected = play(SyncVectorEnv([cartpole] * 2), 50)
    chance = np.random.default_rng(3)
    with supervised(makers) as venv:
        seen = [venv.reset(seed=3), *(venv.step(chance.integers(0, 2, 2)) for _ in range(25))]
        state = venv.state_dict()
    with supervised(makers) as other:
        other.load_state_dict(state)
        pid = other.diagnostics()[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        seen += [other.step(chance.integers(0, 2, 2)) for _ in range(25)]
        assert [report.restarts for report in other.diagnostics()] == [1, 1]
    assert same(seen, expected)


def test_an_environment_without_snapshots_has_no_state() -> None:
    with supervised([Sealed]) as venv:
        venv.reset(seed=0)
        with pytest.raises(LabError, match=r"Sealed\.hidden is a builtins\.generator"):
            venv.state_dict()


def test_slow_steps_leave_the_stacks_of_the_worker(tmp_path: Path) -> None:
    class Slow(Sealed):
        """The first step is slow; the others end when the stacks were written."""

        slow = True

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            until = time.monotonic() + (1.2 if self.slow else PATIENCE_S)
            while time.monotonic() < until and not any(tmp_path.glob("slow_step_trace_*.log")):
                time.sleep(0.01)
            self.slow = False
            return super().step(action)

    settings = {"slow_step": 1.0, "slow_threshold": 2, "step_deadline": 2 * PATIENCE_S}
    with supervised([Slow], workers=1, diagnostics_dir=tmp_path, **settings) as venv:
        play(venv, 3)
        assert venv.diagnostics()[0].slow_steps >= 2
    (trace,) = tmp_path.glob("slow_step_trace_*.log")
    assert "stepping environment 0" in trace.read_text()
    assert "in step" in trace.read_text()


def test_a_step_that_was_interrupted_was_never_made() -> None:
    class Slow(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            time.sleep(0.01)
            return self.env.step(action)

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def step_with_alarm(actions: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        venv.step(actions)

    expected = play(SyncVectorEnv([cartpole] * 4), 30)
    former = signal.signal(signal.SIGALRM, interrupt)
    with supervised([lambda: Slow(cartpole())] * 4) as venv:
        chance = np.random.default_rng(3)
        seen = [venv.reset(seed=3)]
        for k in range(30):
            actions = chance.integers(0, 2, 4)
            if k == 20:
                with pytest.raises(KeyboardInterrupt):
                    step_with_alarm(actions)
                venv.state_dict()
            seen.append(venv.step(actions))
        assert same(seen, expected)
    signal.signal(signal.SIGALRM, former)


def test_a_forked_copy_leaves_the_workers_alone() -> None:
    with supervised([cartpole] * 2) as venv:
        venv.reset(seed=0)
        copy = os.fork()
        if copy == 0:
            venv.close()
            os._exit(0)
        assert os.waitpid(copy, 0)[1] == 0
        venv.step(np.zeros(2, np.int64))
        assert restarts(venv) == 0


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_closing_does_not_wait_for_workers_that_hang(number: signal.Signals) -> None:
    venv = SupervisedVectorEnv([cartpole] * 4, workers=2)
    venv.reset(seed=0)
    pids = [report.pid or 0 for report in venv.diagnostics()]
    for pid in pids:
        os.kill(pid, number)
    venv.close()
    assert not any(map(psutil.pid_exists, pids))


TRAINER = """
import sys, time
import gymnasium as gym, numpy as np
from looplab.rl import SupervisedVectorEnv
venv = SupervisedVectorEnv([lambda: gym.make("CartPole-v1")] * 4, workers=2, context=sys.argv[1])
venv.reset(seed=0)
print(*[report.pid for report in venv.diagnostics()], flush=True)
while True:
    venv.step(np.zeros(4, np.int64))
"""


@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_workers_die_with_their_parent_and_leave_nothing(context: str, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    shared = set(os.listdir("/dev/shm"))
    trainer = subprocess.Popen(
        [sys.executable, tmp_path / "trainer.py", context], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2
    family = psutil.Process(trainer.pid).children(recursive=True)
    os.kill(pids[0], signal.SIGSTOP)  # one of them cannot even read that its parent is gone
    trainer.kill()
    trainer.wait()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    patience = time.monotonic() + PATIENCE_S
    while left := {name for name in os.listdir("/dev/shm") if name.startswith(SHARED)} - shared:
        assert time.monotonic() < patience, left  # those of other processes on this machine come and go
        time.sleep(0.05)
