"""The command `looplab`. Exit codes: 0 done, 1 it was tried and failed, 2 bad input, 3 busy, 130 interrupted."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

MANY = ("--cfgs", "--change", "--changes", "--gpus")
"""Options that take all words up to the next option: `--cfgs a.json b.json`."""


def spread(argv: Sequence[str]) -> list[str]:
    """Write `--cfgs a b` as `--cfgs a --cfgs b`, which is what the parser knows."""
    out: list[str] = []
    option: str | None = None
    taken = 0
    for i, word in enumerate(argv):
        if word == "--":
            return [*out, *argv[i:]]
        if word.startswith("--"):
            option, taken = (word if word in MANY else None), 0
            out.append(word)
        elif option is not None:
            out.extend([word] if taken == 0 else [option, word])
            taken += 1
        else:
            out.append(word)
    return out


def main() -> None:
    from looplab.cli.app import app
    from looplab.errors import LabError

    try:
        app(args=spread(sys.argv[1:]), standalone_mode=True, prog_name="looplab")
    except LabError as error:
        if os.environ.get("LOOPLAB_DEBUG"):
            raise
        if "--json" in sys.argv:
            import json

            told = {"error": error.message, "file": error.file, "line": error.line, "hint": error.hint}
            print(json.dumps(told, ensure_ascii=False))
        print(f"looplab: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output has gone (`looplab logs | head`): nothing more to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
