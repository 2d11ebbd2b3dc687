"""Whatever a run leaves in its folder is that run's problem: the study continues, and so does the next engine."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from looplab.config.lab import load_lab
from looplab.launch.base import Delayed, Ended, Exit, LaunchEvent, LaunchSpec, Place, Started
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop import engine as engine_module
from looplab.loop.engine import Engine
from looplab.loop.events import EngineEvent
from looplab.loop.outcome import Ending, HaltError
from looplab.loop.setup import RunOptions, prepare
from looplab.measure import tail
from looplab.measure.run_metrics import RunMetrics
from looplab.runs import folder as run_folder
from looplab.watch.watcher import Watcher

STUDY: dict[str, Any] = {
    "study": "toy",
    "launch": {"command": ["{python}", "train.py"]},
    "base": ["base.json"],
    "objective": {"metric": "score", "goal": "max"},
    "knobs": {"x": {"type": "int", "low": 0, "high": 30}},
    "proposers": [{"queue": "queue.yaml"}],
    "slots": {"count": 1, "gpus": "none", "cores": "none"},
}
SECRET = "0123456789abcdef0123456789abcdef"

Mess = Callable[[Path, Path], None]
"""What a trainer does to its run folder and to the record in it."""


class MessyExecutor:
    """Trains in the moment it is asked to; the run with x = 1 leaves a mess."""

    def __init__(self, mess: Mess) -> None:
        self._mess = mess
        self.events: deque[LaunchEvent] = deque()

    def start(self, spec: LaunchSpec, after: str | None = None) -> None:
        x = json.loads(Path(spec.env["LOOPLAB_CONFIG"]).read_text())["x"]
        Path(spec.env["LOOPLAB_METRICS"]).write_text(json.dumps({"step": 1, "score": x}) + "\n")
        record = spec.record_dir or spec.run_dir
        (record / "train.log").write_text(f"x is {x}\n")
        now = time.time()
        self.events.append(Started(spec.run_id, Place("here"), now))
        self.events.append(Ended(spec.run_id, Exit(0, started=now, ended=now)))
        if x == 1:
            self._mess(spec.run_dir, record)

    def cancel(self, run_id: str) -> None:
        """It has ended already."""

    def stop(self, run_id: str, reason: str, grace: float) -> None:
        """It has ended already."""

    def adopt(self, run_id: str, run_dir: Path, record_dir: Path | None = None) -> bool:
        return False

    def poll(self, timeout: float) -> list[LaunchEvent]:
        if self.events:
            return [self.events.popleft()]
        time.sleep(min(timeout, 0.001))
        return []

    def wake(self) -> None:
        """Nobody waits long."""

    def close(self) -> None:
        """There is nothing to let go of."""


class SmallLab:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.news: list[EngineEvent] = []
        folder.mkdir()
        (folder / "lab.yaml").write_text(json.dumps(STUDY))
        (folder / "base.json").write_text('{"x": 0}')
        self.queue(1, 2)

    def queue(self, *values: int) -> None:
        entries = [{"edits": [f"x@set={x}"], "reason": f"x is {x}"} for x in values]
        (self.folder / "queue.yaml").write_text(json.dumps({"proposals": entries}))

    def configure(self, **changes: Any) -> None:
        (self.folder / "lab.yaml").write_text(json.dumps({**STUDY, **changes}))

    def engine(self, mess: Mess) -> Engine:
        lab = load_lab(self.folder)
        setup = prepare(lab, lab.study(None), RunOptions())
        self.ledger = Ledger(lab.ledger_path)
        return Engine(setup, self.ledger, MessyExecutor(mess), self.news.append)

    def run(self, mess: Mess = lambda run_dir, record: None) -> None:
        try:
            assert self.engine(mess).run().ending == Ending.DONE
        finally:
            self.ledger.close()

    def read(self) -> tuple[dict[int, RunRow], list[Any]]:
        """The runs by their x, and the events about what could not be read."""
        ledger = Ledger(self.folder / ".looplab" / "ledger.db")
        study = StudyLedger(ledger, "toy")
        runs = {int(run.reason.rpartition(" ")[2]) if run.reason.startswith("x is") else 0: run for run in study.runs()}
        events = [event for event in ledger.events("toy") if event.kind == "unreadable"]
        ledger.close()
        return runs, events


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallLab:
    monkeypatch.setenv("LAB_TEST_API_KEY", SECRET)
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "locks"))
    return SmallLab(tmp_path / "lab")


def replaced(path: Path, *, by: str) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
    if by == "folder":
        (path / "inner").mkdir(parents=True)
    elif by == "pipe":
        os.mkfifo(path)
    elif by == "text":
        path.write_text("not a folder")
    else:
        path.symlink_to({"itself": path.name, "zero": "/dev/zero", "memory": "/proc/self/mem"}[by])


MESSES: dict[str, Mess] = {
    f"{name} is {by}": lambda run_dir, record, name=name, by=by: replaced(
        (run_dir if name in ("metrics.jsonl", "progress.csv", "trainer_summary.json") else record) / name, by=by
    )
    for name in (
        *("metrics.jsonl", "progress.csv", "trainer_summary.json"),
        *("train.log", "summary.json", "exit.json", "process.json", "run.json", "notes.md", "metrics.parquet"),
    )
    for by in ("folder", "pipe", "itself", "zero", "memory")
} | {
    "deep metrics": lambda run_dir, record: none(
        (run_dir / "metrics.jsonl").write_text('{"a": ' * 990 + "1" + "}" * 990)
    ),
    "deep summary": lambda run_dir, record: none(
        (run_dir / "trainer_summary.json").write_text('{"a": ' * 990 + "1" + "}" * 990)
    ),
    "empty process.json": lambda run_dir, record: none((record / "process.json").write_text("{}")),
    "empty exit.json": lambda run_dir, record: none((record / "exit.json").write_text("{}")),
    "no record": lambda run_dir, record: shutil.rmtree(record),
    "a text for a record": lambda run_dir, record: replaced(record, by="text"),
    "a link for a record": lambda run_dir, record: replaced(record, by="itself"),
    "no folder": lambda run_dir, record: shutil.rmtree(run_dir),
    "a folder like a temporary file": lambda run_dir, record: (record / ".tmp-1-1").mkdir(),
    "half a name": lambda run_dir, record: none(
        (run_dir / "metrics.jsonl").write_text('{"score \\ud83d": 1, "b": NaN}\n')
    ),
}


def none(value: object) -> None:
    """For what returns something, where nothing is wanted."""


@pytest.mark.parametrize("mess", MESSES.values(), ids=MESSES.keys())
def test_a_run_that_leaves_a_mess_ends_and_the_study_continues(lab: SmallLab, mess: Mess) -> None:
    lab.run(mess)
    runs, _ = lab.read()
    assert [runs[x].status for x in (0, 1, 2)] == ["ok"] * 3
    assert runs[2].objective == 2.0
    lab.queue(1, 2, 3)
    lab.run()
    runs, _ = lab.read()
    assert runs[3].objective == 3.0


def test_a_file_that_cannot_be_read_is_a_note_and_an_event(lab: SmallLab, monkeypatch: pytest.MonkeyPatch) -> None:
    from looplab.measure.jsonl import JsonlSource

    poll = JsonlSource.poll

    def broken(self: JsonlSource, final: bool = False, until: float | None = None) -> Any:
        batch = poll(self, final, until)
        if any(1.0 in curve.values for curve in batch.values()):
            raise RecursionError("too deep")
        return batch

    monkeypatch.setattr(JsonlSource, "poll", broken)
    lab.run()
    runs, events = lab.read()
    assert (runs[1].status, runs[1].objective) == ("ok", None)
    assert runs[2].objective == 2.0
    assert [(event.run, event.data["what"]) for event in events] == [(runs[1].id, "metrics.jsonl")]
    summary = json.loads((lab.folder / "outputs/toy" / runs[1].id / "record/summary.json").read_text())
    assert any("metrics.jsonl could not be read: RecursionError" in note for note in summary["notes"])
    assert any("metrics.jsonl could not be read" in item.text for item in lab.news if item.kind == "ended")


def test_half_a_measurement_is_no_objective(lab: SmallLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last value that could be read is not the last value."""
    from looplab.measure.jsonl import JsonlSource

    poll = JsonlSource.poll
    begun: set[Path] = set()

    def broken(self: JsonlSource, final: bool = False, until: float | None = None) -> Any:
        if self.path in begun:
            raise MemoryError
        batch = poll(self, final, until)
        if batch:
            begun.add(self.path)
        return batch

    monkeypatch.setattr(JsonlSource, "poll", broken)
    monkeypatch.setattr(engine_module, "PORTION_S", 0.0)
    monkeypatch.setattr(tail, "PORTION", 64)
    rows = "".join(json.dumps({"step": n, "score": n}) + "\n" for n in range(20))
    lab.configure(keep_going=True)
    lab.run(lambda run_dir, record: none((run_dir / "metrics.jsonl").write_text(rows)))
    runs, _ = lab.read()
    assert runs[1].objective is None
    summary = json.loads((lab.folder / "outputs/toy" / runs[1].id / "record/summary.json").read_text())
    assert any("does not count" in note for note in summary["notes"])


def test_watch_rules_that_fail_on_one_run_do_not_end_the_study(lab: SmallLab, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Watcher, *arguments: object) -> Any:
        raise OverflowError("too large")

    monkeypatch.setattr(Watcher, "look", broken)
    lab.configure(watch=[{"when": "score.last > 100"}])
    lab.run()
    runs, events = lab.read()
    assert [runs[x].objective for x in (0, 1, 2)] == [0.0, 1.0, 2.0]
    assert {event.data["what"] for event in events} == {"watch rules"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_fault_of_the_disk_halts_the_engine_and_names_the_file(
    lab: SmallLab, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write = run_folder.write_json

    def full(path: Path | str, data: Any) -> str:
        if str(path).endswith("summary.json"):
            raise OSError(number, os.strerror(number), str(path))
        return write(path, data)

    monkeypatch.setattr(run_folder, "write_json", full)
    with pytest.raises(HaltError, match=r"record/summary\.json"):
        lab.run()
    monkeypatch.setattr(run_folder, "write_json", write)
    executor = MessyExecutor(lambda run_dir, record: None)
    open_run = next(iter(Ledger(lab.folder / ".looplab/ledger.db").rows("SELECT id FROM runs WHERE state='running'")))
    executor.adopt = lambda run_id, *_: not executor.events.append(Ended(run_id, Exit(0, started=1.0, ended=2.0)))  # type: ignore[method-assign,func-returns-value,assignment]
    engine = lab.engine(lambda run_dir, record: None)
    engine._executor = executor
    assert engine.run().ending == Ending.DONE
    lab.ledger.close()
    assert {run.status for run in lab.read()[0].values()} == {"ok"}
    assert open_run["id"] in {run.id for run in lab.read()[0].values()}


def test_an_error_without_a_file_name_names_the_outputs(lab: SmallLab, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("looplab.report.labbook.append", full)
    with pytest.raises(HaltError, match=r"cannot write .*outputs/toy: No space left"):
        lab.run()


def test_a_long_log_is_read_in_portions_and_the_engine_hears_meanwhile(
    lab: SmallLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose log takes many portions ends whole; between two portions, the engine looks at what people ask."""
    monkeypatch.setattr(engine_module, "PORTION_S", 0.0)
    monkeypatch.setattr(tail, "PORTION", 1000)
    heard: list[int] = []
    finish = RunMetrics.finish

    def counting(self: RunMetrics, exit_: Exit, until: float | None = None) -> bool:
        heard.append(len(asked))
        return finish(self, exit_, until)

    asked: list[None] = []
    obey = Engine._handle_commands

    def obeying(self: Engine) -> None:
        asked.append(None)
        obey(self)

    monkeypatch.setattr(RunMetrics, "finish", counting)
    monkeypatch.setattr(Engine, "_handle_commands", obeying)
    rows = "".join(json.dumps({"step": n, "score": n}) + "\n" for n in range(400))
    lab.run(lambda run_dir, record: none((run_dir / "metrics.jsonl").write_text(rows)))
    runs, _ = lab.read()
    assert runs[1].objective == 399.0
    assert len(set(heard)) > 5


def test_a_secret_in_a_log_is_hidden_and_the_log_is_read_once(lab: SmallLab) -> None:
    def mess(run_dir: Path, record: Path) -> None:
        (record / "train.log").write_text(f"key {SECRET}\nstep: 1 printed: 2\n")
        (run_dir / "metrics.jsonl").unlink()

    lab.configure(objective={"metric": "printed", "goal": "max"}, keep_going=True)
    lab.run(mess)
    runs, _ = lab.read()
    record = lab.folder / "outputs/toy" / runs[1].id / "record"
    assert (record / "train.log").read_text() == "key ***\nstep: 1 printed: 2\n"
    assert json.loads((record / "summary.json").read_text())["metrics"]["printed"]["n"] == 1


def test_a_run_whose_end_cannot_be_written_down_is_reported(lab: SmallLab) -> None:
    engine = lab.engine(lambda run_dir, record: None)
    executor = engine._executor
    assert isinstance(executor, MessyExecutor)
    start = executor.start

    def delayed(spec: LaunchSpec, after: str | None = None) -> None:
        executor.events.append(Delayed(spec.run_id, f"{spec.record_dir}/exit.json"))
        start(spec, after)

    executor.start = delayed  # type: ignore[method-assign]
    assert engine.run().ending == Ending.DONE
    lab.ledger.close()
    told = [item.text for item in lab.news if item.kind == "waiting"]
    assert len(told) == 3
    assert all("exit.json cannot be written" in text for text in told)
