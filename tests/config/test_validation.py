"""Mistakes in sections: all at once, each with its line, its expected value and the nearest name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import AfterValidator, Field

from looplab.config.files import read_document
from looplab.config.lab import StudyConfig
from looplab.config.validation import Section, check_section
from looplab.errors import LabError


class Inner(Section):
    SYNONYMS: ClassVar[Mapping[str, str]] = {"minimum": "low"}

    low: float = 0.0
    mode: Literal["fast", "slow"] = "fast"


class Outer(Section):
    name: str
    named: dict[str, Inner] = Field(default_factory=dict)
    listed: list[Annotated[Inner, AfterValidator(lambda inner: inner)]] = Field(default_factory=list)
    either: int | list[int] | None = None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "x", "named": {"a.b": {"lwo": 1}}}, "unknown key 'named.a.b.lwo', did you mean 'low'?"),
        ({"name": "x", "named": {"a": {"minimum": 1}}}, "unknown key 'named.a.minimum', did you mean 'low'?"),
        ({"name": "x", "listed": [{}, {"colour": 1}]}, "unknown key 'listed.1.colour'; known: low, mode"),
        ({"name": "x", "named": {"a": {"mode": "fats"}}}, "'fast' or 'slow', not 'fats', did you mean 'fast'?"),
        ({"name": 3}, "name takes text, not 3; put it in quotes"),
        ({"name": "x", "either": "y"}, "either takes a whole number, not 'y'"),
        ({}, "'name' is missing"),
        ([], "takes keys with values, not []"),
    ],
)
def test_a_mistake_names_the_key_and_what_it_takes(data: Any, message: str) -> None:
    with pytest.raises(LabError) as caught:
        check_section(Outer, data, label="part 1: ")
    assert caught.value.message.startswith("part 1: ")
    assert message in caught.value.message


def test_all_mistakes_of_a_file_are_reported_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("parts:\n  - name: 1\n    named:\n      a: {low: x}\n    nmae: y\n")
    document = read_document(path)
    with pytest.raises(LabError) as caught:
        check_section(Outer, document.plain()["parts"][0], document, at=("parts", 0))
    assert (caught.value.file, caught.value.line) == (str(path), 2)
    assert "; line 4: named.a.low takes a number, not 'x'" in caught.value.message
    assert "; line 5: unknown key 'nmae', did you mean 'name'?" in caught.value.message


def test_a_study_knows_the_goals_of_its_metrics_and_how_many_values_its_objective_needs() -> None:
    study: dict[str, Any] = {
        "study": "s",
        "launch": {"command": ["true"]},
        "measure": {"goals": {"loss": "max", "x": "min"}},
    }
    plain = StudyConfig.model_validate(study)
    assert (plain.goals, plain.last_values) == ({"loss": "max", "x": "min"}, 1)
    then = {"metric": "acc", "goal": "max", "at": "mean(7)"}
    objective = {"metric": "loss", "goal": "min", "at": "mean(3)", "then": then}
    judged = StudyConfig.model_validate({**study, "objective": objective})
    assert (judged.goals, judged.last_values) == ({"loss": "min", "x": "min", "acc": "max"}, 7)
