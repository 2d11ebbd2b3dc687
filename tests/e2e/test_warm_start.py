"""Runs that begin with the weights of others: the source is found, hashed, handed over, charged and kept."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

TRAIN = '''\
"""Its weights are a number that grows with every training; what it is worth is that number, whatever the config."""
import json, os, sys
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
start = float(open(sys.argv[sys.argv.index("--load-model-path") + 1]).read()) if "--load-model-path" in sys.argv else 0.0
weights = start + 1 + config["x"] + config["seed"] / 1000
os.makedirs(os.path.join(os.environ["LOOPLAB_RUN_DIR"], "checkpoints"), exist_ok=True)
with open(os.path.join(os.environ["LOOPLAB_RUN_DIR"], "checkpoints", "latest.pt"), "w") as file:
    file.write(repr(weights))
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    print(json.dumps({"step": 1, "score": weights}), file=file)
'''
CONTINUE = "autopilot.resume_mode@set=continue"
WARM_START: dict[str, Any] = {
    "mode": "autopilot.resume_mode",
    "from": "autopilot.resume_from",
    "checkpoint": ["checkpoints/best.pt", "checkpoints/latest.pt"],
    "arguments": ["--load-model-path", "{checkpoint}"],
}


@pytest.fixture
def warm(lab: Any) -> Any:
    lab.write("train.py", TRAIN)
    config = {"x": 0.0, "seed": 0, "autopilot": {"resume_mode": "fresh", "resume_from": "latest"}}
    lab.write("configs/base.json", json.dumps(config))
    lab.configure(
        objective={"metric": "score", "goal": "max"},
        knobs={
            "x": {"type": "float", "low": -1, "high": 1},
            "autopilot.resume_mode": {"choices": ["fresh", "continue"]},
            "autopilot.resume_from": {"type": "str"},
        },
        warm_start=WARM_START,
        round_size=1,
        budget={"rounds": 2},
    )
    return lab


@pytest.mark.slow
def test_the_trainer_gets_the_weights_and_the_source_is_recorded(warm: Any) -> None:
    warm.queue([CONTINUE, "autopilot.resume_from@set=best"])
    warm("run")
    first, second = warm.runs()
    assert warm.read(second, "summary.json")["objective"]["value"] == 2.0
    start = warm.read(second, "run.json")["warm_start"]
    assert start["run"] == first.name
    assert start["path"] == str((first / "checkpoints/latest.pt").resolve())
    assert len(start["sha256"]) == 64
    models = warm.outputs() / "models"
    assert float((models / "best.pt").read_text()) == 2.0
    assert json.loads((models / "best.json").read_text())["run_id"] == second.name


@pytest.mark.slow
def test_a_run_or_a_path_may_be_named_and_what_is_not_there_is_refused(warm: Any) -> None:
    warm.configure(budget={"rounds": 3})
    warm.queue([CONTINUE, "autopilot.resume_from@set=1"], [CONTINUE, "autopilot.resume_from@set=models/gone.pt"])
    done = warm("run")
    assert warm.read(warm.runs()[1], "run.json")["warm_start"]["run"] == warm.runs()[0].name
    assert len(warm.runs()) == 2
    assert "rejected" in done.out


def test_a_path_out_of_the_lab_is_refused(warm: Any) -> None:
    warm.queue([CONTINUE, "autopilot.resume_from@set=../../../etc/passwd"])
    assert "leads out of the lab" in warm("run").out


AFTERWARDS = """\
folder = os.path.join(os.environ["LOOPLAB_RUN_DIR"], "checkpoints")
os.rename(os.path.join(folder, "latest.pt"), os.path.join(folder, "puffer_175.pt"))
os.utime(os.path.join(folder, "puffer_175.pt"), (1e9, 1e9))
with open(os.path.join(folder, "puffer_176.pt"), "w") as file:
    file.write("100.0")
"""
"""Like PufferLib, it names its checkpoints as nobody knows beforehand."""


def test_of_the_checkpoints_that_match_a_pattern_the_newest_counts(warm: Any) -> None:
    warm.write("train.py", TRAIN + AFTERWARDS)
    warm.configure(warm_start={**WARM_START, "checkpoint": ["weights/*.pt", "checkpoints/*.pt"]})
    warm.queue([CONTINUE])
    warm("run")
    first, second = warm.runs()
    start = warm.read(second, "run.json")["warm_start"]
    assert start["path"] == str((first / "checkpoints/puffer_176.pt").resolve())
    assert warm.read(second, "summary.json")["objective"]["value"] == 101.0


@pytest.mark.slow
def test_equally_old_checkpoints_go_by_name(warm: Any) -> None:
    warm("run", "--runs", "1")
    (first,) = warm.runs()
    for name in ("b.pt", "c.pt", "a.pt"):
        (first / name).write_text("5.0")
        os.utime(first / name, (1e9, 1e9))
    warm.configure(warm_start={**WARM_START, "checkpoint": ["?.pt"]})
    warm.queue([CONTINUE])
    warm("run")
    assert warm.read(warm.runs()[1], "run.json")["warm_start"]["path"].endswith("/c.pt")


@pytest.mark.slow
def test_weights_from_outside_are_taken_where_the_lab_file_allows_it(warm: Any, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere" / "model.pt"
    outside.parent.mkdir()
    outside.write_text("7.0")
    resume = [CONTINUE, f"autopilot.resume_from@set={outside}"]
    warm.queue(resume)
    refused = warm("run").out
    assert "leads out of the lab" in refused
    assert f"allow: [{outside.parent}]" in refused
    warm.configure(warm_start={**WARM_START, "allow": [str(outside.parent)]})
    warm.queue([*resume, "x@set=0.5"])
    warm("run", "--rounds", "4")
    start = warm.read(warm.runs()[-1], "run.json")["warm_start"]
    assert (start["run"], start["path"]) == (None, str(outside.resolve()))
    assert start["sha256"] == hashlib.sha256(b"7.0").hexdigest()
    assert warm.read(warm.runs()[-1], "summary.json")["objective"]["value"] == 8.5


@pytest.mark.slow
def test_a_link_out_of_an_allowed_folder_is_refused(warm: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("7.0")
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed/model.pt").symlink_to(tmp_path / "secret")
    warm.configure(warm_start={**WARM_START, "allow": [str(tmp_path / "allowed")]})
    warm.queue([CONTINUE, f"autopilot.resume_from@set={tmp_path}/allowed/model.pt"])
    assert "leads out of the lab" in warm("run").out


SHARED = TRAIN.replace(
    'os.path.join(os.environ["LOOPLAB_RUN_DIR"], "checkpoints", "latest.pt")',
    'os.path.join(os.environ["SHARED"], os.environ["LOOPLAB_RUN_ID"] + ".pt")',
)


@pytest.mark.slow
def test_a_trainer_that_writes_to_a_folder_of_its_own_is_followed_there(warm: Any, tmp_path: Path) -> None:
    shared = tmp_path / "experiments"
    shared.mkdir()
    (shared / "older.pt").write_text("99.0")
    os.utime(shared / "older.pt", (1e9, 1e9))
    warm.write("train.py", SHARED)
    launch = {"command": ["{python}", "-S", "train.py"], "env": {"SHARED": str(shared)}}
    settings = {**WARM_START, "checkpoint": [f"{shared}/*.pt"], "allow": [str(shared)]}
    warm.configure(launch=launch, warm_start=settings, slots={"count": 1})
    warm.queue([CONTINUE, "autopilot.resume_from@set=best"])
    warm("run")
    first, second = warm.runs()
    start = warm.read(second, "run.json")["warm_start"]
    assert (start["run"], start["path"]) == (first.name, str((shared / f"{first.name}.pt").resolve()))
    assert json.loads((warm.outputs() / "models/best.json").read_text())["run_id"] == second.name
    warm.configure(warm_start={**settings, "allow": []})
    warm.queue([CONTINUE, "x@set=0.5"])
    assert "no run has left a checkpoint" in warm("run", "--rounds", "3").out


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["x" * 5000, "~nobody-of-this-name/model.pt", "a/b\\x00.pt"])
def test_a_source_that_is_no_path_is_refused(warm: Any, asked: str) -> None:
    warm.queue([CONTINUE, f"autopilot.resume_from@set={asked}"])
    assert "rejected" in warm("run").out


@pytest.mark.slow
def test_more_training_is_no_better_config(warm: Any) -> None:
    """A ratchet would promote every warm start. The judge gives the champion's config the same start first."""
    warm.configure(judge={"baseline_seeds": 3, "replicates": 2, "max_replicates": 4}, budget={"rounds": 2})
    warm.queue([CONTINUE, "autopilot.resume_from@set=best", "x@set=0.0001"])
    warm("run")
    roles = [about["role"] for about in warm.all("run.json")]
    assert "control" in roles
    trial = next(about for about in warm.all("run.json") if about["role"] == "trial")
    assert warm.ask("SELECT verdict FROM runs WHERE id=?", trial["id"])[0][0] in ("discard", "inconclusive")
    control = next(about for about in warm.all("run.json") if about["role"] == "control")
    assert control["warm_start"]["sha256"] == trial["warm_start"]["sha256"]


@pytest.mark.slow
def test_a_config_that_is_better_at_equal_budget_is_promoted(warm: Any) -> None:
    warm.configure(judge={"baseline_seeds": 3, "replicates": 3, "max_replicates": 8}, budget={"rounds": 2})
    warm.queue([CONTINUE, "autopilot.resume_from@set=best", "x@set=0.5"])
    warm("run")
    trial = next(about for about in warm.all("run.json") if about["role"] == "trial")
    evidence = warm.read(warm.outputs() / trial["id"], "summary.json")["verdict"]
    assert evidence["verdict"] == "keep"
    assert evidence["effect"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
def test_kept_models_are_copies_that_verify_covers(warm: Any) -> None:
    warm.queue([CONTINUE, "autopilot.resume_from@set=best"])
    warm("run")
    models, checkpoint = warm.outputs() / "models", warm.runs()[1] / "checkpoints/latest.pt"
    assert "whole" in warm("verify").out
    for name in ("best.pt", "latest.pt"):
        kept = (models / name).read_bytes()
        assert (models / name).stat().st_nlink == 1
        (models / name).open("r+b").write(b"9")  # in place, as a tool that edits it would
        assert checkpoint.read_bytes() == kept
        done = warm("verify", code=1)
        assert f"models/{name}" in done.out + done.err
        (models / name).write_bytes(kept)
        assert "whole" in warm("verify").out
    assert not list(models.glob(".tmp-*"))


@pytest.mark.slow
def test_a_copy_that_a_killed_engine_has_recorded_but_not_named_is_made_again(warm: Any) -> None:
    warm("run", "--rounds", "1")
    models = warm.outputs() / "models"
    before = {path.name: path.read_bytes() for path in models.iterdir()}
    warm.queue([CONTINUE, "autopilot.resume_from@set=best"])
    warm("run", "--rounds", "2")
    after = {path.name: path.read_bytes() for path in models.iterdir()}
    assert after != before
    for name, content in before.items():
        (models / name).write_bytes(content)
    (models / ".tmp-model-best-x.pt").write_bytes(b"half")
    told = warm("verify")
    assert "earlier version" in told.out
    warm("resume", code=None)
    assert {path.name: path.read_bytes() for path in models.iterdir()} == after
    assert "whole" in warm("verify").out
