"""The transport loss: how far the features of source frames are from those of the target frames they should equal.

    M     = sum over features of term_weight · (weight_embed · |e_s − e_t|² + weight_label · |l_s − l_t|²)
    plan  = the unbalanced optimal transport of M (Sinkhorn in double precision), a constant for the gradient
    loss  = sum(plan · M)

With `heuristic` the plan may only move mass between the frames that were drawn as a pair, and with equal tau its mass
is mean(exp(−M_ii / (reg + 2·tau))). Where M_ii / reg is above 745 the kernel is 0 in double precision, the iteration
gives up, the mass is mean(exp(−M_ii / reg)), and tau has no effect at all: reg has to be raised first.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from ot.unbalanced import sinkhorn_knopp_unbalanced  # type: ignore[import, unused-ignore]
from torch import Tensor


@dataclass(frozen=True)
class Feature:
    """One term of the cost."""

    name: str
    """What is compared: a camera, `action` or `observation.state`."""
    term: str
    """The name of its cost in the log."""
    use_learned_embed: bool
    """Whether the policy's embedding of it is compared."""
    weight_embed: float
    """Weight of the embedding's distance."""
    weight_label: float
    """Weight of the distance of the raw values."""
    term_weight: float
    """Weight of the whole term."""
    dim_slice: tuple[int, int] | None
    """Which of the raw values' dimensions count."""


@dataclass(frozen=True)
class LossConfig:
    """What the config says in `ot.loss_config`."""

    reg: float
    """Weight of the entropy: how blurred the plan is."""
    tau_src: float
    """How dear it is to leave out source mass."""
    tau_tgt: float
    """How dear it is to leave out target mass."""
    heuristic: bool
    """Mass moves only between the two frames of a pair."""
    features: tuple[Feature, ...]
    """The terms of the cost."""

    @classmethod
    def read(cls, config: Mapping[str, Any], embeds: Sequence[str], labels: Sequence[str]) -> "LossConfig":
        """Checked; a ValueError says which key is wrong. `embeds` and `labels` are what can be compared."""
        unknown = set(config) - {"reg", "tau_src", "tau_tgt", "heuristic", "features"}
        if unknown:
            raise ValueError(f"unknown key ot.loss_config.{min(unknown)}")
        at = "ot.loss_config"
        reg, src, tgt = (_number(config, key, at) for key in ("reg", "tau_src", "tau_tgt"))
        for key, value in (("reg", reg), ("tau_src", src), ("tau_tgt", tgt)):
            if value == 0:
                raise ValueError(f"{at}.{key} must be above 0")
        features = config.get("features")
        if not isinstance(features, list) or not features:
            raise ValueError(f"{at}.features is a list of at least one feature")
        read = tuple(_feature(entry, f"{at}.features.{i}", embeds, labels) for i, entry in enumerate(features))
        if len({feature.term for feature in read}) < len(read):
            raise ValueError(f"{at}.features: two features have the same term")
        return cls(reg, src, tgt, config.get("heuristic") is True, read)


def _number(config: Mapping[str, Any], key: str, at: str, default: float | None = None) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{at}.{key} is a number from 0, not {value!r}")
    return float(value)


def _feature(entry: Any, at: str, embeds: Sequence[str], labels: Sequence[str]) -> Feature:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ValueError(f"{at} needs a name")
    keys = {"name", "term", "use_learned_embed", "weight_embed", "weight_label", "term_weight", "dim_slice"}
    if set(entry) - keys:
        raise ValueError(f"unknown key {at}.{min(set(entry) - keys)}")
    name, span = entry["name"], entry.get("dim_slice")
    if span is not None and not (
        isinstance(span, list) and len(span) == 2 and all(type(n) is int for n in span) and 0 <= span[0] < span[1]
    ):
        raise ValueError(f"{at}.dim_slice is two whole numbers such as [0, 8], or null, not {span!r}")
    feature = Feature(
        name,
        entry.get("term") or name,
        entry.get("use_learned_embed") is True,
        _number(entry, "weight_embed", at, 0.0),
        _number(entry, "weight_label", at, 0.0),
        _number(entry, "term_weight", at, 1.0),
        None if span is None else (span[0], span[1]),
    )
    embed = feature.use_learned_embed and feature.weight_embed > 0
    if not embed and feature.weight_label == 0:
        raise ValueError(
            f"{at} ({name}) compares nothing: its embedding and its label are both off; "
            "raise weight_label, or use_learned_embed with weight_embed, or remove the feature"
        )
    if embed and name not in embeds:
        raise ValueError(f"{at}: there is no learned embedding of {name}; there are: {', '.join(embeds)}")
    if feature.weight_label > 0 and name not in labels:
        raise ValueError(f"{at}: {name} has no label; set its weight_label to 0. Labels: {', '.join(labels)}")
    return feature


@dataclass(frozen=True)
class Transport:
    """The loss of one batch, and what there is to say about it."""

    loss: Tensor | None
    """None where the plan was not finite: such a step goes without this loss, and is counted."""
    pi_sum: float
    """The mass that the plan moves; 1 is all of it."""
    pi_diag: float
    """The mass that it moves between the two frames of a pair."""
    costs: dict[str, float]
    """By term: the mean cost, before its term_weight."""
    gave_up: bool
    """Whether the iteration ended at the limits of double precision."""


def transport_plan(cost: npt.NDArray[np.float64], config: LossConfig) -> tuple[npt.NDArray[np.float64], bool]:
    """The plan for equal shares of mass, and whether the iteration gave up."""
    rows, columns = cost.shape
    reference = np.eye(rows, columns) / rows if config.heuristic else None
    with warnings.catch_warnings(record=True) as told, np.errstate(all="ignore"):
        warnings.simplefilter("always")
        plan = sinkhorn_knopp_unbalanced(
            np.full(rows, 1.0 / rows),
            np.full(columns, 1.0 / columns),
            cost,
            config.reg,
            (config.tau_src, config.tau_tgt),
            c=reference,
        )
    return np.asarray(plan, np.float64), any("Numerical errors" in str(warning.message) for warning in told)


def transport_loss(
    config: LossConfig,
    embeds: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    labels: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
) -> Transport:
    """The loss between the source's and the target's features; a label is batch × time × dimensions."""
    total: Tensor | None = None
    costs: dict[str, float] = {}
    for feature in config.features:
        terms = []
        if feature.use_learned_embed and feature.weight_embed > 0:
            terms.append(feature.weight_embed * _squares(embeds[0][feature.name], embeds[1][feature.name]))
        if feature.weight_label > 0:
            span = slice(*feature.dim_slice) if feature.dim_slice else slice(None)
            source, target = (side[feature.name].detach()[..., span].flatten(1) for side in labels)
            terms.append(feature.weight_label * _squares(source, target))
        cost = torch.stack(terms).sum(0)
        costs[feature.term] = float(cost.detach().mean())
        total = feature.term_weight * cost if total is None else total + feature.term_weight * cost
    if total is None:
        raise ValueError("ot.loss_config.features is empty")
    plan, gave_up = transport_plan(total.detach().cpu().numpy(), config)
    pi_sum, pi_diag = float(plan.sum()), float(np.trace(plan))
    loss = (torch.from_numpy(plan).to(total.device) * total).sum() if np.isfinite(plan).all() else None
    return Transport(loss, pi_sum, pi_diag, costs, gave_up)


def _squares(source: Tensor, target: Tensor) -> Tensor:
    """All squared distances, in double precision."""
    source, target = source.double(), target.double()
    return (source[:, None] - target[None]).square().sum(-1)
