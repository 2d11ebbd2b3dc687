"""Optimal-transport loss: aligns the features of source and target frames.

    M     = sum over features of term_weight · (weight_embed · |e_s − e_t|² + weight_label · |l_s − l_t|²)
    plan  = unbalanced optimal transport for the cost matrix M (Sinkhorn in float64), without gradient
    loss  = sum(plan · M)

With `heuristic`, the plan moves mass only between the two frames of a sampled pair, and for equal taus its mass is
mean(exp(−M_ii / (reg + 2·tau))). Where M_ii / reg exceeds 745 the kernel underflows to 0 in float64, Sinkhorn stops
with numerical errors, the mass is mean(exp(−M_ii / reg)), and tau has no effect: raise reg first.
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
    """One term of the cost matrix."""

    name: str
    """The feature to compare: a camera, `action` or `observation.state`."""
    term: str
    """Name of its cost in the metrics."""
    use_learned_embed: bool
    """Compare the policy's embeddings."""
    weight_embed: float
    """Weight of the squared distance of the embeddings."""
    weight_label: float
    """Weight of the squared distance of the raw values."""
    term_weight: float
    """Weight of the whole term."""
    dim_slice: tuple[int, int] | None
    """Range of dimensions of the raw values to compare; None: all."""


@dataclass(frozen=True)
class LossConfig:
    """The `ot.loss_config` section of the config."""

    reg: float
    """Weight of the entropic regularization; larger: smoother plan."""
    tau_src: float
    """Weight of the marginal relaxation of the source: the penalty for not transporting its mass."""
    tau_tgt: float
    """The same for the target."""
    heuristic: bool
    """Transport mass only between the two frames of a pair."""
    features: tuple[Feature, ...]
    """The terms of the cost matrix."""

    @classmethod
    def read(cls, config: Mapping[str, Any], embeds: Sequence[str], labels: Sequence[str]) -> "LossConfig":
        """Parse and validate the section. Raises ValueError with the invalid key.

        Args:
            config: The section.
            embeds: Features with a learned embedding.
            labels: Features with raw values.
        """
        unknown = set(config) - {"reg", "tau_src", "tau_tgt", "heuristic", "features"}
        if unknown:
            raise ValueError(f"unknown key ot.loss_config.{min(unknown)}")
        prefix = "ot.loss_config"
        reg, src, tgt = (_non_negative(config, key, prefix) for key in ("reg", "tau_src", "tau_tgt"))
        for key, value in (("reg", reg), ("tau_src", src), ("tau_tgt", tgt)):
            if value == 0:
                raise ValueError(f"{prefix}.{key} must be > 0")
        features = config.get("features")
        if not isinstance(features, list) or not features:
            raise ValueError(f"{prefix}.features must be a non-empty list")
        parsed = tuple(
            _parse_feature(entry, f"{prefix}.features.{i}", embeds, labels) for i, entry in enumerate(features)
        )
        if len({feature.term for feature in parsed}) < len(parsed):
            raise ValueError(f"{prefix}.features: two features have the same term")
        return cls(reg=reg, tau_src=src, tau_tgt=tgt, heuristic=config.get("heuristic") is True, features=parsed)


def _non_negative(config: Mapping[str, Any], key: str, prefix: str, default: float | None = None) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{prefix}.{key} must be a number ≥ 0, not {value!r}")
    return float(value)


def _parse_feature(entry: Any, prefix: str, embeds: Sequence[str], labels: Sequence[str]) -> Feature:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ValueError(f"{prefix} needs a name")
    keys = {"name", "term", "use_learned_embed", "weight_embed", "weight_label", "term_weight", "dim_slice"}
    if set(entry) - keys:
        raise ValueError(f"unknown key {prefix}.{min(set(entry) - keys)}")
    name, span = entry["name"], entry.get("dim_slice")
    if span is not None and not (
        isinstance(span, list) and len(span) == 2 and all(type(n) is int for n in span) and 0 <= span[0] < span[1]
    ):
        raise ValueError(f"{prefix}.dim_slice must be two integers such as [0, 8], or null, not {span!r}")
    feature = Feature(
        name=name,
        term=entry.get("term") or name,
        use_learned_embed=entry.get("use_learned_embed") is True,
        weight_embed=_non_negative(entry, "weight_embed", prefix, 0.0),
        weight_label=_non_negative(entry, "weight_label", prefix, 0.0),
        term_weight=_non_negative(entry, "term_weight", prefix, 1.0),
        dim_slice=None if span is None else (span[0], span[1]),
    )
    embed = feature.use_learned_embed and feature.weight_embed > 0
    if not embed and feature.weight_label == 0:
        raise ValueError(
            f"{prefix} ({name}) compares nothing: its embedding and its label are both off; "
            "raise weight_label, or set use_learned_embed and weight_embed, or remove the feature"
        )
    if embed and name not in embeds:
        raise ValueError(
            f"{prefix}: there is no learned embedding of {name}; there are embeddings of: {', '.join(embeds)}"
        )
    if feature.weight_label > 0 and name not in labels:
        raise ValueError(f"{prefix}: {name} has no label; set its weight_label to 0. Labels: {', '.join(labels)}")
    return feature


@dataclass(frozen=True)
class TransportLoss:
    """The transport loss of one batch, with diagnostics."""

    loss: Tensor | None
    """None if the plan was not finite; the step is then trained without this loss, and counted."""
    pi_sum: float
    """Total mass of the plan, at most 1."""
    pi_diag: float
    """Mass on the diagonal: between the two frames of a pair."""
    costs: dict[str, float]
    """Mean cost by term, before term_weight."""
    numerical_errors: bool
    """Sinkhorn stopped at the limits of float64."""


def transport_plan(cost: npt.NDArray[np.float64], config: LossConfig) -> tuple[npt.NDArray[np.float64], bool]:
    """Return the transport plan between uniform marginals, and whether Sinkhorn stopped with numerical errors."""
    rows, columns = cost.shape
    reference = np.eye(rows, columns) / rows if config.heuristic else None
    with warnings.catch_warnings(record=True) as caught, np.errstate(all="ignore"):
        warnings.simplefilter("always")
        plan = sinkhorn_knopp_unbalanced(
            np.full(rows, 1.0 / rows),
            np.full(columns, 1.0 / columns),
            cost,
            config.reg,
            (config.tau_src, config.tau_tgt),
            c=reference,
        )
    return np.asarray(plan, np.float64), any("Numerical errors" in str(warning.message) for warning in caught)


def transport_loss(
    config: LossConfig,
    embeds: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    labels: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
) -> TransportLoss:
    """Return the loss between source and target features; a label is batch × time × dimensions."""
    total: Tensor | None = None
    costs: dict[str, float] = {}
    for feature in config.features:
        terms = []
        if feature.use_learned_embed and feature.weight_embed > 0:
            terms.append(feature.weight_embed * _squared_distances(embeds[0][feature.name], embeds[1][feature.name]))
        if feature.weight_label > 0:
            span = slice(*feature.dim_slice) if feature.dim_slice else slice(None)
            source, target = (side[feature.name].detach()[..., span].flatten(1) for side in labels)
            terms.append(feature.weight_label * _squared_distances(source, target))
        cost = torch.stack(terms).sum(0)
        costs[feature.term] = float(cost.detach().mean())
        total = feature.term_weight * cost if total is None else total + feature.term_weight * cost
    if total is None:
        raise ValueError("ot.loss_config.features is empty")
    plan, numerical_errors = transport_plan(total.detach().cpu().numpy(), config)
    pi_sum, pi_diag = float(plan.sum()), float(np.trace(plan))
    loss = (torch.from_numpy(plan).to(total.device) * total).sum() if np.isfinite(plan).all() else None
    return TransportLoss(loss=loss, pi_sum=pi_sum, pi_diag=pi_diag, costs=costs, numerical_errors=numerical_errors)


def _squared_distances(source: Tensor, target: Tensor) -> Tensor:
    """Return all pairwise squared Euclidean distances, in float64."""
    source, target = source.double(), target.double()
    return (source[:, None] - target[None]).square().sum(-1)
