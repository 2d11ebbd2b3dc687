"""What people see on terminals of any width, and in their first minutes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from looplab.cli import output, top
from looplab.cli.labs import how_to_continue
from looplab.cli.live import LiveView, Row, ScreenState
from looplab.ledger.view import RunRow

COLUMNS = ["run", "round", "by", "slot", "status", "val/accuracy", "verdict", "time", "why"]
WHY = "0005-fnn7 again, as it must lose again before 0037-uu5t replaces it"
ROWS = [["0050-zppx", "3", "judge", "cpu0", "ok", "0.96889", "confirmation of 0005-fnn7", "14.3s", WHY]] * 3


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_wide_table_is_readable_on_a_narrow_terminal(
    width: int, term: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", term)
    output.table(COLUMNS, ROWS)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= width
    assert len(lines) <= {80: 2 + 3 * 3, 120: 1 + 3 * 3, 200: 1 + 3}[width]
    assert sum("0050-zppx" in line for line in lines) == 3
    if width != 120:  # there the column of sentences has room for several lines
        assert " ".join(" ".join(lines).split()).count("0005-fnn7 again, as it must lose") == 3


def test_a_table_in_a_pipe_is_never_cut(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    output.table(COLUMNS, ROWS)
    assert capsys.readouterr().out.splitlines()[1].endswith(WHY)


@pytest.mark.parametrize("width", [80, 120])
def test_what_runs_is_named_whole_on_a_narrow_terminal(width: int) -> None:
    """Only the reason gives way: runs, slots, steps and times are never cut."""
    run = RunRow(**{**dict.fromkeys(field.name for field in fields(RunRow)), "id": "0050-zppx", "reason": WHY})
    state = ScreenState(
        study="digits", metric="val/accuracy", running=(Row(run, "cpu0", 120.0, 0.96889),) * 2, done=3, total=9,
        failed=0, best=None, left_s=None,
    )  # fmt: skip
    console = Console(width=width, file=io.StringIO())
    console.print(LiveView(lambda: state)._draw())
    head, *rows = console.file.getvalue().splitlines()[:3]
    assert head.split() == ["slot", "run", "step", "val/accuracy", "time", "why"]
    assert [row.split()[:5] for row in rows] == [["cpu0", "0050-zppx", "120", "0.96889", "-"]] * 2
    assert max(map(len, rows)) <= width


@pytest.mark.parametrize("width", [50, 60, 80, 200])
def test_a_table_of_top_has_reasons_where_there_is_room(width: int) -> None:
    rows = [[(text, "") for text in ("0036-d9h8", "inconclusive", "-0.001 [-0.006, 0.003]", WHY)]] * 2
    shown = str(top._columns(("judged", "verdict", "better by, 95 %", "why"), rows, width)).splitlines()
    assert all(line.split()[0] in ("judged", "0036-d9h8") and cell_len(line) <= width for line in shown)
    assert ("why" in shown[0]) == (width > 60)
    assert all(WHY in line for line in shown[1:]) == (width == 200)
    assert all(line.endswith("…") for line in shown[1:]) == (width == 80)


def test_a_study_that_is_done_says_how_to_continue() -> None:
    assert how_to_continue("all 3 rounds are done") == "; `looplab run --rounds 4` would continue"
    assert how_to_continue("all 20 runs are done, 2 of them submitted commands").endswith("--runs 21` would continue")
    assert how_to_continue("1 run is done") == "; `looplab run --runs 2` would continue"
    assert how_to_continue("stopped by a person") == ""


def test_the_first_lab_is_not_offered_as_a_script_of_ones_own(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "looplab"]
    made = subprocess.run([*words, "init"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "for a lab of your own script" not in made.stdout
    assert (tmp_path / "quickstart" / "lab.yaml").exists()
    none = subprocess.run([*words, "status"], cwd=tmp_path, capture_output=True, text=True)
    assert none.returncode == 2
    assert "`looplab init train.py` for your own script" in none.stderr


def test_every_line_of_the_help_fits(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "looplab", "--help"], capture_output=True, text=True, check=True)
    assert "..." not in done.stdout.replace("[ARGS]...", "")
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_terminal_is_drawn_without_anything_from_the_network(tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
    import take_pictures

    svg = take_pictures.terminal_picture(tmp_path, ["--version", "init --help"])
    assert "$" in svg
    assert "@font-face" not in svg
    times = [float(found) for found in re.findall(r"animation: appear 1ms linear ([\d.]+)s both", svg)]
    assert len(times) == svg.count("<text") - 1  # all but the title
    assert times == sorted(times)
    assert times[-1] > take_pictures.PAUSE_S
    assert "url(http" not in svg


def test_no_word_of_a_table_is_broken_on_a_very_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")
    output.table(COLUMNS, ROWS)
    output.table(("metric", "first", "last", "best", "best_step", "n"), [("val/accuracy", *["0.973333"] * 4, "150")])
    shown = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 40
    words = " ".join(shown.split())
    assert words.count("status ok") == words.count("verdict confirmation of 0005-fnn7") == words.count(WHY) == 3
    assert "best_step 0.973333 n 150" in words  # a number without its name says nothing


def test_a_table_of_top_has_whole_columns_on_a_very_narrow_terminal() -> None:
    rows = [[(text, "") for text in ("", "0036-d9h8", "inconclusive", "-0.001 [-0.006, 0.003]", "0.2 / 0.05", WHY)]]
    names = ("", "judged", "verdict", "better by, 95 %", "p / bar", "why")
    assert str(top._columns(names, rows, 40)).splitlines()[1].split() == ["0036-d9h8", "inconclusive"]


def test_our_signs_are_ascii_where_a_terminal_has_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.accept_any_text()
    output.say("lr 0.1 → 0.2, 0.97 ± 0.01 …, 学")
    assert raw.getvalue() == b"lr 0.1 -> 0.2, 0.97 +/- 0.01 ..., \\u5b66\n"


@pytest.mark.parametrize("words", [["run", "--rounds", "x"], ["propose"], ["nosuch"], ["diff", "1"]])
def test_a_wrong_call_is_json_too_when_asked(words: list[str], tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "looplab", *words, "--json"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    told = json.loads(done.stdout)
    assert told["error"] in done.stderr.replace("\n", " ")
    assert set(told) == {"error", "file", "line", "hint"}


def test_a_running_run_says_for_how_long_and_that_it_is_silent(lab) -> None:
    lab.base(wait="gate")
    trainer = (lab.folder / "train.py").read_text()
    lab.write("train.py", re.sub(r'^print\("lr is".*$', "", trainer, flags=re.MULTILINE))
    engine = lab.start("run")
    lab.until_at_work()
    shown = lab("show", "LATEST").out
    silent = lab("logs", "LATEST")
    lab.open_gate()
    engine.ended()
    assert re.search(r"^  running for [\d.]+s$", shown, re.MULTILINE)
    assert not silent.out
    assert "(running) has printed nothing yet" in silent.err
    assert lab("diff", "1", "configs/base.json").out == "the configs are the same\n"
    run = lab("show", "1", "--json").json()["run"]["id"]
    assert lab("diff", "1", "BEST", "--json").json()["a"] == run
    assert "configs/nosuch.json: there is no such file" in lab("diff", "1", "configs/nosuch.json", code=2).err
