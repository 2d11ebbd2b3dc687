"""Small C libraries, compiled by the machine's C compiler on first use.

They are cached in $XDG_CACHE_HOME/looplab (~/.cache/looplab). Every caller has a slower implementation in Python for
machines without a compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-O3", "-std=gnu99", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""Not -march=native: several machines may share a home folder. Not -ffast-math: additions keep their order."""
COMPILERS = ("cc", "gcc", "clang")
ISA_FLAGS = {
    "avx512": ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    "avx2": ("-mavx2", "-mfma"),
    "neon": (),
    "": (),
}


@functools.cache
def detect_isa() -> str:
    """Return the widest instruction set with fused multiply-add that this machine has; "" if unknown."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "neon"
    import torch

    capability = torch.backends.cpu.get_cpu_capability().lower()
    return capability if capability in ISA_FLAGS else ""


@functools.cache
def load_library(source: Path, *extra_flags: str) -> ctypes.CDLL | None:
    """Return the library compiled from a C file with `FLAGS` and these flags; None if it cannot be compiled."""
    text = source.read_bytes()
    flags = (*FLAGS, *extra_flags)
    key = hashlib.sha256(b"\0".join([text, " ".join(flags).encode(), platform.platform().encode()])).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "looplab"
    cached = folder / f"{source.stem}-{key}.so"
    try:
        if not cached.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as work:
                built = _compile(source, flags, Path(work))
                if built is None:
                    return None
                os.replace(built, cached)  # atomic: another process may be about to load it
        return ctypes.CDLL(str(cached))
    except OSError:  # the cache is missing, not writable, mounted noexec, or broken
        with tempfile.TemporaryDirectory() as work:
            built = _compile(source, flags, Path(work))
            try:
                return None if built is None else ctypes.CDLL(str(built))
            except OSError:
                return None


def _compile(source: Path, flags: tuple[str, ...], folder: Path) -> Path | None:
    target = folder / "library.so"
    for name in COMPILERS:
        compiler = shutil.which(name)
        if compiler is None:
            continue
        argv = [compiler, *flags, str(source), "-o", str(target), "-lm"]
        try:
            done = subprocess.run(argv, capture_output=True, timeout=600)
        except subprocess.TimeoutExpired:
            continue
        if done.returncode == 0:
            return target
    return None
