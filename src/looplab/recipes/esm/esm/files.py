"""Crash-safe files: atomic writes by rename, JSONL by append, torn last lines dropped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from looplab.errors import LabError


def atomic_write(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    atomic_write(path, (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise LabError("no such file", file=path) from None
    except ValueError as error:
        raise LabError(f"not JSON: {error}", file=path) from None


def to_jsonl(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Serialize rows, one JSON object per line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def append_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows in one write. Repair the file first with `read_jsonl`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        content = memoryview(to_jsonl(rows))
        while content:
            content = content[file.write(content) :]
        os.fsync(file.fileno())


def read_jsonl(path: Path, repair: bool = False) -> list[dict[str, Any]]:
    """Read the rows of a JSONL file, [] if it does not exist. A torn last line is ignored; `repair` removes it."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    end = content.rfind(b"\n") + 1
    if repair and end < len(content):
        with open(path, "r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())
    rows = []
    for number, line in enumerate(content[:end].splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise LabError(f"not JSON: {error}", file=path, line=number) from None
    return rows


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]], note: Mapping[str, Any] | None = None) -> None:
    """Write a safetensors file; `note` is any JSON, stored in its header."""
    from safetensors.numpy import save

    metadata = None if note is None else {"note": json.dumps(note, ensure_ascii=False)}
    atomic_write(path, save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, metadata=metadata))


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    from safetensors.numpy import load_file

    if not path.is_file():
        raise LabError("no such file", file=path)
    return load_file(path)


def read_note(path: Path) -> Any:
    """Read the note that `write_arrays` stored in the header, without the arrays."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return json.loads((file.metadata() or {})["note"])


def digest(value: Any) -> str:
    """Return a short hash of a JSON value, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_files(paths: Iterable[Path]) -> str:
    """Return a short hash of the names and contents of files."""
    sha = hashlib.sha256()
    for path in sorted(paths):
        sha.update(f"{path.name}:{path.stat().st_size}:".encode())
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                sha.update(block)
    return sha.hexdigest()[:16]
