"""Run a stage that is a Python function: `python -m looplab.pipeline.call ENTRY CONFIG RUN_DIR`.

Imports only the standard library, so that the stage gets an interpreter as clean as a script would.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path


def load(entry: str) -> Callable[..., object]:
    """Return the function named by `file.py:function` or `module:function`, relative to the current folder."""
    place, _, name = entry.rpartition(":")
    if place.endswith(".py"):
        file = Path(place).resolve()
        if not file.is_file():
            sys.exit(f"stage {entry}: {file} does not exist")
        sys.path.insert(0, str(file.parent))  # as for a script: modules next to it can be imported
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module  # dataclasses and pickle look the module up here
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(Path.cwd()))
        module = importlib.import_module(place)
    function: Callable[..., object] | None = getattr(module, name, None)
    if not callable(function):
        sys.exit(f"stage {entry}: {place} has no function {name}")
    return function


def main() -> None:
    entry, config, run_dir = sys.argv[1:]
    function = load(entry)
    function(json.loads(Path(config).read_text(encoding="utf-8")), Path(run_dir))


if __name__ == "__main__":
    main()
