"""The command `looplab`. Exit codes: 0 done, 1 tried and failed, 2 bad input, 3 busy, 130 interrupted."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

MULTI_VALUE = ("--cfgs", "--change", "--changes", "--gpus", "--extra-args")
"""Options that take every word up to the next option: `--cfgs a.json b.json`."""
TRAINER_COMMANDS = ("run", "plan", "edit", "probe", "iterate")
"""Commands that pass the words after `--` to the trainer, or to the agent. These become `--extra` options, so that a
stray word before `--` (such as a study's name) is an error and not an argument of the trainer."""


def expand_argv(argv: Sequence[str]) -> list[str]:
    """Rewrite `--cfgs a b` to `--cfgs a --cfgs b`, and `-- x` to `--extra=x`, as the parser expects."""
    out: list[str] = []
    option: str | None = None
    taken = 0
    for i, word in enumerate(argv):
        if word == "--":
            rest = argv[i + 1 :]
            return [*out, *(f"--extra={word}" for word in rest)] if argv[0] in TRAINER_COMMANDS else [*out, "--", *rest]
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            option, taken = (name if name in MULTI_VALUE else None), len(equals)
            out.append(word)
        elif option is not None:
            out.extend([word] if taken == 0 else [option, word])
            taken += 1
        else:
            out.append(word)
    return out


def _environment_errors() -> tuple[type[Exception], ...]:
    """Return errors that any command may meet: a full disk, a folder that is not writable, a damaged ledger."""
    import sqlite3

    return OSError, sqlite3.DatabaseError


def _hint(error: Exception) -> str:
    """Advice for a database that SQLite cannot read; empty for other errors."""
    import sqlite3

    if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.OperationalError):
        return ""
    return " (the ledger is damaged: `looplab verify` shows where, `looplab reindex` repairs it)"


def main() -> None:
    from looplab.signals import reset_inherited

    reset_inherited()
    from looplab.cli import output

    output.open_closed_streams()
    output.accept_any_text()
    from looplab.cli.app import app
    from looplab.cli.help import keep_only
    from looplab.errors import LabError

    argv = expand_argv(sys.argv[1:])
    if argv and "_LOOPLAB_COMPLETE" not in os.environ:
        keep_only(app, argv[0])
    json = "--json" in (argv[: argv.index("--")] if "--" in argv else argv)
    try:
        # With --json, wrong options are raised here, so that they are printed as JSON like all other errors.
        code = app(args=argv, standalone_mode=not json, prog_name="looplab")
    except LabError as error:
        if os.environ.get("LOOPLAB_DEBUG"):
            raise
        if json:
            output.print_line({"error": error.message, "file": error.file, "line": error.line, "hint": error.hint})
        output.warn(f"looplab: {error}")
        sys.exit(error.exit_code)
    except _environment_errors() as error:
        if os.environ.get("LOOPLAB_DEBUG"):
            raise
        where = getattr(error, "filename", None)
        what = getattr(error, "strerror", None) or str(error)
        if json:
            file = None if where is None else str(where)
            output.print_line({"error": what, "file": file, "line": None, "hint": _hint(error).strip(" ()") or None})
        output.warn(f"looplab: {where}: {what}" if where else f"looplab: {what}{_hint(error)}")
        sys.exit(1)
    except Exception as error:
        show = getattr(error, "show", None)  # an error of the parser, whose classes depend on the version of Typer
        if not json or show is None:
            raise
        message = error.format_message()  # type: ignore[attr-defined]
        output.print_line({"error": message, "file": None, "line": None, "hint": None})
        show()
        sys.exit(getattr(error, "exit_code", 2))
    if json and isinstance(code, int):
        sys.exit(code)
