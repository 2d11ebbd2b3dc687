"""A run repeated from its capsule: its code, its config, its seed, compared within the noise."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

TRAIN = """\
import json, os, random
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
score = config["x"] + random.Random(config["seed"]).gauss(0, 0.01)
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    print(json.dumps({"step": 1, "score": score}), file=file)
"""


@pytest.fixture
def ran(lab: Any) -> Any:
    lab.write("train.py", TRAIN)
    lab.write("configs/base.json", '{"x": 0.5, "seed": 3}')
    lab.write(".gitignore", "outputs/\n.looplab/\n")
    lab.configure(objective={"metric": "score", "goal": "max"}, knobs={"x": {"type": "float"}}, budget={"rounds": 1})
    git(lab, "init", "-q")
    git(lab, "add", ".")
    git(lab, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "first")
    lab("run")
    return lab


def git(lab: Any, *args: str) -> None:
    subprocess.run(["git", *args], cwd=lab.folder, check=True, capture_output=True)


def test_the_same_code_gives_the_same_number(ran: Any) -> None:
    done = ran("reproduce", "1")
    assert "Exactly the same" in done.out
    assert ran.all("run.json")[1]["role"] == "reproduction"
    assert ran.ask("SELECT count(*) FROM rounds")[0][0] == 1


def test_code_that_has_changed_is_brought_back_for_the_run(ran: Any) -> None:
    ran.write("train.py", TRAIN.replace('config["x"] +', "7 +"))
    done = ran("reproduce", "1", "--json")
    assert done.lines()[-1]["same"] is True
    assert "checked out" in done.lines()[-1]["code"][0]
    assert "7 +" in (ran.folder / "train.py").read_text()
    assert not (ran.folder / ".looplab/again").exists() or not list((ran.folder / ".looplab/again").iterdir())


def test_uncommitted_changes_of_the_run_are_brought_back_too(ran: Any) -> None:
    ran.write("train.py", TRAIN.replace('config["x"] +', "2 +"))
    ran.write("configs/base.json", '{"x": 0.6, "seed": 3}')
    ran("run", "--rounds", "2")
    ran.write("train.py", TRAIN.replace('config["x"] +', "9 +"))
    assert ran("reproduce", "2", "--json").lines()[-1]["same"] is True


def test_a_number_that_does_not_come_back_is_not_reproduced(ran: Any) -> None:
    ran.write("train.py", TRAIN.replace('random.Random(config["seed"])', "random.Random()"))
    ran.write("configs/base.json", '{"x": 0.6, "seed": 3}')
    ran("run", "--rounds", "2")
    done = ran("reproduce", "2", code=1)
    assert "NOT reproduced" in done.out
    assert "Exactly" not in ran("reproduce", "2", "--tolerance", "1").out


def test_a_run_without_a_number_cannot_be_reproduced(ran: Any) -> None:
    ran.write("train.py", "raise SystemExit(1)")
    ran.write("configs/base.json", '{"x": 0.7, "seed": 3}')
    ran("run", "--rounds", "2", code=1)
    assert "no objective" in ran("reproduce", "2", code=2).err
