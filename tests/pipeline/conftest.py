"""A small pipeline: mine (a command that can be resumed) → select → memory → eval (functions)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from looplab.config.edits import apply_edits
from looplab.config.lab import load_lab
from looplab.launch.local import LocalExecutor
from looplab.pipeline.driver import StopRequest, drive
from looplab.pipeline.folder import RunFolder, runs_below
from looplab.pipeline.plan import choose_run, make_plan, pick_stages
from looplab.pipeline.recording import open_record
from looplab.pipeline.runner import HERE, StageRun

MINE = '''\
"""Writes a row for each of n; continues after the last complete row when resumed."""
import fcntl, json, os, sys, time

alone = open(os.path.join(sys.argv[2], ".alone"), "w")
try:
    fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    open("twice", "w").close()
with open(sys.argv[1]) as file:
    config = json.load(file)
path = os.path.join(sys.argv[2], "mine", "rows.txt")
os.makedirs(os.path.dirname(path), exist_ok=True)
rows = []
if os.environ["LOOPLAB_RESUME"] and os.path.exists(path):
    with open(path) as file:
        rows = [line for line in file if line.endswith("\\n")]
print("mine begins at", len(rows), flush=True)
with open(path, "w") as file:
    file.writelines(rows)
    file.flush()
    for n in range(len(rows), config["mine"]["n"]):
        time.sleep(config["mine"]["sleep"])
        file.write(f"{n * config['seed']}\\n")
        file.flush()
if config["mine"]["wait"]:
    while not os.path.exists(config["mine"]["wait"]):
        time.sleep(0.01)
print("mine ends", os.environ.get("CUDA_VISIBLE_DEVICES"))
sys.exit(config["mine"]["exit"])
'''
STAGES = """\
import fcntl
import time
from pathlib import Path


def stay_alone(run_dir):
    # Two stages that run in one run folder leave the file `twice`.
    global alone
    alone = open(run_dir / ".alone", "w")
    try:
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        open("twice", "w").close()


def select(config, run_dir):
    stay_alone(run_dir)
    while config["select"].get("wait") and not Path(config["select"]["wait"]).exists():
        time.sleep(0.01)
    rows = (run_dir / "mine" / "rows.txt").read_text().split()
    (run_dir / "library").mkdir(exist_ok=True)
    (run_dir / "library" / "library.txt").write_text(" ".join(rows[: config["select"]["B"]]))


def memory(config, run_dir):
    stay_alone(run_dir)
    (run_dir / "memory").mkdir(exist_ok=True)
    (run_dir / "memory" / "keys.txt").write_text((run_dir / "library" / "library.txt").read_text()[::-1])


def evaluate(config, run_dir):
    stay_alone(run_dir)
    source = config["eval"]["artifact_run_dir"] or run_dir
    with open(f"{source}/memory/keys.txt") as file:
        text = file.read()
    (run_dir / "tables").mkdir(exist_ok=True)
    result = f"{text} {config['eval']['beta']}"
    (run_dir / "tables" / "results.csv").write_text(f"acc\\n{result}\\n")
    print("eval says", result)
"""
LAB: dict[str, Any] = {
    "study": "steer",
    "pipeline": {
        "root": "{outputs.root_dir}/{outputs.run_name}",
        "run_id": "{outputs.run_id}",
        "artifacts": "eval.artifact_run_dir",
        "fits": ["model"],
    },
    "suite": {
        "fields": {"name": "task.dataset", "template": "prompt.template", "eval_split": "task.eval_split"},
        "run_name": "outputs.run_name",
        "tables": {"results.csv": "tables/results.csv", "ablation.csv": "tables/ablation.csv"},
    },
    "stages": {
        "mine": {
            "command": ["{python}", "-S", "mine.py", "{config}", "{run_dir}"],
            "reads": ["seed", "mine"],
            "code": ["mine.py"],
            "files": ["{model.path}"],
            "outputs": ["mine"],
        },
        "select": {"after": ["mine"], "entry": "stages.py:select", "reads": ["select"], "outputs": ["library"]},
        "memory": {"after": ["select"], "entry": "stages:memory", "reads": ["memory"], "outputs": ["memory"]},
        "eval": {"after": ["memory"], "entry": "stages.py:evaluate", "reads": ["eval"], "outputs": ["tables"]},
    },
}
CONFIG: dict[str, Any] = {
    "seed": 7,
    "model": {"path": "model.bin", "layer": 3},
    "mine": {"n": 4, "sleep": 0.0, "wait": "", "exit": 0},
    "select": {"B": 3},
    "memory": {},
    "eval": {"beta": 1, "artifact_run_dir": None},
    "outputs": {"root_dir": "outputs", "run_name": "toy", "run_id": None},
}
ALL = ("mine", "select", "memory", "eval")


class Toy:
    """A lab on the disk with the toy pipeline; called, it runs stages in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mine.py").write_text(MINE)
        (folder / "stages.py").write_text(STAGES)
        (folder / "model.bin").write_bytes(b"weights")
        (folder / "lab.yaml").write_text(json.dumps(LAB))
        (folder / "config.json").write_text(json.dumps(CONFIG))
        self.said: list[str] = []

    @property
    def root(self) -> Path:
        return self.folder / "outputs" / "toy"

    @property
    def runs(self) -> list[RunFolder]:
        return runs_below(self.root)

    @property
    def latest(self) -> str | None:
        path = self.root / "LATEST"
        return path.read_text().strip() if path.exists() else None

    def make(
        self,
        *stages: str,
        edits: tuple[str, ...] = (),
        run_id: str | None = None,
        new: bool = False,
        force: bool = False,
    ) -> StageRun:
        lab = load_lab(self.folder)
        study = lab.study(None)
        config = apply_edits(CONFIG, edits).config
        plan = make_plan(lab, study, config, "config.json", pick_stages(study, stages), edits)
        self.said = []
        run = choose_run(plan, run_id, new=new)
        return StageRun(plan, run, "stage", force=force, say=self.said.append, write=self.said.append)

    def __call__(self, *stages: str, state: str = "complete", **more: Any) -> dict[str, str]:
        """Run stages; return the outcome of each: {"mine": "skipped", …}."""
        one = self.make(*stages, **more)
        executor = LocalExecutor()
        with contextlib.closing(executor), open_record(load_lab(self.folder), "steer", self.said.append) as one.record:
            one.open()
            drive([one], [HERE], executor, StopRequest())
        assert one.state == state, (one.state, one.error, one.tail())
        self.last = one
        return {done.stage: done.how for done in one.done}

    def table(self, run: RunFolder | None = None) -> str:
        return ((run or self.runs[0]).path / "tables" / "results.csv").read_text()


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Toy]:
    made = Toy(tmp_path / "lab")
    yield made
    mark = f"LOOPLAB_LAB={made.folder}".encode()
    for entry in Path("/proc").iterdir():  # processes that a failed test has left running
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
