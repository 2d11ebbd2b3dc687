"""A trainer that leaves what no trainer should, seen from the command line: its run is noted, the study continues."""

from __future__ import annotations

from pathlib import Path

import pytest

MESSY = """\
import json, os, sys
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
run_dir, metrics = os.environ["LOOPLAB_RUN_DIR"], os.environ["LOOPLAB_METRICS"]
record = os.path.join(run_dir, "record")
lr = config["train"]["lr"]
if lr == 0.2:  # spoils everything that it can reach
    os.symlink("metrics.jsonl", metrics)
    os.rename(os.path.join(record, "train.log"), os.path.join(run_dir, "kept.log"))
    os.mkfifo(os.path.join(record, "train.log"))
    os.makedirs(os.path.join(record, "summary.json", "inner"))
    os.makedirs(os.path.join(record, "exit.json", "inner"))
    open(os.path.join(run_dir, "trainer_summary.json"), "w").write('{"a":' * 990 + "1" + "}" * 990)
else:
    print("a" * 90 + "b")
    open(metrics, "w").write(json.dumps({"step": 1, "loss": lr}) + "\\n")
"""


@pytest.mark.slow
def test_a_run_that_spoils_its_folder_costs_neither_the_study_nor_a_resume(lab) -> None:
    lab.write("train.py", MESSY)
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    lab("run", env={"LAB_TEST_API_KEY": "0123456789abcdef"})
    assert lab.ask("SELECT status FROM runs ORDER BY n") == [("ok",)] * 3
    assert lab.ask("SELECT objective FROM runs ORDER BY n") == [(0.1,), (None,), (0.3,)]
    for _ in range(2):
        lab("resume", env={"LAB_TEST_API_KEY": "0123456789abcdef"})
    spoilt = lab.runs()[1]
    kinds = {what for (what,) in lab.ask("SELECT kind FROM events WHERE run=?", spoilt.name)}
    assert "unreadable" in kinds
    assert "loss" in lab("show", "1").out
    assert "train.log" in lab("logs", "2", code=2).err
    assert lab("show", "2").code == 0
    assert lab("report").code == 0


def test_a_pattern_that_backtracks_does_not_hold_up_the_study(lab) -> None:
    """Without a limit, each run would take longer than the universe is old."""
    lab.write("train.py", MESSY)
    lab.configure(measure={"stdout": ["(?P<bad>(a+)+$)"], "sources": ["jsonl", "stdout"]})
    lab.queue("train.lr@set=0.3")
    done = lab("run")
    assert lab.ask("SELECT status, objective FROM runs ORDER BY n") == [("ok", 0.1), ("ok", 0.3)]
    assert "(a+)+$" in done.out
    summary: dict[str, list[str]] = lab.all("summary.json")[0]
    assert any("takes more than" in note for note in summary["notes"])


def test_the_last_lines_of_a_log_are_shown(lab) -> None:
    lab("run")
    log: Path = lab.runs()[0] / "record" / "train.log"
    whole = log.read_text()
    assert lab("logs", "1").out == whole
    assert lab("logs", "1", "-n", "1").out == "the end\n"
    assert lab("logs", "1", "-n", "1", "--json").json()["log"] == "the end\n"
    assert lab("logs", "1", "--follow").out == whole
