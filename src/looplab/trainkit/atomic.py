"""Atomic file writes: a temporary file in the same folder, fsync, rename."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO


def atomic_write(path: str | os.PathLike[str], content: bytes | Callable[[BinaryIO], object]) -> None:
    """Replace a file atomically: readers see the old content or the new one, also after a crash or a power loss.

    Args:
        path: The file; missing parent folders are created.
        content: The new content, or a function that writes it to the open binary file it is called with.
    """
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
    fsync_dir(folder)


def fsync_dir(path: str | os.PathLike[str]) -> None:
    """Flush a folder's entries to disk, so that files created or renamed in it survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
