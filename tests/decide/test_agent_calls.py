"""Failed calls of an agent are retried with backoff, then a stand-in proposes; every refusal goes back to the agent."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from looplab.agents.base import AgentSession, Answer, Summary, Usage
from looplab.config.lab import load_lab
from looplab.decide import agent
from looplab.decide.agent import AgentProposer
from looplab.decide.base import Proposal
from looplab.decide.history import History
from looplab.decide.next_config import NextConfig
from looplab.decide.prompt import ALWAYS, read_template
from looplab.decide.search import SearchProposer
from looplab.errors import LabError
from looplab.guard.guard import Guard, Problem
from looplab.guard.knobs import Knob
from looplab.ledger.catalogue import AgentAskedEvent
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.loop.decision import Decider, ProposalRejected
from looplab.loop.setup import RunOptions, make_stand_in, prepare
from looplab.loop.submitting import refuse


def answer(*edits: str) -> str:
    return json.dumps({"proposals": [{"edits": list(edits), "reason": "why not"}]})


class Failure:
    """An answer of a call that failed."""

    def __init__(self, why: str) -> None:
        self.why = why


class StandIn:
    name = "search"
    problem: str | None = None
    thinking = False

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        return [Proposal(("x@set=5",), "a draw", self.name)]

    def close(self) -> None: ...


class Lab:
    """A study with an agent that answers by a list, on a clock that only the test moves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings: dict[str, Any] = {"cli": "command", "command": ["true"], "tries": 3, "backoff": 10}
        self.folder = folder
        self.study = StudyLedger(Ledger(folder / "ledger.db"), "s")
        self.study.open(None, "min")
        self.prompts: list[str] = []
        self.answers: list[str | Failure | LabError | Callable[[], Any]] = []
        self.reports: list[tuple[str, str]] = []
        self.check: Callable[[Proposal], list[Problem]] | None = None
        self.stand_in: StandIn | None = None
        self.session: AgentSession | None = None
        self.now = time.time()
        monkeypatch.setattr(agent, "run_agent", self.run_agent)
        monkeypatch.setattr(agent.clock, "now", lambda: self.now)

    def run_agent(self, spec: Any, prompt: str, *, log: Path, **given: Any) -> Answer:
        self.prompts.append(prompt)
        answer = self.answers.pop(0)
        if isinstance(answer, LabError):
            raise answer
        failure = answer.why if isinstance(answer, Failure) else ""
        if callable(answer):
            answer()
        text = answer if isinstance(answer, str) else ""
        return Answer(not failure, text, failure, Usage(), self.session, Summary(), 0.0, 1, 0, log)

    def proposer(self) -> AgentProposer:
        study = {"study": "s", "launch": {"command": ["true"]}, "proposers": [{"agent": self.settings}]}
        (self.folder / "lab.yaml").write_text(json.dumps(study))
        lab = load_lab(self.folder)
        settings = lab.study(None).proposers[0].agent
        assert settings is not None
        guard = Guard({"x": Knob.make("x", {"type": "int", "low": 0, "high": 9}), "s": Knob.make("s", {"type": "str"})})
        outputs = self.folder / "outputs"
        return AgentProposer(
            settings, lab.study(None), guard, self.folder, outputs, History(self.study, outputs), {"x": 1, "s": "best"},
            lambda: "", check=self.check, report=lambda call, why, outcome: self.reports.append((why, outcome)),
            stand_in=lambda: self.stand_in,
        )  # fmt: skip

    def propose(self, proposer: AgentProposer, n: int = 1) -> list[Proposal]:
        """Ask until it has proposed, given up, or waits before it repeats a call."""
        while True:
            with self.study.ledger.write():
                proposals = proposer.propose(self.study, n)
            if proposals or proposer._call is None:
                return proposals
            time.sleep(0.001)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


def test_a_failed_call_is_repeated_after_a_wait_that_doubles(lab: Lab) -> None:
    lab.answers = [Failure("network error"), Failure("rate limit"), answer("x@set=2")]
    proposer = lab.proposer()
    for wait in (10, 20):
        assert lab.propose(proposer) == []
        assert proposer.thinking
        assert proposer.failure is None
        lab.now += wait - 1
        calls = len(lab.prompts)
        assert lab.propose(proposer) == []
        assert len(lab.prompts) == calls, "too early"
        lab.now += 1
    (proposal,) = lab.propose(proposer)
    assert proposal.edits == ("x@set=2",)
    assert [why for why, _ in lab.reports] == ["the call failed: network error", "the call failed: rate limit"]
    assert [call["answer"]["ok"] for call in lab.study.agent_calls()] == [False, False, True]


def test_after_its_retries_a_stand_in_proposes_and_the_agent_is_asked_again_later(lab: Lab) -> None:
    lab.settings |= {"call_retries": 1}
    lab.stand_in = StandIn()
    lab.answers = [Failure("down")] * 3 + [answer("x@set=2")]
    proposer = lab.proposer()
    lab.propose(proposer)
    lab.now += 10
    (instead,) = lab.propose(proposer)
    assert (instead.proposer, instead.edits) == ("search", ("x@set=5",))
    assert "in place of the agent" in instead.reason
    assert "2 calls in a row failed: down" in str(proposer.failure)
    (again,) = lab.propose(proposer)  # the next iteration, at once: a dead service is left alone
    assert again.proposer == "search"
    assert len(lab.prompts) == 2
    lab.now += 20
    (third,) = lab.propose(proposer)  # a single call, and no further wait, as long as it is down
    assert third.proposer == "search"
    assert len(lab.prompts) == 3
    lab.now += 40
    (proposal,) = lab.propose(proposer)
    assert proposal.proposer == "agent"
    assert proposer.failure is None


def test_without_a_stand_in_it_says_when_it_is_asked_again(lab: Lab) -> None:
    lab.settings |= {"call_retries": 0}
    lab.answers = [Failure("down")]
    proposer = lab.proposer()
    assert lab.propose(proposer) == []
    assert not proposer.thinking
    assert proposer.retry_at == lab.now + 10
    assert "down" in str(proposer.problem)


def test_the_wait_is_bounded(lab: Lab) -> None:
    lab.settings |= {"call_retries": 0}
    lab.answers = [Failure("down")] * 40
    proposer = lab.proposer()
    for _ in range(40):
        lab.propose(proposer)
        lab.now += agent.MAX_WAIT_S
    assert not lab.answers


@pytest.mark.parametrize("trouble", [LabError("the agent's program 'codex' was not found"), LabError("KEY is not set")])
def test_what_keeps_a_call_from_starting_is_a_failed_call(lab: Lab, trouble: LabError) -> None:
    lab.answers = [trouble, answer("x@set=2")]
    proposer = lab.proposer()
    assert lab.propose(proposer) == []
    lab.now += 10
    (proposal,) = lab.propose(proposer)
    assert proposal.edits == ("x@set=2",)
    assert trouble.message in lab.reports[0][0]


def test_a_place_for_the_answer_that_is_taken_is_a_failed_call(lab: Lab) -> None:
    (lab.folder / "proposals").write_text("no folder")
    lab.answers = [answer("x@set=2")]
    proposer = lab.proposer()
    assert lab.propose(proposer) == []
    assert "it cannot be called" in lab.reports[0][0]
    (lab.folder / "proposals").unlink()
    lab.now += 10
    assert lab.propose(proposer)


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_folder_in_the_place_of_the_answer_is_refused_and_cleared(lab: Lab, ends_well: bool) -> None:
    file = lab.folder / "proposals" / "next_config.json"
    lab.answers = [lambda: (file / "inside").mkdir(parents=True), answer("x@set=2") if ends_well else "nothing"]
    lab.settings |= {"tries": 2}
    assert bool(lab.propose(lab.proposer())) is ends_well
    assert "is a folder" in lab.prompts[1]
    assert not file.is_dir()


def test_after_a_crash_the_count_of_failures_continues(lab: Lab) -> None:
    lab.settings |= {"call_retries": 2}
    lab.stand_in = StandIn()
    lab.answers = [Failure("down")] * 3
    lab.propose(lab.proposer())
    lab.now += 10
    second = lab.proposer()  # another engine
    lab.propose(second)
    assert len(lab.prompts) == 2
    third = lab.proposer()
    assert lab.propose(third) == []  # it waits as the one before would have
    assert len(lab.prompts) == 2
    lab.now += 20
    (instead,) = lab.propose(third)
    assert instead.proposer == "search"
    fourth = lab.proposer()
    (instead,) = lab.propose(fourth)
    assert instead.proposer == "search"
    assert len(lab.prompts) == 3
    assert "3 calls in a row failed" in str(fourth.failure)


def test_after_an_orderly_end_the_count_starts_at_zero(lab: Lab) -> None:
    lab.settings |= {"call_retries": 0}
    lab.answers = [Failure("down"), answer("x@set=2")]
    session = lab.study.begin_session("host", 1, 1)
    lab.propose(lab.proposer())
    lab.study.end_session(session, "done")
    assert lab.propose(lab.proposer())


def test_a_call_that_looplab_itself_ended_is_not_a_failure(lab: Lab) -> None:
    log = lab.folder / "agent_runs" / "call.jsonl"
    log.parent.mkdir()
    log.write_text(json.dumps({"type": "looplab.end", "ok": False, "why": "stopped"}) + "\n")
    with lab.study.ledger.write():
        lab.study.record_agent(AgentAskedEvent(call="call", log=log.name, n=1, attempt=2, parent=None, cli="command"))
    lab.answers = [answer("x@set=2")]
    assert lab.propose(lab.proposer())
    assert not lab.reports
    assert [call["attempt"] for call in lab.study.agent_calls()] == [2, 2]


def test_what_the_decision_would_refuse_goes_back_and_reaches_the_next_question_too(lab: Lab) -> None:
    def check(proposal: Proposal) -> list[Problem]:
        x = int(proposal.edits[0].partition("=")[2])
        return [] if x > 7 else [Problem("config", x, "repeated", f"an exact repeat of run 000{x}")]

    lab.check = check
    lab.settings |= {"tries": 2}
    lab.answers = [answer("x@set=2"), answer("x@set=3"), answer("x@set=4"), answer("x@set=8"), answer("x@set=9")]
    proposer = lab.proposer()
    assert lab.propose(proposer) == []
    assert "exact repeat of run 0002" in lab.prompts[1].partition("could not be used")[2]
    assert lab.propose(proposer)
    third, fourth = lab.prompts[2:]
    assert "exact repeat of run 0002" in third
    assert "exact repeat of run 0003" in third.partition("Why your earlier answers were rejected")[2]
    assert "exact repeat of run 0004" in fourth.partition("Your last answer could not be used")[2]
    assert lab.propose(proposer)
    assert "could not be used" not in lab.prompts[4]
    rejected = lab.study.proposals("rejected")
    assert [row.edits for row in rejected] == [("x@set=2",), ("x@set=3",), ("x@set=4",)]


def test_a_template_without_places_for_them_gets_what_people_say_and_what_was_refused(lab: Lab) -> None:
    (lab.folder / "next.md").write_text("Improve it.\n{answer}\n")
    lab.settings |= {"prompt": "next.md", "tries": 1}
    lab.study.say("try lower rates\x1b[2J" + "!" * 50_000)
    lab.answers = ["I would rather not.", answer("x@set=2")]
    proposer = lab.proposer()
    lab.propose(proposer)
    lab.propose(proposer)
    assert "try lower rates!" in lab.prompts[0]
    assert "\x1b" not in lab.prompts[0]
    assert len(lab.prompts[0]) < 10_000
    assert "contains no JSON" in lab.prompts[1]


def test_a_conversation_that_continues_still_hears_what_people_say(lab: Lab) -> None:
    lab.session = AgentSession("s1")
    lab.study.say("lower rates, please")
    lab.answers = ["nothing", answer("x@set=2")]
    lab.propose(lab.proposer())
    assert lab.prompts[1].startswith("Your last answer could not be used")
    assert "lower rates, please" in lab.prompts[1]


def test_a_submitted_command_that_was_refused_is_in_the_question(lab: Lab) -> None:
    jobs = StudyLedger(lab.study.ledger, "s.jobs")
    number = jobs.propose("job", ['argv@new=["python", "train.py"]'], "mine")
    assert number is not None
    assert refuse(jobs, number, "the budget of 3 runs is used")
    lab.answers = [answer("x@set=2")]
    lab.propose(lab.proposer())
    assert "train.py" in lab.prompts[0]
    assert "the budget of 3 runs is used" in lab.prompts[0]


def test_the_prompt_of_the_drone_recipe_has_places_for_all_of_it() -> None:
    text = read_template(Path(str(files("looplab.recipes") / "drone" / "prompts" / "next.md")))
    assert all(f"{{{name}}}" in text for name in ALWAYS)


@pytest.mark.parametrize("searches", [True, False], ids=["search", "steps"])
def test_the_stand_in_proposes_what_would_be_accepted_by_steps_from_the_champion_if_need_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searches: bool
) -> None:
    if not searches:
        monkeypatch.setattr(SearchProposer, "propose", lambda *given: [])
    recipe = Path(str(files("looplab.recipes") / "drone"))
    shutil.copytree(recipe, tmp_path / "lab")
    lab = load_lab(tmp_path / "lab")
    setup = prepare(lab, lab.study(None), RunOptions(mode="quick"))
    study = StudyLedger(Ledger(tmp_path / "ledger.db"), "drone")
    study.open("mean_reward", "max")
    decider = Decider(setup, study)

    def check(proposal: Proposal) -> tuple[Problem, ...]:
        try:
            decider.decide(proposal)
        except ProposalRejected as rejected:
            return rejected.problems
        return ()

    stand_in = make_stand_in(setup, History(study, tmp_path / "outputs"), check)
    assert stand_in is not None
    with study.ledger.write():
        (first,) = stand_in.propose(study, 1)
        study.propose(first.proposer, first.edits, first.reason)
        (second,) = stand_in.propose(study, 1)
    assert not check(first)
    assert not check(second)
    assert first.edits != second.edits
    assert searches or all("a step of" in one.reason for one in (first, second))


def test_long_refusals_are_cut_in_record_and_prompt(lab: Lab) -> None:
    lab.settings |= {"tries": 2}
    lab.answers = [answer(*(f"{'y' * 900}{i}@set=1" for i in range(500))), answer("x@set=2")]
    lab.propose(lab.proposer())
    assert len(lab.prompts[1]) < 20_000
    recorded = lab.study.agent_calls()[0]["answer"]
    assert len(json.dumps(recorded)) < 5_000


def test_null_in_a_partial_config_means_not_given(lab: Lab) -> None:
    lab.answers = [json.dumps({"x": 2, "s": None})]
    (proposal,) = lab.propose(lab.proposer())
    assert proposal.edits == ("x@set=2",)
    file = lab.folder / "person.json"
    file.write_text(json.dumps({"x": 3, "s": None}))
    guard = Guard({"x": Knob.make("x", {"type": "int"}), "s": Knob.make("s", {"choices": [None, "a"]})})
    NextConfig(file, lab.folder / "outputs", {"x": 1, "s": "a"}, guard=guard).refresh(lab.study)
    assert lab.study.waiting(1)[0].edits == ("x@set=3", "s@set=null")


def test_the_nearest_value_of_an_explicit_null_is_not_the_word_none(lab: Lab) -> None:
    lab.settings |= {"tries": 2}
    lab.answers = [answer("s@set=null"), answer("x@set=2")]
    lab.propose(lab.proposer())
    assert "'None'" not in lab.prompts[1]
    assert "nearest: 'best'" in lab.prompts[1]


def test_invalid_json_of_a_person_is_reported_with_its_line_and_column(tmp_path: Path) -> None:
    study = StudyLedger(Ledger(tmp_path / "ledger.db"), "s")
    study.open(None, "min")
    file = tmp_path / "next_config.json"
    for text in ('{\n  "x": 1,\n  "y" 2\n}', '\n\n // a comment\n{"x": 1}'):
        file.write_text(text)
        person = NextConfig(file, tmp_path / "outputs", {"x": 1})
        person.refresh(study)
        assert "line 3 column" in str(person.problem), person.problem
