"""What an agent changed is restored, also if the engine is killed while it restores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from looplab.agents import integrity
from looplab.agents.base import AgentSpec
from looplab.agents.integrity import CallGuard
from looplab.config.lab import load_lab
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger

FILES = {"train.py": "print(1)\n", "helper.py": "x = 1\n", "base.json": "{}\n"}
LAB = 'study: toy\nlaunch: {command: ["{python}", train.py]}\nbase: base.json\n'


class Killed(BaseException):
    """The engine ends here, as if it were killed."""


def make_guard(lab: Path, messages: list[str]) -> CallGuard:
    spec = AgentSpec(cli="command", command=("true",), dangerous=True)
    study = load_lab(lab).study("toy")
    answer = lab / "proposals" / "next_config.json"
    return CallGuard(spec, lab, lab / "outputs/toy", study, answer, lambda kind, text: messages.append(text))


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "lab.yaml").write_text(LAB)
    (tmp_path / "proposals").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def change_files(lab: Path) -> None:
    (lab / "train.py").write_text("print('mine')\n")
    (lab / "helper.py").unlink()
    (lab / "sitecustomize.py").write_text("import os\n")


def run_call(lab: Path, record: StudyLedger, messages: list[str]) -> CallGuard:
    guard = make_guard(lab, messages)
    guard.prepare(record)
    guard.begin("call-1")
    change_files(lab)
    guard.finish()
    return guard


def is_as_before(lab: Path) -> bool:
    return {path.name: path.read_text() for path in lab.glob("*.py")} == {
        name: text for name, text in FILES.items() if name.endswith(".py")
    }


def open_record(lab: Path) -> StudyLedger:
    record = StudyLedger(Ledger(lab / ".looplab/ledger.db"), "toy")
    record.open("loss", "min")
    return record


def test_changed_removed_and_added_files_are_restored(lab: Path) -> None:
    messages: list[str] = []
    record = open_record(lab)
    guard = run_call(lab, record, messages)
    with record.ledger.write():
        void = guard.rule(record, "call-1")
    assert void is not None
    assert is_as_before(lab)
    aside = lab / ".looplab/quarantine/call-1"
    assert (aside / "train.py").read_text() == "print('mine')\n"
    assert (aside / "sitecustomize.py").exists()


def test_a_file_that_the_engine_is_writing_during_the_snapshot_is_not_blamed_on_the_agent(lab: Path) -> None:
    run = lab / "outputs/toy/0001-abcd/record"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    unfinished = run / ".tmp-17-3"
    unfinished.write_text("{}")
    guarded = integrity.Guarded(lab, lab / "outputs/toy", (), ("0001-abcd",))
    snapshot = integrity.FileSnapshot(guarded, keeps=True)
    unfinished.rename(run / "summary.json")
    assert snapshot.changes() == []
    (run / "config.json").write_text("[]")
    assert [change.path.name for change in snapshot.changes()] == ["config.json"]


def test_a_kill_between_the_ruling_and_its_commit_leaves_the_answer_void(lab: Path) -> None:
    record = open_record(lab)
    guard = run_call(lab, record, [])
    voids = []

    def rule_and_die() -> None:
        with record.ledger.write():
            voids.append(guard.rule(record, "call-1"))
            raise Killed

    with pytest.raises(Killed):
        rule_and_die()
    assert voids != [None]
    assert is_as_before(lab)  # so nothing but the guard's own notes knows of the changes
    again = make_guard(lab, [])
    again.prepare(record)
    again.recover("call-1")
    with record.ledger.write():
        assert again.rule(record, "call-1") is not None
    assert [event.kind for event in record.ledger.events("toy")].count("files changed") == 1
    assert list((lab / ".looplab" / integrity.CALLS).iterdir()) == []


def test_an_answer_is_void_if_the_notes_about_the_files_are_gone(lab: Path) -> None:
    record = open_record(lab)
    run_call(lab, record, [])
    for path in (lab / ".looplab" / integrity.CALLS).iterdir():
        path.unlink()
    messages: list[str] = []
    again = make_guard(lab, messages)
    again.prepare(record)
    again.recover("call-1")
    with record.ledger.write():
        void = again.rule(record, "call-1")
    assert void is not None
    assert "unknown" in void
    assert messages == [void]


@pytest.mark.parametrize("when", ["before the record", "before each file is restored", "while a file is replaced"])
def test_a_kill_while_files_are_restored_loses_none(lab: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    record = open_record(lab)
    guard = run_call(lab, record, [])

    def die(*arguments: Any, **keywords: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        if when == "before the record":
            patched.setattr(StudyLedger, "record_agent", die)
        elif when == "before each file is restored":
            patched.setattr(integrity.FileSnapshot, "restore", die)
        else:
            patched.setattr(integrity, "write_atomic", lambda path, *rest: save(path, *rest))

            def save(path: Path, *rest: Any) -> None:
                if path.suffix == ".py":
                    raise Killed
                real_write(path, *rest)

            real_write = monkeypatch_free_write
        with pytest.raises(Killed), record.ledger.write():
            guard.rule(record, "call-1")

    messages: list[str] = []
    again = make_guard(lab, messages)
    again.prepare(record)
    again.recover("call-1")
    with record.ledger.write():
        void = again.rule(record, "call-1")
    assert void is not None  # the answer counts for nothing
    assert (lab / "train.py").exists()
    events = record.ledger.events("toy")
    recorded = [file for event in events if event.kind == "files changed" for file in event.data["files"]]
    assert {file["path"] for file in recorded} == {"train.py", "helper.py", "sitecustomize.py"}
    if when == "before the record":
        assert is_as_before(lab)
        assert all(file["restored"] for file in recorded)
    else:
        assert "NOT restored: " in void  # said, since the content was in the killed engine's memory


monkeypatch_free_write = integrity.write_atomic
