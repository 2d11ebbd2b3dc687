"""The trust boundary: data from trainers, agents, people and files is checked here before it is used.

External data must not crash the engine, block it or reach the terminal unescaped. Each function either returns data
that the rest of the package can represent (valid Unicode, bounded size and nesting, numbers that JSON preserves) or
raises `UntrustedError`, which callers turn into a rejected proposal, a rejected answer or a failed measurement.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from looplab.errors import LabError

MAX_DEPTH = 200
"""Maximum nesting of external data; Python's own limit is about 1,000 frames."""
MAX_DIGITS = 1_000
"""Maximum number of digits of an int; Python refuses to convert more than 4,300."""
MAX_TEXT = 100_000
"""Maximum number of characters of one text in the record."""
READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Flags for opening external files: do not wait for the other end of a pipe."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*+[ -/]*+[@-~]|\][^\x07\x1b]*+(?:\x07|\x1b\\)|[@-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_NOT_ASCII = re.compile(r"[^\x00-\x7e]")
_LONG_INT = re.compile(r"\d{19}")
_UNUSUAL = " "
"""First character of output of `dump_json` that orjson may not parse exactly. Searching each text for such content
would cost ten times as much as parsing it."""


class UntrustedError(ValueError):
    """External data that cannot be accepted; the message explains why, for its author."""


def mend_text(text: str) -> str:
    """Return valid Unicode: surrogate pairs are joined, lone surrogates become U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Return valid Unicode of at most `limit` characters; a longer text ends in an ellipsis."""
    return mend_text(text) if len(text) <= limit else mend_text(text[: limit - 1]) + "…"


def clean_text(text: str, limit: int | None = None) -> str:
    """Return text that is safe to display: valid Unicode without terminal codes, control and bidirectional characters.

    Line breaks and tabs are kept.

    Args:
        text: Any text.
        limit: Maximum number of characters; longer texts end in an ellipsis. None: no limit.
    """
    if not (text.isascii() and text.isprintable()):
        text = _CONTROLS.sub("", _ESCAPES.sub("", mend_text(text)))
    return text if limit is None or len(text) <= limit else text[: max(0, limit - 1)].rstrip() + "…"


def clean_line(text: str, limit: int | None = None) -> str:
    """Return `clean_text` on one line: line breaks and tabs become spaces."""
    return clean_text(" ".join(text.split()) if any(c in text for c in "\n\r\t\v\f") else text, limit)


def escape_json(text: str, *, ascii_only: bool = False) -> str:
    """Return equivalent JSON with terminal control characters escaped, or with all non-ASCII characters escaped."""
    pattern = _NOT_ASCII if ascii_only else _CONTROLS
    return pattern.sub(lambda found: json.dumps(found[0])[1:-1], text) if not text.isprintable() or ascii_only else text


def mend(data: Any, *, max_depth: int = MAX_DEPTH, max_text: int | None = None) -> Any:
    """Return plain data with every text and key passed through `mend_text`.

    Raises:
        UntrustedError: It is nested too deeply, or a text or an int is too long.
    """
    return _mend(data, max_depth, max_text)


def _mend(data: Any, depth: int, max_text: int | None) -> Any:
    if isinstance(data, str):
        if max_text is not None and len(data) > max_text:
            raise UntrustedError(f"a text has {len(data):,} characters; at most {max_text:,} are allowed")
        return mend_text(data)
    if type(data) is int:
        return check_int(data)
    if isinstance(data, dict | list | tuple):
        if depth <= 0:
            raise UntrustedError("is nested too deeply")
        if isinstance(data, dict):
            return {_mend(key, 0, max_text): _mend(value, depth - 1, max_text) for key, value in data.items()}
        return [_mend(item, depth - 1, max_text) for item in data]
    return data


def check_int(number: int) -> int:
    """Return the int if it can be converted to text.

    Raises:
        UntrustedError: It has too many digits.
    """
    if number.bit_length() > 4 * MAX_DIGITS:
        raise UntrustedError(f"an int has more than {MAX_DIGITS:,} digits")
    return number


def load_json(raw: bytes | str, *, max_depth: int = MAX_DEPTH) -> Any:
    """Parse external JSON: valid Unicode, bounded nesting, exact ints of any size, NaN and infinities accepted.

    Raises:
        UntrustedError: It is not JSON, nested too deeply, or an int is too long.
    """
    import orjson

    text = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
    try:
        # orjson converts ints beyond 64 bits to floats and rejects NaN; json.loads is slower.
        if _LONG_INT.search(text):
            return _load_slowly(text, max_depth)
        return check_depth(orjson.loads(text), max_depth)
    except (json.JSONDecodeError, UnicodeEncodeError):
        return _load_slowly(text, max_depth)


def _load_slowly(text: str, max_depth: int) -> Any:
    try:
        return mend(json.loads(text), max_depth=max_depth)
    except UntrustedError:
        raise
    except RecursionError:
        raise UntrustedError("is nested too deeply") from None
    except ValueError as error:
        raise UntrustedError(f"is not JSON: {error}") from None


def check_depth(data: Any, max_depth: int = MAX_DEPTH) -> Any:
    """Return the data if its nesting is within the limit; works level by level, without recursion.

    Raises:
        UntrustedError: It is nested too deeply.
    """
    level = [data]
    for _ in range(max_depth + 1):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return data
    raise UntrustedError("is nested too deeply")


def dump_json(data: Any, *, sort_keys: bool = False, indent: bool = False) -> str:
    """Return valid JSON for any data, on one line unless `indent` is set.

    Ints of any size are exact and texts become valid Unicode. NaN and infinities become null; other types and data that
    is nested too deeply become text. For ordinary data this is orjson's output, byte for byte.
    """
    import orjson

    options = (orjson.OPT_SORT_KEYS if sort_keys else 0) | (orjson.OPT_INDENT_2 if indent else 0)
    try:
        return orjson.dumps(data, default=str, option=options).decode()
    except TypeError:
        plain = _storable(data, MAX_DEPTH)
        if indent:
            return json.dumps(plain, ensure_ascii=False, sort_keys=sort_keys, indent=2)
        return _UNUSUAL + json.dumps(plain, ensure_ascii=False, sort_keys=sort_keys, separators=(",", ":"))


def _storable(data: Any, depth: int) -> Any:
    """Return data that `json.dumps` can write as valid JSON."""
    if isinstance(data, str):
        return mend_text(data)
    if data is None or isinstance(data, bool):
        return data
    if isinstance(data, int):
        bits = data.bit_length()
        return int(data) if bits <= 4 * MAX_DIGITS else f"an int of about {bits * 0.30103:.0f} digits"
    if isinstance(data, float):
        return float(data) if math.isfinite(data) else None
    if isinstance(data, dict | list | tuple) and depth <= 0:
        return "nested too deeply"
    if isinstance(data, dict):
        return {_key_text(key): _storable(value, depth - 1) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_storable(item, depth - 1) for item in data]
    return mend_text(str(data))


def _key_text(key: Any) -> str:
    if isinstance(key, str):
        return mend_text(key)
    return json.dumps(key) if key is None or isinstance(key, bool | float) else str(_storable(key, 1))


def load_own_json(text: str) -> Any:
    """Parse JSON written by `dump_json`: as fast as orjson, but ints beyond 64 bits stay exact.

    Raises:
        LabError: It is not JSON, so the ledger is damaged.
    """
    import orjson

    try:
        return json.loads(text) if text.startswith(_UNUSUAL) else orjson.loads(text)
    except ValueError as error:
        raise LabError(
            f"the ledger is damaged: {error}", hint="`looplab verify` says where, `looplab reindex` repairs it"
        ) from None


def real_path(path: str | PathLike[str]) -> Path:
    """Return the path without symbolic links; a loop of links, for which `Path.resolve` may fail, is left as it is."""
    return Path(os.path.realpath(path))


def open_descriptor(path: str | PathLike[str], *, follow: bool = True) -> int:
    """Open a regular file as `open_regular` does and return its descriptor; the caller closes it."""
    flags = READING | (0 if follow else os.O_NOFOLLOW)
    if not follow and os.path.islink(path):
        raise UntrustedError("is a symbolic link, not a file")
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = "folder" if stat.S_ISDIR(mode) else "device, pipe or socket"
            raise UntrustedError(f"is a {kind}, not a file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_own(path: str | PathLike[str], flags: int, mode: int = 0o644) -> int:
    """Open or create one of looplab's own files for writing; the caller closes the descriptor.

    Runs and agents can plant a symbolic link, a pipe or a folder in its place. Nothing is written through it: it is
    renamed to `<name>.changed-<time>`, and a new file is created.
    """
    flags |= os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    while True:
        try:
            descriptor = os.open(path, flags, mode)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
        else:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
        os.rename(path, f"{os.fspath(path)}.changed-{time.time_ns()}")


def append_own(path: str | PathLike[str]) -> BinaryIO:
    """Open one of looplab's own files for appending, unbuffered; see `open_own`."""
    return os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)


@contextmanager
def open_regular(path: str | PathLike[str], *, follow: bool = True) -> Iterator[BufferedReader]:
    """Open a regular file for reading; never wait for a pipe or read a device.

    Args:
        path: The file.
        follow: Whether the file itself may be a symbolic link.

    Raises:
        OSError: There is no such file, or it cannot be read.
        UntrustedError: It is a folder, pipe, socket or device, or a link and `follow` is not set.
    """
    with os.fdopen(open_descriptor(path, follow=follow), "rb") as file:
        yield file


def read_bounded(path: str | PathLike[str], limit: int, *, follow: bool = True) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        OSError: There is no such file, or it cannot be read.
        UntrustedError: It is not a regular file, or too large.
    """
    with open_regular(path, follow=follow) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UntrustedError(f"is larger than {limit:,} bytes")
    return content
