"""Trainers whose output folder must not exist yet: how that is detected, and which setting creates one per run.

looplab makes the run folder before the trainer starts, and `{out_dir}` is that folder; a trainer that refuses it needs
`launch.output_dir: absent`. A trainer that makes a folder of its own in the lab fails in the second run, not in the
first, so its source is read too.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from looplab.config.files import read_document, write_atomic
from looplab.config.lab import LAB_FILE, RUN_FOLDER, LabConfig, LaunchConfig, StudyConfig, load_lab
from looplab.errors import LabError
from looplab.onboard.base import Interface, Script
from looplab.onboard.source import call_name, calls, constant, keyword

LOOKS = {"exists", "isdir", "is_dir", "listdir", "iterdir", "scandir"}
"""Functions that look whether there is a folder, or something in it."""
UNIQUE = {"strftime", "isoformat", "uuid4", "uuid1", "mkdtemp", "getpid", "time", "now", "token_hex", "rmtree"}
"""Functions whose use means that a folder has a new name each time, or is removed before."""


def uses_out_dir(launch: LaunchConfig) -> bool:
    """Return whether the command or the environment of a trainer contains `{out_dir}`."""
    return any("{out_dir}" in text for text in (*launch.command, *launch.env.values()))


def must_be_new(
    launch: LaunchConfig, script: Script | None, *, status: str, kind: str | None, new_files: Sequence[str]
) -> bool | None:
    """Return whether the output folder of a trainer must not exist; None: that is not known.

    Args:
        launch: How the run was started.
        script: The script that was run; None: it is not known.
        status: How it ended.
        kind: Why it failed (`Diagnosis.kind`).
        new_files: What it left in the lab, outside its run folder.
    """
    if kind == "exists":
        return True
    if status not in ("ok", "timeout"):
        return None
    if uses_out_dir(launch) and launch.output_dir == "run":
        return False
    made_folder = launch.cwd != RUN_FOLDER and any("/" in file for file in new_files)
    return True if made_folder and script is not None and refuses_existing(script.modules) else None


def refuses_existing(trees: Iterable[ast.Module]) -> bool:
    """Return whether a program makes a folder that must not exist: `os.makedirs(out)`, `if out.exists(): raise …`."""
    for tree in trees:
        if any(True for _ in calls(tree, *UNIQUE)):
            continue
        for node, guarded in _statements(tree.body):
            if isinstance(node, ast.If) and _looks(node.test) and _gives_up(node.body):
                return True
            if not guarded and not hasattr(node, "body"):
                made = calls(node, "makedirs", "mkdir")
                if any(constant(keyword(call, "exist_ok")) is not True for call in made):
                    return True
    return False


def _statements(body: Sequence[ast.stmt], guarded: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield statements, and whether something around them expects that a folder exists."""
    for node in body:
        yield node, guarded
        expects = (isinstance(node, ast.If) and _looks(node.test)) or isinstance(node, ast.Try)
        expects = expects or (isinstance(node, ast.With) and "suppress" in ast.unparse(node.items[0]))
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                yield from _statements(inner, guarded or expects)


def _looks(test: ast.expr) -> bool:
    return any(True for _ in calls(test, *LOOKS))


def _gives_up(body: Sequence[ast.stmt]) -> bool:
    """Return whether a block ends the program because something exists, rather than is missing."""
    for node in body:
        raised = isinstance(node, ast.Raise) or (
            isinstance(node, ast.Expr) and call_name(node.value) in ("exit", "sys.exit", "quit")
        )
        text = ast.unparse(node).lower()
        if raised and ("exists" in text or "not empty" in text) and "not exist" not in text:
            return True
    return False


def output_option(interface: Interface | None, files: Sequence[str]) -> str | None:
    """Return the flag whose default is the folder of these files; None: there is none, or it is not known."""
    for setting in interface.settings if interface is not None else ():
        default = setting.default
        if isinstance(default, str) and default.strip("./") and not setting.positional:
            place = os.path.normpath(default)
            if any(file == place or file.startswith(place + os.sep) for file in map(os.path.normpath, files)):
                return setting.flag or f"--{setting.name}"
    return None


def give_new_folder(lab: LabConfig, study: StudyConfig) -> None:
    """Write `output_dir: absent` to the lab file: `{out_dir}` then does not exist when the trainer starts.

    Raises:
        LabError: The lab is not valid with it; its file is as before.
    """
    path = lab.folder / LAB_FILE
    before = path.read_bytes()
    document = read_document(path)
    data: Any = document.data
    own = next((one for one in data.get("studies", ()) if one.get("study") == study.name and "launch" in one), data)
    own["launch"]["output_dir"] = "absent"
    write_atomic(path, document.with_data(data).text().encode())
    try:
        load_lab(lab.folder)
    except LabError:
        write_atomic(path, before)
        raise
