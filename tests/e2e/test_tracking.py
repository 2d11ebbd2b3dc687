"""What every run is told about W&B, and what a formal run must have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

LOOPLAB = Path(sys.executable).with_name("looplab")
LAB = """
study: s
launch:
  command: ["{python}", -I, -S, -c, "import os; print({k: v for k, v in os.environ.items() if k.startswith('WANDB')})"]
base: base.json
proposers: [{queue: queue.yaml}]
knobs: {x: {type: int, low: 0, high: 9}}
slots: {count: 1, gpus: none}
round_size: 1
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "base.json").write_text('{"x": 0}')
    (tmp_path / "queue.yaml").write_text("proposals: [{edits: ['x@set=1']}, {edits: ['x@set=2']}]")
    return tmp_path


def looplab(lab: Path, *argv: str, key: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    env |= {"NETRC": str(lab / "no-netrc"), **({"WANDB_API_KEY": key} if key else {})}
    return subprocess.run([str(LOOPLAB), *argv], cwd=lab, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


def test_every_round_is_told_the_same_about_wandb(lab: Path) -> None:
    (lab / "lab.yaml").write_text(LAB + "track: {wandb: {mode: online, entity: e, project: p}}\n")
    assert looplab(lab, "run").returncode == 0
    logs = sorted((lab / "outputs/s").glob("*/record/train.log"))
    assert len(logs) == 3
    for log in logs:
        told = json.loads(log.read_text().replace("'", '"'))
        assert (told["WANDB_MODE"], told["WANDB_ENTITY"], told["WANDB_PROJECT"]) == ("online", "e", "p")
        assert told["WANDB_DIR"] == str(log.parents[1])
        assert told["WANDB_CACHE_DIR"].startswith(str(lab))
        assert told["WANDB_LOG_MODEL"] == "false"
        assert told["WANDB_RUN_GROUP"] == "s"


def test_without_tracking_nothing_is_said_about_wandb(lab: Path) -> None:
    (lab / "lab.yaml").write_text(LAB)
    assert looplab(lab, "run", "--runs", "1").returncode == 0
    assert next((lab / "outputs/s").glob("*/record/train.log")).read_text().strip() == "{}"


def test_a_formal_run_is_refused_without_what_it_requires(lab: Path) -> None:
    (lab / "lab.yaml").write_text(LAB + "require: {gpu: true, wandb: online}\n")
    refused = looplab(lab, "run")
    assert refused.returncode == 2
    for missing in ("a GPU for every slot", "W&B online", "a W&B key"):
        assert missing in refused.stderr
    assert not (lab / "outputs").exists()


def test_only_what_is_missing_is_named(lab: Path) -> None:
    (lab / "lab.yaml").write_text(LAB + "require: {wandb: online}\ntrack: {wandb: {mode: online}}\n")
    refused = looplab(lab, "run")
    assert refused.returncode == 2
    assert "a W&B key" in refused.stderr
    assert "W&B online" not in refused.stderr
    assert looplab(lab, "run", "--runs", "1", key="0" * 40).returncode == 0


@pytest.mark.slow
def test_an_informal_run_is_recorded_as_one(lab: Path) -> None:
    (lab / "lab.yaml").write_text(LAB + "require: {gpu: true}\n")
    assert "`run` would refuse" in looplab(lab, "plan").stdout
    assert looplab(lab, "run", "--informal", "--runs", "1").returncode == 0
    about = json.loads(next((lab / "outputs/s").glob("*/record/run.json")).read_text())
    assert about["formal"] is False


# -- trainers whose config says where they log

INIT = "import json,sys; print(json.load(open(sys.argv[1]))['wandb']); print('score: 1.0')"
OWN_KEYS = f"""
study: s
launch: {{command: ["{{python}}", -I, -S, -c, {json.dumps(INIT)}, "{{config}}"]}}
base: base.json
proposers: [{{queue: queue.yaml}}]
objective: {{metric: score, goal: max}}
knobs: {{x: {{type: int, low: 0, high: 9}}}}
slots: {{count: 1, gpus: none}}
round_size: 1
"""
BASE = {"x": 0, "wandb": {"enable": False, "mode": "online", "entity": "else", "project": "theirs",
                          "disable_artifact": False}}  # fmt: skip


@pytest.fixture
def own(lab: Path) -> Path:
    (lab / "base.json").write_text(json.dumps(BASE))
    return lab


def said(lab: Path) -> list[str]:
    return [log.read_text().splitlines()[0] for log in sorted((lab / "outputs/s").glob("*/record/train.log"))]


def about(lab: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((lab / "outputs/s").glob("*/record/run.json"))]


def test_the_configs_own_keys_say_what_the_lab_file_says(own: Path) -> None:
    (own / "lab.yaml").write_text(OWN_KEYS + "track: {wandb: {mode: offline, entity: me}}\n")
    assert "track.wandb sets wandb.enable to true, wandb.mode to 'offline'" in looplab(own, "check").stdout
    assert looplab(own, "run").returncode == 0
    told = {**BASE["wandb"], "enable": True, "mode": "offline", "entity": "me", "disable_artifact": True}  # type: ignore[dict-item]
    assert said(own) == [str(told)] * 3
    configs = [json.loads(path.read_text()) for path in sorted((own / "outputs/s").glob("*/record/config.json"))]
    assert [config["wandb"] for config in configs] == [told] * 3
    about = [json.loads(path.read_text()) for path in sorted((own / "outputs/s").glob("*/record/run.json"))]
    assert [list(run["changes"]["parent"]) for run in about] == [[], ["x"], ["x"]]


@pytest.mark.slow
def test_where_a_run_is_logged_makes_no_other_config_of_it(own: Path) -> None:
    (own / "lab.yaml").write_text(OWN_KEYS + "track: {wandb: {mode: offline}}\n")
    assert looplab(own, "run", "--runs", "2").returncode == 0
    (own / "lab.yaml").write_text(OWN_KEYS + "track: {wandb: {mode: online}}\n")
    assert looplab(own, "run").returncode == 0  # the base is not run once more
    assert ["'mode': 'offline'" in line for line in said(own)] == [True, True, False]
    before = about(own)
    assert [run["role"] for run in before] == ["base", "trial", "trial"]
    (own / "queue.yaml").write_text("proposals: [{edits: ['x@set=1'], reason: again}]")
    (own / "lab.yaml").write_text(OWN_KEYS + "track: {wandb: {mode: online}}\njudge: ratchet\n")
    assert looplab(own, "run").returncode == 0
    again = about(own)[-1]
    assert again["role"] == "replicate"
    assert again["point"] == before[1]["point"]
    assert looplab(own, "verify").returncode == 0


def test_keys_that_track_writes_are_no_knobs(own: Path) -> None:
    knobs = OWN_KEYS.replace("knobs: {x:", "knobs: {wandb.mode: {choices: [online, offline]}, x:")
    (own / "lab.yaml").write_text(knobs + "track: {wandb: {mode: offline}}\n")
    refused = looplab(own, "check")
    assert refused.returncode == 2
    assert "wandb.mode: track.wandb writes it" in refused.stderr


@pytest.mark.slow
def test_a_formal_run_is_refused_if_the_config_says_otherwise(own: Path) -> None:
    """A trainer that passes its config's mode on never notices WANDB_MODE."""
    formal = OWN_KEYS + "require: {wandb: online}\n"
    (own / "lab.yaml").write_text(formal + "track: {wandb: {mode: online, keys: none}}\n")
    refused = looplab(own, "run", key="0" * 40)
    assert refused.returncode == 2
    assert "base.json: wandb.enable is false in the config" in refused.stderr
    (own / "lab.yaml").write_text(formal + "track: {wandb: {mode: online}}\n")
    assert looplab(own, "run", "--runs", "1", key="0" * 40).returncode == 0
    assert "'mode': 'online'" in said(own)[0]
    assert "wandb.mode=offline" in looplab(own, "run", "--", "--wandb.mode=offline", key="0" * 40).stderr


def test_a_table_that_lacks_a_key_is_told(own: Path) -> None:
    (own / "base.json").write_text(json.dumps({"x": 0, "wandb": {"project": "p"}}))
    (own / "lab.yaml").write_text(OWN_KEYS + "track: {wandb: {mode: offline, project: p}}\n")
    assert "wandb.enable and wandb.mode: not in the config" in looplab(own, "check").stdout


def test_a_trainer_with_a_base_of_its_own_is_told_each_time(own: Path) -> None:
    """Hydra gets what differs from the base; its own base knows nothing of `track`."""
    words = OWN_KEYS.replace('"{config}"]}', '"{config}"], config: hydra}')
    (own / "lab.yaml").write_text(words + "track: {wandb: {mode: online, entity: else, artifacts: true}}\n")
    shown = looplab(own, "check").stdout
    for word in ("wandb.enable=true", "wandb.mode=online", "wandb.entity=else", "wandb.disable_artifact=false"):
        assert word in shown
    assert "x=0" not in shown
