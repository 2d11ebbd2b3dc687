"""Secrets of base configs: in the trainer's hands, but never in the ledger, whatever happens to the engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.loop.test_preview import STUDY, InstantExecutor, Killed, set_up, write_lab

from looplab.ledger.audit import audit
from looplab.ledger.ledger import Ledger
from looplab.ledger.rebuild import reindex
from looplab.ledger.study import StudyLedger
from looplab.loop.engine import Engine
from looplab.loop.setup import RunOptions, Setup
from looplab.runs.folder import hash_file

PASSWORD = "correct-horse-battery"
seen: list[Any] = []


def train(config: dict[str, Any]) -> tuple[int, float]:
    seen.append(config["db"]["password"])
    return 0, float(config["x"])


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    seen.clear()
    folder = write_lab(
        tmp_path / "lab",
        {**STUDY, "proposers": [{"queue": "queue.yaml"}]},
        queue=[{"edits": [f"x@set={n}"]} for n in (4, 5)],
    )
    (folder / "base.json").write_text(json.dumps({"x": 3, "y": 1, "db": {"password": PASSWORD}}))
    return set_up(folder, RunOptions())


def run_engine(setup: Setup) -> None:
    ledger = Ledger(setup.lab / ".looplab" / "ledger.db")
    try:
        Engine(setup, ledger, InstantExecutor(train)).run()
    finally:
        ledger.close()


def check(setup: Setup, runs: int) -> None:
    outputs = setup.lab / "outputs" / "toy"
    assert set(seen) == {PASSWORD}
    configs = [json.loads(path.read_text()) for path in sorted(outputs.glob("*/record/config.json"))]
    assert [config["db"] for config in configs] == [{"password": "***"}] * runs
    ledger = Ledger(setup.lab / ".looplab" / "ledger.db")
    assert audit(ledger, setup.lab).findings == ()
    assert not ledger.rows("SELECT 1 FROM events WHERE kind='record changed'")
    bodies = [json.loads(row["body"]) for row in ledger.rows("SELECT body FROM configs")]
    assert [body["db"] for body in bodies] == [{"password": "***"}] * runs
    ledger.close()


def test_the_trainer_gets_the_value_and_the_record_does_not(setup: Setup) -> None:
    run_engine(setup)
    check(setup, 3)


def test_an_engine_killed_after_it_has_hidden_a_secret_is_followed_by_one_that_knows(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: object, **options: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(StudyLedger, "ended", die)
        with pytest.raises(Killed):
            run_engine(setup)
    first = next((setup.lab / "outputs" / "toy").glob("0001-*/record/config.json"))
    assert json.loads(first.read_text())["db"] == {"password": "***"}
    run_engine(setup)
    check(setup, 3)


def test_a_ledger_that_was_lost_is_rebuilt_from_folders_with_hidden_configs(setup: Setup) -> None:
    run_engine(setup)
    path = setup.lab / ".looplab" / "ledger.db"
    shutil.rmtree(path.parent)
    reindex(path, setup.lab)
    ledger = Ledger(path)
    study = StudyLedger(ledger, "toy")
    configs = [study.config_of(run, setup.lab / "outputs" / "toy" / run.id) for run in study.runs()]
    assert [(config["x"], config["db"]["password"]) for config in configs] == [(3, "***"), (4, "***"), (5, "***")]
    ledger.close()


def test_the_hashes_of_launched_files_follow_the_files_whose_secrets_were_taken_out(setup: Setup) -> None:
    run_engine(setup)
    ledger = Ledger(setup.lab / ".looplab" / "ledger.db")
    study = StudyLedger(ledger, "toy")
    for run in study.runs():
        run_dir = setup.lab / "outputs" / "toy" / run.id
        for name, digest in study.launched_files(run.id).items():
            assert hash_file(run_dir / name) == digest
    ledger.close()
