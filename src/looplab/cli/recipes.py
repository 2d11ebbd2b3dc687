"""init, recipe, demo."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from looplab.cli import output
from looplab.errors import LabError


def names() -> list[str]:
    return sorted(r.name for r in resources.files("looplab.recipes").iterdir() if r.joinpath("lab.yaml").is_file())


def init(recipe: str, folder: Path | None, json: bool) -> None:
    target = _copy(recipe, folder or Path(recipe))
    if json:
        output.print_json({"recipe": recipe, "lab": str(target)})
        return
    output.say(f"made the lab {target}")
    output.say(f"next: cd {target} && looplab plan && looplab run")


def _copy(recipe: str, target: Path) -> Path:
    if recipe not in names():
        raise LabError(f"there is no recipe {recipe!r}", hint=f"there are: {', '.join(names())}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise LabError(f"{target} is not empty", hint="name another folder: looplab init RECIPE FOLDER")
    with resources.as_file(resources.files("looplab.recipes") / recipe) as source:
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=_left_behind(source))
    return target.resolve()


def _left_behind(source: Path) -> Callable[[str, list[str]], set[str]]:
    """A lab's folder is no package, though the recipe's folder is one; the packages inside it stay what they are."""

    def ignored(folder: str, entries: list[str]) -> set[str]:
        return {"__pycache__", *(("__init__.py",) if Path(folder) == source else ())} & set(entries)

    return ignored


def command(recipe: str, words: list[str]) -> None:
    """Hand the words to the recipe's own run.py, in the folder where the user stands."""
    offering = [n for n in names() if resources.files("looplab.recipes").joinpath(n, "run.py").is_file()]
    if recipe not in offering:
        raise LabError(f"the recipe {recipe!r} has no commands of its own", hint=f"these have: {', '.join(offering)}")
    with resources.as_file(resources.files("looplab.recipes") / recipe) as source:
        argv = [sys.executable, str(source / "run.py"), *(words or ["--help"])]
        sys.stdout.flush()
        os.execv(argv[0], argv)


def demo(folder: Path) -> None:
    """The demo is nothing special: a lab from the quickstart recipe, run by the same command as any other."""
    if (folder / "lab.yaml").exists():
        output.say(f"{folder} is there already: going on with it")
    else:
        try:
            import sklearn  # noqa: F401
        except ImportError:
            raise LabError(
                "the demo trains on scikit-learn's digits", hint="pip install 'looplab[quickstart]'"
            ) from None
        _copy("quickstart", folder)
        output.say(f"made the lab {folder.resolve()}: a real classifier on the digits that scikit-learn ships")
    command = [sys.executable, "-m", "looplab", "run", "--lab", str(folder)]
    output.say(f"$ cd {folder} && looplab run")
    sys.stdout.flush()
    os.execv(command[0], command)
