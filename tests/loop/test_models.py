"""Copies of checkpoints are made beside the engine's work."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from looplab.config.lab import WarmStartConfig
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger
from looplab.loop import models
from looplab.loop.models import ModelKeeper, copy_file

WARM = WarmStartConfig.model_validate(
    {"mode": "init", "from": "from", "checkpoint": ["checkpoints/best.pt", "checkpoints/latest.pt"], "arguments": []}
)


@pytest.fixture
def runs(tmp_path: Path) -> Any:
    study = StudyLedger(Ledger(tmp_path / "ledger.db"), "s")
    with study.ledger.write():
        row = study.plan(
            round=1, proposal=None, proposer="base", parent=None, base="b", reason="", config_hash="x", devices=1,
            plan=RunPlan({}),
        )  # fmt: skip

    def make(n: int) -> Any:
        run = replace(row, id=f"{n:04d}-aaaa", n=n, objective=float(n), ended=float(n))
        checkpoint = tmp_path / run.id / "checkpoints" / "latest.pt"
        checkpoint.parent.mkdir(parents=True)
        checkpoint.write_bytes(b"weights %d" % n * 1000)
        return run

    return make


def test_the_newest_wish_wins_and_a_copy_is_whole_before_it_has_its_name(
    tmp_path: Path, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    copied = []

    def slow(source: Path, target: Path) -> str:
        copied.append(source.parent.parent.name)
        begun.set()
        assert go_on.wait(600)
        return copy_file(source, target)

    monkeypatch.setattr(models, "copy_file", slow)
    keeper = ModelKeeper(WARM, tmp_path, lambda: None)
    made = [runs(n) for n in range(1, 6)]
    keeper.request("latest", made[0])
    assert begun.wait(600)  # the caller is not kept waiting by the copy
    for run in made[1:]:
        keeper.request("latest", run)
    assert keeper.take() == []
    assert not (tmp_path / "models" / "latest.pt").exists()
    go_on.set()
    first, last = keeper.finish()
    assert copied == [made[0].id, made[-1].id]
    for kept in (first, last):
        kept.install()
    content = (tmp_path / "models" / "latest.pt").read_bytes()
    assert content == b"weights 5" * 1000
    assert last.files["models/latest.pt"] == hashlib.sha256(content).hexdigest()
    assert (
        last.files["models/latest.json"]
        == hashlib.sha256((tmp_path / "models" / "latest.json").read_bytes()).hexdigest()
    )
    keeper.close()


def test_a_run_without_a_checkpoint_is_passed_over_and_trouble_is_returned(tmp_path: Path, runs: Any) -> None:
    keeper = ModelKeeper(WARM, tmp_path, lambda: None)
    run = runs(1)
    (tmp_path / run.id / "checkpoints" / "latest.pt").unlink()
    keeper.request("best", run)
    assert keeper.finish() == []
    other = runs(2)
    (tmp_path / "models").rmdir() if (tmp_path / "models").exists() else None
    (tmp_path / "models").write_text("in the way")
    keeper.request("best", other)
    (kept,) = keeper.finish()
    assert isinstance(kept.error, OSError)
    keeper.close()
