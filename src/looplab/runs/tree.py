"""Remove and copy below a folder without following links that a run, a stage or an agent may have planted.

Each component of the path below the root is opened relative to the descriptor of its parent, so a link in the middle is
an error, whenever it was created. The root is trusted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from looplab.errors import LabError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
CHUNK = 1 << 20


def parts_of(name: str | PurePath) -> tuple[str, ...]:
    """Return the components of a relative path; raise LabError if it leads out of its root."""
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts or any("\0" in part for part in parts):
        raise LabError(f"{str(name)!r} does not name something inside its folder")
    return parts


@contextmanager
def open_parent(root: Path, name: str | PurePath, *, create: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the descriptor of the parent folder of `name`, and its last component.

    Args:
        root: A trusted folder.
        name: A path relative to it.
        create: Whether to create missing folders.

    Raises:
        FileNotFoundError: A folder is missing and `create` is not set.
        LabError: The path leads out of the root, or a component is not a folder.
    """
    *middle, last = parts_of(name)
    descriptor = os.open(root, FOLDER)
    try:
        for part in middle:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
            deeper = _open_folder(part, descriptor, root, name)
            os.close(descriptor)
            descriptor = deeper
        yield descriptor, last
    finally:
        os.close(descriptor)


def _open_folder(part: str, parent: int, root: Path, name: str | PurePath) -> int:
    try:
        return os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise LabError(f"{part!r} in {name} is a link or a file, not a folder", file=root) from None
        raise


def remove(root: Path, name: str | PurePath) -> None:
    """Remove a file, a link or a folder with its content; do nothing if it does not exist."""
    try:
        with open_parent(root, name) as (parent, last):
            if stat.S_ISDIR(os.lstat(last, dir_fd=parent).st_mode):
                shutil.rmtree(last, dir_fd=parent)  # does not follow links, either
            else:
                os.unlink(last, dir_fd=parent)
    except FileNotFoundError:
        return


def exists(root: Path, name: str | PurePath) -> bool:
    """Return whether there is a file, a link or a folder of this name."""
    try:
        with open_parent(root, name) as (parent, last):
            os.lstat(last, dir_fd=parent)
    except FileNotFoundError:
        return False
    return True


def move(root: Path, name: str | PurePath, target: str | PurePath) -> None:
    """Rename within a folder, creating missing folders; what was at the target is removed. Do nothing if `name` does
    not exist."""
    if not exists(root, name):
        return
    remove(root, target)
    with open_parent(root, name) as (parent, last), open_parent(root, target, create=True) as (into, new):
        os.rename(last, new, src_dir_fd=parent, dst_dir_fd=into)


def make_writable(root: Path, name: str | PurePath) -> None:
    """Give the owner all permissions on a folder and all folders in it."""
    with contextlib.suppress(FileNotFoundError), open_parent(root, name) as (parent, last):
        folder = _open_folder(last, parent, root, name)
        try:
            for _, _, _, descriptor in os.fwalk(".", dir_fd=folder):
                os.fchmod(descriptor, os.fstat(descriptor).st_mode | stat.S_IRWXU)
        finally:
            os.close(folder)


def copy(source: Path, target: Path, name: str | PurePath) -> bool:
    """Copy a file, a link or a folder to the same path below another root, creating missing folders.

    Links are copied as links; pipes, sockets and devices are skipped. Existing files are replaced, folders are merged.

    Returns:
        Whether the source exists.
    """
    try:
        with open_parent(source, name) as (parent, last):
            os.lstat(last, dir_fd=parent)
            with open_parent(target, name, create=True) as (into, _):
                _copy(last, parent, into)
    except FileNotFoundError:
        return False
    return True


def _copy(name: str, parent: int, into: int) -> None:
    mode = os.lstat(name, dir_fd=parent).st_mode
    if stat.S_ISDIR(mode):
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=into)
        source = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=parent)
        try:
            target = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=into)
            try:
                for entry in os.listdir(source):
                    _copy(entry, source, target)
            finally:
                os.close(target)
        finally:
            os.close(source)
    elif stat.S_ISLNK(mode):
        _clear(name, into)
        os.symlink(os.readlink(name, dir_fd=parent), name, dir_fd=into)
    elif stat.S_ISREG(mode):
        _copy_file(name, parent, into)


def _copy_file(name: str, parent: int, into: int) -> None:
    source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    try:
        about = os.fstat(source)
        if not stat.S_ISREG(about.st_mode):
            return
        _clear(name, into)
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=into)
        try:
            while data := os.read(source, CHUNK):
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(target, rest) :]
            os.fchmod(target, stat.S_IMODE(about.st_mode) & 0o777)
            os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))
        finally:
            os.close(target)
    finally:
        os.close(source)


def _clear(name: str, parent: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
