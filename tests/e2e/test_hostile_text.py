"""Texts and numbers that JSON, UTF-8, a terminal or a spreadsheet cannot hold: every command works, and so does resume."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from typing import Any

import pytest

ESCAPES = "\x1b]0;title\x07\x1b[2Jgone\u202e <script>alert(1)</script> [x](http://evil) \r"
LARGE = 99999999999999999999
BYTES = os.fsdecode(b"latin \xe9\xff")
"""An argument, a variable or a path with bytes that are not UTF-8."""


def assert_clean(text: str) -> None:
    assert not any(character in text for character in "\x1b\x07\r\u202e"), text


@pytest.mark.slow
def test_hostile_proposals_are_rejected_or_run_and_shown_without_harm(lab: Any) -> None:
    lab.configure(knobs={**lab.study["knobs"], "note": {"type": "int"}})
    lab.base(note=1)
    entries = [
        {"edits": ["train.lr@set=0.2"], "reason": "faster \ud83d\ude80 \ud83d" + ESCAPES},
        {"edits": [f"train.batch@set={LARGE}"], "reason": "=1+1"},
        {"edits": [f"note@set={LARGE}"], "reason": "=1+1"},
    ]
    lab.write("queue.yaml", json.dumps({"proposals": entries}))
    lab.configure(proposers=[{"queue": "queue.yaml"}])
    assert lab("propose", "--change", f"train.batch@set={LARGE}", "--reason", BYTES, code=None).code in (0, 2)
    lab("say", f"be bold {BYTES}{ESCAPES}")
    ran = lab("run")
    assert_clean(ran.out + ran.err)
    assert lab.count(state="ended", status="ok") == 3
    assert lab.ask("SELECT count(*) FROM proposals WHERE status='waiting'") == [(0,)]
    lab("resume")
    for command in (("status",), ("show", "2"), ("show", "3"), ("diff", "2", "3"), ("plan",), ("verify",),
                    ("query", "SELECT id, reason FROM runs")):  # fmt: skip
        assert_clean(lab(*command).out)
    assert str(LARGE) in lab("diff", "1", "3", "--json").out
    lab("show", "3", "--json").json()
    assert "🚀" in lab("query", "SELECT reason FROM runs WHERE n=2", "--json").json()[0]["reason"]
    for number in ("99999999999999999999999", "²", BYTES):
        assert lab("show", number, code=2).err
    lab("report")
    book, report = ((lab.outputs() / name).read_text() for name in ("labbook.md", "report.md"))
    for text in (book, report):
        assert_clean(text)
        assert "faster 🚀" in text
        assert "\\<script>" in text
        assert not re.search(r"(?<!\\)\]\(http", text)
    for row in csv.reader(io.StringIO(lab("query", "SELECT reason FROM runs", "--csv").out)):
        assert not row[0].startswith("=")


@pytest.mark.slow
def test_files_for_people_may_hold_any_bytes(lab: Any) -> None:
    lab("run")
    with (lab.outputs() / "labbook.md").open("ab") as book:
        book.write(b"- l\xe9gende \xff\n")
    for name in ("BEST", "LATEST"):
        (lab.outputs() / name).write_bytes(b"\xff\xfe")
    lab("resume")
    lab("report")
    (lab.outputs() / "BEST").write_bytes(b"\xff\xfe")
    lab("reindex")
    assert lab.count(status="ok") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["latin-1", "ascii"],
)
def test_terminals_of_any_encoding_show_a_study(lab: Any, env: dict[str, str]) -> None:
    lab.queue("train.lr@set=0.2", reason="faster 🚀 →")
    lab.env |= env
    lab("run")
    assert lab.count(status="ok") == 2
    for command in ("status", "show", "report", "resume"):
        lab(command)
    assert lab("query", "SELECT reason FROM runs WHERE n=2", "--json").json() == [{"reason": "faster 🚀 →"}]
    assert "no run" in json.loads(lab("show", "→", "--json", code=2).out)["error"]


@pytest.mark.slow
def test_a_lab_whose_path_metrics_and_secrets_are_not_unicode(make_lab: Any) -> None:
    lab = make_lab(BYTES)
    trainer = (lab.folder / "train.py").read_text()
    lab.write("train.py", trainer.replace('"loss":', '"half \\ud83d": 1, "loss":'))
    lab.env |= {"MY_API_KEY": BYTES + " long enough"}
    lab.configure(objective={"metric": "half \ud83d", "goal": "min"})
    lab("run", code=None)
    lab.configure(objective={"metric": "loss", "goal": "min"})
    lab("resume", code=None)
    lab.queue("train.lr@set=0.2")
    lab("run")
    assert lab.count(status="ok") >= 2
    for command in (("status",), ("show",), ("show", "--json"), ("report",), ("resume",), ("verify",)):
        lab(*command)


def test_metrics_of_any_name_do_not_end_the_engine(lab: Any) -> None:
    trainer = (lab.folder / "train.py").read_text()
    lab.write("train.py", trainer.replace('"loss":', '"half \\ud83d" + "\\x1b[2J": 1, "lost":'))
    ended = lab("run", code=None)
    assert_clean(ended.out)
    assert lab.count(state="ended") >= 1
    resumed = lab("resume", code=None)
    assert "Traceback" not in resumed.err
    assert_clean(lab("show", "1").out)
    lab("show", "1", "--json").json()
