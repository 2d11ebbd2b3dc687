"""Proposers of other packages: whatever they do, the engine continues, and the ledger is as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from looplab.decide.base import PluginProposer, Proposal, ask
from looplab.ledger.catalogue import ProposerFailedEvent
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import StudyView


@pytest.fixture
def study(tmp_path: Path) -> StudyLedger:
    study = StudyLedger(Ledger(tmp_path / "ledger.db"), "s")
    study.open("loss", "min")
    return study


class Given:
    """Proposes what a function returns."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def propose(self, study: StudyView, n: int) -> Any:
        return self.make(study)

    @property
    def thinking(self) -> bool:
        return bool(self.make(None))

    def close(self) -> None:
        self.make(None)


def fail(_: Any) -> None:
    raise SystemExit(7)


def wrong(**fields: Any) -> Callable[[Any], list[Proposal]]:
    return lambda _: [Proposal(**{"edits": ("x@set=1",), "reason": "r", "proposer": "p", **fields})]


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "exits": fail,
    "nothing": lambda _: None,
    "a number": lambda _: 5,
    "texts": lambda _: ["x@set=1"],
    "a reason that is no text": wrong(reason=5),
    "a hypothesis that is no text": wrong(hypothesis=None),
    "edits that are no texts": wrong(edits=(5, None)),
    "edits that are one text": wrong(edits="x@set=1"),
    "a parent that is no text": wrong(parent=["a"]),
    "a source that is no text": wrong(source={"a": 1}),
    "a step that is no number": wrong(until="end"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_problem_of_the_proposer(study: StudyLedger, mistake: str) -> None:
    proposer = PluginProposer("p", Given(MISTAKES[mistake]))
    assert ask(proposer, study, 3) == []
    assert "it failed" in (proposer.problem or "")
    assert [event.kind for event in study.ledger.events()][-1] == ProposerFailedEvent.kind


def test_whoever_exits_while_it_thinks_or_ends_does_not_end_the_engine() -> None:
    proposer = PluginProposer("p", Given(fail))
    assert not proposer.thinking
    assert "SystemExit: 7" in (proposer.problem or "")
    proposer.close()


def test_a_proposer_cannot_write_to_the_ledger(study: StudyLedger) -> None:
    def write(view: StudyView) -> list[Proposal]:
        view.ledger.execute("UPDATE studies SET goal='max'")
        return []

    proposer = PluginProposer("p", Given(write))
    assert ask(proposer, study, 3) == []
    assert "must not write" in (proposer.problem or "")
    assert study.ledger.rows("SELECT goal FROM studies")[0][0] == "min"
    study.open("loss", "max")  # looplab itself can
    assert study.ledger.rows("SELECT goal FROM studies")[0][0] == "max"


def test_good_proposals_are_taken_as_they_are(study: StudyLedger) -> None:
    proposer = PluginProposer("p", Given(wrong(source="a", until=3, parent="best")))
    (found,) = ask(proposer, study, 3)
    assert (found.edits, found.proposer, found.source, found.until) == (("x@set=1",), "p", "a", 3)
