"""The trainers of drone and fish, killed or stopped and started again with the same command: all ends as if nothing had
happened.

`python test_exact_resume.py` is the server that the tests start trainings by: it forks one for each line that it reads,
so that the imports, which take longer than these trainings, are made once.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("gymnasium")
pytest.importorskip("PIL")

import torch

from looplab import recipes, trainkit
from looplab.recipes.drone.checkpoints import identity
from looplab.recipes.drone.drones import Fleet
from looplab.recipes.drone.settings import DroneConfig
from looplab.recipes.fish.fish_env import STEPS, FishSchool

RECIPES = Path(recipes.__file__).parent
DRONE, FISH = RECIPES / "drone" / "train.py", RECIPES / "fish" / "experiments" / "v1" / "train.py"
SMALL = [
    "--vec.num-envs=1", "--train.batch-size=256", "--train.minibatch-size=256", "--train.max-minibatch-size=256",
    "--train.bptt-horizon=8", "--train.total-timesteps=10240", "--train.checkpoint-interval=7",
    "--train.update-epochs=1",
]  # fmt: skip
KINDS = {
    "muon": [str(DRONE), "drone_hover", *SMALL],
    "adam": [
        str(DRONE), "drone_pickplace", *SMALL, "--train.optimizer=adam", "--autopilot.save-strategy=all",
        "--vec.num-envs=2", "--vec.num-workers=2", "--env.num-envs=2",
    ],
    "fish": [str(FISH), "--smoke", "--iterations=40", "--num-fish=6", "--steps=4", "--epochs=1"],
}  # fmt: skip
ROWS = 40
"""Of the training itself."""
SAVED = 10
"""Rows by when all of them have saved their state."""
INEXACT = ("time", "sps", "seconds", "timestamp", "run_id")
PATIENCE_S = 300.0
"""As in tests/conftest.py, which this file cannot import as a script."""
Whole = Callable[[str], dict[str, Any]]


class Server:
    """Starts trainings in no time, and knows how they ended."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, **order: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, kind: str, out: Path, *flags: str, hold: int | None = None) -> int:
        """Start it; `hold`: it stops itself (SIGSTOP) at this row, or at the first one with a saved state."""
        out.mkdir(parents=True, exist_ok=True)
        argv = [*KINDS[kind], "--out", str(out), *flags]
        pid: int = self._ask(start=argv, said=f"{out}.txt", out=str(out), hold=hold)
        return pid

    def code(self, pid: int) -> int | None:
        """The exit code, or None while it runs."""
        found: int | None = self._ask(poll=pid)
        return found

    def when(self, pid: int, condition: Callable[[], bool]) -> int | None:
        """Wait for it, or for the end of the process, whose code this gives then."""
        patience = time.monotonic() + PATIENCE_S
        while (code := self.code(pid)) is None and not condition():
            assert time.monotonic() < patience
            time.sleep(0.01)
        return code

    def finish(self, kind: str, out: Path, *flags: str) -> dict[str, Any]:
        code = self.when(self.start(kind, out, *flags), lambda: False)
        assert code == 0, said(out)
        return left(out)


def serve() -> None:
    for name in ("looplab.rl.returns", "PIL.Image"):
        importlib.import_module(name)
    sys.modules["matplotlib.figure"] = None  # type: ignore[assignment]  # curves are drawn faster without it
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # imports more of torch than torch does
    sys.path.insert(0, str(DRONE.parent))
    for line in sys.stdin:
        order = json.loads(line)
        if "poll" in order:
            ended, status = os.waitpid(order["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if ended else None), flush=True)
        elif (child := os.fork()) == 0:
            said = os.open(order["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(said, 1)
            os.dup2(said, 2)
            sys.argv = order["start"]
            if order["hold"] is not None:
                hold_at(Path(order["out"]), order["hold"])
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            print(child, flush=True)


def hold_at(out: Path, row: int) -> None:
    """Have this process stand still once it has so many rows, and a state if it should: whoever kills it then cannot
    come too late."""
    write = trainkit.Logger.log

    def log_and_hold(*args: Any, **named: Any) -> None:
        write(*args, **named)
        if log(out).count(b"\n") >= row and (row < SAVED or (out / "resume" / "latest").exists()):
            trainkit.Logger.log = write  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGSTOP)

    trainkit.Logger.log = log_and_hold  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the trainings that were never interrupted."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(server: Server, folder: Path) -> Whole:
    """What they leave; each is made once."""

    @functools.cache
    def get(kind: str) -> dict[str, Any]:
        found = server.finish(kind, folder / kind)
        assert len(found["rows"]) == ROWS + (kind == "fish")  # and the row of the evaluation
        return found

    return get


def left(out: Path) -> dict[str, Any]:
    """All that a training leaves, but for the clock."""
    assert not (out / "resume").exists()
    found: dict[str, Any] = {"rows": [exact(row) for row in rows(out)]}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.suffix == ".pt":
            content = torch.load(path, weights_only=True)
            found[name] = [content["lifetime_steps"], plain([content["policy"], content["optimizer"]])]
        elif path.suffix == ".json":
            found[name] = exact(json.loads(path.read_text()))
        elif path.suffix in (".npz", ".png", ".gif"):
            found[name] = path.read_bytes()
    return found


def plain(state: Any) -> Any:
    """Tensors as bytes, which can be compared."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else state


def exact(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: exact(value) for name, value in content.items() if name not in INEXACT}
    return content


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log(out).splitlines()]


def log(out: Path) -> bytes:
    paths = (out / "metrics.jsonl", out / "logs" / "metrics.jsonl")
    return next((path.read_bytes() for path in paths if path.exists()), b"")


def said(out: Path) -> str:
    """What all the trainings in a folder said."""
    return Path(f"{out}.txt").read_text()


def kill_at(server: Server, kind: str, out: Path, row: int, number: int = signal.SIGKILL, *flags: str) -> int | None:
    """Start it, and end it by a signal once it has so many rows, and a state if it should; gives its exit code."""
    pid = server.start(kind, out, *flags, hold=row)
    held = lambda: b") T " in Path(f"/proc/{pid}/stat").read_bytes()  # noqa: E731
    assert server.when(pid, held) is None, "it ended before it could be killed"
    os.kill(pid, number)
    os.kill(pid, signal.SIGCONT)
    return server.when(pid, lambda: False)


# --- killed and stopped


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_ends_as_one_that_was_not(kind: str, tmp_path: Path, server: Server, whole: Whole) -> None:
    out = tmp_path / "killed"
    moments = sorted(random.Random(kind).sample(range(SAVED, ROWS - 12), 2))
    for row in (1, *moments):  # the first kill comes before anything is saved
        assert kill_at(server, kind, out, row) == -signal.SIGKILL
    assert server.finish(kind, out) == whole(kind)
    assert said(out).count("resuming from") >= len(moments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["muon", "fish"])
def test_sigterm_saves_the_very_update_and_exits_with_143(
    kind: str, tmp_path: Path, server: Server, whole: Whole
) -> None:
    out = tmp_path / "stopped"
    assert kill_at(server, kind, out, 15, signal.SIGTERM) == 143
    (state,) = (out / "resume").glob("step_*")
    assert int(state.name.removeprefix("step_")) == rows(out)[-1]["step"]
    assert kill_at(server, kind, out, len(rows(out)) + 3, signal.SIGINT) == 130
    assert server.finish(kind, out) == whole(kind)
    assert said(out).count("resuming from") == 2


def test_a_training_killed_in_its_evaluation_goes_on_with_the_evaluation(
    tmp_path: Path, server: Server, whole: Whole
) -> None:
    out = tmp_path / "killed"
    pid = server.start("fish", out)
    assert server.when(pid, (out / "resume" / f"step_{ROWS:010d}").exists) is None
    os.kill(pid, signal.SIGKILL)
    server.when(pid, lambda: False)
    assert server.finish("fish", out) == whole("fish")
    assert f"at iteration {ROWS}" in said(out)


@pytest.mark.slow
def test_going_on_needs_no_weights_to_begin_with(tmp_path: Path, server: Server, folder: Path, whole: Whole) -> None:
    cold = whole("muon")
    weights = Path(shutil.copy(folder / "muon" / "checkpoints" / "latest.pt", tmp_path))
    flags = ["--load-model-path", str(weights)]
    warm = server.finish("muon", tmp_path / "whole", *flags)
    assert warm["rows"] != cold["rows"]
    out = tmp_path / "stopped"
    assert kill_at(server, "muon", out, 10, signal.SIGTERM, *flags) == 143
    weights.unlink()
    assert server.finish("muon", out, *flags) == warm


# --- begun anew


@pytest.mark.parametrize("kind", ["muon", "fish"])
def test_a_finished_training_started_again_begins_anew(kind: str, server: Server, folder: Path, whole: Whole) -> None:
    assert whole(kind) == server.finish(kind, folder / kind)
    assert "resuming from" not in said(folder / kind)
    if kind == "muon":
        assert len((folder / kind / "metrics.before.jsonl").read_text().splitlines()) == ROWS


@pytest.mark.parametrize(
    ("kind", "flag", "steps"),
    [("muon", "--train.total-timesteps=768", [256, 512, 768]), ("fish", "--iterations=3", [1, 2, 3, 3])],
)
def test_other_settings_do_not_go_on_with_what_was_left(
    kind: str, flag: str, steps: list[int], tmp_path: Path, server: Server
) -> None:
    out = tmp_path / "changed"
    kill_at(server, kind, out, 15)
    assert [row["step"] for row in server.finish(kind, out, flag)["rows"]] == steps
    assert "belongs to another config" in said(out)


def test_a_broken_state_is_told_and_the_training_begins_anew(tmp_path: Path, server: Server, whole: Whole) -> None:
    out = tmp_path / "broken"
    assert kill_at(server, "muon", out, 20, signal.SIGTERM) == 143
    (tensors,) = (out / "resume").glob("step_*/tensors.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert server.finish("muon", out) == whole("muon")
    assert "skipped" in said(out)


def test_changed_code_is_another_training(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("1")
    one, again = (identity(DroneConfig(), None, [file]) for _ in range(2))
    file.write_text("2")
    assert one == again != identity(DroneConfig(), None, [file])


# --- environments


@pytest.mark.parametrize("task", ["drone_hover", "drone_pickplace"])
def test_a_fleet_continues_exactly_from_its_state(task: str) -> None:
    rng = np.random.default_rng(1)
    fleet, other = (Fleet(task, 4, 3, seed=5, workers=2) for _ in range(2))
    for _ in range(60):
        step = fleet.step(rng.normal(0, 0.5, (12, 4)).astype(np.float32))
    other.load_state_dict(fleet.state_dict())
    np.testing.assert_array_equal(other.observe(), step.obs)
    ends = 0
    for _ in range(60):
        actions = rng.normal(0, 0.5, (12, 4)).astype(np.float32)
        one, two = fleet.step(actions), other.step(actions)
        ends += len(one.finished.lengths)
        for name in ("obs", "rewards", "dones"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
        np.testing.assert_array_equal(one.finished.returns, two.finished.returns)
    assert ends > 5
    with pytest.raises(ValueError, match=r"episode has the shape \(2, 3\), expected \(2, 2\)"):
        Fleet(task, 4, 2, seed=5, workers=2).load_state_dict(fleet.state_dict())


def test_a_school_continues_exactly_from_its_state() -> None:
    rng = np.random.default_rng(1)
    school, other = (FishSchool(3, 4, seed=5) for _ in range(2))
    school.clock[:] = STEPS - 60
    for _ in range(40):
        step = school.step(rng.integers(0, 5, (3, 4)))
    other.load_state_dict(school.state_dict())
    np.testing.assert_array_equal(other.observe(), step.obs)
    over = 0
    for _ in range(40):
        actions = rng.integers(0, 5, (3, 4))
        one, two = school.step(actions), other.step(actions)
        over += int(one.dones.sum())
        for name in ("obs", "rewards", "acted", "died", "dones"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert over >= 3
    with pytest.raises(ValueError, match=r"episode has the shape \(3,\), expected \(2,\)"):
        FishSchool(2, 4).load_state_dict(school.state_dict())


if __name__ == "__main__":
    serve()
