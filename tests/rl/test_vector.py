"""The supervised vector env returns what Gymnasium's SyncVectorEnv returns, to the bit."""

from __future__ import annotations

import os
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
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import PATIENCE_S

from looplab.errors import LabError
from looplab.rl import SupervisedVectorEnv
from looplab.rl.diagnostics import SlowStepDetector
from looplab.rl.worker import SPIN_SECONDS

cloudpickle.register_pickle_by_value(sys.modules[__name__])
Make = Callable[[], gym.Env[Any, Any]]


class Mixed(gym.Env[Any, Any]):
    """An env with nested observations and actions, and infos that come, go and change their type."""

    observation_space = Dict(
        {
            "near": Box(-9, 9, (2, 3), np.float64),
            "far": Tuple((Discrete(50), MultiBinary(3))),
            "bits": MultiDiscrete([4, 5]),
        }
    )
    action_space = Dict({"push": Box(-1, 1, (2,), np.float32), "press": Discrete(3)})

    def __init__(self, number: int) -> None:
        self.number = number
        self.total = 0.0
        self.steps = 0

    def _observation(self) -> dict[str, Any]:
        draw = self.np_random
        far = (draw.integers(50), draw.integers(0, 2, 3).astype(np.int8))
        return {"near": draw.normal(size=(2, 3)), "far": far, "bits": draw.integers(0, 4, 2)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.total, self.steps = float((options or {}).get("total", 0.0)), 0
        return self._observation(), {"x_pos": 40, "fresh": True, "options": str(options)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.total += float(action["push"].sum()) + int(action["press"])
        info: dict[str, Any] = {"x_pos": self.steps, "score": self.total, "deep": {"half": np.float32(self.total / 2)}}
        if self.np_random.random() < 0.3:
            info["word"] = f"w{self.number}"
        if self.steps % 3 == self.number % 3:
            del info["score"]
        if self.steps % 5 == 4:
            info["odd"] = [2.5, 5, 2**60 + 1][self.number % 3]
        over = self.np_random.random()
        return self._observation(), np.float32(self.total), bool(over < 0.05), bool(over > 0.95), info


class Images(gym.Env[Any, Any]):
    """An env with uint8 image observations."""

    observation_space = Box(0, 255, (12, 10, 3), np.uint8)
    action_space = Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.canvas = self.np_random.integers(0, 256, (12, 10, 3), np.uint8)
        return self.canvas, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.canvas = np.roll(self.canvas, int(action), axis=1) ^ np.uint8(action)
        return self.canvas, float(self.canvas[0, 0, 0]), bool(self.np_random.random() < 0.1), False, {}


WORLDS: dict[str, list[Make]] = {
    "cartpole": [lambda: gym.make("CartPole-v1")] * 5,
    "lake": [lambda: gym.make("FrozenLake-v1", max_episode_steps=7)] * 4,
    "mixed": [lambda i=i: Mixed(i) for i in range(5)],  # type: ignore[misc]
    "pictures": [Images] * 3,
}


def is_equal(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(is_equal(one[key], two[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(two) and all(map(is_equal, one, two))
    if isinstance(one, np.ndarray) and one.dtype == object:
        return one.shape == two.shape and two.dtype == object and all(map(is_equal, one, two))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    return type(one) is type(two) and bool(one == two)


def play(envs: Any, steps: int, seed: int = 7) -> list[Any]:
    envs.action_space.seed(seed)
    results = [envs.reset(seed=seed)]
    for k in range(steps):
        if envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED and len(results[-1]) == 5:
            over = results[-1][2] | results[-1][3]
            if over.any():
                results.append(envs.reset(options={"reset_mask": over}))
        elif k == steps // 2:
            results.append(envs.reset(options={"total": 3}))
        results.append(envs.step(envs.action_space.sample()))
    return results


@contextmanager
def supervised(env_fns: list[Make], **settings: Any) -> Iterator[SupervisedVectorEnv]:
    envs = SupervisedVectorEnv(env_fns, **{"workers": 2, **settings})
    try:
        yield envs
    finally:
        envs.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("world", WORLDS)
def test_results_match_sync_vector_env(world: str, mode: AutoresetMode, workers: int) -> None:
    expected = play(SyncVectorEnv(WORLDS[world], autoreset_mode=mode), 60)
    fields = ("x_pos", "score", "odd", "prob")
    with supervised(WORLDS[world], workers=workers, autoreset_mode=mode, info_fields=fields, snapshot_every=7) as envs:
        assert envs.workers == workers
        for number, (mine, theirs) in enumerate(zip(play(envs, 60), expected, strict=True)):
            assert is_equal(mine, theirs), number


@pytest.fixture(scope="module", params=WORLDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[SupervisedVectorEnv, Any]]:
    env_fns = WORLDS[request.param]
    with supervised(env_fns, info_fields=("x_pos",), snapshot_every=5) as envs:
        yield envs, SyncVectorEnv(env_fns)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), steps=st.integers(0, 25))
def test_results_match_for_every_seed(pair: tuple[SupervisedVectorEnv, Any], seed: int, steps: int) -> None:
    envs, sync = pair
    assert is_equal(play(envs, steps, seed), play(sync, steps, seed))


def test_workers_can_be_forked() -> None:
    expected = play(SyncVectorEnv(WORLDS["mixed"]), 10)
    with supervised(WORLDS["mixed"], context="fork") as envs:
        assert is_equal(play(envs, 10), expected)


def test_spaces_and_metadata_match_gymnasium() -> None:
    sync = SyncVectorEnv(WORLDS["mixed"])
    with supervised(WORLDS["mixed"]) as envs:
        for name in ("num_envs", "observation_space", "action_space", "single_observation_space", "metadata"):
            assert getattr(envs, name) == getattr(sync, name), name
        assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP


def test_attributes_and_methods_of_envs_can_be_used() -> None:
    with supervised(WORLDS["mixed"]) as envs:
        envs.reset(seed=3)
        assert envs.get_attr("number") == (0, 1, 2, 3, 4)
        envs.set_attr("total", [1.0, 2.0, 3.0, 4.0, 5.0])
        assert envs.call("get_wrapper_attr", "total") == (1.0, 2.0, 3.0, 4.0, 5.0)
        assert envs.np_random_seed == (3, 4, 5, 6, 7)
        with pytest.raises(AttributeError, match="nothing_such"):
            envs.get_attr("nothing_such")
        assert envs.diagnostics()[0].restarts == 0


def test_returned_arrays_are_copies() -> None:
    with supervised(WORLDS["cartpole"]) as envs:
        first, _ = envs.reset(seed=0)
        copied = first.copy()
        first *= 0
        envs.step(np.ones(5, np.int64))
        later, _ = envs.reset(seed=0)
        assert is_equal(later, copied)


def test_a_reset_without_a_seed_is_random() -> None:
    with supervised(WORLDS["cartpole"]) as one, supervised(WORLDS["cartpole"]) as two:
        assert not is_equal(one.reset()[0], two.reset()[0])


@pytest.mark.parametrize("actions", [np.zeros(4, np.int64), np.zeros(5), 1])
def test_actions_of_the_wrong_shape_or_dtype_are_refused(actions: Any) -> None:
    with supervised(WORLDS["cartpole"]) as envs:
        envs.reset(seed=0)
        with pytest.raises(LabError, match="actions must"):
            envs.step(actions)
        envs.step(np.zeros(5, np.int64))


def test_different_spaces_are_refused() -> None:
    env_fns: list[Make] = [lambda: gym.make("CartPole-v1"), lambda: gym.make("FrozenLake-v1")]
    for workers in (0, 1, 2):
        with pytest.raises(LabError, match="spaces"):
            SupervisedVectorEnv(env_fns, workers=workers)


def test_an_env_that_cannot_be_built_is_reported_with_its_traceback() -> None:
    def broken() -> gym.Env[Any, Any]:
        raise RuntimeError("no such rom")

    with pytest.raises(LabError, match="no such rom"):
        SupervisedVectorEnv([broken], workers=1)


def test_auto_uses_workers_for_expensive_envs_only() -> None:
    class Dear(Images):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            until = time.perf_counter() + 0.002
            while time.perf_counter() < until:
                pass
            return super().step(action)

    with supervised([Images] * 2, workers="auto") as cheap:
        assert cheap.workers == 0
    if len(os.sched_getaffinity(0)) > 1:
        with supervised([Dear] * 4, workers="auto") as dear:
            assert dear.workers > 1


@pytest.mark.parametrize(("before", "after"), [(2, 1), (0, 2), (2, 0)])
@pytest.mark.parametrize("world", ["cartpole", "mixed"])
def test_a_saved_state_continues_exactly_in_another_vector_env(world: str, before: int, after: int) -> None:
    with supervised(WORLDS[world], workers=before) as envs:
        play(envs, 25)
        state = envs.state_dict()
        observations = envs.load_state_dict(state)
        actions = [envs.action_space.sample() for _ in range(40)]
        expected = [envs.step(action) for action in actions]
    with supervised(WORLDS[world], workers=after) as other:
        assert is_equal(other.load_state_dict(state), observations)
        assert is_equal([other.step(action) for action in actions], expected)


def test_a_state_with_another_number_of_envs_is_refused() -> None:
    with supervised(WORLDS["cartpole"]) as envs, supervised([Images] * 2, workers=0) as other:
        envs.reset(seed=0)
        with pytest.raises(LabError, match="5 environments"):
            other.load_state_dict(envs.state_dict())


def test_the_trainers_global_rngs_are_preserved() -> None:
    np.random.seed(5)
    expected = np.random.random(3)
    np.random.seed(5)
    with supervised(WORLDS["cartpole"], workers="auto") as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(5, np.int64))
        assert is_equal(np.random.random(3), expected)


def test_starts_can_be_serialised_delayed_and_prewarmed(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def slow_to_build() -> gym.Env[Any, Any]:
        with open(log, "a") as file:
            file.write(f"+{os.getpid()}\n")
        time.sleep(0.05)
        with open(log, "a") as file:
            file.write(f"-{os.getpid()}\n")
        return Images()

    settings = {"serialise_start": tmp_path / "lock", "start_delay": 0.01, "prewarm": True}
    with supervised([slow_to_build] * 3, workers=3, **settings) as envs:
        envs.reset(seed=0)
    lines = log.read_text().split()
    assert len(lines) == 8
    assert all(begin[1:] == end[1:] for begin, end in zip(lines[::2], lines[1::2], strict=True))
    assert lines[0] == f"+{os.getpid()}"


def test_diagnostics_report_each_worker() -> None:
    with supervised(WORLDS["cartpole"]) as envs:
        assert {report.snapshots for report in envs.diagnostics()} == {"not tested before the first reset"}
        envs.reset(seed=0)
        envs.step(np.zeros(5, np.int64))
        one, two = envs.diagnostics()
        assert (one.envs, two.envs) == ((0, 1), (2, 3, 4))
        assert (one.steps, two.steps, one.restarts, one.snapshots) == (2, 3, 0, "exact")
        assert one.pid != two.pid
        assert one.rss_bytes > 1e6
        assert one.last_step_ms > 0


def test_slow_steps_raise_at_most_one_alarm_per_window() -> None:
    slow = SlowStepDetector(threshold=3, window=10)
    assert [slow.add(now) for now in (0, 1, 2, 3, 4, 11, 12.5, 13, 30)] == [
        False, False, True, False, False, False, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_pauses_between_steps_change_nothing(workers: int) -> None:
    """Workers block during some pauses and are about to block in others; calls and snapshots come in between."""
    rng = np.random.default_rng(workers)
    env_fns = WORLDS["cartpole"]
    sync = SyncVectorEnv(env_fns)
    with supervised(env_fns, workers=workers, snapshot_every=9) as envs:
        assert is_equal(envs.reset(seed=1), sync.reset(seed=1))
        for _ in range(1500):
            until = time.perf_counter() + rng.random() * 3 * SPIN_SECONDS
            while time.perf_counter() < until:
                pass
            if rng.random() < 0.1:
                assert envs.call("spec") == sync.call("spec")
            actions = rng.integers(0, 2, len(env_fns))
            assert is_equal(envs.step(actions), sync.step(actions))
        assert sum(report.restarts for report in envs.diagnostics()) == 0


def test_idle_workers_use_no_cpu() -> None:
    with supervised(WORLDS["cartpole"]) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(5, np.int64))
        workers = [psutil.Process(report.pid) for report in envs.diagnostics()]

        def idle() -> bool:
            before = [sum(worker.cpu_times()[:2]) for worker in workers]
            time.sleep(0.5)
            return [sum(worker.cpu_times()[:2]) for worker in workers] == before

        patience = time.monotonic() + PATIENCE_S
        while not idle():  # on a busy machine a worker may take a while to block
            assert time.monotonic() < patience


def test_closing_twice_is_allowed() -> None:
    envs = SupervisedVectorEnv(WORLDS["cartpole"], workers=2)
    envs.reset(seed=0)
    envs.close()
    envs.close()
    with pytest.raises(LabError, match="closed"):
        envs.reset(seed=0)
