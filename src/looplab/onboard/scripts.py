"""From what a person types to a script: `train.py`, `python -m pkg.train --data d`, `bash train.sh`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from looplab.config.lab import LAB_FILE
from looplab.errors import LabError
from looplab.onboard.base import Script
from looplab.onboard.console import console_script

PYTHON = re.compile(r"(?:.*/)?python[0-9.]*$")
SHELLS = {"bash", "sh", "zsh"}
MAKE = ("make", "gmake")
MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
"""Files that make reads, in its order."""
LAUNCHERS = {
    *("torchrun", "accelerate", "deepspeed", "uv", "poetry", "pipenv", "pixi", "conda", "mamba", "srun", "mpirun"),
    *("xvfb-run", "nohup", "time", "nice", "taskset", "hatch", "rye", "pdm"),
}
"""Programs that start a Python script which is one of their arguments."""
MODULE_LAUNCHERS = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")
OTHER_LANGUAGES = {".jl": "julia", ".R": "Rscript", ".r": "Rscript", ".lua": "lua", ".js": "node", ".rb": "ruby"}
SKIPPED = {"outputs", "__pycache__", "node_modules", "venv", "env", "site-packages", "tests", "test", "docs", "build"}
NOT_TRAINERS = {"__init__.py", "setup.py", "conftest.py", "with_config.py"}
TRAINER = re.compile(r"(?i)(?:^|[_-])(?:train|trainer|training|finetune|pretrain|main|run|fit|ppo|dqn|sac|experiment)")
"""Names that training scripts have."""
MAX_DEPTH = 3
MAX_ENTRIES = 5_000
SHOWN = 5
"""Scripts that are listed."""
FIND_S = 30.0
"""Seconds that an interpreter may take to find a module."""


def find_script(words: Sequence[str], folder: Path) -> Script:
    """Return the script that a command starts.

    Args:
        words: The command; a script alone is started with `python`, or with a shell.
        folder: The folder that the command is called from.

    Raises:
        LabError: The script does not exist.
    """
    first, *rest = words
    if Path(first).name == "env" and rest:
        found = find_script(rest, folder)
        return found if found.argv[0] == "env" else replace(found, argv=("env", *found.argv))
    if ASSIGNMENT.fullmatch(first) and rest:  # A=1 python train.py
        found = find_script(rest, folder)
        inner = found.argv[1:] if found.argv[0] == "env" else found.argv
        return replace(found, argv=("env", first, *inner))
    if PYTHON.fullmatch(first):
        return _python_script(first, rest, folder)
    if Path(first).name in SHELLS and rest:
        return Script(folder, tuple(words), _file(rest[0], folder), None, arguments=tuple(rest[1:]))
    if Path(first).name in LAUNCHERS:
        return _launched(words, folder)
    if (makefile := _makefile(words, folder)) is not None:
        return Script(folder, tuple(words), makefile, None, arguments=tuple(rest))
    if (program := _program(words, folder)) is not None:
        return program
    path = _file(first, folder)
    if path.suffix == ".py" or _names_python(path):
        # The Python that the person would type, which may have other packages than looplab's own.
        python = "python" if shutil.which("python") else "{python}"
        return Script(folder, (python, *words), path, shutil.which("python") or sys.executable, arguments=tuple(rest))
    shell = "bash" if shutil.which("bash") else "sh"
    return Script(folder, (shell, *words), path, None, arguments=tuple(rest))


def is_script(words: Sequence[str]) -> bool:
    """Return whether words are a script, or a command that starts one."""
    first = words[0]
    if PYTHON.fullmatch(first) or ASSIGNMENT.fullmatch(first):
        return True
    if Path(first).name in (*SHELLS, *LAUNCHERS, "env") and len(words) > 1:
        return True
    if _makefile(words, Path.cwd()) is not None:
        return True
    return Path(first).is_file() and (Path(first).suffix in (".py", ".sh") or _names_python(Path(first)))


def _makefile(words: Sequence[str], folder: Path) -> Path | None:
    """Return the file that `make TARGET` reads; None: the words are something else."""
    if words[0] not in MAKE or len(words) < 2 or any(word.startswith("-") for word in words):
        return None
    return next((folder / name for name in MAKEFILES if (folder / name).is_file()), None)


def is_program(word: str, folder: Path) -> bool:
    """Return whether a word is the name of a program that a Python package has installed."""
    return not (folder / word).exists() and console_script(word, folder) is not None


def _program(words: Sequence[str], folder: Path) -> Script | None:
    """Return the script of `spacy train config.cfg`: a program of an installed package, or of this project."""
    if (folder / words[0]).exists():
        return None
    found = console_script(words[0], folder)
    if found is None:
        return None
    path = None if found.module is None else _installed_module(found.module, folder, found.python, imported=True)
    return Script(
        folder,
        tuple(words),
        path or found.path,
        found.python,
        module=found.module if path is not None else None,
        program=found.path,
        arguments=tuple(words[1:]),
    )


def _names_python(path: Path) -> bool:
    """Return whether the first line of a file says that Python runs it."""
    with path.open("rb") as file:
        line = file.readline(200)
    return line.startswith(b"#!") and b"python" in line


def _launched(words: Sequence[str], folder: Path) -> Script:
    """Return the script of `torchrun --standalone train.py`: the first word that is a Python file, or a module."""
    for index, word in enumerate(words[1:], 1):
        if PYTHON.fullmatch(word):
            return replace(_python_script(word, words[index + 1 :], folder), argv=tuple(words))
        if word.endswith(".py") and (folder / word).is_file():
            rest = tuple(words[index + 1 :])
            return Script(folder, tuple(words), folder / word, _python_of(words[0]), arguments=rest)
        if word in ("-m", "--module") and index + 1 < len(words):
            name, rest = words[index + 1], tuple(words[index + 2 :])
            python = _python_of(words[0])
            path = module_file(name, folder, python)
            return Script(folder, tuple(words), path, python, module=name, arguments=rest)
    raise LabError(f"there is no script in: {' '.join(words)}", hint=f"looplab init {words[0]} train.py")


def _python_of(launcher: str) -> str:
    """Return the Python next to a launcher such as torchrun, which has its packages."""
    found = shutil.which(launcher)
    beside = Path(found).parent / "python" if found else None
    if beside is not None and beside.is_file():
        return str(beside)
    return shutil.which("python") or sys.executable


def check_words(words: Sequence[str], folder: Path) -> None:
    """Raise if words are meant as a script that looplab cannot start or find; do nothing if they may be something else.

    Raises:
        LabError: It says what to type instead.
    """
    first = words[0]
    path = folder / first
    suffix = Path(first).suffix
    if suffix == ".ipynb":
        name = Path(first).stem
        raise LabError(
            f"{first} is a notebook",
            hint=f"jupyter nbconvert --to script {first}, then looplab init {name}.py",
        )
    if suffix in (".py", ".sh"):
        _file(first, folder)
    if not suffix and not path.exists() and path.with_suffix(".py").is_file():
        raise LabError(f"there is no script {first}", hint=f"looplab init {first}.py")
    is_called = len(words) > 1 and (shutil.which(first) or Path(words[1]).suffix in OTHER_LANGUAGES)
    if is_called or suffix in OTHER_LANGUAGES or (path.is_file() and suffix not in (".yaml", ".yml")):
        command = [OTHER_LANGUAGES[suffix]] if suffix in OTHER_LANGUAGES else []
        raise LabError(
            f"looplab reads the settings of Python and shell scripts, not of {first}",
            hint=f"write {LAB_FILE} by hand, with launch.command: "
            f'[{", ".join(map(str, [*command, *words]))}, "{{flags}}"] (docs/lab-file.md)',
        )
    if len(words) == 1 and path.is_dir() and not (path / LAB_FILE).is_file():
        found = [os.path.join(first, name) for name in trainers_in(path)]
        found = [os.path.normpath(name) for name in found]
        if found:
            raise LabError(f"{first} is a folder; which script?", hint=f"looplab init {_one_of(found)}")
        if path.resolve() == folder.resolve() or not any(path.iterdir()):
            raise LabError(
                f"there is no script in {first}",
                hint="run looplab init SCRIPT next to a training script; looplab init quickstart creates an example",
            )


def trainers_in(folder: Path) -> list[str]:
    """Return the scripts below a folder that look like training scripts, the likeliest first; else those that can be
    started."""
    found = [name for name in _scripts(folder) if Path(name).name not in NOT_TRAINERS]
    named = [name for name in found if TRAINER.search(Path(name).stem)]
    return sorted(named, key=lambda name: (name.count(os.sep), "train" not in name, name)) or [
        name for name in found if _is_started(folder / name)
    ]


def _is_started(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"__main__" in file.read(1 << 20)
    except OSError:
        return False


def _scripts(folder: Path) -> list[str]:
    """Return the Python and shell scripts below a folder, relative to it, nearest first."""
    found: list[str] = []
    folders = deque([(folder, 0)])
    left = MAX_ENTRIES
    while folders and left > 0:
        place, depth = folders.popleft()
        try:
            with os.scandir(place) as listing:
                entries = sorted(islice(listing, left), key=lambda entry: entry.name)
        except OSError:
            continue
        left -= len(entries)
        for entry in entries:
            if entry.name.startswith(".") or entry.name in SKIPPED:
                continue
            if entry.is_dir(follow_symlinks=False):
                if depth < MAX_DEPTH:
                    folders.append((Path(entry.path), depth + 1))
            elif entry.name.endswith((".py", ".sh")):
                found.append(os.path.relpath(entry.path, folder))
    return found


def _one_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", or ".join(names[:SHOWN]) + more


def _python_script(python: str, words: Sequence[str], folder: Path) -> Script:
    interpreter = shutil.which(str(folder / python) if "/" in python else python)
    if interpreter is None:
        known = [name for name in ("python", "python3") if shutil.which(name)]
        raise LabError(
            f"there is no interpreter {python} on this machine",
            hint=f"use {known[0]}, or the path of the right one" if known else "give its path",
        )
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        del rest[: 2 if rest[0] in ("-W", "-X") else 1]
    if not rest or rest[0] == "-c":
        raise LabError("looplab needs the file of a script", hint="looplab init train.py")
    if rest[0] == "-m":
        if len(rest) < 2:
            raise LabError("python -m needs a module")
        if rest[1] in MODULE_LAUNCHERS:
            inner = _launched([python, *rest[2:]], folder)
            return replace(inner, argv=(python, *words), python=interpreter)
        path = module_file(rest[1], folder, interpreter)
        return Script(folder, (python, *words), path, interpreter, module=rest[1], arguments=tuple(rest[2:]))
    return Script(folder, (python, *words), _file(rest[0], folder), interpreter, arguments=tuple(rest[1:]))


def module_file(name: str, folder: Path, python: str) -> Path:
    """Return the file of `-m NAME`: in the project, else in the packages of the interpreter.

    Raises:
        LabError: The module does not exist.
    """
    base = folder.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__main__.py"):
        if path.is_file():
            return path
    installed = _installed_module(name, folder, python)
    if installed is not None:
        return installed
    package = name.partition(".")[0]
    raise LabError(
        f"module {name} was not found in {folder} or among the packages of {python}",
        hint=f"run looplab init in the project's folder, or install {package} for this Python",
    )


def _installed_module(name: str, folder: Path, python: str, *, imported: bool = False) -> Path | None:
    """Return the file of a module that an interpreter has installed; nothing of it is imported.

    Args:
        imported: Whether it is imported, rather than run with `-m`: a package then is its `__init__.py`.
    """
    helper = Path(__file__).with_name("find_module.py")
    try:
        done = subprocess.run(
            [python, str(helper), name, *(["import"] if imported else [])],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=FIND_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    path = Path(lines[-1]) if lines and lines[-1].endswith(".py") else None
    return path if path is not None and path.is_file() else None


def _file(name: str, folder: Path) -> Path:
    path = folder / name
    if path.is_file():
        return path
    if path.is_dir():
        check_words([name], folder)
    scripts = _scripts(folder)
    stems = {Path(script).name: script for script in reversed(scripts)}
    near = [stems[close] for close in get_close_matches(Path(name).name, stems, n=SHOWN, cutoff=0.7)]
    near = near or trainers_in(folder) or scripts
    raise LabError(
        f"there is no script {name}" + ("" if near else f", nor any other in {folder}"),
        hint=f"did you mean {_one_of(near)}?" if near else "run looplab init in the project's folder",
    )
