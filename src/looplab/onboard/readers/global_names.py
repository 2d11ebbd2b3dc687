"""Global variables with a configurator, as in nanoGPT: `train.py --batch_size=32`."""

from __future__ import annotations

import ast
from contextlib import suppress

from looplab.onboard.base import MAX_SOURCE, Interface, Script, ScriptSetting
from looplab.onboard.readers.arguments import flags_interface
from looplab.onboard.readers.hydra import kind_of
from looplab.onboard.source import call_name, module_constants
from looplab.untrusted import UntrustedError, read_bounded


class GlobalsReader:
    """A script that executes a file which overrides its globals from `--key=value`."""

    name = "globals"

    def read(self, script: Script) -> Interface | None:
        if script.tree is None or not _has_configurator(script.tree):
            return None
        lines = script.text.splitlines()
        comments = _comments(script.tree, lines)
        values = module_constants(ast.Module(_before_configurator(script.tree), []))
        for tree in _typed_files(script):
            values |= {name: value for name, value in module_constants(tree).items() if name in values}
        settings = [
            ScriptSetting(
                name,
                kind_of(value),
                value,
                help=comments.get(name, ""),
                boolean="value" if isinstance(value, bool) else None,
            )
            for name, value in values.items()
            if not name.startswith("_") and isinstance(value, bool | int | float | str)
        ]
        return flags_interface(self.name, script, settings, separator="equals") if settings else None


def _typed_files(script: Script) -> list[ast.Module]:
    """Return the files with other values that follow the script in its command: `train.py config/small.py`."""
    found: list[ast.Module] = []
    for word in script.arguments:
        if word.endswith(".py") and not word.startswith("-"):
            with suppress(SyntaxError, ValueError, RecursionError, OSError, UntrustedError):
                found.append(ast.parse(read_bounded(script.folder / word, MAX_SOURCE)))
    return found


def _has_configurator(tree: ast.Module) -> bool:
    """Whether the module executes another file at its top level, or looks at `globals()` beside `sys.argv`."""
    return len(_before_configurator(tree)) < len(tree.body)


def _before_configurator(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements before the one that overrides globals: what is bound later is not a setting."""
    text = ast.unparse(tree)
    for index, node in enumerate(tree.body):
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and call_name(call) == "exec" and "open" in ast.unparse(call):
                return tree.body[:index]
        sets = isinstance(node, ast.For | ast.While | ast.If | ast.Expr) and "globals()" in ast.unparse(node)
        if sets and "sys.argv" in text and ("=" in ast.unparse(node) or "update" in ast.unparse(node)):
            return tree.body[:index]
    return tree.body


def _comments(tree: ast.Module, lines: list[str]) -> dict[str, str]:
    """Return the comment at the end of each assignment's line."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            line = lines[node.lineno - 1]
            _, mark, comment = line.partition("#")
            if mark:
                found[node.targets[0].id] = comment.strip()
    return found
