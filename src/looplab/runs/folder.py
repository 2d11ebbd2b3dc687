"""The run folder and its `record/`, which contains everything that looplab writes about the run.

Everything else in the run folder belongs to the trainer, whatever its name: Hugging Face's trainer writes its own
`config.json`, others a `summary.json` or a `train.log`.

`run.json` is written last: a folder with it is complete, and one without it is not yet a run. The first training
process creates `train.log`; the supervisor adds `process.json` and `exit.json`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.config.files import dump_json, hash_config, write_atomic
from looplab.errors import LabError
from looplab.runs.redact import hide_values
from looplab.untrusted import READING, UntrustedError, clean_line, load_json, mend_text, read_bounded

EMPTY = hashlib.sha256(b"").hexdigest()
READ_BYTES = 1 << 18
LARGEST_RECORD = 256 << 20
"""Maximum size in bytes of a JSON file in the record."""
PRIVATE = 0o600
EARLY_CAPSULE, EARLY_CHANGES, EARLY_EDITS = "capsule.json", "config_diff.json", "override.json"
"""Files of early versions with the capsule, the changes and the edits of a run, which are in `run.json` now."""
FORMS: dict[str, dict[str, type]] = {
    "run.json": {"notes": list, "devices": list, "slot": str, "fingerprint": str, "warm_start": dict, "edits": list,
                 "changes": dict, "capsule": dict},
    EARLY_CHANGES: {"parent": dict, "base": dict},
    "summary.json": {"status": str, "reason": str, "objective": dict, "verdict": dict, "notes": list, "metrics": dict,
                     "curve": list},
}  # fmt: skip
"""Expected types of keys in JSON files of the record, which a run can overwrite; every key is optional."""
REQUIRED = {"first", "last", "best", "best_step", "delta", "pct", "n", "nan", "last_is_nan"}
"""Required keys of a metric in a summary."""
SHARED = "_shared"
"""Folder next to the runs of a study for files that many runs share, named by their hash."""


MAX_POINTER = 1_000
"""Maximum size in bytes of LATEST or BEST."""
STAGED = ".import-"
"""Prefix of the folders in which imported runs are prepared."""
RECORD = "record"
"""Subfolder of a run folder that belongs to looplab."""
LEFT_BEHIND = ("metrics.jsonl", "trainer_summary.json")
"""Files of the trainer that must not change, nor appear, after the run has ended."""


def study_folder(lab: Path, study: str) -> Path:
    return lab / "outputs" / study


def make_study_folder(study: Path) -> None:
    """Create `outputs` and the study's folder in it, but never the lab itself, which may have been moved."""
    for path in (study.parent, study):
        with contextlib.suppress(FileExistsError):
            path.mkdir()


def appeared(run_dir: Path, recorded: Collection[str]) -> list[str]:
    """Return the files of the trainer that were made after the run had ended and its files were recorded."""
    if not {"process.json", f"{RECORD}/process.json"} & set(recorded):
        return []  # hashed at another time, such as by `reindex`
    return [name for name in LEFT_BEHIND if name not in recorded and os.path.isfile(f"{run_dir}/{name}")]


def record_name(run_dir: Path, name: str) -> str:
    """Return the path of one of looplab's files about a run, relative to the run folder.

    Runs of early versions have these files at the top level of the run folder.
    """
    early = not os.path.exists(f"{run_dir}/{RECORD}/run.json") and os.path.exists(f"{run_dir}/run.json")
    return name if early else f"{RECORD}/{name}"


def record_file(run_dir: Path, name: str) -> Path:
    """Return the path of one of looplab's files about a run."""
    return run_dir / record_name(run_dir, name)


def record_folder(run_dir: Path) -> Path:
    """Return the folder of looplab's files about a run."""
    return record_file(run_dir, "run.json").parent


def is_linked(run_dir: Path | str) -> bool:
    """Return whether the run folder or its record is a symbolic link.

    Nothing is written through such a link: a run or an agent may have planted it.
    """
    path = str(run_dir)
    return os.path.islink(path) or os.path.islink(f"{path}/{RECORD}")


def is_in_place(run_dir: Path | str) -> bool:
    """Return whether the run folder and its record are folders and not links."""
    path = str(run_dir)
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode) and stat.S_ISDIR(os.lstat(f"{path}/{RECORD}").st_mode)
    except OSError:
        return False


def replace_links(run_dir: Path) -> list[str]:
    """Replace links that a run has planted by empty folders; return the targets of the links."""
    targets = []
    for path in (str(run_dir), f"{run_dir}/{RECORD}"):
        if os.path.islink(path):
            targets.append(f"{os.path.basename(path)} → {clean_line(os.readlink(path), 200)}")
            os.unlink(path)
            os.mkdir(path)
    return targets


def link_inputs(run_dir: Path, names: Iterable[str], places: Iterable[Path]) -> None:
    """Link files and folders that a trainer reads into its run folder; what is there already stays.

    Args:
        run_dir: The run folder.
        names: Paths relative to the run folder and to the places.
        places: Where they may be, the first that has one counts.
    """
    places = list(places)
    for name in names:
        target = next((place / name for place in places if (place / name).exists()), None)
        link = run_dir / name
        if target is not None and not os.path.lexists(link):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target.resolve())


def create(run_dir: Path, files: Mapping[str, bytes], *, private: Collection[str] = ()) -> dict[str, str]:
    """Create the run folder with these files in its record, `run.json` last.

    An existing folder (prepared by an engine that crashed before it started the run) is updated.

    Args:
        run_dir: The run folder.
        files: Contents by name.
        private: Files with secrets, which only the owner may read.

    Returns:
        The SHA-256 of each file, by its path relative to the run folder.
    """
    hashes = {f"{RECORD}/{name}": hashlib.sha256(content).hexdigest() for name, content in files.items()}
    names = sorted(files, key="run.json".__eq__)
    target = f"{run_dir}/{RECORD}"
    try:
        os.mkdir(run_dir)
    except FileExistsError:
        replace_links(run_dir)
        os.makedirs(target, exist_ok=True)
        for name in names:
            write_atomic(f"{target}/{name}", files[name], sync=False, mode=PRIVATE if name in private else 0o666)
        return hashes
    os.mkdir(target)
    for name in names:
        mode = PRIVATE if name in private else 0o644
        descriptor = os.open(f"{target}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            # A full disk may accept a part and report no error.
            if os.write(descriptor, files[name]) != len(files[name]):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            error.filename = f"{target}/{name}"
            raise
        finally:
            os.close(descriptor)
    return hashes


def set_aside(record_dir: Path, attempt: int) -> None:
    """Rename the files of the attempt before this one: `exit.json` becomes `exit.1.json`, for example."""
    for name in ("exit", "process"):
        file = record_dir / f"{name}.json"
        earlier = record_dir / f"{name}.{attempt - 1}.json"
        with contextlib.suppress(FileNotFoundError):
            if not earlier.exists():
                file.rename(earlier)


def staged_import(run_dir: Path) -> Path:
    """Return the folder in which an imported run is prepared before it is recorded in the ledger."""
    return run_dir.with_name(f"{STAGED}{run_dir.name}")


def read_json(run_dir: Path, name: str, *, strict: bool = True) -> dict[str, Any]:
    """Return the content of a JSON file of the run's record; empty if it is missing.

    Args:
        run_dir: The run folder.
        name: Name of the file in the record.
        strict: Whether invalid content is an error rather than empty.

    Raises:
        LabError: It cannot be read, or does not have the form that looplab writes.
    """
    path = record_file(run_dir, name)
    try:
        data = load_json(read_bounded(path, LARGEST_RECORD, follow=False))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UntrustedError) as error:
        if not strict:
            return {}
        raise LabError(f"cannot be read: {getattr(error, 'strerror', None) or error}", file=path) from error
    problem = _find_problem(name, data)
    if problem is None:
        return dict(data)
    if strict:
        raise LabError(f"is not what looplab wrote: {problem}", file=path, hint="`looplab verify` names changed files")
    return {}


def read_changes(run_dir: Path, *, strict: bool = True) -> dict[str, Any]:
    """Return how the config of a run differs from its `parent` and from its `base`; empty if it has no record.

    Raises:
        LabError: As `read_json`.
    """
    about = read_json(run_dir, "run.json", strict=strict)
    return about["changes"] if about.get("changes") else read_json(run_dir, EARLY_CHANGES, strict=strict)


def read_capsule(run_dir: Path) -> dict[str, Any]:
    """Return the capsule of a run as its record has it, unchecked; empty if it is missing or cannot be read."""
    about = read_json(run_dir, "run.json", strict=False)
    return about["capsule"] if about.get("capsule") else read_json(run_dir, EARLY_CAPSULE, strict=False)


def _find_problem(name: str, data: object) -> str | None:
    """Return why the content of a record file is invalid; None: it is valid."""
    if not isinstance(data, dict):
        return "it does not contain a JSON object"
    for key, kind in FORMS.get(name, {}).items():
        if data.get(key) is not None and not isinstance(data[key], kind):
            return f"{key} is not a JSON {'object' if kind is dict else 'array' if kind is list else 'string'}"
    changes = data if name == EARLY_CHANGES else (data.get("changes") or {}) if name == "run.json" else {}
    for key in ("parent", "base"):
        sides = changes.get(key) or {} if changes else {}
        if not isinstance(sides, dict) or not all(isinstance(change, dict) for change in sides.values()):
            return f"{key} is not a set of changes"
    if name == "summary.json":
        if not all(isinstance(metric, dict) and _is_metric(metric) for metric in (data.get("metrics") or {}).values()):
            return "metrics has something that is not a metric"
        for key, value in (("the objective", (data.get("objective") or {}).get("value")), ("steps", data.get("steps"))):
            if value is not None and not _is_number(value):
                return f"{key} is not a number"
        curve = data.get("curve") or []
        if not all(isinstance(row, list) and len(row) == 2 and all(map(_is_number, row)) for row in curve):
            return "curve has something that is not a step and a value"
    return None


def _is_metric(metric: Mapping[str, object]) -> bool:
    return (
        isinstance(metric.get("n"), int)
        and metric.keys() >= REQUIRED
        and all(value is None or _is_number(value) for value in metric.values())
    )


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 64)


def read_config_of(run_dir: Path, config_hash: str) -> dict[str, Any]:
    """Return the config in a run's record, with secrets hidden.

    Raises:
        LabError: The config does not have this hash.
    """
    config = read_json(require(run_dir), "config.json")
    if hash_config(config) != config_hash:
        config, _ = hide_values(config)
    if hash_config(config) != config_hash:
        raise LabError("this is not the config that the run was planned with", file=record_file(run_dir, "config.json"))
    return config


def add_note(run_dir: Path, text: str) -> None:
    """Append a line to a run's `notes.md`; do nothing if its folder is gone or `notes.md` is not a file."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(record_file(run_dir, "notes.md"), flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO):
            return
        raise
    with os.fdopen(descriptor, "a", encoding="utf-8") as file:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            file.write(f"- {clean_line(text)}\n")


def hash_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_json(path: Path | str, data: Mapping[str, Any]) -> str:
    """Write finite data as JSON atomically and return its SHA-256. A folder of this name is renamed."""
    content = dump_json(dict(data), finite=True)
    write_over(path, content)
    return hashlib.sha256(content).hexdigest()


def write_over(path: Path | str, content: bytes) -> None:
    """Write one of looplab's own files atomically; a folder of this name is renamed."""
    try:
        write_atomic(path, content, sync=False)
    except IsADirectoryError:
        put_aside(path)
        write_atomic(path, content, sync=False)


def point(study: Path, name: str, run_id: str) -> None:
    """Set LATEST or BEST: one line, replaced atomically."""
    write_over(study / name, f"{run_id}\n".encode())


def pointed(study: Path, name: str) -> str | None:
    """Return the run that LATEST or BEST names; None: there is none."""
    try:
        return read_bounded(study / name, MAX_POINTER).decode("utf-8", "replace").strip() or None
    except (FileNotFoundError, UntrustedError):
        return None


def make_own_folder(path: Path) -> None:
    """Create one of looplab's own folders in a study's folder; replace a link that a run may have planted there."""
    if path.is_symlink():
        path.unlink()
    path.mkdir(exist_ok=True)


def keep_shared(study: Path, content: bytes, prefix: str, suffix: str) -> str:
    """Store content that many runs share once, by its hash; return its path relative to the study's folder."""
    name = f"{prefix}-{hashlib.sha256(content).hexdigest()[:16]}{suffix}"
    path = study / SHARED / name
    if not path.exists():
        make_own_folder(path.parent)
        write_atomic(path, content)
    return f"{SHARED}/{name}"


def run_folders(study: Path) -> list[Path]:
    """Return all run folders of a study, oldest first."""
    if not study.is_dir():
        return []
    return sorted(p for p in study.iterdir() if can_be_run(p.name) and p.is_dir() and is_run(p))


def can_be_run(name: str) -> bool:
    """Return whether a run folder may have this name: not hidden, and valid Unicode."""
    return name[0] not in "._" and mend_text(name) == name


def is_run(run_dir: Path) -> bool:
    """Return whether this is a complete run folder."""
    return record_file(run_dir, "run.json").exists()


def hash_file(path: Path | str) -> str | None:
    """Return the SHA-256 of a regular file; None: there is no such file."""
    try:
        descriptor = os.open(path, READING)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link to itself, a socket
            return None
        raise
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            return None
        if about.st_size == 0:
            return EMPTY
        # Five times as fast as a file object; a buffer no larger than the file avoids an allocation by the system.
        portion = about.st_size + 1 if about.st_size < READ_BYTES else READ_BYTES
        data = os.read(descriptor, portion)
        digest = hashlib.sha256(data)
        while len(data) == portion:
            data = os.read(descriptor, portion)
            digest.update(data)
        return digest.hexdigest()
    finally:
        os.close(descriptor)


def has_content(path: Path | str, content: bytes) -> bool:
    """Return whether a file has exactly this content, without hashing it."""
    try:
        descriptor = os.open(path, READING)
    except OSError:
        return False
    try:
        return os.read(descriptor, len(content) + 1) == content
    except OSError:  # a folder, for example
        return False
    finally:
        os.close(descriptor)


def hash_files(run_dir: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each of these files that exists; names are relative to the run folder."""
    digests = ((name, hash_file(f"{run_dir}/{name}")) for name in names)
    return {name: digest for name, digest in digests if digest is not None}


@dataclass(frozen=True, slots=True)
class RecordChange:
    """A recorded file that the run itself has changed."""

    name: str
    """Path relative to the run folder."""
    recorded: str
    """SHA-256 at the start of the run."""
    found: str | None
    """SHA-256 at the end; None: the file was gone."""
    restored: bool
    """Whether the original content was restored."""


def restore(run_dir: Path, recorded: Mapping[str, str], contents: Mapping[str, bytes]) -> list[RecordChange]:
    """Compare files with their recorded hashes and restore changed files.

    The run's version is kept next to the file, as `<name>.changed-<time>`.

    Args:
        run_dir: The run folder.
        recorded: SHA-256 of each file when it was written.
        contents: Known contents of the files. A content whose hash differs from the recorded one is written as a
            substitute, but does not count as restored.
    """
    changes = []
    prefix = str(run_dir)
    for name, digest in recorded.items():
        found = hash_file(f"{prefix}/{name}")
        if found == digest:
            continue
        path, content = run_dir / name, contents.get(name)
        put_aside(path.parent if os.path.lexists(path.parent) and not path.parent.is_dir() else path)
        if content is not None:
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, content, sync=False)
        original = content is not None and hash_bytes(content) == digest
        changes.append(RecordChange(name, digest, found, original))
    return changes


def concerns_lab(error: BaseException, outputs: Path) -> bool:
    """Return whether an error concerns the disk or the whole lab rather than the files of one run."""
    if not isinstance(error, OSError):
        return False
    if error.errno in (errno.EACCES, errno.EPERM):
        return not os.access(outputs, os.W_OK | os.X_OK)
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def put_aside(path: Path | str) -> None:
    """Rename whatever is in the place of one of looplab's files, so that the file can be written."""
    if os.path.lexists(path):
        os.replace(path, f"{path}.changed-{time.time_ns()}")


def sweep(folder: Path) -> None:
    """Remove temporary files of killed writers of looplab, and no other hidden files."""
    for path in folder.glob(".tmp-*"):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            path.unlink()


def require(run_dir: Path) -> Path:
    """Return the run folder; raise LabError if it is not a complete one."""
    if not is_run(run_dir):
        raise LabError(f"there is no run folder {run_dir}")
    return run_dir
