"""The trainer of the drone recipe, run as a user runs it, and its lab file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

pytest.importorskip("torch")

import torch

from looplab import recipes
from looplab.config.edits import apply_edits, parse_edit
from looplab.config.lab import ConfigRendering, load_lab
from looplab.decide.prompt import FIELDS
from looplab.errors import LabError
from looplab.guard import Guard, Knob
from looplab.launch.command import render
from looplab.recipes.drone import checkpoints
from looplab.recipes.drone.ppo import DronePolicy, DroneRollout, make_optimizer, update
from looplab.recipes.drone.settings import KEYS, DroneConfig, TrainConfig, add_flags, read_config

RECIPE = Path(recipes.__file__).parent / "drone"
QUICK, FULL = (RECIPE / "configs" / f"baseline_{name}.json" for name in ("quick", "full"))
SMALL = [
    "--vec.num-envs",
    "1",
    "--train.batch-size",
    "512",
    "--train.minibatch-size=512",
    "--train.max-minibatch-size=512",
]
SMALL += ["--train.total-timesteps", "4096", "--train.checkpoint-interval", "2"]


def command(out: Path, *flags: str) -> list[str]:
    return [sys.executable, str(RECIPE / "train.py"), "--config", str(QUICK), "--out", str(out), *flags]


def train(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(out, *flags), capture_output=True, text=True, timeout=PATIENCE_S)


def metrics(out: Path, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in without} for row in rows]


def weights(path: Path) -> dict[str, torch.Tensor]:
    content: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["policy"]
    return content


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def read(*flags: str, file: Path = QUICK) -> DroneConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return read_config(file, vars(parser.parse_args(flags)))


# --- training


@pytest.mark.slow
def test_a_few_seconds_of_training_improve_the_drones_and_log_everything(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = train(out, "--train.total-timesteps", "320000")
    assert done.returncode == 0, done.stderr
    rows = metrics(out)
    assert set(rows[-1]) == {
        "step", "time", "mean_reward", "success_rate", "episode_length", "collision_rate", "sps", "agent_steps", "epoch",
        "learning_rate", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance",
    }  # fmt: skip
    assert [row["epoch"] for row in rows] == list(range(1, 158))
    assert rows[-1]["agent_steps"] == rows[-1]["step"] == 157 * 2048
    # After ten updates hundreds of episodes have ended. Five seeds gain 0.53 … 1.8 from there, and 0.04 … 0.6 succeed.
    early = rows[9]
    assert rows[-1]["mean_reward"] > early["mean_reward"] + 0.2
    assert rows[-1]["episode_length"] > 2 * early["episode_length"]
    assert rows[-1]["success_rate"] > early["success_rate"]
    assert all(0 <= row[name] <= 1 for row in rows for name in ("success_rate", "collision_rate"))
    assert rows[0]["learning_rate"] > rows[-1]["learning_rate"] > 0
    summary = json.loads((out / "trainer_summary.json").read_text())
    assert {"timestamp", "run_id", "train", "env", "vec", "metrics"} <= set(summary)
    assert summary["metrics"]["mean_reward"] == rows[-1]["mean_reward"]
    assert summary["metrics"]["agent_steps"] == rows[-1]["agent_steps"]
    assert summary["train"]["total_timesteps"] == 320000
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["best.pt", "latest.pt"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that kept all its checkpoints."""
    out = tmp_path_factory.mktemp("drone") / "first"
    done = train(out, *SMALL, "--autopilot.save-strategy", "all")
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_the_same_seed_produces_the_same_metrics_and_weights(first: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "again", *SMALL).returncode == 0
    assert metrics(tmp_path / "again", ("time", "sps")) == metrics(first, ("time", "sps"))
    latest = Path("checkpoints", "latest.pt")
    assert same(weights(tmp_path / "again" / latest), weights(first / latest))


READS = """
import runpy, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
train = runpy.run_path(sys.argv[1] + "/train.py")
config = train["DroneConfig"](train=train["TrainConfig"](fused=False))
trainer = train["DroneTrainer"](config, Path(sys.argv[2]), "")
trainer.policy.register_forward_pre_hook(lambda _, inputs: print(inputs[0].data_ptr() % 64))
buffer = np.zeros(trainer.obs.size + 1, np.float32)
trainer.obs = buffer[1:].reshape(trainer.obs.shape)  # NumPy itself aligns to 16 bytes only
trainer._collect()
"""


def test_observations_are_aligned_in_memory(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", READS, str(RECIPE), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (set(done.stdout.split()), done.returncode) == ({"0"}, 0), done.stderr


def test_without_a_compiler_training_runs_in_torch_and_numpy(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        command(tmp_path / "out", *SMALL), capture_output=True, text=True, timeout=PATIENCE_S, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "the update runs in torch, which is slower: it could not be compiled" in done.stdout
    assert "the simulation runs in numpy, which is slower: drones.c could not be compiled" in done.stdout
    again = train(tmp_path / "again", *SMALL, "--train.fused=False")
    assert "slower" not in again.stdout
    different = metrics(tmp_path / "out", ("time", "sps")), metrics(tmp_path / "again", ("time", "sps"))
    assert different[0] == different[1]


def test_training_continues_from_a_checkpoint_and_all_keeps_every_one(first: Path, tmp_path: Path) -> None:
    steps = [f"step_{n}.pt" for n in (1024, 2048, 3072, 4096)]
    assert sorted(path.name for path in (first / "checkpoints").iterdir()) == sorted(["best.pt", "latest.pt", *steps])
    latest = first / "checkpoints" / "latest.pt"
    assert same(weights(latest), weights(first / "checkpoints" / "step_4096.pt"))
    done = train(tmp_path, "drone_pickplace", *SMALL, "--load-model-path", str(latest))
    assert done.returncode == 0, done.stderr
    assert "continuing from" in done.stdout
    summary = json.loads((tmp_path / "trainer_summary.json").read_text())
    assert summary["env_name"] == "drone_pickplace"
    assert (summary["metrics"]["agent_steps"], summary["metrics"]["lifetime_steps"]) == (4096, 8192)
    assert not same(weights(latest), weights(tmp_path / "checkpoints" / "latest.pt"))


def test_sigterm_leaves_a_checkpoint_that_can_be_loaded(tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = [*SMALL, "--train.total-timesteps", "1e9", "--train.checkpoint-interval", "10000"]
    with subprocess.Popen(command(out, *flags), stdout=subprocess.PIPE, text=True) as process:
        patience = time.monotonic() + PATIENCE_S
        while not (out / "metrics.jsonl").exists():
            assert process.poll() is None
            assert time.monotonic() < patience
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        stdout, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143
    assert "stopped by SIGTERM" in stdout
    config = TrainConfig()
    policy = DronePolicy(24, 4)
    steps, notes = checkpoints.load(out / "checkpoints" / "latest.pt", policy, make_optimizer(policy, config), config)
    assert (
        steps
        == metrics(out)[-1]["agent_steps"]
        == json.loads((out / "trainer_summary.json").read_text())["metrics"]["agent_steps"]
    )
    assert notes == []


def test_a_run_that_diverges_is_reported_and_exits_with_one(tmp_path: Path) -> None:
    done = train(tmp_path / "run", *SMALL, "--train.learning-rate", "1e30", "--train.optimizer", "adam")
    assert done.returncode == 1
    assert "the training diverged in update 1" in done.stderr
    assert "lower train.learning_rate (1e+30)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_copied_lab_works_and_errors_have_no_traceback(tmp_path: Path) -> None:
    shutil.copytree(RECIPE, tmp_path / "lab", ignore=shutil.ignore_patterns("__pycache__"))
    argv = [sys.executable, "train.py", "--out", "run", "--train.bptt-horizon", "32"]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(argv, cwd=tmp_path / "lab", env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert done.stderr.startswith("train.batch_size is 2048, but the environments produce 4096 steps per update")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "lab" / "run").exists()


# --- settings


def test_flags_override_the_file_and_the_file_overrides_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"train": {"gamma": 0.5, "ent_coef": 1, "anneal_lr": False}}))
    loaded = read("--train.gamma", "0.25", "--train.total_timesteps", "1e6", file=file)
    assert (loaded.train.gamma, loaded.train.ent_coef, loaded.train.clip_coef) == (0.25, 1.0, 0.2)
    assert type(loaded.train.ent_coef) is float
    assert (loaded.train.total_timesteps, type(loaded.train.total_timesteps)) == (1_000_000, int)
    assert not loaded.train.anneal_lr


@pytest.mark.parametrize(
    ("flags", "value"),
    [(["--train.compile"], True), (["--train.compile", "True"], True), (["--train.compile", "false"], False), (["--train.no-compile"], False)],
)  # fmt: skip
def test_booleans_are_switches_or_take_a_value(flags: list[str], value: bool) -> None:
    assert read(*flags).train.compile is value


@pytest.mark.parametrize("booleans", ["switch", "value"])
def test_the_config_as_rendered_flags_is_the_same_config(booleans: str) -> None:
    config = json.loads(FULL.read_text())
    flags = render(config, ConfigRendering.model_validate({"as": "flags", "booleans": booleans}))
    assert read(*flags) == read(file=FULL)
    assert asdict(read(file=FULL)) == config


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train.minibatch-size", "1000"], "train.minibatch_size (1000) must divide train.batch_size (2048)"),
        (["--train.max-minibatch-size", "1000"], "train.max_minibatch_size (1000) must divide train.minibatch_size"),
        (["--vec.num-workers", "3"], "must be a multiple of vec.num_workers (3) (the next one is 6)"),
        (["--env.num-drones", "4"], "set train.batch_size, train.minibatch_size and train.max_minibatch_size to 1024"),
        (["--train.optimizer", "sgd"], "train.optimizer must be one of muon, adam, adamw, not 'sgd'"),
        (["--train.gamma", "much"], "train.gamma must be a number, not 'much'"),
        (["--train.gamma", "nan"], "train.gamma must be a number, not nan"),
        (["--train.update-epochs", "2.5"], "train.update_epochs must be an integer, not 2.5"),
        (["--train.gamma", "1.5"], "train.gamma must be between 0 and 1"),
        (["--train.learning-rate", "0"], "train.learning_rate must be > 0"),
        (["--env-name", "drone_race"], "env_name must be one of drone_hover, drone_pickplace"),
    ],
)
def test_invalid_values_are_rejected_with_their_key(flags: list[str], message: str) -> None:
    with pytest.raises(LabError) as rejected:
        read(*flags)
    assert message in str(rejected.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train": {"learning_rat": 0.1}}', "unknown key 'train.learning_rat' (did you mean 'train.learning_rate'?)"),
        ('{"train": {"compile": 1}}', "train.compile must be true or false, not 1"),
        ('{"train": ', "the config is not JSON"),
        ("[]", "must be a JSON object"),
    ],
)
def test_an_invalid_file_is_reported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LabError) as rejected:
        read(file=tmp_path / "config.json")
    assert str(rejected.value).startswith(str(tmp_path / "config.json"))
    assert message in str(rejected.value)


# --- checkpoints


def trained(train: TrainConfig) -> tuple[DronePolicy, torch.optim.Optimizer]:
    torch.manual_seed(1)
    policy = DronePolicy(24, 4)
    optimizer = make_optimizer(policy, train)
    learn(policy, optimizer, train)
    return policy, optimizer


def learn(policy: DronePolicy, optimizer: torch.optim.Optimizer, train: TrainConfig) -> None:
    rng = torch.Generator().manual_seed(5)
    a, b, c = (torch.randn(16, 128, size, generator=rng) for size in (24, 4, 4))
    rollout = DroneRollout(a, b, c[..., 0], c[..., 1], c[..., 2], (c[..., 3] > 1).float())
    update(policy, optimizer, rollout, torch.zeros(128), train, rng)


@pytest.mark.parametrize("name", ["muon", "adam", "adamw"])
def test_a_loaded_checkpoint_continues_exactly(tmp_path: Path, name: str) -> None:
    config = DroneConfig(train=TrainConfig(optimizer=name))
    policy, optimizer = trained(config.train)
    checkpoints.save(tmp_path / "a.pt", policy, optimizer, config, 77)
    loaded = DronePolicy(24, 4)
    again = make_optimizer(loaded, config.train)
    assert checkpoints.load(tmp_path / "a.pt", loaded, again, config.train) == (77, [])
    assert same(policy.state_dict(), loaded.state_dict())
    learn(policy, optimizer, config.train)
    learn(loaded, again, config.train)
    assert same(policy.state_dict(), loaded.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_hyperparameters_of_this_run_override_those_of_the_checkpoint(tmp_path: Path) -> None:
    policy, optimizer = trained(TrainConfig(adam_beta1=0.5))
    checkpoints.save(tmp_path / "a.pt", policy, optimizer, DroneConfig(), 0)
    again = make_optimizer(policy, TrainConfig(adam_beta1=0.8))
    checkpoints.load(tmp_path / "a.pt", policy, again, TrainConfig(adam_beta1=0.8))
    assert all(group["betas"] == (0.8, 0.999) for group in again.param_groups)


def test_another_optimizer_loads_only_the_weights_and_says_so(tmp_path: Path) -> None:
    policy, optimizer = trained(TrainConfig())
    checkpoints.save(tmp_path / "a.pt", policy, optimizer, DroneConfig(), 0)
    loaded, adam = DronePolicy(24, 4), TrainConfig(optimizer="adam")
    _, notes = checkpoints.load(tmp_path / "a.pt", loaded, make_optimizer(loaded, adam), adam)
    assert notes == ["weights only: the checkpoint's optimizer is muon, ours is adam"]
    assert same(policy.state_dict(), loaded.state_dict())


def test_checkpoints_of_another_network_and_other_files_are_rejected(tmp_path: Path) -> None:
    policy, optimizer = trained(TrainConfig())
    good = tmp_path / "good.pt"
    checkpoints.save(good, policy, optimizer, DroneConfig(), 0)
    (tmp_path / "torn.pt").write_bytes(good.read_bytes()[:-500])
    torch.save({"weights": torch.zeros(3)}, tmp_path / "strange.pt")
    wide = DronePolicy(30, 4)
    with pytest.raises(LabError, match=r"actor\.0\.weight is \(64, 24\) in the checkpoint, \(64, 30\) in the module"):
        checkpoints.load(good, wide, make_optimizer(wide, TrainConfig()), TrainConfig())
    for name, message in (
        ("torn", "not a checkpoint"),
        ("strange", "not a checkpoint"),
        ("missing", "no such checkpoint"),
    ):
        with pytest.raises(LabError, match=message):
            checkpoints.load(tmp_path / f"{name}.pt", policy, optimizer, TrainConfig())


def test_the_run_to_continue_from_is_found_next_to_the_run(tmp_path: Path) -> None:
    policy, optimizer = trained(TrainConfig())
    for age, name in ((100, "run-1"), (50, "run-2")):
        for kind in ("latest", "best"):
            path = tmp_path / name / "checkpoints" / f"{kind}.pt"
            checkpoints.save(path, policy, optimizer, DroneConfig(), 0)
            os.utime(path, (time.time() - age,) * 2)
    (tmp_path / "BEST").write_text("run-1\n")
    out = tmp_path / "run-3"
    assert checkpoints.find(out, read()) is None
    wanted = {
        "latest": tmp_path / "run-2" / "checkpoints" / "latest.pt",
        "best": tmp_path / "run-1" / "checkpoints" / "best.pt",
        "/some/where.pt": Path("/some/where.pt"),
    }
    for source, path in wanted.items():
        assert (
            checkpoints.find(out, read("--autopilot.resume-mode=continue", f"--autopilot.resume-from={source}")) == path
        )
    with pytest.raises(LabError, match="has such a checkpoint"):
        checkpoints.find(tmp_path / "elsewhere" / "run-1", read("--autopilot.resume-mode=continue"))


# --- the lab


def test_the_lab_admits_its_profiles_and_derives_the_batch() -> None:
    study = load_lab(RECIPE).study(None)
    assert set(study.knobs) <= set(KEYS)
    assert len(study.knobs) == 33
    guard = Guard(
        {path: Knob.make(path, spec) for path, spec in study.knobs.items()},
        [(rule.set, rule.to) for rule in study.normalise],
        study.derive,
        study.constraints,
    )
    full, quick = json.loads(FULL.read_text()), json.loads(QUICK.read_text())
    assert guard.admit(full).config == full
    assert guard.admit(apply_edits(full, [parse_edit(edit) for edit in study.modes["quick"]]).config).config == quick
    odd = guard.check(quick, ["vec.num_workers@set=3", "train.bptt_horizon@set=8"]).config
    assert (odd["vec"]["num_envs"], odd["train"]["batch_size"]) == (6, 4 * 8 * 6 * 8)
    refused = guard.check(quick, ["train.learning_rat@set=0.1", "train.gamma@set=2"]).problems
    assert {problem.rule for problem in refused} == {"not a knob", "knob range"}


def test_the_prompt_has_a_placeholder_for_every_field() -> None:
    text = (RECIPE / "prompts" / "next.md").read_text()
    for name in FIELDS:
        assert text.count(f"{{{name}}}") == 1
    assert text.count("{") == len(FIELDS)
    assert not (RECIPE / "proposals" / "next_config.json").exists()
