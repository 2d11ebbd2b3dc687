"""The axes of the search: knobs that can be searched, and the three forms of their values."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from looplab.config.paths import same
from looplab.guard.guard import Guard
from looplab.guard.knobs import Knob, KnobTable

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Params = dict[str, Any]
"""A point as a sampler sees it: a number, or the index of a choice, for each path."""
MAX_STEPS = 1_000
"""Number of steps of a knob beyond which it is searched as continuous and rounded."""
DIGITS = 6
"""Significant digits of a drawn number."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A knob that is searched. Its values have three forms: in the config, as a sampler's parameter, and in [0, 1]."""

    path: str
    knob: Knob
    base: Any
    """Its value in the base config."""
    choices: tuple[Any, ...] = ()
    """The values of a finite knob, numbers in ascending order; empty for a range."""
    ordered: bool = False
    """Whether the choices are ordinal."""
    integer: bool = False

    @classmethod
    def from_knob(cls, path: str, knob: Knob, base: Any) -> Axis | str:
        """Return the axis, or the reason why the knob cannot be searched."""
        kind = knob.python_type(base)
        if knob.choices is not None:
            numbers = all(isinstance(c, int | float) and not isinstance(c, bool) for c in knob.choices)
            ordered = numbers and len(knob.choices) > 2
            choices = tuple(sorted(knob.choices)) if ordered else knob.choices
            return cls(path, knob, base, choices, ordered) if len(choices) > 1 else "it has one choice"
        if kind is bool:
            return cls(path, knob, base, (False, True))
        if kind is str or knob.low is None or knob.high is None:
            return "it has no bounds and no choices"
        axis = cls(path, knob, base, integer=kind is int)
        low, high = axis.bounds
        if not low < high:
            return "it has one value"
        if axis.integer or knob.step is None or (high - low) / knob.step > MAX_STEPS:
            return axis  # very fine steps: searched as continuous, then rounded
        steps = range(round((high - low) / knob.step) + 1)
        return replace(axis, choices=tuple(knob.nearest(low + i * knob.step, 1.0) for i in steps), ordered=True)

    @property
    def bounds(self) -> tuple[Any, Any]:
        """The lowest and the highest parameter."""
        if self.choices:
            return 0, len(self.choices) - 1
        assert self.knob.low is not None
        assert self.knob.high is not None
        low, high, step = self.knob.low, self.knob.high, self.knob.step
        if self.integer:
            low, high = math.ceil(low), math.floor(high)
        if step is not None:  # the last legal value may lie below the upper bound
            high = low + math.floor((high - low) / step + 1e-9) * step
        return low, high

    def distribution(self) -> BaseDistribution:
        """Return the axis as a distribution of Optuna."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        low, high = self.bounds
        if self.choices and not self.ordered:
            return CategoricalDistribution(range(len(self.choices)))
        if self.choices or self.integer:
            step = 1 if self.choices else int(self.knob.step or 1)
            return IntDistribution(low, high, log=self.knob.log, step=step)
        return FloatDistribution(low, high, log=self.knob.log)

    def to_param(self, value: Any) -> Any:
        """Return the parameter of a config value; None if it is outside the searched range."""
        if self.choices and self.knob.step is None:
            return next((i for i, choice in enumerate(self.choices) if equal_values(choice, value)), None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        if self.choices:
            nearest = min(range(len(self.choices)), key=lambda i: abs(self.choices[i] - value))
            return nearest if self.knob.problem(value, 1.0) is None else None
        low, high = self.bounds
        return self.to_value(value) if low <= value <= high else None

    def to_value(self, param: Any) -> Any:
        """Return the config value of a parameter."""
        if self.choices:
            return self.choices[int(param)]
        low, high = self.bounds
        if not self.integer and self.knob.step is None:
            param = float(f"{param:.{DIGITS}g}")
        return self.knob.nearest(min(max(param, low), high), 1 if self.integer else 1.0)

    def from_unit(self, u: float) -> Any:
        """Map a number in [0, 1] to a parameter."""
        low, high = self.bounds
        if self.choices or self.integer:
            if self.knob.log:
                return min(high, int(math.exp(math.log(low) + u * (math.log(high + 1) - math.log(low)))))
            step = 1 if self.choices else int(self.knob.step or 1)
            return low + step * min((high - low) // step, int(u * ((high - low) // step + 1)))
        if self.knob.log:
            return math.exp(math.log(low) + u * (math.log(high) - math.log(low)))
        return low + u * (high - low)

    def to_unit(self, param: Any) -> float:
        """Map a parameter to [0, 1]."""
        low, high = self.bounds
        if self.knob.log:
            low, high, param = math.log(low), math.log(high), math.log(param)
        return float((param - low) / (high - low))


def equal_values(a: Any, b: Any) -> bool:
    """Return whether two config values are the same; 1 and 1.0 are, 1 and True are not."""
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return bool(a == b) if numbers else same(a, b)


def find_axes(guard: Guard, base: dict[str, Any], fixed: Collection[str] = ()) -> tuple[list[Axis], list[str]]:
    """Return the axes that can be searched from this base, and a reason for each knob that cannot.

    Paths in `fixed` and derived keys are left out without a reason.
    """
    axes, left_out = [], []
    present = set()
    for path, _, knob, value in KnobTable(guard.knobs.values()).present(guard.with_defaults(base)):
        present.add(knob.path)
        if path in fixed or path in guard.derived:
            continue
        axis = Axis.from_knob(path, knob, value)
        if isinstance(axis, str):
            left_out.append(f"{path} ({axis})")
        else:
            axes.append(axis)
    absent = "it is not in the base config; give the knob a `default:`"
    left_out += [f"{path} ({absent})" for path in guard.knobs if path not in present]
    return axes, left_out
