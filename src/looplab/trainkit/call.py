"""Run a Python function as a trainer:

    python -m looplab.trainkit.call MODULE:FUNCTION [--metric NAME]
    python -m looplab.trainkit.call FILE.py:FUNCTION [--metric NAME]

The function is called with the config of the run as a dict. What it returns is logged: a dict as metrics, a number as
the metric NAME. It may also log while it runs, with `looplab.trainkit.log`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from looplab import trainkit
from looplab.errors import LabError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def load_function(target: str) -> Callable[..., Any]:
    """Import the function that `MODULE:FUNCTION` or `FILE.py:FUNCTION` names.

    Raises:
        LabError: There is no such function.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise LabError(f"{target!r} does not name a function", hint="write MODULE:FUNCTION or FILE.py:FUNCTION")
    if place.endswith(".py"):
        if not os.path.isfile(place):
            raise LabError(f"there is no file {place}")
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(place)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        raise LabError(f"{place} has no function {name!r}")
    return function


def main(argv: list[str]) -> int:
    if len(argv) not in (1, 3) or (len(argv) == 3 and argv[1] != "--metric"):
        print(__doc__, file=sys.stderr)
        return 2
    function = load_function(argv[0])
    returned = function(trainkit.config())
    if returned is None:
        return 0
    if not isinstance(returned, dict):
        if len(argv) < 3:
            raise LabError(f"the trainer returned a {type(returned).__name__}", hint="return a dict of metrics")
        returned = {argv[2]: returned}
    trainkit.log(returned)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LabError as error:
        print(f"looplab: {error}", file=sys.stderr)
        sys.exit(2)
