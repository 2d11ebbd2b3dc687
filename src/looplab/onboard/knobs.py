"""Which settings look like hyper-parameters, and in which ranges to search them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from looplab.onboard.base import MISSING, Setting

Role = Literal["knob", "doubtful", "seed", "length", "other"]

LENGTH = {"epoch", "epochs", "steps", "iters", "iterations", "timesteps", "updates", "episodes", "samples", "rounds"}
OTHER = {
    "path", "dir", "directory", "file", "folder", "root", "out", "output", "log", "logs", "logger", "logging", "save", "load",
    "checkpoint", "checkpoints", "ckpt", "resume", "restore", "name", "project", "entity", "run", "exp", "experiment", "tag",
    "tags", "notes", "group", "id", "device", "devices", "cuda", "gpu", "gpus", "cpu", "mps", "accelerator", "worker", "workers",
    "thread", "threads", "proc", "procs", "processes", "jobs", "world", "rank", "local", "port", "host", "backend", "dist",
    "distributed", "ddp", "node", "nodes", "verbose", "verbosity", "debug", "quiet", "progress", "bar", "print", "interval",
    "freq", "frequency", "every", "track", "wandb", "tensorboard", "tb", "mlflow", "capture", "video", "render", "upload", "push",
    "hub", "token", "key", "url", "classes", "vocab", "data", "dataset", "datasets", "split", "version", "dtype", "precision",
    "compile", "fp16", "bf16", "amp", "tf32", "cache", "deterministic", "benchmark", "pin", "prefetch", "config", "help", "eval",
    "test", "val", "valid", "validation", "plot", "show", "mode", "env", "environment", "task", "torch", "past", "index", "limit",
    "image", "img", "input", "num_labels", "report", "overwrite", "dry", "demo", "profile", "sanity",
}  # fmt: skip
"""Words of settings that say where, what and how much, not how to learn."""
RATES = {"lr", "eta"}
DECAYS = {
    "wd",
    "l1",
    "l2",
    "reg",
    "regularization",
    "penalty",
    "eps",
    "epsilon",
    "temperature",
    "temp",
    "lambda",
    "tol",
}
SHARES = {
    "dropout",
    "drop",
    "prob",
    "probability",
    "ratio",
    "fraction",
    "frac",
    "smoothing",
    "subsample",
    "colsample",
    "bytree",
}
NEAR_ONE = {"momentum", "beta1", "beta2", "gamma", "discount", "gae", "lambda", "ema", "polyak", "rho"}
SIZES = {
    "hidden",
    "width",
    "dim",
    "units",
    "embd",
    "embed",
    "embedding",
    "channels",
    "filters",
    "features",
    "inner",
    "ff",
}
COUNTS = {
    "layers",
    "layer",
    "depth",
    "head",
    "heads",
    "blocks",
    "estimators",
    "trees",
    "leaves",
    "neighbors",
    "components",
}
WEIGHTS = {
    "coef",
    "coefficient",
    "weight",
    "scale",
    "clip",
    "margin",
    "alpha",
    "beta",
    "sigma",
    "std",
    "noise",
    "norm",
    "c",
}
CHOICES = {"optimizer", "optim", "activation", "act", "scheduler", "schedule", "loss", "model", "arch", "architecture", "kernel",
           "solver", "criterion", "penalty", "init", "objective", "booster", "pooling", "norm"}  # fmt: skip
SWITCHES = {
    "nesterov",
    "amsgrad",
    "anneal",
    "bias",
    "batchnorm",
    "bn",
    "augment",
    "augmentation",
    "residual",
    "layernorm",
}


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


def suggest(setting: Setting) -> Suggestion:
    """Return what a setting looks like."""
    words = words_of(setting.name)
    last = words_of(setting.name.rpartition(".")[2])
    known = set(last)
    if "seed" in known or last == ["random", "state"]:
        return Suggestion("seed" if setting.kind in ("int", "unknown") else "other")
    default = setting.default
    if default is MISSING or default is None:
        return Suggestion("other")
    if setting.kind == "bool":
        likely = bool(known & SWITCHES)
        return Suggestion(
            "knob" if likely else "doubtful" if not known & OTHER else "other", {"choices": [False, True]}
        )
    if setting.choices is not None and len(setting.choices) > 1:
        if known & OTHER:
            return Suggestion("other")
        return Suggestion("knob" if known & CHOICES else "doubtful", {"choices": list(setting.choices)})
    if setting.kind not in ("int", "float") or isinstance(default, bool) or not isinstance(default, int | float):
        return Suggestion("other")
    if not math.isfinite(default):
        return Suggestion("other")
    return _number(words, known, float(default) if setting.kind == "float" else default)


def _number(words: Sequence[str], known: set[str], default: float) -> Suggestion:
    whole = isinstance(default, int)
    pairs = {f"{a}_{b}" for a, b in zip(words, words[1:], strict=False)}
    if known & RATES or pairs & {"learning_rate", "step_size"}:
        return (
            Suggestion("knob", _log(default, 100))
            if default > 0 and not whole
            else Suggestion("doubtful", _log(default, 100))
        )
    if "warmup" in known:
        return Suggestion("knob", {"type": "int", "low": 0, "high": max(1, int(default) * 10 or 1000)} if whole else {
            "type": "float", "low": 0.0, "high": min(1.0, max(0.2, default * 10))})  # fmt: skip
    if "batch" in known or "minibatch" in known or pairs & {"batch_size"}:
        if "num" in known or "minibatches" in known:
            return Suggestion("doubtful", _powers(default))
        return Suggestion("knob", _powers(default)) if whole and default > 1 else Suggestion("other")
    if known & LENGTH and whole:
        return (
            Suggestion("length", _around(default))
            if not known & {"warmup"}
            else Suggestion("doubtful", _around(default))
        )
    if known & OTHER and not known & SHARES:
        return Suggestion("other")
    if not whole:
        found = _float(known, pairs, default)
        if found is not None:
            return found
    elif known & SIZES and default > 3:
        return Suggestion("knob", _powers(default))
    elif known & COUNTS and default > 0:
        return Suggestion("knob", {"type": "int", "low": max(1, default // 2), "high": 2 * default})
    return Suggestion("doubtful", _around(default)) if default != 0 else Suggestion("doubtful")


def _float(known: set[str], pairs: set[str], default: float) -> Suggestion | None:
    if known & SHARES and 0 <= default <= 1:
        high = 0.7 if known & {"dropout", "drop"} else 1.0
        return Suggestion("knob", {"type": "float", "low": 0.0, "high": max(high, default)})
    if known & NEAR_ONE and 0.5 <= default < 1:
        low, high = 1 - 10 * (1 - default), 1 - (1 - default) / 10
        return Suggestion("knob", {"type": "float", "low": round(max(0.0, low), 6), "high": round(high, 6)})
    if known & DECAYS or pairs & {"weight_decay"}:
        return Suggestion("knob", _log(default, 100)) if default > 0 else Suggestion("doubtful", {
            "type": "float", "low": 1e-6, "high": 0.1, "log": True})  # fmt: skip
    if known & WEIGHTS and default > 0:
        return Suggestion("knob", _log(default, 10))
    return None


def _log(default: float, factor: float) -> dict[str, Any] | None:
    if default <= 0:
        return None
    return {"type": "float", "low": _short(default / factor), "high": _short(default * factor), "log": True}


def _around(default: float) -> dict[str, Any] | None:
    if default <= 0:
        return None
    if isinstance(default, int):
        return {"type": "int", "low": max(1, default // 4), "high": 4 * default, "log": True} if default > 1 else None
    return {"type": "float", "low": _short(default / 10), "high": _short(default * 10), "log": True}


def _powers(default: float) -> dict[str, Any] | None:
    whole = int(default)
    if whole < 2:
        return None
    return {"choices": sorted({max(1, whole // 4), max(1, whole // 2), whole, 2 * whole, 4 * whole})}


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def constraints(names: Sequence[str]) -> list[str]:
    """Return constraints between settings that many trainers share."""
    by_words = {"_".join(words_of(name)): name for name in names}

    def has(*wanted: str) -> list[str] | None:
        found = [by_words[name] for name in wanted if name in by_words]
        return [f"`{name}`" if "-" in name else name for name in found] if len(found) == len(wanted) else None

    found = []
    if batch := has("num_envs", "num_steps", "num_minibatches"):
        found.append(f"({batch[0]} * {batch[1]}) % {batch[2]} == 0")
    for width in ("n_embd", "embed_dim", "hidden_size", "d_model", "dim"):
        for head in ("n_head", "num_heads", "nhead", "heads", "num_attention_heads"):
            if pair := has(width, head):
                found.append(f"{pair[0]} % {pair[1]} == 0")
    return found
