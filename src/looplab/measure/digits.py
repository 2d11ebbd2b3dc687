"""Measured values with the digits that they deserve."""

from __future__ import annotations

from math import floor, isfinite, log10

ROUNDING = 1e-14
"""Relative spread of equal values, whose mean is rounded."""


def with_spread(value: float, spread: float) -> str:
    """Return `0.973 ± 0.002`: the spread with one digit, two if it begins with 1, the value with as many decimals.

    Args:
        value: Finite.
        spread: Its standard deviation or error; 0, not finite or a rounding error: only the value is shown.
    """
    if not isfinite(spread) or spread <= ROUNDING * abs(value):
        return f"{value:.4g}"
    size = floor(log10(spread) + 1e-9)
    decimals = (spread < 2.0 * 10.0**size) - size
    if not 0 <= decimals <= 9:
        return f"{value:.4g} ± {spread:.2g}"
    return f"{value:.{decimals}f} ± {spread:.{decimals}f}"
