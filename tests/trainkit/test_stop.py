"""Graceful stop: real signals to real processes, what they save, and how they exit."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.conftest import PATIENCE_S

from looplab import trainkit
from looplab.errors import LabError

TRAINER = """
import os, signal, sys, time
from looplab import trainkit

kind, target = sys.argv[1], sys.argv[2]
if "alone" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the parent may ignore them: nohup, or `&` in a script
    signal.signal(signal.SIGINT, signal.default_int_handler)


def save():
    if kind == "hangs in save":
        print("saving", flush=True)
        while True:
            time.sleep(0.01)
    if kind == "save fails":
        raise OSError("no disk")
    open(target, "w").write(f"{stop.name}")


with trainkit.stopping(save=save) as stop:
    if kind == "worker":
        reader, writer = os.pipe()
        if (worker := os.fork()) == 0:
            os.write(writer, b"x")  # Python drops signals that arrive during a fork
            while True:
                time.sleep(0.01)
        os.read(reader, 1)
        print(worker, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), flush=True)
    else:
        print("ready", flush=True)
    while not stop and kind not in ("ends", "worker", "raises", "exits"):
        time.sleep(0.01)
    if kind in ("raises", "raises after"):
        raise RuntimeError("the loss is odd")
    if kind == "exits":
        sys.exit(5)
print("after", bool(stop))
"""


class Trainer(subprocess.Popen[bytes]):
    """A trainer that has printed its first line."""

    def __init__(self, kind: str, target: Path, *before: str) -> None:
        argv = [*before, sys.executable, "-c", TRAINER, kind, str(target), *([] if before else ["alone"])]
        super().__init__(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)  # must not read ahead
        self.first = self.line()

    def line(self) -> str:
        assert self.stdout is not None
        return self.stdout.readline().decode().strip()

    def end(self) -> tuple[str, str]:
        """Wait for the process; return the rest of its stdout and stderr."""
        stdout, stderr = self.communicate(timeout=PATIENCE_S)
        return stdout.decode(), stderr.decode()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_sets_the_exit_code(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with Trainer("trains", tmp_path / "saved") as process:
        process.send_signal(number)
        stdout, errors = process.end()
    assert (process.returncode, stdout, errors) == (code, "", "")
    assert (tmp_path / "saved").read_text() == number.name


def test_an_exception_saves_and_propagates(tmp_path: Path) -> None:
    with Trainer("raises", tmp_path / "saved") as process:
        _, errors = process.end()
    assert process.returncode == 1
    assert "RuntimeError: the loss is odd" in errors
    assert (tmp_path / "saved").read_text() == "None"


def test_an_exception_after_a_signal_is_printed_but_the_exit_code_is_the_signals(tmp_path: Path) -> None:
    with Trainer("raises after", tmp_path / "saved") as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.end()
    assert process.returncode == 143
    assert "RuntimeError: the loss is odd" in errors
    assert (tmp_path / "saved").exists()


def test_sys_exit_in_the_block_keeps_its_code(tmp_path: Path) -> None:
    with Trainer("exits", tmp_path / "saved") as process:
        process.end()
    assert process.returncode == 5


def test_a_block_that_ends_normally_saves_nothing(tmp_path: Path) -> None:
    with Trainer("ends", tmp_path / "saved") as process:
        stdout, _ = process.end()
    assert (process.returncode, stdout) == (0, "after False\n")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills_the_process(tmp_path: Path, second: signal.Signals) -> None:
    with Trainer("hangs in save", tmp_path / "saved") as process:
        process.send_signal(signal.SIGTERM)
        assert process.line() == "saving"
        process.send_signal(second)
        process.end()
    assert process.returncode == -second  # which a shell shows as 130 or 143


def test_a_save_that_fails_is_not_hidden(tmp_path: Path) -> None:
    with Trainer("save fails", tmp_path / "saved") as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.end()
    assert process.returncode == 1
    assert "OSError: no disk" in errors


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    with Trainer("trains", tmp_path / "saved", "nohup") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        process.end()
    assert process.returncode == 143
    assert (tmp_path / "saved").read_text() == "SIGTERM"


def test_a_forked_worker_still_dies_from_a_signal(tmp_path: Path) -> None:
    with Trainer("worker", tmp_path / "saved") as process:
        subprocess.run(["kill", "-TERM", process.first], check=True)
        stdout, _ = process.end()
    assert stdout.splitlines() == ["-15", "after False"]
    assert process.returncode == 0


def test_previous_handlers_are_restored_and_other_threads_are_rejected() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with trainkit.stopping() as stop:
        assert not stop
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    messages: list[str] = []

    def elsewhere() -> None:
        with pytest.raises(LabError) as rejected, trainkit.stopping():
            pass
        messages.append(str(rejected.value))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread only" in messages[0]
