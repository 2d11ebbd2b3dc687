"""The environment of the fish recipe: dynamics, rewards, observations, and vectorization."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab import recipes
from looplab.iterate import gates, prompt
from looplab.iterate import settings as versions

RECIPE = Path(recipes.__file__).parent / "fish"
sys.path.insert(0, str(RECIPE))  # the modules of the lab import each other by name

import fish_env  # noqa: E402
from fish_env import DT, KEEP, KILL, LEFT, RADIUS, RIGHT, SLOW_DOWN, SPEED_UP, STEPS, VISION, FishSchool, Reward  # noqa: E402

FAR = (0.0, -9.0)
"""Where a predator is out of everybody's sight, for the ponds below."""


def pond(*fish: tuple[float, float], predator: tuple[float, float] = FAR, reward: Reward | None = None) -> FishSchool:
    """A pond with fish at these places, all swimming east at half speed, and a predator at rest."""
    school = FishSchool(1, len(fish), reward=reward, restart=False)
    school.position[:, 0] = np.array(fish).T
    school.heading[:, 0] = np.array([[1.0], [0.0]])
    school.predator[:, 0] = predator
    school.velocity[:] = 0.0
    return school


def act(school: FishSchool, *actions: int) -> fish_env.FishStep:
    return school.step(np.array([actions]))


def place(school: FishSchool, fish: int = 0) -> tuple[float, ...]:
    return tuple(school.position[:, 0, fish].tolist())


# --- dynamics


def test_a_fish_swims_straight_at_its_speed() -> None:
    school = pond((0.0, 5.0))
    act(school, KEEP)
    assert place(school) == pytest.approx((1.0 * DT, 5.0))


@pytest.mark.parametrize(("action", "sign"), [(LEFT, 1), (RIGHT, -1)])
def test_a_turn_is_30_degrees_and_keeps_the_speed(action: int, sign: int) -> None:
    school = pond((0.0, 5.0))
    act(school, action)
    assert place(school) == pytest.approx((np.cos(np.pi / 6) * DT, 5.0 + sign * 0.5 * DT))
    for _ in range(11):
        act(school, action)
    assert school.heading[:, 0, 0] == pytest.approx([1.0, 0.0], abs=1e-5)


def test_the_speed_stays_between_0_and_2() -> None:
    school = pond((0.0, 5.0))
    for expected in (1.5, 2.0, 2.0):
        act(school, SPEED_UP)
        assert school.speed[0, 0] == expected
    for expected in (1.5, 1.0, 0.5, 0.0, 0.0):
        act(school, SLOW_DOWN)
        assert school.speed[0, 0] == expected


def test_the_wall_stops_a_fish() -> None:
    school = pond((9.95, 0.0))
    act(school, KEEP)
    assert place(school) == pytest.approx((RADIUS, 0.0))


def test_the_predator_accelerates_towards_the_nearest_living_fish() -> None:
    school = pond((0.0, 5.0), (0.0, -5.0), predator=(0.0, 1.0))
    school.speed[:] = 0.0
    act(school, KEEP, KEEP)
    assert school.velocity[:, 0] == pytest.approx([0.0, 0.5 * DT])
    assert school.predator[:, 0] == pytest.approx([0.0, 1.0 + 0.5 * DT * DT])
    school.alive[0, 0] = False
    act(school, KEEP, KEEP)
    assert school.velocity[:, 0] == pytest.approx([0.0, 0.0])


def test_the_predator_bounces_off_the_wall_and_loses_speed() -> None:
    school = pond((-9.0, 0.0), predator=(9.95, 0.0))
    school.velocity[:, 0] = (2.0, 1.0)
    act(school, KEEP)
    assert np.hypot(*school.predator[:, 0]) == pytest.approx(RADIUS)
    assert school.velocity[0, 0] == pytest.approx(-0.85 * (2.0 - 0.05), rel=0.05)
    assert np.hypot(*school.velocity[:, 0]) == pytest.approx(0.85 * np.hypot(1.95, 1.0), rel=0.01)


# --- rewards


def test_the_reward_of_a_safe_fish() -> None:
    assert act(pond((0.0, 5.0)), KEEP).rewards[0, 0] == pytest.approx(0.1 * (2 + 5))


def test_the_reward_is_lower_near_the_predator() -> None:
    school = pond((-1.0 * DT, 2.0), predator=(0.0, 0.0))
    step = act(school, KEEP)
    gap = 2.0 - 0.5 * DT * DT
    assert step.rewards[0, 0] == pytest.approx(0.1 * (2 + 5 * gap / VISION), rel=1e-4)


def test_the_reward_is_lower_near_the_wall() -> None:
    school = pond((9.4, 0.0))
    step = act(school, KEEP)
    assert step.rewards[0, 0] == pytest.approx(0.1 * (2 + 5 - 2 * 0.5), rel=1e-4)


def test_death_costs_50_and_happens_within_the_kill_radius() -> None:
    school = pond((-1.0 * DT, KILL - 0.01), (-1.0 * DT, -KILL - 0.02), predator=(0.0, 0.0))
    school.velocity[:, 0] = (0.0, 0.0)
    step = act(school, KEEP, KEEP)
    assert step.died.tolist() == [[True, False]]
    assert step.rewards[0, 0] == pytest.approx(0.1 * (2 + 5 * 0.69 / VISION) - 50, abs=0.01)
    assert school.death_step.tolist() == [[1, STEPS]]


def test_density_and_divergence_shape_the_reward() -> None:
    shaped = Reward(density=1.0, density_target=0.25, divergence=2.0)
    plain, priced = (pond((0.0, 5.0), (1.0, 5.0), (0.0, -3.0), reward=reward) for reward in (None, shaped))
    for school in (plain, priced):
        school.heading[:, 0, 1] = (-1.0, 0.0)  # against the first
        school.speed[:] = 0.0
    difference = act(priced, KEEP, KEEP, KEEP).rewards - act(plain, KEEP, KEEP, KEEP).rewards
    assert difference[0] == pytest.approx([0.1 * (2.0 - 0.25), 0.1 * (2.0 - 0.25), 0.0], abs=1e-5)


# --- observations


def test_a_fish_sees_the_predator_in_its_own_frame_and_only_nearby() -> None:
    school = pond((0.0, 5.0), predator=(2.0, 5.0))
    school.heading[:, 0, 0] = (0.0, 1.0)  # north: what is in the east is on the right
    obs = school.observe()[0, 0]
    assert obs[4:8] == pytest.approx([1.0, 2.0 / VISION, 0.0, -2.0 / VISION])
    school.predator[:, 0] = (4.0, 5.0)
    assert school.observe()[0, 0, 4:10] == pytest.approx([0.0, 1.0, 0.0, 0.0, 0.0, 0.0])


def test_only_living_neighbours_are_observed() -> None:
    school = pond((0.0, 5.0), (1.0, 5.0), (0.0, 7.0), (0.0, -5.0))
    obs = school.observe()[0]
    assert obs.shape == (4, 18)
    assert obs[0, 11:] == pytest.approx([2 / 3, 0.5 / VISION, 1.0 / VISION, 1.0, 0.0, 1.0 / VISION, 0.0])
    assert obs[3, 11:] == pytest.approx(np.zeros(7))
    school.alive[0, 1] = False
    assert school.observe()[0, 0, 11:] == pytest.approx([1 / 3, 0.0, 2.0 / VISION, 1.0, 0.0, 0.0, 2.0 / VISION])


# --- individual fish


def test_each_fish_has_its_own_action() -> None:
    school = pond((0.0, 5.0), (4.0, 5.0), (-4.0, 5.0))
    act(school, LEFT, RIGHT, SPEED_UP)
    assert school.heading[1, 0].tolist() == pytest.approx([0.5, -0.5, 0.0])
    assert school.speed[0].tolist() == [1.0, 1.0, 1.5]


def test_one_action_for_all_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"\(1, 3\), one per fish, not \(1, 1\)"):
        act(pond((0.0, 5.0), (4.0, 5.0), (-4.0, 5.0)), KEEP)


def test_a_dead_fish_yields_no_more_transitions() -> None:
    school = pond((0.0, 0.5), (0.0, 8.0), predator=(0.0, 0.0))
    first = act(school, KEEP, KEEP)
    assert first.acted.tolist() == [[True, True]]
    assert first.died.tolist() == [[True, False]]
    where = place(school, 0)
    second = act(school, SPEED_UP, KEEP)
    assert second.acted.tolist() == [[False, True]]
    assert not second.died.any()
    assert second.rewards[0, 0] == 0.0
    assert not second.obs[0, 0].any()
    assert second.obs[0, 1].any()
    assert place(school, 0) == where
    assert not second.dones[0]


def test_an_episode_ends_when_all_are_dead_or_time_is_up_and_the_pond_is_reset() -> None:
    school = FishSchool(2, 3, seed=5)
    school.position[:, 0] = 0.2  # on top of the predator
    step = school.step(np.zeros((2, 3), np.int64))
    assert step.dones.tolist() == [True, False]
    assert school.alive.all()
    assert school.clock.tolist() == [0, 1]
    assert step.obs[0, :, 10].tolist() == [0.0, 0.0, 0.0]
    school.clock[1] = STEPS - 1
    assert school.step(np.zeros((2, 3), np.int64)).dones.tolist() == [False, True]
    assert school.episode.tolist() == [2, 2]


def test_fish_start_within_the_pond_and_away_from_the_predator() -> None:
    school = FishSchool(200, 25, seed=3)
    distance = np.hypot(*school.position)
    assert distance.min() >= fish_env.START_GAP - 1e-5
    assert distance.max() <= RADIUS - 1.0 + 1e-5


# --- vectorization


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), ponds=st.integers(1, 5), fish=st.integers(1, 27), chance=st.integers(0, 2**31))
def test_a_pond_among_many_is_identical_to_the_single_pond_with_its_seed(
    seed: int, ponds: int, fish: int, chance: int
) -> None:
    rng = np.random.default_rng(chance)
    many = FishSchool(ponds, fish, seed=seed)
    singles = [FishSchool(1, fish, seed=seed + number) for number in range(ponds)]
    for school in (many, *singles):
        school.clock[:] = STEPS - 25  # so that a restart is among the steps
    for _ in range(40):
        actions = rng.integers(0, fish_env.NUM_ACTIONS, (ponds, fish))
        step = many.step(actions)
        for number, single in enumerate(singles):
            alone = single.step(actions[number : number + 1])
            for name in ("obs", "rewards", "acted", "died", "dones"):
                np.testing.assert_array_equal(getattr(step, name)[number], getattr(alone, name)[0], name)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), fish=st.integers(1, 30))
def test_the_state_stays_finite_and_within_the_pond(seed: int, fish: int) -> None:
    rng = np.random.default_rng(seed)
    school = FishSchool(3, fish, seed=seed, reward=Reward(density=1.0, divergence=1.0))
    for _ in range(60):
        step = school.step(rng.integers(0, fish_env.NUM_ACTIONS, (3, fish)))
        assert np.isfinite(step.rewards).all()
        assert np.abs(step.obs).max() <= 2.0
        assert not (step.died & ~step.acted).any()
    assert np.hypot(*school.position).max() <= RADIUS * 1.0001
    assert np.hypot(*school.predator).max() <= RADIUS * 1.0001


# --- gymnasium


def test_a_single_fish_passes_the_gymnasium_checks() -> None:
    pytest.importorskip("gymnasium")
    from fish_gym import FishEnv
    from gymnasium.utils.env_checker import check_env

    check_env(FishEnv(), skip_render_check=True)
    check_env(FishEnv(num_fish=4), skip_render_check=True)


def test_a_single_fish_env_matches_the_vectorized_one() -> None:
    pytest.importorskip("gymnasium")
    from fish_gym import FishEnv

    rng = np.random.default_rng(0)
    school, env = FishSchool(1, 1, seed=11, restart=False), FishEnv()
    obs, _ = env.reset(seed=11)
    np.testing.assert_array_equal(obs, school.observe()[0, 0])
    ended = False
    while not ended:
        action = rng.integers(0, fish_env.NUM_ACTIONS)
        step = school.step(np.array([[action]]))
        obs, reward, terminated, truncated, _ = env.step(action)
        np.testing.assert_array_equal(obs, step.obs[0, 0])
        assert reward == step.rewards[0, 0]
        assert terminated == step.died[0, 0]
        ended = terminated or truncated
        assert ended == step.dones[0]


def test_a_school_has_one_row_per_fish() -> None:
    pytest.importorskip("gymnasium")
    from fish_gym import SchoolEnv

    env = SchoolEnv(num_fish=5)
    obs, _ = env.reset(seed=2)
    assert obs.shape == (5, 18)
    ended = np.zeros(5, np.bool_)
    info: dict[str, Any] = {}
    for _ in range(STEPS):
        before = ended
        obs, rewards, terminated, truncated, info = env.step(env.action_space.sample())
        assert rewards.shape == terminated.shape == truncated.shape == (5,)
        assert (rewards[before] == 0).all()
        np.testing.assert_array_equal(info["acted"], ~before)
        assert (terminated >= before).all()
        ended = terminated
        if (terminated | truncated).all():
            break
    assert (terminated | truncated).all()


# -- the settings of its versions


def test_the_lab_names_its_variables_headings_and_instructions(tmp_path: Path) -> None:
    found = versions.load(RECIPE, {"EXPERIMENTS_ROOT": "experiments/more", "CODEX_RUN_LOG_DIR": "codex_runs"})
    assert (found.experiments, found.logs) == ("experiments/more", "codex_runs")
    environ = {"CODEX_BIN": "/opt/codex", "CODEX_APPROVAL_FLAGS": "--yolo", "CODEX_JSON_FLAGS": ""}
    assert versions.read_flags(environ, found.environment) == versions.Flags("/opt/codex", ("--yolo",), ())
    assert "3. Train. Use at least 64 parallel environments.\n" in prompt.make(found, 2, 1, RECIPE, submit=True)
    document = tmp_path / "dev_v2.md"
    document.write_text("# v2\n## 实验计划\n甲\n## 观察\n乙\n## 运行记录\n丙\n## 结果（指标）\n丁\n## 经验\n戊\n")
    assert all(finding.ok for finding in gates.check_document(document, found.sections))
    assert all(finding.ok for finding in gates.check_document(RECIPE / "experiments/v1/dev_v1.md", found.sections))
