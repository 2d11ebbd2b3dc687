"""A search needs the packages of its own sampler, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger

BLOCKER = """
import os, sys
from importlib.abc import MetaPathFinder

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["BLOCKED"].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def poor(lab: Any) -> Any:
    """A lab whose looplab finds no Optuna, and what comes with it."""
    (lab.aside / "sitecustomize.py").write_text(BLOCKER)
    lab.env |= {"PYTHONPATH": str(lab.aside), "BLOCKED": "optuna,cmaes,sklearn,torch"}
    knobs = {
        "train.lr": {"type": "float", "low": 0.001, "high": 1, "step": 0.001},
        "train.batch": {"choices": [16, 32]},
    }
    lab.configure(knobs=knobs)
    return lab


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["random", "grid", "qmc", "auto"])
def test_these_samplers_need_no_optuna(poor: Any, sampler: str) -> None:
    poor.configure(proposers=[{"search": {"sampler": sampler, "startup": 2}}])
    assert "all is well" in poor("check").out
    told = poor("plan", "--runs", "6", "--json").json()
    poor("run", "--runs", "6")
    assert len(poor.runs()) == 6
    assert [entry["config"] for entry in told["runs"]] == poor.all("config.json")[: len(told["runs"])]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "gp"])
def test_what_a_sampler_lacks_is_named_before_anything_is_run(poor: Any, sampler: str) -> None:
    poor.configure(proposers=[{"search": sampler}])
    for command in ("check", "plan", "run"):
        error = poor(command, code=2).err
        assert f"lab.yaml:{poor.line('proposers')}: search: {sampler} needs " in error
        assert "optuna" in error
        assert "pip install 'looplab[search]'" in error
    assert not (poor.folder / ".looplab").exists()


def test_without_numpy_only_the_grid_is_left(poor: Any) -> None:
    poor.env["BLOCKED"] += ",numpy,scipy"
    for sampler, needs in {"random": "numpy", "qmc": "numpy and scipy", "auto": "numpy and scipy"}.items():
        poor.configure(proposers=[{"search": sampler}])
        assert f"search: {sampler} needs {needs}, which" in poor("check", code=2).err
    poor.configure(proposers=[{"search": "grid"}])
    poor("run", "--runs", "3")
    assert len(poor.runs()) == 3


def test_without_optuna_auto_continues_beyond_the_points_of_its_gaussian_process(poor: Any) -> None:
    poor.configure(proposers=[{"search": {"sampler": "auto", "repeat_share": 0}}])
    poor("run", "--runs", "1")
    pretend_runs(poor.folder, 310)
    told = poor("plan", "--runs", "312", "--json").json()
    (entry,) = told["runs"]
    assert entry["reason"] == "the expected improvement on 311 measured points, from 300 of them"
    poor("run", "--runs", "312")
    assert poor.all("config.json")[-1] == entry["config"]


def pretend_runs(folder: Path, n: int) -> None:
    """Put ended runs in the record, as if they had been run."""
    base = json.loads((folder / "configs/base.json").read_text())
    ledger = Ledger(folder / ".looplab" / "ledger.db")
    record = StudyLedger(ledger, "toy")
    with ledger.write():
        for i in range(n):
            lr = (i + 1) / 1000
            config = {**base, "train": {"lr": lr, "batch": 16}}
            run = record.plan(
                round=1, proposal=None, proposer="queue", parent=None, base="configs/base.json", reason="", devices=1,
                config_hash=f"pretended {i}", plan=RunPlan(config),
            )  # fmt: skip
            run_dir = folder / "outputs" / "toy" / run.id
            run_dir.mkdir()
            for name, content in {"run.json": {"id": run.id}, "config.json": config, "summary.json": {}}.items():
                (run_dir / name).write_text(json.dumps(content))
            record.ended(
                run.id, status="ok", code=0, signal=None, started=1.0, ended=2.0, objective=abs(lr - 0.3), files={}
            )
    ledger.close()
