"""From what a person types to a script: `train.py`, `python -m pkg.train --data d`, `bash train.sh`."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from looplab.errors import LabError
from looplab.onboard.base import Script

PYTHON = re.compile(r"(?:.*/)?python[0-9.]*$")
SHELLS = {"bash", "sh", "zsh"}
LAUNCHERS = {
    *("torchrun", "accelerate", "deepspeed", "uv", "poetry", "pipenv", "pixi", "conda", "mamba", "srun", "mpirun"),
    *("xvfb-run", "nohup", "time", "nice", "taskset", "hatch", "rye", "pdm"),
}
"""Programs that start a Python script which is one of their arguments."""
MODULE_LAUNCHERS = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")


def find_script(words: Sequence[str], folder: Path) -> Script:
    """Return the script that a command starts.

    Args:
        words: The command; a script alone is started with `python`, or with a shell.
        folder: The folder that the command is called from.

    Raises:
        LabError: There is no such script.
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
    return Path(first).is_file() and (Path(first).suffix in (".py", ".sh") or _names_python(Path(first)))


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
            path = _module(name, folder)
            return Script(folder, tuple(words), path, _python_of(words[0]), module=name, arguments=rest)
    raise LabError(f"there is no script in: {' '.join(words)}", hint=f"looplab init {words[0]} train.py")


def _python_of(launcher: str) -> str:
    """Return the Python beside a launcher such as torchrun, which has its packages."""
    found = shutil.which(launcher)
    beside = Path(found).parent / "python" if found else None
    if beside is not None and beside.is_file():
        return str(beside)
    return shutil.which("python") or sys.executable


def _python_script(python: str, words: Sequence[str], folder: Path) -> Script:
    interpreter = shutil.which(str(folder / python) if "/" in python else python)
    if interpreter is None:
        raise LabError(f"{python} was not found")
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
        path = _module(rest[1], folder)
        return Script(folder, (python, *words), path, interpreter, module=rest[1], arguments=tuple(rest[2:]))
    return Script(folder, (python, *words), _file(rest[0], folder), interpreter, arguments=tuple(rest[1:]))


def _module(name: str, folder: Path) -> Path:
    base = folder.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__main__.py"):
        if path.is_file():
            return path
    raise LabError(f"there is no module {name} in {folder}", hint="call looplab init in the project's folder")


def _file(name: str, folder: Path) -> Path:
    path = folder / name
    if not path.is_file():
        raise LabError(
            f"there is no script {name}", hint="looplab init train.py, or looplab init python train.py --flag value"
        )
    return path
