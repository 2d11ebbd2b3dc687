"""Prints the file that `python -m MODULE` would run: python find_module.py MODULE

With a second argument, it is the file that `import MODULE` would run: the `__init__.py` of a package.
Imports nothing of looplab; works on Python 3.8 and later. No package is imported, as `importlib.util.find_spec` would
do with the parents of a module: each level is looked up in the folders of the level above.
"""

from __future__ import annotations

import sys
import types
from typing import Any


def find_spec(name: str) -> Any:
    """Return the spec of a dotted name; None: the module does not exist."""
    spec, places = None, None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        level = ".".join(parts[:depth])
        finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(level, places) for finder in finders)), None)
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return None
        places = spec.submodule_search_locations
        if places is not None:  # namespace packages ask their parent for its folders
            sys.modules[level] = empty = types.ModuleType(level)
            empty.__path__ = places
    return spec


def main() -> None:
    sys.path[0] = ""  # as for `python -m`
    spec = find_spec(sys.argv[1])
    if spec is not None and spec.submodule_search_locations is not None and len(sys.argv) == 2:
        spec = find_spec(sys.argv[1] + ".__main__")
    print(getattr(spec, "origin", None) or "")


if __name__ == "__main__":
    main()
