"""Scripts: their language, when they act, and which action leads forwards."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.errors import LabError
from looplab.rl.scripts import Script, forward, parse, probe_forward

EXTENDED = [(), ("START",), ("RIGHT",), ("RIGHT", "B"), ("RIGHT", "A"), ("RIGHT", "A", "B"),
            ("START", "RIGHT"), ("START", "RIGHT", "B")]  # fmt: skip


def test_a_script_is_read() -> None:
    assert parse("START:8,RIGHT+B:180", EXTENDED) == [(1, 8), (3, 180)]


def test_order_case_and_spaces_do_not_matter_and_one_step_is_the_default() -> None:
    assert parse(" b+Right : 3 , noop, A+b+rIGHT", EXTENDED) == [(3, 3), (0, 1), (5, 1)]
    assert parse("noop,right", ["NOOP", "right"]) == [(0, 1), (1, 1)]


@given(st.data())
def test_every_order_of_the_buttons_is_the_same_action(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(EXTENDED) - 1))
    buttons = data.draw(st.permutations(EXTENDED[number]))
    frames = data.draw(st.integers(1, 10**6))
    cased = "+".join(data.draw(st.sampled_from([b.upper(), b.lower(), b.title()])) for b in buttons)
    assert parse(f"{cased}:{frames}", EXTENDED) == [(number, frames)]


def test_an_unknown_action_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(LabError, match=r"'LEFT\+A'.*NOOP, START, RIGHT, B\+RIGHT"):
        parse("START:8,LEFT+A:3", EXTENDED)


@pytest.mark.parametrize(
    "text", ["", "START:", "START:0", "START:-1", "START:x", "START:1.5", "START,,RIGHT", "RIGHT+", ":3"]
)
def test_what_is_no_script_is_refused(text: str) -> None:
    with pytest.raises(LabError):
        parse(text, EXTENDED)


def acted(script: Script, begins: list[list[int]]) -> list[list[int | None]]:
    """What each env was told in each step; None where nothing."""
    seen: list[list[int | None]] = []
    for now in begins:
        told = script.act(np.array(now, bool))
        if told is None:
            seen.append([None] * len(now))
        else:
            seen.append([int(action) if holds else None for action, holds in zip(*told, strict=True)])
    return seen


def test_a_script_acts_from_the_beginning_of_each_episode() -> None:
    script = Script([(1, 2), (3, 1)], envs=2)
    begins = [[1, 1], [0, 0], [0, 1], [0, 0], [0, 0], [0, 0], [1, 0]]
    wanted = [[1, 1], [1, 1], [3, 1], [None, 1], [None, 3], [None, None], [1, None]]
    assert acted(script, begins) == wanted
    assert Script([(1, 2)], envs=2).act(np.zeros(2, bool)) is None


def test_or_only_in_the_first_episode() -> None:
    script = Script(forward(3, 2), envs=2, every_episode=False)
    begins = [[1, 1], [0, 0], [0, 1], [1, 0], [0, 0]]
    assert acted(script, begins) == [[2, 2], [2, 2], [2, None], [None, None], [None, None]]


def test_a_saved_script_goes_on() -> None:
    begins = [[1, 1], [0, 0], [1, 0], [0, 0], [0, 1], [0, 0]]
    for every_episode in (True, False):
        whole = acted(Script([(1, 3), (2, 2)], 2, every_episode=every_episode), begins)
        one, other = (Script([(1, 3), (2, 2)], 2, every_episode=every_episode) for _ in range(2))
        first = acted(one, begins[:3])
        other.load_state_dict(one.state_dict())
        assert first + acted(other, begins[3:]) == whole


def test_a_state_of_another_script_is_refused() -> None:
    saved = Script([(1, 3)], 2).state_dict()
    for other in (Script([(1, 4)], 2), Script([(1, 3)], 3)):
        with pytest.raises(LabError, match="was saved with"):
            other.load_state_dict(saved)


class Line(gym.Env[Any, Any]):
    """Action n moves by n − 2; beyond 10 it is over."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(5)
    closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.x = 40
        return np.zeros(1, np.float32), {"x_pos": self.x}

    def step(self, action: Any) -> Any:
        self.x += int(action) - 2
        return np.zeros(1, np.float32), 0.0, self.x > 50, False, {"x_pos": self.x}

    def close(self) -> None:
        Line.closed += 1


def test_the_action_that_leads_forwards_is_found() -> None:
    found = probe_forward(Line, range(5), frames=4)
    assert found.best == 4
    assert found.moved == {0: -8, 1: -4, 2: 0, 3: 4, 4: 8}
    assert probe_forward(Line, [3, 4], frames=100).moved == {3: 11, 4: 12}  # the episode ended
    assert Line.closed == 2


def test_without_a_position_no_action_is_guessed() -> None:
    with pytest.raises(LabError, match="no x_pos"):
        probe_forward(lambda: gym.make("CartPole-v1"), [0, 1], frames=3)
