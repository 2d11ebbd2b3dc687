"""Was a run repeated with the same result? The same means: inside the noise that runs of one config have anyway."""

from __future__ import annotations

import math
from dataclasses import dataclass

from looplab.errors import LabError

Z = 2.5758293035489
"""99 of 100 honest repetitions are inside: one in a hundred is called different by chance."""


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What a repetition showed."""

    same: bool
    difference: float
    """Again minus original; NaN when one of them is not a number."""
    allowed: float
    """The largest difference that counts as the same."""
    why: str
    """A sentence for people."""


def compare(
    original: float | None,
    again: float | None,
    sigma: float | None = None,
    tolerance: float | None = None,
    z: float = Z,
) -> Reproduction:
    """Compare a run with its repetition. `tolerance`, where given, is what is allowed; else it is z × sigma × √2, since
    both runs have the noise. Equal is always the same; without either, only equal is."""
    for name, value in (("sigma", sigma), ("tolerance", tolerance), ("z", z)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise LabError(f"{name} must be a number of 0 or more, not {value!r}")
    allowed = tolerance if tolerance is not None else z * sigma * math.sqrt(2.0) if sigma is not None else 0.0
    if original is None or again is None or not (math.isfinite(original) and math.isfinite(again)):
        which = "original" if original is None or not math.isfinite(original) else "repetition"
        return Reproduction(False, math.nan, allowed, f"The {which} has no finite value: nothing is reproduced.")
    difference = again - original
    if difference == 0.0:
        return Reproduction(True, 0.0, allowed, f"Exactly the same: {original:.6g}.")
    said = f"{original:.6g} became {again:.6g}, a difference of {abs(difference):.4g}"
    if tolerance is None and sigma is None:
        return Reproduction(False, difference, allowed, f"{said}; the noise is not known, so only equal would do.")
    against = "the tolerance" if tolerance is not None else f"what the noise ({sigma:.4g}) explains"
    same = abs(difference) <= allowed
    return Reproduction(
        same, difference, allowed, f"{said}: {'inside' if same else 'beyond'} {against}, {allowed:.4g}."
    )
