"""A run repeated from its capsule: its code, its config, its seed, compared within the noise."""

from __future__ import annotations

import json
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


@pytest.mark.slow
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


# -- a record that somebody has changed


def trap(ran: Any) -> str:
    program = ran.folder.parent / "python-trap"
    program.write_text(f"#!/bin/sh\ntouch {ran.folder.parent}/ran\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.slow
def test_a_changed_capsule_is_refused_before_anything_of_it_is_used(ran: Any) -> None:
    path = ran.runs()[0] / "record/run.json"
    about = json.loads(path.read_text())
    good = about["capsule"]
    victim = ran.folder.parent / "victim.txt"
    for change in (
        {"program": trap(ran)},
        {"data": {"../../../../victim.txt": "x"}},
        {"code": {**good["code"], "commit": "--help"}},
        {"code": {**good["code"], "untracked": ["/etc/passwd"]}},
    ):
        path.write_text(json.dumps({**about, "capsule": {**good, **change}}))
        done = ran("reproduce", "1", code=2)
        assert "has changed since run" in done.err
    assert not (ran.folder.parent / "ran").exists()
    assert not victim.exists()
    assert ran.count(status="ok") == 1


def test_a_changed_config_is_refused(ran: Any) -> None:
    path = ran.runs()[0] / "record/config.json"
    path.write_text(path.read_text().replace("0.5", "0.7"))
    assert "config.json has changed since run" in ran("reproduce", "1", code=2).err


def test_a_changed_patch_is_refused(ran: Any) -> None:
    ran.write("train.py", TRAIN.replace('config["x"] +', "2 +"))
    ran.write("configs/base.json", '{"x": 0.6, "seed": 3}')
    ran("run", "--rounds", "2")
    patch = next((ran.outputs() / "_shared").glob("code-*.patch"))
    patch.write_text(patch.read_text().replace("2 +", "3 +"))
    ran.write("train.py", TRAIN.replace('config["x"] +', "9 +"))
    assert "has changed since it was written" in ran("reproduce", "2", code=2).err


def test_reproduce_says_what_it_runs_and_runs_no_hook(ran: Any) -> None:
    (ran.folder / ".git/hooks").mkdir(exist_ok=True)
    (ran.folder / ".git/hooks/post-checkout").symlink_to(trap(ran))
    ran.write("train.py", TRAIN.replace('config["x"] +', "7 +"))
    done = ran("reproduce", "1")
    assert "running again: " in done.out
    assert not (ran.folder.parent / "ran").exists()


def test_code_that_could_not_be_compared_is_told_by_run_show_and_reproduce(ran: Any) -> None:
    ran.write("train.py", TRAIN.replace('config["x"] +', "2 +"))
    ran.write("configs/base.json", '{"x": 0.6, "seed": 3}')
    found = subprocess.run(["git", "rev-parse", "HEAD:train.py"], cwd=ran.folder, check=True, capture_output=True)
    blob = found.stdout.decode().strip()
    stored = ran.folder / ".git/objects" / blob[:2] / blob[2:]
    kept = stored.read_bytes()
    stored.unlink()
    doubt = "it is not known which code ran: git diff"
    assert doubt in ran("run", "--rounds", "2").out
    stored.parent.mkdir(exist_ok=True)
    stored.write_bytes(kept)
    run = ran.runs()[1]
    assert ran.read(run, "run.json")["capsule"]["code"]["dirty"] is None
    assert doubt in ran("show", "2").out
    assert doubt in ran("reproduce", "2", code=1).out
