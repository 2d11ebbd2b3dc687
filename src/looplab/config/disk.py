"""Detection of network file systems."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NETWORK = {
    0x6969: "NFS", 0x517B: "SMB", 0xFE534D42: "SMB", 0xFF534D42: "CIFS", 0x65735546: "FUSE", 0x01021997: "9p",
    0x00C36400: "Ceph", 0x0BD00BD0: "Lustre", 0x47504653: "GPFS", 0x19830326: "BeeGFS", 0x5346414F: "AFS",
    0x7461636F: "OCFS2", 0x01161970: "GFS2", 0x73757245: "Coda", 0x786F4256: "vboxsf", 0xAAD7AAEA: "PanFS",
}  # fmt: skip
"""`f_type` of file systems that several hosts may share: memory maps are not, and locks may not be."""


def filesystem_type(folder: Path) -> int:
    """Return the `f_type` that statfs reports; 0 if it fails."""
    buffer = (ctypes.c_long * 32)()  # struct statfs begins with f_type
    try:
        failed = ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(folder), buffer)
    except (OSError, AttributeError):
        return 0
    return 0 if failed else buffer[0] & 0xFFFFFFFF


def network_disk(folder: Path) -> str | None:
    """Return the name of the network file system that a folder is on; None: the disk is local."""
    return NETWORK.get(filesystem_type(folder))


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())
