"""Plug-ins: another package adds to looplab by entry points; recipes also come from folders and git."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import looplab
from looplab.cli.recipes import names

EXAMPLE = Path(__file__).parents[1] / "examples/plugins"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which the example package is installed, as pip would do."""
    site = tmp_path / "site"
    shutil.copytree(EXAMPLE / "src", site)
    about = site / "looplab_example-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: looplab-example\nVersion: 0.1.0\n")
    groups: dict[str, list[str]] = {}
    group = ""
    for line in (EXAMPLE / "pyproject.toml").read_text().splitlines():
        if line.startswith("[project.entry-points."):
            group = line.split('"')[1]
        elif line.startswith("["):
            group = ""
        elif group and "=" in line:
            name, _, value = line.partition(" = ")
            groups.setdefault(group, []).append(f"{name} = {value.strip(chr(34))}")
    text = "\n".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in groups.items())
    (about / "entry_points.txt").write_text(text)
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def call(env: dict[str, str], *words: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "looplab", *words], env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_a_recipe_and_a_source_of_another_package_are_used(installed: dict[str, str], tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    call(installed, "init", "parabola", str(lab))
    assert not (lab / "__init__.py").exists()
    call(installed, "run", "--lab", str(lab))
    status = json.loads(call(installed, "status", "--lab", str(lab), "--json"))["studies"][0]
    assert status["counts"] == {"ok": 6}
    rows = json.loads(call(installed, "query", "SELECT proposer FROM runs ORDER BY n", "--lab", str(lab), "--json"))
    assert [row["proposer"] for row in rows] == ["base", *["step"] * 5]
    assert status["best"]["objective"] < 1.2
    assert "is whole" in call(installed, "verify", "--lab", str(lab))


def test_without_the_package_the_source_is_unknown(installed: dict[str, str], tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    call(installed, "init", "parabola", str(lab))
    told = call(dict(os.environ), "check", "--lab", str(lab), code=2)
    assert "lab.yaml:" in told
    assert "unknown key 'proposers.0.step'" in told or "measure has no source 'tsv'" in told


def test_a_plug_in_that_cannot_be_imported_is_an_error_that_names_it(installed: dict[str, str], tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    call(installed, "init", "parabola", str(lab))
    (tmp_path / "site/looplab_example/source.py").write_text("1 / 0\n")
    told = call(installed, "check", "--lab", str(lab), code=2)
    assert "the plug-in 'tsv' of looplab-example cannot be imported: ZeroDivisionError" in told


def test_a_lab_is_made_from_a_folder_and_from_git(tmp_path: Path) -> None:
    source = tmp_path / "source"
    call(dict(os.environ), "init", str(EXAMPLE / "src/looplab_example/lab"), str(source))
    (source / "outputs").mkdir()
    (source / ".looplab").mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(source)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "a lab"], check=True)
    for number, recipe in enumerate((str(source), f"file://{source}")):
        copy = tmp_path / f"copy{number}"
        call(dict(os.environ), "init", recipe, str(copy))
        assert sorted(path.name for path in copy.iterdir()) == ["base.json", "lab.yaml", "train.py"]
    assert "no recipe" in call(dict(os.environ), "init", "nowhere", code=2)
    assert "it has no lab.yaml" in call(dict(os.environ), "init", f"{tmp_path}/", str(tmp_path / "x"), code=2)


def test_own_recipes_are_still_there() -> None:
    assert {"quickstart", "act_ot", "esm", "drone", "mario", "fish"} <= set(names())
    assert looplab.__version__
