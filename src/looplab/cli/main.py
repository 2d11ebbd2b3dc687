"""The command `looplab`. Exit codes: 0 done, 1 it was tried and failed, 2 bad input, 3 busy, 130 interrupted."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

MANY = ("--cfgs", "--change", "--changes", "--gpus", "--extra-args")
"""Options that take all words up to the next option: `--cfgs a.json b.json`."""
TRAINING = ("run", "plan", "edit", "probe")
"""Commands that hand what follows `--` to the trainer. It becomes an option, so that a stray word before it (a study's
name, say) is a mistake and not an argument of the trainer."""


def spread(argv: Sequence[str]) -> list[str]:
    """Write `--cfgs a b` as `--cfgs a --cfgs b`, and `-- x` as `--extra=x`, which is what the parser knows."""
    out: list[str] = []
    option: str | None = None
    taken = 0
    for i, word in enumerate(argv):
        if word == "--":
            rest = argv[i + 1 :]
            return [*out, *(f"--extra={word}" for word in rest)] if argv[0] in TRAINING else [*out, "--", *rest]
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            option, taken = (name if name in MANY else None), len(equals)
            out.append(word)
        elif option is not None:
            out.extend([word] if taken == 0 else [option, word])
            taken += 1
        else:
            out.append(word)
    return out


def _trouble() -> tuple[type[Exception], ...]:
    """What the world may do to any command: a full disk, a folder that cannot be written to, a damaged ledger."""
    import sqlite3

    return OSError, sqlite3.DatabaseError


def _hint(error: Exception) -> str:
    """What to do about a database that SQLite cannot read."""
    import sqlite3

    if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.OperationalError):
        return ""
    return " (the ledger is damaged: `looplab verify` says where, `looplab reindex` repairs it)"


def main() -> None:
    from looplab.signals import reset_inherited

    reset_inherited()
    from looplab.cli import output

    output.open_closed_streams()
    output.accept_any_text()
    from looplab.cli.app import app
    from looplab.errors import LabError

    argv = spread(sys.argv[1:])
    try:
        app(args=argv, standalone_mode=True, prog_name="looplab")
    except LabError as error:
        if os.environ.get("LOOPLAB_DEBUG"):
            raise
        if "--json" in argv:
            told = {"error": error.message, "file": error.file, "line": error.line, "hint": error.hint}
            output.print_line(told)
        output.warn(f"looplab: {error}")
        sys.exit(error.exit_code)
    except _trouble() as error:
        if os.environ.get("LOOPLAB_DEBUG"):
            raise
        where = getattr(error, "filename", None)
        what = getattr(error, "strerror", None) or str(error)
        output.warn(f"looplab: {where}: {what}" if where else f"looplab: {what}{_hint(error)}")
        sys.exit(1)
