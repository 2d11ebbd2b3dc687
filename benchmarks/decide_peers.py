"""Other tools for black-box optimization, each used as its documentation says, behind one ask and one tell.

This file runs inside the environment of a tool, which benchmarks/decide.py makes and starts:

    python benchmarks/decide_peers.py

Requests and answers are lines of JSON on stdin and stdout. The first request of a study names the tool, the space, the
seed, the runs and the batch, and has no answer. Then `{"ask": n}` is answered by n points, and
`{"tell": [[value or null, feasible], …]}`, in the order of the points, by nothing. For benchmarks/fidelity.py
`{"start": true}` is answered by the name of a training and its point, where a known name is a training to be continued,
and `{"report": [epoch, value]}` by whether it should stop now. Every answer has the CPU seconds that the tool has used
in this study, without its import.

A point is a list of numbers; a parameter is `{"type": "float" | "int" | "choice", "low", "high", "log"}`, where the
value of a choice is an index.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")

Space = Sequence[dict[str, Any]]
Point = list[Any]
Result = tuple[float | None, bool]
"""The value (None: the run crashed), and whether the point satisfies the known constraint."""


class Peer(Protocol):
    def ask(self, n: int) -> list[Point]: ...

    def tell(self, results: Sequence[Result]) -> None:
        """Take the results of the points asked last."""
        ...


class Optuna:
    """`ask` and `tell`; `set_constraint` for the known constraint; a crash is a failed trial."""

    def __init__(self, space: Space, seed: int, runs: int, batch: int, sampler: str) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        samplers = optuna.samplers
        if sampler == "gp":
            import torch

            torch.set_num_threads(1)
            chosen: Any = samplers.GPSampler(seed=seed)
        elif sampler == "cmaes":
            chosen = samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
        else:
            chosen = samplers.TPESampler(seed=seed)
        self._failed = optuna.trial.TrialState.FAIL
        self._study = optuna.create_study(
            sampler=chosen, study_name=f"seed {seed}"
        )  # Hyperband's brackets depend on it
        kinds = optuna.distributions
        self._space: dict[str, Any] = {}
        for i, one in enumerate(space):
            if one["type"] == "choice":
                kind: Any = kinds.CategoricalDistribution(range(one["high"] + 1))
            elif one["type"] == "int":
                kind = kinds.IntDistribution(one["low"], one["high"], log=one["log"])
            else:
                kind = kinds.FloatDistribution(one["low"], one["high"], log=one["log"])
            self._space[f"x{i}"] = kind
        self._asked: list[Any] = []

    def ask(self, n: int) -> list[Point]:
        self._asked = [self._study.ask(self._space) for _ in range(n)]
        return [[trial.params[name] for name in self._space] for trial in self._asked]

    def tell(self, results: Sequence[Result]) -> None:
        for trial, (value, feasible) in zip(self._asked, results, strict=True):
            if not feasible:
                trial.set_constraint("known", 1.0)
            if value is None:
                self._study.tell(trial, state=self._failed)
            else:
                self._study.tell(trial, value)


class Worst:
    """For tools that need a value of every run: that of a crash is the worst one so far."""

    def __init__(self) -> None:
        self._worst = 0.0
        self._any = False

    def values(self, results: Sequence[Result]) -> list[float]:
        measured = [value for value, _ in results if value is not None]
        if measured:
            self._worst = max([*measured, self._worst] if self._any else measured)
            self._any = True
        return [self._worst if value is None else value for value, _ in results]


class Smac:
    """The facade for hyperparameters (random forest), or for real spaces that for black boxes (Gaussian process).

    One call of each config, as in the example of ask and tell; the model is trained before each batch.
    """

    def __init__(self, space: Space, seed: int, runs: int, batch: int) -> None:
        from ConfigSpace import Categorical, ConfigurationSpace, Float, Integer
        from smac import BlackBoxFacade, HyperparameterOptimizationFacade, Scenario

        configs = ConfigurationSpace(seed=seed)
        for i, one in enumerate(space):
            bounds = (one["low"], one["high"])
            if one["type"] == "choice":
                configs.add(Categorical(f"x{i}", list(range(one["high"] + 1))))
            elif one["type"] == "int":
                configs.add(Integer(f"x{i}", bounds, log=one["log"]))
            else:
                configs.add(Float(f"x{i}", bounds, log=one["log"]))
        facade = BlackBoxFacade if all(one["type"] == "float" for one in space) else HyperparameterOptimizationFacade
        self._folder = tempfile.TemporaryDirectory(prefix="looplab-smac-")
        scenario = Scenario(configs, n_trials=runs, seed=seed, output_directory=Path(self._folder.name))
        model = facade.get_model(scenario)
        if facade is HyperparameterOptimizationFacade:
            # The same trees, but no pool of threads for each prediction, of which a proposal needs about 70, and no
            # memory for a million leaves, 130 MB, for each tree. No public parameter of the facade changes these.
            model._rf_opts |= {"n_jobs": 1, "max_leaf_nodes": max(runs, 2)}
        self._smac = facade(
            scenario,
            model=model,
            intensifier=facade.get_intensifier(scenario, max_config_calls=1),
            config_selector=facade.get_config_selector(scenario, retrain_after=batch),
            logging_level=False,
            overwrite=True,
        )
        self._names = [f"x{i}" for i in range(len(space))]
        self._worst = Worst()
        self._asked: list[Any] = []

    def ask(self, n: int) -> list[Point]:
        self._asked = [self._smac.ask() for _ in range(n)]
        return [[info.config[name] for name in self._names] for info in self._asked]

    def tell(self, results: Sequence[Result]) -> None:
        from smac.runhistory import StatusType, TrialValue

        costs = self._worst.values(results)  # its default for a crash, infinity, fails in its Gaussian process
        for info, cost, (value, _) in zip(self._asked, costs, results, strict=True):
            status = StatusType.CRASHED if value is None else StatusType.SUCCESS
            self._smac.tell(info, TrialValue(cost=cost, status=status), save=False)


class Ax:
    """The Client with its default strategy; a crash is an abandoned trial, since failed ones are suggested again."""

    def __init__(self, space: Space, seed: int, runs: int, batch: int) -> None:
        import torch
        from ax.api.client import Client
        from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._names = [f"x{i}" for i in range(len(space))]
        self._client = Client(random_seed=seed)
        self._client.configure_experiment(parameters=[
            ChoiceParameterConfig(name=name, values=[f"c{i}" for i in range(one["high"] + 1)], parameter_type="str",
                                  is_ordered=False)
            if one["type"] == "choice"
            else RangeParameterConfig(name=name, bounds=(one["low"], one["high"]), parameter_type=one["type"],
                                      scaling="log" if one["log"] else "linear")
            for name, one in zip(self._names, space, strict=True)
        ])  # fmt: skip
        self._client.configure_optimization(objective="-loss")
        self._asked: list[int] = []

    def ask(self, n: int) -> list[Point]:
        trials: dict[int, Any] = {}
        while len(trials) < n:  # it may return fewer than asked for
            more = self._client.get_next_trials(max_trials=n - len(trials))
            if not more:
                raise RuntimeError("no more trials")
            trials.update(more)
        self._asked = list(trials)
        return [
            [int(point[name][1:]) if isinstance(point[name], str) else point[name] for name in self._names]
            for point in trials.values()
        ]

    def tell(self, results: Sequence[Result]) -> None:
        for index, (value, _) in zip(self._asked, results, strict=True):
            if value is None:
                self._client.mark_trial_abandoned(index)
            else:
                self._client.complete_trial(index, raw_data={"loss": value})


class Hebo:
    def __init__(self, space: Space, seed: int, runs: int, batch: int) -> None:
        import numpy as np
        import torch
        from hebo.design_space.design_space import DesignSpace
        from hebo.optimizers.hebo import HEBO

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        np.random.seed(seed)
        specs: list[dict[str, Any]] = []
        for i, one in enumerate(space):
            if one["type"] == "choice":
                specs.append({"name": f"x{i}", "type": "cat", "categories": [f"c{k}" for k in range(one["high"] + 1)]})
            else:
                kind = {"float": "num", "int": "int"}[one["type"]]
                kind = {"num": "pow", "int": "pow_int"}[kind] if one["log"] else kind
                specs.append({"name": f"x{i}", "type": kind, "lb": one["low"], "ub": one["high"]})
        self._hebo = HEBO(DesignSpace().parse(specs), scramble_seed=seed)
        self._types = [one["type"] for one in space]
        self._worst = Worst()
        self._asked: Any = None

    def ask(self, n: int) -> list[Point]:
        self._asked = self._hebo.suggest(n_suggestions=n)
        return [
            [
                int(value[1:]) if kind == "choice" else int(value) if kind == "int" else float(value)
                for kind, value in zip(self._types, row, strict=True)
            ]
            for row in self._asked[[f"x{i}" for i in range(len(self._types))]].itertuples(index=False)
        ]

    def tell(self, results: Sequence[Result]) -> None:
        import numpy as np

        self._hebo.observe(self._asked, np.array(self._worst.values(results)).reshape(-1, 1))


class Nevergrad:
    """NGOpt, its own choice of an algorithm for the space and the budget."""

    def __init__(self, space: Space, seed: int, runs: int, batch: int) -> None:
        import nevergrad as ng

        parameters = []
        for one in space:
            low, high = one["low"], one["high"]
            if one["type"] == "choice":
                parameters.append(ng.p.Choice(range(high + 1)))
                continue
            scalar = ng.p.Log(lower=low, upper=high) if one["log"] else ng.p.Scalar(lower=low, upper=high)
            parameters.append(scalar.set_integer_casting() if one["type"] == "int" else scalar)
        parametrization = ng.p.Tuple(*parameters)
        parametrization.random_state.seed(seed)
        self._optimizer = ng.optimizers.NGOpt(parametrization=parametrization, budget=runs, num_workers=batch)
        self._worst = Worst()
        self._asked: list[Any] = []

    def ask(self, n: int) -> list[Point]:
        self._asked = [self._optimizer.ask() for _ in range(n)]
        return [list(candidate.value) for candidate in self._asked]

    def tell(self, results: Sequence[Result]) -> None:
        for candidate, value in zip(self._asked, self._worst.values(results), strict=True):
            self._optimizer.tell(candidate, value)


class Vizier:
    """Its default algorithm, GP_UCB_PE, without the service; a crash is an infeasible trial."""

    def __init__(self, space: Space, seed: int, runs: int, batch: int) -> None:
        from vizier import pyvizier as vz
        from vizier._src.algorithms.designers.gp_ucb_pe import (
            VizierGPUCBPEBandit,
        )  # the public module needs more packages

        problem = vz.ProblemStatement()
        root = problem.search_space.root
        for i, one in enumerate(space):
            scale = vz.ScaleType.LOG if one["log"] else vz.ScaleType.LINEAR
            if one["type"] == "choice":
                root.add_categorical_param(f"x{i}", [f"c{k}" for k in range(one["high"] + 1)])
            elif one["type"] == "int":
                root.add_int_param(f"x{i}", one["low"], one["high"], scale_type=scale)
            else:
                root.add_float_param(f"x{i}", one["low"], one["high"], scale_type=scale)
        problem.metric_information.append(vz.MetricInformation("loss", goal=vz.ObjectiveMetricGoal.MINIMIZE))
        self._vz = vz
        self._designer = VizierGPUCBPEBandit(problem, rng=self._key(seed))
        self._types = [one["type"] for one in space]
        self._asked: list[Any] = []
        self._count = 0

    @staticmethod
    def _key(seed: int) -> Any:
        import jax

        return jax.random.PRNGKey(seed)

    def ask(self, n: int) -> list[Point]:
        suggestions = self._designer.suggest(count=n)
        self._asked = [suggestion.to_trial(self._count + i + 1) for i, suggestion in enumerate(suggestions)]
        self._count += n
        return [[self._value(kind, trial.parameters[f"x{i}"].value) for i, kind in enumerate(self._types)]
                for trial in self._asked]  # fmt: skip

    @staticmethod
    def _value(kind: str, value: Any) -> Any:
        return int(value[1:]) if kind == "choice" else int(value) if kind == "int" else float(value)

    def tell(self, results: Sequence[Result]) -> None:
        from vizier.algorithms import ActiveTrials, CompletedTrials

        for trial, (value, _) in zip(self._asked, results, strict=True):
            if value is None:
                trial.complete(self._vz.Measurement(), infeasibility_reason="crashed")
            else:
                trial.complete(self._vz.Measurement({"loss": value}))
        self._designer.update(CompletedTrials(self._asked), ActiveTrials())


class OptunaHyperband(Optuna):
    """TPE with Optuna's HyperbandPruner; a run that it gives up is a pruned trial."""

    def __init__(self, space: Space, seed: int, runs: int, batch: int, epochs: int) -> None:
        import optuna

        super().__init__(space, seed, runs, batch, "tpe")
        self._study.pruner = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=epochs, reduction_factor=3)
        self._pruned = False

    def start(self) -> tuple[str, Point]:
        """Return the name and the point of the training that comes next."""
        self._pruned = False
        (point,) = self.ask(1)
        return str(self._asked[0].number), point

    def report(self, epoch: int, value: float) -> bool:
        """Return whether the training that was started last should stop."""
        (trial,) = self._asked
        trial.report(value, epoch)
        self._pruned = trial.should_prune()
        return self._pruned

    def tell(self, results: Sequence[Result]) -> None:
        import optuna

        if self._pruned:
            self._study.tell(self._asked[0], state=optuna.trial.TrialState.PRUNED)
        else:
            super().tell(results)


class RayAsha:
    """Ray Tune's ASHAScheduler with its default search, random draws; no actors are started."""

    def __init__(self, space: Space, seed: int, runs: int, batch: int, epochs: int) -> None:
        import numpy as np
        from ray import tune
        from ray.tune.schedulers import ASHAScheduler

        self._rng = np.random.RandomState(seed)
        self._domains: list[Any] = []
        for one in space:
            low, high = one["low"], one["high"]
            if one["type"] == "choice":
                self._domains.append(tune.choice(list(range(high + 1))))
            elif one["type"] == "int":
                self._domains.append((tune.lograndint if one["log"] else tune.randint)(low, high + 1))
            else:
                self._domains.append((tune.loguniform if one["log"] else tune.uniform)(low, high))
        self._scheduler = ASHAScheduler(
            time_attr="training_iteration", metric="loss", mode="min", max_t=epochs, grace_period=1, reduction_factor=3
        )
        self._trial: Any = None
        self._count = 0

    def start(self) -> tuple[str, Point]:
        self._count += 1
        self._trial = SimpleNamespace(trial_id=str(self._count))
        self._scheduler.on_trial_add(None, self._trial)
        return self._trial.trial_id, [domain.sample(random_state=self._rng) for domain in self._domains]

    def report(self, epoch: int, value: float) -> bool:
        decision = self._scheduler.on_trial_result(None, self._trial, {"training_iteration": epoch, "loss": value})
        return bool(decision == self._scheduler.STOP)

    def tell(self, results: Sequence[Result]) -> None:
        """Do nothing: random draws do not learn."""


class RayBohb:
    """Ray Tune's TuneBOHB with HyperBandForBOHB, which pauses trainings and continues them.

    No actors are started: what Tune's controller calls, in its order, is called here, and this object is the controller
    as far as the scheduler needs one.
    """

    class Trial:
        def __init__(self, trial_id: str, point: Point) -> None:
            self.trial_id, self.point = trial_id, point
            self.status, self.is_saving = "PENDING", False

    def __init__(self, space: Space, seed: int, runs: int, batch: int, epochs: int) -> None:
        import ConfigSpace
        import numpy as np
        from ray.tune.schedulers import HyperBandForBOHB
        from ray.tune.search.bohb import TuneBOHB

        np.random.seed(seed)  # hpbandster's only generator
        kinds = ConfigSpace.hyperparameters
        configs = ConfigSpace.ConfigurationSpace(seed=seed)
        for i, one in enumerate(space):
            if one["type"] == "choice":
                kind = kinds.CategoricalHyperparameter(f"x{i}", list(range(one["high"] + 1)))
            else:
                make = kinds.UniformIntegerHyperparameter if one["type"] == "int" else kinds.UniformFloatHyperparameter
                kind = make(f"x{i}", one["low"], one["high"], log=one["log"])
            configs.add_hyperparameter(kind)
        self._names = [f"x{i}" for i in range(len(space))]
        self._epochs = epochs
        self._searcher = TuneBOHB(configs, metric="loss", mode="min", seed=seed)
        self.search_alg = SimpleNamespace(searcher=self._searcher)
        self._scheduler = HyperBandForBOHB(
            time_attr="training_iteration", metric="loss", mode="min", max_t=epochs, reduction_factor=3
        )
        self._trials: list[RayBohb.Trial] = []
        self._trial: Any = None

    def get_trials(self) -> list[Trial]:
        return self._trials

    def stop_trial(self, trial: Trial) -> None:
        if trial.status in ("PENDING", "PAUSED"):
            self._scheduler.on_trial_remove(self, trial)
            self._end(trial, "TERMINATED")

    def start(self) -> tuple[str, Point]:
        if not any(trial.status == "PENDING" for trial in self._trials):
            name = str(len(self._trials))
            config = self._searcher.suggest(name)
            new = self.Trial(name, [config[parameter] for parameter in self._names])
            self._trials.append(new)
            self._scheduler.on_trial_add(self, new)
        self._trial = self._scheduler.choose_trial_to_run(self)
        self._trial.status = "RUNNING"
        return self._trial.trial_id, self._trial.point

    def report(self, epoch: int, value: float) -> bool:
        trial, result = self._trial, {"training_iteration": epoch, "loss": value}
        action = self._scheduler.on_trial_result(self, trial, result)
        self._searcher.on_trial_result(trial.trial_id, result)
        if action == "PAUSE":
            trial.status = "PAUSED"
        elif action == "STOP":
            self._scheduler.on_trial_complete(self, trial, result)
            self._end(trial, "TERMINATED")
        return bool(action != "CONTINUE")

    def tell(self, results: Sequence[Result]) -> None:
        """Take the end of a training: None for a crash, else its last value; nothing if it was stopped here."""
        if self._trial.status != "RUNNING":
            return
        ((value, _),) = results
        if value is None:
            self._scheduler.on_trial_error(self, self._trial)
            self._end(self._trial, "ERROR")
        elif not self.report(self._epochs, value):
            self._scheduler.on_trial_complete(self, self._trial, {"training_iteration": self._epochs, "loss": value})
            self._end(self._trial, "TERMINATED")

    def _end(self, trial: Trial, status: str) -> None:
        trial.status = status
        self._searcher.on_trial_complete(trial.trial_id, error=status == "ERROR")


PEERS: dict[str, Any] = {
    "optuna_tpe": lambda *study: Optuna(*study, sampler="tpe"),
    "optuna_gp": lambda *study: Optuna(*study, sampler="gp"),
    "optuna_cmaes": lambda *study: Optuna(*study, sampler="cmaes"),
    "smac": Smac,
    "hebo": Hebo,
    "ax": Ax,
    "nevergrad": Nevergrad,
    "vizier": Vizier,
}
FIDELITY_PEERS: dict[str, Any] = {"optuna_hyperband": OptunaHyperband, "ray_asha": RayAsha, "ray_bohb": RayBohb}


def plain(value: Any) -> Any:
    """Return a number of numpy as one of Python."""
    return value.item() if hasattr(value, "item") else value


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a tool prints does not belong to the answers
    peer: Any = None
    cpu = 0.0
    for line in sys.stdin:
        request = json.loads(line)
        if "peer" in request:
            peer, cpu = {**PEERS, **FIDELITY_PEERS}[request.pop("peer")](*request.values()), 0.0
            continue
        began = time.process_time()
        answer: dict[str, Any] = {}
        with contextlib.redirect_stdout(sys.stderr):
            if "ask" in request:
                answer["points"] = [[plain(value) for value in point] for point in peer.ask(request["ask"])]
            elif "start" in request:
                name, point = peer.start()
                answer["started"] = [name, [plain(value) for value in point]]
            elif "report" in request:
                answer["stop"] = peer.report(*request["report"])
            else:
                peer.tell(request["tell"])
        cpu += time.process_time() - began
        answers.write(json.dumps({**answer, "cpu": cpu}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
