"""Trainers whose output folder must not exist: `looplab try` notices it, in the first run, and gives them a new one."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S
from tests.e2e.conftest import COMMAND

from looplab.config.files import read_config
from looplab.onboard.output_folder import refuses_existing

ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
TRAIN = """
import argparse, os, pathlib, sys
p = argparse.ArgumentParser()
p.add_argument('--lr', type=float, default=0.1)
p.add_argument('--seed', type=int, default=1)
p.add_argument('--out', default='results/first')
p.add_argument('--data', default='data/numbers.txt')
a = p.parse_args()
open(a.data).close()
"""
MEASURE = "open(os.path.join(a.out, 'model.txt'), 'w').close()\nprint(f'val_loss: {a.lr * a.seed}')\n"


def looplab(folder: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [str(COMMAND), *words], cwd=folder, env=ENV, capture_output=True, text=True, timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def project(folder: Path, code: str, *arguments: str) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "numbers.txt").write_text("1")
    (folder / "train.py").write_text(TRAIN + code + MEASURE)
    looplab(folder, "init", "python", "train.py", *arguments)


@pytest.mark.parametrize(
    "code",
    [
        "os.makedirs(out)",
        "os.makedirs(out, exist_ok=False)",
        "pathlib.Path(out).mkdir(parents=True)",
        "def main():\n    for out in outs:\n        os.mkdir(out)\nmain()",
        "if os.path.exists(out) and not args.overwrite:\n    raise ValueError(f'{out} already exists and is not empty')",
        "if os.listdir(out):\n    sys.exit('the output folder is not empty')",
        "if out.exists():\n    raise FileExistsError(out)",
    ],
)
def test_a_program_that_insists_on_a_new_folder_is_recognised(code: str) -> None:
    assert refuses_existing([ast.parse(code)])


@pytest.mark.parametrize(
    "code",
    [
        "os.makedirs(out, exist_ok=True)",
        "if not os.path.exists(out):\n    os.makedirs(out)",
        "if not out.is_dir():\n    out.mkdir()\nelse:\n    print('there')",
        "try:\n    os.mkdir(out)\nexcept FileExistsError:\n    pass",
        "with contextlib.suppress(FileExistsError):\n    os.mkdir(out)",
        "out = f'runs/{time.strftime(\"%Y\")}'\nos.makedirs(out)",
        "shutil.rmtree(out, ignore_errors=True)\nos.makedirs(out)",
        "if not data.exists():\n    raise FileNotFoundError(f'{data} does not exist')",
        "",
    ],
)
def test_a_program_that_takes_any_folder_is_not_suspected(code: str) -> None:
    assert not refuses_existing([ast.parse(code)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    ["os.makedirs(a.out)\n", "if os.listdir(a.out):\n    raise ValueError(f'output directory {a.out} is not empty')\n"],
)
def test_a_run_folder_that_is_refused_is_replaced_by_a_new_one(code: str, tmp_path: Path) -> None:
    code = code if "listdir" not in code else "os.path.isdir(a.out) or os.makedirs(a.out)\n" + code
    project(tmp_path, code, "--out", "{out_dir}")
    shown = looplab(tmp_path, "try", "--yes")
    assert "its output folder must not exist: written to lab.yaml: launch.output_dir: absent" in shown
    assert "objective: val_loss (min)" in shown
    lab: Any = read_config(tmp_path / "lab.yaml")
    assert lab["launch"]["output_dir"] == "absent"
    looplab(tmp_path, "run", "--runs", "2")
    assert json.loads(looplab(tmp_path, "status", "--json"))["studies"][0]["best"]["objective"] == pytest.approx(0.1)


@pytest.mark.slow
def test_a_folder_that_would_stop_the_second_run_is_named_after_the_first(tmp_path: Path) -> None:
    project(tmp_path, "os.makedirs(a.out)\n")
    assert "cwd: run" not in (tmp_path / "lab.yaml").read_text()  # it reads data/numbers.txt
    shown = looplab(tmp_path, "try")
    assert "its output folder (results) must not exist when it starts, so the next run would fail: " in shown
    assert 'add --out, "{out_dir}" to launch.command, and output_dir: absent to launch' in shown
    (again,) = json.loads(looplab(tmp_path, "try", "--json", code=1))["runs"]
    assert (again["status"], again["diagnosis"]["kind"], again["must_be_new"]) == ("failed", "exists", True)


@pytest.mark.slow
def test_a_trainer_that_takes_its_folder_as_it_is_is_known_too(tmp_path: Path) -> None:
    project(tmp_path, "os.makedirs(a.out, exist_ok=True)\n", "--out", "{out_dir}")
    (run,) = json.loads(looplab(tmp_path, "try", "--json"))["runs"]
    assert run["must_be_new"] is False
