"""status, show, logs, diff: for people, for pipes, for programs."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from tests.conftest import PATIENCE_S

LONG = "a reason that is much longer than any terminal is wide, so that it would be cut " * 3


@pytest.fixture(scope="module")
def done(make_shared_lab):
    """A lab in which three runs have ended, the second the best, and the third failed."""
    lab = make_shared_lab("lab")
    lab.queue(["train.lr@set=0.3"], ["train.lr@set=0.4", "exit@set=3"], reason=LONG.strip())
    lab("run", "--concurrency", "1")
    return lab


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


# -- status


def test_status_of_a_lab_that_never_ran_says_what_to_do(lab) -> None:
    before = lab.tree()
    assert "looplab run" in lab("status").out
    assert lab("status", "--json").json()["studies"][0]["counts"] == {}
    assert lab.tree() == before


def test_status_in_a_pipe_is_plain_and_nothing_is_cut(done) -> None:
    out = done("status").out
    assert "\x1b" not in out
    assert LONG.strip() in out
    rows = [line.split() for line in out.splitlines() if re.match(r"\d{4}-", line)]
    assert [row[:5] for row in rows] == [
        [done.runs()[0].name, "1", "base", "cpu0", "ok"],
        [done.runs()[1].name, "2", "queue", "cpu0", "ok"],
        [done.runs()[2].name, "3", "queue", "cpu0", "failed"],
    ]
    assert f"best: {done.runs()[1].name} with loss = 0.33333" in out


def test_status_in_json(done) -> None:
    told = done("status", "--json").json()
    (study,) = told["studies"]
    assert told["lab"] == str(done.folder)
    assert study["counts"] == {"ok": 2, "failed": 1}
    assert study["best"]["id"] == done.runs()[1].name
    assert (study["used"]["rounds"], study["used"]["runs"]) == (3, 3)
    assert (study["engine"], study["waiting"], study["running"]) == (None, 0, [])


def test_status_in_a_terminal_is_a_table_in_colour(done) -> None:
    terminal = done.terminal("status")
    assert terminal.ended() == 0
    assert "\x1b[32mok" in terminal.shown
    assert "\x1b[31mfailed" in terminal.shown
    assert max(len(line) for line in plain(terminal.shown).splitlines()) <= 100
    assert done.runs()[2].name in plain(terminal.shown)


def test_status_says_how_many_runs_it_does_not_show(lab) -> None:
    lab.queue(*(f"train.lr@set=0.{number}" for number in range(11, 21)))
    shown = lab("run").out
    assert shown.rstrip().endswith("next: looplab ui, or looplab show BEST")
    assert "the latest 8 of 11 runs" in lab("status").out
    assert (
        f"next: cd {lab.folder.name} && looplab ui" in lab("run", "--lab", str(lab.folder), cwd=lab.folder.parent).out
    )


def test_status_while_a_study_runs_names_the_engine_and_what_runs(lab) -> None:
    lab.base(wait="gate")
    engine = lab.start("run")
    lab.until_at_work()
    out = lab("status").out
    assert f"engine running (pid {engine.pid})" in out
    assert re.search(rf"{lab.runs()[0].name} .* running", out)
    assert lab("status", "--json").json()["studies"][0]["running"][0]["id"] == lab.runs()[0].name
    lab.open_gate()
    engine.ended()


def test_status_after_a_killed_engine_tells_of_resume(lab) -> None:
    lab.base(wait="gate")
    engine = lab.start("run")
    lab.until_at_work()
    engine.process.kill()
    engine.process.wait()
    assert "looplab resume" in lab("status").out
    lab.open_gate()
    lab("resume")


def test_a_run_in_a_terminal_shows_its_slots_and_leaves_the_table(lab, until) -> None:
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.3")
    terminal = lab.terminal("run", "--concurrency", "1")
    lab.until_at_work()
    run = lab.runs()[0].name
    until(lambda: re.search(rf"cpu0 +{run} +3 ", plain(terminal.shown)), "the slot with its step")
    assert re.search(r"0/\d runs", plain(terminal.shown))
    lab.open_gate()
    assert terminal.ended() == 0
    assert f"{lab.runs()[1].name} *" in plain(terminal.shown)
    assert "best: " in plain(terminal.shown)


# -- show


def test_show_tells_where_a_run_comes_from_and_what_it_measured(done) -> None:
    out = done("show", "BEST").out
    run = done.runs()[1]
    assert f"run {run.name} of toy, round 2" in out
    assert str(run) in out
    assert LONG.strip() in out
    assert re.search(r"train\.lr +0\.1 +0\.3", out)
    assert re.search(r"loss +1 +0\.333333 +0\.333333 +3 +3", out)
    assert "\x1b" not in out


@pytest.mark.parametrize("name", ["2", "BEST", "best", "full"])
def test_a_run_is_found_by_id_number_and_pointer(done, name: str) -> None:
    run = done.runs()[1].name
    assert done("show", run if name == "full" else name, "--json").json()["run"]["id"] == run


def test_show_without_a_name_is_the_latest(done) -> None:
    assert done("show", "--json").json()["run"]["id"] == done.runs()[2].name


def test_show_of_a_failed_run_says_how_it_ended(done) -> None:
    assert "failed (exit code 3)" in done("show", "3").out


def test_show_in_json_has_all_there_is(done) -> None:
    told = done("show", "2", "--json").json()
    assert told["folder"] == str(done.runs()[1])
    assert told["changes"]["base"] == {"train.lr": {"old": 0.1, "new": 0.3}}
    assert told["summary"]["metrics"]["loss"]["n"] == 3
    assert told["about"]["reason"] == LONG.strip()


def test_show_and_diff_in_a_terminal_are_tables(done) -> None:
    for command in (["show", "2"], ["diff", "1", "2"]):
        terminal = done.terminal(*command)
        assert terminal.ended() == 0
        assert "\x1b[1m" in terminal.shown
        assert re.search(r"train\.lr +0\.1 +0\.3", plain(terminal.shown))


# -- logs


def test_logs_are_what_the_run_printed(done) -> None:
    assert done("logs", "2").out == "lr is 0.3\nthe end\n"
    assert done("logs", "2", "-n", "1").out == "the end\n"
    assert done("logs", "2", "--json").json()["log"] == "lr is 0.3\nthe end\n"


def test_logs_follow_until_the_run_ends(lab, until) -> None:
    lab.base(wait="gate")
    engine = lab.start("run")
    lab.until_at_work()
    follower = lab.start("logs", "-f")
    until(lambda: "lr is 0.1" in follower.out, "the first line")
    assert follower.process.poll() is None
    lab.open_gate()
    assert follower.ended().out == "lr is 0.1\nthe end\n"
    engine.ended()


def test_logs_follow_ends_though_no_engine_is_there_to_record_the_end(lab, until) -> None:
    lab.base(wait="gate")
    engine = lab.start("run")
    lab.until_at_work()
    engine.process.kill()
    engine.process.wait()
    follower = lab.start("logs", "-f")
    until(lambda: "lr is 0.1" in follower.out, "the first line")
    lab.open_gate()
    assert follower.ended().out.endswith("the end\n")


def test_letters_written_in_two_parts_are_followed_whole(lab, until) -> None:
    trainer = (
        "import os, sys, time\n"
        "os.write(1, '学'.encode()[:1])\n"
        "while not os.path.exists('gate'): time.sleep(0.01)\n"
        "os.write(1, '学'.encode()[1:] + b'\\n')\n"
    )
    lab.write("train.py", trainer)
    lab.configure(objective=None)
    engine = lab.start("run")
    until(lambda: any((run / "record/train.log").exists() for run in lab.runs()), "the log")
    follower = lab.start("logs", "-f")
    until(lambda: any((run / "record/train.log").stat().st_size == 1 for run in lab.runs()), "half a letter")
    lab.open_gate()
    assert follower.ended().out == "学\n"
    engine.ended()


def test_logs_into_a_reader_that_stops_early_is_quiet(lab) -> None:
    lab("run")
    (lab.runs()[0] / "record/train.log").write_text("a line\n" * 200_000)
    from_command = subprocess.Popen(
        [lab.command, "logs"], cwd=lab.folder, env=lab.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert from_command.stdout is not None
    assert from_command.stderr is not None
    assert from_command.stdout.readline() == b"a line\n"
    from_command.stdout.close()
    assert from_command.stderr.read() == b""
    from_command.stderr.close()
    from_command.wait(PATIENCE_S)


# -- diff


def test_diff_of_two_runs_and_of_a_file(done) -> None:
    out = done("diff", "1", "2").out
    assert re.search(r"train\.lr +0\.1 +0\.3", out)
    assert done("diff", "configs/base.json", "2", "--json").json()["changes"] == {"train.lr": {"old": 0.1, "new": 0.3}}
    assert "the same" in done("diff", "1", "configs/base.json").out


def test_diff_of_two_files_needs_no_lab(lab, tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("x: 1\ny: [1, 2]\n")
    (tmp_path / "b.json").write_text(json.dumps({"x": 2, "y": [1, 2]}))
    told = lab("diff", "a.yaml", "b.json", "--json", cwd=tmp_path).json()
    assert told["changes"] == {"x": {"old": 1, "new": 2}}


# -- where one stands


def test_the_lab_is_found_from_a_folder_inside_it_and_by_name(done, tmp_path) -> None:
    inside = done("status", "--json", cwd=done.runs()[0]).json()
    outside = done("status", "--lab", done.folder, "--json", cwd=tmp_path).json()
    assert inside["studies"][0]["counts"] == outside["studies"][0]["counts"] == {"ok": 2, "failed": 1}
