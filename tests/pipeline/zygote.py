"""Fork callers to be killed: one for every line on stdin (JSON: how to call); prints its pid and wait status.

A forked caller has everything imported already, so that a kill hits its work, not its imports.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("toy_conftest", Path(__file__).with_name("conftest.py"))
assert _spec is not None
assert _spec.loader is not None
toys = importlib.util.module_from_spec(_spec)
sys.modules["toy_conftest"] = toys
_spec.loader.exec_module(toys)


def main() -> None:
    from looplab.config.lab import load_lab

    load_lab(Path(sys.argv[1]))
    for line in sys.stdin:
        call = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            toy = toys.Toy.__new__(toys.Toy)
            toy.folder = Path(sys.argv[1])
            toy(*call["stages"], edits=tuple(call["edits"]))
            os._exit(0)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(status, flush=True)


if __name__ == "__main__":
    main()
