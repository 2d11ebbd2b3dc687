"""Shaping: the reward's parts stay apart, nothing jumps, and standing still ends an episode."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from looplab.errors import LabError
from looplab.rl.runner import Tally
from looplab.rl.shaping import FIELDS, Ram, Shaping, ShapingSettings
from looplab.rl.snapshot import restore, snapshot, untrue


class Walk(gym.Env[Any, Any]):
    """Goes through a list of infos, one each step, with a reward of 1; then it terminates."""

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
    seen = []
    while not seen or not (seen[-1][1] or seen[-1][2]):
        _, reward, terminated, truncated, info = env.step(0)
        seen.append((float(reward), terminated, truncated, info))
    return seen


def xs(*positions: float) -> list[dict[str, Any]]:
    return [{"x_pos": x} for x in positions]


def test_the_parts_of_the_reward_stay_apart() -> None:
    infos = [{"x_pos": 40, "score": 0, "time": 400}, {"x_pos": 50, "score": 100, "time": 399}]
    settings = ShapingSettings(
        distance_weight=0.1, score_weight=0.01, time_weight=0.5, scale_start=0.2, scale_final=0.2
    )
    (first, *_), (reward, _, _, info) = play(Shaping(Walk(infos), settings))
    assert first == 1.0
    assert info["env_reward"] == 1.0
    assert info["shaping_dx"] == 10
    assert info["shaping_raw"] == pytest.approx(0.1 * 10 + 0.01 * 100 - 0.5)
    assert info["shaping_scaled"] == pytest.approx(0.2 * info["shaping_raw"])
    assert reward == pytest.approx(1.0 + info["shaping_scaled"])
    assert all(type(info[name]) is float for name in FIELDS if name in info and name != "x_pos")


def test_nothing_has_moved_in_the_first_step_of_any_episode() -> None:
    env = Shaping(Walk(xs(900, 905)))
    for _ in range(2):
        assert [info["shaping_dx"] for *_, info in play(env)] == [0, 5]


def test_going_back_costs_nothing_and_is_told() -> None:
    seen = play(Shaping(Walk(xs(50, 45, 48))))
    assert [info["shaping_dx"] for *_, info in seen] == [0, -5, 3]
    assert [info["shaping_raw"] > 0 for *_, info in seen] == [False, False, True]


def test_a_new_life_a_warp_and_a_torn_read_are_no_movement() -> None:
    life = [
        {"x_pos": 30, "life": 2, "time": 20},
        {"x_pos": 40, "life": 1, "time": 400},
        {"x_pos": 42, "life": 1, "time": 399},
    ]
    settings = ShapingSettings(distance_weight=1.0, time_weight=1.0)
    assert [info["shaping_raw"] for *_, info in play(Shaping(Walk(life), settings))] == [0, 0, 2 - 1]
    warp = play(Shaping(Walk(xs(100, 2000, 2003)), settings))
    assert [info["shaping_dx"] for *_, info in warp] == [0, 0, 3]
    torn = play(Shaping(Walk(xs(254, 3, 258, 260)), settings))  # the page had not been counted up yet
    assert [info["shaping_dx"] for *_, info in torn] == [0, 0, 0, 2]


def test_the_scale_is_annealed_over_the_steps_of_all_episodes() -> None:
    settings = ShapingSettings(scale_start=0.2, scale_final=0.1, anneal_steps=4)
    env = Shaping(Walk(xs(1, 2, 3)), settings)
    scales = [info["shaping_scale"] for _ in range(2) for *_, info in play(env)]
    assert scales == pytest.approx([0.2, 0.175, 0.15, 0.125, 0.1, 0.1])


def test_the_bonus_comes_with_the_end_and_is_not_scaled() -> None:
    settings = ShapingSettings(distance_weight=0.0, terminal_bonus=5.0, scale_start=0.1, scale_final=0.1)
    for flag, wanted in ((True, 6.0), (False, -4.0)):
        seen = play(Shaping(Walk([{"x_pos": 1}, {"x_pos": 2, "flag_get": flag}]), settings))
        assert [reward for reward, *_ in seen] == [1.0, wanted]
        assert seen[-1][3]["shaping_scaled"] == 0.0
        assert seen[-1][3]["shaping_bonus"] == wanted - 1


def test_standing_still_truncates_the_episode_and_moving_does_not() -> None:
    settings = ShapingSettings(stagnation=3)
    seen = play(Shaping(Walk(xs(10, 12, 11, 12, 12, 12, 12)), settings))  # to and fro is not further
    assert [truncated for _, _, truncated, _ in seen] == [False, False, False, False, True]
    assert [info.get("stagnation") for *_, info in seen] == [None] * 4 + [True]
    assert len(play(Shaping(Walk(xs(10, 12, 12, 12, 13, 13, 13, 14)), settings))) == 8
    assert len(play(Shaping(Walk([{}] * 9), settings))) == 9  # an unknown position does not stand still


def test_in_a_vector_env_all_of_it_reaches_the_tally() -> None:
    settings = ShapingSettings(distance_weight=1.0, scale_start=0.5, scale_final=0.5, stagnation=2)
    envs = SyncVectorEnv(
        [lambda: Shaping(Walk(xs(5, 9, 9, 9, 9)), settings), lambda: Shaping(Walk(xs(1, 2, 3, 4, 5)), settings)],
        autoreset_mode=AutoresetMode.NEXT_STEP,
    )
    envs.reset()
    tally, resetting = Tally(2), np.zeros(2, bool)
    for _ in range(5):
        _, rewards, terminated, truncated, infos = envs.step(np.zeros(2, int))
        tally.add(rewards, terminated, truncated, ~resetting, infos)
        resetting = terminated | truncated
    row = tally.row()
    assert row["env_stagnations"] == 1
    assert row["env_distance_delta_sum"] == 4 + 4
    assert row["env_shaping_raw_sum"] == 8
    assert row["env_shaping_scaled_sum"] == 4
    assert row["env_max_x_pos"] == 9


def memory(x: int) -> Any:
    ram = np.zeros(2048, np.uint8)
    ram[0x6D], ram[0x86] = x >> 8, x & 255
    return ram


def test_where_the_info_has_no_position_it_comes_from_the_ram() -> None:
    walk = Walk([{}] * 3, ram=memory(1000))
    env = Shaping(walk, ShapingSettings(ram=Ram()))
    env.reset()
    info = env.step(0)[4]
    assert (info["x_pos"], info["shaping_dx"]) == (1000, 0)
    walk.ram = memory(1030)  # over the border of a page
    info = env.step(0)[4]
    assert (info["x_pos"], info["shaping_dx"]) == (1030, 30)
    assert (info["ram_parse_successes"], info["ram_parse_failures"]) == (2, 0)


def test_other_addresses_and_a_method_work_too() -> None:
    walk = Walk([{}] * 2)
    walk.get_ram = lambda: [0, 2, 7]  # type: ignore[attr-defined]
    assert play(Shaping(walk, ShapingSettings(ram=Ram(high=1, low=2))))[0][3]["x_pos"] == 2 * 256 + 7


def test_a_ram_that_cannot_be_read_is_given_up_with_one_hint() -> None:
    said: list[str] = []
    env = Shaping(Walk([{}] * 10, ram=[1, 2, 3]), ShapingSettings(ram=Ram(give_up=4)), tell=said.append)
    seen = play(env)
    assert [info["ram_parse_failures"] for *_, info in seen] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    assert len(said) == 1
    assert "4 failures" in said[0]
    assert all("shaping_dx" not in info and "x_pos" not in info for *_, info in seen)  # unknown is not 0
    play(env)
    assert len(said) == 1


def test_failures_in_between_do_not_add_up() -> None:
    walk = Walk([{}] * 20, ram=[])
    said: list[str] = []
    env = Shaping(walk, ShapingSettings(ram=Ram(give_up=3)), tell=said.append)
    env.reset()
    for n in range(12):
        walk.ram = memory(n) if n % 3 == 0 else None
        info = env.step(0)[4]
    assert info["ram_parse_failures"] == 8
    assert not said


def test_a_snapshot_goes_on_in_a_fresh_env() -> None:
    infos = [{"x_pos": 3 * n, "score": n * n, "time": 400 - n, "life": 2} for n in range(20)]
    settings = ShapingSettings(score_weight=0.1, time_weight=0.1, scale_final=0.0, anneal_steps=30, stagnation=50)

    def make() -> Shaping:
        env = Shaping(Walk(infos), settings)
        env.reset()
        return env

    one, other = make(), make()
    for _ in range(7):
        one.step(0)
    restore(other, snapshot(one))
    for _ in range(10):
        assert other.step(0)[1:] == one.step(0)[1:]
    assert untrue(make()) is None


def test_the_same_dict_given_twice_is_not_taken_for_news() -> None:
    class Lazy(Walk):
        shared: dict[str, Any] = {}  # noqa: RUF012

        def step(self, action: Any) -> Any:
            return (*super().step(action)[:4], self.shared)

    walk = Lazy([{}] * 3, ram=memory(10))
    env = Shaping(walk, ShapingSettings(ram=Ram()))
    env.reset()
    env.step(0)
    walk.ram = memory(14)
    assert env.step(0)[4]["shaping_dx"] == 4
    assert not Lazy.shared


def test_settings_that_make_no_sense_are_refused() -> None:
    for settings in (ShapingSettings(stagnation=0), ShapingSettings(anneal_steps=-1), ShapingSettings(max_jump=0)):
        with pytest.raises(LabError):
            Shaping(Walk(xs(1)), settings)
