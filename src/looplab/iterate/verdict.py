"""The verdict on a version: is it better than the champion, episode by episode, or was that chance?

Both are measured by the same frozen evaluation, on the same fixed episodes; the differences go into a one-sided paired
t-test. Each version's test gets a share of the alpha that is left, set before it is measured; one that is not won costs
its alpha, a promotion costs nothing. So a line of versions that are all no better promotes one with probability `alpha`
at most, however long it is. The test speaks of the trained version on episodes of this kind, not of training it anew;
and since the episodes are the same for all versions, a small effect after very many of them may be fitted to these.
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
    """A verdict on a version and all that it rests on."""

    verdict: Verdict
    why: str
    champion: str | None = None
    """The version that it was compared with."""
    effect: float | None = None
    """How much better it is, in units of the metric; positive is better, whatever the goal."""
    low: float | None = None
    high: float | None = None
    """The 95 % confidence interval of the effect."""
    p: float | None = None
    alpha: float | None = None
    """What p had to reach."""
    n: int = 0
    """Episodes that were compared."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what is not finite is left out."""
        told = {key: value for key, value in asdict(self).items() if value is not None}
        return {key: v for key, v in told.items() if not isinstance(v, float) or math.isfinite(v)}


def judge(
    measured: Measured, champion: Measured | None, name: str | None, settings: VersionJudging,
    goal: Literal["max", "min"], spent: float,
) -> VersionRuling:  # fmt: skip
    """`spent` is the alpha of the tests before this one that were not won."""
    if champion is None:
        return VersionRuling(Verdict.KEEP, "There is no champion yet to compare with: it is the first.")
    n = len(measured.values)
    if n < settings.replicates or n != len(champion.values):
        why = f"The evaluation gives {n} values, and {len(champion.values)} of {name}: nothing to test with."
        effect = (measured.value - champion.value) * (1 if goal == "max" else -1)
        return VersionRuling(Verdict.INCONCLUSIVE, why, name, effect)
    sign = 1.0 if goal == "max" else -1.0
    found = stats.paired([sign * (a - b) for a, b in zip(measured.values, champion.values, strict=True)])
    alpha = settings.share * max(0.0, settings.alpha - spent)
    effect, p = found.effect, found.p()
    low, high = found.interval()
    smallest = max(settings.min_effect.absolute, settings.min_effect.relative * abs(stats.mean(champion.values)))
    said = f"{_better(effect)} than {name} over {n} episodes (p {p:.3g}, needed {alpha:.3g})"
    if p <= alpha and effect > 0 and effect >= smallest:
        verdict, why = Verdict.KEEP, f"Better: {said}."
    elif high <= smallest or effect <= 0:
        verdict, why = Verdict.DISCARD, f"Not better: {said}."
    else:
        verdict, why = Verdict.INCONCLUSIVE, f"Not proved: {said}."
    return VersionRuling(verdict, why, name, effect, low, high, p, alpha, n)


def interval(measured: Measured) -> tuple[float, float] | None:
    """The 95 % confidence interval of the metric, where the metric is the mean of its values."""
    values = measured.values
    if len(values) < 2 or not math.isclose(stats.mean(values), measured.value, rel_tol=1e-6, abs_tol=1e-9):
        return None
    return stats.paired(values).interval()


def _better(effect: float) -> str:
    return f"{effect:.4g} better" if effect > 0 else f"{-effect:.4g} worse" if effect < 0 else "no better"
