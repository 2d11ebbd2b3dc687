"""Epochs of training until a target is reached: looplab's search with an early-stopping rule beside two other tools.

    python benchmarks/fidelity.py [--quick] [--seeds N] [--only TRAINING …] [--ways WAY …] [--keep FILE]

Six real trainings of 27 epochs (scikit-learn with partial fits, torch), one run at a time. The target of each is the
best value, at any epoch, of 30 whole trainings of random configs. Compared are the epochs that a way trains until a run
shows that value; a way that has not reached it after 40 times 27 epochs counts with those.

- `looplab`: the default search with the watch rule `{prune: {pruner: asha}}`, as it is today. Its proposer and pruner
  are the real ones, on a real ledger and run folders; only the process in which a run trains is left out, so that a
  pruner sees every epoch in time. A run that is stopped is recorded as the engine does it: without an objective, with
  its metrics. No run continues from a checkpoint, and the search does not learn from parts of curves.
- `whole`: the same search without the rule.
- `optuna_hyperband`: Optuna's TPESampler with its HyperbandPruner, `report` and `should_prune`.
- `ray_asha`: Ray Tune's ASHAScheduler with its default search, random draws, in an environment of its own.

Rungs are at 1, 3, 9 and 27 epochs for all. A ratio is the geometric mean, over the trainings, of the ratio of mean
epochs; its interval is from drawing trainings and seeds again. `best_peer` is the better one of the other tools on each
training, known in hindsight. BOHB and population-based training are not compared yet.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import decide
import decide_problems
from decide_problems import Config, Knobs, Problem, data, from_unit, subset
from looplab.config.lab import PruneConfig
from looplab.watch.pruner import Pruner

EPOCHS = 27
POOL = 30
"""Random configs, trained to the end, whose best value is the target."""
BUDGET = 40 * EPOCHS
FIRST_SEED = 7000
QUICK = ("linear", "boosting", "perceptron")
decide.PACKAGES["ray_asha"] = ["ray[tune]"]


@dataclass(frozen=True)
class Training:
    """A training that shows its value after every epoch."""

    knobs: Knobs
    curve: Callable[[Config, int], Iterator[float]]
    """Yields the loss after each epoch; ends early if the run crashes."""

    def problem(self, name: str) -> Problem:
        return Problem(name=name, knobs=self.knobs, measure=lambda config, luck: None, truth=lambda config: 0.0, best=0)


def quietly(curve: Callable[[Config, int], Iterator[float]]) -> Callable[[Config, int], Iterator[float]]:
    """Silence the warnings of scikit-learn about short and diverging trainings; end where the loss is not finite."""

    def quiet(config: Config, seed: int) -> Iterator[float]:
        values = curve(config, seed)
        while True:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                try:
                    value = next(values, math.nan)
                except ValueError:  # scikit-learn's answer to weights that are not finite
                    return
            if not math.isfinite(value):
                return
            yield value

    return quiet


@quietly
def linear(config: Config, seed: int) -> Iterator[float]:
    from sklearn.linear_model import SGDClassifier

    x, y, held, labels = data("digits")
    rows = subset(len(x), 400, seed)
    model = SGDClassifier(random_state=seed, **config)
    for _ in range(EPOCHS):
        model.partial_fit(x[rows], y[rows], classes=range(10))
        yield 1.0 - float(model.score(held, labels))


@quietly
def perceptron(config: Config, seed: int) -> Iterator[float]:
    """A network of scikit-learn on the breast cancer data; its log loss."""
    from sklearn.metrics import log_loss
    from sklearn.neural_network import MLPClassifier

    x, y, held, labels = data("breast_cancer")
    width = config["width"]
    options = {name: value for name, value in config.items() if name != "width"}
    model = MLPClassifier(random_state=seed, hidden_layer_sizes=(width,), **options)
    for _ in range(EPOCHS):
        model.partial_fit(x, y, classes=[0, 1])
        yield float(log_loss(labels, np.clip(model.predict_proba(held), 1e-3, 1 - 1e-3)))


@quietly
def regression(config: Config, seed: int) -> Iterator[float]:
    """A network of scikit-learn on the diabetes data; its root mean square error in standard deviations."""
    from sklearn.neural_network import MLPRegressor

    x, y, held, labels = data("diabetes")
    mean, sd = y.mean(), y.std()
    width = config["width"]
    options = {name: value for name, value in config.items() if name != "width"}
    model = MLPRegressor(random_state=seed, hidden_layer_sizes=(width,), **options)
    for _ in range(EPOCHS):
        model.partial_fit(x, (y - mean) / sd)
        yield float(np.sqrt(np.mean((model.predict(held) - (labels - mean) / sd) ** 2)))


@quietly
def boosting(config: Config, seed: int) -> Iterator[float]:
    """Gradient boosting on the diabetes data; an epoch is four trees."""
    from sklearn.ensemble import GradientBoostingRegressor

    x, y, held, labels = data("diabetes")
    model = GradientBoostingRegressor(random_state=seed, warm_start=True, **config)
    for epoch in range(1, EPOCHS + 1):
        model.set_params(n_estimators=4 * epoch).fit(x, y)
        yield float(np.sqrt(np.mean((model.predict(held) - labels) ** 2)))


SK_NETWORK: Knobs = {
    "width": {"type": "int", "low": 2, "high": 64, "log": True},
    "activation": {"choices": ["relu", "tanh", "logistic"]},
    "solver": {"choices": ["sgd", "adam"]},
    "alpha": {"type": "float", "low": 1e-7, "high": 10.0, "log": True},
    "learning_rate_init": {"type": "float", "low": 1e-5, "high": 1.0, "log": True},
    "batch_size": {"type": "int", "low": 8, "high": 128, "log": True},
    "momentum": {"type": "float", "low": 0.0, "high": 0.99},
}
TRAININGS: dict[str, Training] = {
    "linear": Training(
        {
            "loss": {"choices": ["hinge", "log_loss", "modified_huber"]},
            "penalty": {"choices": ["l2", "l1"]},
            "alpha": {"type": "float", "low": 1e-7, "high": 1.0, "log": True},
            "learning_rate": {"choices": ["constant", "invscaling"]},
            "eta0": {"type": "float", "low": 1e-5, "high": 10.0, "log": True},
            "power_t": {"type": "float", "low": 0.0, "high": 1.0},
            "average": {"choices": [False, True]},
        },
        linear,
    ),
    "perceptron": Training(SK_NETWORK, perceptron),
    "regression": Training(SK_NETWORK, regression),
    "boosting": Training(
        {
            "learning_rate": {"type": "float", "low": 1e-3, "high": 1.0, "log": True},
            "max_depth": {"type": "int", "low": 1, "high": 6},
            "subsample": {"type": "float", "low": 0.2, "high": 1.0},
            "min_samples_leaf": {"type": "int", "low": 1, "high": 60},
            "max_features": {"type": "float", "low": 0.1, "high": 1.0},
        },
        boosting,
    ),
    "mlp": Training(
        decide_problems.MLP_KNOBS, partial(decide_problems.torch_curve, decide_problems.make_mlp, epochs=EPOCHS)
    ),
    "cnn": Training(
        decide_problems.CNN_KNOBS, partial(decide_problems.torch_curve, decide_problems.make_cnn, epochs=EPOCHS)
    ),
}


@cache
def target(name: str) -> float:
    training = TRAININGS[name]
    best = math.inf
    for i in range(POOL):
        rng = random.Random(f"pool {i}")
        config = {path: from_unit(spec, rng.random()) for path, spec in training.knobs.items()}
        best = min([best, *training.curve(config, 10**6 + i)])
    return best


class Reached(Exception):
    """The target was reached, or the budget is used."""


class Counter:
    """Trains and counts epochs."""

    def __init__(self, name: str, seed: int, goal: float) -> None:
        self._curve = TRAININGS[name].curve
        self._seed, self._goal = seed, goal
        self.epochs = 0
        self._runs = 0

    def train(self, config: Config) -> Iterator[float]:
        self._runs += 1
        for value in self._curve(config, random.Random(f"{self._seed} {self._runs}").randrange(10**6)):
            self.epochs += 1
            if value <= self._goal or self.epochs >= BUDGET:
                raise Reached
            yield value


class PrunedLab(decide.Lab):
    """A study whose runs are watched by a pruner; None: by none."""

    def __init__(self, problem: Problem, root: Path, seed: int, counter: Counter, pruner: Pruner | None) -> None:
        super().__init__(problem, root, seed)
        self._counter, self._pruner = counter, pruner

    def train(self, run: str, config: Config) -> tuple[str, list[float]]:
        curve: list[float] = []
        status = "failed"
        for value in self._counter.train(config):
            curve.append(value)
            steps = [float(step) for step in range(1, len(curve) + 1)]
            if len(curve) == EPOCHS:
                status = "ok"
            elif self._pruner is not None and self._pruner.prune_reason(run, steps, curve):
                status = "stopped"
                break
        if self._pruner is not None:
            steps = [float(step) for step in range(1, len(curve) + 1)]
            self._pruner.ended(run, steps, curve, curve[-1] if status == "ok" else None)
        return status, curve


def by_looplab(name: str, root: Path, seed: int, counter: Counter, *, prune: bool) -> None:
    pruner = Pruner(PruneConfig(pruner="asha"), "min") if prune else None
    lab = PrunedLab(TRAININGS[name].problem(name), root, seed, counter, pruner)
    try:
        lab.drive(lab.search(), BUDGET, 1)
    finally:
        lab.close()


def by_peer(peer_name: str, name: str, root: Path, seed: int, counter: Counter) -> None:
    problem = TRAININGS[name].problem(name)
    kind = decide.InEnvironment if peer_name in decide.PACKAGES else decide.InProcess
    peer = kind(peer_name, space=problem.space(), seed=seed, runs=BUDGET, batch=1, epochs=EPOCHS)
    try:
        while True:
            (point,) = peer.ask(1)
            last, n = None, 0
            for n, last in enumerate(counter.train(problem.config(point)), 1):
                if n < EPOCHS and peer.report(n, last):
                    break
            else:
                last = last if n == EPOCHS else None
            peer.tell([(last, True)])
    finally:
        peer.close()


WAYS: dict[str, Callable[[str, Path, int, Counter], None]] = {
    "looplab": partial(by_looplab, prune=True),
    "whole": partial(by_looplab, prune=False),
    "optuna_hyperband": partial(by_peer, "optuna_hyperband"),
    "ray_asha": partial(by_peer, "ray_asha"),
}
PEERS = ("optuna_hyperband", "ray_asha")


def epochs_to_target(name: str, way: str, seed: int) -> int:
    counter = Counter(name, seed, target(name))
    root = Path(tempfile.mkdtemp(prefix="looplab-bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        WAYS[way](name, root, seed, counter)
    except Reached:
        pass
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return counter.epochs


def ratio(epochs: dict[str, dict[str, list[int]]], way: str, other: Callable[[str], str]) -> decide.Ratio:
    """Return the ratio of two ways; `epochs`: training → way → the epochs of each seed."""
    rng = np.random.default_rng(0)
    values, drawn = [], []
    for name, ways in epochs.items():
        pair = np.array([ways[way], ways[other(name)]], dtype=float)
        values.append(math.log(pair[0].mean() / pair[1].mean()))
        n = pair.shape[1]
        means = pair[:, rng.integers(n, size=(1000, n))].mean(axis=-1)
        drawn.append(np.log(means[0] / means[1]))
    rows = rng.integers(len(drawn), size=(len(drawn), 1000))
    low, high = np.exp(np.quantile(np.array(drawn)[rows, np.arange(1000)].mean(axis=0), [0.025, 0.975]))
    few = min(len(seeds) for ways in epochs.values() for seeds in ways.values()) < 3
    interval = None if few else (float(low), float(high))
    return decide.Ratio(math.exp(statistics.fmean(values)), interval, len(epochs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three trainings, two seeds")
    parser.add_argument("--seeds", type=int, default=0, metavar="N", help="default: 10")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, metavar="N")
    parser.add_argument("--only", nargs="*", default=[], choices=list(TRAININGS), metavar="TRAINING")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--keep", type=Path, metavar="FILE")
    options = parser.parse_args()
    began = time.time()
    seeds = options.seeds or (2 if options.quick else 10)
    names = options.only or (QUICK if options.quick else list(TRAININGS))
    ways, left_out = list(options.ways), {}
    if "ray_asha" in ways:
        why = decide.prepare("ray_asha", make=not options.quick)
        if why is not None:
            left_out["ray_asha"] = why
            ways.remove("ray_asha")
            print(f"ray_asha is left out: {why}", flush=True)
    kept: dict[str, int] = {}
    if options.keep is not None and options.keep.exists():
        for line in options.keep.read_text().splitlines():
            kept.update(json.loads(line))
    epochs: dict[str, dict[str, list[int]]] = {name: {way: [] for way in ways} for name in names}
    print(f"{'mean epochs until':20} {'target':>9} " + " ".join(f"{way:>16}" for way in ways))
    for name in names:
        for way in ways:
            for seed in range(options.first_seed, options.first_seed + seeds):
                key = f"{name}/{way}/{seed}"
                if key not in kept:
                    kept[key] = epochs_to_target(name, way, seed)
                    if options.keep is not None:
                        with options.keep.open("a") as out:
                            out.write(json.dumps({key: kept[key]}) + "\n")
                epochs[name][way].append(kept[key])
        cells = " ".join(f"{statistics.fmean(epochs[name][way]):16.0f}" for way in ways)
        print(f"{name:20} {target(name):9.4g} {cells}", flush=True)
    found: dict[str, Any] = {}
    peers = [way for way in ways if way in PEERS]
    if "looplab" in ways and peers:
        best = {name: min(peers, key=lambda way: statistics.fmean(epochs[name][way])) for name in names}
        for label, other in [("best_peer", best.__getitem__), *((way, lambda _, way=way: way) for way in ways[1:])]:
            one = ratio(epochs, "looplab", other)
            print(f"epochs of looplab : {label} {one}")
            found[f"epochs_x_{label}"] = round(one.value, 3)
            found[f"epochs_x_{label}_95"] = one.interval and [round(end, 3) for end in one.interval]
    print(json.dumps({
        **found, "trainings": len(names), "seeds": seeds, "left_out": left_out, "seconds": round(time.time() - began),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
