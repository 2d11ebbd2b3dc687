"""init, recipe, demo."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from types import ModuleType

from looplab import plugins
from looplab.cli import output
from looplab.config.lab import LAB_FILE
from looplab.errors import LabError
from looplab.runs.git import git

LEFT_OUT = {"__pycache__", ".git", ".looplab", "outputs"}
"""Folders of a lab that are not part of a recipe."""
CLONE_S = 600.0
"""Seconds that fetching a recipe from git may take."""


def names() -> list[str]:
    """Return the names of all recipes: looplab's own, and those of installed plug-ins."""
    own = (r.name for r in resources.files("looplab.recipes").iterdir() if r.joinpath("lab.yaml").is_file())
    return sorted({*own, *plugins.names("recipes")})


def init(recipe: str, folder: Path | None, json: bool) -> None:
    """Create a lab from a recipe: its name, a folder with a lab, or the URL of a git repository with one."""
    target = _copy(recipe, folder or Path(_stem(recipe)))
    created = f"created the lab {target} from the recipe {recipe}"
    data = {"recipe": recipe, "lab": str(target)}
    output.answer(json, data, created, f"next: cd {target} && {_next_commands(target)}")


def _next_commands(lab: Path) -> str:
    """Return what comes first in a lab: the comment `# next: COMMANDS` of its lab file, or plan and run."""
    lines = (lab / LAB_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    named = (line.removeprefix("# next:").strip() for line in lines if line.startswith("# next:"))
    return next(named, "looplab plan && looplab run")


def _stem(recipe: str) -> str:
    return recipe.rstrip("/").rpartition("/")[2].removesuffix(".git") or recipe


def _copy(recipe: str, target: Path) -> Path:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise LabError(f"{target} is not empty", hint="name another folder: looplab init RECIPE FOLDER")
    with _find(recipe) as source:
        if not (source / LAB_FILE).is_file():
            raise LabError(f"{recipe} is not a lab: it has no {LAB_FILE}")
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=_ignored_files(source))
    return target.resolve()


@contextlib.contextmanager
def _find(recipe: str) -> Iterator[Path]:
    """Yield the folder of a recipe."""
    if "://" in recipe or recipe.startswith("git@"):
        with tempfile.TemporaryDirectory(prefix="looplab-recipe-") as scratch:
            # No submodules and no hooks: nothing of the repository runs before a person has looked at it.
            git(Path(scratch), "clone", "--quiet", "--depth=1", "--", recipe, "lab", timeout=CLONE_S)
            yield Path(scratch) / "lab"
    elif recipe in plugins.names("recipes"):
        found = plugins.load("recipes", recipe)
        with resources.as_file(resources.files(found) if isinstance(found, ModuleType) else Path(found)) as source:
            yield source
    elif recipe in names():
        with resources.as_file(resources.files("looplab.recipes") / recipe) as source:
            yield source
    elif (path := Path(recipe)).is_dir() and (os.sep in recipe or (path / LAB_FILE).is_file()):
        yield path
    else:
        known = ", ".join(names())
        raise LabError(f"there is no recipe {recipe!r}", hint=f"available: {known}; or a folder, or a git URL")


def _ignored_files(source: Path) -> Callable[[str, list[str]], set[str]]:
    """Leave out caches, records and the recipe's own `__init__.py`: a lab is not a package. Packages inside it keep
    theirs."""

    def ignored(folder: str, entries: list[str]) -> set[str]:
        return {"__pycache__", *((*LEFT_OUT, "__init__.py") if Path(folder) == source else ())} & set(entries)

    return ignored


def command(recipe: str, words: list[str]) -> None:
    """Run the recipe's own run.py with these words, in the current folder."""
    own = resources.files("looplab.recipes")
    with_commands = [name for name in names() if own.joinpath(name, "run.py").is_file()]
    if recipe not in with_commands:
        raise LabError(
            f"the recipe {recipe!r} has no commands",
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
