"""Which metric of a run is its objective: by its name, its curve, and what the script keeps the best of."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from looplab.measure.splits import KINDS, kind_of_split
from looplab.measure.stdout import LAST_LINE
from looplab.measure.summary import METRIC_WORDS, Directions, plain_name
from looplab.measure.words import words_of as plain_words
from looplab.onboard.knobs import words_of
from looplab.onboard.source import call_name, calls, constant, keyword
from looplab.onboard.trial import MIN_POINTS, MeasuredMetric

Goal = Literal["min", "max"]

SHORT = {
    "accuracy": "acc",
    "error": "err",
    "returns": "return",
    "rewards": "reward",
    "rew": "reward",
    "ret": "return",
    "scores": "score",
    "losses": "loss",
    "likelihood": "ll",
    "loglikelihood": "ll",
    "perplexity": "ppl",
}
"""Words of metrics that mean the same."""
OPTIMISED = {
    "loss",
    "nll",
    "ce",
    "xent",
    "crossentropy",
    "logloss",
    "cost",
    "ll",
    "elbo",
    "ppl",
    "deviance",
    "kld",
    "log",
}
"""What is optimised, rather than what people report."""
RESULTS = {SHORT.get(word, word) for word in METRIC_WORDS} | {
    "ce",
    "xent",
    "crossentropy",
    "logloss",
    "metric",
    "quality",
}
NOT_RESULTS = {
    *("lr", "learning", "rate", "time", "seconds", "sec", "secs", "sps", "fps", "eta", "epoch", "epochs", "step"),
    *("steps", "iter", "iters", "iteration", "iterations", "memory", "mem", "gpu", "grad", "norm", "mfu", "speed"),
    *("throughput", "ms", "samples", "tokens", "length", "len", "timesteps", "elapsed", "progress", "entropy", "kl"),
    *("clipfrac", "decay", "momentum", "size", "batch", "runtime", "episode", "episodes", "n", "count", "num", "std"),
    *("flos", "params", "updates", "beta", "epsilon", "temperature", "gamma", "alpha", "trial", "fold", "sd", "var"),
}
"""Words for measurements other than the result: rates, times, counters, spreads."""
SUMMARY = {"best", "max", "min", "final"}
"""Words of values that a script derives from others."""
WHOLE = {"both", "overall", "all", "95"}
"""Words of values over all parts of a split, or over all thresholds: `mAP50-95`."""
MONITORED = "r"
"""The reward of an episode, in the `monitor.csv` of Gymnasium wrappers."""
ALL_FOLDS = {"oof", "cv"}
"""Words of values of a cross-validation, out of fold."""
PERCENT = (50.0, 100.0)
"""Values that percentages of right answers have, and hardly a loss."""
SPLITS = {word for words in KINDS.values() for word in words}
CUTOFF = re.compile(r"(?i)(?:top|acc|accuracy|prec|precision|err|error|hits?|recall)[-_@]*(\d{1,3})$")
"""Metrics over the k best answers: `top5`, `acc@1`."""


@dataclass(frozen=True, slots=True)
class ObjectiveGuess:
    """A metric that could be the objective."""

    metric: str
    goal: Goal
    score: float
    why: str
    is_goal_known: bool = True
    """Whether the name, the script or a curve of several points says what is better; if not, the goal is a guess."""


@dataclass(frozen=True, slots=True)
class KeptBest:
    """A value whose best a script keeps."""

    words: frozenset[str]
    goal: Goal | None
    is_evaluation: bool = False
    """Whether a function that evaluates has returned it: `mean_reward, std = evaluate_policy(model, env)`."""


def rank_objectives(
    metrics: Iterable[MeasuredMetric], settings: Iterable[str] = (), kept: Sequence[KeptBest] = ()
) -> list[ObjectiveGuess]:
    """Return the metrics of a run that could be its objective, the likeliest first.

    What counts: a validation or test split, a word that results have (accuracy, reward, loss), that the script itself
    keeps the best of it, and several points. If a name says nothing of its goal, its curve does. Settings, learning
    rates, times and counters are left out.

    Args:
        settings: Names of the script's settings, which many scripts print.
        kept: What the script keeps the best of (`kept_best`).
    """
    found = []
    metrics = list(metrics)
    directions = Directions()
    echoed = set(map(plain_name, settings))
    splits = {_split(metric.name) for metric in metrics}
    has_split = bool(splits & {"val", "test"})
    # If every loss names its split, a score without one is that of the evaluation: `metrics/mAP_0.5` of YOLO.
    names_splits = {"train", "val"} <= splits and not any(
        _split(metric.name) is None and _result_words(metric.name) & OPTIMISED for metric in metrics
    )
    with_split = {
        word for metric in metrics if _split(metric.name) is not None for word in _result_words(metric.name) & RESULTS
    }
    named = [frozenset(_result_words(metric.name)) for metric in metrics]
    summed_up = {parts - SUMMARY for parts in named if parts & SUMMARY}
    for metric in metrics:
        words = _result_words(metric.name)
        if metric.last is None or not math.isfinite(metric.last) or plain_name(metric.name) in echoed:
            continue
        if words & NOT_RESULTS and not words & RESULTS - NOT_RESULTS:
            continue
        if metric.is_count and not words & RESULTS:
            continue
        split = _split(metric.name)
        score = 0.0
        why: list[str] = []
        if split in ("val", "test"):
            score, why = score + (3.0 if split == "val" else 2.5), [*why, "validation" if split == "val" else "test"]
        elif split == "train" or (has_split and "loss" in words):
            score -= 1.0
        elif names_splits and words & RESULTS - NOT_RESULTS and not words & (OPTIMISED | with_split):
            score, why = score + 2.75, [*why, "of the evaluation"]
        if words & ALL_FOLDS and split is None:
            score, why = score + 4.5, [*why, "over all folds"]  # before the validation score of the last fold
        if words & RESULTS - NOT_RESULTS:
            score += 2.0
        if words & NOT_RESULTS:
            score -= 1.5
        goal = "max" if metric.name == MONITORED else directions.goal(metric.name)
        rises = metric.first is not None and metric.last > metric.first
        if goal == "min" and not words & RESULTS:  # the name does not tell
            if rises and metric.points > 1:
                goal, why = "max", [*why, "it rises"]  # trainers usually improve
            elif split is not None and words <= SPLITS and PERCENT[0] <= metric.last <= PERCENT[1]:
                goal, why = "max", [*why, "it looks like a percentage"]  # `Test: 97.2%`
        mine = next((one for one in kept if not one.is_evaluation and _fits(one, words, split)), None)
        if mine is not None:
            if metric.name != LAST_LINE:
                score, why = score + 1.0, [*why, "the script keeps the best"]
            if mine.goal is not None and not words & RESULTS:
                goal = mine.goal
        if split is None and any(one.is_evaluation and one.words == words for one in kept):
            score, why = score + 1.25, [*why, "an evaluation returns it"]
        if metric.points > 1 and words in summed_up:
            score, why = score + 0.75, [*why, "the script summarises it"]
        if metric.points > 1:
            score += 1.0
        points = f"{metric.points} point{'s' if metric.points != 1 else ''}"
        why.append("the number in the last printed line" if metric.name == LAST_LINE else points)
        if words & RESULTS - NOT_RESULTS - OPTIMISED and not words & OPTIMISED:
            score += 0.5
        if words & SUMMARY:
            score -= 0.75  # it cannot get worse, so the curve says less
        elif "last" in words:
            score -= 0.25  # of one episode, where there is an average of several
        is_told = bool(words & RESULTS) or (mine is not None and mine.goal is not None)
        is_known = is_told or (metric.points >= MIN_POINTS and metric.first != metric.last)
        found.append(ObjectiveGuess(metric.name, goal, score, ", ".join(why), is_goal_known=is_known))
    # Equal scores: that of the whole before that of a part, accuracy before that of one class, top-1 before top-5.
    return sorted(
        found,
        key=lambda guess: (
            -guess.score,
            not WHOLE & set(words_of(guess.metric)),
            _cutoff(guess.metric) or 0,
            len(words_of(guess.metric)),
        ),
    )


def explain_choice(first: ObjectiveGuess, second: ObjectiveGuess) -> str:
    """Return why a metric was preferred to one that is almost as likely, as a clause."""
    words, others = _result_words(first.metric), _result_words(second.metric)
    if "the script keeps the best" in first.why and "the script keeps the best" not in second.why:
        return "the script keeps the best of it"
    if (split := _split(first.metric)) != _split(second.metric) and split == "val":
        return "it is measured on the validation split"
    if others & OPTIMISED and not words & OPTIMISED:
        return "it is what people report, while a loss is what training minimises"
    if (cutoff := _cutoff(first.metric)) is not None and cutoff < (_cutoff(second.metric) or 0):
        return f"top-{cutoff} is stricter than top-{_cutoff(second.metric)}"
    if WHOLE & set(words_of(first.metric)) and not WHOLE & set(words_of(second.metric)):
        return "it covers the whole, not a part"
    if first.score == second.score:
        return "both are equally likely by name"
    return first.why


def _cutoff(name: str) -> int | None:
    """Return k of a metric over the k best answers, such as `top5` or `acc@1`; None: it is not such a metric."""
    found = CUTOFF.search(name)
    return None if found is None else int(found[1])


def _result_words(name: str) -> set[str]:
    if name == MONITORED:
        return {"reward"}
    known = plain_words(name) & METRIC_WORDS  # `map` of `mAP50`
    return {SHORT.get(word, word) for word in (*words_of(name), *known)}


def _split(name: str) -> str | None:
    """Return the split of a metric's name: `val`, `test`, `train`; None: it has none."""
    words = words_of(name)
    pairs = ["".join(pair) for pair in pairwise(words)]  # held-out
    return next((kind for word in (*words, *pairs) if (kind := kind_of_split(word))), None)


def _fits(kept: KeptBest, words: set[str], split: str | None) -> bool:
    """Return whether a metric is what the script keeps the best of."""
    splits = {kind_of_split(word) for word in kept.words} - {None}
    names = {word for word in kept.words if word not in SPLITS}
    if split == "train" or (splits and split is not None and split not in splits):
        return False
    return bool(names) and names <= words and (bool(names & RESULTS) or names == words)


def kept_best(trees: Iterable[ast.Module]) -> list[KeptBest]:
    """Return what scripts keep the best of: `if val_acc > best_acc`, `best = min(best, val_loss)`, and what early
    stopping and checkpoints monitor; and whether a number in the last printed line should be large."""
    found: list[KeptBest] = []
    for index, tree in enumerate(trees):
        if index == 0 and (goal := _goal_of_last_print(tree)) is not None:
            found.append(KeptBest(frozenset(words_of(LAST_LINE)), goal))
        found += _first_of_metrics(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and len(node.ops) == 1:
                found += _compared(node.left, node.ops[0], node.comparators[0])
            elif isinstance(node, ast.Call):
                found += _called(node)
            elif isinstance(node, ast.Assign):
                found += _evaluated(node)
            for name, value in _named_texts(node):
                if MONITORS.search(name):
                    found.append(KeptBest(frozenset(_result_words(value)), None))
    return found


def kept_in_config(settings: Mapping[str, Any]) -> list[KeptBest]:
    """Return the metrics that a config names as those that count: `monitor: min val_loss`.

    Args:
        settings: The values of a config by dotted name.
    """
    found: list[KeptBest] = []
    for name, value in settings.items():
        if MONITORS.search(name.rpartition(".")[2]) and isinstance(value, str):
            first, _, rest = value.partition(" ")
            goal: Goal | None = first if first in ("min", "max") and rest else None  # type: ignore[assignment]
            if words := frozenset(_result_words(rest if goal else value)) - {"off", "none"}:
                found.append(KeptBest(words, goal))
    return found


def _first_of_metrics(tree: ast.Module) -> list[KeptBest]:
    """Return the metric that early stopping looks at if a script has several: with LightGBM's `first_metric_only`."""
    stops = calls(tree, "early_stopping", "LGBMClassifier", "LGBMRegressor", "train")
    if not any(constant(keyword(call, "first_metric_only")) is True for call in stops):
        return []
    pairs: list[tuple[Any, ast.expr]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            pairs += [(constant(key), value) for key, value in zip(node.keys, node.values, strict=True)]
        elif isinstance(node, ast.Call):
            pairs += [(item.arg, item.value) for item in node.keywords]
    for name, value in pairs:
        metrics = constant(value)
        if name in ("metric", "eval_metric") and isinstance(metrics, list) and metrics and isinstance(metrics[0], str):
            return [KeptBest(frozenset(_result_words(metrics[0])), None)]
    return []


MONITORS = re.compile(
    r"(?i)monitor|(?:best|main|primary|target|key|selection|early_stop\w*|stopping|checkpoint)[-_]?metric"
    r"|metric[-_](?:for|to)[-_]|selection[-_]criterion"
)
"""Names of settings that hold the name of the metric that counts."""


def _named_texts(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the texts that have a name: in a variable, a table, a default, or an option."""
    pairs: list[tuple[Any, ast.expr | None]] = []
    if isinstance(node, ast.Assign | ast.AnnAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        pairs = [(getattr(target, "id", getattr(target, "attr", None)), node.value)]
    elif isinstance(node, ast.Dict):
        pairs = [(constant(key), value) for key, value in zip(node.keys, node.values, strict=True)]
    elif isinstance(node, ast.arguments):
        last = node.args[len(node.args) - len(node.defaults) :]
        pairs = [(parameter.arg, default) for parameter, default in zip(last, node.defaults, strict=True)]
    elif isinstance(node, ast.Call) and node.args and isinstance(flag := constant(node.args[0]), str):
        pairs = [(flag, keyword(node, "default"))]
    for name, value in pairs:
        text = constant(value)
        if isinstance(name, str) and isinstance(text, str) and text:
            yield name, text


def _goal_of_last_print(tree: ast.Module) -> Goal | None:
    """Return the goal of what a script prints last, `print(scores.mean())`; None: its names do not tell."""
    prints = [call for call in calls(tree, "print") if len(call.args) == 1]
    if not prints:
        return None
    printed = prints[-1].args[0]
    names = {node.id for node in ast.walk(printed) if isinstance(node, ast.Name)}
    bound = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
    ]
    for node in (item for expression in (printed, *bound) for item in ast.walk(expression)):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        words = [SHORT.get(word, word) for word in words_of(name)]
        if (RESULTS - NOT_RESULTS) & set(words):
            return Directions().goal("_".join(words))
    return None


def _compared(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> list[KeptBest]:
    larger = isinstance(operator, ast.Gt | ast.GtE)
    if not (larger or isinstance(operator, ast.Lt | ast.LtE)):
        return []
    left_words, right_words = _named(left), _named(right)
    if ("best" in left_words) == ("best" in right_words):
        return []
    goal: Goal = "max" if larger == ("best" in right_words) else "min"
    return [KeptBest(words, goal) for side in (left_words, right_words) if (words := side - {"best", "previous"})]


def _evaluated(node: ast.Assign) -> list[KeptBest]:
    """Return the results that a function named after evaluation returns."""
    if not isinstance(node.value, ast.Call) or not {"evaluate", "evaluation"} & set(words_of(call_name(node.value))):
        return []
    target = node.targets[0]
    names = [_named(item) for item in (target.elts if isinstance(target, ast.Tuple) else [target])]
    results = [words for words in names if words & RESULTS - OPTIMISED and not words & NOT_RESULTS]
    return [KeptBest(words, None, is_evaluation=True) for words in results]


def _called(call: ast.Call) -> list[KeptBest]:
    name = call_name(call).rpartition(".")[2]
    if name in ("min", "max") and len(call.args) == 2:
        sides = [_named(argument) for argument in call.args]
        if sum("best" in side for side in sides) == 1:
            return [KeptBest(words, name) for side in sides if (words := side - {"best"})]  # type: ignore[arg-type]
    given = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
    metric = given.get("monitor") or given.get("metric_for_best_model")
    goal: Goal | None = None
    if given.get("mode") in ("min", "max"):
        goal = given["mode"]  # type: ignore[assignment]
    if isinstance(metric, str):
        return [KeptBest(frozenset(_result_words(metric)), goal)]
    direction = str(given.get("direction", ""))
    if direction in ("maximize", "minimize"):
        return [KeptBest(frozenset({"value"}), "max" if direction == "maximize" else "min")]
    return []


def _named(node: ast.expr) -> frozenset[str]:
    """Return the words of a variable, an attribute, or a subscript with a text."""
    if isinstance(node, ast.Name):
        return frozenset(_result_words(node.id))
    if isinstance(node, ast.Attribute):
        return frozenset(_result_words(node.attr))
    if isinstance(node, ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return _named(node.value) | (frozenset(_result_words(key)) if isinstance(key, str) else frozenset())
    if isinstance(node, ast.Call):
        return frozenset(_result_words(call_name(node).rpartition(".")[2]))
    return frozenset()
