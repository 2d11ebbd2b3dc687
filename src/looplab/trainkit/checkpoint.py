"""Checkpoints: atomic, verified by hashes, written in the background.

    with trainkit.Checkpoints("checkpoints") as checkpoints:
        checkpoints.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=100)

A checkpoint is a folder, `step_0000000100/`, with two files: `tensors.safetensors`, and `manifest.json`, which contains
the step, the counters, the creation time, the size and SHA-256 of the tensor file, the rest of the state (see
`state.py`), and a SHA-256 of itself. The folder is written under a temporary name, synced and renamed. Then the
pointers (`latest`, `best`, …: files that contain the name of a folder) are updated, and old checkpoints are deleted.

Only one process may write to a folder (in distributed training: rank 0). Any number may read.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from looplab.errors import LabError
from looplab.trainkit.atomic import atomic_write, fsync_dir
from looplab.trainkit.state import flatten, rebuild, tensor_kind
from looplab.trainkit.tensors import CorruptCheckpoint, pack, read_header, read_tensor

FORMAT = 1
TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
_WRITE_CHUNK = 8 << 20
_FOLDER_NAME = re.compile(r"step_\d{10,}(-\d+)?")
_POINTER_NAME = re.compile(r"(?!step_)[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded and verified."""

    path: Path
    """Its folder."""
    step: int
    """The step it was saved at."""
    name: str
    """The pointer it was saved under: latest, best, …"""
    counters: dict[str, Any]
    """The counters given to `save`."""
    created: str
    """Creation time, UTC, ISO 8601."""
    state: Any
    """The state given to `save`."""


class Checkpoints:
    """Writes the checkpoints of one training run. Holds one copy of the state in memory, which every save reuses."""

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = 2, background: bool = True) -> None:
        """
        Args:
            folder: Created by the first save.
            keep: Number of most recent checkpoints to keep, besides those that a pointer such as `best` names.
                None keeps all.
            background: Write in a thread, while training continues.
        """
        if keep is not None and keep < 1:
            raise LabError(f"keep must be at least 1, not {keep}", hint="None keeps all checkpoints")
        self.folder = Path(folder).absolute()
        self.keep = keep
        self._pool = ThreadPoolExecutor(1, "checkpoints") if background else None
        self._pending: Future[None] | None = None
        self._buffer: bytearray | None = None
        self._removed_leftovers = False

    def save(self, state: Any, step: int, name: str = "latest", counters: Mapping[str, Any] | None = None) -> Path:
        """Copy the state and write it to disk in the background.

        If the previous checkpoint is still being written, this waits for it, so that checkpoints are written in order
        and memory holds one copy at most. The error of a failed write is raised by the next call of `save`, `wait` or
        `close`; earlier checkpoints remain intact.

        Args:
            state: Nested dicts, lists and tuples of tensors and plain values; see `state.py`.
            step: Step of the training run, from 0.
            name: Pointer to set besides `latest`, such as `best`. A checkpoint that a pointer names is never deleted.
            counters: Numbers for the manifest, which can be read without the tensors.

        Returns:
            The folder of the checkpoint, which exists once the write has finished.

        Raises:
            LabError: An argument is invalid, the state contains something that cannot be stored, or the previous write
                failed.
        """
        if type(step) is not int or step < 0:
            raise LabError(f"the step of a checkpoint must be an int ≥ 0, not {step!r}")
        if not _POINTER_NAME.fullmatch(name):
            raise LabError(f"{name!r} is not a valid checkpoint name", hint="use letters, digits, _ and -, as in best")
        self.wait()
        tree, tensors = flatten(state)
        manifest = {
            "format": FORMAT,
            "step": step,
            "name": name,
            "counters": _counters_as_json(counters or {}),
            "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "state": tree,
        }
        self._buffer, size = pack(tensors, self._buffer)
        target = self._unused_folder(step)
        if self._pool is None:
            self._write(manifest, self._buffer, size, target)
        else:
            self._pending = self._pool.submit(self._write, manifest, self._buffer, size, target)
        return target

    def wait(self) -> None:
        """Block until the last checkpoint is on disk. Raises LabError if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the last checkpoint, then free the thread and the buffer. Later saves write synchronously."""
        try:
            self.wait()
        finally:
            self._buffer = None
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unused_folder(self, step: int) -> Path:
        """Return the folder for a step. Saving a step twice makes two folders, so that none is ever overwritten."""
        target = self.folder / f"step_{step:010d}"
        number = 1
        while target.exists():
            number += 1
            target = self.folder / f"step_{step:010d}-{number}"
        return target

    def _write(self, manifest: dict[str, Any], buffer: bytearray, size: int, target: Path) -> None:
        temporary = self.folder / f".{target.name}.{os.getpid()}.tmp"
        try:
            if not self._removed_leftovers:
                self._remove_leftovers()
            temporary.mkdir(parents=True)
            digest = _write_synced(temporary / TENSORS, memoryview(buffer)[:size])
            manifest["files"] = [{"name": TENSORS, "size": size, "sha256": digest}]
            _write_synced(temporary / MANIFEST, memoryview(_with_checksum(manifest)))
            fsync_dir(temporary)
            os.rename(temporary, target)
            fsync_dir(self.folder)
            for pointer in sorted({"latest", manifest["name"]}):
                atomic_write(self.folder / pointer, f"{target.name}\n".encode())
            self._delete_old(target)
        except OSError as error:
            raise LabError(
                f"the checkpoint of step {manifest['step']} could not be written: {error.strerror or error}",
                file=target,
                hint="earlier checkpoints are intact",
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Delete temporary files and folders of processes that were killed."""
        for path in self.folder.glob(".*.tmp"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        self._removed_leftovers = True

    def _delete_old(self, newest: Path) -> None:
        if self.keep is None:
            return
        protected = {newest.name}
        by_age = []
        for path in self.folder.iterdir():
            if _FOLDER_NAME.fullmatch(path.name) and path.is_dir():
                by_age.append((path.stat().st_mtime_ns, path))
            elif _POINTER_NAME.fullmatch(path.name) and path.is_file():
                protected.add(_read_pointer(path))
        # By age, not by step: a run that went back to an earlier step must keep what it saves from there.
        by_age.sort(reverse=True)
        for _, path in by_age[self.keep :]:
            if path.name not in protected:
                hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # readers never see it half deleted
                os.rename(path, hidden)
                shutil.rmtree(hidden, ignore_errors=True)


def load(path: str | os.PathLike[str], check: bool = True) -> Checkpoint:
    """Load a checkpoint. Nothing is unpickled.

    Args:
        path: Folder of the checkpoint, or a pointer such as `checkpoints/best`.
        check: Verify the SHA-256 of the tensors, which takes most of the time.

    Returns:
        The checkpoint. Its tensors are copies on the CPU, of the type that was saved (torch or numpy).

    Raises:
        CorruptCheckpoint: A file is missing, truncated or altered.
        LabError: The checkpoint does not exist, or has a newer format.
    """
    path = Path(path)
    if path.is_file():
        path = path.parent / _read_pointer(path)
    if not path.is_dir():
        raise LabError("no such checkpoint", file=path)
    manifest = _read_manifest(path)
    tensors = path / TENSORS
    try:
        entry = manifest["files"][0]
        with open(tensors, "rb") as file:
            if os.fstat(file.fileno()).st_size != entry["size"]:
                raise CorruptCheckpoint(
                    f"the file has {os.fstat(file.fileno()).st_size} bytes, not {entry['size']}", file=tensors
                )
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, KeyError) as error:
        raise CorruptCheckpoint(f"cannot read the tensors: {error}", file=tensors) from error
    with ThreadPoolExecutor(1) as pool:  # hashing takes longer than copying, and releases the GIL
        digest = pool.submit(lambda: hashlib.sha256(data).hexdigest()) if check else None
        header = read_header(data, str(tensors))
        try:
            state = rebuild(manifest["state"], lambda name, kind: read_tensor(data, header[name], kind))
        except KeyError as error:
            raise CorruptCheckpoint(f"the tensor {error} is missing", file=tensors) from error
        if digest is not None and digest.result() != entry["sha256"]:
            raise CorruptCheckpoint("the tensors were altered: the SHA-256 differs", file=tensors)
    counters = rebuild(manifest["counters"], lambda name, kind: None)
    return Checkpoint(
        path=path,
        step=manifest["step"],
        name=manifest["name"],
        counters=counters,
        created=manifest["created"],
        state=state,
    )


def newest(folder: str | os.PathLike[str], tell: Callable[[str], object] = print) -> Checkpoint | None:
    """Load the newest intact checkpoint under a folder, at any depth.

    The newest is the one with the highest step. Among those of one step, a plain save (`latest`) wins over one saved
    under another name, then the more recent one.

    Args:
        folder: Where to look; need not exist.
        tell: Called with one line of text for every corrupt checkpoint that is skipped.

    Returns:
        The checkpoint, or None if there is none.
    """
    return next(intact(folder, tell), None)


def intact(folder: str | os.PathLike[str], tell: Callable[[str], object] = print) -> Iterator[Checkpoint]:
    """Load the intact checkpoints under a folder one after the other, the newest first; see `newest`."""
    found = []
    for path in _checkpoint_folders(Path(folder)):
        try:
            manifest = _read_manifest(path)
        except CorruptCheckpoint as error:
            tell(f"skipped: {error}")
            continue
        found.append(((manifest["step"], manifest["name"] == "latest", manifest["created"]), path))
    for _, path in sorted(found, reverse=True):
        try:
            yield load(path)
        except CorruptCheckpoint as error:
            tell(f"skipped: {error}")


def _counters_as_json(counters: Mapping[str, Any]) -> Any:
    values = {name: value.item() if tensor_kind(value) == "scalar" else value for name, value in counters.items()}
    tree, tensors = flatten(values)
    if tensors:
        raise LabError(f"the counter {next(iter(tensors))} is a tensor", hint="convert it to a number with .item()")
    return tree


def _checkpoint_folders(top: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(top):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]  # being written or deleted
        if MANIFEST in files or (TENSORS in files and _FOLDER_NAME.fullmatch(os.path.basename(folder))):
            yield Path(folder)


def _read_pointer(pointer: Path) -> str:
    """Return the name of the folder that a pointer file such as `best` contains."""
    with open(pointer, "rb") as file:
        return file.read(256).decode("utf-8", "replace").strip()


def _with_checksum(manifest: dict[str, Any]) -> bytes:
    """Serialize the manifest, with a SHA-256 of itself as its last key."""
    text = json.dumps(manifest, allow_nan=False)
    return f'{text[:-1]}, "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"}}\n'.encode()


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        written = path.read_bytes()
        manifest = json.loads(written)
        del manifest["sha256"]
    except OSError as error:
        raise CorruptCheckpoint(f"cannot read the manifest: {error.strerror}", file=path) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint("this is not the manifest of a checkpoint", file=path) from error
    if _with_checksum(manifest) != written:
        raise CorruptCheckpoint("the manifest was altered: the SHA-256 differs", file=path)
    if manifest["format"] != FORMAT:
        raise LabError(f"the checkpoint has format {manifest['format']}, this looplab reads {FORMAT}", file=path)
    return dict(manifest)


def _write_synced(path: Path, data: memoryview) -> str:
    """Write and fsync a new file; return its SHA-256. Writing and hashing both release the GIL."""
    digest = hashlib.sha256()
    with open(path, "xb", buffering=0) as file:
        for start in range(0, len(data), _WRITE_CHUNK):
            chunk = data[start : start + _WRITE_CHUNK]
            digest.update(chunk)
            while chunk:
                chunk = chunk[file.write(chunk) or 0 :]
        os.fsync(file.fileno())
    return digest.hexdigest()


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from looplab.trainkit.deprecated import renamed

        return renamed(__name__, name)
