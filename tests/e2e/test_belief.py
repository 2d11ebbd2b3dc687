"""The config that the model believes in, trade-offs and earlier studies, as a person meets them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import looplab
from looplab.measure.digits import with_spread

TRAIN = """\
import json, math, os, random
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
luck = random.Random(f"{config['seed']} {config['lr']} {config['wd']}").gauss(0, 0.3)
loss = (math.log10(config["lr"]) + 2) ** 2 + 4 * (config["wd"] - 0.3) ** 2 + luck
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    print(json.dumps({"step": 1, "loss": loss, "size": 1 - config["wd"]}), file=file)
"""
DRONE = """\
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--config"), parser.add_argument("--out")
given = parser.parse_args()
train = json.loads(pathlib.Path(given.config).read_text())["train"]
assert 64 <= train["batch_size"] <= 65536
row = {"step": 1, "mean_reward": -abs(train["ent_coef"] - 0.3)}
pathlib.Path(given.out, "metrics.jsonl").write_text(json.dumps(row) + "\\n")
"""
KNOBS = {"lr": {"type": "float", "low": 1e-5, "high": 1, "log": True}, "wd": {"type": "float", "low": 0, "high": 1}}


@pytest.fixture(scope="module")
def noisy(make_shared_lab: Callable[[str], Any]) -> Any:
    """A lab after a study of 24 noisy runs."""
    lab = make_shared_lab("noisy")
    lab.write("train.py", TRAIN)
    lab.write("configs/base.json", json.dumps({"lr": 0.3, "wd": 0.9, "seed": 1}))
    lab.configure(
        objective={"metric": "loss", "goal": "min"}, seed="seed", knobs=KNOBS, proposers=[{"search": "auto"}],
        round_size=4, slots={"count": 2}, budget={"runs": 24}, modes={},
    )  # fmt: skip
    lab("run")
    return lab


@pytest.mark.slow
def test_the_best_run_is_the_believed_one_and_is_named_beside_the_luckiest(noisy: Any) -> None:
    (status,) = json.loads(noisy("status", "--json").out)["studies"]
    belief = status["belief"]["best"][0]
    assert status["best"]["id"] == belief["run"] == (noisy.outputs() / "BEST").read_text().strip()
    luckiest = min((value, run) for run, value in noisy.ask("SELECT id, objective FROM runs WHERE objective NOT NULL"))
    assert status["luckiest"]["id"] == luckiest[1]
    assert f"the model believes in {belief['run']}: loss" in noisy("status").out
    shown = noisy("show", "BEST").out
    assert f"the model believes: {with_spread(belief['mean'], belief['sd'])}, the best of all configs" in shown
    noisy("report")
    report = (noisy.outputs() / "report.md").read_text()
    assert "## What the model believes" in report
    assert "what matters (share of the predicted variance)" in report
    study = looplab.open(noisy.folder).study()
    assert study.belief is not None
    assert study.best is not None
    assert study.luckiest is not None
    assert (study.best.id, study.luckiest.id) == (study.belief.best[0].run, luckiest[1])
    noisy("verify")


@pytest.mark.slow
def test_the_believed_config_is_repeated_with_other_seeds_and_seldom(noisy: Any) -> None:
    repeats = noisy.ask("SELECT twin, seed, proposer FROM runs WHERE role='replicate'")
    assert 1 <= len(repeats) <= 2  # a tenth of 24 runs
    assert all(proposer == "search" and seed > 1 for _, seed, proposer in repeats)


@pytest.mark.slow
def test_the_next_study_begins_where_this_one_ended_and_shows_what_it_believed(noisy: Any) -> None:
    noisy.configure(study="next", budget={"runs": 8})
    assert "the search learns from toy" in noisy("run").out
    report = (noisy.outputs("next") / "report.md").read_text()
    assert "## What the model believed before the first run" in report
    assert "toy (2" in report  # so many configs
    first = noisy.read(noisy.runs("next")[1], "config.json")
    assert abs(first["lr"] - 0.01) < 0.05
    (status,) = json.loads(noisy("status", "--json").out)["studies"]
    assert status["belief"] is None or "toy" in status["belief"]["earlier"]
    noisy.configure(study="toy", budget={"runs": 24})


@pytest.mark.slow
def test_a_front_of_two_objectives_is_searched_and_a_price_makes_it_one(lab: Any) -> None:
    lab.write("train.py", TRAIN)
    lab.write("configs/base.json", json.dumps({"lr": 0.3, "wd": 0.9, "seed": 1}))
    size = {"metric": "size", "goal": "min"}
    lab.configure(
        objective={"metric": "loss", "goal": "min", "pareto": [size]}, seed="seed", knobs=KNOBS,
        proposers=[{"search": {"sampler": "auto", "cost": "seconds", "repeat_share": 0}}], round_size=4,
        slots={"count": 2}, budget={"runs": 14}, modes={},
    )  # fmt: skip
    lab("run")
    lab("report")
    report = (lab.outputs() / "report.md").read_text()
    assert "## Pareto front" in report
    assert "hypervolume" in report
    assert "the expected improvement per second" in report
    lab.configure(
        study="priced",
        objective={"metric": "loss", "goal": "min", "pareto": [{**size, "price": 2}]},
        budget={"runs": 1},
    )
    lab("run")
    summary = lab.read(lab.runs("priced")[0], "summary.json")
    metrics = summary["metrics"]
    assert summary["objective"]["value"] == pytest.approx(metrics["loss"]["last"] + 2 * metrics["size"]["last"])


@pytest.mark.slow
def test_search_finds_legal_configs_with_the_drone_recipes_own_knobs(lab: Any, tmp_path: Path) -> None:
    folder = tmp_path / "drone"
    lab("init", "drone", str(folder))
    (folder / "train.py").write_text(DRONE)
    text = (folder / "lab.yaml").read_text().replace("  - queue: proposals.yaml", "  - search: auto")
    lines = [line for line in text.splitlines() if not line.startswith(("judge:", "  - {name: stalled"))]
    (folder / "lab.yaml").write_text("\n".join(lines) + "\n")
    lab("run", "--lab", str(folder), "--runs", "13", "--rounds", "13", "--informal")
    (status,) = json.loads(lab("status", "--lab", str(folder), "--json").out)["studies"]
    assert status["counts"] == {"ok": 13}
