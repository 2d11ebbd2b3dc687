"""`looplab top` with the installed command: in a pipe, and on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.cli.top import braille
from looplab.measure.base import Curve

LAB = """\
study: tiny
launch: {command: ["{python}", train.py]}
base: base.json
objective: {metric: loss, goal: min}
knobs: {lr: {type: float, low: 1e-4, high: 1, log: true}}
budget: {runs: 3}
"""
TRAIN = """\
import json, os
print("a line of the log \\x1b[31mred")
with open(os.environ["LOOPLAB_RUN_DIR"] + "/metrics.jsonl", "w") as out:
    for step in range(5):
        out.write(json.dumps({"step": step, "loss": 3.0 - step / 2}) + "\\n")
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("top")
    (folder / "lab.yaml").write_text(LAB)
    (folder / "base.json").write_text('{"lr": 0.1}')
    (folder / "train.py").write_text(TRAIN)
    done = looplab(folder, "run")
    assert done.returncode == 0, done.stderr
    return folder


def looplab(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "looplab", *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)


def test_in_a_pipe_it_prints_one_plain_frame(lab: Path) -> None:
    done = looplab(lab, "top")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "Best so far: 0001" in done.stdout
    assert "runs" in done.stdout


def test_as_json_it_has_the_facts_and_the_sentences(lab: Path) -> None:
    facts = json.loads(looplab(lab, "top", "tiny", "--json").stdout)
    assert facts["counts"] == {"ok": 1}
    assert facts["happened"]["ended"] == 1
    assert facts["headline"].startswith("Best so far")
    assert [one["name"] for one in facts["budget"]][:2] == ["rounds", "runs"]
    assert facts["lanes"][0]["bars"][0]["kind"] == "ok"


def test_an_unknown_study_and_a_bad_duration_are_errors_for_people(lab: Path) -> None:
    for words in (("top", "other"), ("top", "--since", "soon")):
        done = looplab(lab, *words)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr


class Terminal:
    """`looplab top` on a pseudo-terminal."""

    def __init__(self, folder: Path, columns: int, rows: int) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.theirs = theirs
        self.before = termios.tcgetattr(theirs)
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "looplab", "top"], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs,
            env=environment, start_new_session=True,
        )  # fmt: skip
        self.text = ""

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.text:
            assert time.monotonic() < deadline, f"{words!r} was never drawn: {self.text[-2000:]!r}"
            if select.select([self.ours], [], [], 0.2)[0]:
                self.text += os.read(self.ours, 1 << 16).decode(errors="replace")

    def press(self, keys: str) -> None:
        self.text = ""
        os.write(self.ours, keys.encode())

    def ended(self) -> int:
        while self.process.poll() is None:
            if select.select([self.ours], [], [], 0.1)[0]:
                self.text += os.read(self.ours, 1 << 16).decode(errors="replace")
        while select.select([self.ours], [], [], 0.1)[0]:
            self.text += os.read(self.ours, 1 << 16).decode(errors="replace")
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture(params=[(80, 24), (200, 60)], ids=["80x24", "200x60"])
def terminal(lab: Path, request: Any) -> Iterator[Terminal]:
    opened = Terminal(lab, *request.param)
    yield opened
    opened.close()


def test_keys_open_a_log_and_a_curve_and_q_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    terminal.wait_for("q quit")
    assert "\x1b[?1049h" in terminal.text
    terminal.press("\r")
    terminal.wait_for("a line of the log red")
    assert "\x1b[31mred" not in terminal.text
    terminal.press("qc")
    terminal.wait_for("step 0 to 4")
    terminal.press("qa")
    terminal.wait_for("no alarms")
    terminal.press("qjjk\t")
    terminal.wait_for("q quit")
    terminal.press("q")
    assert terminal.ended() == 0
    assert "\x1b[?1049l" in terminal.text
    assert "\x1b[?25h" in terminal.text
    assert termios.tcgetattr(terminal.theirs) == terminal.before


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(lab: Path, ending: signal.Signals) -> None:
    terminal = Terminal(lab, 100, 30)
    try:
        terminal.wait_for("q quit")
        os.kill(terminal.process.pid, ending)
        terminal.ended()
        assert "\x1b[?1049l" in terminal.text
        assert termios.tcgetattr(terminal.theirs) == terminal.before
        assert "Traceback" not in terminal.text
    finally:
        terminal.close()


def test_a_curve_in_dots_spans_its_box_and_rises_where_the_values_rise() -> None:
    lines = braille(Curve([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, float("nan"), 3.0]), 10, 4)
    assert [len(line) for line in lines] == [10, 10, 10, 10]
    first = [next(i for i, cell in enumerate(line) if cell != "⠀") for line in lines]
    assert first == sorted(first, reverse=True)
    assert first[-1] == 0
    assert braille(Curve([], []), 3, 2) == ["⠀⠀⠀", "⠀⠀⠀"]
