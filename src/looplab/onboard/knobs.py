"""Which settings look like hyper-parameters, and in which ranges to search them.

By the words of their names, their types and their defaults. What is doubtful is offered, not taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from looplab.onboard.base import MISSING, ScriptSetting

Role = Literal["knob", "doubtful", "seed", "length", "other"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LENGTH = _words("epoch epochs steps iters iterations timesteps updates episodes samples rounds")
"""How long to train: a budget, not a hyper-parameter."""
EVALUATION = _words("eval evaluation test val valid validation sync")
"""What changes what is measured, or where, and never how well it is learnt."""
OTHER = _words(
    """path dir directory file folder root out output log logs logger logging save load checkpoint checkpoints ckpt
    resume restore name project entity run exp experiment tag tags notes group id device devices cuda gpu gpus
    cpu mps accelerator worker workers thread threads proc procs processes jobs world rank local port host
    backend dist distributed ddp node nodes verbose verbosity debug quiet progress bar print interval freq
    frequency every track wandb tensorboard tb mlflow capture video render upload push hub token key url classes
    vocab data dataset datasets split version dtype precision compile fp16 bf16 amp tf32 cache deterministic
    benchmark pin prefetch config help plot show mode env environment task torch past index limit image img
    input labels report overwrite dry demo profile sanity points"""
)
"""Where, what and how to run, not how to learn."""
RATES = _words("lr eta")
DECAYS = _words("wd l1 l2 reg regularization penalty eps epsilon temperature temp tol")
SHARES = _words("dropout drop prob probability ratio fraction frac smoothing subsample colsample bytree")
NEAR_ONE = _words("momentum beta gamma discount gae lambda ema polyak rho")
SIZES = _words("hidden width dim units embd embed embedding channels filters features inner ff")
COUNTS = _words(
    "layers layer depth head heads blocks estimators trees leaves leaf neighbors components clusters factors"
)
WEIGHTS = _words("coef coefficient weight scale clip margin alpha beta lambda norm c")
CHOICES = _words(
    """optimizer optim activation act scheduler schedule loss model arch architecture kernel solver criterion
    penalty init objective booster pooling norm"""
)
SWITCHES = _words("nesterov amsgrad anneal bias batchnorm bn augment augmentation residual layernorm")
FROM_ZERO = {"choices": [0.0, 1e-5, 1e-4, 1e-3, 1e-2]}
"""A coefficient that is off by default."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What a setting is, and the knob that it may become."""

    role: Role
    spec: Mapping[str, Any] | None = None
    """The knob as in the lab file; None: it should not be one."""


def words_of(name: str) -> list[str]:
    """Return the lower-case words of a name: `optim.learningRate` has `optim`, `learning`, `rate`."""
    parts = re.split(r"[^A-Za-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name))
    return [part.lower() for part in parts if part]


def suggest(setting: ScriptSetting) -> Suggestion:
    """Return what a setting looks like."""
    last = words_of(setting.name.rpartition(".")[2])
    known = {word.rstrip("0123456789") or word for word in last} | set(last)
    if "seed" in known or last == ["random", "state"]:
        return Suggestion("seed" if setting.kind in ("int", "unknown") else "other")
    default = setting.default
    if default is MISSING or default is None or known & EVALUATION:
        return Suggestion("other")
    is_other = bool(known & OTHER)
    if setting.kind == "bool":
        role: Role = "knob" if known & SWITCHES else "other" if is_other else "doubtful"
        return Suggestion(role, {"choices": [False, True]})
    if setting.choices is not None and len(setting.choices) > 1:
        role = "other" if is_other else "knob" if known & CHOICES else "doubtful"
        return Suggestion(role, {"choices": list(setting.choices)})
    if setting.kind not in ("int", "float") or isinstance(default, bool) or not isinstance(default, int | float):
        return Suggestion("other")
    if not math.isfinite(default):
        return Suggestion("other")
    pairs = {f"{a}_{b}" for a, b in pairwise(last)}
    if setting.kind == "float":
        return _float(known, pairs, float(default), is_other=is_other)
    return _int(known, pairs, int(default), is_other=is_other)


def _float(known: set[str], pairs: set[str], default: float, *, is_other: bool) -> Suggestion:
    """Return what a setting with a real default looks like."""
    if known & RATES or pairs & {"learning_rate"}:
        return Suggestion("knob" if default > 0 else "doubtful", _log(default, 100))
    if known & SHARES and 0 <= default <= 1:
        high = 0.7 if known & {"dropout", "drop"} else 1.0
        return Suggestion("knob", {"type": "float", "low": 0.0, "high": max(high, default)})
    if is_other:
        return Suggestion("other")
    if "warmup" in known:
        return Suggestion("knob", {"type": "float", "low": 0.0, "high": min(1.0, max(0.2, default * 10))})
    if known & NEAR_ONE and 0.5 <= default < 1:
        low, high = 1 - 10 * (1 - default), 1 - (1 - default) / 10
        return Suggestion("knob", {"type": "float", "low": round(max(0.0, low), 6), "high": round(high, 6)})
    if known & DECAYS or pairs & {"weight_decay"}:
        return Suggestion("knob", _log(default, 100) or FROM_ZERO)
    if known & WEIGHTS:
        return Suggestion("knob", _log(default, 10) or FROM_ZERO)
    return Suggestion("doubtful", _log(default, 10))


def _int(known: set[str], pairs: set[str], default: int, *, is_other: bool) -> Suggestion:
    """Return what a setting with a whole default looks like."""
    if "warmup" in known:
        return Suggestion("knob", {"type": "int", "low": 0, "high": 10 * default or 1000})
    if known & {"batch", "bs", "minibatch"} or "batch_size" in pairs:
        return Suggestion("knob" if default > 1 else "other", _powers(default))
    if known & COUNTS and default > 0 and not is_other:
        return Suggestion("knob", {"type": "int", "low": max(1, default // 2), "high": 2 * default})
    if known & LENGTH:
        return Suggestion("length", _around(default))
    if is_other:
        return Suggestion("other")
    if known & SIZES and default > 3:
        return Suggestion("knob", _powers(default))
    return Suggestion("doubtful", _around(default))


def _log(default: float, factor: float) -> dict[str, Any] | None:
    if default <= 0:
        return None
    return {"type": "float", "low": _short(default / factor), "high": _short(default * factor), "log": True}


def _around(default: int) -> dict[str, Any] | None:
    return {"type": "int", "low": max(1, default // 4), "high": 4 * default, "log": True} if default > 1 else None


def _powers(default: int) -> dict[str, Any] | None:
    if default < 2:
        return None
    return {"choices": sorted({max(1, default // 4), max(1, default // 2), default, 2 * default, 4 * default})}


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def constraints(names: Sequence[str]) -> list[str]:
    """Return constraints between settings that many trainers share."""
    by_words = {"_".join(words_of(name)): name for name in names}

    def find(*wanted: str) -> list[str] | None:
        found = [by_words[name] for name in wanted if name in by_words]
        return [f"`{name}`" if "-" in name else name for name in found] if len(found) == len(wanted) else None

    found = []
    if batch := find("num_envs", "num_steps", "num_minibatches"):
        found.append(f"({batch[0]} * {batch[1]}) % {batch[2]} == 0")
    for width in ("n_embd", "embed_dim", "hidden_size", "d_model", "dim"):
        for head in ("n_head", "num_heads", "nhead", "heads", "num_attention_heads"):
            if pair := find(width, head):
                found.append(f"{pair[0]} % {pair[1]} == 0")
    return found
