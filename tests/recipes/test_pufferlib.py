"""The drone lab with PufferLib as its trainer: its command lines by a strict parser, and really trained.

`make pufferlib` installs it for the last test; LOOPLAB_PUFFERLIB names another environment that has it.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.conftest import PATIENCE_S

ROOT = Path(__file__).parents[2]
LOOPLAB = Path(sys.executable).with_name("looplab")
RECIPE = ROOT / "src/looplab/recipes/drone"
PUFFERLIB = Path(os.environ.get("LOOPLAB_PUFFERLIB", ROOT / ".pufferlib"))


class PufferLab:
    def __init__(self, folder: Path, path: str) -> None:
        self.folder = folder
        self.env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
        self.env["PATH"] = path
        shutil.copytree(RECIPE, folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(folder / "pufferlib.yaml", folder / "lab.yaml")
        self.queue()

    def configure(self, **changes: Any) -> None:
        lab = yaml.safe_load((self.folder / "lab.yaml").read_text())
        (self.folder / "lab.yaml").write_text(yaml.safe_dump({**lab, **changes}, sort_keys=False))

    def queue(self, *proposals: list[str]) -> None:
        listed = [{"edits": edits, "reason": f"idea {n}"} for n, edits in enumerate(proposals)]
        (self.folder / "proposals.yaml").write_text(json.dumps({"proposals": listed}))

    def __call__(self, *argv: str, code: int = 0) -> str:
        done = subprocess.run(
            [str(LOOPLAB), *argv], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=PATIENCE_S * 3
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def runs(self) -> list[Path]:
        return sorted(path.parent for path in (self.folder / "outputs/puffer").glob("*/record"))

    def read(self, run: Path, name: str) -> Any:
        return json.loads((run / "record" / name).read_text())


@pytest.fixture
def lab(tmp_path: Path) -> PufferLab:
    """A lab whose `puffer` only reads its command line."""
    puffer = tmp_path / "bin/puffer"
    puffer.parent.mkdir()
    puffer.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -I -S "{Path(__file__).with_name("puffer_parser.py")}" "$@"\n'
    )
    puffer.chmod(puffer.stat().st_mode | stat.S_IXUSR)
    made = PufferLab(tmp_path / "lab", f"{puffer.parent}:{os.environ['PATH']}")
    made.configure(judge="none")
    return made


def understood(run: Path) -> dict[str, Any]:
    """What the parser read, nested as the config is."""
    config: dict[str, Any] = {}
    for key, value in json.loads((run / "record/train.log").read_text().splitlines()[0]).items():
        section, _, name = key.rpartition(".")
        (config.setdefault(section, {}) if section else config)[name] = value
    return config


def test_pufferlib_reads_from_its_command_line_what_the_config_says(lab: PufferLab) -> None:
    lab.queue(
        ["train.anneal_lr@set=false", "train.compile@set=true", "train.torch_deterministic@set=false"],
        ["vec.num_workers@set=3", "train.adam_eps@set=1e-14", "train.total_timesteps@set=5000"],
    )
    lab("run", "--mode", "quick", "--rounds", "3")
    runs = lab.runs()
    assert len(runs) == 3
    for run in runs:
        config, read = lab.read(run, "config.json"), understood(run)
        for section in ("train", "env", "vec"):
            for key, value in config[section].items():
                told = read[section][key]
                assert bool(told) is value if isinstance(value, bool) else told == value, f"{section}.{key}"
        assert read["env_name"] == config["env_name"] == "puffer_drone"
        assert (read["wandb"], read["wandb_project"]) == (True, "drone")
        assert (read["train"]["data_dir"], read["cwd"]) == ("experiments", str(run))
    assert lab.read(runs[2], "config.json")["vec"] == {
        "backend": "Serial", "num_workers": 3, "num_envs": 3, "batch_size": 3
    }  # fmt: skip


def test_a_switch_that_is_off_is_left_out(lab: PufferLab) -> None:
    lab.configure(track={})
    lab("run", "--runs", "1")
    assert understood(lab.runs()[0])["wandb"] is False


def test_an_environment_that_is_not_listed_is_refused(lab: PufferLab) -> None:
    lab.queue(["env_name@set=puffer_drone_pp"])
    assert "env_name: 'puffer_drone_pp' is not one of 'puffer_drone'" in lab("run", "--rounds", "2")


def test_the_environment_on_the_command_line_follows_the_config(lab: PufferLab) -> None:
    lab.configure(knobs={"env_name": {"choices": ["puffer_drone", "puffer_drone_pp"]}})
    lab.queue(["env_name@set=puffer_drone_pp"])
    lab("run", "--rounds", "2")
    assert lab.read(lab.runs()[1], "run.json")["argv"][1:3] == ["train", "puffer_drone_pp"]


def test_the_parser_is_strict(lab: PufferLab) -> None:
    """A key that PufferLib does not know ends the run at once; this is what the other tests rest on."""
    base = json.loads((lab.folder / "configs/puffer_drone.json").read_text())
    base["env"]["num_drones"] = 8
    (lab.folder / "configs/puffer_drone.json").write_text(json.dumps(base))
    assert "unrecognized arguments: --env.num-drones" in lab("run", "--runs", "1", code=1)


TINY = ["train.total_timesteps@set=20000", "train.bptt_horizon@set=16", "env.num_envs@set=64"]
AGENT = """\
import json, sys
prompt = sys.stdin.read()
edits = ["train.anneal_lr@set=false"]
if "autopilot.resume_mode@set=continue" not in prompt and "0002" in prompt:
    edits = ["autopilot.resume_mode@set=continue", "autopilot.resume_from@set=latest", "train.learning_rate@mul=0.5"]
print(json.dumps({"proposals": [{"edits": edits, "reason": "as it comes", "hypothesis": "h"}]}))
"""


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not (PUFFERLIB / "bin/puffer").exists(), reason="`make pufferlib` installs PufferLib")
def test_the_autopilot_drives_the_real_pufferlib(tmp_path: Path) -> None:
    made = PufferLab(tmp_path / "lab", f"{PUFFERLIB}/bin:/usr/bin:/bin")  # without nvcc: its kernel is for the CPU
    (made.folder / "agent.py").write_text(AGENT)
    agent = {"cli": "command", "command": [sys.executable, str(made.folder / "agent.py")], "wall": "10m"}
    made.configure(judge="none", modes={"quick": TINY}, proposers=[{"agent": agent}])
    made("autopilot", "--runs", "2", "--mode", "quick")
    base, constant, warm = made.runs()
    for run in (base, constant, warm):
        summary = made.read(run, "summary.json")
        assert summary["status"] == "ok", (run / "record/train.log").read_text()[-2000:]
        assert summary["objective"]["value"] is not None
        assert summary["objective"]["then"]["value"] is not None
    rates = {run: made.read(run, "summary.json")["metrics"]["learning_rate"] for run in (base, constant)}
    assert rates[base]["last"] < rates[base]["first"]
    assert rates[constant]["last"] == rates[constant]["first"]  # the false reached it
    start = made.read(warm, "run.json")["warm_start"]
    (checkpoint,) = (constant / "experiments").glob("*.pt")
    assert (start["run"], start["path"]) == (constant.name, str(checkpoint.resolve()))
    assert "--load-model-path" in made.read(warm, "run.json")["argv"]
    assert (made.folder / "outputs/puffer/models/best.pt").exists()
    made("verify")
