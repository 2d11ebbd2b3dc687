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
    checked = run(looplab, "check")
    assert checked.returncode == 0, checked.stderr
    assert (
        "eval.artifact_run_dir of configs/tune.yaml names outputs/tiny/latest, which does not exist" in checked.stdout
    )
    assert "all is well" not in checked.stdout
    (lab / "outputs/tiny/latest").mkdir(parents=True)
    assert "all is well" in run(looplab, "check").stdout
    (lab / "outputs/tiny/latest").rmdir()
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


def test_a_mistyped_key_in_the_file_is_reported_with_the_line_of_that_file(tmp_path: Path) -> None:
    looplab = str(Path(sys.executable).with_name("looplab"))
    subprocess.run([looplab, "init", "esm", "lab"], cwd=tmp_path, capture_output=True, check=True)
    path = tmp_path / "lab/configs/debug.yaml"
    lines = path.read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines) if line.startswith("online: {"))
    lines[number] = lines[number].replace("online: {", "online: {betta: 2, ")
    path.write_text("\n".join(lines) + "\n")
    for words in (("stage", "--config", "configs/debug.yaml", "mine"), ("check", "--config", "configs/debug.yaml")):
        done = subprocess.run([looplab, *words], cwd=tmp_path / "lab", capture_output=True, text=True)
        assert done.returncode == 2
        assert f"debug.yaml:{number + 1}: unknown key online.betta, did you mean beta?" in done.stderr
        assert "config_resolved.json" not in done.stderr
    assert not (tmp_path / "lab/outputs").exists()
