"""Epochs of training until a target is reached: looplab's search with rungs beside other tools.

    python benchmarks/fidelity.py [--quick] [--trainings tuning|untouched|all] [--seeds N] [--only TRAINING …]
                                  [--ways WAY …] [--keep FILE] [--minutes M]

Real trainings of 27 epochs (scikit-learn with partial fits, torch), one run at a time. The target of each is the best
value, at any epoch, of 30 whole trainings of random configs. Compared are the epochs that a way trains until a run
shows that value; a way that has not reached it after 40 times 27 epochs counts with those. The value of a run is the
best one so far, for all ways. Settings of looplab were chosen on the TUNING trainings, with seeds below 100; nobody
looks at those of UNTOUCHED to choose a setting, and the figures of the last line are of these alone, with seeds from
7000 on (with `--quick`, of two tuning trainings).

With `--keep FILE`, finished studies and targets are kept there and not done again, and with `--minutes M` no study is
started after so long, so that a long comparison can be made in pieces. Seeds come first; compared are the seeds that
all ways have. Remove the lines of `looplab` when the search changes.

- `looplab`: `search: {fidelity: true}`: the model over curves and knobs. Proposers are the real ones, on a real ledger
  and run folders; only the process in which a run trains is left out. A run that is stopped stays in memory, as exact
  as a checkpoint, and a continuation begins there; so an epoch is counted once.
- `asha`: the same search with `scheduler: asha`, continued in the same way.
- `pruned`: the search with the watch rule `{prune: {pruner: asha}}`: runs are stopped and never continued.
- `whole`: the search alone.
- `optuna_hyperband`: Optuna's TPESampler with its HyperbandPruner, `report` and `should_prune`.
- `ray_asha`: Ray Tune's ASHAScheduler with its default search, random draws, in an environment of its own.
- `ray_bohb`: Ray Tune's TuneBOHB with HyperBandForBOHB, which continues what it has paused, in an environment of its
  own with the old packages that hpbandster works with.

Rungs are at 1, 3, 9 and 27 epochs for all. A ratio is the geometric mean, over the trainings, of the ratio of mean
epochs; its interval is from drawing trainings and seeds again. `best_peer` is the best one of the other tools on each
training, known in hindsight. Population-based training is not compared: it changes knobs during a training, and half of
these knobs (widths, activations, solvers) cannot be changed then.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import json
import math
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import decide
import decide_problems
from decide_problems import Config, Knobs, Problem, data, from_unit, subset
from looplab.config.lab import FidelityConfig, PruneConfig
from looplab.decide.fidelity import FidelityProposer
from looplab.decide.history import STOPPED_AT_RUNG
from looplab.ledger.roles import Role
from looplab.watch.pruner import Pruner

EPOCHS = 27
POOL = 30
"""Random configs, trained to the end, whose best value is the target."""
BUDGET = 40 * EPOCHS
FIRST_SEED = 7000
QUICK = {"linear": 0.06510851419031716, "perceptron": 0.0438061745638221}
"""Trainings of --quick with their targets, as they were found, so that it does not begin with 60 whole trainings."""
QUICK_WAYS = ("looplab", "optuna_hyperband")
QUICK_MINUTES = 0.6
decide.PACKAGES["ray_asha"] = ["ray[tune]"]
decide.PACKAGES["ray_bohb"] = [
    "ray[tune]", "hpbandster", "ConfigSpace<1", "numpy<2", "scipy<1.14", "statsmodels<0.15", "pandas<2.3", "pyarrow<20",
]  # fmt: skip


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
TUNING = tuple(TRAININGS)


# -- trainings that no setting was chosen on


def torch_batches(x: Any, y: Any, size: int) -> Iterator[tuple[Any, Any]]:
    import torch

    for rows in torch.randperm(len(x)).split(size):
        yield x[rows], y[rows]


def torch_loop(model: Any, config: Config, parts: Any, loss_of: Any) -> Iterator[float]:
    """Train a network with Adam or SGD; yield the loss on the held-out part after each epoch."""
    import torch

    x, y, held, labels = parts
    if config["optimizer"] == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"])
    else:
        optimizer = torch.optim.SGD(
            model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"], momentum=0.9
        )
    for _ in range(EPOCHS):
        model.train()
        for inputs, wanted in torch_batches(x, y, config["batch"]):
            optimizer.zero_grad()
            loss_of(model(inputs), wanted).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = float(loss_of(model(held), labels))
        yield loss


def tensors(name: str, seed: int) -> list[Any]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return [torch.as_tensor(np.asarray(part), dtype=torch.float32) for part in data(name)]


@quietly
def autoencoder(config: Config, seed: int) -> Iterator[float]:
    """An autoencoder of the digits; its squared error."""
    from torch import nn

    x, _, held, _ = tensors("digits", seed)
    wide, code = config["width"], config["code"]
    activation = {"relu": nn.ReLU, "tanh": nn.Tanh, "elu": nn.ELU}[config["activation"]]
    model = nn.Sequential(
        nn.Linear(64, wide), activation(), nn.Linear(wide, code), nn.Linear(code, wide), activation(),
        nn.Linear(wide, 64),
    )  # fmt: skip
    yield from torch_loop(model, config, (x, x, held, held), nn.MSELoss())


@quietly
def recurrent(config: Config, seed: int) -> Iterator[float]:
    """A GRU that reads the digits row by row; its cross-entropy."""
    import torch
    from torch import nn

    x, y, held, labels = tensors("digits", seed)

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(8, config["width"], batch_first=True)
            self.dropout = nn.Dropout(config["dropout"])
            self.out = nn.Linear(config["width"], 10)

        def forward(self, rows: Any) -> Any:
            return self.out(self.dropout(self.gru(rows.view(-1, 8, 8))[0][:, -1]))

    yield from torch_loop(Rows(), config, (x, y.to(torch.int64), held, labels.to(torch.int64)), nn.CrossEntropyLoss())


@quietly
def wine(config: Config, seed: int) -> Iterator[float]:
    """A network of scikit-learn on the wine data; its log loss."""
    from sklearn.metrics import log_loss
    from sklearn.neural_network import MLPClassifier

    x, y, held, labels = data("wine")
    width = config["width"]
    options = {name: value for name, value in config.items() if name != "width"}
    model = MLPClassifier(random_state=seed, hidden_layer_sizes=(width,), **options)
    for _ in range(EPOCHS):
        model.partial_fit(x, y, classes=[0, 1, 2])
        yield float(log_loss(labels, np.clip(model.predict_proba(held), 1e-3, 1 - 1e-3), labels=[0, 1, 2]))


@quietly
def robust(config: Config, seed: int) -> Iterator[float]:
    """A linear regression by SGD with squared features on the diabetes data; its absolute error."""
    from sklearn.linear_model import SGDRegressor

    x, y, held, labels = data("diabetes")
    mean, sd = y.mean(), y.std()
    x, held = (np.hstack([part, part**2]) for part in (x, held))
    model = SGDRegressor(random_state=seed, **config)
    for _ in range(EPOCHS):
        model.partial_fit(x, (y - mean) / sd)
        yield float(np.abs(model.predict(held) - (labels - mean) / sd).mean())


@quietly
def trees(config: Config, seed: int) -> Iterator[float]:
    """Gradient boosting of the breast cancer data; an epoch is two trees; its log loss."""
    from sklearn.ensemble import GradientBoostingClassifier
    from sklearn.metrics import log_loss

    x, y, held, labels = data("breast_cancer")
    model = GradientBoostingClassifier(random_state=seed, warm_start=True, **config)
    for epoch in range(1, EPOCHS + 1):
        model.set_params(n_estimators=2 * epoch).fit(x, y)
        yield float(log_loss(labels, np.clip(model.predict_proba(held), 1e-3, 1 - 1e-3)))


TORCH_KNOBS: Knobs = {
    "optimizer": {"choices": ["adam", "sgd"]},
    "lr": {"type": "float", "low": 1e-5, "high": 1.0, "log": True},
    "weight_decay": {"type": "float", "low": 1e-7, "high": 1e-1, "log": True},
    "batch": {"type": "int", "low": 16, "high": 256, "log": True},
    "width": {"type": "int", "low": 8, "high": 96, "log": True},
}
UNTOUCHED: dict[str, Training] = {
    "autoencoder": Training(
        {
            **TORCH_KNOBS,
            "code": {"type": "int", "low": 2, "high": 16},
            "activation": {"choices": ["relu", "tanh", "elu"]},
        },
        autoencoder,
    ),
    "recurrent": Training({**TORCH_KNOBS, "dropout": {"type": "float", "low": 0.0, "high": 0.7}}, recurrent),
    "wine": Training(SK_NETWORK, wine),
    "robust": Training(
        {
            "loss": {"choices": ["squared_error", "huber", "epsilon_insensitive"]},
            "penalty": {"choices": ["l2", "l1"]},
            "alpha": {"type": "float", "low": 1e-7, "high": 1.0, "log": True},
            "learning_rate": {"choices": ["constant", "invscaling", "adaptive"]},
            "eta0": {"type": "float", "low": 1e-5, "high": 1.0, "log": True},
            "average": {"choices": [False, True]},
        },
        robust,
    ),
    "trees": Training(
        {
            "learning_rate": {"type": "float", "low": 1e-3, "high": 1.0, "log": True},
            "max_depth": {"type": "int", "low": 1, "high": 6},
            "subsample": {"type": "float", "low": 0.2, "high": 1.0},
            "min_samples_leaf": {"type": "int", "low": 1, "high": 60},
            "max_features": {"type": "float", "low": 0.1, "high": 1.0},
        },
        trees,
    ),
}
TRAININGS |= UNTOUCHED


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
        """Yield the best value so far after each epoch, as with a trainer that keeps its best weights."""
        self._runs += 1
        best = math.inf
        for value in self._curve(config, random.Random(f"{self._seed} {self._runs}").randrange(10**6)):
            self.epochs += 1
            best = min(best, value)
            if best <= self._goal or self.epochs >= BUDGET:
                raise Reached
            yield best


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


class RungLab(decide.Lab):
    """A study whose runs are stopped at rungs and continued exactly where they were stopped."""

    def __init__(self, problem: Problem, root: Path, seed: int, counter: Counter, settings: FidelityConfig) -> None:
        super().__init__(problem, root, seed)
        self._counter = counter
        self._trainings: dict[str, tuple[Iterator[float], list[float]]] = {}  # by the last run of each
        self.proposer = FidelityProposer(settings, self.search(), self.history, goal="min", can_continue=True)

    def drive_epochs(self) -> None:
        """Propose and train until the counter has enough."""
        until: float | None = None
        self._train_until(*self._plan(self.base, None, "base", None, Role.BASE), until)
        while True:
            with self.ledger.write():
                (proposal,) = self.proposer.propose(self.study, 1)
                number = self.study.propose(
                    proposal.proposer, proposal.edits, proposal.reason, parent=proposal.parent, source=proposal.source
                )
            assert number is not None, proposal
            if proposal.continues:
                assert proposal.parent is not None
                config, role = self._config(proposal.parent), Role.CONTINUATION
            else:
                ruling = self.guard.check(self.base, proposal.edits)
                assert ruling.config is not None
                config, role = ruling.config, Role.TRIAL
            run, config = self._plan(config, number, proposal.proposer, proposal.parent, role)
            if proposal.continues:
                self._trainings[run] = self._trainings.pop(proposal.parent or "")
            self._train_until(run, config, proposal.until)

    def _train_until(self, run: str, config: Config, until: float | None) -> None:
        if run not in self._trainings:
            self._trainings[run] = self._counter.train(config), []
        values, curve = self._trainings[run]
        status = "failed"
        for value in values:
            curve.append(value)
            if len(curve) == EPOCHS or (until is not None and len(curve) >= until - 1e-6):
                status = "ok" if len(curve) == EPOCHS else "stopped"
                break
        record = self.outputs / run / "record"
        record.mkdir(parents=True)
        (record / "run.json").write_text("{}")
        steps = [2**i for i in range(10) if 2**i < len(curve)]
        sparse = [(step, curve[step - 1]) for step in [*steps, len(curve)]] if curve else []
        about = {
            "metrics": {"loss": decide.summary(curve)} if curve else {}, "steps": len(curve), "curve": sparse,
            "objective": {"metric": "loss", "at": "last"},
            "reason": STOPPED_AT_RUNG if status == "stopped" else None,
        }  # fmt: skip
        (record / "summary.json").write_text(json.dumps(about))
        with self.ledger.write():
            now = time.time()
            self.study.ended(
                run, status=status, code=int(status == "failed"), signal=None, started=now, ended=now,
                objective=curve[-1] if status == "ok" else None, files={},
            )  # fmt: skip


def by_rungs(name: str, root: Path, seed: int, counter: Counter, **settings: Any) -> None:
    lab = RungLab(TRAININGS[name].problem(name), root, seed, counter, FidelityConfig(**settings))
    try:
        lab.drive_epochs()
    finally:
        lab.close()


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
    trainings: dict[str, tuple[Iterator[float], int]] = {}  # those that may be continued
    try:
        while True:
            trial, point = peer.start()
            values, begun = trainings.pop(trial, None) or (counter.train(problem.config(point)), 0)
            last = None
            for n, value in enumerate(values, begun + 1):
                if n == EPOCHS or peer.report(n, value):
                    last, trainings[trial] = value, (values, n)
                    break
            peer.tell([(last, True)])
    finally:
        peer.close()


WAYS: dict[str, Callable[[str, Path, int, Counter], None]] = {
    "looplab": by_rungs,
    "asha": partial(by_rungs, scheduler="asha"),
    "pruned": partial(by_looplab, prune=True),
    "whole": partial(by_looplab, prune=False),
    "optuna_hyperband": partial(by_peer, "optuna_hyperband"),
    "ray_asha": partial(by_peer, "ray_asha"),
    "ray_bohb": partial(by_peer, "ray_bohb"),
}
PEERS = ("optuna_hyperband", "ray_asha", "ray_bohb")


def epochs_to_target(name: str, way: str, seed: int, goal: float) -> int:
    counter = Counter(name, seed, goal)
    root = Path(tempfile.mkdtemp(prefix="looplab-bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        WAYS[way](name, root, seed, counter)
    except Reached:
        pass
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return counter.epochs


def ratio(epochs: dict[str, dict[str, list[float]]], way: str, other: Callable[[str], str]) -> decide.Ratio:
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
    parser.add_argument("--quick", action="store_true", help="two trainings of TUNING, two ways, half a minute")
    parser.add_argument("--seeds", type=int, default=0, metavar="N", help="default: 10")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, metavar="N")
    parser.add_argument("--trainings", choices=["tuning", "untouched", "all"], default="untouched")
    parser.add_argument("--only", nargs="*", default=[], choices=list(TRAININGS), metavar="TRAINING")
    parser.add_argument("--ways", nargs="*", default=[], choices=list(WAYS), metavar="WAY")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="of finished studies, which are not done again")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="start no study after so long")
    options = parser.parse_args()
    began = time.time()
    until = began + 60 * min(options.minutes, QUICK_MINUTES if options.quick else math.inf)
    seeds = options.seeds or (3 if options.quick else 10)
    groups = {"tuning": TUNING, "untouched": tuple(UNTOUCHED), "all": tuple(TRAININGS)}
    names = options.only or (tuple(QUICK) if options.quick else groups[options.trainings])
    ways, left_out = list(options.ways or (QUICK_WAYS if options.quick else WAYS)), {}
    for way in [way for way in ways if way in decide.PACKAGES]:
        why = decide.prepare(way, make=not options.quick)
        if why is not None:
            left_out[way] = why
            ways.remove(way)
            print(f"{way} is left out: {why}", flush=True)
    kept = Kept(options.keep)
    tasks = list(itertools.product(range(options.first_seed, options.first_seed + seeds), names, ways))
    done = 0
    for seed, name, way in tasks:
        if time.time() > until:
            break
        goal = kept.get(
            f"{name}/target", partial(QUICK.__getitem__ if options.quick and name in QUICK else target, name)
        )
        kept.get(f"{name}/{way}/{seed}", partial(epochs_to_target, name, way, seed, goal))
        done += 1
    epochs: dict[str, dict[str, list[float]]] = {}
    for name in names:  # compared on the seeds that all ways have
        whole = [seed for seed in dict.fromkeys(task[0] for task in tasks)
                 if all(f"{name}/{way}/{seed}" in kept.values for way in ways)]  # fmt: skip
        if whole:
            epochs[name] = {way: [kept.values[f"{name}/{way}/{seed}"] for seed in whole] for way in ways}
    print(f"{done} of {len(tasks)} studies")
    print(f"{'mean epochs until':20} {'target':>9} {'seeds':>5} " + " ".join(f"{way:>16}" for way in ways))
    for name, by_way in epochs.items():
        cells = " ".join(f"{statistics.fmean(by_way[way]):16.0f}" for way in ways)
        split = "untouched" if name in UNTOUCHED else "tuning"
        print(f"{name:20} {kept.values[f'{name}/target']:9.4g} {len(by_way[ways[0]]):5} {cells}  {split}", flush=True)
    found: dict[str, Any] = {}
    for split, chosen in (("", UNTOUCHED), ("_tuning", TUNING)):
        part = {name: by_way for name, by_way in epochs.items() if name in chosen}
        found |= figures(part, ways, "" if options.quick else split)
    print(json.dumps({
        **found, "trainings": len(epochs), "untouched": sum(name in UNTOUCHED for name in epochs), "seeds": seeds,
        "studies": done, "of_studies": len(tasks), "left_out": left_out, "seconds": round(time.time() - began),
    }))  # fmt: skip


def figures(epochs: dict[str, dict[str, list[float]]], ways: Sequence[str], suffix: str) -> dict[str, Any]:
    """Print and return the ratios of looplab to the other ways; `suffix`: the end of each name."""
    found: dict[str, Any] = {}
    peers = [way for way in ways if way in PEERS]
    if "looplab" not in ways or not epochs:
        return found
    others: dict[str, Callable[[str], str]] = {way: lambda _, way=way: way for way in ways if way != "looplab"}
    if peers:
        best = {name: min(peers, key=lambda way: statistics.fmean(by_way[way])) for name, by_way in epochs.items()}
        others = {"best_peer": best.__getitem__, **others}
    for label, other in others.items():
        one = ratio(epochs, "looplab", other)
        print(f"epochs of looplab : {label} {one} ({one.problems} trainings{suffix.replace('_', ', ')})")
        found[f"epochs_x_{label}{suffix}"] = round(one.value, 3)
        found[f"epochs_x_{label}{suffix}_95"] = one.interval and [round(end, 3) for end in one.interval]
    return found


class Kept:
    """Numbers by name; in a file, one a line, if there is one."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.values: dict[str, float] = {}
        for line in file.read_text().splitlines() if file is not None and file.exists() else ():
            self.values.update(json.loads(line))

    def get(self, name: str, make: Callable[[], float]) -> float:
        if name not in self.values:
            self.values[name] = make()
            if self._file is not None:
                with self._file.open("a") as out:
                    out.write(json.dumps({name: self.values[name]}) + "\n")
        return self.values[name]


if __name__ == "__main__":
    main()
