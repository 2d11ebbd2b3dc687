"""Whatever a proposal contains, it is run or rejected with its reason, and the study continues; also after a resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loop.test_preview import STUDY, InstantExecutor, set_up, train, write_lab

from looplab.decide.base import Proposal
from looplab.decide.mix import Mix
from looplab.ledger.ledger import Ledger, LedgerCopy
from looplab.ledger.study import StudyLedger
from looplab.ledger.writers import runs as run_writer
from looplab.loop.decision import Decider
from looplab.loop.engine import Engine
from looplab.loop.events import EngineEvent
from looplab.loop.outcome import Ending
from looplab.loop.planning import Planner
from looplab.loop.setup import RunOptions, Setup

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=30)
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=5,
)
EDITS = st.lists(
    ANY_TEXT
    | st.builds("{}@{}={}".format, st.sampled_from(["x", "y", "seed", "*", "x.y", "é"]),
                st.sampled_from(["set", "new", "mul", "add", "min", "append", "del"]),
                ANY_VALUE.map(json.dumps) | ANY_TEXT),
    max_size=3,
)  # fmt: skip
HOSTILE = [
    "x@set=99999999999999999999",
    "x@set=" + "9" * 5_000,
    "x@mul=1e300",
    'x@set="\\ud83d"',
    "x@set=\ud83d\ude80",
    "x@new=" + "[" * 100_000,
    "x@new=" + "[" * 900 + "]" * 900,
    "x@set=NaN",
    "\ud800@set=1",
    "seed@set=" + str(2**80),
    "x\x00y@set=1",
    "x@set=\x1b[2J",
]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    knobs = {**STUDY["knobs"], "seed": {"type": "int"}}
    return set_up(write_lab(tmp_path_factory.mktemp("lab"), {**STUDY, "knobs": knobs}), RunOptions())


def make_planner(setup: Setup, news: list[EngineEvent] | None = None) -> tuple[Planner, StudyLedger]:
    study = StudyLedger(LedgerCopy(Path("nowhere")), "toy")
    study.open("score", "max")
    tell = (news if news is not None else []).append
    return Planner(setup, study, Decider(setup, study), None, tell, lambda line: None), study


def plan(planner: Planner, study: StudyLedger) -> None:
    with study.ledger.write():
        planner.plan(idle=True, free=2)


@given(edits=EDITS, reason=ANY_TEXT, hypothesis=ANY_TEXT, parent=st.none() | ANY_TEXT)
@settings(max_examples=150)
def test_any_proposal_becomes_a_run_or_is_rejected(
    setup: Setup, edits: list[str], reason: str, hypothesis: str, parent: str | None
) -> None:
    planner, study = make_planner(setup)
    study.propose("person", edits, reason, parent=parent, hypothesis=hypothesis)
    study.say(reason)
    plan(planner, study)
    (row,) = study.proposals()
    assert row.status in ("accepted", "rejected")
    assert row.status == "accepted" or row.problems
    assert study.ledger.first_broken_link() is None
    for event in study.ledger.events():
        json.dumps(event.data, allow_nan=False).encode()


@pytest.mark.parametrize("edit", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_edit_is_rejected_and_the_next_proposal_runs(setup: Setup, edit: str) -> None:
    news: list[EngineEvent] = []
    planner, study = make_planner(setup, news)
    bad = study.propose("person", [edit], "")
    good = study.propose("person", ["x@set=7"], "")
    plan(planner, study)
    while study.waiting(1):  # the base took a place of the round
        planner.queue.clear()
        plan(planner, study)
    assert bad is not None
    assert good is not None
    assert study.proposal(bad).status == "rejected"
    assert study.proposal(bad).problems[0]["message"]
    assert study.proposal(good).status == "accepted"
    assert [item.kind for item in news].count("rejected") == 1
    (rejected,) = [event for event in study.ledger.events() if event.kind == "rejected"]
    assert rejected.data["proposal"] == bad


def test_an_unforeseen_exception_rejects_only_that_proposal_and_leaves_no_trace_of_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner, study = make_planner(setup)
    original = run_writer.keep_config

    def keep_or_fail(ledger: Ledger, config_hash: str, config: Mapping[str, Any]) -> None:
        if config["x"] == 5:
            raise OverflowError("too large")
        original(ledger, config_hash, config)

    monkeypatch.setattr(run_writer, "keep_config", keep_or_fail)
    plan(planner, study)  # the base, and nothing else yet
    planner.queue.clear()
    bad = study.propose("person", ["x@set=5"], "bad")
    study.propose("person", ["x@set=6"], "good")
    plan(planner, study)
    assert bad is not None
    assert study.proposal(bad).problems[0]["message"] == "OverflowError: too large"
    assert [run.reason for run in study.runs()] == ["base config base.json", "good"]
    assert [run.n for run in study.runs()] == [1, 2]
    assert study.ledger.first_broken_link() is None


def test_trouble_with_the_disk_is_not_the_fault_of_a_proposal(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    planner, study = make_planner(setup)
    study.propose("person", ["x@set=5"], "")

    def fail(self: Decider, proposal: Proposal) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Decider, "decide", fail)
    with pytest.raises(OSError, match="No space"):
        plan(planner, study)
    assert [row.status for row in study.proposals()] == ["waiting"]


class Broken:
    name = "broken"
    problem: str | None = None
    thinking = False

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        study.propose(self.name, ["x@set=1"], "half done")
        raise ZeroDivisionError("division by zero")

    def close(self) -> None:
        """There is nothing to let go of."""


class Sound(Broken):
    name = "sound"

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        done = len(study.proposals())
        return [Proposal((f"x@set={done + i}",), "", self.name) for i in range(n)]


@pytest.mark.parametrize("mixed", [False, True])
def test_a_proposer_that_raises_is_reported_once_and_the_others_propose(setup: Setup, mixed: bool) -> None:
    news: list[EngineEvent] = []
    planner, study = make_planner(setup, news)
    planner._proposers = (Mix([Broken(), Sound()], seed=0),) if mixed else (Broken(), Sound())
    for _ in range(3):
        plan(planner, study)
        planner.queue.clear()
    assert {row.proposer for row in study.proposals()} == {"sound"}
    assert len(study.runs()) > 2
    failed = [event.data for event in study.ledger.events() if event.kind == "proposer failed"]
    assert [data["proposer"] for data in failed] == ["broken"]
    assert "ZeroDivisionError" in failed[0]["why"]
    assert any("ZeroDivisionError" in item.text for item in news)
    assert study.ledger.first_broken_link() is None


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    entries = [{"edits": [edit], "reason": "faster \ud83d\ude80 \ud83d"} for edit in HOSTILE if len(edit) < 60]
    queue = [*entries, {"edits": ["x@set=9"], "reason": "\ud83d"}]
    return write_lab(tmp_path / "lab", {**STUDY, "proposers": [{"queue": "queue.yaml"}]}, queue=queue)


def test_a_queue_full_of_hostile_entries_ends_no_engine_and_no_resume(lab: Path) -> None:
    for n in range(2):
        ledger = Ledger(lab / ".looplab" / "ledger.db")
        outcome = Engine(set_up(lab, RunOptions()), ledger, InstantExecutor(train)).run()
        study = StudyLedger(ledger, "toy")
        assert outcome.ending is Ending.DONE
        assert [run.status for run in study.runs()] == ["ok", "ok"], f"engine {n + 1}"
        assert {row.status for row in study.proposals()} == {"accepted", "rejected"}
        assert ledger.first_broken_link() is None
        ledger.close()
