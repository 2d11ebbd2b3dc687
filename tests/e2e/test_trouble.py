"""What the world does to a study that runs: things vanish, disks fill up, trainers misbehave."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def statuses(lab) -> list[str]:
    return [summary["status"] for summary in lab.all("summary.json")]


# -- things that vanish


def test_a_base_config_that_is_deleted_does_not_stop_the_queue(lab) -> None:
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    engine = lab.start("run", "--concurrency", "1")
    lab.until_at_work()
    (lab.folder / "configs/base.json").unlink()
    lab.open_gate()
    engine.ended()
    assert statuses(lab) == ["ok"] * 3
    assert [config["train"]["lr"] for config in lab.all("config.json")] == [0.1, 0.2, 0.3]


def test_a_script_that_is_deleted_fails_the_runs_and_not_the_engine(lab) -> None:
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    engine = lab.start("run", "--concurrency", "1")
    lab.until_at_work()
    (lab.folder / "train.py").unlink()
    lab.open_gate()
    done = engine.ended()
    assert statuses(lab) == ["ok", "failed", "failed"]
    assert "train.py" in lab("logs", "2").out
    assert "a failed run: `looplab logs" in done.out


@pytest.mark.slow
def test_a_program_that_is_deleted_fails_the_runs_with_a_message(lab) -> None:
    program = lab.write("bin/trainer", f"#!/bin/sh\nexec {sys.executable} -S train.py\n")
    program.chmod(0o755)
    lab.configure(launch={"command": ["bin/trainer"]})
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    engine = lab.start("run", "--concurrency", "1")
    lab.until_at_work()
    program.unlink()
    lab.open_gate()
    done = engine.ended()
    assert statuses(lab) == ["ok", "failed", "failed"]
    assert "No such file or directory" in done.out
    assert "No such file or directory" in lab("show", "3").out
    lab("verify")


def test_a_run_whose_command_cannot_be_made_fails_with_the_reason(lab) -> None:
    lab.base(model={"lr": 1})
    lab.configure(launch={**lab.study["launch"], "config": {"as": "flags", "keys": "flat"}})
    done = lab("run", code=1)
    assert "--lr" in done.out
    assert "--lr" in lab("show", "1").out


def test_the_record_of_a_run_that_never_had_a_folder_is_whole(lab) -> None:
    lab.base(model={"lr": 1})
    lab.configure(launch={**lab.study["launch"], "config": {"as": "flags", "keys": "flat"}})
    lab("run", code=1)
    lab("verify")


def test_a_run_folder_that_is_deleted_under_its_training_does_not_stop_the_study(lab) -> None:
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.3")
    engine = lab.start("run", "--concurrency", "1", "--keep-going")
    lab.until_at_work()
    shutil.rmtree(lab.runs()[0])
    lab.open_gate()
    engine.ended()
    assert lab.count(state="ended") == 2
    assert statuses(lab) == ["ok"]
    assert "the run's folder is gone" in lab("verify", code=1).out


def test_a_run_whose_folder_is_deleted_is_not_started_a_second_time(lab) -> None:
    """Its folder is what shows that it was started; the ledger only knows that it was handed over."""
    lab.base(wait="gate")
    engine = lab.start("run")
    lab.until_at_work()
    run = lab.runs()[0]
    engine.process.kill()
    engine.process.wait()
    shutil.rmtree(run)
    lab.open_gate()
    lab("resume", code=None)
    events = lab("query", f"select kind from events where run = '{run.name}'", "--json").json()
    assert [event["kind"] for event in events].count("launched") == 1
    shown = lab("show", run.name, "--json").json()["run"]
    assert shown["status"] == "lost"
    assert not (run / "metrics.jsonl").exists()


def test_a_queue_that_is_broken_for_a_moment_does_not_end_the_engine(lab) -> None:
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.2", "wait@set=second")
    engine = lab.start("run", "--concurrency", "2")
    lab.until_at_work(2)
    good = (lab.folder / "queue.yaml").read_text()
    lab.write("queue.yaml", good + "  - {edits: [")
    lab.open_gate()
    lab.until_ended(2)
    lab.until_at_work()
    lab.write("queue.yaml", good + "  - {edits: [train.lr@set=0.4]}\n")
    lab.open_gate("second")
    engine.ended()
    assert statuses(lab) == ["ok"] * 4


def test_a_lab_file_that_breaks_while_a_study_runs_does_not_matter_to_it(lab) -> None:
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.2")
    engine = lab.start("run", "--concurrency", "1")
    lab.until_at_work()
    lab.write("lab.yaml", "study: [")
    lab.open_gate()
    engine.ended()
    assert statuses(lab) == ["ok", "ok"]


# -- trainers that misbehave

LINGERING = """\
import os, time
{leave}
if os.fork() == 0:
    {session}
    time.sleep(100)
    os._exit(0)
"""


@pytest.mark.parametrize("session", ["pass", "os.setsid()"], ids=["in its group", "in a session of its own"])
def test_what_a_trainer_leaves_behind_is_ended_and_its_slot_freed(lab, session: str) -> None:
    lab.write("train.py", LINGERING.format(leave="", session=session))
    lab.configure(launch={**lab.study["launch"], "cleanup_timeout": 0.2, "grace": 0.2}, objective=None)
    lab.queue("train.lr@set=0.2")
    lab("run", "--concurrency", "1")
    assert statuses(lab) == ["ok", "ok"]
    assert all(exit_["lingered"] for exit_ in lab.all("exit.json"))
    assert any("left processes behind" in note for note in lab.all("summary.json")[0]["notes"])
    marks = {f"LOOPLAB_RUN_DIR={run}".encode() for run in lab.runs()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                assert not marks & set((entry / "environ").read_bytes().split(b"\0"))


@pytest.mark.slow
def test_a_trainer_that_prints_megabytes_is_kept_whole(lab) -> None:
    line = "x" * 99
    lab.write("train.py", f"import sys\nfor _ in range(80_000):\n    sys.stdout.write('{line}\\n')\nprint('the end')\n")
    lab.configure(objective=None)
    lab("run")
    (run,) = lab.runs()
    assert (run / "record/train.log").stat().st_size == 80_000 * 100 + 8
    assert lab("logs", "-n", "2").out == f"{line}\nthe end\n"


@pytest.mark.slow
def test_a_trainer_that_prints_no_text_at_all_is_shown_anyway(lab) -> None:
    lab.write("train.py", "import os\nos.write(1, bytes(range(128, 256)) + b'\\x00\\n')\n")
    lab.configure(objective=None)
    lab("run")
    assert lab("logs").out.endswith("\n")
    assert (lab.runs()[0] / "record/train.log").read_bytes() == bytes(range(128, 256)) + b"\x00\n"


def test_a_trainer_that_is_killed_is_a_failed_run_with_its_signal(lab) -> None:
    lab.write("train.py", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    lab("run", code=1)
    assert lab.all("exit.json")[0]["signal"] == signal.SIGKILL
    assert "failed (signal 9)" in lab("show").out


@pytest.mark.slow
def test_a_missing_objective_is_told_and_never_counts(lab) -> None:
    lab.configure(objective={"metric": "reward", "goal": "max"})
    lab("run", code=1)
    (summary,) = lab.all("summary.json")
    assert summary["status"] == "ok"
    assert summary["objective"]["value"] is None
    assert "'reward' was not measured; the run measured 1 metric: loss" in lab("show").out
    assert not (lab.outputs() / "BEST").exists()


@pytest.mark.slow
def test_a_loss_that_is_no_number_never_wins(lab) -> None:
    trainer = (
        "import json, os\n"
        "config = json.load(open(os.environ['LOOPLAB_CONFIG']))\n"
        "loss = float('nan') if config['train']['lr'] == 0.2 else config['train']['lr']\n"
        "with open(os.environ['LOOPLAB_METRICS'], 'w') as file: print(json.dumps({'step': 1, 'loss': loss}), file=file)\n"
    )
    lab.write("train.py", trainer)
    lab.queue("train.lr@set=0.2", "train.lr@set=0.05")
    lab("run", "--concurrency", "1")
    assert lab.count(status="ok") == 3
    assert (lab.outputs() / "BEST").read_text().strip() == lab.runs()[2].name


# -- disks


@pytest.fixture
def small_disk(lab):
    """The lab's outputs on a disk of their own of two megabytes."""
    outputs = lab.folder / "outputs"
    outputs.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(outputs)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a disk of two megabytes cannot be mounted here: {mounted.stderr.strip()}")
    yield outputs
    subprocess.run(["umount", "-l", str(outputs)], check=True)


def remount(outputs: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(outputs)], check=True)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_is_told_and_nothing_is_lost(lab, small_disk) -> None:
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    remount(small_disk, "ro")
    done = lab("run", "--concurrency", "1", code=1)
    assert "Read-only file system" in done.err
    remount(small_disk, "rw")
    lab("resume")
    assert statuses(lab) == ["ok"] * 3
    lab("verify")


@pytest.mark.slow
def test_a_folder_that_becomes_read_only_is_told_and_resume_loses_nothing(lab, small_disk) -> None:
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    engine = lab.start("run", "--concurrency", "1", "--keep-going")
    lab.until_at_work()
    # The training's own open files keep a plain remount from succeeding.
    subprocess.run(["mount", "--bind", str(small_disk), str(small_disk)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(small_disk)], check=True)
        lab.open_gate()
        done = engine.ended(code=1)
        assert "looplab resume" in done.err
    finally:
        subprocess.run(["umount", "-l", str(small_disk)], check=True)
    lab("resume", code=None)
    assert sorted(statuses(lab))[-2:] == ["ok", "ok"]
    assert lab.count() == 3


def fill(disk: Path) -> Path:
    """Use up the disk to its last byte."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 65536)
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0")
    return filler


@pytest.mark.slow
def test_a_disk_that_is_full_from_the_start_is_told_and_nothing_is_lost(lab, small_disk) -> None:
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    filler = fill(small_disk)
    done = lab("run", code=1)
    assert "No space left on device" in done.err
    assert "looplab resume" in done.err
    filler.unlink()
    lab("resume")
    assert statuses(lab) == ["ok"] * 3
    assert lab.count() == 3
    lab("verify")


@pytest.mark.slow
def test_a_disk_that_fills_up_while_a_study_runs_is_told_and_nothing_is_lost(lab, small_disk) -> None:
    lab.base(wait="gate")
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    engine = lab.start("run", "--concurrency", "1")
    lab.until_at_work()
    (small_disk / "toy" / lab.runs()[0].name / "seen.json").write_text(" " * 8000)  # room for what the trainer writes
    filler = fill(small_disk)
    lab.open_gate()
    done = engine.ended(code=1)
    assert "No space left on device" in done.err
    assert "looplab resume" in done.err
    filler.unlink()
    lab("resume")
    assert statuses(lab) == ["ok"] * 3
    assert lab.count() == 3
    lab("verify")


@pytest.mark.slow
def test_a_disk_that_is_full_after_the_first_of_two_trainings_began_loses_neither(lab, small_disk) -> None:
    wait = "import os, time\nwhile not os.path.exists('gate'): time.sleep(0.01)\n"
    lab.write("train.py", wait + (lab.folder / "train.py").read_text())  # writes nothing as long as the disk is full
    lab.base(big="x" * 600_000)
    lab.queue("train.lr@set=0.2")
    filler = small_disk / "filler"
    filler.write_bytes(b"\0" * 1_100_000)  # the folder of one run fits, that of two does not
    done = lab("run", code=1)
    assert "No space left on device" in done.err
    filler.unlink()
    lab.open_gate()
    lab("resume")
    assert statuses(lab) == ["ok", "ok"]
    assert lab.count() == 2
    assert len(lab.runs()) == 2
    lab("verify")
