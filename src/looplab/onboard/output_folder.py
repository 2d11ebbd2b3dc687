"""Trainers whose output folder must not exist yet: how that is detected, and which setting creates one per run.

looplab makes the run folder before the trainer starts, and `{out_dir}` is that folder; a trainer that refuses it needs
`launch.output_dir: absent`. A trainer that creates a folder in the lab fails in the second run, not in the
first, so its source is read too.
"""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from looplab.config.files import read_document, write_atomic
from looplab.config.lab import LAB_FILE, RUN_FOLDER, LabConfig, LaunchConfig, StudyConfig, load_lab
from looplab.errors import LabError
from looplab.onboard.base import Interface, Script, ScriptSetting
from looplab.onboard.knobs import words_of
from looplab.onboard.readers import read_interface
from looplab.onboard.readers.flags import read_flags
from looplab.onboard.source import call_name, calls, constant, keyword

LOOKS = {"exists", "isdir", "is_dir", "listdir", "iterdir", "scandir"}
"""Functions that look whether there is a folder, or something in it."""
PROJECT_PATH = {"PYTHONPATH": "{lab}"}
"""Environment with which a module of the project is found from any folder."""
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


def output_words(script: Script, files: Sequence[str]) -> list[str]:
    """Return the options whose defaults are the places of these files, each with a place in the run folder."""
    found: list[str] = []
    interface = read_interface(script)
    if interface is not None and interface.base is not None:
        interface = read_flags(script)  # of a script that has its hyper-parameters in a config file
    for setting in interface.settings if interface is not None else ():
        place = _relative_place(setting, script.folder)
        if place is not None and any(
            file == place or file.startswith(place + os.sep) for file in map(os.path.normpath, files)
        ):
            found += _in_run_folder(interface, setting, place)
    return found


def predicted_output(interface: Interface, folder: Path) -> list[list[str]]:
    """Return the words of options that are named after output, with a place in the run folder: `--out {out_dir}/x`.

    Their default is a place in the project that does not exist; what exists may be input.
    """
    found: list[list[str]] = []
    for setting in interface.settings if interface.base is None else ():
        place = _relative_place(setting, folder)
        words = set(words_of(setting.name))
        if place is None or words & INPUT or not words & OUTPUT:
            continue
        is_place = bool(words & PLACES) or "/" in str(setting.default) or os.path.splitext(place)[1] != ""
        if is_place and not os.path.exists(folder / place):
            found.append(_in_run_folder(interface, setting, place))
    return found


OUTPUT = {
    *("out", "output", "outputs", "outdir", "outfile", "save", "savedir", "log", "logs", "logdir", "logging", "work"),
    *("workdir", "result", "results", "checkpoint", "checkpoints", "ckpt", "ckpts", "run", "runs", "exp", "experiment"),
    *("export", "dump", "tensorboard", "tb", "summary", "metrics", "history", "artifact", "artifacts"),
}
"""Words in the names of options that say where to write."""
WRITTEN = {"out", "output", "outputs", "outdir", "save", "savedir", "work", "workdir", "log", "logs", "logdir"}
"""Those of them that are never read from."""
PLACES = {"dir", "directory", "folder", "path", "root", "file", "outdir", "outfile", "savedir", "logdir", "workdir"}
INPUT = {"data", "dataset", "input", "load", "resume", "restore", "pretrained", "init", "from", "train", "test", "val"}
"""Words of options that say what to read."""


def _relative_place(setting: ScriptSetting, folder: Path) -> str | None:
    """Return the place in the project that is the default of a setting; None: it is not such a place."""
    default = setting.default
    if isinstance(default, str) and default.startswith(f"{folder.resolve()}{os.sep}"):
        default = os.path.relpath(default, folder.resolve())  # ROOT / "runs"
    if not isinstance(default, str) or setting.positional or setting.kind != "str" or setting.choices:
        return None
    if not default.strip("./") or default.startswith(("/", "~")) or any(sign in default for sign in "{}$%:*\n "):
        return None
    place = os.path.normpath(default)
    return None if place.startswith("..") else place


def _in_run_folder(interface: Interface | None, setting: ScriptSetting, place: str) -> list[str]:
    """Return the words that send a trainer's output to a folder below the run folder.

    It is as new as the default was, so a trainer that insists on making it can.
    """
    flag, value = setting.flag or f"--{setting.name}", f"{{out_dir}}/{os.path.basename(place)}"
    is_joined = interface is not None and interface.rendering.get("separator") == "equals"
    return [f"{flag}={value}"] if is_joined else [flag, value]


def own_output_words(command: Sequence[str], folder: Path, *, relative: bool) -> list[str]:
    """Return a command whose options for output, as they were typed, are places in the run folder.

    Args:
        relative: Whether relative paths count, too: the trainer is not started in its run folder.
    """
    found: list[str] = []
    for before, word in zip(["", *command], command, strict=False):
        option, sign, value = word.rpartition("=") if word.startswith("-") else (before, "", word)
        if option.startswith("--") and _is_output(option, value, folder) and (relative or os.path.isabs(value)):
            place = f"{{out_dir}}/{os.path.basename(os.path.normpath(value))}"
            word = f"{option}={place}" if sign else place
        found.append(word)
    return found


def relative_output(base: dict[str, Any], above: str = "") -> list[str]:
    """Replace the absolute paths of output in a config by names, since each run starts in a folder of its own.

    Returns:
        What was replaced, as sentences.
    """
    notes = []
    for key, value in base.items():
        name = f"{above}{key}"
        if isinstance(value, dict):
            notes += relative_output(value, f"{name}.")
        elif isinstance(value, str) and os.path.isabs(value) and _is_output(key, value, Path("/")):
            base[key] = os.path.basename(os.path.normpath(value))
            notes.append(f"{name} is {base[key]} in place of {value}: each run writes to its own folder")
    return notes


def _is_output(name: str, value: str, folder: Path) -> bool:
    """Return whether a setting is named after output, and its value is a path of something that need not exist."""
    words = set(words_of(name))
    if words & INPUT or not words & OUTPUT or any(sign in value for sign in "{}$%:*\n ") or not value.strip("./"):
        return False
    is_place = bool(words & PLACES) or "/" in value
    return is_place and (bool(words & WRITTEN) or not (folder / value).exists())


def relative_inputs(script: Script) -> list[str]:
    """Return the files and folders of the project that a script mentions as relative paths, and so may read.

    Folders whose names say that they are for output are left out, and what is below a folder that is listed.
    """
    found: set[str] = set()
    for tree in script.modules:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= _inputs_in(node.value, script)
    return sorted(path for path in found if not any(path.startswith(other + os.sep) for other in found))


def _inputs_in(text: str, script: Script) -> set[str]:
    """Return the path of the project that a text is, or begins with; empty: it is not a path, or it does not exist."""
    if not text or len(text) > 200 or set(text) & set("\n\0*?<>|") or text.startswith(("/", "~", "-")):
        return set()
    path = os.path.normpath(text)
    parts = path.split(os.sep)
    if parts[0] in (".", "..", "outputs", "record") or parts[0].startswith("."):
        return set()
    is_script = path in (script.path.name, (script.module or "").partition(".")[0])
    if is_script or set(words_of(parts[0])) & OUTPUT:
        return set()
    is_path = "/" in text or "." in text
    try:
        if is_path and (script.folder / path).exists():
            return {path}
        # os.path.join("data", name), f"data/{name}"
        return {parts[0]} if (script.folder / parts[0]).is_dir() and (is_path or len(parts) == 1) else set()
    except (OSError, ValueError):
        return set()


def is_project_module(script: Script) -> bool:
    """Return whether a script is started by `python -m` from the project's folder, not from an installed package."""
    return script.module is not None and script.package_root is None


def place_output(lab: LabConfig, study: StudyConfig, script: Script | None, files: Sequence[str]) -> str | None:
    """Write to the lab file that a trainer which wrote into the lab writes to the folder of its run.

    Returns:
        What was written, for people; None: there is no way, or it is done already.

    Raises:
        LabError: The lab is not valid with it; its file is as before.
    """
    launch = study.launch
    if launch.cwd != "." or script is None or script.tree is None:
        return None
    words = output_words(script, files)
    if words:
        with _changed_launch(lab, study) as own:
            command = list(own["command"])
            at = next((i for i, word in enumerate(command) if word in ("{flags}", "{overrides}")), len(command))
            own["command"] = [*command[:at], *words, *command[at:]]
        return f"launch.command has {' '.join(words)}"
    with _changed_launch(lab, study) as own:
        own["cwd"] = RUN_FOLDER
        if links := relative_inputs(script):
            own["links"] = links
        if is_project_module(script):
            own["env"] = {**PROJECT_PATH, **own.get("env", {})}
    return f"launch.cwd: {RUN_FOLDER}" + (f", launch.links: {', '.join(links)}" if links else "")


def give_new_folder(lab: LabConfig, study: StudyConfig) -> None:
    """Write `output_dir: absent` to the lab file: `{out_dir}` then does not exist when the trainer starts.

    Raises:
        LabError: The lab is not valid with it; its file is as before.
    """
    with _changed_launch(lab, study) as own:
        own["output_dir"] = "absent"


@contextlib.contextmanager
def _changed_launch(lab: LabConfig, study: StudyConfig) -> Iterator[Any]:
    """Yield `launch` of a study, and write the lab file with what becomes of it."""
    path = lab.folder / LAB_FILE
    before = path.read_bytes()
    document = read_document(path)
    data: Any = document.data
    own = next((one for one in data.get("studies", ()) if one.get("study") == study.name and "launch" in one), data)
    yield own["launch"]
    write_atomic(path, document.with_data(data).text().encode())
    try:
        load_lab(lab.folder, draft=True)
    except LabError:
        write_atomic(path, before)
        raise
