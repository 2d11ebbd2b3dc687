"""Scripts: the language, and when they act."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.errors import LabError
from looplab.rl.scripts import ActionScript, parse_script

EXTENDED = [(), ("START",), ("RIGHT",), ("RIGHT", "B"), ("RIGHT", "A"), ("RIGHT", "A", "B"),
            ("START", "RIGHT"), ("START", "RIGHT", "B")]  # fmt: skip


def test_a_script_is_parsed() -> None:
    assert parse_script("START:8,RIGHT+B:180", EXTENDED) == [(1, 8), (3, 180)]


def test_order_case_and_spaces_do_not_matter_and_one_step_is_the_default() -> None:
    assert parse_script(" b+Right : 3 , noop, A+b+rIGHT", EXTENDED) == [(3, 3), (0, 1), (5, 1)]
    assert parse_script("noop,right", ["NOOP", "right"]) == [(0, 1), (1, 1)]


@given(st.data())
def test_every_order_of_the_buttons_is_the_same_action(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(EXTENDED) - 1))
    buttons = data.draw(st.permutations(EXTENDED[number]))
    frames = data.draw(st.integers(1, 10**6))
    cased = "+".join(data.draw(st.sampled_from([b.upper(), b.lower(), b.title()])) for b in buttons)
    assert parse_script(f"{cased}:{frames}", EXTENDED) == [(number, frames)]


def test_an_unknown_action_is_refused_with_a_list_of_the_known_ones() -> None:
    with pytest.raises(LabError, match=r"'LEFT\+A'.*NOOP, START, RIGHT, B\+RIGHT"):
        parse_script("START:8,LEFT+A:3", EXTENDED)


@pytest.mark.parametrize(
    "text", ["", "START:", "START:0", "START:-1", "START:x", "START:1.5", "START,,RIGHT", "RIGHT+", ":3"]
)
def test_a_malformed_script_is_refused(text: str) -> None:
    with pytest.raises(LabError):
        parse_script(text, EXTENDED)


def play(script: ActionScript, episode_starts: list[list[int]]) -> list[list[int | None]]:
    """Return the scripted action of each env in each step; None where the policy acts."""
    steps: list[list[int | None]] = []
    for starts in episode_starts:
        override = script.act(np.array(starts, bool))
        if override is None:
            steps.append([None] * len(starts))
        else:
            steps.append([int(action) if scripted else None for action, scripted in zip(*override, strict=True)])
    return steps


def test_a_script_plays_from_the_start_of_each_episode() -> None:
    script = ActionScript([(1, 2), (3, 1)], num_envs=2)
    episode_starts = [[1, 1], [0, 0], [0, 1], [0, 0], [0, 0], [0, 0], [1, 0]]
    expected = [[1, 1], [1, 1], [3, 1], [None, 1], [None, 3], [None, None], [1, None]]
    assert play(script, episode_starts) == expected
    assert ActionScript([(1, 2)], num_envs=2).act(np.zeros(2, bool)) is None


def test_a_script_may_play_in_the_first_episode_only() -> None:
    script = ActionScript([(2, 3)], num_envs=2, every_episode=False)
    episode_starts = [[1, 1], [0, 0], [0, 1], [1, 0], [0, 0]]
    assert play(script, episode_starts) == [[2, 2], [2, 2], [2, None], [None, None], [None, None]]


def test_a_saved_script_continues() -> None:
    episode_starts = [[1, 1], [0, 0], [1, 0], [0, 0], [0, 1], [0, 0]]
    for every_episode in (True, False):
        whole = play(ActionScript([(1, 3), (2, 2)], 2, every_episode=every_episode), episode_starts)
        one, other = (ActionScript([(1, 3), (2, 2)], 2, every_episode=every_episode) for _ in range(2))
        first = play(one, episode_starts[:3])
        other.load_state_dict(one.state_dict())
        assert first + play(other, episode_starts[3:]) == whole


def test_a_state_of_another_script_is_refused() -> None:
    saved = ActionScript([(1, 3)], 2).state_dict()
    for other in (ActionScript([(1, 4)], 2), ActionScript([(1, 3)], 3)):
        with pytest.raises(LabError, match="was saved with"):
            other.load_state_dict(saved)
