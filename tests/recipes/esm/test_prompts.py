from __future__ import annotations

import pytest

from looplab.errors import LabError
from looplab.recipes.esm.esm.data import Example
from looplab.recipes.esm.esm.prompts import TEMPLATES, render

SUM = Example("a", "What is {1} + 1?", "2", "number")
HEAT = Example("b", "What conducts heat?", "B", "choice", ("wood", "copper", "wool"))


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_shows_the_question_and_nothing_of_the_answer(template: str) -> None:
    text = render(template, Example("a", "How many {x} are \\frac{1}{2}?", "98765", "number", (), "98765 it is"))
    assert "How many {x} are \\frac{1}{2}?" in text
    assert "98765" not in text


def test_the_choices_are_lettered() -> None:
    assert "A. wood\nB. copper\nC. wool" in render("arc_0shot", HEAT)


def test_a_template_without_choices_is_rejected() -> None:
    with pytest.raises(LabError, match="arc_0shot"):
        render("gsm8k_0shot", HEAT)


def test_the_tiny_template_is_the_question_and_a_blank_line() -> None:
    assert render("tiny", SUM) == "What is {1} + 1?\n\n"


def test_the_math_template_asks_for_a_box() -> None:
    assert "\\boxed{}" in render("math_0shot", SUM)


def test_an_unknown_template_is_reported_with_suggestions() -> None:
    with pytest.raises(LabError, match="did you mean gsm8k_0shot"):
        render("gsm8k_0shots", SUM)
    with pytest.raises(LabError, match="strategyqa_0shot"):
        render("?", SUM)
