"""The verdict on a version: a paired test against the champion.

The frozen evaluation measures both on the same fixed episodes; the differences go into a one-sided paired t-test. Each
test gets a share of the remaining alpha, fixed before the version is measured; a test that does not promote spends its
alpha, a promotion spends nothing. So if no version is better, the probability that any is promoted is at most `alpha`,
however many there are. The test is about the trained version on such episodes, not about retraining it. Since all
versions share the episodes, a small effect after very many versions may be overfitted to them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from looplab.iterate.gates import Measured
from looplab.iterate.settings import VersionJudging
from looplab.judge import stats
from looplab.judge.base import Verdict


@dataclass(frozen=True, slots=True)
class VersionRuling:
    """A verdict on a version, with its evidence."""

    verdict: Verdict
    why: str
    champion: str | None = None
    """Version that it was compared with."""
    effect: float | None = None
    """Improvement in units of the metric; positive is better for either goal."""
    low: float | None = None
    high: float | None = None
    """95 % confidence interval of the effect."""
    p: float | None = None
    alpha: float | None = None
    """Significance level of the test."""
    n: int = 0
    """Number of episodes compared."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without values that are None or not finite."""
        data = {key: value for key, value in asdict(self).items() if value is not None}
        return {key: v for key, v in data.items() if not isinstance(v, float) or math.isfinite(v)}


def judge(
    measured: Measured, champion: Measured | None, name: str | None, settings: VersionJudging,
    goal: Literal["max", "min"], spent: float,
) -> VersionRuling:  # fmt: skip
    """Compare a version with the champion.

    Args:
        measured: The version.
        champion: The champion; None if there is none.
        name: Name of the champion.
        settings: Thresholds of the test.
        goal: Whether a larger or a smaller metric is better.
        spent: Alpha spent by earlier tests that did not promote.
    """
    if champion is None:
        return VersionRuling(Verdict.KEEP, "There is no champion to compare with: this is the first.")
    n = len(measured.values)
    if n < settings.replicates or n != len(champion.values):
        why = f"The evaluation has {n} values, {len(champion.values)} for {name}: they cannot be compared."
        effect = (measured.value - champion.value) * (1 if goal == "max" else -1)
        return VersionRuling(Verdict.INCONCLUSIVE, why, name, effect)
    sign = 1.0 if goal == "max" else -1.0
    found = stats.paired([sign * (a - b) for a, b in zip(measured.values, champion.values, strict=True)])
    alpha = settings.share * max(0.0, settings.alpha - spent)
    effect, p = found.effect, found.p()
    low, high = found.interval()
    smallest = max(settings.min_effect.absolute, settings.min_effect.relative * abs(stats.mean(champion.values)))
    evidence = f"{_better(effect)} than {name} over {n} episodes (p {p:.3g}, needed {alpha:.3g})"
    if p <= alpha and effect > 0 and effect >= smallest:
        verdict, why = Verdict.KEEP, f"Better: {evidence}."
    elif high <= smallest or effect <= 0:
        verdict, why = Verdict.DISCARD, f"Not better: {evidence}."
    else:
        verdict, why = Verdict.INCONCLUSIVE, f"Not proven: {evidence}."
    return VersionRuling(verdict, why, name, effect, low, high, p, alpha, n)


def interval(measured: Measured) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the metric; None unless the metric is the mean of its values."""
    values = measured.values
    if len(values) < 2 or not math.isclose(stats.mean(values), measured.value, rel_tol=1e-6, abs_tol=1e-9):
        return None
    return stats.paired(values).interval()


def _better(effect: float) -> str:
    return f"{effect:.4g} better" if effect > 0 else f"{-effect:.4g} worse" if effect < 0 else "no better"
