"""A file that is there whole, or as it was before: written under another name, synced, renamed."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO


def write_whole(path: str | os.PathLike[str], content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write bytes, or what `content` writes into the file it is given. A reader sees the old file or the new one."""
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.lexists(temporary):
            os.unlink(temporary)
    sync_folder(folder)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names in a folder outlast a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
