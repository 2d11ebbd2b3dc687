"""Console scripts: programs that a package installs, such as `spacy`, and the function behind each of them."""

from __future__ import annotations

import ast
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from looplab.onboard.source import call_name

MAX_LINES = 80
MAX_BYTES = 64 << 10
"""Size of the largest file that is read as a console script; those of pip, uv and setuptools have a few lines."""
SHEBANG = re.compile(rb"#!\s*(\S+)(?:[ \t]+(\S+))?")
EXEC = re.compile(rb"""^'''exec' "?([^"\s]+)"?""", re.MULTILINE)
"""The second line of a script whose interpreter has a path that is too long for the first one."""


@dataclass(frozen=True, slots=True)
class ConsoleScript:
    """A program of a Python package."""

    path: Path
    python: str
    """The interpreter that its first line names."""
    module: str | None
    """The module of the function that it calls; None: the program is in the file itself."""


def console_script(word: str, folder: Path) -> ConsoleScript | None:
    """Return the Python program that a word of a command names; None if it is not one.

    Args:
        word: A name that is looked up as the shell does, or a path.
        folder: The folder that the command is called from.
    """
    found = shutil.which(str(folder / word) if "/" in word else word)
    if found is None:
        return None
    try:
        with open(found, "rb") as file:
            data = file.read(MAX_BYTES)
    except OSError:
        return None
    python = _interpreter(data)
    if python is None:
        return None
    return ConsoleScript(Path(found), python, _entry_module(data))


def _interpreter(data: bytes) -> str | None:
    """Return the Python that runs a file; None: it is not a Python script."""
    first = SHEBANG.match(data)
    if first is None:
        return None
    program, argument = (part.decode("utf-8", "replace") if part else "" for part in first.groups())
    if Path(program).name == "sh":
        behind = EXEC.search(data[:2000])
        program = behind[1].decode("utf-8", "replace") if behind is not None else ""
    elif Path(program).name == "env":
        program = argument
    if not re.match(r"(python|pypy)", Path(program).name):
        return None
    return shutil.which(program)


def _entry_module(data: bytes) -> str | None:
    """Return the module from which a console script imports the function that it calls; None: it has code itself."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError):
        return None
    if data.count(b"\n") > MAX_LINES or any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body):
        return None
    imported = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0
        for alias in node.names
    }
    called = [call_name(node).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return next((imported[name] for name in called if name in imported), None)
