"""The logger of a trainer: one row of metrics, one line of strict JSON, one write.

    {"step": 10, "time": 1712345678.123, "loss": 0.3}

A row is handed to the system in a single call, on a file opened for appending. So it is out of the process when
`log` returns, rows of threads and of forked workers never mix, and a kill can tear only the row that it interrupts;
whoever opens the file next ends that torn line before writing its own.
Numbers are written exactly: what is read back equals what was logged. NaN and the infinities are written as the
strings "NaN", "Infinity" and "-Infinity"; a None is left out, because missing is missing.
"""

from __future__ import annotations

import os
import stat
from _thread import RLock  # the same as threading.RLock; importing threading takes longer than all of trainkit
from time import time

try:
    # What json.dumps itself uses for a string. Importing json whole takes longer than all of trainkit; importing it
    # only when the first row needs it would break a signal handler that logs in the middle of that import.
    from _json import encode_basestring_ascii as _quote
except ImportError:  # a Python without the C accelerator
    from json.encoder import encode_basestring_ascii as _quote

TYPE_CHECKING = False  # type checkers take it for true; at run time typing and collections.abc are not imported
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Any, Self

_PLAIN = frozenset((float, int))
"""Types whose `str` is JSON, given a finite number. Exactly these: a bool is an int too, a numpy float64 a float."""

_MOST_TEMPLATES = 512
"""A trainer that invents new names in every row must not fill the memory with their templates."""

_ROW_START = b'{"step": '
"""How a row of this logger begins."""

_TAIL = 1 << 20
"""How many bytes at the end of an existing file are searched for the last step."""

_templates: dict[tuple[str, ...], str] = {}
"""By the names in a row: the row as a format string, with a place for the step, the time and each value."""

_lock = RLock()
"""Guards opening and the counting of steps. Re-entrant, so that a signal handler may log whatever it interrupts."""


def _renew_lock() -> None:
    global _lock
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    # The thread that held the lock does not exist in a forked child, which would wait for it forever.
    os.register_at_fork(after_in_child=_renew_lock)


class Logger:
    """Appends rows to one file, which the first row creates. Safe to use from threads and in forked processes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._fd = -1
        self._step: float = -1
        self._closed = False

    def log(self, metrics: Mapping[str, Any] | None = None, /, step: float | None = None, **values: Any) -> None:
        """Write one row. A step left out is the step of the row before plus 1; the first is 0.

        A value may be a number, a bool (written as 0 or 1), a string, a None (left out), anything with `.item()` such
        as a numpy scalar or a tensor of one element, or a dict, whose names are joined to its own with "/". A `step`
        or `time` among the metrics stands in for the step or the clock. Anything else is a TypeError naming the metric.
        """
        if values:
            metrics = values if metrics is None else {**metrics, **values}
        elif type(metrics) is not dict:
            metrics = _as_dict(metrics)
        clock: float | str = f"{time():.3f}"

        # Nearly every row has the names of an earlier one and plain finite numbers, and skips the work below. A sum
        # minus itself is 0, unless a NaN or an infinity is in it; where finite numbers overflow, the long way is right.
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
            step = self._count(step)
        row = (template % (step, clock, *numbers)).encode()
        written = os.write(self._fd, row)
        if written != len(row):
            self._write_rest(row[written:])

    def summary(self, metrics: Mapping[str, Any] | None = None, /, **values: Any) -> None:
        """Write `trainer_summary.json` beside the metrics, whole or not at all; a later call replaces it."""
        flat = _flatten({**_as_dict(metrics), **values})
        body = ",\n".join(f"  {_quote(name)}: {value}" for name, value in flat.items())
        path = os.path.join(os.path.dirname(self.path), "trainer_summary.json")
        temporary = f"{path}.{os.getpid()}.tmp"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with _lock:
            try:
                with open(temporary, "w", encoding="utf-8") as file:
                    file.write(f"{{\n{body}\n}}\n" if flat else "{}\n")
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                if os.path.exists(temporary):
                    os.unlink(temporary)
                raise

    def cut(self, size: int) -> None:
        """Cut the file back to its first `size` bytes: what a resumed trainer writes again must not be there twice.

        The step goes on from the last row that is left. A file that is not longer is left as it is.
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

    def close(self) -> None:
        """Close the file. Logging to a closed logger is a ValueError."""
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
                self._step = _continue(fd, self._step)
            except BaseException:
                os.close(fd)
                raise
            self._fd = fd

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _count(self, step: object) -> float:
        """The step of this row, where it is not simply an int."""
        with _lock:
            self._step = self._step + 1 if step is None else _finite("step", _encode("step", step))
            return self._step

    def _write_rest(self, rest: bytes) -> None:
        """A disk that fills up may take half a row. If it refuses the rest, the next row opens the file anew, which
        ends the torn line."""
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            with _lock:
                self._release()
            raise


def _flatten(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float | str]:
    """All names in one level, with finite numbers as they are and every other value as its JSON text."""
    flat: dict[str, float | str] = {}
    for key, value in metrics.items():
        if not isinstance(key, str | int):
            raise TypeError(f"the name of a metric must be a string, not {key!r}")
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
            raise TypeError(f"metric {name!r}: a number or a string is needed, not a {type(value).__name__}")
        try:
            plain = item()
        except (TypeError, ValueError, RuntimeError) as error:  # what arrays and tensors of several elements raise
            raise TypeError(f"metric {name!r}: one value is needed, not a whole {type(value).__name__}") from error
        if not isinstance(plain, float | int | str):
            raise TypeError(f"metric {name!r}: a number or a string is needed, not a {type(value).__name__}")
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
        places = "".join(f", {_quote(name).replace('%', '%%')}: %s" for name in names)
        template = f'{{"step": %s, "time": %s{places}}}\n'
        if len(_templates) >= _MOST_TEMPLATES:
            _templates.clear()
        _templates[names] = template
    return template


def _continue(fd: int, step: float) -> float:
    """Ready the file for the next row: end a torn line, and return the last step it holds, or else `step`."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        return step
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
    return step


_default: Logger | None = None
"""The logger of this process, made by its first row."""
_default_path = ""
"""The path that the variables named when it was made."""


def current() -> Logger:
    """The logger of this process. It follows the variables, but not the working directory: a trainer that moves into
    another folder goes on in the same file."""
    global _default, _default_path
    path = os.environ.get("LOOPLAB_METRICS") or f"{os.environ.get('LOOPLAB_RUN_DIR') or '.'}/metrics.jsonl"
    if _default is None or path != _default_path:
        with _lock:
            if _default is not None:
                _default.close()
            _default, _default_path = Logger(path), path
    return _default


def log(metrics: Mapping[str, Any] | None = None, /, step: float | None = None, **values: Any) -> None:
    """Write one row to $LOOPLAB_METRICS, else to metrics.jsonl in $LOOPLAB_RUN_DIR, else to ./metrics.jsonl.

    `log({"loss": 0.3}, step=10)` and `log(step=10, loss=0.3)` write the same row; see `Logger.log`.
    """
    current().log(metrics, step, **values)


def summary(metrics: Mapping[str, Any] | None = None, /, **values: Any) -> None:
    """Write how the run ended to trainer_summary.json beside the metrics; see `Logger.summary`."""
    current().summary(metrics, **values)
