"""The trainer of the act_ot recipe, started with the flags of a user or of the lab."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab import recipes
from looplab.config.lab import load_lab

pytest.importorskip("torch")
pytest.importorskip("ot")
RECIPE = Path(recipes.__file__).parent / "act_ot"
BASELINE = json.loads((RECIPE / "configs" / "baseline.json").read_text())
FEW = ("--dataset.source_episodes=6", "--dataset.target_episodes=10", "--dataset.held_out_episodes", "3")
WITHOUT_LOOPLAB = """
import runpy, sys
sys.modules["looplab"] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv.pop(0))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def main() -> Iterator[Callable[[list[str]], None]]:
    """`main` of train.py, loaded like a script, with the modules next to it. Importing PyTorch takes seconds, so most
    tests share one process."""
    siblings = ("demos", "ot_loss", "pairs", "policy")
    before, keep = {name: sys.modules.pop(name, None) for name in siblings}, list(sys.path)
    sys.path.insert(0, str(RECIPE))
    yield runpy.run_path(str(RECIPE / "train.py"))["main"]
    sys.path[:] = keep
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture(autouse=True)
def _outside_of_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("LOOPLAB_", "WANDB_")):
            monkeypatch.delenv(name)


def flags(out: Path, data: Path, *more: str) -> list[str]:
    return [f"--dataset.root={data}", "--output_dir", str(out), *more]


def start(out: Path, data: Path, *more: str, how: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-B", *how, str(RECIPE / "train.py"), *flags(out, data, *more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors


def rows(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "time"} for row in found]


def softer(tmp_path: Path) -> Path:
    """The baseline with the settings recommended for a plan without mass."""
    config = json.loads(json.dumps(BASELINE))
    config["ot"]["loss_config"] |= {"reg": 0.5, "tau_src": 3.0, "tau_tgt": 3.0}
    config["ot"]["loss_config"]["features"][3]["weight_label"] = 0.002
    path = tmp_path / "softer.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.slow
def test_a_run_logs_all_names_and_the_baselines_plan_has_no_mass_until_it_is_softened(
    main: Any, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    monkeypatch.setenv("LOOPLAB_METRICS", str(metrics))
    often = ("--steps=60", "--log_freq=20", "--eval_freq=60", "--policy.device", "cpu", "--wandb.enable=false")
    main(flags(tmp_path / "run" / "out", data, *often))
    found = rows(metrics)
    assert [row["step"] for row in found] == [20, 40, 60]
    assert set(load_lab(RECIPE).study(None).measure.aliases) | {"eval/held_out/avg_l1", "train/ot_not_finite"} <= set(
        found[-1]
    )
    assert not any(name.startswith("eval/") for name in found[0])
    assert found[-1]["train/loss"] < found[0]["train/loss"]
    assert all(row["train/ot_pi_sum"] < 1e-9 and row["train/ot_not_finite"] == 0 for row in found)
    assert found[-1]["train/lr"] == BASELINE["optimizer"]["lr"]
    summary = json.loads((metrics.parent / "trainer_summary.json").read_text())
    assert summary["eval/offline_eval/avg_l1"] == found[-1]["eval/offline_eval/avg_l1"]
    assert (tmp_path / "run" / "out" / "policy.npz").exists()

    monkeypatch.delenv("LOOPLAB_METRICS")
    main(flags(tmp_path / "softer", data, *often, "--config_path", str(softer(tmp_path))))
    assert all(row["train/ot_pi_sum"] > 1e-3 for row in rows(tmp_path / "softer" / "metrics.jsonl"))


@pytest.mark.slow
def test_trainers_that_start_at_once_share_the_data_and_the_same_seed_gives_the_same_metrics(
    main: Any, tmp_path: Path
) -> None:
    few = (*FEW, "--steps=15", "--log_freq=5", "--eval_freq=10", f"--config_path={softer(tmp_path)}")
    both = [start(tmp_path / name, tmp_path / "data", *few, "--seed=3") for name in ("one", "again")]
    for process in both:
        end(process)
    assert [path.suffix for path in (tmp_path / "data").iterdir()] == [".npz"]
    main(flags(tmp_path / "other", tmp_path / "data", *few, "--seed", "4"))
    one, again, other = (rows(tmp_path / name / "metrics.jsonl") for name in ("one", "again", "other"))
    assert one == again
    assert one != other
    assert [row["step"] for row in one] == [5, 10, 15]
    assert "eval/held_out/avg_l1" in one[-1], "the last step is evaluated, whatever eval_freq says"


@pytest.mark.slow
def test_without_transport_the_batches_are_the_same_and_looplab_is_not_needed(
    main: Any, tmp_path: Path, data: Path
) -> None:
    few = (*FEW, "--steps=4", "--log_freq=1")
    alone = ("-c", WITHOUT_LOOPLAB, str(RECIPE))
    end(start(tmp_path / "bc", data, *few, f"--config_path={RECIPE / 'configs' / 'bc.json'}", how=alone))
    main(flags(tmp_path / "ot", data, *few))
    bc, ot = rows(tmp_path / "bc" / "metrics.jsonl"), rows(tmp_path / "ot" / "metrics.jsonl")
    assert [row["train/l1_loss"] for row in bc] == pytest.approx([row["train/l1_loss"] for row in ot], rel=1e-4)
    assert not any(name.startswith("train/ot_") for row in bc for name in row), "what is not measured is not logged"
    assert json.loads((tmp_path / "bc" / "trainer_summary.json").read_text())["steps"] == 4


def test_a_loss_that_is_not_finite_stops_the_run_with_a_message(main: Any, tmp_path: Path, data: Path) -> None:
    lr = ("--optimizer.lr=1e30", "--policy.optimizer_lr=1e30")
    # Whether it is nan or inf depends on the order of additions.
    with pytest.raises(SystemExit, match=r"the loss is (nan|inf) at step .*; lower optimizer.lr"):
        main(flags(tmp_path / "run", data, *FEW, *lr, "--steps=50"))
    assert rows(tmp_path / "run" / "metrics.jsonl")[-1]["train/loss"] in ("NaN", "Infinity")


def test_steps_with_a_plan_that_is_not_finite_are_counted_and_not_logged(
    main: Any, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_finite(cost: Any, config: Any) -> Any:
        return cost * float("nan"), True

    monkeypatch.setattr(sys.modules["ot_loss"], "transport_plan", never_finite)
    main(flags(tmp_path / "run", data, *FEW, "--steps=4", "--log_freq=2"))
    found = rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["train/ot_not_finite"] for row in found] == [2, 4]
    assert not any("train/ot_loss" in row or "train/ot_pi_sum" in row for row in found)


def test_metrics_are_logged_to_wandb_if_enabled(main: Any, tmp_path: Path, data: Path) -> None:
    pytest.importorskip("wandb")
    main(flags(tmp_path / "run", data, *FEW, "--steps=2", "--wandb.enable=true", "--wandb.mode", "offline"))
    assert list((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((), "already exists; choose another one"),
        (("--steps",), "--steps needs a value"),
        (("--stepps=3",), "unknown key stepps"),
        (("--steps.more=3",), "steps is not a section"),
        (("--config_path=nowhere.json",), "cannot read nowhere.json"),
        (("--batch_size=12.5",), "batch_size must be an integer ≥ 1, not 12.5"),
        (("--optimizer.lr=0.1",), "change both together"),
        (("--policy.chunk=3",), "unknown key policy.chunk"),
        (("--policy.device=tpu",), "policy.device must be cpu, cuda or mps"),
        (("--ot.lambda=3",), "unknown key ot.lambda"),
        (("--ot.bc_src_weight=null",), "ot.bc_src_weight must be a number ≥ 0, not None"),
        (("--output_dir=",), "output_dir is missing"),
    ],
)
def test_an_invalid_config_is_reported_before_anything_is_written(
    main: Any, tmp_path: Path, data: Path, wrong: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        main(flags(tmp_path / "run" if wrong else tmp_path, data, *FEW, *wrong))
    assert not list(tmp_path.iterdir())


def test_the_lab_passes_its_check(tmp_path: Path) -> None:
    for command in (["init", "act_ot", str(tmp_path / "lab")], ["check", "--lab", str(tmp_path / "lab")]):
        done = subprocess.run(
            [sys.executable, "-m", "looplab", *command], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout
