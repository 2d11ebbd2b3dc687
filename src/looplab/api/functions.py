"""Python functions as trainers: by name where another process can import them, else by value, as readable source.

Source rather than a pickle: the lab keeps a file that a person can read, that git can compare, and whose hash is in
the record of every run. The source is complete or refused: each global name that the function uses must be a module,
a plain value, or another function or class of the same notebook.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import math
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from looplab.config.files import write_atomic
from looplab.errors import LabError

FOLDER = "trainers"
RUNNER = ["{python}", "-m", "looplab.trainkit.call"]


def find_target(function: Callable[..., Any], lab: Path, metric: str) -> list[str]:
    """Return the command that calls the function in its own process; write its source into the lab if needed.

    Raises:
        LabError: Another process cannot call it.
    """
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", "") or "")
    if not inspect.isfunction(function):
        raise LabError(f"the trainer must be a function or a command, not {type(function).__name__}")
    if module is not None and module.__name__ != "__main__" and _is_importable(module, lab):
        if getattr(module, name, None) is not function:
            raise LabError(f"{name} cannot be imported from {module.__name__}", hint="define it at the top of a module")
        return [*RUNNER, f"{module.__name__}:{name}", "--metric", metric]
    path = lab / FOLDER / f"{function.__name__}.py"
    source = standalone_source(function)
    if not path.exists() or path.read_text(encoding="utf-8") != source:
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, source.encode())
    return [*RUNNER, f"{FOLDER}/{path.name}:{function.__name__}", "--metric", metric]


def _is_importable(module: ModuleType, lab: Path) -> bool:
    """Return whether a process that starts in the lab can import the module: it is installed, or is in the lab."""
    origin = getattr(module, "__file__", None)
    if origin is None or importlib.util.find_spec(module.__name__) is None:
        return False
    places = [Path(sysconfig.get_paths()[key]) for key in ("stdlib", "purelib", "platlib")]
    package_root = Path(origin).resolve().parents[module.__name__.count(".") + (Path(origin).name == "__init__.py")]
    return package_root == lab.resolve() or any(Path(origin).resolve().is_relative_to(place) for place in places)


def standalone_source(function: Callable[..., Any]) -> str:
    """Return a module that defines the function and everything that it uses.

    Raises:
        LabError: It is a closure or a lambda, its source is not known, or it uses something that has no source.
    """
    parts = _Parts()
    parts.add(function, function.__name__)
    imports = sorted(parts.imports)
    values = [f"{name} = {value!r}" for name, value in parts.values.items()]
    blocks = ["\n".join(part) for part in (imports, values) if part]
    return "\n\n".join(["from __future__ import annotations", *blocks]) + "\n\n\n" + "\n\n\n".join(parts.sources) + "\n"


class _Parts:
    """What a standalone module consists of."""

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.values: dict[str, Any] = {}
        self.sources: list[str] = []
        self._seen: set[str] = set()

    def add(self, item: Any, name: str) -> None:
        """Add a function or class with everything that it uses; dependencies come first."""
        if name in self._seen:
            return
        self._seen.add(name)
        if getattr(item, "__name__", None) != name or name == "<lambda>":
            raise LabError(f"the trainer uses {name}, which is not defined by `def` or `class`", hint="define it so")
        if inspect.isfunction(item) and item.__closure__:
            free = ", ".join(item.__code__.co_freevars)
            raise LabError(f"{name} is a closure over {free}", hint="pass what it needs in the config")
        try:
            source = textwrap.dedent(inspect.getsource(item))
        except (OSError, TypeError):
            raise LabError(f"the source of {name} is not known", hint="put it into a module in the lab") from None
        scope = item.__globals__ if inspect.isfunction(item) else vars(sys.modules[item.__module__])
        for used in _global_names(source):
            if used in scope and used != name:
                self._add_global(used, scope[used], name)
        self.sources.append(source.rstrip())

    def _add_global(self, name: str, value: Any, user: str) -> None:
        if isinstance(value, ModuleType):
            self.imports.add(f"import {value.__name__}" + (f" as {name}" if value.__name__ != name else ""))
        elif _is_plain(value):
            self.values[name] = value
        elif inspect.isfunction(value) or inspect.isclass(value):
            if value.__module__ == "__main__":
                self.add(value, name)
            else:
                self._import_from(value.__module__, value.__qualname__, name, user)
        elif (home := getattr(value, "__module__", None)) and (own := getattr(value, "__name__", None)):
            self._import_from(home, own, name, user)
        else:
            raise LabError(
                f"{user} uses {name}, a {type(value).__name__}, which cannot be written down as source",
                hint=f"create it inside {user}, or pass it in the config",
            )

    def _import_from(self, module: str, own: str, name: str, user: str) -> None:
        if "." in own or getattr(sys.modules.get(module), own, None) is None:
            raise LabError(f"{user} uses {name}, which cannot be imported from {module}", hint="import its module")
        self.imports.add(f"from {module} import {own}" + (f" as {name}" if own != name else ""))


def _global_names(source: str) -> list[str]:
    """Return the names that a piece of source reads, in order of appearance, without builtins."""
    found = [node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    return [name for name in dict.fromkeys(found) if not hasattr(builtins, name)]


def _is_plain(value: Any) -> bool:
    """Return whether `repr` of the value is source for it."""
    if value is None or isinstance(value, bool | int | str | bytes):
        return True
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    return type(value) in (list, tuple, set, frozenset) and all(map(_is_plain, value))
