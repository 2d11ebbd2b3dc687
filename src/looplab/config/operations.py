"""Operators and functions of expressions, each with bounded results and readable errors."""

from __future__ import annotations

import ast
import math
import operator
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_BITS = 1_024
"""Largest size of an integer result in bits: the range of a float."""
MAX_ITEMS = 10_000
"""Largest length of a concatenated text or list."""


class OperationError(Exception):
    """An operation does not accept its values; becomes an ExpressionError that shows the part of the text."""


def _need_numbers(*values: Any) -> None:
    for value in values:
        if not isinstance(value, int | float):
            raise OperationError(f"{show(value)} is not a number")


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OperationError(f"the result is too large: more than {MAX_BITS} bits")
    return value


def _add(left: Any, right: Any) -> Any:
    for kind in (str, list):
        if isinstance(left, kind) and isinstance(right, kind):
            if len(left) + len(right) > MAX_ITEMS:
                raise OperationError(f"the result is too long: more than {MAX_ITEMS}")
            return operator.add(left, right)
    _need_numbers(left, right)
    return _bounded(left + right)


def _power(base: Any, exponent: Any) -> Any:
    _need_numbers(base, exponent)
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        if exponent > MAX_BITS or base.bit_length() * exponent > 2 * MAX_BITS:
            raise OperationError(
                f"the power is too large: an exponent up to {MAX_BITS} and {MAX_BITS} bits are allowed"
            )
        return _bounded(base**exponent)
    value = base**exponent
    if isinstance(value, complex):
        raise OperationError("a negative number has no fractional power")
    return value


def _on_numbers(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def run(left: Any, right: Any) -> Any:
        _need_numbers(left, right)
        return _bounded(function(left, right))

    return run


BINARY: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", _add),
    ast.Sub: ("-", _on_numbers(operator.sub)),
    ast.Mult: ("*", _on_numbers(operator.mul)),
    ast.Div: ("/", _on_numbers(operator.truediv)),
    ast.FloorDiv: ("//", _on_numbers(operator.floordiv)),
    ast.Mod: ("%", _on_numbers(operator.mod)),
    ast.Pow: ("**", _power),
}


def _contains(left: Any, right: Any) -> bool:
    if not isinstance(right, str | list | tuple | Mapping):
        raise OperationError(f"{show(right)} is not a container to search in")
    return left in right


COMPARE: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.In: ("in", _contains),
    ast.NotIn: ("not in", lambda left, right: not _contains(left, right)),
    ast.Is: ("is", operator.is_),
    ast.IsNot: ("is not", operator.is_not),
}


def _items(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | Iterator):
        return value
    raise OperationError(f"{show(value)} is not a list")


def _minimum(*values: Any) -> Any:
    return min(_items(values[0]) if len(values) == 1 else values)


def _maximum(*values: Any) -> Any:
    return max(_items(values[0]) if len(values) == 1 else values)


def _sum(values: Any) -> Any:
    total: Any = 0
    for value in _items(values):
        _need_numbers(value)
        total += value
    return _bounded(total)


def _length(value: Any) -> int:
    if isinstance(value, Iterator):
        return sum(1 for _ in value)
    if isinstance(value, str | list | tuple | Mapping):
        return len(value)
    raise OperationError(f"{show(value)} has no length")


def _round(value: Any, digits: Any = None) -> Any:
    _need_numbers(value)
    if digits is None:
        return _bounded(round(value))
    if isinstance(digits, bool) or not isinstance(digits, int) or abs(digits) > 300:
        raise OperationError("the number of digits must be a whole number up to 300")
    return round(value, digits)


def _clamp(value: Any, low: Any, high: Any) -> Any:
    _need_numbers(value, low, high)
    if low > high:
        raise OperationError(f"the lower end {show(low)} is above the upper end {show(high)}")
    return low if value < low else high if value > high else value


def _to_multiple(rounding: Callable[[float], int]) -> Callable[[Any, Any], Any]:
    def run(value: Any, multiple: Any) -> Any:
        _need_numbers(value, multiple)
        if not multiple > 0:
            raise OperationError(f"the multiple must be above 0, not {show(multiple)}")
        if isinstance(value, int) and isinstance(multiple, int):
            times = -(-value // multiple) if rounding is math.ceil else value // multiple
            return _bounded(times * multiple)
        ratio = value / multiple
        # 0.1 * 3 is slightly more than 0.3: a multiple up to rounding errors stays as it is.
        nearest = round(ratio)
        times = nearest if math.isclose(ratio, nearest, rel_tol=1e-9, abs_tol=1e-9) else rounding(ratio)
        return times * multiple

    return run


def _convert(kind: type[int] | type[float]) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        if not isinstance(value, str):
            _need_numbers(value)
        return _bounded(kind(value))

    return run


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*values: Any) -> Any:
        _need_numbers(*values)
        return _bounded(function(*values))

    return run


FUNCTIONS: dict[str, tuple[int, int, Callable[..., Any]]] = {
    "min": (1, 100, _minimum),
    "max": (1, 100, _maximum),
    "abs": (1, 1, _of_numbers(abs)),
    "round": (1, 2, _round),
    "floor": (1, 1, _of_numbers(math.floor)),
    "ceil": (1, 1, _of_numbers(math.ceil)),
    "sqrt": (1, 1, _of_numbers(math.sqrt)),
    "log": (1, 2, _of_numbers(math.log)),
    "log2": (1, 1, _of_numbers(math.log2)),
    "log10": (1, 1, _of_numbers(math.log10)),
    "exp": (1, 1, _of_numbers(math.exp)),
    "len": (1, 1, _length),
    "sum": (1, 1, _sum),
    "any": (1, 1, lambda values: any(_items(values))),
    "all": (1, 1, lambda values: all(_items(values))),
    "int": (1, 1, _convert(int)),
    "float": (1, 1, _convert(float)),
    "bool": (1, 1, bool),
    "clamp": (3, 3, _clamp),
    "ceil_to": (2, 2, _to_multiple(math.ceil)),
    "floor_to": (2, 2, _to_multiple(math.floor)),
    "isnan": (1, 1, _of_numbers(math.isnan)),
    "isfinite": (1, 1, _of_numbers(math.isfinite)),
}
"""Functions of expressions: (fewest arguments, most arguments, implementation). `defined(name)` is built in."""

LOOPING = {"any", "all", "sum", "min", "max", "len"}
"""Functions whose argument may be a loop."""
ARITHMETIC_ERRORS = (TypeError, ValueError, ArithmeticError)


class _Show(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60

    def repr_int(self, value: int, level: int) -> str:
        # Python refuses to print integers with thousands of digits.
        if value.bit_length() > MAX_BITS:
            return f"an integer of {value.bit_length()} bits"
        return super().repr_int(value, level)


show = _Show().repr
