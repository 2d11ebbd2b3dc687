"""Whatever an agent answers: what cannot be used is refused with its reason, also when a kept answer is read again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.agents.base import Answer, Summary, Usage
from looplab.config.lab import load_lab
from looplab.decide import agent
from looplab.decide.agent import AgentProposer, read_answer
from looplab.decide.base import Proposal
from looplab.decide.history import History
from looplab.decide.next_config import NextConfig
from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.guard.knobs import Knob
from looplab.ledger.catalogue import AgentAskedEvent
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger

GOOD = json.dumps({"proposals": [{"edits": ["x@set=2"], "reason": "why not"}]})
HOSTILE = {
    "deep": "[" * 100_000,
    "closed": '{"proposals": ' + "[" * 3_000 + "]" * 3_000 + "}",
    "config": '{"x": ' * 150 + "1" + "}" * 150,
    "digits": '{"proposals": [{"edits": ["x@set=1"], "reason": ' + "9" * 5_000 + "}]}",
    "edit": json.dumps({"proposals": [{"edits": ["x@set=" + "9" * 5_000]}]}),
    "large": json.dumps({"proposals": [{"edits": ["x@set=99999999999999999999"]}]}),
    "partial": json.dumps({"x": 10**400}),
    "half": json.dumps({"proposals": [{"edits": ["x@set=\ud83d"], "reason": "\ud83d", "parent": "\ud83d"}]}),
    "kinds": json.dumps({"proposals": [{"edits": [["x"]]}]}),
    "number": "3",
    "fences": "```" + "\n" * 50_000,
    "long": json.dumps({"proposals": [{"edits": ["x@set=1"], "reason": "x" * 200_000}]}),
    "longer": '"' + "x" * 1_100_000 + '"',
    "nothing": "",
}


@given(st.text(st.characters(exclude_categories=()), max_size=60) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["proposals", "edits", "reason", "parent", "config", "x", "\ud83d"]), inner, max_size=3),
    max_leaves=8,
).map(json.dumps))  # fmt: skip
def test_any_answer_holds_proposals_of_valid_text_or_is_refused(text: str) -> None:
    try:
        drafts = read_answer(text)
    except LabError as error:
        str(error).encode()
        return
    for draft in drafts:
        json.dumps([draft.edits, draft.partial, draft.reason], ensure_ascii=False).encode()


class Lab:
    """A study with an agent that gives scripted answers."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = {"cli": "command", "command": ["true"], "tries": 3}
        study = {"study": "s", "launch": {"command": ["true"]}, "proposers": [{"agent": spec}]}
        (folder / "lab.yaml").write_text(json.dumps(study))
        self.folder = folder
        self.lab = load_lab(folder)
        self.study = StudyLedger(Ledger(folder / "ledger.db"), "s")
        self.study.open(None, "min")
        self.file = folder / "proposals" / "next_config.json"
        self.prompts: list[str] = []
        self.answers: list[str | Callable[[], Any]] = []
        monkeypatch.setattr(agent, "run_agent", self.answer)

    def answer(self, spec: Any, prompt: str, *, log: Path, **given: Any) -> Answer:
        self.prompts.append(prompt)
        answer = self.answers.pop(0)
        text = answer if isinstance(answer, str) else ""
        if not isinstance(answer, str):
            answer()
        return Answer(True, text, "", Usage(), None, Summary(), 0.0, 1, 0, log)

    def proposer(self) -> AgentProposer:
        settings = self.lab.study(None).proposers[0].agent
        assert settings is not None
        guard = Guard({"x": Knob.make("x", {"type": "int", "low": 0, "high": 9})})
        outputs = self.folder / "outputs"
        return AgentProposer(settings, self.lab.study(None), guard, self.folder, outputs,
                             History(self.study, outputs), {"x": 1}, lambda: "")  # fmt: skip

    def propose(self, proposer: AgentProposer) -> list[Proposal]:
        """Ask until it has proposed or given up."""
        while True:
            with self.study.ledger.write():
                proposals = proposer.propose(self.study, 2)
            if proposals or not proposer.thinking:
                return proposals
            time.sleep(0.001)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_refused_with_its_reason_and_the_agent_is_asked_again(lab: Lab, name: str) -> None:
    lab.answers = [HOSTILE[name], GOOD]
    (proposal,) = lab.propose(lab.proposer())
    assert proposal.edits == ("x@set=2",)
    assert "could not be used" in lab.prompts[1]
    lab.prompts[1].encode()
    assert lab.study.ledger.first_broken_link() is None


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_that_was_kept_is_refused_after_a_crash(lab: Lab, name: str) -> None:
    log = lab.folder / "agent_runs" / "call.jsonl"
    log.parent.mkdir()
    log.write_text(json.dumps({"type": "looplab.end", "ok": True, "text": HOSTILE[name][:900_000]}) + "\n")
    log.with_suffix(".answer.json").write_text(HOSTILE[name])
    with lab.study.ledger.write():
        lab.study.record_agent(AgentAskedEvent(call="call", log=log.name, n=1, attempt=1, parent=None, cli="command"))
    for _ in range(2):  # engines
        lab.answers = [GOOD]
        (proposal,) = lab.propose(lab.proposer())
        assert proposal.edits == ("x@set=2",)


def test_a_log_that_somebody_has_rewritten_does_not_end_the_study(lab: Lab) -> None:
    (lab.folder / "agent_runs").mkdir()
    for n, record in enumerate(({}, {"ok": True, "usage": 3}, {"ok": 1, "usage": {"usd": []}, "session": [1]})):
        log = lab.folder / "agent_runs" / f"{n}.jsonl"
        log.write_text(json.dumps({"type": "looplab.end", **record}) + "\n")
        with lab.study.ledger.write():
            lab.study.record_agent(
                AgentAskedEvent(call=str(n), log=log.name, n=1, attempt=3, parent=None, cli="command")
            )
        lab.answers = [GOOD] * 3
        lab.propose(lab.proposer())
        assert lab.study.agent_calls()[-1]["answer"] is not None


@pytest.mark.parametrize("kind", ["pipe", "link", "large", "bytes"])
def test_an_answer_file_that_is_not_a_small_regular_file_is_refused(lab: Lab, kind: str) -> None:
    secret = lab.folder / "secret.json"
    secret.write_text(GOOD)

    def write() -> None:
        if kind == "pipe":
            os.mkfifo(lab.file)
        elif kind == "link":
            lab.file.symlink_to(secret)
        else:
            lab.file.write_bytes(b" " * 2_000_000 if kind == "large" else b'{"proposals": "\xff')

    lab.answers = [write, GOOD]
    (proposal,) = lab.propose(lab.proposer())
    assert proposal.edits == ("x@set=2",)
    word = {"pipe": "not a file", "link": "symbolic link", "large": "larger than", "bytes": "not JSON"}[kind]
    assert word in lab.prompts[1]


def test_people_s_own_file_may_hold_anything(lab: Lab) -> None:
    lab.file.parent.mkdir()
    person = NextConfig(lab.file, lab.folder / "outputs", {"x": 1})
    for text in HOSTILE.values():
        lab.file.write_bytes(text.encode("utf-8", "surrogatepass"))
        person.refresh(lab.study)
        assert person.problem is None or person.problem.encode()
    lab.file.unlink()
    os.mkfifo(lab.file)
    person.refresh(lab.study)
    assert "not a file" in str(person.problem)
    person.close()
