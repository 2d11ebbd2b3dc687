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
    output.say(f"created the lab {target}")
    output.say(f"next: cd {target} && looplab plan && looplab run")


def _copy(recipe: str, target: Path) -> Path:
    if recipe not in names():
        raise LabError(f"there is no recipe {recipe!r}", hint=f"available: {', '.join(names())}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise LabError(f"{target} is not empty", hint="name another folder: looplab init RECIPE FOLDER")
    with resources.as_file(resources.files("looplab.recipes") / recipe) as source:
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=_ignored_files(source))
    return target.resolve()


def _ignored_files(source: Path) -> Callable[[str, list[str]], set[str]]:
    """Leave out caches and the recipe's own `__init__.py`: a lab is not a package. Packages inside it keep theirs."""

    def ignored(folder: str, entries: list[str]) -> set[str]:
        return {"__pycache__", *(("__init__.py",) if Path(folder) == source else ())} & set(entries)

    return ignored


def command(recipe: str, words: list[str]) -> None:
    """Run the recipe's own run.py with these words, in the current folder."""
    with_commands = [n for n in names() if resources.files("looplab.recipes").joinpath(n, "run.py").is_file()]
    if recipe not in with_commands:
        raise LabError(
            f"the recipe {recipe!r} has no commands of its own",
            hint=f"recipes with commands: {', '.join(with_commands)}",
        )
    with resources.as_file(resources.files("looplab.recipes") / recipe) as source:
        argv = [sys.executable, str(source / "run.py"), *(words or ["--help"])]
        sys.stdout.flush()
        os.execv(argv[0], argv)


def demo(folder: Path) -> None:
    """Create a lab from the quickstart recipe and run it, like any other lab."""
    if (folder / "lab.yaml").exists():
        output.say(f"{folder} already exists: continuing with it")
    else:
        try:
            import sklearn  # noqa: F401
        except ImportError:
            raise LabError(
                "the demo trains on scikit-learn's digits", hint="pip install 'looplab[quickstart]'"
            ) from None
        _copy("quickstart", folder)
        output.say(f"created the lab {folder.resolve()}: a real classifier on scikit-learn's digits")
    command = [sys.executable, "-m", "looplab", "run", "--lab", str(folder)]
    output.say(f"$ cd {folder} && looplab run")
    sys.stdout.flush()
    os.execv(command[0], command)
