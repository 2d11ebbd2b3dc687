"""The metrics logger: strict JSON, exact numbers, and rows that survive kills, forks, threads and full disks."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import PATIENCE_S

from looplab import trainkit
from looplab.errors import LabError


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def rows(path: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in path.read_text(encoding="ascii").splitlines()]


def logged(tmp_path: Path, *args: Any, **values: Any) -> dict[str, Any]:
    """Return the row that one call writes, without its time."""
    path = tmp_path / "one.jsonl"
    path.unlink(missing_ok=True)
    with trainkit.Logger(path) as logger:
        logger.log(*args, **values)
    (row,) = rows(path)
    assert isinstance(row.pop("time"), float)
    return row


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standalone trainer in its own working directory: no LOOPLAB_ variables."""
    for name in ("LOOPLAB_METRICS", "LOOPLAB_RUN_DIR", "LOOPLAB_CONFIG", "LOOPLAB_SEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_python(code: str, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )


def test_a_row_is_one_line_with_its_step_and_time_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with trainkit.Logger(path) as logger:
        logger.log({"loss": 0.3, "eval/acc": 0.9}, step=10)
        assert list(rows(path)[0]) == ["step", "time", "loss", "eval/acc"], "the row is there before the file is closed"
    assert path.read_bytes().count(b"\n") == 1


def test_metrics_may_be_a_dict_or_keywords_or_both(tmp_path: Path) -> None:
    expected = {"step": 10, "loss": 0.3, "acc": 1}
    assert logged(tmp_path, {"loss": 0.3, "acc": 1}, step=10) == expected
    assert logged(tmp_path, step=10, loss=0.3, acc=1) == expected
    assert logged(tmp_path, {"loss": 9.9, "acc": 1}, step=10, loss=0.3) == expected
    assert logged(tmp_path, MappingProxyType({"loss": 0.3, "acc": 1}), 10) == expected
    assert logged(tmp_path, OrderedDict(loss=0.3, acc=1), 10) == expected


def test_the_time_is_unix_seconds_unless_the_row_has_its_own(tmp_path: Path) -> None:
    import time

    path = tmp_path / "metrics.jsonl"
    before = time.time()
    with trainkit.Logger(path) as logger:
        logger.log({"loss": 1.0})
        logger.log({"loss": 1.0, "time": 12.5})
        logger.log({"loss": 1.0, "time": None})
    first, second, third = rows(path)
    assert before - 0.001 <= first["time"] <= time.time() + 0.001
    assert second["time"] == 12.5
    assert third["time"] >= first["time"]


def test_the_default_step_is_the_previous_one_plus_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with trainkit.Logger(path) as logger:
        logger.log(loss=1.0)
        logger.log(loss=1.0)
        logger.log(loss=1.0, step=10)
        logger.log(loss=1.0)
        logger.log({"loss": 1.0, "step": 100})
        logger.log(loss=1.0)
        logger.log({"loss": 1.0, "step": 5}, step=200)
        logger.log({"loss": 1.0, "step": np.int64(300)})
        logger.log(loss=1.0, step=np.int64(400))  # type: ignore[arg-type]
        logger.log(loss=1.0, step=0.5)
        logger.log(loss=1.0, step=None)
    assert [row["step"] for row in rows(path)] == [0, 1, 10, 11, 100, 101, 200, 300, 400, 0.5, 1.5]


def test_appending_to_a_file_continues_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with trainkit.Logger(path) as logger:
        logger.log(loss=1.0, step=41)
        logger.log(loss=1.0, step=-2.5e-7)
        logger.log(loss=1.0)
        logger.log(loss=1.0, step=41)
    with path.open("a") as file:
        file.write(
            '{"note": "no step"}\n[1]\nnot json\n{"step": null, "a": 1}\n{"step": NaN, "a": 1}\n{"step": 50, "torn\n\n'
        )
    with trainkit.Logger(path) as logger:
        logger.log(loss=1.0)
    assert strict(path.read_text().splitlines()[-1])["step"] == 42


@pytest.mark.parametrize("step", [math.nan, math.inf, "10", [1]])
def test_a_step_that_is_not_a_finite_number_is_rejected(tmp_path: Path, step: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    with trainkit.Logger(path) as logger:
        with pytest.raises(TypeError, match="step"):
            logger.log(loss=1.0, step=step)
        with pytest.raises(TypeError, match="step"):
            logger.log({"loss": 1.0, "step": step})
        logger.log(loss=1.0)
    assert [row["step"] for row in rows(path)] == [0]


def test_a_torn_row_of_a_killed_trainer_is_terminated_before_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 6, "loss": 0.5}\n{"step": 7, "lo')
    with trainkit.Logger(path) as logger:
        logger.log(loss=0.25)
        logger.log(loss=0.125)
    lines = path.read_text().splitlines()
    assert lines[1] == '{"step": 7, "lo'
    assert [strict(line)["step"] for line in (lines[0], *lines[2:])] == [6, 7, 8]


def test_a_complete_last_row_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 6, "loss": 0.5}')
    with trainkit.Logger(path) as logger:
        logger.log(loss=0.25)
    assert [row["step"] for row in rows(path)] == [6, 7]


def test_values_become_json(tmp_path: Path) -> None:
    row = logged(
        tmp_path,
        {
            "yes": True,
            "no": np.bool_(False),
            "int": 3,
            "huge": 10**400,
            "float": 1e-300,
            "float32": np.float32(0.5),
            "float64": np.float64(0.1),
            "int64": np.int64(7),
            "one element": np.array([[2.5]]),
            "zero dimensions": np.array(1.5),
            "text": 'a "quoted" line\n',
            "missing": None,
        },
        step=0,
    )
    assert row == {
        "step": 0,
        "yes": 1,
        "no": 0,
        "int": 3,
        "huge": 10**400,
        "float": 1e-300,
        "float32": 0.5,
        "float64": 0.1,
        "int64": 7,
        "one element": 2.5,
        "zero dimensions": 1.5,
        "text": 'a "quoted" line\n',
    }
    assert type(row["yes"]) is int


def test_nan_and_infinities_stay_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with trainkit.Logger(path) as logger:
        logger.log(a=1.0, b=1.0)
        logger.log(a=math.nan, b=math.inf)
        logger.log(a=np.float32(math.nan), b=-math.inf)
        logger.log(a=math.inf, b=-math.inf)
        logger.log(a=1e308, b=1e308)
        logger.log(a=1.0, b=10**400)
    assert [(row["a"], row["b"]) for row in rows(path)] == [
        (1.0, 1.0),
        ("NaN", "Infinity"),
        ("NaN", "-Infinity"),
        ("Infinity", "-Infinity"),
        (1e308, 1e308),
        (1.0, 10**400),
    ]


def test_nested_dicts_are_joined_with_slashes(tmp_path: Path) -> None:
    row = logged(tmp_path, {"eval": {"acc": 0.5, "per_class": {0: 0.25, 1: None}, "step": 3}}, step=1)
    assert row == {"step": 1, "eval/acc": 0.5, "eval/per_class/0": 0.25, "eval/step": 3}


@pytest.mark.parametrize("value", [np.zeros(2), [1.0], (1.0,), object(), 1j, np.complex128(1), b"bytes", {1.0}])
def test_a_value_that_is_not_a_scalar_is_rejected_by_name(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    with trainkit.Logger(path) as logger:
        logger.log({"loss": 1.0, "eval/hist": 1.0})
        with pytest.raises(TypeError, match="'eval/hist'"):
            logger.log({"loss": 1.0, "eval": {"hist": value}})
        with pytest.raises(TypeError, match="'eval/hist'"):
            logger.log({"loss": 1.0, "eval/hist": value})
    assert len(rows(path)) == 1


def test_anything_but_a_dict_with_string_keys_is_rejected(tmp_path: Path) -> None:
    with trainkit.Logger(tmp_path / "metrics.jsonl") as logger:
        with pytest.raises(TypeError, match="must be a dict"):
            logger.log([("loss", 1.0)])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="must be strings"):
            logger.log({("loss",): 1.0})  # type: ignore[dict-item]
        with pytest.raises(TypeError, match="'time'"):
            logger.log({"time": "noon"})


NAMES = st.text(max_size=8).filter(lambda name: name not in ("step", "time"))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers()
TEXTS = st.text(max_size=8)


@given(st.lists(st.dictionaries(NAMES, NUMBERS | TEXTS | st.none(), max_size=4), max_size=6))
def test_what_is_read_back_equals_what_was_logged(tmp_path_factory: pytest.TempPathFactory, table: list[Any]) -> None:
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    with trainkit.Logger(path) as logger:
        for metrics in [*table, *table]:  # the second time on the fast path
            logger.log(metrics)
    expected = [{name: value for name, value in metrics.items() if value is not None} for metrics in [*table, *table]]
    got = rows(path) if path.exists() else []
    for step, row in enumerate(got):
        assert row.pop("step") == step
        row.pop("time")
    assert got == expected


def test_new_names_in_every_row_do_not_fill_the_memory(tmp_path: Path) -> None:
    from looplab.trainkit.log import _MAX_TEMPLATES, _templates

    path = tmp_path / "metrics.jsonl"
    with trainkit.Logger(path) as logger:
        for number in range(_MAX_TEMPLATES + 10):
            logger.log({f"sample {number}": 1.0})
    assert len(_templates) <= _MAX_TEMPLATES
    assert len(rows(path)) == _MAX_TEMPLATES + 10


def test_rows_of_threads_never_interleave_or_share_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with trainkit.Logger(path) as logger:
        threads = [
            threading.Thread(target=lambda: [logger.log(a=0.1, b=1 / 3, c="text") for _ in range(300)])
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(row["step"] for row in rows(path)) == list(range(2400))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_rows_of_forked_workers_never_interleave(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = """
import os, sys
from looplab import trainkit
trainkit.log(step=0, worker=-1)
children = []
for worker in range(4):
    child = os.fork()
    if child == 0:
        for step in range(300):
            trainkit.log({"worker": worker, "value": 1 / 3, "pad": "x" * (step % 50)}, step=step)
        os._exit(0)
    children.append(child)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
"""
    run_python(code, LOOPLAB_METRICS=str(path))
    seen = [(row["worker"], row["step"]) for row in rows(path)]
    assert sorted(seen) == [(-1, 0)] + [(worker, step) for worker in range(4) for step in range(300)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_worker_forked_while_another_thread_counts_a_step_can_still_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = """
import os, sys, threading
from looplab import trainkit
import looplab.trainkit
lock = sys.modules["looplab.trainkit.log"]._lock
held = threading.Event()
done = threading.Event()
def hold():
    with lock:
        held.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    trainkit.log(loss=1.0)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
done.set()
thread.join()
"""
    run_python(code, LOOPLAB_METRICS=str(path))
    assert [row["loss"] for row in rows(path)] == [1.0]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_a_signal_handler_can_log_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = """
import signal
from looplab import trainkit
count = 0
def handler(*_):
    global count
    count += 1
    trainkit.log(source=1)
    if count < 100:
        signal.setitimer(signal.ITIMER_REAL, 0.0002)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0002)
mine = 0
while count < 100:
    trainkit.log(source=0)
    mine += 1
print(mine, count)
"""
    mine, count = map(int, run_python(code, LOOPLAB_METRICS=str(path)).stdout.split())
    seen = rows(path)
    assert sum(row["source"] for row in seen) == count
    assert len(seen) == mine + count


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_trainer_loses_no_row_that_log_returned_from(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = """
from looplab import trainkit
for step in range(10**9):
    trainkit.log(step=step, value=1 / 3)
    print(step, flush=True)
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "LOOPLAB_METRICS": str(path)}, stdout=subprocess.PIPE
    )
    assert trainer.stdout is not None
    with trainer, trainer.stdout as stdout:
        while (line := stdout.readline()) != b"500\n":
            assert line, "the trainer ended by itself"
        trainer.kill()
        last = int([line, *stdout.read().split()][-1])
    seen = [strict(line)["step"] for line in path.read_text().splitlines()[: last + 1]]
    assert seen == list(range(last + 1)), "all but, at most, the row that the kill interrupted"


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_temporarily_full_disk_tears_only_one_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = """
import resource
from looplab import trainkit
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
trainkit.log(step=0, loss=1.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
try:
    for step in range(1, 10):
        trainkit.log(step=step, loss=1.0)
except OSError:
    print(step)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
trainkit.log(loss=2.0)
"""
    failed = int(run_python(code, LOOPLAB_METRICS=str(path)).stdout)
    lines = path.read_text().splitlines()
    with pytest.raises(ValueError):
        strict(lines[failed])
    assert [strict(line)["step"] for line in lines[:failed]] == list(range(failed))
    assert [strict(line)["loss"] for line in lines[failed + 1 :]] == [2.0]


def test_logging_to_a_closed_logger_raises(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with trainkit.Logger(path) as logger:
        logger.log(loss=1.0)
    logger.close()
    with pytest.raises(ValueError, match="closed"):
        logger.log(loss=1.0)
    assert len(rows(path)) == 1


def test_the_first_row_creates_the_file_and_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "metrics.jsonl"
    logger = trainkit.Logger(path)
    assert not path.parent.exists()
    logger.log(loss=1.0)
    logger.close()
    assert len(rows(path)) == 1


def test_log_follows_the_environment_variables(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainkit.log(loss=0.0)
    assert [row["loss"] for row in rows(alone / "metrics.jsonl")] == [0.0]
    monkeypatch.setenv("LOOPLAB_RUN_DIR", str(alone / "run"))
    trainkit.log(loss=1.0)
    assert [row["loss"] for row in rows(alone / "run" / "metrics.jsonl")] == [1.0]
    monkeypatch.setenv("LOOPLAB_METRICS", str(alone / "elsewhere.jsonl"))
    trainkit.log({"loss": 2.0}, step=7)
    assert [(row["step"], row["loss"]) for row in rows(alone / "elsewhere.jsonl")] == [(7, 2.0)]


def test_a_trainer_that_changes_directory_keeps_its_file(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPLAB_METRICS", "here.jsonl")
    trainkit.log(loss=0.0)
    (alone / "other").mkdir()
    monkeypatch.chdir(alone / "other")
    trainkit.log(loss=1.0)
    assert len(rows(alone / "here.jsonl")) == 2


def test_the_summary_is_next_to_the_metrics_and_replaced_atomically(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPLAB_RUN_DIR", str(alone / "run"))
    trainkit.summary({"final": 1.0, "bad": math.nan, "test": {"accuracy": np.float32(0.5)}}, epochs=3)
    path = alone / "run" / "trainer_summary.json"
    assert strict(path.read_text()) == {"final": 1.0, "bad": "NaN", "test/accuracy": 0.5, "epochs": 3}
    with pytest.raises(TypeError, match="'curve'"):
        trainkit.summary({"curve": [1, 2]})
    assert strict(path.read_text())["final"] == 1.0
    trainkit.summary()
    assert strict(path.read_text()) == {}
    assert [file.name for file in (alone / "run").iterdir()] == ["trainer_summary.json"], (
        "no metrics file, no leftovers"
    )


def test_a_summary_that_cannot_be_written_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "trainer_summary.json" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError):
        trainkit.Logger(tmp_path / "metrics.jsonl").summary({"final": 1.0})
    assert [file.name for file in tmp_path.iterdir()] == ["trainer_summary.json"]


def test_the_run_folder_is_the_working_directory_by_default(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trainkit.run_dir().resolve() == alone.resolve()
    monkeypatch.setenv("LOOPLAB_RUN_DIR", str(alone / "run"))
    assert trainkit.run_dir() == alone / "run"


def test_the_seed_comes_from_the_variable_or_the_default(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trainkit.seed() == 0
    assert trainkit.seed(default=5) == 5
    monkeypatch.setenv("LOOPLAB_SEED", "7")
    assert trainkit.seed(default=5) == 7
    monkeypatch.setenv("LOOPLAB_SEED", "seven")
    with pytest.raises(LabError, match="LOOPLAB_SEED must be a whole number, not 'seven'"):
        trainkit.seed()


def test_the_config_comes_from_the_variable_or_the_default_path(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LabError, match="no config"):
        trainkit.config()
    default, given_path = alone / "default.json", alone / "given.json"
    default.write_text('{"lr": 0.1}')
    given_path.write_text('{"lr": 0.2, "name": "é"}', encoding="utf-8")
    assert trainkit.config(default) == {"lr": 0.1}
    monkeypatch.setenv("LOOPLAB_CONFIG", str(given_path))
    assert trainkit.config(default) == {"lr": 0.2, "name": "é"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the config"),
        (b'{\n"lr": 0.1,\n}', ":[23]: the config is not JSON"),  # Python 3.13 names the comma
        (b"[1]", "must be a JSON object, not a list"),
        (b'{"name": "\xff"}', "not UTF-8"),
    ],
)
def test_a_bad_config_is_explained(alone: Path, content: bytes | None, message: str) -> None:
    path = alone / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LabError, match=message) as caught:
        trainkit.config(path)
    assert str(path) in str(caught.value)


def test_importing_and_logging_imports_only_the_standard_library(alone: Path) -> None:
    code = """
import sys
before = set(sys.modules)
from looplab import trainkit
imported = set(sys.modules) - before
trainkit.log(loss=1.0)
trainkit.summary(final=1.0)
trainkit.run_dir()
used = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(sorted(imported & {"json", "pathlib", "typing", "threading", "re", "collections"}))
print(sorted(name for name in sys.modules if name.startswith("looplab")))
print(sorted(used))
"""
    heavy, ours, used = run_python(code).stdout.splitlines()
    assert heavy == "[]"
    modules = ["looplab", "looplab.errors", "looplab.trainkit", "looplab.trainkit.atomic", "looplab.trainkit.log"]
    assert ours == str(modules)
    assert used == "['looplab']"
