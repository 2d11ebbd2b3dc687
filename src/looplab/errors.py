"""Errors for users: one short message, its location, and a hint on what to do."""

from __future__ import annotations

from os import PathLike


class LabError(Exception):
    """A problem that the user can fix. Commands print it without a traceback and exit with `exit_code`."""

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        file: str | PathLike[str] | None = None,
        line: int | None = None,
        hint: str | None = None,
    ) -> None:
        self.message = message
        self.file = None if file is None else str(file)
        self.line = line
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        where = self.file or ""
        if where and self.line is not None:
            where += f":{self.line}"
        text = f"{where}: {self.message}" if where else self.message
        return f"{text} ({self.hint})" if self.hint else text


class BusyError(LabError):
    """A resource is held by another process, such as another engine on the study."""

    exit_code = 3
