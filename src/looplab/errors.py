"""What a user sees when something is wrong: one short message, where it is, and what to do."""

from __future__ import annotations

from os import PathLike


class LabError(Exception):
    """A mistake or a state that a person can mend; the command prints it, no traceback, and exits with `exit_code`."""

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
    """Somebody else holds what is needed: another engine on the study, for example."""

    exit_code = 3
