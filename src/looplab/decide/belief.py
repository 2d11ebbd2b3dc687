"""What the model of the search believes about a study: its best config, what matters, what is uncertain, what fails.

One lucky run is not the best config. The model averages over the noise of runs and over neighbouring configs, so the
config that it believes in is the measured one with the best posterior mean. The search itself works with the same
model; this is its view for people, for agents and for the choice of the best run in a study without a judge.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from looplab.guard.knobs import show_value
from looplab.ledger.view import StudyView
from looplab.measure.digits import with_spread

if TYPE_CHECKING:
    from looplab.decide.auto import AutoSampler
    from looplab.decide.axes import Axis, Params
    from looplab.decide.points import SearchPoint

N_BEST = 3
"""Configs that the model believes to be the best."""
N_UNCERTAIN = 3
"""Places that are named as most uncertain."""
N_PLACES = 256
"""Number of random points that are searched for them."""
MIN_FAILED = 2
"""Minimum number of failed points before the regions of failure are described."""
N_SLICES = 12
"""Maximum number of knobs whose belief is drawn; those that matter most."""
N_ALONG = 41
"""Values along a knob."""
DIGITS = 4
"""Significant digits of the values of places."""


@dataclass(frozen=True, slots=True)
class BelievedPoint:
    """A measured config with its posterior."""

    run: str
    """The first run of this config."""
    values: dict[str, Any]
    """Its knobs."""
    mean: float
    """Posterior mean of the objective, without the noise of a run."""
    sd: float
    """Posterior standard deviation of the same."""
    runs: int
    """How many runs have measured it."""
    measured: float
    """Their mean objective."""
    is_pending: bool = False
    """Whether it is being repeated."""


@dataclass(frozen=True, slots=True)
class StudyBelief:
    """The view of the model; see `believe`."""

    points: int
    """Measured configs."""
    noise: float
    """Standard deviation of a single run, in the unit of the objective."""
    noise_share: float
    """Variance of the noise as a share of the variance of all measured values, after warping."""
    best: tuple[BelievedPoint, ...]
    """The best configs, best first."""
    uncertain: tuple[dict[str, Any], ...]
    """Places where the model knows least and that are likely to work, each with `values`, `mean` and `sd`."""
    importance: dict[str, float]
    """The share of the predicted variance that depends on each knob, largest first."""
    failing: tuple[str, ...]
    """Where runs fail, in words."""
    pending: int
    """Configs that are running or waiting."""
    earlier: dict[str, float] = field(default_factory=dict)
    """The weight of each earlier study in the model."""
    repeated: int = 0
    """Configs that were run more than once."""
    is_deterministic: bool = False
    """Whether repeated runs measured exactly the same."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StudyBelief:
        named = {one.name: data[one.name] for one in fields(cls) if one.name in data}
        best = tuple(BelievedPoint(**one) for one in data["best"])
        return cls(**{**named, "best": best, "uncertain": tuple(data["uncertain"]), "failing": tuple(data["failing"])})


def recorded_belief(study: StudyView) -> StudyBelief | None:
    """Return the last recorded belief; None if there is none, or if its best run was declared void since."""
    data = study.last_data("belief")
    try:
        belief = StudyBelief.from_dict(data) if data is not None else None
    except (AttributeError, KeyError, TypeError):  # of another version
        return None
    void = {run for run, evidence in study.verdicts().items() if evidence["verdict"] == "void"}
    return None if belief is None or belief.best[0].run in void else belief


def describe_best(belief: StudyBelief, metric: str) -> str:
    """Return which config the model believes in, in one line."""
    best = belief.best[0]
    return (
        f"the model believes in {best.run}: {metric} {with_spread(best.mean, best.sd)} "
        f"({best.runs} run{'s' * (best.runs != 1)}; one run varies by {belief.noise:.2g})"
    )


def describe_before(belief: Mapping[str, Any], metric: str) -> list[str]:
    """Return what was believed before the first run, in sentences."""
    lines = []
    for one in belief["studies"]:
        matters = [f"{path} {100 * share:.0f} %" for path, share in one["importance"].items() if share >= 0.05]
        lines.append(
            f"{one['study']} ({one['points']} configs): {metric} {one['measured']:.5g} at "
            f"{describe_values(one['best'])}; what mattered: {', '.join(matters[:5]) or 'nothing clearly'}"
        )
    lines += [f"tried first: {describe_values(values)}" for values in belief["first"]]
    return lines


def believe(
    axes: Sequence[Axis],
    sampler: AutoSampler,
    points: list[SearchPoint],
    goal: Literal["max", "min"],
    earlier: Sequence[str],
    detail: bool = True,
) -> StudyBelief | None:
    """Return what the model believes; None while it has too few points to be used."""
    import numpy as np

    if sum(point.known for point in points) < sampler.startup or not any(point.runs for point in points):
        return None
    acquisition = sampler.acquisition
    modelled = sampler.modelled(points)
    model = acquisition.model(modelled)
    measured = [point for point in modelled if point.runs and point.value is not None]
    mean, sd = acquisition.believe(model, measured)
    order = np.argsort(mean, kind="stable")[:N_BEST]
    means, sds = model.scale.to_objective(mean, sd)
    best = tuple(
        BelievedPoint(
            run=measured[i].runs[0],
            values=_values(axes, measured[i].params),
            mean=float(means[i]),
            sd=float(sds[i]),
            runs=len(measured[i].values),
            measured=measured[i].value or 0.0,
            is_pending=measured[i].pending > 0,
        )
        for i in order
    )
    if not best:
        return None
    noise_sd = np.array([model.kernel.noise_variance**0.5])
    noise = float(model.scale.to_objective(mean[order[:1]], noise_sd)[1][0])
    shares = acquisition.importance(model) if detail else [0.0] * len(axes)
    importance = dict(zip((axis.path for axis in axes), shares, strict=True))
    repeated = [point.values for point in points if len(point.values) > 1]
    return StudyBelief(
        points=sum(point.value is not None for point in points),
        noise=max(noise, _spread(repeated)),
        repeated=len(repeated),
        noise_share=float(model.kernel.noise_variance),
        best=best,
        uncertain=_uncertain(axes, sampler, modelled, model) if detail else (),
        importance={path: round(one, 3) for path, one in sorted(importance.items(), key=lambda pair: -pair[1])},
        failing=tuple(_failing(axes, points)),
        pending=sum(point.pending > 0 for point in points),
        earlier={} if model.weights is None else dict(zip(earlier, map(float, model.weights.round(3)), strict=True)),
        is_deterministic=bool(repeated) and all(len(set(values)) == 1 for values in repeated),
    )


def belief_slices(axes: Sequence[Axis], sampler: AutoSampler, points: list[SearchPoint]) -> dict[str, Any] | None:
    """Return what the model predicts along each knob, with the others as in the config that it believes in.

    Returns:
        `run` and `values` of that config, `points` (measured configs), and `slices`: for each knob its `path`, its
        `importance`, whether it is a `number` and `log`, and along it the `values` with the `mean` and the 95 %
        interval (`low`, `high`) of the objective without the noise of a run. None before the model has enough points.
    """
    import numpy as np

    if sum(point.known for point in points) < sampler.startup or not any(point.runs for point in points):
        return None
    acquisition, modelled = sampler.acquisition, sampler.modelled(points)
    model = acquisition.model(modelled)
    measured = [point for point in modelled if point.runs and point.value is not None]
    if not measured:
        return None
    best = measured[int(np.argmin(acquisition.believe(model, measured)[0]))]
    shares = acquisition.importance(model)
    ranked = sorted(zip(axes, shares, strict=True), key=lambda pair: -pair[1])
    return {
        "run": best.runs[0],
        "values": _values(axes, best.params),
        "points": len(measured),
        "slices": [_slice(axis, share, best.params, acquisition, model) for axis, share in ranked[:N_SLICES]],
    }


def _slice(axis: Axis, share: float, center: Params, acquisition: Any, model: Any) -> dict[str, Any]:
    import numpy as np

    if axis.choices:
        along: list[Any] = list(range(len(axis.choices)))[:N_ALONG]
    else:
        drawn = {axis.from_unit(i / (N_ALONG - 1)) for i in range(N_ALONG)} | {center[axis.path]}
        along = sorted(drawn)
    mean, sd = acquisition.predict(model, [{**center, axis.path: one} for one in along])
    zero = np.zeros(len(along))
    ends = [model.scale.to_objective(mean + k * sd, zero)[0] for k in (-1.96, 1.96)]
    return {
        "path": axis.path,
        "importance": round(share, 3),
        "number": not axis.choices or axis.ordered,
        "log": bool(axis.knob.log) and not axis.choices,
        "at": axis.to_value(center[axis.path]),
        "values": [axis.to_value(one) if axis.choices else one for one in along],
        "mean": [float(one) for one in model.scale.to_objective(mean, zero)[0]],
        "low": [float(one) for one in np.minimum(*ends)],
        "high": [float(one) for one in np.maximum(*ends)],
    }


def _spread(repeated: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation of runs of the same config, pooled over configs; 0 without repeated ones."""
    squares = math.fsum(statistics.pvariance(values) * len(values) for values in repeated)
    return math.sqrt(squares / max(1, sum(len(values) - 1 for values in repeated)))


def believe_before(
    axes: Sequence[Axis],
    sampler: AutoSampler,
    names: Sequence[str],
    earlier: Sequence[Sequence[SearchPoint]],
    goal: Literal["max", "min"],
) -> dict[str, Any]:
    """Return what earlier studies predict before the first run: their best configs, and what matters in each."""
    studies = []
    best_of: Callable[..., Any] = max if goal == "max" else min
    for name, points in zip(names, earlier, strict=True):
        model = sampler.acquisition.model_of_earlier(points)
        importance = dict(zip((axis.path for axis in axes), sampler.acquisition.importance(model), strict=True))
        best = best_of(points, key=lambda point: point.value)
        studies.append({
            "study": name,
            "points": len(points),
            "best": _values(axes, best.params),
            "measured": best.value,
            "importance": {k: round(v, 3) for k, v in sorted(importance.items(), key=lambda pair: -pair[1])},
        })  # fmt: skip
    return {"studies": studies, "first": [_values(axes, drawn.params) for drawn in sampler.best_before()]}


def _values(axes: Sequence[Axis], params: Params) -> dict[str, Any]:
    return {axis.path: axis.to_value(params[axis.path]) for axis in axes}


def _uncertain(
    axes: Sequence[Axis], sampler: AutoSampler, points: list[SearchPoint], model: Any
) -> tuple[dict[str, Any], ...]:
    """Return legal random places with the largest standard deviation times the probability that runs do not fail."""
    import numpy as np

    acquisition = sampler.acquisition
    places = acquisition.random_points(N_PLACES, np.random.RandomState(0))
    mean, sd = acquisition.predict(model, places)
    doubt = sd * acquisition.success_probability(points, places)
    chosen: list[int] = []
    for i in np.argsort(-doubt, kind="stable"):
        if sampler.is_allowed(places[i]):
            chosen.append(int(i))
        if len(chosen) >= N_UNCERTAIN:
            break
    means, sds = model.scale.to_objective(mean, sd)
    return tuple({"values": _values(axes, places[i]), "mean": float(means[i]), "sd": float(sds[i])} for i in chosen)


def _failing(axes: Sequence[Axis], points: Sequence[SearchPoint]) -> list[str]:
    """Return where runs fail: for each knob, the end of its range or the choice that separates failures best."""
    ended = [point for point in points if point.known or point.infeasible]
    failed = [point for point in ended if point.infeasible]
    if len(failed) < MIN_FAILED:
        return []
    found = []
    for axis in axes:
        values = [(point.params[axis.path], point.infeasible) for point in ended]
        for words, inside in _ends(axis, [value for value, bad in values if bad]):
            bad = sum(is_bad for value, is_bad in values if inside(value))
            n = sum(inside(value) for value, _ in values)
            others = len(ended) - n
            rate, rest = bad / n, (len(failed) - bad) / others if others else 1.0
            if bad >= MIN_FAILED and rate >= 0.5 and rate > 2 * rest:
                words = f"{axis.path} {words}: {bad} of {n} configs failed, elsewhere {len(failed) - bad} of {others}"
                found.append((rate - rest, words))
                break
    return [words for _, words in sorted(found, reverse=True)[:3]]


def _ends(axis: Axis, failed: Sequence[Any]) -> list[tuple[str, Callable[[Any], bool]]]:
    """Return parts of an axis that failures may be in, in words and as a condition on a parameter."""
    if axis.choices and not axis.ordered:
        return [(f"= {show_value(axis.to_value(one))}", partial(operator.eq, one)) for one in sorted({*failed})]
    ordered = sorted(failed)
    low, high = ordered[: max(1, len(ordered) // 4)][-1], ordered[-max(1, len(ordered) // 4) :][0]
    return [
        (f">= {show_value(axis.to_value(low))}", partial(operator.le, low)),
        (f"<= {show_value(axis.to_value(high))}", partial(operator.ge, high)),
    ]


def describe_values(values: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> str:
    """Return knobs in words; with a base, only those that differ from it."""
    shown = {key: value for key, value in values.items() if base is None or base.get(key) != value}
    return ", ".join(f"{key}={_short(value)}" for key, value in shown.items()) or "the base config"


def _short(value: Any) -> str:
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else show_value(value)


def describe(belief: StudyBelief, metric: str) -> list[str]:
    """Return the belief in sentences, for agents and for reports."""
    lines = [
        f"best: run {one.run} ({describe_values(one.values)}): {metric} {with_spread(one.mean, one.sd)} "
        f"(measured {one.measured:.5g} in {one.runs} run{'s' * (one.runs != 1)})"
        for one in belief.best
    ]
    lines.append(f"a single run varies by {belief.noise:.2g} (standard deviation)")
    matters = [f"{path} {100 * share:.0f} %" for path, share in belief.importance.items() if share >= 0.01]
    lines.append(f"what matters (share of the predicted variance): {', '.join(matters[:8]) or 'nothing yet'}")
    lines += [
        f"least known: {describe_values(one['values'])}: {with_spread(one['mean'], one['sd'])}"
        for one in belief.uncertain
    ]
    lines += [f"runs fail where {one}" for one in belief.failing]
    if belief.pending:
        lines.append(f"{belief.pending} config{'s are' if belief.pending != 1 else ' is'} running or waiting")
    if belief.earlier:
        weights = ", ".join(f"{name} {weight:.2f}" for name, weight in belief.earlier.items())
        lines.append(f"weights of earlier studies in the model: {weights}")
    return lines
