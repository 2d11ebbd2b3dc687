"""Compare a run with its repetition: the same means within the noise between runs of one config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from looplab.errors import LabError

Z = 2.5758293035489
"""Two-sided 99 % quantile: one honest repetition in a hundred is called different by chance."""


@dataclass(frozen=True, slots=True)
class Reproduction:
    """Outcome of a repetition."""

    same: bool
    difference: float
    """Repetition minus original; NaN if either has no finite value."""
    allowed: float
    """Largest difference that counts as the same."""
    why: str
    """One readable sentence."""


def compare(
    original: float | None,
    repetition: float | None,
    sigma: float | None = None,
    tolerance: float | None = None,
    z: float = Z,
) -> Reproduction:
    """Compare the value of a run with that of its repetition.

    Args:
        original: Value of the run; None: it has none.
        repetition: Value of the repetition; None: it has none.
        sigma: Noise, a standard deviation; None: unknown.
        tolerance: Largest allowed difference. None: z × sigma × √2, since both runs are noisy; if sigma is unknown
            too, only equal values are the same.
        z: Number of standard deviations that noise explains.

    Raises:
        LabError: sigma, tolerance or z is negative or not finite.
    """
    for name, value in (("sigma", sigma), ("tolerance", tolerance), ("z", z)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise LabError(f"{name} must be a number of 0 or more, not {value!r}")
    allowed = tolerance if tolerance is not None else z * sigma * math.sqrt(2.0) if sigma is not None else 0.0
    if original is None or repetition is None or not (math.isfinite(original) and math.isfinite(repetition)):
        which = "original" if original is None or not math.isfinite(original) else "repetition"
        return Reproduction(False, math.nan, allowed, f"The {which} has no finite value, so nothing is reproduced.")
    difference = repetition - original
    if difference == 0.0:
        return Reproduction(True, 0.0, allowed, f"Exactly the same: {original:.6g}.")
    change = f"{original:.6g} became {repetition:.6g}, a difference of {abs(difference):.4g}"
    if tolerance is None and sigma is None:
        return Reproduction(False, difference, allowed, f"{change}; the noise is not known, so only equality counts.")
    against = "the tolerance" if tolerance is not None else f"what the noise ({sigma:.4g}) explains"
    same = abs(difference) <= allowed
    return Reproduction(
        same, difference, allowed, f"{change}: {'inside' if same else 'beyond'} {against}, {allowed:.4g}."
    )
