"""The shelf: trainers as other people write them, each with an `about.json` that says what is true of it.

`command` runs the trainer in its folder. `quick` names the options of a short run, as a person would call them, and
`quick_run` applies them: further `args`, `env`, `stdin`, and `replace`, pairs of old and new text per file (a pair with
an empty old text writes the file). `exit_code`, `seconds` (on a busy machine), `cpu_seconds`, `printed` and `wrote` come
from such a run; `*` stands for times and ids.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHELF = Path(__file__).parent / "shelf"
TRAINERS = sorted(folder.parent.name for folder in SHELF.glob("*/about.json"))
ABSENT_ON_PURPOSE = {"flashy_kernels"}


def about(name: str) -> dict[str, Any]:
    return json.loads((SHELF / name / "about.json").read_text())


def files(folder: Path) -> dict[str, bytes]:
    """Files of a folder by relative path; compiled ones are left out."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def top_level(path: str) -> str:
    return path.partition("/")[0]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_is_described_completely_and_is_small_text(name: str) -> None:
    facts = about(name)
    assert facts.keys() == {
        *("style", "command", "requires", "objective", "goal", "seed", "sensible_knobs", "must_not_be_knobs"),
        *("quick", "quick_run", "exit_code", "seconds", "cpu_seconds", "printed", "wrote", "notes"),
    }
    assert facts["goal"] in ("min", "max") if facts["objective"] else facts["goal"] is None
    assert not set(facts["sensible_knobs"]) & set(facts["must_not_be_knobs"])
    assert facts["seed"] is None or facts["seed"] in facts["must_not_be_knobs"]
    content = files(SHELF / name)
    assert sum(map(len, content.values())) <= 20_000
    for data in content.values():
        assert "\0" not in data.decode()
    for file, pairs in facts["quick_run"].get("replace", {}).items():
        assert all(old in content.get(file, b"").decode() for old, _ in pairs)


def test_every_folder_of_the_shelf_is_described() -> None:
    assert sorted(folder.name for folder in SHELF.iterdir() if folder.is_dir()) == TRAINERS


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINERS)
def test_a_quick_run_ends_and_writes_as_described(name: str, tmp_path: Path) -> None:
    facts = about(name)
    for package in set(facts["requires"]) - ABSENT_ON_PURPOSE:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder = tmp_path / name
    shutil.copytree(SHELF / name, folder, ignore=shutil.ignore_patterns("about.json", "__pycache__"))
    quick = facts["quick_run"]
    for file, pairs in quick.get("replace", {}).items():
        for old, new in pairs:
            (folder / file).write_text((folder / file).read_text().replace(old, new, 1) if old else new)
    before = files(folder)
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        **quick.get("env", {}),
    }
    done = subprocess.run(
        facts["command"] + quick.get("args", []),
        cwd=folder,
        env=environment,
        input=quick.get("stdin", ""),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == facts["exit_code"], done.stderr
    wrote = {path for path, data in files(folder).items() if before.get(path) != data}
    assert {top_level(path) for path in wrote} == {top_level(path) for path in facts["wrote"]}
