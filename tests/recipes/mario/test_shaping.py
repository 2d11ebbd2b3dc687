"""Reward shaping: the parts stay apart, jumps do not count, and stagnation truncates an episode."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from looplab.errors import LabError
from looplab.recipes.mario.mario.metrics import FIELDS
from looplab.recipes.mario.mario.shaping import (
    SHAPING_INFO_FIELDS,
    RamAddresses,
    RewardShaping,
    ShapingSettings,
)
from looplab.rl.episode_stats import EpisodeStats
from looplab.rl.metrics import SCHEMA
from looplab.rl.snapshot import find_snapshot_defect, restore, snapshot


class Walk(gym.Env[Any, Any]):
    """Returns one info of a list per step, with a reward of 1, and terminates at the end of the list."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, infos: list[dict[str, Any]], ram: Any = None) -> None:
        self.infos = infos
        self.at = 0
        if ram is not None:
            self.ram = ram

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        info = dict(self.infos[self.at])
        self.at += 1
        return np.zeros(1, np.float32), 1.0, self.at == len(self.infos), False, info


def play(env: gym.Env[Any, Any]) -> list[tuple[float, bool, bool, dict[str, Any]]]:
    env.reset()
    steps = []
    while not steps or not (steps[-1][1] or steps[-1][2]):
        _, reward, terminated, truncated, info = env.step(0)
        steps.append((float(reward), terminated, truncated, info))
    return steps


def xs(*positions: float) -> list[dict[str, Any]]:
    return [{"x_pos": x} for x in positions]


def test_the_parts_of_the_reward_stay_apart() -> None:
    infos = [{"x_pos": 40, "score": 0, "time": 400}, {"x_pos": 50, "score": 100, "time": 399}]
    settings = ShapingSettings(
        distance_weight=0.1, score_weight=0.01, time_weight=0.5, scale_start=0.2, scale_final=0.2
    )
    (first, *_), (reward, _, _, info) = play(RewardShaping(Walk(infos), settings))
    assert first == 1.0
    assert info["env_reward"] == 1.0
    assert info["shaping_dx"] == 10
    assert info["shaping_raw"] == pytest.approx(0.1 * 10 + 0.01 * 100 - 0.5)
    assert info["shaping_scaled"] == pytest.approx(0.2 * info["shaping_raw"])
    assert reward == pytest.approx(1.0 + info["shaping_scaled"])
    assert all(type(info[name]) is float for name in SHAPING_INFO_FIELDS if name in info and name != "x_pos")


def test_dx_is_0_in_the_first_step_of_every_episode() -> None:
    env = RewardShaping(Walk(xs(900, 905)))
    for _ in range(2):
        assert [info["shaping_dx"] for *_, info in play(env)] == [0, 5]


def test_moving_backward_is_reported_but_costs_nothing() -> None:
    steps = play(RewardShaping(Walk(xs(50, 45, 48))))
    assert [info["shaping_dx"] for *_, info in steps] == [0, -5, 3]
    assert [info["shaping_raw"] > 0 for *_, info in steps] == [False, False, True]


def test_a_new_life_a_warp_and_a_torn_read_are_not_movement() -> None:
    life = [
        {"x_pos": 30, "life": 2, "time": 20},
        {"x_pos": 40, "life": 1, "time": 400},
        {"x_pos": 42, "life": 1, "time": 399},
    ]
    settings = ShapingSettings(distance_weight=1.0, time_weight=1.0)
    assert [info["shaping_raw"] for *_, info in play(RewardShaping(Walk(life), settings))] == [0, 0, 2 - 1]
    warp = play(RewardShaping(Walk(xs(100, 2000, 2003)), settings))
    assert [info["shaping_dx"] for *_, info in warp] == [0, 0, 3]
    torn = play(RewardShaping(Walk(xs(254, 3, 258, 260)), settings))  # the page had not been incremented yet
    assert [info["shaping_dx"] for *_, info in torn] == [0, 0, 0, 2]


def test_the_scale_is_annealed_over_all_episodes() -> None:
    settings = ShapingSettings(scale_start=0.2, scale_final=0.1, anneal_steps=4)
    env = RewardShaping(Walk(xs(1, 2, 3)), settings)
    scales = [info["shaping_scale"] for _ in range(2) for *_, info in play(env)]
    assert scales == pytest.approx([0.2, 0.175, 0.15, 0.125, 0.1, 0.1])


def test_the_terminal_bonus_is_not_scaled() -> None:
    settings = ShapingSettings(distance_weight=0.0, terminal_bonus=5.0, scale_start=0.1, scale_final=0.1)
    for flag, expected in ((True, 6.0), (False, -4.0)):
        steps = play(RewardShaping(Walk([{"x_pos": 1}, {"x_pos": 2, "flag_get": flag}]), settings))
        assert [reward for reward, *_ in steps] == [1.0, expected]
        assert steps[-1][3]["shaping_scaled"] == 0.0
        assert steps[-1][3]["shaping_bonus"] == expected - 1


def test_stagnation_truncates_an_episode_and_progress_does_not() -> None:
    settings = ShapingSettings(stagnation=3)
    steps = play(RewardShaping(Walk(xs(10, 12, 11, 12, 12, 12, 12)), settings))  # moving to and fro is not progress
    assert [truncated for _, _, truncated, _ in steps] == [False, False, False, False, True]
    assert [info.get("stagnation") for *_, info in steps] == [None] * 4 + [True]
    assert len(play(RewardShaping(Walk(xs(10, 12, 12, 12, 13, 13, 13, 14)), settings))) == 8
    assert len(play(RewardShaping(Walk([{}] * 9), settings))) == 9  # an unknown position is not stagnation


def test_the_shaping_infos_of_a_vector_env_become_metrics() -> None:
    settings = ShapingSettings(distance_weight=1.0, scale_start=0.5, scale_final=0.5, stagnation=2)
    envs = SyncVectorEnv(
        [
            lambda: RewardShaping(Walk(xs(5, 9, 9, 9, 9)), settings),
            lambda: RewardShaping(Walk(xs(1, 2, 3, 4, 5)), settings),
        ],
        autoreset_mode=AutoresetMode.NEXT_STEP,
    )
    envs.reset()
    stats, resetting = EpisodeStats(2, (*SCHEMA, *FIELDS)), np.zeros(2, bool)
    for _ in range(5):
        _, rewards, terminated, truncated, infos = envs.step(np.zeros(2, int))
        stats.add(rewards, terminated, truncated, ~resetting, infos)
        resetting = terminated | truncated
    row = stats.pop_row()
    assert row["env_stagnations"] == 1
    assert row["env_distance_delta_sum"] == 4 + 4
    assert row["env_shaping_raw_sum"] == 8
    assert row["env_shaping_scaled_sum"] == 4
    assert row["env_max_x_pos"] == 9


def ram_with_x(x: int) -> Any:
    ram = np.zeros(2048, np.uint8)
    ram[0x6D], ram[0x86] = x >> 8, x & 255
    return ram


def test_the_position_is_read_from_the_ram_if_the_info_has_none() -> None:
    walk = Walk([{}] * 3, ram=ram_with_x(1000))
    env = RewardShaping(walk, ShapingSettings(ram=RamAddresses()))
    env.reset()
    info = env.step(0)[4]
    assert (info["x_pos"], info["shaping_dx"]) == (1000, 0)
    walk.ram = ram_with_x(1030)  # across a page boundary
    info = env.step(0)[4]
    assert (info["x_pos"], info["shaping_dx"]) == (1030, 30)
    assert (info["ram_parse_successes"], info["ram_parse_failures"]) == (2, 0)


def test_other_addresses_and_a_method_work_too() -> None:
    walk = Walk([{}] * 2)
    walk.get_ram = lambda: [0, 2, 7]  # type: ignore[attr-defined]
    assert play(RewardShaping(walk, ShapingSettings(ram=RamAddresses(high=1, low=2))))[0][3]["x_pos"] == 2 * 256 + 7


def test_an_unreadable_ram_is_given_up_with_one_warning() -> None:
    warnings: list[str] = []
    env = RewardShaping(
        Walk([{}] * 10, ram=[1, 2, 3]), ShapingSettings(ram=RamAddresses(max_failures=4)), warn=warnings.append
    )
    steps = play(env)
    assert [info["ram_parse_failures"] for *_, info in steps] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    assert len(warnings) == 1
    assert "4 failures" in warnings[0]
    assert all("shaping_dx" not in info and "x_pos" not in info for *_, info in steps)  # unknown is not 0
    play(env)
    assert len(warnings) == 1


def test_only_consecutive_failures_count() -> None:
    walk = Walk([{}] * 20, ram=[])
    warnings: list[str] = []
    env = RewardShaping(walk, ShapingSettings(ram=RamAddresses(max_failures=3)), warn=warnings.append)
    env.reset()
    for n in range(12):
        walk.ram = ram_with_x(n) if n % 3 == 0 else None
        info = env.step(0)[4]
    assert info["ram_parse_failures"] == 8
    assert not warnings


def test_a_snapshot_is_restored_in_a_new_env() -> None:
    infos = [{"x_pos": 3 * n, "score": n * n, "time": 400 - n, "life": 2} for n in range(20)]
    settings = ShapingSettings(score_weight=0.1, time_weight=0.1, scale_final=0.0, anneal_steps=30, stagnation=50)

    def make() -> RewardShaping:
        env = RewardShaping(Walk(infos), settings)
        env.reset()
        return env

    one, other = make(), make()
    for _ in range(7):
        one.step(0)
    restore(other, snapshot(one))
    for _ in range(10):
        assert other.step(0)[1:] == one.step(0)[1:]
    assert find_snapshot_defect(make()) is None


def test_an_info_dict_that_the_env_reuses_is_not_modified() -> None:
    class Lazy(Walk):
        shared: dict[str, Any] = {}  # noqa: RUF012

        def step(self, action: Any) -> Any:
            return (*super().step(action)[:4], self.shared)

    walk = Lazy([{}] * 3, ram=ram_with_x(10))
    env = RewardShaping(walk, ShapingSettings(ram=RamAddresses()))
    env.reset()
    env.step(0)
    walk.ram = ram_with_x(14)
    assert env.step(0)[4]["shaping_dx"] == 4
    assert not Lazy.shared


def test_invalid_settings_are_refused() -> None:
    for settings in (ShapingSettings(stagnation=0), ShapingSettings(anneal_steps=-1), ShapingSettings(max_jump=0)):
        with pytest.raises(LabError):
            RewardShaping(Walk(xs(1)), settings)
