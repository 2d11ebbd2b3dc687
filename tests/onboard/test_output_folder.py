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
from looplab.config.lab import load_lab
from looplab.errors import LabError
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
def test_an_output_option_gets_a_place_in_the_run_folder(tmp_path: Path) -> None:
    project(tmp_path, "os.makedirs(a.out)\n")
    lab = (tmp_path / "lab.yaml").read_text()
    assert "cwd: run" not in lab  # it reads data/numbers.txt
    assert '"--out", "{out_dir}/first"' in lab
    looplab(tmp_path, "try", "--yes")
    looplab(tmp_path, "run", "--runs", "2")
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_trainer_that_wrote_into_the_lab_is_run_again_in_its_own_folder(tmp_path: Path) -> None:
    """Its option does not sound like one for output, and the first run shows that it is."""
    code = "os.makedirs(a.place)\nopen(os.path.join(a.place, 'metrics.csv'), 'w').write('step,val_loss\\n1,0.5\\n')\n"
    text = TRAIN.replace("'--out', default='results/first'", "'--place', default='there'") + code
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "numbers.txt").write_text("1")
    (tmp_path / "train.py").write_text(text)
    looplab(tmp_path, "init", "train.py")
    shown = looplab(tmp_path, "try", "--yes")
    assert "written to lab.yaml: launch.command has --place {out_dir}/there" in shown
    assert "objective: val_loss (min)" in shown
    (again,) = json.loads(looplab(tmp_path, "try", "--json"))["runs"]
    assert (again["status"], again["wrote"]) == ("ok", [])


@pytest.mark.slow
def test_a_lab_is_as_it_was_if_a_folder_of_its_own_does_not_help(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse, pathlib\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=0.1)\n"
        "a = p.parse_args()\nprint('val_loss:', a.lr)\n"
        "(pathlib.Path(__file__).parent / 'model.bin').write_text(str(a.lr))\n"
    )
    looplab(tmp_path, "init", "train.py")
    before = (tmp_path / "lab.yaml").read_text()
    shown = looplab(tmp_path, "try")
    assert "that did not work, so lab.yaml was restored" in shown
    assert (tmp_path / "lab.yaml").read_text() == before


READS_AND_WRITES = """
import csv, json, os, sys
settings = json.load(open("settings.json"))
rows = open(os.path.join("data", f"{settings['split']}.txt")).read().split()
os.makedirs("results", exist_ok=True)
with open(os.path.join("results", "log.csv"), "w") as file:
    WRITE
"""


def reading_project(folder: Path, write: str) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "train.txt").write_text("1 2 3")
    (folder / "settings.json").write_text('{"split": "train"}')
    (folder / "train.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=0.1)\n"
        "args = p.parse_args()\n" + READS_AND_WRITES.replace("WRITE", write)
    )


@pytest.mark.slow
def test_what_a_trainer_reads_by_relative_paths_is_linked_into_its_run_folder(tmp_path: Path) -> None:
    reading_project(tmp_path, "csv.writer(file).writerows([['epoch', 'val_loss'], [0, len(rows) * args.lr], [1, 0.2]])")
    looplab(tmp_path, "init", "train.py", "--objective", "val_loss")
    assert "  links: [data, settings.json]" in (tmp_path / "lab.yaml").read_text()
    looplab(tmp_path, "run", "--runs", "1")
    status = json.loads(looplab(tmp_path, "status", "--json"))
    assert status["studies"][0]["best"]["objective"] == 0.2
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_try_links_what_a_trainer_reads_if_it_wrote_into_the_lab(tmp_path: Path) -> None:
    write = "file.write('epoch,val_loss\\n0,0.5\\n1,0.25\\n')"
    reading_project(tmp_path, write)
    looplab(tmp_path, "init", "train.py")
    assert "cwd: run" not in (tmp_path / "lab.yaml").read_text()
    tried = json.loads(looplab(tmp_path, "try", "--yes", "--json"))
    assert tried["objective"] == {"metric": "val_loss", "goal": "min"}
    assert "settings.json" in (tmp_path / "lab.yaml").read_text()


def test_links_need_a_run_folder_and_stay_in_the_lab(tmp_path: Path) -> None:
    for launch in (
        "links: [data]",
        "cwd: run, links: [../data]",
        "cwd: run, links: [/data]",
        "cwd: run, links: [outputs]",
    ):
        (tmp_path / "lab.yaml").write_text(
            f"study: a\nlaunch: {{command: [python, train.py], {launch}}}\nbase: b.json\n"
        )
        (tmp_path / "b.json").write_text("{}")
        with pytest.raises(LabError, match="link"):
            load_lab(tmp_path)


@pytest.mark.slow
def test_a_module_of_the_project_starts_in_its_run_folder(tmp_path: Path) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "__init__.py").write_text("")
    (tmp_path / "tool" / "train.py").write_text(
        "import argparse, json\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=0.1)\n"
        "a = p.parse_args()\njson.dump({'val_loss': a.lr}, open('results.json', 'w'))\n"
    )
    looplab(tmp_path, "init", "python", "-m", "tool.train")
    assert "objective: val_loss (min)" in looplab(tmp_path, "try", "--yes")
    lab: Any = read_config(tmp_path / "lab.yaml")
    assert (lab["launch"]["cwd"], lab["launch"]["env"]) == ("run", {"PYTHONPATH": "{lab}"})


@pytest.mark.slow
def test_a_module_of_the_project_that_writes_metrics_is_measured_at_once(tmp_path: Path) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "__init__.py").write_text("")
    (tmp_path / "tool" / "train.py").write_text(
        "import argparse, csv\np = argparse.ArgumentParser('tool')\np.add_argument('--lr', type=float, default=0.1)\n"
        "a = p.parse_args()\nwith open('log.csv', 'w') as file:\n"
        "    csv.writer(file).writerows([['epoch', 'val_loss'], [0, 1.0], [1, a.lr]])\n"
    )
    looplab(tmp_path, "init", "python", "-m", "tool.train", "--objective", "val_loss")
    lab: Any = read_config(tmp_path / "lab.yaml")
    assert (lab["launch"]["cwd"], lab["launch"]["env"]) == ("run", {"PYTHONPATH": "{lab}"})
    assert "links" not in lab["launch"]
    looplab(tmp_path, "run", "--runs", "1")
    status = json.loads(looplab(tmp_path, "status", "--json"))
    assert status["studies"][0]["best"]["objective"] == 0.1


@pytest.mark.slow
def test_a_trainer_that_takes_its_folder_as_it_is_is_known_too(tmp_path: Path) -> None:
    project(tmp_path, "os.makedirs(a.out, exist_ok=True)\n", "--out", "{out_dir}")
    (run,) = json.loads(looplab(tmp_path, "try", "--json"))["runs"]
    assert run["must_be_new"] is False
