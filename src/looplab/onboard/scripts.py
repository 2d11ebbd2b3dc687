"""From what a person types to a script: `train.py`, `python -m pkg.train --data d`, `bash train.sh`."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from looplab.errors import LabError
from looplab.onboard.base import Script

PYTHON = re.compile(r"(?:.*/)?python[0-9.]*$")
SHELLS = {"bash", "sh", "zsh"}


def find_script(words: Sequence[str], folder: Path) -> Script:
    """Return the script that a command starts.

    Args:
        words: The command; a script alone is started with `python`, or with a shell.
        folder: The folder that the command is called from.

    Raises:
        LabError: There is no such script.
    """
    first, *rest = words
    if PYTHON.fullmatch(first):
        return _python_script(first, rest, folder)
    if Path(first).name in SHELLS and rest:
        return Script(folder, tuple(words), _file(rest[0], folder), None, arguments=tuple(rest[1:]))
    path = _file(first, folder)
    if path.suffix == ".py":
        # The Python that the person would type, which may have other packages than looplab's own.
        python = "python" if shutil.which("python") else "{python}"
        return Script(folder, (python, *words), path, shutil.which("python") or sys.executable, arguments=tuple(rest))
    shell = "bash" if shutil.which("bash") else "sh"
    return Script(folder, (shell, *words), path, None, arguments=tuple(rest))


def is_script(words: Sequence[str]) -> bool:
    """Return whether words are a script, or a command that starts one."""
    first = words[0]
    if PYTHON.fullmatch(first) or (Path(first).name in SHELLS and len(words) > 1):
        return True
    return Path(first).suffix in (".py", ".sh") and Path(first).is_file()


def _python_script(python: str, words: Sequence[str], folder: Path) -> Script:
    interpreter = shutil.which(python)
    if interpreter is None:
        raise LabError(f"{python} was not found")
    options = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        options.append(rest.pop(0))
    if not rest or rest[0] == "-c":
        raise LabError("looplab needs the file of a script", hint="looplab init train.py")
    if rest[0] == "-m":
        if len(rest) < 2:
            raise LabError("python -m needs a module")
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
