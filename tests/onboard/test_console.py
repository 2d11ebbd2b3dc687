"""Programs that a package installs, called by their names: `potions train --lr 0.1`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import PATIENCE_S
from tests.e2e.conftest import COMMAND

from looplab.onboard.console import console_script
from looplab.onboard.readers import read_interface
from looplab.onboard.scripts import find_script, is_program

CLI = """\
import argparse
import random

from potions.cauldron import brew


def main():
    parser = argparse.ArgumentParser(prog="potions")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train")
    train.add_argument("recipe")
    train.add_argument("--lr", type=float, default=0.05)
    train.add_argument("--heat-decay", type=float, default=0.9)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--epochs", type=int, default=5)
    commands.add_parser("taste").add_argument("--spoon")
    args = parser.parse_args()
    random.seed(args.seed)
    brew(open(args.recipe).read(), args)
"""
CAULDRON = """\
def brew(recipe, args):
    best = float("inf")
    for epoch in range(args.epochs):
        val_loss = len(recipe) / (1 + epoch) + (args.lr - 0.1) ** 2
        best = min(best, val_loss)
        print(f"epoch {epoch} val_loss {val_loss:.4f}")
"""
BY_PIP = """\
#!{python}
# -*- coding: utf-8 -*-
import re
import sys
from potions.cli import main
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(main())
"""
BY_PIP_LATER = """\
#!{python}
import sys
from potions.cli import main
if __name__ == '__main__':
    sys.argv[0] = sys.argv[0].removesuffix('.exe')
    sys.exit(main())
"""
LONG_PATH = """\
#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import sys
from potions.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package `potions` with the program `potions`, and an empty folder with a recipe; the latter."""
    package, bin_folder, folder = tmp_path / "site" / "potions", tmp_path / "bin", tmp_path / "work"
    for place in (package, bin_folder, folder):
        place.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cli.py").write_text(CLI)
    (package / "cauldron.py").write_text(CAULDRON)
    (folder / "recipe.txt").write_text("newt")
    install(bin_folder / "potions", BY_PIP)
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return folder


def install(path: Path, text: str) -> None:
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)


def looplab(folder: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [str(COMMAND), *words], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("text", [BY_PIP, BY_PIP_LATER, LONG_PATH])
def test_the_function_behind_a_program_is_found(shop: Path, text: str) -> None:
    install(shop.parent / "bin" / "potions", text)
    found = console_script("potions", shop)
    assert found is not None
    assert (found.python, found.module) == (sys.executable, "potions.cli")


def test_a_program_is_read_as_its_package_is(shop: Path) -> None:
    script = find_script(["potions", "train", "recipe.txt", "--lr", "0.2"], shop)
    assert script.name == "potions"
    assert script.path == shop.parent / "site/potions/cli.py"
    assert script.package_root == shop.parent / "site"
    assert len(script.modules) > 1  # the cauldron, too
    interface = read_interface(script)
    assert interface is not None
    assert interface.command[:2] == ("potions", "train")
    assert {"lr", "heat-decay", "seed", "epochs"} <= {setting.name for setting in interface.settings}


def test_a_program_of_a_package_with_its_code_in_init(shop: Path) -> None:
    package = shop.parent / "site" / "potions"
    (package / "__init__.py").write_text(CLI)
    install(shop.parent / "bin" / "potions", BY_PIP.replace("potions.cli", "potions"))
    script = find_script(["potions", "train", "recipe.txt"], shop)
    assert script.path == package / "__init__.py"
    assert script.package_root == shop.parent / "site"


def test_a_program_whose_package_is_in_this_folder_is_read_from_its_sources(shop: Path) -> None:
    package = shop / "src"
    (shop.parent / "site").rename(package)
    os.environ["PYTHONPATH"] = f"{package}{os.pathsep}{os.environ['PYTHONPATH']}"  # installed with `-e`
    script = find_script(["potions", "train", "recipe.txt"], shop)
    assert script.path == package / "potions/cli.py"
    assert script.package_root is None
    assert len(script.modules) > 1


def test_other_programs_and_files_are_not_python_programs(shop: Path) -> None:
    assert not is_program("sh", shop)
    assert not is_program("no-such-program", shop)
    install(shop.parent / "bin" / "ladle", "#!/bin/sh\necho python\n")
    assert not is_program("ladle", shop)
    (shop / "potions").write_text("a file of the project comes first")
    assert not is_program("potions", shop)


def test_two_commands_lead_from_a_program_to_a_measured_run(shop: Path) -> None:
    told = looplab(shop, "init", "potions", "train", "recipe.txt", "--epochs", "4")
    assert "read potions (argparse)" in told
    lab = (shop / "lab.yaml").read_text()
    assert "study: potions" in lab
    assert "command: [potions, train, " in lab
    tried = json.loads(looplab(shop, "try", "--yes", "--json"))
    assert tried["objective"] == {"metric": "val_loss", "goal": "min"}
    assert tried["runs"][0]["status"] == "ok"
    looplab(shop, "run", "--runs", "2")
    runs = sorted((shop / "outputs" / "potions").glob("0*/record/config.json"))
    assert [json.loads(run.read_text())["epochs"] for run in runs] == [4, 4]
    assert "nothing to fix" in looplab(shop, "check", "--fix")


def test_a_program_without_the_arguments_that_it_needs_says_what_to_type(shop: Path) -> None:
    told = looplab(shop, "init", "potions", "train", code=2)
    assert "potions needs recipe" in told
    assert "looplab init potions" in told
