"""Runs that wait in a queue run the code as it was when they were handed over."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from looplab.config.lab import load_lab
from looplab.launch.base import Ended, ExecutorTraits, Exit, LaunchEvent, LaunchSpec
from looplab.launch.local import LocalExecutor
from looplab.ledger.audit import audit
from looplab.ledger.ledger import Ledger
from looplab.loop.engine import Engine
from looplab.loop.events import AlarmRaised, EngineEvent, Note
from looplab.loop.lock import StudyLock
from looplab.loop.setup import RunOptions, prepare
from looplab.runs import folder
from looplab.runs.capsule import FRESH_S

TRAINER = """
import json, os, pathlib, sys
import helper
print(helper.TEXT, pathlib.Path("settings.yaml").read_text().strip(), pathlib.Path("data/x").read_text())
with open(os.environ["LOOPLAB_METRICS"], "a") as log:
    log.write('{"step": 0, "score": 1}\\n')
"""
LAB = """
study: s
launch: {command: ["{python}", train.py], cwd: CWD, env: {PYTHONPATH: "{lab}/lib"}}
base: base.json
objective: {metric: score, goal: max}
knobs: {x: {type: int, low: 0, high: 1000}}
proposers: [{queue: queue.yaml}]
slots: {count: 1, gpus: none}
"""


class SlowQueue(LocalExecutor):
    """An executor that starts a run after somebody has edited the code."""

    traits = ExecutorTraits(name="slow", queues=True, prequeues=False, retries={"lost": 1})

    def __init__(self, lab: Path) -> None:
        super().__init__()
        self.lab, self.specs = lab, list[LaunchSpec]()
        self.lose: set[int] = set()  # attempts that are lost

    def start(self, spec: LaunchSpec, after: str | None = None) -> None:
        self.specs.append(spec)
        (self.lab / "lib/helper.py").write_text(f"TEXT = 'code {len(self.specs)}'")
        (self.lab / "settings.yaml").write_text("new")
        time.sleep(FRESH_S + 0.01)  # so old may be what git said
        if spec.attempt in self.lose:
            self._pending_end = Ended(spec.run_id, Exit(None, reason="lost", message="the node burnt down"))
            return
        super().start(spec, after)

    _pending_end: LaunchEvent | None = None

    def poll(self, timeout: float) -> list[LaunchEvent]:
        if self._pending_end is not None:
            event, self._pending_end = self._pending_end, None
            return [event]
        return super().poll(timeout)


@pytest.fixture(params=[".", "run"])
def lab(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    lab = tmp_path / "lab"
    (lab / "lib").mkdir(parents=True)
    (lab / "data").mkdir()
    (lab / "data/x").write_text("data")
    (lab / "lab.yaml").write_text(LAB.replace("CWD", request.param))
    (lab / "base.json").write_text('{"x": 0}')
    (lab / "settings.yaml").write_text("old")
    trainer = TRAINER if request.param == "." else TRAINER.replace('Path("', f'Path("{lab}/')
    (lab / "train.py").write_text(trainer)
    (lab / "lib/helper.py").write_text("TEXT = 'code 0'")
    (lab / "queue.yaml").write_text('proposals: [{edits: ["x@set=1"], reason: one}]\n')
    (lab / ".gitignore").write_text("outputs\n.looplab\ndata\n__pycache__\n")
    git = ["git", "-C", str(lab), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    return lab


def run_study(lab: Path, executor: SlowQueue) -> list[EngineEvent]:
    told: list[EngineEvent] = []
    loaded = load_lab(lab)
    setup = prepare(loaded, loaded.study(None), RunOptions(runs=2))
    with StudyLock(loaded.folder, "s"):
        Engine(setup, Ledger(loaded.ledger_path), executor, told.append).run()
        executor.close()
    return told


def logs(lab: Path) -> list[str]:
    return [path.read_text().strip() for path in sorted(lab.glob("outputs/s/0*/record/train.log"))]


def test_a_run_gets_the_code_of_the_moment_when_it_was_handed_over(lab: Path) -> None:
    executor = SlowQueue(lab)
    told = run_study(lab, executor)
    is_in_tree = executor.specs[0].cwd != executor.specs[0].run_dir
    settings = ["old", "new"] if is_in_tree else ["new", "new"]  # by its absolute path it is that of the lab
    assert logs(lab) == [f"code 0 {settings[0]} data", f"code 1 {settings[1]} data"]
    assert not [event for event in told if "while it was queued" in event.text]
    assert [event for event in told if isinstance(event, AlarmRaised) and "the code differs" in event.text]
    trees = list((lab / "outputs/s/_shared").glob("tree-*"))
    assert trees
    assert all(path.suffix == ".json" for path in trees)  # the trees are gone, what was in them is known
    capsules = [folder.read_capsule(run) for run in sorted(lab.glob("outputs/s/0*"))]
    for capsule in capsules:
        frozen = json.loads((lab / "outputs/s" / capsule["code"]["frozen"]).read_text())
        assert {"train.py", "lib/helper.py", "settings.yaml"} <= set(frozen)
    assert capsules[0]["code"]["frozen"] != capsules[1]["code"]["frozen"]
    assert not audit(Ledger(lab / ".looplab/ledger.db"), lab).findings


def test_the_next_attempt_at_a_run_continues_with_its_code(lab: Path) -> None:
    executor = SlowQueue(lab)
    executor.lose = {1}
    run_study(lab, executor)
    attempts = [(spec.run_id, spec.attempt) for spec in executor.specs]
    run_id = min(attempts)[0]
    assert len(attempts) == 4
    first, second = (executor.specs[attempts.index((run_id, n))] for n in (1, 2))
    assert first.argv == second.argv
    assert first.cwd == second.cwd
    assert logs(lab)[0].startswith("code 0 ")


def test_code_is_not_frozen_if_the_lab_says_so(lab: Path) -> None:
    with open(lab / "lab.yaml", "a") as file:
        file.write("executor: {freeze: false}\n")
    told = run_study(lab, SlowQueue(lab))
    assert logs(lab) == ["code 1 new data", "code 2 new data"]
    assert [event for event in told if "the code changed while it was queued" in event.text]
    assert not list((lab / "outputs/s/_shared").glob("tree-*"))


def test_a_run_that_writes_next_to_its_code_loses_nothing(lab: Path) -> None:
    with open(lab / "train.py", "a") as file:
        file.write("\nopen('model.pt', 'w').write('weights')\n")
    executor = SlowQueue(lab)
    told = run_study(lab, executor)
    assert [(spec.cwd / "model.pt").read_text() for spec in executor.specs] == ["weights", "weights"]
    is_in_tree = executor.specs[0].cwd != executor.specs[0].run_dir
    notes = [event for event in told if isinstance(event, Note) and "written into their frozen code" in event.text]
    assert bool(notes) == is_in_tree
