"""The simulation of the drone recipe: dynamics, rewards, ends of episodes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")  # the recipe as a whole needs it

from looplab.recipes.drone import drones
from looplab.recipes.drone.drones import DT, GRAVITY, HOLD, MAX_EPISODE_STEPS, Drones, Fleet, Floats

ALL = slice(None)


def actions(world: Drones, thrust: float = 0.0) -> Floats:
    commands = np.zeros((world.worlds * world.drones, drones.ACTION_DIM), np.float32)
    commands[:, 0] = thrust
    return commands


def put(world: Drones, drone: int, position: tuple[float, float, float], goal: tuple[float, float, float]) -> None:
    """Set one drone of the first world somewhere, level and at rest, with a goal."""
    for array, value in ((world.position, position), (world.target, goal), (world.velocity, (0, 0, 0))):
        array[:, 0, drone] = value
    world.attitude[:, 0, drone] = (1, 0, 0, 0)
    world.rates[:, 0, drone] = 0


def one(task: str = "drone_hover", count: int = 1) -> Drones:
    """A world whose drones stand apart, far from their goals."""
    world = Drones(task, 1, count, seed=1)
    for drone in range(count):
        put(world, drone, (1.0 * drone, 0.0, 2.0), (1.0 * drone, 1.0, 1.0))
    return world


def test_zero_thrust_balances_the_weight_of_a_level_drone() -> None:
    world = one()
    for _ in range(50):
        world.step(actions(world))
    assert world.position[:, 0, 0] == pytest.approx([0, 0, 2], abs=1e-5)
    assert world.velocity[:, 0, 0] == pytest.approx([0, 0, 0], abs=1e-5)


def test_without_thrust_a_drone_is_in_free_fall() -> None:
    world = one()
    steps = 10
    for _ in range(steps):
        world.step(actions(world, thrust=-1.0))
    seconds = steps * DT
    fallen = 2.0 - world.position[2, 0, 0]
    assert fallen == pytest.approx(0.5 * GRAVITY * seconds**2, rel=0.12)  # a step is DT long, and the air brakes
    assert world.velocity[2, 0, 0] == pytest.approx(-GRAVITY * seconds, rel=0.03)


@pytest.mark.parametrize(("rate", "axis", "sign"), [(2, 0, 1), (1, 1, -1)])
def test_a_tilted_drone_accelerates_along_its_thrust(rate: int, axis: int, sign: int) -> None:
    world = one()
    commands = actions(world)
    commands[0, rate] = 0.5
    for _ in range(5):
        world.step(commands)
    assert sign * world.velocity[axis, 0, 0] > 0.05
    assert np.square(world.attitude[:, 0, 0]).sum() == pytest.approx(1, abs=1e-5)


def test_a_box_needs_more_thrust() -> None:
    world = one("drone_pickplace")
    world.carrying[:] = True
    world.step(actions(world))
    assert world.velocity[2, 0, 0] == pytest.approx(-GRAVITY * DT * (1 - 1 / 1.2), rel=1e-3)


def test_holding_still_at_the_goal_is_success_and_ends_the_episode() -> None:
    world = one()
    put(world, 0, (0, 0, 2), (0, 0.1, 2))
    steps = [world.step(actions(world)) for _ in range(HOLD)]
    assert [bool(step.dones[0]) for step in steps] == [False] * (HOLD - 1) + [True]
    (returns, lengths, success, collision) = (
        steps[-1].finished.returns, steps[-1].finished.lengths, steps[-1].finished.success, steps[-1].finished.collision,
    )  # fmt: skip
    assert (lengths.tolist(), success.tolist(), collision.tolist()) == ([HOLD], [True], [False])
    assert returns[0] == pytest.approx(drones.SUCCESS + drones.PER_HOLD, abs=1e-4)
    assert returns[0] == pytest.approx(sum(float(step.rewards[0]) for step in steps), abs=1e-5)
    assert world.steps[0, 0] == 0, "it was reset immediately"


def test_progress_is_rewarded_and_moving_away_costs_the_same() -> None:
    for direction in (1.0, -1.0):
        world = one()
        world.velocity[1] = direction
        step = world.step(actions(world))
        moved = np.sqrt(2) - np.hypot(1 - float(world.position[1, 0, 0]), float(world.position[2, 0, 0]) - 1)
        assert step.rewards[0] == pytest.approx(drones.PER_METRE * moved, abs=1e-5)
        assert np.sign(step.rewards[0]) == direction


def test_an_interrupted_hold_loses_its_reward() -> None:
    world = one()
    put(world, 0, (0, 0, 2), (0, 0, 2))
    earned = sum(float(world.step(actions(world)).rewards[0]) for _ in range(5))
    assert earned == pytest.approx(drones.PER_HOLD * 5 / HOLD, abs=1e-4)
    world.velocity[0] = 3.0  # too fast, still near
    assert world.step(actions(world)).rewards[0] == pytest.approx(-earned - drones.PER_METRE * 3 * DT, abs=2e-3)


def test_the_ground_is_a_collision_and_the_edge_of_the_world_is_a_crash_without_one() -> None:
    for place, collided in (((0, 0, 0.001), True), ((0, 0, 3.999), False), ((3.299, 0, 2), False)):
        world = one()
        put(world, 0, place, (0, 1, 1))
        world.velocity[:, 0, 0] = np.sign(place) * np.array([1, 0, -1 if collided else 1])
        finished = world.step(actions(world)).finished
        assert finished.collision.tolist() == [collided]
        assert finished.success.tolist() == [False]
        assert finished.returns[0] < drones.CRASH + 0.1


def test_a_collision_ends_both_episodes_and_the_third_drone_continues() -> None:
    world = one(count=3)
    put(world, 1, (0.2, 0.0, 2.0), (1, 1, 1))
    step = world.step(actions(world))
    assert step.dones.tolist() == [True, True, False]
    assert step.finished.collision.tolist() == [True, True]
    assert step.rewards[0] < -0.9 < step.rewards[2]
    assert world.position[:, 0, 2] == pytest.approx([2, 0, 2], abs=1e-5)
    assert world.steps[0].tolist() == [0, 0, 1]


def test_drones_of_different_worlds_never_touch() -> None:
    world = Drones("drone_hover", 2, 1, seed=1)
    world.position[:, :, 0] = np.array([[0.0, 0.0], [0.0, 0.0], [2.0, 2.0]])
    assert not world.step(actions(world)).dones.any()


def test_an_episode_that_takes_too_long_ends_without_success() -> None:
    world = one()
    world.steps[:] = MAX_EPISODE_STEPS - 1
    step = world.step(actions(world))
    assert step.dones.tolist() == [True]
    assert step.finished.lengths.tolist() == [MAX_EPISODE_STEPS]
    assert not step.finished.success[0]
    assert not step.finished.collision[0]


def test_a_box_is_picked_up_first_and_only_then_delivered() -> None:
    world = one("drone_pickplace")
    put(world, 0, (0, 0, 1.0), (0, 0, 1.0))
    world.box[:, 0, 0] = (0, 0, 1.0)
    picking = [world.step(actions(world)) for _ in range(HOLD)]
    assert not any(step.dones[0] for step in picking)
    assert sum(float(step.rewards[0]) for step in picking) == pytest.approx(drones.PICKED + drones.PER_HOLD, abs=1e-4)
    assert world.carrying[0, 0]
    carrying = [world.step(actions(world, thrust=drones.PAYLOAD)) for _ in range(HOLD)]
    assert carrying[-1].finished.success.tolist() == [True]
    assert not world.carrying[0, 0], "the next episode starts without a box"


def test_drones_start_away_from_all_others_in_the_world() -> None:
    world = Drones("drone_hover", 20, 8, seed=3)
    rng = np.random.default_rng(0)
    for _ in range(60):
        step = world.step(rng.normal(0, 0.6, (160, 4)).astype(np.float32))
        new = step.dones.reshape(20, 8)
        nearest = world._neighbours()[1].min(axis=2)
        assert (nearest[new] > 0.5).all()
        assert np.isfinite(step.obs).all()
        goals = world.goal[:, :, None, :] - world.goal[:, :, :, None]
        assert (np.sqrt(np.square(goals).sum(axis=0)) + np.eye(8)[None] * 9 > 2 * drones.TOUCH - 1e-3).all()


def test_the_goal_is_observed_in_the_body_frame() -> None:
    world = one(count=2)
    turned = np.sqrt(0.5)
    world.attitude[:, 0, 0] = (turned, 0, 0, turned)  # a quarter to the left: what is ahead in y is straight ahead
    obs = world.observe()
    assert obs.shape == (2, drones.OBS_DIM)
    assert obs[0, :3] == pytest.approx([0.5, 0, -0.5], abs=1e-6)
    assert obs[1, :3] == pytest.approx([0, 0.5, -0.5], abs=1e-6)
    assert obs[0, 15:18] == pytest.approx([0, -np.exp(-1), 0], abs=1e-6), "the other drone is on its right"


@pytest.mark.parametrize("task", drones.TASKS)
def test_results_depend_on_the_seed_but_not_on_the_number_of_workers(task: str) -> None:
    trajectories = []
    for workers, seed in ((1, 5), (4, 5), (1, 6)):
        fleet = Fleet(task, 8, 3, seed, workers)
        rng = np.random.default_rng(0)
        steps = [fleet.step(rng.normal(0, 0.5, (24, 4)).astype(np.float32)) for _ in range(80)]
        assert sum(len(step.finished.lengths) for step in steps) == sum(step.dones.sum() for step in steps) > 20
        trajectories.append(np.stack([np.column_stack([step.obs, step.rewards]) for step in steps]))
    assert np.array_equal(trajectories[0], trajectories[1])
    assert not np.array_equal(trajectories[0], trajectories[2])


def skip_unless_compiled() -> None:
    if drones.load_compiled()[0] is None:
        pytest.skip("no C compiler")


def test_drones_c_has_the_hash_of_drones_py() -> None:
    """A change of drones.py needs the same change in drones.c, and then this hash."""
    assert sha256(Path(drones.__file__).read_bytes()).hexdigest() in Path(drones.__file__).with_suffix(".c").read_text()


@pytest.mark.parametrize("task", drones.TASKS)
@pytest.mark.parametrize(("worlds", "count"), [(6, 8), (5, 3), (9, 1), (1, 20)])
def test_the_compiled_simulation_agrees_with_numpy_to_the_bit(task: str, worlds: int, count: int) -> None:
    skip_unless_compiled()
    one, other = (Drones(task, worlds, count, seed=7, first_world=2, compiled=compiled) for compiled in (True, False))
    rng = np.random.default_rng(0)
    ended = []
    for turn in range(260):
        commands = rng.normal(0, 0.5 if turn % 90 < 20 else 0.02, (worlds * count, 4)).astype(np.float32)
        if turn % 60 == 30:  # some are at their goal from here on: they succeed, or pick up their box
            for world in (one, other):
                world.carrying[::2] = world.carries and turn > 60
                world.position[:, ::2] = world.goal[:, ::2]
                world.velocity[:, ::2] = 0
                world.rates[:, ::2] = 0
                world.attitude[:, ::2] = np.array([1, 0, 0, 0], np.float32)[:, None, None]
        commands[:, 0] += drones.PAYLOAD * one.carrying.ravel()  # the weight of the box
        left, right = one.step(commands), other.step(commands)
        for name in ("obs", "rewards", "dones"):
            assert np.array_equal(getattr(left, name), getattr(right, name)), name
        for name in vars(right.finished):
            assert np.array_equal(getattr(left.finished, name), getattr(right.finished, name)), name
        for name in drones.STATE:
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        ended += [*zip(right.finished.success.tolist(), right.finished.collision.tolist(), strict=True)]
    assert len(set(ended)) == 3, "successes, collisions, and neither"
    one.load_state_dict(other.state_dict())  # other arrays at other addresses
    assert np.array_equal(one.step(commands).obs, other.step(commands).obs)


def test_a_changed_simulation_runs_in_numpy_and_says_why(tmp_path: Path) -> None:
    for name in ("drones.py", "drones.c"):
        shutil.copy(Path(drones.__file__).with_name(name), tmp_path)
    code = "import drones; print(drones.Drones('drone_hover', 1, 1, 0).reason_not_compiled)"

    def reason() -> str:
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    if drones.load_compiled()[0] is not None:
        assert reason() == "None"
    text = (tmp_path / "drones.py").read_text()
    (tmp_path / "drones.py").write_text(text.replace("SUCCESS, CRASH, PICKED = 1.0,", "SUCCESS, CRASH, PICKED = 2.0,"))
    assert reason() == "drones.py was changed, and drones.c does not have its hash"
    (tmp_path / "drones.c").unlink()
    assert reason() == "there is no drones.c"


def test_the_shared_functions_are_exp_cos_and_sin() -> None:
    x = np.concatenate([np.linspace(0, 90, 10_001), [0.0, 1e6]]).astype(np.float32)
    assert np.allclose(drones._exp_minus(x), np.exp(-x.astype(np.float64)), rtol=3e-7, atol=1e-37)
    u = np.linspace(0, 1, 1001)
    cosine, sine = drones._half_turn(u)
    assert np.allclose(cosine, np.cos(np.pi * u), atol=1e-12)
    assert np.allclose(sine, np.sin(np.pi * u), atol=1e-12)
