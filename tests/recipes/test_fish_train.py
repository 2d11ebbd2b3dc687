"""The trainer and the frozen evaluation of the fish recipe, run as a user runs them, and its lab files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import PATIENCE_S

pytest.importorskip("torch")
pytest.importorskip("PIL")

import torch
from PIL import Image

from looplab import recipes
from looplab.config.lab import load_lab
from looplab.errors import LabError

RECIPE = Path(recipes.__file__).parent / "fish"
sys.path.insert(0, str(RECIPE))  # the modules of the lab import each other by name

import evaluate as frozen  # noqa: E402
from fish_env import NUM_ACTIONS, OBS_DIM, STEPS, FishSchool  # noqa: E402

from looplab.recipes.fish.experiments.v1 import train as v1  # noqa: E402


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe, copied as `looplab init fish` copies it."""
    copy = tmp_path_factory.mktemp("fish") / "lab"
    shutil.copytree(RECIPE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def smoke(lab: Path) -> Path:
    """Output of a smoke run."""
    out = lab / "scratch"
    done = train(lab, "--smoke", "--out", str(out))
    assert done.returncode == 0, done.stderr
    return out


def train(lab: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(lab / "experiments/v1/train.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=lab.parent)


def evaluated(lab: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(lab / "evaluate.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=lab.parent)


def checkpoint(folder: Path, **changed: Any) -> Path:
    """A good checkpoint with random weights, or one in which something is changed."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(4)
    sizes = [OBS_DIM, 8, NUM_ACTIONS]
    arrays = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in {"w0": (OBS_DIM, 8), "b0": (8,), "w1": (8, NUM_ACTIONS), "b1": (NUM_ACTIONS,)}.items()
    }
    arrays |= {name: value for name, value in changed.items() if name in ("w0", "b1", "w2")}
    np.savez(folder / "policy.npz", **arrays)
    layout = {"format": "fish-policy-1", "weights": "policy.npz", "sizes": sizes, "activation": "tanh"}
    layout |= {name: value for name, value in changed.items() if name in layout}
    (folder / "policy.json").write_text(json.dumps(layout))
    return folder


# --- training


@pytest.mark.slow
def test_a_smoke_run_writes_all_required_artifacts(smoke: Path) -> None:
    rows = [json.loads(line) for line in (smoke / "logs/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    assert {"survival_rate", "mean_reward", "entropy", "value_loss", "learning_rate"} <= rows[0].keys()
    assert rows[-1]["eval/survival_rate"] == json.loads((smoke / "eval.json").read_text())["survival_rate"]
    with Image.open(smoke / "plots/curves.png") as picture:
        assert picture.format == "PNG"
    with Image.open(smoke / "media/episode.gif") as film:
        assert film.format == "GIF"
        assert film.n_frames > 5
    assert {path.name for path in (smoke / "checkpoints").iterdir()} == {"policy.json", "policy_000003.npz"}


@pytest.mark.slow
def test_tensorboard_shows_the_rows_of_the_log(smoke: Path) -> None:
    pytest.importorskip("tensorboard")
    rows = [json.loads(line) for line in (smoke / "logs/metrics.jsonl").read_text().splitlines()]
    (file,) = (smoke / "tb_logs").glob("events.out.tfevents.*")
    curves = {name: dict(zip(curve.steps, curve.values, strict=True)) for name, curve in read_events(file).items()}
    assert {name for row in rows for name in row} - {"step", "time"} <= set(curves)
    for row in rows[:3]:
        assert curves["survival_rate"][row["step"]] == pytest.approx(row["survival_rate"], rel=1e-6)
    assert curves["eval/survival_rate"][3] == pytest.approx(rows[-1]["eval/survival_rate"], rel=1e-6)


def test_events_of_a_previous_run_are_replaced_and_of_a_resumed_one_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "events.out.tfevents.1.host").write_text("of a previous run")
    (tmp_path / ".gitkeep").write_text("")
    for iteration in (1, 6):
        board = v1.open_tensorboard(tmp_path, iteration)
        board.add_scalar("entropy", 0.5, iteration)
        board.close()
    found = [read_events(file)["entropy"].steps for file in tmp_path.glob("events*")]
    assert sorted(found) == [[1], [6]]
    assert (tmp_path / ".gitkeep").exists()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "tensorboardX", None)  # type: ignore[arg-type]
    assert v1.open_tensorboard(tmp_path / "other", 1) is None
    assert "TensorBoard is not installed (pip install tensorboard)" in capsys.readouterr().out


def read_events(file: Path) -> Any:
    from looplab.measure.tensorboard import TensorBoardSource

    return TensorBoardSource(file).poll(final=True)


def test_every_schedule_reaches_its_declared_end(smoke: Path) -> None:
    declared = json.loads((smoke / "schedule.json").read_text())
    trace = json.loads((smoke / "schedule_trace.json").read_text())["trace"]
    assert [row["iteration"] for row in trace] == [1, 2, 3]
    assert all(0.0 <= row["survival_rate"] <= 1.0 for row in trace)
    for name, wanted in declared.items():
        values = [row[name] for row in trace]
        assert values[0] == wanted["start"]
        assert values[-1] == wanted["end"]


def test_weights_depend_only_on_the_seed(smoke: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        v1.run(v1.read_config(None, {"smoke": True, "seed": seed}), tmp_path / str(seed), smoke=True)
    first, again, other = (
        frozen.load_policy(out / "checkpoints").sha256 for out in (smoke, tmp_path / "0", tmp_path / "1")
    )
    assert first == again != other


def test_observations_are_aligned_in_memory() -> None:
    trainer = v1.FishTrainer(v1.FishConfig(num_envs=6, num_fish=3, steps=4))
    seen: list[int] = []
    trainer.policy.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].data_ptr() % 64))
    buffer = np.zeros(6 * 3 * OBS_DIM + 1, np.float32)
    trainer.obs = buffer[1:].reshape(6, 3, OBS_DIM)  # NumPy itself aligns to 16 bytes only
    trainer.collect()
    assert seen == [0] * 5


def test_too_few_ponds_are_rejected_unless_it_is_a_smoke_test() -> None:
    with pytest.raises(LabError, match=r"num_envs is 32, but must be at least 64 \(or use --smoke\)"):
        v1.read_config(None, {"smoke": False, "num_envs": 32})
    assert v1.read_config(None, {"smoke": True, "num_envs": 32}).num_envs == 32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[1]", "the config must be a JSON object"),
        ("{", "the config is not JSON"),
        ('{"learning": 1}', "unknown keys: learning"),
        ('{"epochs": 1.5}', "epochs must be an integer, not 1.5"),
        ('{"epochs": 0}', "epochs must be at least 1, not 0"),
        ('{"gamma": 2}', "gamma must be between 0 and 1, not 2.0"),
    ],
)
def test_an_invalid_config_is_rejected_with_its_key(config: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(config)
    with pytest.raises(LabError, match=f"config.json: {message}"):
        v1.read_config(file, {"smoke": False})


def test_dead_fish_are_not_samples_and_death_is_a_termination() -> None:
    trainer = v1.FishTrainer(v1.FishConfig(num_envs=6, num_fish=4, steps=20))
    trainer.school.position[:, 0] = 0.2  # the fish of the first pond are on top of the predator
    trainer.school.position[:, 1, 0] = 0.2  # and one of the second
    trainer.obs = trainer.school.observe()
    rollout, next_values = trainer.collect()
    acted, done = (x.reshape(20, 6, 4) for x in (rollout.acted, rollout.dones))
    assert done[0, 0].all()
    assert acted[1, 0].all()  # their pond has been reset
    assert done[0, 1].tolist() == [True, False, False, False]
    assert not acted[1:, 1, 0].any()
    assert acted[:, 1, 1:].sum() > 0
    found = v1.compute_advantages(rollout, next_values, 0.99, 0.95).reshape(20, 6, 4)
    alone = (rollout.rewards - rollout.values).reshape(20, 6, 4)
    assert found[0, 1, 0] == pytest.approx(float(alone[0, 1, 0]))  # no bootstrapping after death


def test_the_saved_policy_acts_like_the_trained_network(tmp_path: Path) -> None:
    torch.manual_seed(3)
    policy = v1.FishPolicy(16)
    torch.nn.init.normal_(policy.actor[4].weight)
    v1.save_policy(tmp_path, policy, 7)
    seen = FishSchool(5, 6, seed=1).observe()  # the best two actions of a fish are 0.012 apart, rounding is 1e-6
    with torch.no_grad():
        expected = policy(torch.from_numpy(seen))[0].argmax(-1)
    assert frozen.load_policy(tmp_path)(seen).tolist() == expected.tolist()
    assert len(set(expected.flatten().tolist())) > 1


def test_curves_are_drawn_without_matplotlib_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pictures import save_curves

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    save_curves(tmp_path / "plots/curves.png", [{"a": 0.1, "b": 1.0}, {"a": 0.3, "b": 1.0}], ("a", "b"))
    with Image.open(tmp_path / "plots/curves.png") as picture:
        assert picture.size == (560, 280)
        assert (20, 80, 160) in {colour for _, colour in picture.getcolors()}


# --- the frozen evaluation


def test_the_evaluation_is_deterministic_and_needs_no_torch(lab: Path, tmp_path: Path) -> None:
    good = checkpoint(tmp_path / "good")
    blocked = "import sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    results = []
    for number, start in enumerate(([str(lab / "evaluate.py")], ["-c", blocked, str(lab / "evaluate.py")])):
        out = tmp_path / f"{number}.json"
        command = [sys.executable, *start, "--checkpoint", str(good), "--episodes", "4", "--out", str(out)]
        environment = {"PYTHONPATH": str(lab)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
        assert done.returncode == 0, done.stderr
        results.append(out.read_bytes())
    assert results[0] == results[1]
    result = json.loads(results[0])
    assert len(result["survival_values"]) == result["episodes"] == 4
    assert result["survival_rate"] == pytest.approx(np.mean(result["survival_values"]))
    assert result["min_survival"] == min(result["survival_values"])
    assert result["survival_low"] <= result["survival_rate"] <= result["survival_high"]
    steps = list(result["death_step"].values())
    assert list(result["death_step"]) == ["p10", "p25", "p50", "p75", "p90"]
    assert steps == sorted(steps)
    assert 1 <= steps[0] <= steps[-1] <= STEPS


def test_more_episodes_start_with_the_same_ponds(tmp_path: Path) -> None:
    policy = frozen.load_policy(checkpoint(tmp_path))
    few, more = (frozen.evaluate(policy, episodes)["survival_values"] for episodes in (3, 5))
    assert more[:3] == few


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "other"}, "this is not a policy of the format 'fish-policy-1'"),
        ({"sizes": [18, 9, 5]}, r"w0 is float32 \(18, 8\), but `sizes` requires float32 \(18, 9\)"),
        ({"sizes": [18, 8, 8, 5]}, "the weights do not match `sizes`"),
        ({"sizes": [17, 8, 5]}, "`sizes` does not match the environment"),
        ({"sizes": [18, 10**9, 5]}, "`sizes` must be a list of integers from"),
        ({"activation": "exec"}, "`activation` must be one of tanh, relu"),
        ({"weights": "../policy.npz"}, "`weights` must name a file in the same folder"),
        ({"weights": "gone.npz"}, "cannot read the weights: No such file"),
        ({"b1": np.full(5, np.nan, np.float32)}, "the weights are not all finite"),
        ({"b1": np.zeros(5)}, "b1 is float64"),
        ({"b1": np.array([len] * 5, object)}, "the weights"),  # not `print`, which Ray replaces
        ({"w2": np.zeros(3, np.float32)}, "the weights do not match `sizes`: found b0, b1, w0, w1, w2"),
    ],
)
def test_an_invalid_checkpoint_is_rejected_with_the_reason(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(LabError, match=message):
        frozen.load_policy(checkpoint(tmp_path, **changed))


@pytest.mark.parametrize("torn", ["policy.json", "policy.npz"])
def test_a_torn_checkpoint_is_rejected(torn: str, tmp_path: Path) -> None:
    file = checkpoint(tmp_path) / torn
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(LabError, match=torn):
        frozen.load_policy(tmp_path)


def test_the_script_fails_without_a_traceback_and_writes_nothing(lab: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = evaluated(lab, "--checkpoint", str(tmp_path / "nowhere"), "--out", str(out))
    assert done.returncode == 2
    assert done.stderr.endswith("(train first, or pass the folder with policy.json)\n")
    assert "Traceback" not in done.stderr
    assert not out.exists()


# --- the lab


def test_every_knob_of_the_lab_is_a_key_of_the_config_which_has_the_trainers_defaults() -> None:
    study = load_lab(RECIPE).study(None)
    config = json.loads((RECIPE / "configs/v1.json").read_text())
    assert v1.read_config(RECIPE / "configs/v1.json", {"smoke": False}) == v1.FishConfig()
    assert study.knobs.keys() <= config.keys()
    assert all((RECIPE / name).is_file() for name in study.evaluator)


def test_the_settings_of_the_versions_are_right_and_v1_has_what_they_ask_for() -> None:
    room = pytest.importorskip("looplab.iterate.settings")
    settings = room.load(RECIPE, {})
    assert all((RECIPE / name).is_file() for name in settings.frozen)
    text = (RECIPE / "experiments/v1/dev_v1.md").read_text()
    for headings in settings.sections:
        assert any(f"## {heading}" in text for heading in headings)
    for name in ("checkpoints", "logs", "tb_logs", "plots", "media"):
        assert (RECIPE / "experiments/v1/artifacts" / name / ".gitkeep").is_file()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_document_of_v1_says_what_its_code_gives(tmp_path: Path) -> None:
    text = (RECIPE / "experiments/v1/dev_v1.md").read_text()
    row = re.search(r"^\| v1 \| ([\d.]+) \[([\d.]+), ([\d.]+)\]", text, re.MULTILINE)
    assert row is not None
    said, low, high = map(float, row.groups())
    lab = tmp_path / "lab"
    shutil.copytree(RECIPE, lab, ignore=shutil.ignore_patterns("__pycache__"))
    checkpoint = ["--checkpoint", "experiments/v1/artifacts/checkpoints"]
    for argv in (["experiments/v1/train.py"], ["evaluate.py", *checkpoint]):
        done = subprocess.run([sys.executable, *argv], cwd=lab, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    found = float(json.loads(done.stdout)["survival_rate"])
    # To the digit on the machine it was written on; another processor may round otherwise, and a training is chaotic.
    assert low <= said <= high
    assert low <= found <= high
