"""Where the ledger of a lab is: in `<lab>/.looplab`, or in a folder of a local disk if the lab is on a network disk.

`state_dir` in lab.yaml, or the variable LOOPLAB_STATE_DIR, names a folder in which every lab has its own folder.
The files of the ledger and the locks of its engines are there; run folders and reports stay in the lab. Without either,
a new ledger of a lab on a network disk goes to the user's own state folder if that is on a local disk.

The lab points to its state folder (`.looplab/state`), and the state folder names the lab that owns it (`lab.json`, of
which the pointer is a copy: folder, host, lab, id). Once the pointer exists, it decides, whatever the settings say: an
engine without the variable, or on another machine, finds the ledger or says where it is, and never starts a second one.
Both files are created exclusively, so of two engines that start at the same time, the second uses the place of the
first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from looplab.config.disk import existing, network_disk
from looplab.config.files import write_atomic
from looplab.errors import LabError
from looplab.untrusted import UntrustedError, load_json, mend_text, read_bounded

VARIABLE = "LOOPLAB_STATE_DIR"
POINTER = "state"
"""File in `.looplab` that says where the ledger is."""
OWNER = "lab.json"
"""File in a state folder that names its lab."""
LEDGER = "ledger.db"
LEDGER_FILES = (LEDGER, "journal.jsonl", "head")
"""Files that each show that there is or was a ledger."""
MAX_BYTES = 1 << 16
"""Size limit of the pointer and the owner file."""


@dataclass(frozen=True, slots=True)
class StateConfig:
    """Where a new ledger is to be."""

    folder: Path | None = None
    """Folder with the state folders of labs; None: in the lab."""
    is_demanded: bool = False
    """Whether lab.yaml says so: a ledger elsewhere is then an error. The variable only says where new ledgers go."""

    @classmethod
    def of(cls, lab: Path, state_dir: str | None) -> StateConfig:
        """Return the setting of a lab; `state_dir` is the key of lab.yaml."""
        if state_dir is not None:
            return cls(lab / Path(state_dir).expanduser(), is_demanded=True)
        text = os.environ.get(VARIABLE)
        if not text:
            return cls(_user_folder() if network_disk(lab) is not None else None)
        folder = Path(text).expanduser()
        if not folder.is_absolute():
            raise LabError(f"{VARIABLE} is not an absolute path: {text}")
        return cls(folder)


def _user_folder() -> Path | None:
    """Return the folder of the user's ledgers; None if it would be on a network disk too."""
    try:
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "looplab"
    except RuntimeError:  # the user has no home
        return None
    return folder if folder.is_absolute() and network_disk(existing(folder)) is None else None


def home(lab: Path) -> Path:
    """Return the lab's own folder for looplab's files."""
    return lab / ".looplab"


def has_files(folder: Path) -> bool:
    """Return whether a folder has a ledger, or had one."""
    return any(os.path.lexists(folder / name) for name in LEDGER_FILES)


def state_folder(lab: Path, config: StateConfig | None = None) -> Path:
    """Return the folder of the lab's ledger and locks; it may not exist yet. Writes nothing.

    Args:
        lab: The lab.
        config: Where a new ledger is to be; None: in the lab.

    Raises:
        LabError: The ledger is on another machine, belongs to another lab, or is not where lab.yaml says.
    """
    config = config or StateConfig()
    pointer = _read(home(lab) / POINTER)
    if pointer is not None:
        folder = _pointed(lab, pointer)
    elif has_files(home(lab)) or config.folder is None:
        folder = home(lab)
    else:
        return _free_folder(lab, config.folder)
    if config.is_demanded and config.folder is not None and folder.parent.resolve() != config.folder.resolve():
        raise LabError(
            f"state_dir is {config.folder}, but the ledger of this lab is in {folder}",
            hint="`looplab doctor --move-ledger` moves it there",
        )
    return folder


def claim_state_folder(lab: Path, config: StateConfig) -> Path:
    """Return the folder of the lab's ledger for a writer; create it and point to it if there is no ledger yet.

    Raises:
        LabError: As `state_folder`; or it cannot be created.
    """
    folder = state_folder(lab, config)
    if folder == home(lab):
        return folder
    try:
        if _read(home(lab) / POINTER) is None:
            home(lab).mkdir(exist_ok=True)
            _create(home(lab) / POINTER, make_state_folder(lab, folder))
            folder = state_folder(lab, config)  # another engine may have been faster
            if has_files(home(lab)):
                raise LabError(f"a ledger was created in {home(lab)} at the same time", hint="try again")
        owner = _read(folder / OWNER)
        if owner is not None and owner.get("lab") != _path(lab):  # the lab was moved
            write_atomic(folder / OWNER, _dump({**owner, "lab": _path(lab)}))
    except OSError as error:
        raise LabError(f"cannot create the folder of the ledger: {error.strerror}", file=folder) from error
    return folder


def make_state_folder(lab: Path, folder: Path) -> dict[str, Any]:
    """Create a state folder that belongs to the lab, unless it exists; return the pointer to it."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"dir": _path(folder), "host": os.uname().nodename, "lab": _path(lab), "id": secrets.token_hex(8)}
    _create(folder / OWNER, about)
    return _read(folder / OWNER) or about


def set_pointer(lab: Path, folder: Path) -> None:
    """Make another existing folder the location of the lab's ledger."""
    if folder == home(lab):
        (home(lab) / POINTER).unlink(missing_ok=True)
    else:
        write_atomic(home(lab) / POINTER, _dump(make_state_folder(lab, folder)))


def new_folder(lab: Path, config: StateConfig) -> Path:
    """Return where the settings want the ledger: a folder without a ledger of this lab, or `.looplab`."""
    return home(lab) if config.folder is None else _free_folder(lab, config.folder, reuse=True)


def _pointed(lab: Path, pointer: dict[str, Any]) -> Path:
    folder = Path(str(pointer.get("dir")))
    owner = _read(folder / OWNER)
    if owner is None or owner["id"] != pointer["id"]:
        raise LabError(
            f"the ledger of this lab is in {folder} on host {pointer.get('host')}, and not on this machine",
            file=home(lab) / POINTER,
            hint="run looplab there; if that folder is lost, delete this file, and `looplab reindex` makes a new "
            "ledger from the run folders",
        )
    other = Path(str(owner.get("lab")))
    if str(other) != _path(lab):
        theirs = _read(home(other) / POINTER)
        if theirs is not None and theirs["id"] == pointer["id"] and not _same(other, lab):
            raise LabError(
                f"this lab is a copy of {other}, to which the ledger in {folder} belongs",
                file=home(lab) / POINTER,
                hint="delete this file, and `looplab reindex` makes a ledger of its own from the run folders",
            )
    return folder


def _free_folder(lab: Path, parent: Path, *, reuse: bool = False) -> Path:
    """Return the first folder in `parent` that belongs to this lab or to no lab.

    Args:
        reuse: Return it even if it has a ledger, to which the lab does not point.
    """
    digest = hashlib.sha256(os.fsencode(lab.resolve())).hexdigest()[:12]
    stem = f"{re.sub('[^A-Za-z0-9._-]', '_', lab.resolve().name)}-{digest}"
    for n in count(1):
        folder = parent.resolve() / (stem if n == 1 else f"{stem}-{n}")
        owner = _read(folder / OWNER)
        if owner is None and not has_files(folder):
            return folder
        if owner is not None and owner.get("lab") == _path(lab):
            if has_files(folder) and not reuse:
                raise LabError(
                    f"{folder} has a ledger of a lab at this path, but this lab does not point to it",
                    hint=f"if it is the ledger of this lab, copy {folder / OWNER} to {home(lab) / POINTER}; "
                    "else delete that folder",
                )
            return folder
    raise AssertionError


def _path(folder: Path) -> str:
    return mend_text(str(folder.resolve()))


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _create(path: Path, content: dict[str, Any]) -> None:
    """Create a file with its content, unless it exists."""
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    write_atomic(temporary, _dump(content))
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def _dump(content: dict[str, Any]) -> bytes:
    return (json.dumps(content) + "\n").encode()


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of a pointer or owner file; None if there is none.

    Raises:
        LabError: It is damaged.
    """
    try:
        content = load_json(read_bounded(path, MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UntrustedError) as error:
        raise LabError(f"cannot be read: {error}", file=path) from error
    if not isinstance(content, dict) or not isinstance(content.get("id"), str):
        raise LabError("it does not say where the ledger is", file=path)
    return content
