"""Metrics logger: each row is one line of strict JSON, appended with one write.

    {"step": 10, "time": 1712345678.123, "loss": 0.3}

A row is written with a single system call to a file opened with O_APPEND. So it has left the process when `log`
returns, rows of threads and forked workers never interleave, and a kill can tear only the row being written; the next
process that opens the file terminates the torn line first.

Numbers round-trip exactly. NaN and the infinities are written as the strings "NaN", "Infinity" and "-Infinity"; None
values are left out.
"""

from __future__ import annotations

import os
import stat
from _thread import RLock  # threading.RLock; importing threading would take longer than importing trainkit
from time import time

from looplab.trainkit.atomic import atomic_write

try:
    # The function json.dumps uses for strings. Importing json takes longer than importing trainkit; importing it with
    # the first row would break a signal handler that logs during that import.
    from _json import encode_basestring_ascii as _quote
except ImportError:  # a Python without the C accelerator
    from json.encoder import encode_basestring_ascii as _quote

TYPE_CHECKING = False  # true for type checkers; avoids importing typing and collections.abc at run time
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Any, Self

_PLAIN = frozenset((float, int))
"""Types whose `str` is JSON if the number is finite. Subclasses (bool, numpy.float64) take the slow path."""

_MAX_TEMPLATES = 512
"""Limit of the template cache, for trainers that use new names in every row."""

_ROW_START = b'{"step": '
"""First bytes of every row."""

_TAIL = 1 << 20
"""Bytes at the end of an existing file that are searched for the last step."""

_templates: dict[tuple[str, ...], str] = {}
"""Names in a row → format string of the row, with placeholders for the step, the time and the values."""

_lock = RLock()
"""Guards opening files and counting steps. Re-entrant, so that signal handlers can log at any time."""


def _replace_lock() -> None:
    global _lock
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    # A forked child does not have the thread that held the lock, and would deadlock.
    os.register_at_fork(after_in_child=_replace_lock)


class Logger:
    """Appends rows to a file, which the first row creates. Safe to use from threads and forked processes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._fd = -1
        self._step: float = -1
        self._closed = False

    def log(self, metrics: Mapping[str, Any] | None = None, /, step: float | None = None, **values: Any) -> None:
        """Append one row.

        Args:
            metrics: Values by name: numbers, bools (written as 0 or 1), strings, None (left out), anything with
                `.item()` such as a numpy scalar or a one-element tensor, or dicts, whose names are joined with "/".
                The names `step` and `time` override the step and the clock.
            step: Default: the step of the previous row plus 1, from 0.
            values: More metrics, as keyword arguments.

        Raises:
            TypeError: A value cannot be logged; the message names the metric.
        """
        if values:
            metrics = values if metrics is None else {**metrics, **values}
        elif type(metrics) is not dict:
            metrics = _as_dict(metrics)
        clock: float | str = f"{time():.3f}"

        # Fast path: the names of an earlier row, and plain finite numbers. A sum minus itself is 0 unless it contains
        # NaN or an infinity. If finite numbers overflow, the slow path handles them.
        template = _templates.get(tuple(metrics))
        numbers = metrics.values()
        try:
            if not _PLAIN.issuperset(map(type, numbers)) or (total := sum(numbers)) - total:
                template = None
        except OverflowError:
            template = None
        if template is None:
            flat = _flatten(metrics)
            if "step" in flat:
                given = flat.pop("step")
                step = _finite("step", given) if step is None else step
            if "time" in flat:
                clock = _finite("time", flat.pop("time"))
            template = _template(tuple(flat))
            numbers = flat.values()

        if self._fd < 0:
            self._open()
        if type(step) is int:
            self._step = step
        else:
            step = self._next_step(step)
        row = (template % (step, clock, *numbers)).encode()
        written = os.write(self._fd, row)
        if written != len(row):
            self._write_rest(row[written:])

    def summary(self, metrics: Mapping[str, Any] | None = None, /, **values: Any) -> None:
        """Write `trainer_summary.json` next to the metrics, atomically. A later call replaces it."""
        flat = _flatten({**_as_dict(metrics), **values})
        body = ",\n".join(f"  {_quote(name)}: {value}" for name, value in flat.items())
        content = f"{{\n{body}\n}}\n" if flat else "{}\n"
        with _lock:
            atomic_write(os.path.join(os.path.dirname(self.path), "trainer_summary.json"), content.encode())

    def truncate(self, size: int) -> None:
        """Truncate the file to its first `size` bytes, so that a resumed trainer does not log steps twice.

        Counting continues from the last remaining row. A shorter file is left alone.
        """
        with _lock:
            self._release()
            if not os.path.exists(self.path) or os.path.getsize(self.path) <= size:
                return
            self._step = -1
            fd = os.open(self.path, os.O_RDWR | getattr(os, "O_BINARY", 0))
            try:
                os.ftruncate(fd, size)
                os.fsync(fd)
            finally:
                os.close(fd)

    def cut(self, size: int) -> None:
        """Former name of `truncate`; it works for one more release."""
        import warnings

        warnings.warn("Logger.cut was renamed to Logger.truncate", DeprecationWarning, stacklevel=2)
        self.truncate(size)

    def close(self) -> None:
        """Close the file. Logging to a closed logger raises ValueError."""
        with _lock:
            self._closed = True
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        with _lock:
            if self._fd >= 0:
                return
            if self._closed:
                raise ValueError(f"the logger of {self.path} is closed")
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            try:
                self._step = _last_step(fd, self._step)
            except BaseException:
                os.close(fd)
                raise
            self._fd = fd

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _next_step(self, step: object) -> float:
        """Return the step of this row if it was not given as an int."""
        with _lock:
            self._step = self._step + 1 if step is None else _finite("step", _encode("step", step))
            return self._step

    def _write_rest(self, rest: bytes) -> None:
        """Write the rest of a row after a partial write (the disk is nearly full). If that fails, close the file: the
        next row reopens it, which terminates the torn line."""
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            with _lock:
                self._release()
            raise


def _flatten(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float | str]:
    """Flatten nested names. Finite numbers stay numbers, all other values become JSON text."""
    flat: dict[str, float | str] = {}
    for key, value in metrics.items():
        if not isinstance(key, str | int):
            raise TypeError(f"metric names must be strings, not {key!r}")
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{name}/"))
        elif value is not None:
            flat[name] = _encode(name, value)
    return flat


def _encode(name: str, value: Any) -> float | str:
    if not isinstance(value, float | int | str):
        item = getattr(value, "item", None)
        if not callable(item):
            raise TypeError(f"metric {name!r}: expected a number or a string, not a {type(value).__name__}")
        try:
            plain = item()
        except (TypeError, ValueError, RuntimeError) as error:  # an array or tensor with several elements
            raise TypeError(
                f"metric {name!r}: expected a single value, not a {type(value).__name__} of several"
            ) from error
        if not isinstance(plain, float | int | str):
            raise TypeError(f"metric {name!r}: expected a number or a string, not a {type(value).__name__}")
        value = plain
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, int):
        return int(value)
    number = float(value)
    if number - number == 0:
        return number
    return '"NaN"' if number != number else '"Infinity"' if number > 0 else '"-Infinity"'


def _finite(name: str, value: float | str) -> float:
    if isinstance(value, str):
        raise TypeError(f"{name!r} must be a finite number, not {value}")
    return value


def _as_dict(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    if metrics is None:
        return {}
    if not hasattr(metrics, "keys"):
        raise TypeError(f"metrics must be a dict, not a {type(metrics).__name__}")
    return dict(metrics)


def _template(names: tuple[str, ...]) -> str:
    template = _templates.get(names)
    if template is None:
        placeholders = "".join(f", {_quote(name).replace('%', '%%')}: %s" for name in names)
        template = f'{{"step": %s, "time": %s{placeholders}}}\n'
        if len(_templates) >= _MAX_TEMPLATES:
            _templates.clear()
        _templates[names] = template
    return template


def _last_step(fd: int, default: float) -> float:
    """Return the last step in an open file, or `default`. Terminates a torn last line first."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        return default
    os.lseek(fd, max(0, status.st_size - _TAIL), os.SEEK_SET)
    tail = os.read(fd, _TAIL)
    if not tail.endswith(b"\n"):
        os.write(fd, b"\n")
    for line in reversed(tail.splitlines()):
        if line.startswith(_ROW_START) and line.endswith(b"}"):
            try:
                last = float(line[len(_ROW_START) : line.find(b",")])
            except ValueError:  # another program's row
                continue
            if last - last == 0:
                return int(last) if last.is_integer() else last
    return default


_default: Logger | None = None
"""The logger behind `log` and `summary`; None before their first call."""
_default_path = ""
"""Its path, as given by the environment when it was created."""


def default_logger() -> Logger:
    """Return the logger behind `log` and `summary`.

    It follows changes of the environment variables, but not of the working directory: a trainer that changes directory
    continues in the same file.
    """
    global _default, _default_path
    path = os.environ.get("LOOPLAB_METRICS") or f"{os.environ.get('LOOPLAB_RUN_DIR') or '.'}/metrics.jsonl"
    if _default is None or path != _default_path:
        with _lock:
            if _default is not None:
                _default.close()
            _default, _default_path = Logger(path), path
    return _default


def log(metrics: Mapping[str, Any] | None = None, /, step: float | None = None, **values: Any) -> None:
    """Append one row to $LOOPLAB_METRICS; if that is not set, to metrics.jsonl in $LOOPLAB_RUN_DIR or in `.`.

    `log({"loss": 0.3}, step=10)` and `log(step=10, loss=0.3)` write the same row; see `Logger.log`.
    """
    default_logger().log(metrics, step, **values)


def summary(metrics: Mapping[str, Any] | None = None, /, **values: Any) -> None:
    """Write final metrics to trainer_summary.json, next to the metrics file; see `Logger.summary`."""
    default_logger().summary(metrics, **values)
