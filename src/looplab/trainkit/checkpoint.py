"""Checkpoints: whole or not there, checked by their hashes, written while the training goes on.

    with trainkit.Checkpoints("checkpoints") as checkpoints:
        checkpoints.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=100)

A checkpoint is a folder, `step_0000000100/`, with two files: `tensors.safetensors`, and `manifest.json`, which has the
step, the counters, when it was made, the size and SHA-256 of the tensors, the rest of the state (see `state.py`), and a
SHA-256 of itself. The folder is filled under another name, synced and renamed; only then do the files `latest` and
the like, of one line each, name it, and only then is an older one removed.

One process writes to a folder (in distributed training: rank 0); any number may read.
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
from looplab.trainkit.state import flatten, kind_of, rebuild
from looplab.trainkit.tensors import CorruptCheckpoint, contents, pack, take

FORMAT = 1
TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
_CHUNK = 8 << 20
_FOLDER = re.compile(r"step_\d{10,}(-\d+)?")
_NAME = re.compile(r"(?!step_)[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found whole."""

    path: Path
    """Its folder."""
    step: int
    """The step it was saved at."""
    name: str
    """What it was saved as: latest, best, …"""
    counters: dict[str, Any]
    """What else the trainer counted."""
    created: str
    """When, in UTC."""
    state: Any
    """What was given to `save`."""


class Checkpoints:
    """The checkpoints of one training. Keeps one copy of the state in memory, for the next save to use again."""

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = 2, background: bool = True) -> None:
        """`keep`: how many of the last ones stay, besides those that a name such as `best` points to; None: all."""
        if keep is not None and keep < 1:
            raise LabError(f"keep must be at least 1, not {keep}", hint="None keeps all checkpoints")
        self.folder = Path(folder).absolute()
        self.keep = keep
        self._pool = ThreadPoolExecutor(1, "checkpoints") if background else None
        self._pending: Future[None] | None = None
        self._buffer: bytearray | None = None
        self._tidied = False

    def save(self, state: Any, step: int, name: str = "latest", counters: Mapping[str, Any] | None = None) -> Path:
        """Take a copy of the state, and write it while the trainer goes on. Gives the folder that it will be.

        The file `latest` will name it, and so will a file `name` if that is another; what such a name points to is
        never removed. If the checkpoint before is still being written, this waits for it: what was asked for is
        written, in order, and the copy in memory is never more than one. A write that failed is raised here, or by
        `wait` or `close`, whichever comes first; the checkpoints before it are untouched.
        """
        if type(step) is not int or step < 0:
            raise LabError(f"the step of a checkpoint must be a whole number from 0, not {step!r}")
        if not _NAME.fullmatch(name):
            raise LabError(f"{name!r} is no name for a checkpoint", hint="use letters, digits, _ and -, as in best")
        self.wait()
        tree, tensors = flatten(state)
        manifest = {
            "format": FORMAT,
            "step": step,
            "name": name,
            "counters": _plain(counters or {}),
            "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "state": tree,
        }
        self._buffer, size = pack(tensors, self._buffer)
        target = self._free(step)
        if self._pool is None:
            self._write(manifest, self._buffer, size, target)
        else:
            self._pending = self._pool.submit(self._write, manifest, self._buffer, size, target)
        return target

    def wait(self) -> None:
        """Until what was saved is on the disk. Raises what kept it from getting there."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """`wait`, and let go of the thread and the buffer. A save after this is on the disk when it returns."""
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

    def _free(self, step: int) -> Path:
        """The folder for a step; a step that is saved again gets one of its own, so that none is ever overwritten."""
        target = self.folder / f"step_{step:010d}"
        again = 1
        while target.exists():
            again += 1
            target = self.folder / f"step_{step:010d}-{again}"
        return target

    def _write(self, manifest: dict[str, Any], buffer: bytearray, size: int, target: Path) -> None:
        temporary = self.folder / f".{target.name}.{os.getpid()}.tmp"
        try:
            if not self._tidied:
                self._tidy()
            temporary.mkdir(parents=True)
            digest = _write_synced(temporary / TENSORS, memoryview(buffer)[:size])
            manifest["files"] = [{"name": TENSORS, "size": size, "sha256": digest}]
            _write_synced(temporary / MANIFEST, memoryview(_sealed(manifest)))
            fsync_dir(temporary)
            os.rename(temporary, target)
            fsync_dir(self.folder)
            for pointer in sorted({"latest", manifest["name"]}):
                atomic_write(self.folder / pointer, f"{target.name}\n".encode())
            self._remove_old(target)
        except OSError as error:
            raise LabError(
                f"the checkpoint of step {manifest['step']} could not be written: {error.strerror or error}",
                file=target,
                hint="the checkpoints before it are whole",
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _tidy(self) -> None:
        """Remove what a killed process left half done."""
        for left in self.folder.glob(".*.tmp"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
        self._tidied = True

    def _remove_old(self, newest: Path) -> None:
        if self.keep is None:
            return
        kept = {newest.name}
        ages = []
        for path in self.folder.iterdir():
            if _FOLDER.fullmatch(path.name) and path.is_dir():
                ages.append((path.stat().st_mtime_ns, path))
            elif _NAME.fullmatch(path.name) and path.is_file():
                kept.add(_pointed(path))
        # By age and not by step: who goes back to an earlier step must not lose what is saved from there on.
        ages.sort(reverse=True)
        for _, path in ages[self.keep :]:
            if path.name not in kept:
                gone = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # never seen half removed
                os.rename(path, gone)
                shutil.rmtree(gone, ignore_errors=True)


def load(path: str | os.PathLike[str], check: bool = True) -> Checkpoint:
    """Read a checkpoint: its folder, or a file such as `checkpoints/best` that names one. Nothing is unpickled.

    Tensors are copies of their own, on the CPU, of the kind that was saved. `check=False` does not look at the hash of
    the tensors, which takes most of the time.
    """
    path = Path(path)
    if path.is_file():
        path = path.parent / _pointed(path)
    if not path.is_dir():
        raise LabError("there is no such checkpoint", file=path)
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
        raise CorruptCheckpoint(f"the tensors cannot be read: {error}", file=tensors) from error
    with ThreadPoolExecutor(1) as pool:  # hashing takes longer than copying, and lets other threads run
        digest = pool.submit(lambda: hashlib.sha256(data).hexdigest()) if check else None
        pieces = contents(data, str(tensors))
        try:
            state = rebuild(manifest["state"], lambda name, kind: take(data, pieces[name], kind))
        except KeyError as error:
            raise CorruptCheckpoint(f"the tensor {error} is not in the file", file=tensors) from error
        if digest is not None and digest.result() != entry["sha256"]:
            raise CorruptCheckpoint("the tensors are not those that were written: the SHA-256 differs", file=tensors)
    counters = rebuild(manifest["counters"], lambda name, kind: None)
    return Checkpoint(path, manifest["step"], manifest["name"], counters, manifest["created"], state)


def newest(folder: str | os.PathLike[str], tell: Callable[[str], object] = print) -> Checkpoint | None:
    """The last whole checkpoint anywhere under a folder, or None. What is broken is told and passed over.

    The last is that of the highest step; of one step a plain save (`latest`) comes after one by another name, and then
    the younger comes after the older.
    """
    found = []
    for path in _folders(Path(folder)):
        try:
            manifest = _read_manifest(path)
        except CorruptCheckpoint as error:
            tell(f"passed over: {error}")
            continue
        found.append(((manifest["step"], manifest["name"] == "latest", manifest["created"]), path))
    for _, path in sorted(found, reverse=True):
        try:
            return load(path)
        except CorruptCheckpoint as error:
            tell(f"passed over: {error}")
    return None


def _plain(counters: Mapping[str, Any]) -> Any:
    """The counters as JSON, which is read without the tensors."""
    tree, tensors = flatten({name: it.item() if kind_of(it) == "scalar" else it for name, it in counters.items()})
    if tensors:
        raise LabError(f"the counter {next(iter(tensors))} is a tensor", hint="make it a number with .item()")
    return tree


def _folders(top: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(top):
        below[:] = [name for name in below if not name.startswith(".")]  # what is half written or half removed
        if MANIFEST in files or (TENSORS in files and _FOLDER.fullmatch(os.path.basename(folder))):
            yield Path(folder)


def _pointed(pointer: Path) -> str:
    """The folder that a file such as `best` names."""
    with open(pointer, "rb") as file:
        return file.read(256).decode("utf-8", "replace").strip()


def _sealed(manifest: dict[str, Any]) -> bytes:
    """The manifest as text that ends with a hash of all that stands before it."""
    text = json.dumps(manifest, allow_nan=False)
    return f'{text[:-1]}, "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"}}\n'.encode()


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        written = path.read_bytes()
        manifest = json.loads(written)
        del manifest["sha256"]
    except OSError as error:
        raise CorruptCheckpoint(f"the manifest cannot be read: {error.strerror}", file=path) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint("this is no manifest of a checkpoint", file=path) from error
    if _sealed(manifest) != written:
        raise CorruptCheckpoint("the manifest is not the one that was written: the SHA-256 differs", file=path)
    if manifest["format"] != FORMAT:
        raise LabError(f"the checkpoint has format {manifest['format']}, this looplab reads {FORMAT}", file=path)
    return dict(manifest)


def _write_synced(path: Path, data: memoryview) -> str:
    """Write a new file to the disk; gives its SHA-256. Both the write and the hash leave other threads running."""
    digest = hashlib.sha256()
    with open(path, "xb", buffering=0) as file:
        for start in range(0, len(data), _CHUNK):
            piece = data[start : start + _CHUNK]
            digest.update(piece)
            while piece:
                piece = piece[file.write(piece) or 0 :]
        os.fsync(file.fileno())
    return digest.hexdigest()


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from looplab.trainkit.deprecated import renamed

        return renamed(__name__, name)
