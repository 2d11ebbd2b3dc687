"""Reading Python source without running it: constants, calls, imports, and the modules of a project."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.onboard.base import MAX_SOURCE, MISSING
from looplab.untrusted import UntrustedError, read_bounded

if TYPE_CHECKING:
    from looplab.onboard.base import Script

MAX_MODULES = 40
"""Modules of a project that are read."""
MAX_POWER = 64
"""Largest exponent in a constant."""
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CASTS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "bool": bool}


def constant(node: ast.AST | None, names: dict[str, Any] | None = None) -> Any:
    """Return the value of an expression made of literals, arithmetic and known names; MISSING: it is none."""
    names = names or {}
    if node is None:
        return MISSING
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, bool | int | float | str | type(None)) else MISSING
    if isinstance(node, ast.Name):
        return names.get(node.id, MISSING)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        items = [constant(item, names) for item in node.elts]
        return MISSING if any(item is MISSING for item in items) else items
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd | ast.Not):
        value = constant(node.operand, names)
        if isinstance(node.op, ast.Not):
            return MISSING if value is MISSING else not value
        number = isinstance(value, int | float)
        return MISSING if not number else -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _arithmetic(node, names)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _CASTS
        and len(node.args) == 1
    ):
        value = constant(node.args[0], names)
        try:
            return MISSING if value is MISSING else _CASTS[node.func.id](value)
        except (TypeError, ValueError, OverflowError):
            return MISSING
    return MISSING


def _arithmetic(node: ast.BinOp, names: dict[str, Any]) -> Any:
    left, right = constant(node.left, names), constant(node.right, names)
    if not all(isinstance(side, int | float) for side in (left, right)):
        return MISSING
    try:
        if isinstance(node.op, ast.Pow):
            return left**right if abs(right) <= MAX_POWER and abs(left) <= 1e6 else MISSING
        found = _OPERATORS.get(type(node.op))
        return MISSING if found is None else found(left, right)
    except (ArithmeticError, ValueError):
        return MISSING


def module_constants(tree: ast.Module) -> dict[str, Any]:
    """Return the names that a module binds once, at its top level, to a constant."""
    found: dict[str, Any] = {}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name):
                value = constant(getattr(node, "value", None), found)
                found.pop(target.id, None)
                if value is not MISSING:
                    found[target.id] = value
    return found


def call_name(node: ast.AST) -> str:
    """Return the dotted name of what a call calls, `parser.add_argument`; empty if it has none."""
    function = node.func if isinstance(node, ast.Call) else node
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        return ".".join(["", *reversed(parts)]) if parts else ""
    return ".".join([function.id, *reversed(parts)])


def calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Yield the calls of these functions, by the last part of their name, in the order of the source."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and call_name(n).rpartition(".")[2] in names]
    yield from sorted(found, key=lambda call: (call.lineno, call.col_offset))


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword argument; None if it is not given."""
    return next((item.value for item in call.keywords if item.arg == name), None)


def imported_packages(tree: ast.Module) -> set[str]:
    """Return the top-level packages that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


def project_modules(script: Script) -> tuple[ast.Module, ...]:
    """Return the script's syntax tree and those of the modules that it imports from its own project.

    A module is searched next to the script, in the folder that the script is called from, and relative to the
    importing file. For an installed module, its own package counts.
    """
    if script.tree is None:
        return ()
    package = script.package_root
    roots = [script.path.parent.resolve(), script.folder.resolve()]
    if script.program is not None and package is None and script.import_root is not None:
        roots.append(script.import_root)  # src/ of a project that is installed where it is
    roots = [root for root in dict.fromkeys(roots) if root != package]
    own = {str(script.module).partition(".")[0]: package} if package is not None else {}
    found: list[ast.Module] = [script.tree]
    seen = {script.path.resolve()}
    queue: list[tuple[ast.Module, Path]] = [(script.tree, script.path.resolve())]
    while queue and len(found) < MAX_MODULES:
        tree, path = queue.pop(0)
        for candidate in _imported_files(tree, path, roots, own):
            if candidate in seen or len(found) >= MAX_MODULES:
                continue
            seen.add(candidate)
            try:
                module = ast.parse(read_bounded(candidate, MAX_SOURCE))
            except (SyntaxError, ValueError, RecursionError, OSError, UntrustedError):
                continue
            found.append(module)
            queue.append((module, candidate))
    return tuple(found)


def _imported_files(tree: ast.Module, path: Path, roots: list[Path], own: Mapping[str, Path]) -> Iterator[Path]:
    """Yield the files of the modules that a file imports.

    Args:
        roots: Where modules of the project are.
        own: Where packages are of which nothing else may be read: the folder may hold others.
    """
    for node in ast.walk(tree):
        names: list[tuple[list[Path], str]] = []
        if isinstance(node, ast.Import):
            names = [(roots, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else None
            places = [above] if above is not None else roots
            head = f"{node.module}." if node.module else ""
            names = [(places, node.module)] if node.module else []
            names += [(places, head + alias.name) for alias in node.names]
        for places, name in names:
            parts = name.split(".")
            for place in (*places, *([own[parts[0]]] if parts[0] in own else [])):
                for file in (place.joinpath(*parts).with_suffix(".py"), place.joinpath(*parts, "__init__.py")):
                    if file.is_file() and not file.is_symlink():
                        yield file.resolve()


def module_of(script: Script, name: str) -> ast.Module | None:
    """Return the syntax tree of a module next to the script; None if there is none."""
    path = script.path.parent / f"{name}.py"
    if not path.is_file() or path.resolve() == script.path.resolve():
        return None
    try:
        return ast.parse(read_bounded(path, MAX_SOURCE))
    except (SyntaxError, ValueError, RecursionError, OSError, UntrustedError):
        return None
