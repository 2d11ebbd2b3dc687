"""Which proposer finds good configs with the fewest runs, and what a proposal costs.

    python benchmarks/decide.py [--quick] [--seeds N] [--gp-seeds N] [--only PROBLEM ...] [--keep FILE]

Compared at the same number of runs: `search` (looplab's default, `auto`), `tpe` (looplab's TPE), `rules` (steps around
the best run), `mix` of rules and search, `random`, and Optuna used by itself as its documentation says: `ask` and
`tell`, its default TPESampler, `set_constraint` for the known constraint, a crash told as FAIL; on the first seeds also
Optuna's GPSampler (`optuna_gp`). A draw of Optuna that breaks the known constraint is a run like any other; how Optuna
does where such draws cost nothing is measured too. looplab's proposers are the real ones, on a real ledger, history and
run folders; only the process in which a run trains is left out. Three test functions have noise, a constraint that the
guard knows, and a region where runs crash, which nobody knows; two problems are real trainings.

Regret: the noise-free value of the run that looked best so far, minus the optimum (for trainings: the mean of three
new seeds of that config, minus the best such mean that anybody found), averaged over the second half of the runs and
over seeds. A ratio of two ways is the geometric mean, over the problems, of the ratio of these regrets; below 1 is
better. Its interval is from resampling the seeds. `mix_vs_best_single` is against the one proposer that does best over
all problems, `mix_vs_best_of_each` against the better one of each problem, known in hindsight. Settings of the search
were chosen on seeds below 100, of these same problems; nothing is measured on those. The seeds that are measured, from
6000 on, had not been looked at when the settings were chosen. Optuna's GPSampler does not learn from FAIL and draws a
point that crashed again and again: on the functions, its figures say that rather than how good its model is.

With `--keep FILE` every finished study is kept there and not done again: a long comparison can be made in pieces.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import runpy
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import optuna
import sklearn.datasets
import sklearn.ensemble

import looplab
from looplab.config.files import canonical_json
from looplab.config.lab import SearchConfig
from looplab.decide.base import Proposer
from looplab.decide.history import History
from looplab.decide.mix import Mix
from looplab.decide.rules import RulesProposer
from looplab.decide.search import SearchProposer
from looplab.guard.guard import Guard
from looplab.guard.knobs import Knob
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True)
class Problem:
    """Something to be minimised."""

    name: str
    base: dict[str, Any]
    knobs: dict[str, dict[str, Any]]
    measure: Callable[[dict[str, Any], int], float | None]
    """The value of a run of this config with this seed; None: it crashed."""
    truth: Callable[[dict[str, Any]], float]
    """The value without noise."""
    best: float | None
    """The optimum, where it is known."""
    runs: int
    constraint: str | None = None
    feasible: Callable[[dict[str, Any]], bool] = lambda config: True
    """The same constraint for Optuna."""

    def guard(self) -> Guard:
        knobs = {path: Knob.make(path, spec) for path, spec in self.knobs.items()}
        return Guard(knobs, constraints=[self.constraint] if self.constraint else [])


# -- functions


def synthetic(
    name: str,
    f: Callable[[Any], float],
    low: list[float],
    high: list[float],
    best: float,
    noise: float,
    constraint: str,
    feasible: Callable[[Any], bool],
    crashes: Callable[[Any], bool],
    runs: int,
) -> Problem:
    names = [f"x{i + 1}" for i in range(len(low))]
    start = [a + 0.8 * (b - a) for a, b in zip(low, high, strict=True)]
    if not feasible(start):
        start = [a + 0.4 * (b - a) for a, b in zip(low, high, strict=True)]

    def vector(config: dict[str, Any]) -> list[float]:
        return [config[x] for x in names]

    def measure(config: dict[str, Any], seed: int) -> float | None:
        x = vector(config)
        return None if crashes(x) else f(x) + random.Random(f"{seed}{x}").gauss(0.0, noise)

    return Problem(
        name,
        dict(zip(names, start, strict=True)),
        {x: {"type": "float", "low": a, "high": b} for x, a, b in zip(names, low, high, strict=True)},
        measure,
        lambda config: f(vector(config)),
        best,
        runs,
        constraint,
        lambda config: feasible(vector(config)),
    )


def branin(x: Any) -> float:
    a, b, c, t = 1.0, 5.1 / (4 * math.pi**2), 5 / math.pi, 1 / (8 * math.pi)
    return a * (x[1] - b * x[0] ** 2 + c * x[0] - 6) ** 2 + 10 * (1 - t) * math.cos(x[0]) + 10


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


def hartmann(x: Any) -> float:
    return float(-np.array([1.0, 1.2, 3.0, 3.2]) @ np.exp(-(_A * (np.array(x) - _P) ** 2).sum(axis=1)))


def ackley(x: Any) -> float:
    v = np.array(x)
    return float(-20 * np.exp(-0.2 * np.sqrt((v**2).mean())) - np.exp(np.cos(2 * np.pi * v).mean()) + 20 + math.e)


def functions() -> list[Problem]:
    return [
        synthetic(
            "branin", branin, [-5, 0], [10, 15], 0.397887, 1.0, "x1 + x2 <= 18",
            lambda x: x[0] + x[1] <= 18, lambda x: x[0] > 6 and x[1] < 2, 50,
        ),
        synthetic(
            "hartmann6", hartmann, [0] * 6, [1] * 6, -3.32237, 0.1, "x1 + x2 + x3 <= 1.5",
            lambda x: sum(x[:3]) <= 1.5, lambda x: (x[3] - 0.8) ** 2 + (x[4] - 0.8) ** 2 < 0.16, 60,
        ),
        synthetic(
            "ackley10", ackley, [-3] * 10, [7] * 10, 0.0, 0.2, "x1 - x2 <= 5",
            lambda x: x[0] - x[1] <= 5, lambda x: x[2] > 5 or x[3] > 5, 80,
        ),
    ]  # fmt: skip


# -- the ways to search

Trace = list[tuple[float | None, dict[str, Any]]]
"""What each run measured, and its config."""


class Lab:
    """A study without processes: what the engine does between a proposal and its end, on a real ledger and folders."""

    def __init__(self, problem: Problem, root: Path, seed: int) -> None:
        self.problem = problem
        self.seed = seed
        self.guard = problem.guard()
        self.outputs = Path(tempfile.mkdtemp(dir=root))
        self.ledger = Ledger(self.outputs / "ledger.db")
        self.study = StudyLedger(self.ledger, "bench")
        self.study.open("loss", "min")
        self.history = History(self.study, self.outputs)
        self.trace: Trace = []
        self.seconds = 0.0
        """Spent by the proposer, by the clock."""
        self.cpu_seconds = 0.0
        self.best: float | None = None

    def search(self, sampler: Any = None) -> SearchProposer:
        settings = SearchConfig(seed=self.seed) if sampler is None else SearchConfig(sampler=sampler, seed=self.seed)
        return SearchProposer(settings, self.guard, self.problem.base, "min", self.history)

    def drive(self, proposer: Proposer) -> Trace:
        with self.ledger.write():
            self.round = self.study.begin_round()
        self._run(self.problem.base, None, "base", None, "base")
        while len(self.trace) < self.problem.runs:
            began, used = time.perf_counter(), time.process_time()
            with self.ledger.write():
                proposals = proposer.propose(self.study, 1)
            self.seconds += time.perf_counter() - began
            self.cpu_seconds += time.process_time() - used
            if not proposals:
                break
            for proposal in proposals:
                parent = self._config(proposal.parent)
                with self.ledger.write():
                    number = proposal.id or self.study.propose(
                        proposal.proposer,
                        proposal.edits,
                        proposal.reason,
                        parent=proposal.parent,
                        source=proposal.source,
                    )
                    assert number is not None
                    ruling = self.guard.check(parent, proposal.edits)
                    if ruling.config is None:
                        problems = [{"rule": p.rule, "message": p.message} for p in ruling.problems]
                        self.study.reject(number, problems)
                        continue
                self._run(ruling.config, number, proposal.proposer, proposal.parent, "trial")
        self.ledger.close()
        shutil.rmtree(self.outputs)
        return self.trace

    def _config(self, run: str | None) -> dict[str, Any]:
        if run is None:
            return self.problem.base
        return next(seen.config for seen in self.history.ended() if seen.run.id == run)

    def _run(self, config: dict[str, Any], proposal: int | None, proposer: str, parent: str | None, role: str) -> None:
        with self.ledger.write():
            run = self.study.plan(
                round=self.round, proposal=proposal, proposer=proposer, parent=parent, base="base", reason="",
                config_hash=canonical_json(config).decode(), devices=1, plan=RunPlan(config), role=role,
            )  # fmt: skip
        value = self.problem.measure(config, self.seed)
        (self.outputs / run.id / "record").mkdir(parents=True)
        metrics = {} if value is None else {"loss": metric(value)}
        (self.outputs / run.id / "record/run.json").write_text("{}")
        (self.outputs / run.id / "record/summary.json").write_text(json.dumps({"metrics": metrics, "steps": 1}))
        with self.ledger.write():
            now = time.time()
            self.study.ended(
                run.id, status="failed" if value is None else "ok", code=int(value is None), signal=None, started=now,
                ended=now, objective=value, files={},
            )  # fmt: skip
            if value is not None and (self.best is None or value < self.best):
                self.best = value
                self.study.set_best(run.id, value)
        self.trace.append((value, config))


def metric(value: float) -> dict[str, Any]:
    return {
        "first": value, "last": value, "best": value, "best_step": 0, "delta": None, "pct": None, "n": 1, "nan": 0,
        "last_is_nan": False,
    }  # fmt: skip


def optuna_alone(
    problem: Problem, seed: int, storage: str | None = None, charge: bool = True, sampler: Any = None
) -> Trace:
    """Ask and tell as documented. `charge`: a draw that breaks the known constraint is a run like any other."""
    study = optuna.create_study(sampler=sampler or optuna.samplers.TPESampler(seed=seed), storage=storage)
    space = {path: optuna_distribution(spec) for path, spec in problem.knobs.items()}
    trace: Trace = []
    asked = 0
    while len(trace) < problem.runs and asked < 10 * problem.runs:
        asked += 1
        trial = study.ask(space)
        config = filled(problem.base, trial.params)
        ok = problem.feasible(config)
        if problem.constraint:
            trial.set_constraint("known", -1.0 if ok else 1.0)
        if not ok and not charge:
            study.tell(trial, 0.0)
            continue
        value = problem.measure(config, seed)
        if value is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, value)
        trace.append((value if ok else None, config))
    return trace


def optuna_distribution(spec: dict[str, Any]) -> Any:
    if "choices" in spec:
        return optuna.distributions.CategoricalDistribution(spec["choices"])
    if spec["type"] == "int":
        return optuna.distributions.IntDistribution(spec["low"], spec["high"], log=spec.get("log", False))
    return optuna.distributions.FloatDistribution(spec["low"], spec["high"], log=spec.get("log", False))


def filled(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    config = json.loads(json.dumps(base))
    for path, value in values.items():
        *parents, last = path.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
    return config


# -- trainings


def digits() -> Problem:
    """The quickstart's network, trained for a few epochs; its error on the digits to tune on."""
    recipe = Path(looplab.__file__).parent / "recipes" / "quickstart"
    base = json.loads((recipe / "configs" / "baseline.json").read_text())
    base["train"].update(epochs=5, batch_size=64)
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
    data = sklearn.datasets.load_digits()

    def measure(config: dict[str, Any], seed: int) -> float | None:
        argv, load = sys.argv, sklearn.datasets.load_digits
        with tempfile.TemporaryDirectory() as out:
            file = Path(out, "config.json")
            file.write_text(json.dumps({**config, "seed": seed}))
            sys.argv = ["train.py", "--config", str(file), "--out", out]
            sklearn.datasets.load_digits = lambda: data  # read once, not for every run
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    end = runpy.run_path(str(recipe / "train.py"))
            finally:
                sys.argv, sklearn.datasets.load_digits = argv, load
        return 1.0 - end["val_accuracy"] if math.isfinite(end["val_loss"]) else None

    return training("digits", base, knobs, measure, 40)


def boosting() -> Problem:
    """Gradient boosting on the diabetes data; its error on a third of them, the same third in every run."""
    x, y = sklearn.datasets.load_diabetes(return_X_y=True)
    rows = np.random.default_rng(12345).permutation(len(x))
    train, test = rows[: 2 * len(x) // 3], rows[2 * len(x) // 3 :]
    base = {
        "n_estimators": 20, "learning_rate": 0.02, "max_depth": 5, "subsample": 0.9, "min_samples_leaf": 1,
        "max_features": 1.0,
    }  # fmt: skip
    knobs = {
        "n_estimators": {"type": "int", "low": 5, "high": 80},
        "learning_rate": {"type": "float", "low": 1e-3, "high": 1.0, "log": True},
        "max_depth": {"type": "int", "low": 1, "high": 6},
        "subsample": {"type": "float", "low": 0.2, "high": 1.0},
        "min_samples_leaf": {"type": "int", "low": 1, "high": 60},
        "max_features": {"type": "float", "low": 0.1, "high": 1.0},
    }

    def measure(config: dict[str, Any], seed: int) -> float:
        model = sklearn.ensemble.GradientBoostingRegressor(random_state=seed, **config).fit(x[train], y[train])
        return float(np.sqrt(np.mean((model.predict(x[test]) - y[test]) ** 2)))

    return training("boosting", base, knobs, measure, 30)


def training(
    name: str,
    base: dict[str, Any],
    knobs: dict[str, dict[str, Any]],
    measure: Callable[[dict[str, Any], int], float | None],
    runs: int,
) -> Problem:
    known: dict[bytes, float] = {}

    def truth(config: dict[str, Any]) -> float:
        key = canonical_json(config)
        if key not in known:
            values = [measure(config, 10**6 + i) for i in range(3)]
            known[key] = statistics.fmean(1.0 if value is None else value for value in values)
        return known[key]

    def noisy(config: dict[str, Any], seed: int) -> float | None:
        # Each run has a seed of its own, the same for every way.
        return measure(config, random.Random(f"{seed}{canonical_json(config)!r}").randrange(10**6))

    return Problem(name, base, knobs, noisy, truth, None, runs)


# -- rules that fit any problem: from the best run so far, one step of one knob, large ones first


def write_rules(problem: Problem, path: Path) -> Path:
    rules = []
    for priority, size in ((2, 0.25), (1, 0.06)):
        for knob, spec in problem.knobs.items():
            steps = [f"{knob}@set={choice}" for choice in spec.get("choices", ()) if priority == 2]
            if spec.get("log"):
                factor = (spec["high"] / spec["low"]) ** size
                steps = [f"{knob}@mul={factor:.4g}", f"{knob}@mul={1 / factor:.4g}"]
            elif "low" in spec:
                step = size * (spec["high"] - spec["low"])
                steps = [f"{knob}@add={sign * step:.4g}" for sign in (1, -1)]
            for edit in steps:
                rules.append(
                    {"name": edit, "when": "objective == best.objective", "edits": [edit], "priority": priority}
                )
    path.write_text(json.dumps({"rules": rules}))
    return path


def by_rules(lab: Lab) -> RulesProposer:
    path = write_rules(lab.problem, lab.outputs / "rules.yaml")
    return RulesProposer(path, lab.guard, lab.history, variants=4 * len(lab.problem.knobs))


def in_lab(make: Callable[[Lab], Proposer]) -> Callable[[Problem, Path, int], Trace]:
    def way(problem: Problem, root: Path, seed: int) -> Trace:
        lab = Lab(problem, root, seed)
        return lab.drive(make(lab))

    return way


def optuna_gp(problem: Problem, seed: int) -> Trace:
    import torch

    torch.set_num_threads(1)
    return optuna_alone(problem, seed, sampler=optuna.samplers.GPSampler(seed=seed))


FREE = "optuna, refused draws free"
GP = "optuna_gp"
WAYS: dict[str, Callable[[Problem, Path, int], Trace]] = {
    "search": in_lab(lambda lab: lab.search()),
    "tpe": in_lab(lambda lab: lab.search("tpe")),
    "rules": in_lab(by_rules),
    "mix": in_lab(lambda lab: Mix([by_rules(lab), lab.search()], lab.seed)),
    "random": in_lab(lambda lab: lab.search("random")),
    "optuna": lambda problem, root, seed: optuna_alone(problem, seed),
    FREE: lambda problem, root, seed: optuna_alone(problem, seed, charge=False),
    GP: lambda problem, root, seed: optuna_gp(problem, seed),
}

SINGLE = ("search", "rules", "random")


# -- figures


def values_of(problem: Problem, trace: Trace) -> list[float]:
    """The noise-free value of the best-looking run, over the second half of the runs."""
    found: list[float] = []
    best, config = math.inf, problem.base
    for i in range(problem.runs):
        if i < len(trace):  # a way that had nothing left to try stays where it is
            value, tried = trace[i]
            if value is not None and value < best:
                best, config = value, tried
        if i >= problem.runs // 2:
            found.append(problem.truth(config))
    return found


FIRST_SEED = 6000
Regrets = dict[str, dict[str, list[float]]]
"""Problem → way → the regret of each seed."""


def ratio(regrets: Regrets, way: str, other: Callable[[str], str], seeds: list[int]) -> float:
    logs = [
        math.log(_mean(ways[way], seeds) / max(_mean(ways[other(problem)], seeds), 1e-12))
        for problem, ways in regrets.items()
    ]
    return math.exp(statistics.fmean(logs))


def _mean(values: list[float], seeds: list[int]) -> float:
    return max(statistics.fmean(values[seed] for seed in seeds), 1e-12)


def interval(regrets: Regrets, way: str, other: Callable[[str], str], n: int) -> list[float] | None:
    """Where 95 % of the ratios lie when the seeds are drawn anew; a few seeds cannot say."""
    if n < 8:
        return None
    rng = random.Random(0)
    drawn = sorted(ratio(regrets, way, other, rng.choices(range(n), k=n)) for _ in range(1000))
    return [round(drawn[25], 3), round(drawn[974], 3)]


def cost(root: Path, n: int) -> dict[str, float]:
    """Milliseconds per proposal and telling, ours (all of ledger, history and folders) and Optuna's with SQLite, over
    studies of n runs on the six-dimensional function; one after the other, so that all have the same machine."""
    problem = replace(next(p for p in functions() if p.name == "hartmann6"), runs=n)
    labs, seconds = {}, {}
    for sampler in (None, "tpe"):
        labs[sampler] = lab = Lab(problem, root, 0)
        proposer = lab.search(sampler)
        began = time.perf_counter()
        lab.drive(proposer)
        seconds[sampler] = time.perf_counter() - began
    began = time.perf_counter()
    optuna_alone(problem, 0, f"sqlite:///{root}/optuna.db")
    theirs = time.perf_counter() - began
    for sampler, lab in labs.items():
        print(f"{n} runs with {sampler or 'the default sampler'}: proposer alone {1000 * lab.seconds / n:.2f} ms a "
              f"proposal; with the ledger and folders {1000 * seconds[sampler] / n:.2f} ms a run; Optuna with SQLite "
              f"{1000 * theirs / n:.2f} ms a trial")  # fmt: skip
    return {
        "ms_per_proposal": round(1000 * labs[None].seconds / n, 2),
        "cpu_ms_per_proposal": round(1000 * labs[None].cpu_seconds / n, 2),
        "x_optuna_sqlite": round(seconds[None] / theirs, 3),
        "tpe_ms_per_proposal": round(1000 * labs["tpe"].seconds / n, 2),
        "tpe_x_optuna_sqlite": round(seconds["tpe"] / theirs, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--gp-seeds", type=int, default=4, help="seeds for Optuna's GPSampler, which is slow")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    n = options.seeds or (2 if options.quick else 24)
    chosen = [p for p in [*functions(), digits(), boosting()] if not options.only or p.name in options.only]
    if options.quick:
        chosen = [replace(p, runs=p.runs // (2 if p.best is not None else 3)) for p in chosen]
    gp = 0 if options.quick else min(n, options.gp_seeds)
    root = Path(tempfile.mkdtemp(prefix="looplab-bench-", dir=os.environ.get("BENCH_DIR")))
    regrets: Regrets = {}
    try:
        for problem in chosen:
            regrets[problem.name] = compare(problem, n, gp, Kept(root, options.keep))
        costs = cost(root, 60 if options.quick else 300)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({**figures(regrets, n, gp), **costs}))


class Kept:
    """The curves of studies, by problem, way and seed; in a file, one a line, if there is one."""

    def __init__(self, root: Path, file: Path | None) -> None:
        self._root, self._file = root, file
        self._known: dict[str, list[float]] = {}
        for line in file.read_text().splitlines() if file is not None and file.exists() else ():
            self._known.update(json.loads(line))

    def curve(self, problem: Problem, way: str, seed: int) -> list[float]:
        key = f"{problem.name}/{problem.runs}/{way}/{seed}"
        if key not in self._known:
            self._known[key] = values_of(problem, WAYS[way](problem, self._root, seed))
            if self._file is not None:
                with self._file.open("a") as out:
                    out.write(json.dumps({key: self._known[key]}) + "\n")
        return self._known[key]


def compare(problem: Problem, n: int, gp: int, kept: Kept) -> dict[str, list[float]]:
    """Way → the regret of each seed."""
    values = {
        way: [kept.curve(problem, way, FIRST_SEED + seed) for seed in range(gp if way == GP else n)]
        for way in WAYS
        if (problem.constraint or way != FREE) and (gp or way != GP)
    }
    best = problem.best
    if best is None:
        best = min(value for seeds in values.values() for curve in seeds for value in curve)
    regrets = {name: [statistics.fmean(curve) - best for curve in seeds] for name, seeds in values.items()}
    means = {name: statistics.fmean(found) for name, found in regrets.items()}
    print(f"{problem.name:10s}", "  ".join(f"{k} {v:.4g}" for k, v in means.items()), flush=True)
    return regrets


def figures(regrets: Regrets, n: int, gp: int) -> dict[str, Any]:
    all_seeds = list(range(n))
    means_of = {p: {w: _mean(r, list(range(len(r)))) for w, r in ways.items()} for p, ways in regrets.items()}

    def free(problem: str) -> str:
        return FREE if FREE in regrets[problem] else "optuna"

    def best_of_each(problem: str) -> str:
        """Known only in hindsight, problem by problem."""
        return min(SINGLE, key=lambda way: means_of[problem][way])

    # The one proposer that does best over all problems: the one that a person should have chosen for all of them.
    best_single = min(SINGLE, key=lambda way: statistics.fmean(math.log(means_of[p][way]) for p in regrets))

    found: dict[str, Any] = {
        "search_vs_optuna": round(ratio(regrets, "search", lambda p: "optuna", all_seeds), 3),
        "search_vs_optuna_95": interval(regrets, "search", lambda p: "optuna", n),
        "search_vs_optuna_free": round(ratio(regrets, "search", free, all_seeds), 3),
        "search_vs_optuna_free_95": interval(regrets, "search", free, n),
        "mix_vs_best_single": round(ratio(regrets, "mix", lambda p: best_single, all_seeds), 3),
        "mix_vs_best_single_95": interval(regrets, "mix", lambda p: best_single, n),
        "best_single": best_single,
        "mix_vs_best_of_each": round(ratio(regrets, "mix", best_of_each, all_seeds), 3),
        "search_vs_random": round(ratio(regrets, "search", lambda p: "random", all_seeds), 3),
        "search_vs_tpe": round(ratio(regrets, "search", lambda p: "tpe", all_seeds), 3),
        "search_vs_optuna_each": {
            p: [
                round(ratio({p: ways}, "search", lambda p: "optuna", all_seeds), 3),
                interval({p: ways}, "search", lambda p: "optuna", n),
            ]
            for p, ways in regrets.items()
        },
        "seeds": n,
        "regret": {p: {w: float(f"{r:.4g}") for w, r in ways.items()} for p, ways in means_of.items()},
    }
    if gp:
        found["search_vs_optuna_gp"] = round(ratio(regrets, "search", lambda p: GP, list(range(gp))), 3)
        found["search_vs_optuna_gp_95"] = interval(regrets, "search", lambda p: GP, gp)
        found["gp_seeds"] = gp
    return found


if __name__ == "__main__":
    main()
