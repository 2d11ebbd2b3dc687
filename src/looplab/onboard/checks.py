"""Bounds that a script checks itself, after its options were parsed: `assert 0 < args.lr <= 1`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from looplab.onboard.base import MISSING, Interface, Script, ScriptSetting
from looplab.onboard.knobs import inside
from looplab.onboard.source import call_name, constant

HOLDERS = {"args", "self", "cfg", "config", "opt", "opts", "options", "hparams", "params", "FLAGS", "flags", "conf"}
"""Names of what holds the settings: `args.lr`, and `self.lr` in `__post_init__`."""
GIVES_UP = {"exit", "error", "fail", "abort", "quit", "_exit"}
"""Functions that end a script."""
MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
Bound = tuple[str, type[ast.cmpop], float]
"""The name of a setting, a comparison and a number: what must hold."""


def within_checks(script: Script, interface: Interface) -> Interface:
    """Return an interface whose settings have the bounds that the script checks, in addition to their own.

    A bound that the default does not satisfy is of something else that has the same name, and is left out.
    """
    bounds: dict[str, list[Bound]] = {}
    for tree in script.modules:
        for bound in _checked(tree):
            bounds.setdefault(bound[0], []).append(bound)
    if not bounds:
        return interface
    return replace(interface, settings=tuple(_narrowed(setting, bounds) for setting in interface.settings))


def _narrowed(setting: ScriptSetting, bounds: dict[str, list[Bound]]) -> ScriptSetting:
    default = setting.default
    if setting.kind not in ("int", "float") or default is MISSING or not isinstance(default, int | float):
        return setting
    low, high = setting.low, setting.high
    for _, operator, number in bounds.get(setting.name.rpartition(".")[2].replace("-", "_"), ()):
        upper = operator in (ast.Lt, ast.LtE)
        edge = inside(number, setting.kind, upper=upper) if operator in (ast.Lt, ast.Gt) else number
        if edge is None or (default > edge if upper else default < edge):
            continue
        if upper:
            high = edge if high is None else min(high, edge)
        else:
            low = edge if low is None else max(low, edge)
    return replace(setting, low=low, high=high)


def _checked(tree: ast.Module) -> Iterator[Bound]:
    """Yield what must hold for the settings, or the script ends."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield from _holding(node.test, negated=False)
        elif isinstance(node, ast.If) and any(map(_gives_up, node.body)):
            yield from _holding(node.test, negated=True)


def _gives_up(node: ast.stmt) -> bool:
    return isinstance(node, ast.Raise) or (
        isinstance(node, ast.Expr) and call_name(node.value).rpartition(".")[2] in GIVES_UP
    )


def _holding(test: ast.expr, *, negated: bool) -> Iterator[Bound]:
    """Yield the comparisons that hold if a test does; of its negation, only those that hold by themselves."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _holding(test.operand, negated=not negated)
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or if negated else ast.And):
        for part in test.values:
            yield from _holding(part, negated=negated)
    elif isinstance(test, ast.Compare) and (not negated or len(test.ops) == 1):
        sides = [test.left, *test.comparators]
        for left, operator, right in zip(sides, test.ops, sides[1:], strict=False):
            yield from _bound(left, type(operator), right, negated=negated)


def _bound(left: ast.expr, operator: type[ast.cmpop], right: ast.expr, *, negated: bool) -> Iterator[Bound]:
    name, number = _setting(left), constant(right)
    if name is None:
        name, number, operator = _setting(right), constant(left), MIRRORED.get(operator, operator)
    if negated:
        operator = NEGATED.get(operator, operator)
    if name is not None and operator in MIRRORED and _is_number(number):
        yield name, operator, float(number)


def _setting(node: ast.expr) -> str | None:
    """Return the name of the setting that an expression is: `args.lr`, `config["lr"]`, `self.optim.lr`."""
    if isinstance(node, ast.Attribute):
        return node.attr if _is_holder(node.value) else None
    key = constant(node.slice) if isinstance(node, ast.Subscript) else None
    return key if isinstance(node, ast.Subscript) and isinstance(key, str) and _is_holder(node.value) else None


def _is_holder(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return isinstance(node, ast.Name) and node.id in HOLDERS


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
