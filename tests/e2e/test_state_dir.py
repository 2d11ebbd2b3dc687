"""A lab whose ledger is on another disk: everything works, and there is never a second ledger."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from looplab.config.state import state_folder

FILES = {"ledger.db", "journal.jsonl", "head", "backups", "toy.lock"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def started(lab: Any) -> list[str]:
    return sorted(run.name for run in lab.runs())


@pytest.mark.slow
def test_a_study_with_its_ledger_elsewhere_survives_everything(lab: Any, until: Any) -> None:
    local = lab.aside / "local"
    variable = {"LOOPLAB_STATE_DIR": str(local)}
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    lab.base(wait="gate")
    lab.env |= variable
    engine = lab.start("run")
    lab.until_at_work()
    del lab.env["LOOPLAB_STATE_DIR"]  # a second engine does not know of it
    again = lab("run", code=None)
    assert again.code == 3, again.err
    assert "has an engine already" in again.err
    engine.process.kill()
    engine.process.wait()
    lab.open_gate()
    lab("resume")
    assert lab.count(state="ended", status="ok") == len(lab.runs()) == 3
    (place,) = local.iterdir()
    assert state_folder(lab.folder) == place
    assert names(place) >= FILES
    assert not names(lab.folder / ".looplab") & FILES
    assert lab("verify", "--json").json()["whole"]
    line = lab("anchor").out
    lab.write("anchors.txt", line)
    before = lab.ask("SELECT id, status, objective FROM runs")
    (place / "ledger.db").unlink()
    assert "its journal exists" in lab("status", code=1).err
    lab("reindex")
    assert lab.ask("SELECT id, status, objective FROM runs") == before
    lab("verify", "--against", "anchors.txt")
    lab("restore")
    lab("verify")
    shutil.rmtree(place)  # as on another machine
    for command in ("run", "status", "verify", "reindex"):
        assert f"is in {place} on host" in lab(command, code=None).err
    (lab.folder / ".looplab/state").unlink()
    lab("reindex", env={**lab.env, **variable})
    assert started(lab) == sorted(run for (run,) in lab.ask("SELECT id FROM runs"))


@pytest.mark.slow
def test_lab_yaml_names_the_folder(lab: Any) -> None:
    lab.configure(state_dir=str(lab.aside / "local"))
    lab("status")
    assert not (lab.aside / "local").exists()
    lab("say", "hello")
    lab("submit", "--", "true")
    lab("run", "--rounds", "1")
    assert lab.count() == 2
    assert not (lab.folder / ".looplab/ledger.db").exists()
    lab.configure(state_dir=3)
    assert "state_dir takes a folder" in lab("status", code=2).err


@pytest.mark.slow
def test_a_ledger_is_moved_only_when_asked_and_nothing_is_lost(lab: Any, until: Any) -> None:
    lab.queue("train.lr@set=0.2")
    lab("run")
    before = lab.ask("SELECT seq, hash FROM events")
    local = lab.aside / "local"
    lab.configure(state_dir=str(local))
    refused = lab("run", code=2)
    assert "but the ledger of this lab is in" in refused.err
    assert "--move-ledger" in refused.err
    assert lab("doctor", "--move-ledger", "--json").json() == {
        "ledger": str(state_folder(lab.folder) / "ledger.db"), "moved": True,
    }  # fmt: skip
    assert state_folder(lab.folder).parent == local
    assert lab.ask("SELECT seq, hash FROM events")[:-1] == before
    assert lab.ask("SELECT kind FROM events ORDER BY seq DESC LIMIT 1") == [("ledger moved",)]
    lab("verify")
    assert "already" in lab("doctor", "--move-ledger").out
    lab.base("configs/slow.json", wait="gate")
    engine = lab.start("run", "--cfgs", "configs/slow.json")
    lab.until_at_work()
    lab.configure(state_dir=None)
    assert "has an engine already" in lab("doctor", "--move-ledger", code=3).err
    lab.open_gate()
    engine.ended()
    lab("doctor", "--move-ledger")
    assert state_folder(lab.folder) == lab.folder / ".looplab"
    lab("verify")
    lab("reindex")
    assert lab.count(state="ended") == len(lab.runs()) == 3
