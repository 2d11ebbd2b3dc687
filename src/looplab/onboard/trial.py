"""One run, to look at: `looplab try`. It belongs to a study of its own, so that nothing is compared with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from looplab.config.lab import BudgetConfig, LabConfig, Require, StudyConfig, derived_study
from looplab.errors import LabError
from looplab.measure.splits import kind_of_split
from looplab.measure.summary import Directions
from looplab.onboard.knobs import words_of

SUFFIX = ".try"
MODE = "try"
INHERITED = (
    "anchor",
    "base",
    "constraints",
    "data",
    "derive",
    "deterministic",
    "evaluator",
    "executor",
    "flags",
    "keep_going",
    "knobs",
    "measure",
    "needs_exec",
    "normalise",
    "pipeline",
    "round_size",
    "seed",
    "slots",
    "stages",
    "suite",
    "track",
    "case",
    "mix",
)
BETTER_WORDS = {
    "acc",
    "accuracy",
    "reward",
    "return",
    "score",
    "f1",
    "auc",
    "success",
    "map",
    "bleu",
    "loss",
    "error",
    "err",
    "rmse",
    "mse",
    "mae",
    "perplexity",
    "ppl",
    "nll",
    "logloss",
    "elbo",
    "r2",
    "iou",
    "psnr",
    "bpb",
}
NOT_RESULTS = {
    "lr",
    "time",
    "seconds",
    "sec",
    "sps",
    "fps",
    "eta",
    "epoch",
    "step",
    "steps",
    "iter",
    "iteration",
    "memory",
    "mem",
    "gpu",
    "grad",
    "norm",
    "mfu",
    "speed",
    "throughput",
    "ms",
    "samples",
    "tokens",
    "length",
    "timesteps",
    "elapsed",
    "progress",
    "entropy",
    "kl",
    "clipfrac",
    "decay",
    "momentum",
    "size",
    "batch",
}


def try_study(lab: LabConfig, study: StudyConfig, edits: Sequence[str], seconds: float | None) -> StudyConfig:
    """Return the study of a single run: launch, knobs and sources of the real one, without objective and judge.

    Args:
        edits: What to change in the base config, for this run alone.
        seconds: How long the run may take; None: as long as the study allows.
    """
    name = study.name + SUFFIX
    if name in lab.studies:
        raise LabError(f"the lab has a study {name!r}, which is the name for tries of {study.name!r}", hint="rename it")
    launch = study.launch if seconds is None else study.launch.model_copy(update={"timeout": seconds})
    return derived_study(
        study,
        INHERITED,
        name=name,
        launch=launch,
        modes={MODE: list(edits)},
        objective=None,
        holdout=None,
        proposers=[],
        warm_start=None,
        probe=None,
        watch=[],
        judge=None,
        budget=BudgetConfig(),
        require=Require(),
    )


@dataclass(frozen=True, slots=True)
class ObjectiveGuess:
    """A metric that could be the objective."""

    metric: str
    goal: str
    score: float
    why: str


def rank_objectives(metrics: Mapping[str, Mapping[str, Any]]) -> list[ObjectiveGuess]:
    """Return the metrics of a run that could be its objective, the likeliest first.

    What counts: a validation or test split, a word that results have (accuracy, reward, loss), several points, and a
    value that moves. Learning rates, times and counters are left out.
    """
    found = []
    directions = Directions()
    for name, summary in metrics.items():
        words = set(words_of(name))
        last = summary.get("last")
        if (
            not isinstance(last, int | float)
            or not math.isfinite(last)
            or (words & NOT_RESULTS and not words & BETTER_WORDS)
        ):
            continue
        split = next((kind for word in words_of(name) if (kind := kind_of_split(word))), None)
        score, why = 0.0, list[str]()
        if split in ("val", "test", "eval"):
            score, why = score + 3.0 - (split == "test"), [*why, f"{split} split"]
        elif split == "train":
            score -= 1.0
        if words & BETTER_WORDS:
            score, why = score + 2.0, [*why, "named like a result"]
        n = int(summary.get("n") or 0)
        if n > 1:
            score, why = score + 1.0, [*why, f"{n} points"]
        if words & {"acc", "accuracy", "reward", "return", "success", "f1", "auc", "score"}:
            score += 0.5  # what people report, rather than what is optimised
        if words & {"best", "max", "min", "final"}:
            score -= 0.25
        found.append(ObjectiveGuess(name, directions.goal(name), score, ", ".join(why)))
    return sorted(found, key=lambda candidate: (-candidate.score, len(candidate.metric), candidate.metric))
