"""The env: observations, rewards, ends of episodes, and exact snapshots."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv

from looplab.errors import LabError
from looplab.recipes.mario.mario import game
from looplab.recipes.mario.mario.cores import load_console, to_grey
from looplab.recipes.mario.mario.env import ACTIONS, INFO_FIELDS, MAX_SPEED, MarioEnv
from looplab.recipes.mario.mario.forward import probe_forward
from looplab.recipes.mario.mario.shaping import RewardShaping, ShapingSettings
from looplab.recipes.mario.mario.video import record_episode
from looplab.rl import SupervisedVectorEnv
from looplab.rl.scripts import parse_script
from looplab.rl.snapshot import find_snapshot_defect, restore, snapshot

Make = Callable[..., MarioEnv]
WIN = """RIGHT+B:3,RIGHT+A+B:20,RIGHT+B:3,RIGHT+A+B:12,RIGHT:9,RIGHT+A+B:10,RIGHT+B:2,RIGHT:2,RIGHT+A+B:7,RIGHT+B:13,
RIGHT+A+B:2,RIGHT+B:4,RIGHT+A+B:4,RIGHT+B:11,RIGHT:12,RIGHT+A+B:16,RIGHT+B:10,RIGHT:4,RIGHT+A+B:13,RIGHT:9,RIGHT+B:2,
RIGHT+A+B:7,RIGHT:8,RIGHT+B:6,RIGHT+A+B:6,RIGHT+B:2,RIGHT+A+B:7,RIGHT+B:2,RIGHT+A+B:8,RIGHT+B:13,RIGHT+A+B:12,RIGHT+B:3,
RIGHT+A+B:9,RIGHT+B:20,RIGHT+A+B:8,RIGHT+B:3,RIGHT+A+B:4,RIGHT:5,RIGHT+B:3,RIGHT+A+B:20,RIGHT:9,RIGHT+A+B:3,RIGHT+B:7,
RIGHT:7,RIGHT+A+B:8,RIGHT+B:2,RIGHT+A+B:8,RIGHT:7,RIGHT+A+B:15,RIGHT+B:3,RIGHT+A+B:17,RIGHT+B:3,RIGHT+A+B:8,RIGHT+B:6,
RIGHT+A+B:7,RIGHT+B:9,RIGHT+A+B:2,RIGHT+B:5,RIGHT+A+B:5,RIGHT+B:11,RIGHT+A+B:6,RIGHT+B:7,RIGHT+A+B:4"""
"""Wins 1-1 on all cores; found by a search with snapshots."""

if importlib.util.find_spec("stable_retro") is None or importlib.util.find_spec("gym_super_mario_bros") is None:
    pytest.skip("stable-retro or the game is not installed", allow_module_level=True)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[MarioEnv] = []

    def maker(**settings: Any) -> MarioEnv:
        made.append(MarioEnv(**settings))
        return made[-1]

    yield maker
    for env in made:
        env.close()


def actions_of(script: str, env: MarioEnv) -> list[int]:
    return [action for action, steps in parse_script(script, env.actions) for _ in range(steps)]


def play(env: Any, actions: list[int]) -> list[tuple[Any, ...]]:
    """Return the results of the steps until the episode ends."""
    results = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        results.append((observation.tobytes(), reward, terminated, truncated, info))
        if terminated or truncated:
            break
    return results


@pytest.fixture(params=["builtin", "fceumm", "nes-py"])
def core(request: Any) -> str:
    if request.param == "nes-py" and importlib.util.find_spec("nes_py") is None:
        pytest.skip("nes-py is not installed")
    if request.param == "builtin" and load_console() is None:
        pytest.skip("there is no C compiler")
    return str(request.param)


@pytest.mark.filterwarnings("ignore")
def test_the_env_passes_gymnasiums_checker(core: str, make: Make) -> None:
    check_env(make(core=core, render_mode="rgb_array"), skip_render_check=True)


def test_the_documented_script_moves_mario_forward(core: str, make: Make) -> None:
    env = make(core=core, actions="extended")
    env.reset(seed=0)
    results = play(env, actions_of("START:8,RIGHT+B:180", env))
    assert results[7][4]["x_pos"] == 40  # START does not even pause
    assert results[7][4]["time"] < 400
    assert max(step[4]["x_pos"] for step in results) > 300


def test_a_script_earns_reward_for_distance(make: Make) -> None:
    env = RewardShaping(make(actions="extended"), ShapingSettings(distance_weight=0.05))
    env.reset(seed=0)
    results = play(env, actions_of("START:8,RIGHT+B:20", env.env.unwrapped))  # type: ignore[arg-type]
    assert sum(step[4]["shaping_raw"] for step in results) > 5
    assert sum(step[4]["shaping_dx"] for step in results) == results[-1][4]["x_pos"] - 40


def test_the_action_sets_have_their_usual_order() -> None:
    assert {name: len(actions) for name, actions in ACTIONS.items()} == {
        "right_only": 5,
        "simple": 7,
        "complex": 12,
        "extended": 8,
    }
    assert ACTIONS["simple"][:3] == ((), ("RIGHT",), ("RIGHT", "A"))
    assert ACTIONS["complex"][5:] == (
        ("A",), ("LEFT",), ("LEFT", "A"), ("LEFT", "B"), ("LEFT", "A", "B"), ("DOWN",), ("UP",),
    )  # fmt: skip
    assert ACTIONS["extended"][3] == ("RIGHT", "B")


def test_custom_actions_are_lists_of_buttons(make: Make) -> None:
    env = make(actions=[["noop"], ["right", "b"]])
    env.reset(seed=0)
    assert play(env, [1] * 10)[-1][4]["x_pos"] > 60
    with pytest.raises(LabError, match="'TURBO' is not a button"):
        make(actions=[["TURBO"]])


def test_the_forward_action_is_found() -> None:
    probe = probe_forward(lambda: MarioEnv(actions="extended"), range(8), steps=12)
    assert ACTIONS["extended"][probe.best_action] in (("RIGHT", "B"), ("START", "RIGHT", "B"), ("RIGHT", "A", "B"))
    assert probe.distances[0] == probe.distances[1] == 0


def test_the_reward_follows_from_the_memory(make: Make) -> None:
    env = make(frame_skip=1)
    env.reset(seed=0)
    before, died = env.ram, False
    for action in [3] * 40 + [4] * 12 + [3] * 400:
        _, reward, terminated, _, info = env.step(action)
        ram = env.ram
        moved = game.x_position(ram) - game.x_position(before)
        assert info["reward_x"] == (moved if abs(moved) <= MAX_SPEED else 0)
        assert info["reward_clock"] == game.clock(ram) - game.clock(before) <= 0
        assert info["reward_death"] == (-25 if terminated else 0)
        assert reward == max(-15, info["reward_x"] + info["reward_clock"] + info["reward_death"])
        assert {name: info[name] for name in game.read_info(ram)} == game.read_info(ram)
        before, died = ram, terminated
        if died:
            break
    assert died
    assert reward == -15


def test_the_reward_of_a_step_is_the_sum_over_its_frames(make: Make) -> None:
    slow, fast = make(frame_skip=1), make(frame_skip=4)
    slow.reset(seed=0)
    fast.reset(seed=0)
    for action in (3, 3, 4, 4, 4, 1, 0, 6):
        frames = [slow.step(action) for _ in range(4)]
        observation, reward, _, _, info = fast.step(action)
        assert reward == sum(frame[1] for frame in frames)
        assert info["x_pos"] == frames[-1][4]["x_pos"]
        assert np.all(observation[-1] >= np.maximum(frames[-1][0][-1], frames[-2][0][-1]).astype(int) - 1)


def test_frames_are_stacked_oldest_first(make: Make) -> None:
    env = make(frame_stack=3)
    observation, _ = env.reset(seed=0)
    assert observation.shape == (3, 84, 84)
    assert (observation[0] == observation[2]).all()
    later, *_ = env.step(4)
    assert (later[:2] == observation[1:]).all()
    assert (later[2] != observation[2]).any()
    again, *_ = env.step(4)
    assert (again[:2] == later[1:]).all()


def test_grey_is_the_mean_of_the_area() -> None:
    screen = np.random.default_rng(0).integers(0, 256, (224, 240, 3), dtype=np.uint8)
    luminance = screen @ np.array([77, 150, 29]) / 256
    fine = np.repeat(np.repeat(luminance, 3, axis=0), 7, axis=1)
    mean = fine.reshape(84, 8, 84, 20).mean(axis=(1, 3))
    assert np.abs(to_grey(screen) - mean).max() <= 0.51
    assert (to_grey(np.full((224, 240, 3), 255, np.uint8)) == 255).all()


def test_the_flag_ends_the_episode(make: Make) -> None:
    env = make()
    env.reset(seed=0)
    results = play(env, actions_of(WIN, env))
    assert len(results) == 473
    assert results[-1][2]
    assert results[-1][4]["flag_get"]
    assert results[-1][4]["reward_death"] == 0
    assert not any(step[4]["flag_get"] for step in results[:-1])
    with pytest.raises(LabError, match="call reset"):
        env.step(0)


def test_both_cores_play_the_same_game(make: Make) -> None:
    if importlib.util.find_spec("nes_py") is None:
        pytest.skip("nes-py is not installed")
    paths = []
    for core in ("fceumm", "nes-py"):
        env = make(core=core)
        env.reset(seed=0)
        paths.append([step[4] for step in play(env, actions_of(WIN, env)[:150])])
    assert len(paths[0]) == len(paths[1]) == 150
    assert paths[0][-1]["x_pos"] > 900
    for one, other in zip(*paths, strict=True):
        assert abs(one["x_pos"] - other["x_pos"]) <= 12
        assert abs(one["time"] - other["time"]) <= 1


def test_the_whole_game_continues_after_the_flag(make: Make) -> None:
    env = make(whole_game=True)
    env.reset(seed=0)
    results = play(env, [*actions_of(WIN, env), 0, 0])
    assert [step[4]["flag_get"] for step in results[-3:]] == [True, False, False]
    assert not results[-1][2]
    assert (results[-1][4]["world"], results[-1][4]["stage"]) == (1, 2)
    assert abs(results[-2][1]) < 15  # the jump to the new stage earns no reward


def test_the_whole_game_ends_with_the_last_life(make: Make) -> None:
    env = make(whole_game=True)
    env.reset(seed=0)
    results = play(env, [3] * 400)
    assert results[-1][2]
    assert [step[4]["life"] for step in results if step[4]["reward_death"]] == [1, 0, 255]
    assert sum(step[4]["reward_death"] for step in results) == -75


def test_an_episode_is_truncated_after_max_steps(make: Make) -> None:
    env = make(max_steps=5)
    env.reset(seed=0)
    results = play(env, [0] * 9)
    assert [step[3] for step in results] == [False] * 4 + [True]
    assert not results[-1][2]


def test_a_game_that_stays_busy_does_not_hang_a_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(game, "MAX_SKIPPED_FRAMES", 30)
    env = make()
    env.reset(seed=0)
    frames = []
    real = env.core.step

    def stuck(buttons: int, draw: bool = True) -> None:
        frames.append(buttons)
        real(buttons, draw)
        env.core.write(game.PLAYER, 0x07)

    monkeypatch.setattr(env.core, "step", stuck)
    env.step(3)
    assert len(frames) == 4 * 31


def test_the_seed_chooses_the_stage_and_the_number_of_noops(make: Make) -> None:
    env = make(stages=[[1, 1], [1, 2], [2, 1], [4, 3]], noops=30)
    first = [env.reset(seed=seed) for seed in range(6)]
    second = [env.reset(seed=seed) for seed in range(6)]
    assert [info for _, info in first] == [info for _, info in second]
    assert all((one[0] == other[0]).all() for one, other in zip(first, second, strict=True))
    assert len({(info["world"], info["stage"]) for _, info in first}) > 1
    assert env.reset(options={"stage": (3, 2)})[1]["world"] == 3
    with pytest.raises(LabError, match="not a stage"):
        env.reset(options={"stage": (9, 1)})


def test_invalid_arguments_are_named() -> None:
    for settings, words in (
        ({"actions": "jump"}, "'jump' is not an action set"),
        ({"stages": [(1, 5)]}, "is not a stage"),
        ({"frame_skip": 0}, "at least 1"),
        ({"render_mode": "human"}, "is not supported"),
        ({"core": "mame"}, "is not a core"),
    ):
        with pytest.raises(LabError, match=words):
            MarioEnv(**settings)  # type: ignore[arg-type]


def test_a_step_before_the_first_reset_is_an_error(make: Make) -> None:
    with pytest.raises(LabError, match="has not started"):
        make().step(0)


def test_snapshots_are_exact(make: Make) -> None:
    env = make(noops=5, render_mode="rgb_array")
    env.reset(seed=1)
    play(env, [3] * 5)
    assert find_snapshot_defect(env, steps=20) is None


def test_a_snapshot_continues_in_another_env(make: Make) -> None:
    env, other = make(render_mode="rgb_array", noops=9), make(render_mode="rgb_array", noops=9)
    env.reset(seed=1)
    play(env, [3] * 9)
    state = snapshot(env)
    first = play(env, [4] * 6 + [3] * 60)
    picture, beginning = env.render(), env.reset()[0]
    restore(other, state)
    assert play(other, [4] * 6 + [3] * 60) == first
    assert (other.render() == picture).all()
    assert (other.reset()[0] == beginning).all()


def test_a_snapshot_continues_in_another_process(make: Make, tmp_path: Path) -> None:
    env = make()
    env.reset(seed=1)
    play(env, [3] * 9)
    state = env.snapshot()
    assert state["picture"] is None
    stack, console = state.pop("stack"), state.pop("console")
    np.savez(tmp_path / "state.npz", stack=stack, console=np.frombuffer(console, np.uint8))
    (tmp_path / "state.json").write_text(json.dumps(state))
    code = """if True:
        import json, sys
        import numpy as np
        from looplab.recipes.mario.mario.env import MarioEnv
        state, arrays = json.load(open(sys.argv[1] + "/state.json")), np.load(sys.argv[1] + "/state.npz")
        env = MarioEnv()
        env.restore({**state, "stack": arrays["stack"], "console": arrays["console"].tobytes()})
        for action in [4] * 6 + [3] * 30:
            observation, reward, terminated, _, info = env.step(action)
            sys.stdout.buffer.write(observation.tobytes() + f"{reward} {terminated} {info}".encode())
            if terminated:
                break
    """
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, stdout=subprocess.PIPE).stdout
    expected = play(env, [4] * 6 + [3] * 30)
    assert found == b"".join(step[0] + f"{step[1]} {step[2]} {step[4]}".encode() for step in expected)


def test_a_snapshot_of_another_core_is_refused(make: Make) -> None:
    env = make(core="fceumm")
    env.reset(seed=0)
    state = env.snapshot()
    with pytest.raises(LabError, match="with the core nes-py"):
        env.restore({**state, "core": "nes-py"})
    with pytest.raises(LabError, match="4 stacked frames, not 2"):
        make(frame_stack=2).restore(state)


def test_an_env_without_a_chosen_core_takes_that_of_the_snapshot(make: Make) -> None:
    env, other = make(core="fceumm", noops=5), make(noops=5)
    env.reset(seed=1)
    other.reset(seed=3)
    play(env, [3] * 9)
    other.restore(env.snapshot())
    assert other.core.name == "fceumm"
    assert play(other, [4] * 20) == play(env, [4] * 20)


@pytest.mark.skipif(load_console() is None, reason="there is no C compiler")
def test_the_builtin_core_and_fceumm_give_the_same_episodes_to_the_bit(make: Make) -> None:
    results = []
    for core in ("builtin", "fceumm"):
        env = make(core=core, noops=30, actions="complex", stages=((1, 1), (1, 2), (4, 4)), whole_game=True)
        rng = np.random.default_rng(0)
        found: list[Any] = []
        for seed in range(3):
            observation, info = env.reset(seed=seed)
            found += [(observation.tobytes(), info), *play(env, rng.choice([1, 3, 4, 4, 4, 6, 10], 150).tolist())]
        found += play(env, [3] * 60)
        results.append(found)
    assert results[0] == results[1]


@pytest.mark.parametrize("core", ["builtin", "fceumm"])
def test_several_envs_share_the_emulator_of_a_process(core: str, make: Make) -> None:
    envs = [make(core=core, stages=[stage]) for stage in ((1, 1), (1, 2), (1, 1))]
    alone = []
    for env in envs:
        env.reset(seed=0)
        alone.append(play(env, [3] * 15))
    for env in envs:
        env.reset(seed=0)
    together: list[list[Any]] = [[], [], []]
    for _ in range(15):
        for results, env in zip(together, envs, strict=True):
            results += play(env, [3])
    assert together == alone
    assert together[0] == together[2] != together[1]


def test_a_killed_worker_changes_nothing() -> None:
    makers = [lambda: MarioEnv(noops=20, max_steps=40)] * 4
    actions = np.random.default_rng(0).integers(7, size=(60, 4))
    plain = SyncVectorEnv(makers)
    expected = [plain.reset(seed=0)[0], *(plain.step(row)[:4] for row in actions)]
    plain.close()
    venv = SupervisedVectorEnv(makers, workers=2, info_fields=INFO_FIELDS, snapshot_every=16)
    try:
        results: list[Any] = [venv.reset(seed=0)[0]]
        for number, row in enumerate(actions):
            if number == 37:
                os.kill(venv.diagnostics()[1].pid or 0, signal.SIGKILL)
            results.append(venv.step(row)[:4])
    finally:
        venv.close()
    assert (results[0] == expected[0]).all()
    assert all(
        (one == other).all()
        for a, b in zip(results[1:], expected[1:], strict=True)
        for one, other in zip(a, b, strict=True)
    )


def test_an_episode_is_recorded(make: Make, tmp_path: Path) -> None:
    env = make(render_mode="rgb_array", max_steps=20)
    episode = record_episode(env, lambda observation: 3, tmp_path / "mario.gif", seed=0)
    assert episode.steps == 20
    assert episode.info["x_pos"] > 100
    assert (tmp_path / "mario.gif").stat().st_size > 10_000
