"""The worlds of the drone recipe: how drones fly, what they are paid for, when an episode ends."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")  # the recipe as a whole needs it

from looplab.recipes.drone import drones
from looplab.recipes.drone.drones import DT, GRAVITY, HOLD, MOST_STEPS, Drones, Fleet, Floats

ALL = slice(None)


def actions(world: Drones, thrust: float = 0.0) -> Floats:
    asked = np.zeros((world.worlds * world.drones, drones.ACTIONS), np.float32)
    asked[:, 0] = thrust
    return asked


def put(world: Drones, drone: int, place: tuple[float, float, float], goal: tuple[float, float, float]) -> None:
    """Set one drone of the first world somewhere, level and at rest, with a goal."""
    for array, value in ((world.position, place), (world.place, goal), (world.velocity, (0, 0, 0))):
        array[:, 0, drone] = value
    world.attitude[:, 0, drone] = (1, 0, 0, 0)
    world.rates[:, 0, drone] = 0


def one(task: str = "drone_hover", count: int = 1) -> Drones:
    """A world whose drones stand apart, far from their goals."""
    world = Drones(task, 1, count, seed=1)
    for drone in range(count):
        put(world, drone, (1.0 * drone, 0.0, 2.0), (1.0 * drone, 1.0, 1.0))
    return world


def test_the_thrust_of_its_weight_holds_a_level_drone_where_it_is() -> None:
    world = one()
    for _ in range(50):
        world.step(actions(world))
    assert world.position[:, 0, 0] == pytest.approx([0, 0, 2], abs=1e-5)
    assert world.velocity[:, 0, 0] == pytest.approx([0, 0, 0], abs=1e-5)


def test_without_thrust_a_drone_falls_as_bodies_fall() -> None:
    world = one()
    steps = 10
    for _ in range(steps):
        world.step(actions(world, thrust=-1.0))
    seconds = steps * DT
    fallen = 2.0 - world.position[2, 0, 0]
    assert fallen == pytest.approx(0.5 * GRAVITY * seconds**2, rel=0.12)  # a step is DT long, and the air brakes
    assert world.velocity[2, 0, 0] == pytest.approx(-GRAVITY * seconds, rel=0.03)


@pytest.mark.parametrize(("rate", "axis", "sign"), [(2, 0, 1), (1, 1, -1)])
def test_a_tilted_drone_goes_where_its_thrust_points(rate: int, axis: int, sign: int) -> None:
    world = one()
    asked = actions(world)
    asked[0, rate] = 0.5
    for _ in range(5):
        world.step(asked)
    assert sign * world.velocity[axis, 0, 0] > 0.05
    assert np.square(world.attitude[:, 0, 0]).sum() == pytest.approx(1, abs=1e-5)


def test_a_box_makes_the_thrust_too_small() -> None:
    world = one("drone_pickplace")
    world.carrying[:] = True
    world.step(actions(world))
    assert world.velocity[2, 0, 0] == pytest.approx(-GRAVITY * DT * (1 - 1 / 1.2), rel=1e-3)


def test_holding_still_at_the_goal_is_success_and_ends_the_episode() -> None:
    world = one()
    put(world, 0, (0, 0, 2), (0, 0.1, 2))
    steps = [world.step(actions(world)) for _ in range(HOLD)]
    assert [bool(step.done[0]) for step in steps] == [False] * (HOLD - 1) + [True]
    (returned, length, success, collision) = (
        steps[-1].ended.returned, steps[-1].ended.length, steps[-1].ended.success, steps[-1].ended.collision,
    )  # fmt: skip
    assert (length.tolist(), success.tolist(), collision.tolist()) == ([HOLD], [True], [False])
    assert returned[0] == pytest.approx(drones.SUCCESS + drones.PER_HOLD, abs=1e-4)
    assert returned[0] == pytest.approx(sum(float(step.rewards[0]) for step in steps), abs=1e-5)
    assert world.steps[0, 0] == 0, "it started again at once"


def test_coming_nearer_is_paid_and_going_away_costs_the_same() -> None:
    for direction in (1.0, -1.0):
        world = one()
        world.velocity[1] = direction
        step = world.step(actions(world))
        moved = np.sqrt(2) - np.hypot(1 - float(world.position[1, 0, 0]), float(world.position[2, 0, 0]) - 1)
        assert step.rewards[0] == pytest.approx(drones.PER_METRE * moved, abs=1e-5)
        assert np.sign(step.rewards[0]) == direction


def test_a_broken_hold_gives_back_what_it_earned() -> None:
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
        ended = world.step(actions(world)).ended
        assert ended.collision.tolist() == [collided]
        assert ended.success.tolist() == [False]
        assert ended.returned[0] < drones.CRASH + 0.1


def test_drones_that_touch_both_end_and_the_third_flies_on() -> None:
    world = one(count=3)
    put(world, 1, (0.2, 0.0, 2.0), (1, 1, 1))
    step = world.step(actions(world))
    assert step.done.tolist() == [True, True, False]
    assert step.ended.collision.tolist() == [True, True]
    assert step.rewards[0] < -0.9 < step.rewards[2]
    assert world.position[:, 0, 2] == pytest.approx([2, 0, 2], abs=1e-5)
    assert world.steps[0].tolist() == [0, 0, 1]


def test_drones_of_different_worlds_never_touch() -> None:
    world = Drones("drone_hover", 2, 1, seed=1)
    world.position[:, :, 0] = np.array([[0.0, 0.0], [0.0, 0.0], [2.0, 2.0]])
    assert not world.step(actions(world)).done.any()


def test_an_episode_that_takes_too_long_ends_without_success() -> None:
    world = one()
    world.steps[:] = MOST_STEPS - 1
    step = world.step(actions(world))
    assert step.done.tolist() == [True]
    assert step.ended.length.tolist() == [MOST_STEPS]
    assert not step.ended.success[0]
    assert not step.ended.collision[0]


def test_a_box_is_picked_up_first_and_only_then_delivered() -> None:
    world = one("drone_pickplace")
    put(world, 0, (0, 0, 1.0), (0, 0, 1.0))
    world.box[:, 0, 0] = (0, 0, 1.0)
    picking = [world.step(actions(world)) for _ in range(HOLD)]
    assert not any(step.done[0] for step in picking)
    assert sum(float(step.rewards[0]) for step in picking) == pytest.approx(drones.PICKED + drones.PER_HOLD, abs=1e-4)
    assert world.carrying[0, 0]
    carrying = [world.step(actions(world, thrust=drones.PAYLOAD)) for _ in range(HOLD)]
    assert carrying[-1].ended.success.tolist() == [True]
    assert not world.carrying[0, 0], "the next episode begins without a box"


def test_starts_keep_their_distance_from_all_others_in_the_world() -> None:
    world = Drones("drone_hover", 20, 8, seed=3)
    rng = np.random.default_rng(0)
    for _ in range(60):
        step = world.step(rng.normal(0, 0.6, (160, 4)).astype(np.float32))
        new = step.done.reshape(20, 8)
        nearest = world._neighbours()[1].min(axis=2)
        assert (nearest[new] > 0.5).all()
        assert np.isfinite(step.observations).all()
        goals = world.goal[:, :, None, :] - world.goal[:, :, :, None]
        assert (np.sqrt(np.square(goals).sum(axis=0)) + np.eye(8)[None] * 9 > 2 * drones.TOUCH - 1e-3).all()


def test_a_drone_sees_its_goal_from_its_own_side() -> None:
    world = one(count=2)
    turned = np.sqrt(0.5)
    world.attitude[:, 0, 0] = (turned, 0, 0, turned)  # a quarter to the left: what is ahead in y is straight ahead
    seen = world.observe()
    assert seen.shape == (2, drones.OBSERVATIONS)
    assert seen[0, :3] == pytest.approx([0.5, 0, -0.5], abs=1e-6)
    assert seen[1, :3] == pytest.approx([0, 0.5, -0.5], abs=1e-6)
    assert seen[0, 15:18] == pytest.approx([0, -np.exp(-1), 0], abs=1e-6), "the other drone is on its right"


@pytest.mark.parametrize("task", drones.TASKS)
def test_the_number_of_workers_changes_nothing_and_the_seed_everything(task: str) -> None:
    flown = []
    for workers, seed in ((1, 5), (4, 5), (1, 6)):
        fleet = Fleet(task, 8, 3, seed, workers)
        rng = np.random.default_rng(0)
        steps = [fleet.step(rng.normal(0, 0.5, (24, 4)).astype(np.float32)) for _ in range(80)]
        assert sum(len(step.ended.length) for step in steps) == sum(step.done.sum() for step in steps) > 20
        flown.append(np.stack([np.column_stack([step.observations, step.rewards]) for step in steps]))
    assert np.array_equal(flown[0], flown[1])
    assert not np.array_equal(flown[0], flown[2])
