"""The commands as people type them: run.py hands over to looplab, and a mistyped key costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import PATIENCE_S

import looplab.recipes.esm as recipe

FOLDER = Path(recipe.__path__[0])


def handed(*words: str) -> list[str] | None:
    """Return what run.py hands over to looplab, without the lab."""
    code = f"import json, sys; sys.path.insert(0, {str(FOLDER)!r}); import run; print(json.dumps(run.hand_over(sys.argv[1:])))"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    argv = json.loads(done.stdout)
    return None if argv is None else argv[: argv.index("--lab")]


def test_commands_without_a_run_folder_are_handed_over() -> None:
    assert handed("--config", "c.yaml", "eval") == ["stage", "--config", "c.yaml", "eval"]
    assert handed("mine", "--config=c.yaml", "--run-id", "r") == ["stage", "--config=c.yaml", "--run-id", "r", "mine"]
    assert handed("--config", "s.yaml", "suite", "--gpus", "0,1") == ["suite", "--config", "s.yaml", "--gpus", "0,1"]
    case = ["--config", "c.yaml", "--run-id", "r", "case", "--example-ids", "0,6"]
    assert handed(*case) == ["case", "--config", "c.yaml", "--run-id", "r", "--example-ids", "0,6"]
    assert handed("mine", "--config", "c.yaml", "--run-dir", "out") is None
    assert handed("demo") is None
    assert handed("-h") is None


@pytest.mark.slow
def test_a_mistyped_key_leaves_everything_as_it_was(tmp_path: Path) -> None:
    looplab = str(Path(sys.executable).with_name("looplab"))
    lab = tmp_path / "lab"

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, cwd=lab if lab.exists() else tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
        )

    assert (
        "&& looplab stage --config configs/tiny.yaml mine select memory && looplab run"
        in run(looplab, "init", "esm", "lab").stdout
    )
    toy = ["--edit", "model.backend@set=toy", "--edit", "eval.ablations@set=[]"]
    config = ["--config", "configs/debug.yaml"]
    done = run(sys.executable, "run.py", *config, "--run-id", "r", "mine", *toy, "select", "memory", "eval")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = lab / "outputs" / "debug" / "r"
    resolved = json.loads((folder / "config_resolved.json").read_text())
    assert {"beta", "rho", "tau_null", "k_scale"} <= set(resolved["online"])
    tables = (folder / "tables" / "main_results_single.csv").read_text()
    for edit, stage in (("online.betta@new=2", "eval"), ("offline_mine.keep_topC@new=99", "mine")):
        wrong = run(looplab, "stage", *config, "--run-id", "r", *toy, "--edit", edit, stage)
        assert wrong.returncode == 2
        assert f"unknown key {edit.split('@')[0]}, did you mean" in wrong.stderr
        assert edit in run(looplab, "check", *config, *toy, "--edit", edit).stderr
    assert (folder / "tables" / "main_results_single.csv").read_text() == tables
    assert (folder / "mine").is_dir()
    assert json.loads((folder / "config_resolved.json").read_text()) == resolved
    assert (lab / "outputs" / "debug" / "LATEST").read_text() == "r\n"
    memory = ["--edit", "model.gpu_memory_utilization@new=0.4", "--edit", "task.max_eval_examples@new=70"]
    more = run(looplab, "stage", *config, "--run-id", "r", *toy, *memory, "--json", "mine", "eval")
    assert [stage["how"] for stage in json.loads(more.stdout)["stages"]] == ["skipped", "complete"], more.stderr
