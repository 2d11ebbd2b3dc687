"""A minimal engine: starts the runs of its argv and prints every event on stdout, until it is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from looplab.launch.base import LaunchSpec, Slot
from looplab.launch.local import LocalExecutor


def main() -> None:
    executor = LocalExecutor()
    for text in sys.argv[1:]:
        fields = json.loads(text)
        slot = Slot(fields["slot"]["name"], tuple(fields["slot"]["devices"]), tuple(fields["slot"]["cores"]))
        places = {name: Path(fields[name]) for name in ("run_dir", "record_dir", "cwd") if fields[name] is not None}
        executor.start(LaunchSpec(**{**fields, **places, "slot": slot}))
    while True:
        for event in executor.poll(60.0):
            print(json.dumps([type(event).__name__, event.run_id, getattr(event, "pid", None)]), flush=True)


if __name__ == "__main__":
    main()
