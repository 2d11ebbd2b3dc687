"""Snapshots of envs: exact, in plain values, and refused if a part of the state is not supported."""

from __future__ import annotations

import enum
import json
import random
import sys
import threading
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from looplab import recipes
from looplab.rl.snapshot import SnapshotError, find_snapshot_defect, restore, snapshot, states_equal


class Bag(gym.Env[Any, Any]):
    """An env with arbitrary attributes."""

    observation_space = Box(-1, 1, (1,), np.float64)
    action_space = Discrete(2)

    def __init__(self, **things: Any) -> None:
        vars(self).update(things)


PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
    | arrays.arrays(st.sampled_from([np.float32, np.int16, np.bool_]), arrays.array_shapes(max_dims=2, max_side=3))
)  # fmt: skip
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=4))
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(VALUES, VALUES)
def test_plain_values_are_restored(value: Any, other: Any) -> None:
    state = snapshot(Bag(value=value))
    fresh = Bag(value=other, extra=1)
    restore(fresh, state)
    assert states_equal(snapshot(fresh), state)
    assert type(fresh.value) is type(value)  # type: ignore[attr-defined]
    assert not hasattr(fresh, "extra")


def as_json(state: Any) -> Any:
    """Replace arrays and bytes of a snapshot; the rest is JSON."""
    return json.loads(json.dumps(state, default=lambda other: [type(other).__name__, memoryview(other).nbytes]))


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Blackjack-v1", "Acrobot-v1"])
def test_a_snapshot_continues_exactly_in_another_instance(name: str) -> None:
    env, fresh = gym.make(name), gym.make(name)
    env.reset(seed=1)
    env.action_space.seed(1)
    actions = [env.action_space.sample() for _ in range(30)]
    for action in actions[:5]:
        if any(env.step(action)[2:4]):
            env.reset()
    state = snapshot(env)
    as_json(state)
    expected = play(env, actions)
    fresh.reset(seed=99)
    restore(fresh, state)
    assert states_equal(play(fresh, actions), expected)


def play(env: gym.Env[Any, Any], actions: list[Any]) -> Any:
    results = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        results.append([np.asarray(observation), float(reward), bool(terminated), bool(truncated)])
        if terminated or truncated:
            results.append([np.asarray(env.reset()[0])])
    return results


def test_shared_references_stay_shared() -> None:
    shared = np.zeros(3)
    pair = [shared]
    env, fresh = Bag(one=shared, two=pair, three=pair), Bag()
    restore(fresh, snapshot(env))
    assert fresh.one is fresh.two[0]  # type: ignore[attr-defined]
    assert fresh.two is fresh.three  # type: ignore[attr-defined]


def test_random_generators_of_every_kind_continue() -> None:
    def draw(env: Any) -> list[float]:
        return [env.new.random(), env.old.random_sample(), env.plain.random(), env.action_space.sample()]

    def bag() -> Any:
        numbers = np.random.Generator(np.random.Philox())
        return Bag(new=numbers, old=np.random.RandomState(), plain=random.Random(), action_space=Discrete(10**9))

    env, fresh = bag(), bag()
    draw(env)
    restore(fresh, snapshot(env))
    assert draw(fresh) == draw(env)


def test_a_missing_generator_is_created() -> None:
    env, fresh = Bag(rng=np.random.default_rng(4)), Bag(rng=None)
    restore(fresh, snapshot(env))
    assert fresh.rng.random() == env.rng.random()  # type: ignore[attr-defined]


def test_constants_are_left_alone() -> None:
    lock = threading.Lock()
    env = Bag(lock=lock, call=sorted, kind=int, path=Path("/tmp"), order=OrderedDict(a=1), seven=np.float32(7))
    restore(env, snapshot(env))
    assert env.lock is lock  # type: ignore[attr-defined]
    assert env.order == OrderedDict(a=1)  # type: ignore[attr-defined]
    assert type(env.seven) is np.float32  # type: ignore[attr-defined]


class Mood(enum.Enum):
    CALM, WILD = range(2)


def test_enum_members_are_restored() -> None:
    fresh = Bag(mood=Mood.CALM)
    restore(fresh, snapshot(Bag(mood=Mood.WILD)))
    assert fresh.mood is Mood.WILD  # type: ignore[attr-defined]


def test_a_replaced_function_is_detected() -> None:
    with pytest.raises(SnapshotError, match=r"Bag\.next was sorted"):
        restore(Bag(next=len), snapshot(Bag(next=sorted)))


@pytest.mark.parametrize(
    ("thing", "named"),
    [
        (iter([1]), r"Bag\.thing is a builtins\.list_iterator"),
        (np.array([{}], object), r"Bag\.thing is an array of Python objects"),
        ([0, memoryview(b"x")], r"Bag\.thing\[1\] is a builtins\.memoryview"),
    ],
)
def test_unsupported_values_are_refused_by_name(thing: Any, named: str) -> None:
    with pytest.raises(SnapshotError, match=named):
        snapshot(Bag(thing=thing))


def test_a_missing_object_is_an_error() -> None:
    with pytest.raises(SnapshotError, match=r"Bag\.inner was a Bag and is a NoneType here"):
        restore(Bag(inner=None), snapshot(Bag(inner=Bag())))


def test_an_object_may_snapshot_itself() -> None:
    class Emulator:
        __slots__ = ("ram",)

        def snapshot(self) -> bytes:
            return bytes(self.ram)

        def restore(self, state: bytes) -> None:
            self.ram[:] = state

    env, fresh = Bag(game=Emulator()), Bag(game=Emulator())
    env.game.ram, fresh.game.ram = bytearray(b"abc"), bytearray(3)  # type: ignore[attr-defined]
    restore(fresh, snapshot(env))
    assert fresh.game.ram == b"abc"  # type: ignore[attr-defined]


def test_hidden_state_is_detected() -> None:
    hidden = [0.0]

    class Hiding(Bag):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            hidden[0] += 1
            return np.array(hidden), 0.0, False, False, {}

    reason = find_snapshot_defect(Hiding())
    assert reason is not None
    assert "hidden" in reason


def test_looking_for_defects_does_not_change_the_env() -> None:
    env, other = gym.make("CartPole-v1"), gym.make("CartPole-v1")
    env.reset(seed=1)
    other.reset(seed=1)
    assert find_snapshot_defect(env) is None
    assert states_equal(snapshot(env), snapshot(other))
    assert states_equal(play(env, [0] * 20), play(other, [0] * 20))


def test_the_fish_of_the_recipe_can_be_snapshotted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(recipes.__file__).parent / "fish"))
    from fish_gym import FishEnv

    env, fresh = FishEnv(num_fish=3), FishEnv(num_fish=3)
    env.reset(seed=5)
    assert find_snapshot_defect(env) is None
    play(env, [1, 2, 3])
    fresh.reset(seed=6)
    restore(fresh, snapshot(env))
    actions = [step % 5 for step in range(50)]
    assert states_equal(play(fresh, actions), play(env, actions))
    for name in ("fish_gym", "fish_env", "evaluate"):
        sys.modules.pop(name, None)


class Swim(gym.Env[Any, Any]):
    """dm_control's fish, whose target is part of the model."""

    def __init__(self, seed: int) -> None:
        from dm_control import suite

        self.game = suite.load("fish", "swim", task_kwargs={"random": seed})
        spec = self.game.action_spec()
        self.action_space = Box(spec.minimum, spec.maximum, dtype=np.float64)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        now = self.game.step(action)
        return np.concatenate([np.ravel(part) for part in now.observation.values()]), now.reward, now.last(), False, {}

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        now = self.game.reset()
        return np.concatenate([np.ravel(part) for part in now.observation.values()]), {}


@pytest.mark.parametrize("steps", [0, 40])
def test_a_dm_control_env_continues_exactly_in_another_instance(steps: int) -> None:
    pytest.importorskip("dm_control")
    env, fresh = Swim(1), Swim(2)
    env.reset()
    fresh.reset()
    assert find_snapshot_defect(env) is None
    env.action_space.seed(3)
    actions = [env.action_space.sample() for _ in range(60)]
    play(env, actions[:steps])
    state = snapshot(env)
    as_json(state)
    restore(fresh, state)
    assert states_equal(play(fresh, actions), play(env, actions))
    assert states_equal(play(fresh, actions[:5]), play(env, actions[:5]))


@pytest.mark.parametrize("name", ["Ant-v5", "HalfCheetah-v5", "Humanoid-v5", "Pusher-v5", "Walker2d-v5"])
def test_gymnasiums_mujoco_envs_continue_exactly(name: str) -> None:
    env, fresh = gym.make(name), gym.make(name)
    env.reset(seed=1)
    fresh.reset(seed=2)
    assert find_snapshot_defect(env) is None
    env.action_space.seed(3)
    actions = [env.action_space.sample() for _ in range(30)]
    play(env, actions[:10])
    restore(fresh, snapshot(env))
    assert states_equal(play(fresh, actions), play(env, actions))
