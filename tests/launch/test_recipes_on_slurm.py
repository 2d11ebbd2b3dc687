"""The quick modes of the recipes run unchanged on a real Slurm."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.launch.slurm_cluster import SlurmCluster
from tests.launch.studies import COMMAND

from looplab.config.lab import load_lab
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
RECIPES = {
    "quickstart": (),
    "act_ot": ("--mode", "quick"),
    "drone": ("--mode", "quick"),
    "esm": (),
    "fish": ("--mode", "quick"),
    "mario": ("--mode", "quick"),
}
"""Recipe → the words that make a run of it short."""
BEFORE = {"esm": ("stage", "--config", "configs/tiny.yaml", "mine", "select", "memory")}
"""Recipe → the command that its README asks for before the first run."""
NEEDS = {"drone": "torch", "esm": "transformers", "fish": "torch", "mario": "gym_super_mario_bros", "act_ot": "ot"}
"""Recipe → a package without which it cannot run."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_unchanged_on_slurm(
    recipe: str, cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recipe in NEEDS and find_spec(NEEDS[recipe]) is None:
        pytest.skip(f"{NEEDS[recipe]} is not installed")
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    lab = tmp_path / "lab"
    subprocess.run([COMMAND, "init", recipe, str(lab)], check=True, stdout=subprocess.DEVNULL)
    if recipe in BEFORE:
        subprocess.run([COMMAND, *BEFORE[recipe]], cwd=lab, check=True, stdout=subprocess.DEVNULL)
    words = ("run", "--lab", str(lab), "--runs", "1", "--executor", "slurm", *RECIPES[recipe])
    done = subprocess.run([COMMAND, *words], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    (ledger,) = lab.glob(".looplab/ledger.db")
    study = next(iter(load_lab(lab).studies))
    runs = StudyLedger(Ledger(ledger), study).runs()
    assert [run.status for run in runs] == ["ok"]
    assert runs[0].job
    place = lab / "outputs" / study / runs[0].id / "record/place.json"
    assert '"SLURMD_NODENAME"' in place.read_text()
