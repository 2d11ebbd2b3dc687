"""Workers that are killed, stopped, crash or raise: results do not change, or the failure is reported."""

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
"""Step deadline in seconds if workers are stopped (SIGSTOP); each stopped worker costs as much."""
SHARED = ("sem.", "psm_", "pym-", "looplab")
"""Names that Python and looplab give to shared memory."""
Faults = dict[int, str]
"""Kind of fault by step of an env; a negative step means after that step."""


def inject_fault(kind: str) -> None:
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
    """Fails at given steps: once if there is a folder to record it in, otherwise always."""

    def __init__(self, env: gym.Env[Any, Any], faults: Faults, folder: Path | None = None) -> None:
        super().__init__(env)
        self.faults, self.folder, self.count = faults, folder, 0

    def step(self, action: Any) -> Any:
        self.count += 1
        self._inject(self.count)
        result = self.env.step(action)
        self._inject(-self.count)  # after the step: the env of the lost worker has already changed
        return result

    def reset(self, **how: Any) -> Any:
        self._inject(0)
        return self.env.reset(**how)

    def _inject(self, at: int) -> None:
        if at in self.faults:
            if self.folder is not None:
                mark = self.folder / str(at)
                if mark.exists():
                    return
                mark.touch()
            inject_fault(self.faults[at])


class Sealed(gym.Env[Any, Any]):
    """Keeps its state where a snapshot cannot reach it; deterministic unless `random_steps`."""

    observation_space = Box(-1e9, 1e9, (1,), np.float64)
    action_space = Discrete(5)

    def __init__(self, random_steps: bool = False) -> None:
        self.random_steps = random_steps
        self.hidden = (value for value in [0.0])  # a generator cannot be copied
        self._total = [0.0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._total[0] = float(self.np_random.random())
        return np.array(self._total), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._total[0] += float(action) + (float.fromhex(os.urandom(4).hex()) if self.random_steps else 0.0)
        return np.array(self._total), 1.0, bool(self.np_random.random() < 0.02), False, {}


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def faulty(make: Make, faults: Faults, folder: Path | None) -> Make:
    if folder is not None:
        folder.mkdir(exist_ok=True)
    return lambda: Faulty(make(), faults, folder)


def play(envs: Any, steps: int, seed: int = 3) -> list[Any]:
    rng = np.random.default_rng(seed)
    results = [envs.reset(seed=seed)]
    for _ in range(steps):
        results.append(envs.step(rng.integers(0, envs.single_action_space.n, envs.num_envs)))
    return results


def is_equal(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(is_equal(one[key], two[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(two) and all(map(is_equal, one, two))
    if isinstance(one, np.ndarray) and one.dtype == object:
        return all(map(is_equal, one, two))
    return bool(np.array_equal(one, two))


@contextmanager
def supervised(env_fns: list[Make], **settings: Any) -> Iterator[SupervisedVectorEnv]:
    given = {"workers": 2, "max_restarts": 1000, "snapshot_every": 13, "step_deadline": 60.0, **settings}
    envs = SupervisedVectorEnv(env_fns, **given)
    try:
        yield envs
    finally:
        envs.close()


def restarts(envs: SupervisedVectorEnv) -> int:
    return sum(report.restarts for report in envs.diagnostics())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_faults_at_random_steps_change_nothing(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    mode = rng.choice([AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
    env_fns: list[Make] = []
    for i in range(4):
        steps = rng.sample(range(17, 100), 2)  # snapshots are tested in the steps before
        kinds = ["kill", "segfault", "error", "exit"] + ["stop"] * (i == seed % 4)
        faults = {step * rng.choice([1, -1]): rng.choice(kinds) for step in steps}
        env_fns.append(faulty(cartpole, faults, tmp_path / str(i)))
    expected = play(SyncVectorEnv([cartpole] * 4, autoreset_mode=mode), 120)
    with supervised(env_fns, autoreset_mode=mode, step_deadline=STOPPED_S) as envs:
        assert is_equal(play(envs, 120), expected)
        assert restarts(envs) >= 7  # eight faults; two may coincide with the deadline of the first
        assert {report.snapshots for report in envs.diagnostics()} == {"exact"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
def test_a_worker_signalled_between_steps_is_replaced(number: signal.Signals) -> None:
    expected = play(SyncVectorEnv([cartpole] * 4), 60)
    with supervised([cartpole] * 4, step_deadline=STOPPED_S) as envs:
        rng = np.random.default_rng(3)
        results = [envs.reset(seed=3)]
        for k in range(60):
            if k in (0, 20, 26, 27):
                pid = envs.diagnostics()[k % 2].pid
                assert pid is not None
                os.kill(pid, number)
            results.append(envs.step(rng.integers(0, 2, 4)))
        assert is_equal(results, expected)
        assert restarts(envs) >= 4
        assert sum(report.replayed for report in envs.diagnostics()) > 0


def test_lost_workers_are_logged_at_once_and_counted_over_processes(tmp_path: Path) -> None:
    for count in (1, 2):
        with supervised([cartpole] * 2, diagnostics_dir=tmp_path / "diagnostics") as envs:
            assert envs.restarts == count - 1
            play(envs, 5)
            pid = envs.diagnostics()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            play(envs, 5)
            assert envs.restarts == count
            lines = (tmp_path / "diagnostics" / "worker_restarts.log").read_text().splitlines()
            assert len(lines) == count
            assert "worker 0: " in lines[-1]


def test_a_worker_lost_once_during_the_snapshot_test_is_tested_again(tmp_path: Path) -> None:
    expected = play(SyncVectorEnv([cartpole] * 2), 30)
    with supervised([cartpole, faulty(cartpole, {5: "kill"}, tmp_path / "f")], workers=1) as envs:
        assert is_equal(play(envs, 30), expected)
        assert envs.diagnostics()[0].snapshots == "exact"


def test_envs_whose_snapshot_test_crashes_run_without_snapshots() -> None:
    class Brittle(gym.Wrapper[Any, Any, Any, Any]):
        def snapshot(self) -> Any:
            return [1]

        def restore(self, state: Any) -> None:
            inject_fault("segfault")

    expected = play(SyncVectorEnv([cartpole] * 2), 30)
    with supervised([cartpole, lambda: Brittle(cartpole())], workers=1) as envs:
        assert is_equal(play(envs, 30), expected)
        assert "SIGSEGV while testing snapshots of environment 1" in envs.diagnostics()[0].snapshots


def test_both_workers_lost_at_once_are_replaced() -> None:
    expected = play(SyncVectorEnv([cartpole] * 4), 30)
    with supervised([cartpole] * 4) as envs:
        rng = np.random.default_rng(3)
        results = [envs.reset(seed=3)]
        for k in range(30):
            for report in envs.diagnostics() if k == 17 else []:
                os.kill(report.pid or 0, signal.SIGKILL)
            results.append(envs.step(rng.integers(0, 2, 4)))
        assert is_equal(results, expected)


def test_a_worker_lost_in_a_reset_is_replaced(tmp_path: Path) -> None:
    expected = play(SyncVectorEnv([cartpole] * 2), 10)
    env_fns = [faulty(cartpole, {0: kind}, tmp_path / kind) for kind in ("kill", "hang")]
    with supervised(env_fns, reset_deadline=4.0) as envs:
        assert is_equal(play(envs, 10), expected)
        assert all(report.restarts for report in envs.diagnostics())
        assert "resetting environment 1" in envs.diagnostics()[1].reasons[0]


needs_dm_control = pytest.mark.skipif(
    importlib.util.find_spec("dm_control") is None, reason="dm_control has no wheels for this version of Python"
)


class Swim(gym.Env[Any, Any]):
    """dm_control's fish: its target is part of the model, its random generator belongs to the task."""

    observation_space = Box(-np.inf, np.inf, (24,), np.float64)
    action_space = Box(-1, 1, (5,), np.float64)

    def __init__(self) -> None:
        from dm_control import suite

        self.game = suite.load("fish", "swim", task_kwargs={"random": 0})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.game.task.random.seed(seed)
        return self._observation(self.game.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        now = self.game.step(action)
        return self._observation(now), float(now.reward), False, now.last(), {}

    def _observation(self, now: Any) -> Any:
        return np.concatenate([np.ravel(part) for part in now.observation.values()])


def ant() -> gym.Env[Any, Any]:
    """Return an env whose reward depends on derived values of the last step, not on the physics state alone."""
    return gym.make("Ant-v5")


@pytest.mark.parametrize("every", [1, 13])
@pytest.mark.parametrize("make", [pytest.param(Swim, marks=needs_dm_control), ant])
def test_a_mujoco_env_continues_exactly_after_a_crash(make: Make, every: int, tmp_path: Path) -> None:
    sync = SyncVectorEnv([make, make])
    actions = np.random.default_rng(0).uniform(-1, 1, (60, *sync.action_space.shape)).astype(sync.action_space.dtype)
    expected = [sync.reset(seed=4), *map(sync.step, actions)]
    env_fns = [make, faulty(make, {30: "segfault", 47: "kill"}, tmp_path / "f")]
    with supervised(env_fns, workers=1, snapshot_every=every) as envs:
        assert is_equal([envs.reset(seed=4), *map(envs.step, actions)], expected)
        assert restarts(envs) == 2
        assert envs.diagnostics()[0].snapshots == "exact"


def test_the_fish_of_the_recipe_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(recipes.__file__).parent / "fish"))
    from fish_gym import FishEnv

    expected = play(SyncVectorEnv([FishEnv] * 3), 60)
    with supervised([FishEnv, faulty(FishEnv, {20: "kill"}, tmp_path / "f"), FishEnv]) as envs:
        assert is_equal(play(envs, 60), expected)
        assert restarts(envs) == 1
    for name in ("fish_gym", "fish_env", "evaluate"):
        sys.modules.pop(name, None)


def test_an_env_without_snapshots_is_replayed_from_its_last_seeded_reset(tmp_path: Path) -> None:
    expected = play(SyncVectorEnv([Sealed] * 2), 150)
    with supervised([faulty(Sealed, {70: "kill", 110: "segfault"}, tmp_path / "f"), Sealed]) as envs:
        assert is_equal(play(envs, 150), expected)
        one, _ = envs.diagnostics()
        assert one.restarts == 2
        assert one.replayed > 150
        assert "hidden" in one.snapshots


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_nondeterministic_env_is_truncated_with_a_reason(mode: AutoresetMode, tmp_path: Path) -> None:
    def odd() -> gym.Env[Any, Any]:
        return Sealed(random_steps=True)

    env_fns = [faulty(odd, {30: "kill"}, tmp_path / "f"), odd, cartpole_like, cartpole_like]
    sync = play(SyncVectorEnv([cartpole_like] * 4, autoreset_mode=mode), 40)
    with supervised(env_fns, autoreset_mode=mode) as envs:
        results = play(envs, 40)
    at = next(k for k, step in enumerate(results) if k and step[3].any())
    hit = results[at]
    assert hit[3].tolist() == [True, True, False, False]
    why = hit[4]["final_info"]["worker_restarted"] if mode is AutoresetMode.SAME_STEP else hit[4]["worker_restarted"]
    assert "SIGKILL" in why[0]
    assert "not reproducible" in why[0]
    last = hit[4]["final_obs"][0] if mode is AutoresetMode.SAME_STEP else hit[0][0]
    assert is_equal(last, results[at - 1][0][0])
    after = results[at + (mode is AutoresetMode.NEXT_STEP)][0][:2]
    assert (after < 1).all()  # a new episode
    for mine, theirs in zip(results[1:], sync[1:], strict=True):
        assert is_equal(mine[0][2:], theirs[0][2:])  # the envs of the other worker continue


def cartpole_like() -> gym.Env[Any, Any]:
    return Sealed()


def test_an_env_that_raises_twice_is_reported_with_its_traceback() -> None:
    with supervised([cartpole, faulty(cartpole, {8: "error"}, None)]) as envs:
        with pytest.raises(EnvError, match="environment 1 raised an error, twice") as caught:
            play(envs, 20)
        assert "the emulator lost its cartridge" in str(caught.value)
        assert "in inject_fault" in str(caught.value)
        with pytest.raises(LabError, match="has failed"):
            envs.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("kind", ["error", "segfault"])
def test_an_env_that_fails_repeatedly_can_be_truncated_instead(kind: str) -> None:
    env_fns = [cartpole, faulty(cartpole, {8: kind, 15: kind}, None), cartpole]
    expected = play(SyncVectorEnv([cartpole] * 3), 30)
    with supervised(env_fns, workers=1, on_error="truncate") as envs:
        results = play(envs, 30)
    assert results[8][3].tolist() == [False, True, False]
    assert results[8][4]["_worker_restarted"].tolist() == [False, True, False]
    assert "twice in the same step" in results[8][4]["worker_restarted"][1]
    for mine, theirs in zip(results[1:], expected[1:], strict=True):
        for part in range(4):
            assert is_equal(mine[part][[0, 2]], theirs[part][[0, 2]])  # the other envs of the is_equal worker


def test_a_crash_loop_ends_with_an_error_that_names_the_env() -> None:
    with supervised([cartpole, cartpole, faulty(cartpole, {5: "segfault"}, None)], workers=1, max_restarts=3) as envs:
        with pytest.raises(EnvError, match="lost 4 times in 300 s, with environment 2") as caught:
            play(envs, 20)
        assert "SIGSEGV" in str(caught.value)
        assert "in inject_fault" in str(caught.value)  # the Python frame that called the native code


def test_a_reset_that_always_hangs_is_an_error() -> None:
    with supervised([faulty(cartpole, {0: "hang"}, None)], workers=1, reset_deadline=3.0, max_restarts=1) as envs:
        with pytest.raises(EnvError, match="resetting environment 0") as caught:
            envs.reset(seed=0)
        assert "in inject_fault" in str(caught.value)


def test_a_state_can_be_saved_and_loaded_around_lost_workers(tmp_path: Path) -> None:
    env_fns = [faulty(cartpole, {20: "kill", 33: "kill"}, tmp_path / "f"), cartpole]
    expected = play(SyncVectorEnv([cartpole] * 2), 50)
    rng = np.random.default_rng(3)
    with supervised(env_fns) as envs:
        results = [envs.reset(seed=3), *(envs.step(rng.integers(0, 2, 2)) for _ in range(25))]
        state = envs.state_dict()
    with supervised(env_fns) as other:
        other.load_state_dict(state)
        pid = other.diagnostics()[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        results += [other.step(rng.integers(0, 2, 2)) for _ in range(25)]
        assert [report.restarts for report in other.diagnostics()] == [1, 1]
    assert is_equal(results, expected)


def test_an_env_without_snapshots_has_no_state_dict() -> None:
    with supervised([Sealed]) as envs:
        envs.reset(seed=0)
        with pytest.raises(LabError, match=r"Sealed\.hidden is a builtins\.generator"):
            envs.state_dict()


def test_slow_steps_write_the_stack_traces_of_the_worker(tmp_path: Path) -> None:
    class Slow(Sealed):
        """The first step is slow; the others end once the stack traces are written."""

        slow = True

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            until = time.monotonic() + (1.2 if self.slow else PATIENCE_S)
            while time.monotonic() < until and not any(tmp_path.glob("slow_step_trace_*.log")):
                time.sleep(0.01)
            self.slow = False
            return super().step(action)

    settings = {"slow_step": 1.0, "slow_threshold": 2, "step_deadline": 2 * PATIENCE_S}
    with supervised([Slow], workers=1, diagnostics_dir=tmp_path, **settings) as envs:
        play(envs, 3)
        assert envs.diagnostics()[0].slow_steps >= 2
    (trace,) = tmp_path.glob("slow_step_trace_*.log")
    assert "stepping environment 0" in trace.read_text()
    assert "in step" in trace.read_text()


def test_an_interrupted_step_has_no_effect() -> None:
    class Slow(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            time.sleep(0.01)
            return self.env.step(action)

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def step_with_alarm(actions: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        envs.step(actions)

    expected = play(SyncVectorEnv([cartpole] * 4), 30)
    former = signal.signal(signal.SIGALRM, interrupt)
    with supervised([lambda: Slow(cartpole())] * 4) as envs:
        rng = np.random.default_rng(3)
        results = [envs.reset(seed=3)]
        for k in range(30):
            actions = rng.integers(0, 2, 4)
            if k == 20:
                with pytest.raises(KeyboardInterrupt):
                    step_with_alarm(actions)
                envs.state_dict()
            results.append(envs.step(actions))
        assert is_equal(results, expected)
    signal.signal(signal.SIGALRM, former)


def test_a_forked_copy_leaves_the_workers_alone() -> None:
    with supervised([cartpole] * 2) as envs:
        envs.reset(seed=0)
        copy = os.fork()
        if copy == 0:
            envs.close()
            os._exit(0)
        assert os.waitpid(copy, 0)[1] == 0
        envs.step(np.zeros(2, np.int64))
        assert restarts(envs) == 0


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_closing_does_not_wait_for_workers_that_hang(number: signal.Signals) -> None:
    envs = SupervisedVectorEnv([cartpole] * 4, workers=2)
    envs.reset(seed=0)
    pids = [report.pid or 0 for report in envs.diagnostics()]
    for pid in pids:
        os.kill(pid, number)
    envs.close()
    assert not any(map(psutil.pid_exists, pids))


TRAINER = """
import sys, time
import gymnasium as gym, numpy as np
from looplab.rl import SupervisedVectorEnv
envs = SupervisedVectorEnv([lambda: gym.make("CartPole-v1")] * 4, workers=2, context=sys.argv[1])
envs.reset(seed=0)
print(*[report.pid for report in envs.diagnostics()], flush=True)
while True:
    envs.step(np.zeros(4, np.int64))
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
    os.kill(pids[0], signal.SIGSTOP)  # a stopped worker cannot notice that its parent is gone
    trainer.kill()
    trainer.wait()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    patience = time.monotonic() + PATIENCE_S
    while left := {name for name in os.listdir("/dev/shm") if name.startswith(SHARED)} - shared:
        assert time.monotonic() < patience, left  # other processes on this machine may have some for a while
        time.sleep(0.05)
