"""Does the judge promote luck, and does it find what is better? Simulated studies and real trainings, beside a ratchet.

    python benchmarks/judge.py [--quick] [--studies 200] [--seed 0]

A study has a base, 24 challengers proposed one after the other, and 120 runs in all; the runs that the court asks for
go first. A/A: no challenger is better, so every promotion is false. Power: half of the challengers (or one in ten) are
better by one standard deviation of the noise. The ratchet (one run each, any improvement wins) sees the same numbers.
The long A/A has 150 challengers and up to 1,500 runs: does the error stay bounded where a study never ends?
The real A/A draws its studies from trainings of the quickstart recipe that differ in nothing but their seed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy, and for the processes that train

import numpy as np
import numpy.typing as npt

from looplab.judge.base import JudgeSettings
from looplab.judge.judge import Judge
from looplab.judge.simulate import SimulatedStudy, simulate

CHALLENGERS, BUDGET, SEEDS = 24, 120, 64
LONG_CHALLENGERS, LONG_BUDGET = 150, 1500
RECIPE = Path(__file__).parents[1] / "src/looplab/recipes/quickstart"
Floats = npt.NDArray[np.float64]
World = Callable[[np.random.Generator, int], Floats]
"""For so many entrants (the base first): what each is worth, or what chance adds to its runs, seed by seed."""


def study(
    judge: Judge,
    truth: Floats,
    noise: Floats,
    budget: int = BUDGET,
    *,
    drift: float = 0.0,
    again: Callable[[], float] | None = None,
) -> SimulatedStudy:
    """Simulate a study.

    Args:
        drift: What each run of the study adds to all later ones.
        again: Draws the noise of a repeat; None: a repeat with the same seed measures exactly the same.
    """
    values = (truth[:, None] + noise).tolist()
    count = itertools.count(1)

    def measure(config: int, seed: int, repeats: bool) -> float:
        value = float(truth[config]) + again() if repeats and again is not None else values[config][seed]
        return float(value) + drift * next(count)

    return simulate(judge, truth.tolist(), measure, budget)


def wilson(hits: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    z, alpha_share = 1.96, hits / n
    middle = (alpha_share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(alpha_share * (1 - alpha_share) / n + z * z / (4 * n * n))
    return max(0.0, middle - reach), min(1.0, middle + reach)


# --- worlds


def plain(rng: np.random.Generator, n: int) -> Floats:
    return rng.normal(size=(n, SEEDS))


def shared(rng: np.random.Generator, n: int) -> Floats:
    """Half of the variance belongs to the seed, whatever the config."""
    return math.sqrt(0.5) * rng.normal(size=(1, SEEDS)) + math.sqrt(0.5) * plain(rng, n)


def heavy(rng: np.random.Generator, n: int) -> Floats:
    """Student's t with 3 degrees of freedom, scaled to a standard deviation of 1."""
    return rng.standard_t(3, size=(n, SEEDS)) / math.sqrt(3.0)


def loud(rng: np.random.Generator, n: int) -> Floats:
    """Every challenger is twice as noisy as the base."""
    noise = plain(rng, n)
    noise[1:] *= 2.0
    return noise


def discrete(rng: np.random.Generator, n: int) -> Floats:
    """An accuracy on a few hundred examples: steps of half a standard deviation."""
    return np.round(2.0 * plain(rng, n)) / 2.0


def collapsing(rng: np.random.Generator, n: int) -> Floats:
    """One run in ten collapses, far below all others."""
    return np.where(rng.random((n, SEEDS)) < 0.1, -20.0, plain(rng, n))


NOISES: dict[str, World] = {
    "normal": plain,
    "seeds correlate": shared,
    "heavy tails": heavy,
    "2 × noise": loud,
    "discrete": discrete,
    "collapses": collapsing,
}
DRIFT = 0.02
"""What each run adds to all later ones, in standard deviations of the noise."""


def nothing(rng: np.random.Generator, n: int) -> Floats:
    return np.zeros(n)


def half(rng: np.random.Generator, n: int) -> Floats:
    """One knob gives + 1 standard deviation in half of its settings; proposals are drawn at random."""
    return np.concatenate([[0.0], rng.integers(0, 2, n - 1).astype(float)])


def rare(rng: np.random.Generator, n: int) -> Floats:
    return np.concatenate([[0.0], (rng.random(n - 1) < 0.1).astype(float)])


def many(
    studies: int,
    seed: int,
    truth: World,
    noise: World,
    settings: JudgeSettings,
    long: bool = False,
    drift: float = 0.0,
) -> list[SimulatedStudy]:
    """Simulate studies; repeats with the same seed draw their noise anew, which is the harder case for the judge."""
    judge = Judge(settings)
    candidates, budget = (LONG_CHALLENGERS + 1, LONG_BUDGET) if long else (CHALLENGERS + 1, BUDGET)
    outcomes = []
    for i in range(studies):
        rng = np.random.default_rng([seed, i])
        repeated = noise(np.random.default_rng([seed, i, 1]), 400).ravel()  # of the base: the first row
        again = itertools.cycle(repeated.tolist()).__next__
        outcomes.append(study(judge, truth(rng, candidates), noise(rng, candidates), budget, drift=drift, again=again))
    return outcomes


def false_share(outcomes: list[SimulatedStudy]) -> float:
    """The share of the studies with a false promotion."""
    return sum(outcome.false > 0 for outcome in outcomes) / len(outcomes)


def found(outcomes: list[SimulatedStudy]) -> tuple[float, float]:
    """The share of the studies that promoted something better, and the median of the runs that took."""
    took = [outcome.first_true for outcome in outcomes if outcome.first_true is not None]
    return len(took) / len(outcomes), statistics.median(took) if took else float(BUDGET)


# --- real trainings


def train(seed: int) -> float:
    """The final validation loss of a short training of the quickstart recipe, in this process."""
    config = json.loads((RECIPE / "configs/baseline.json").read_text())
    config["train"] |= {"epochs": 8, "learning_rate": 0.02, "momentum": 0.9}
    config["seed"] = seed
    with tempfile.TemporaryDirectory(prefix="looplab-bench-") as folder:
        given = Path(folder, "config.json")
        given.write_text(json.dumps(config))
        sys.argv = ["train.py", "--config", str(given), "--out", folder]
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(RECIPE / "train.py"), run_name="__main__")
        last = Path(folder, "metrics.jsonl").read_text().splitlines()[-1]
    return float(json.loads(last)["val/loss"])


def trainings(n: int) -> Floats:
    """n trainings that differ in their seed alone. Two processes do them all: starting Python takes longer than 8
    epochs."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        return np.array(list(pool.map(train, range(n))))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--studies", type=int, default=0, help="studies of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    studies = options.studies or 200
    others = min(studies, 100) if options.quick else studies  # for all but the two figures that are required
    settings = JudgeSettings()
    figures: dict[str, float] = {}
    began = time.perf_counter()

    print(f"A/A, {CHALLENGERS} challengers, {BUDGET} runs: studies with a false promotion")
    for key, (name, noise) in zip(
        ("", "_correlated", "_heavy", "_loud", "_discrete", "_collapse"), NOISES.items(), strict=True
    ):
        n = others if key else studies
        say(f"A/A, {name}: {n} studies ({time.perf_counter() - began:.0f} s)")
        outcomes = many(n, options.seed, nothing, noise, settings)
        hits = sum(outcome.false > 0 for outcome in outcomes)
        low, high = wilson(hits, n)
        naive = false_share(many(n, options.seed, nothing, noise, JudgeSettings(by="ratchet")))
        print(f"  {name:16} judge {hits / n:6.3f}  [{low:.3f}, {high:.3f}]   ratchet {naive:.3f}   of {n}")
        figures["aa_false_promotion" + key] = hits / n
        figures["aa_ratchet" + key] = naive
        if not key:
            figures["aa_upper95"] = round(high, 4)

    say(f"A/A, drift: {studies} studies ({time.perf_counter() - began:.0f} s)")
    for key, name, by in (
        ("aa_drift", "judge", settings),
        ("aa_drift_unconfirmed", "without confirmation", JudgeSettings(confirm=False)),
    ):
        outcomes = many(studies, options.seed + 4, nothing, plain, by, drift=DRIFT)
        figures[key] = false_share(outcomes)
        low, high = wilson(sum(outcome.false > 0 for outcome in outcomes), studies)
        figures[f"{key}_upper95"] = high
        print(f"  drift, {name}: {figures[key]:.3f}  [{low:.3f}, {high:.3f}]   + {DRIFT} sd a run, of {studies}")

    if not options.quick:
        n = 3 * studies  # this is nearest to the 5 % it must keep, so it needs the narrowest interval
        say(f"A/A, long: {n} studies ({time.perf_counter() - began:.0f} s)")
        outcomes = many(n, options.seed + 3, nothing, plain, settings, long=True)
        figures["aa_long"] = false_share(outcomes)
        low, high = wilson(sum(outcome.false > 0 for outcome in outcomes), n)
        print(f"  {'long':16} judge {figures['aa_long']:6.3f}  [{low:.3f}, {high:.3f}]", end="   ")
        print(f"{LONG_CHALLENGERS} challengers, {statistics.mean(o.runs for o in outcomes):.0f} runs, of {n}")

    print("power: studies that promoted a challenger better by 1 standard deviation")
    for name, truth, noise, share_key, runs_key in (
        ("half are better", half, plain, "power_1sigma", "runs_to_decide"),
        ("1 in 10 is better", rare, plain, "power_rare", "runs_rare"),
        ("half, seeds correlate", half, shared, "power_correlated", "runs_correlated"),
    ):
        n = studies if share_key == "power_1sigma" else others
        say(f"power, {name}: {n} studies ({time.perf_counter() - began:.0f} s)")
        outcomes = many(n, options.seed + 1, truth, noise, settings)
        alpha_share, took = found(outcomes)
        wrong = false_share(outcomes)
        low, high = wilson(round(alpha_share * n), n)
        print(
            f"  {name:22} {alpha_share:.3f}  [{low:.3f}, {high:.3f}]   median runs {took:.0f}   "
            f"with a false promotion {wrong:.3f}   of {n}"
        )
        figures |= {share_key: alpha_share, f"{share_key}_lower95": low, runs_key: took}

    n_real = 30 if options.quick else 60
    say(f"{n_real} trainings ({time.perf_counter() - began:.0f} s)")
    measured = trainings(n_real)
    say(f"trained ({time.perf_counter() - began:.0f} s)")

    def drawn(rng: np.random.Generator, n: int) -> Floats:
        return rng.choice(measured, size=(n, SEEDS))

    for key, by in (
        ("aa_real", JudgeSettings(goal="min")),
        ("aa_real_ratchet", JudgeSettings(goal="min", by="ratchet")),
    ):
        figures[key] = false_share(many(studies, options.seed + 2, nothing, drawn, by))
    low, high = wilson(round(figures["aa_real"] * studies), studies)
    figures["aa_real_upper95"] = high
    print(f"A/A of real trainings: {n_real} of them, val/loss {measured.mean():.4f} ± {measured.std(ddof=1):.4f}")
    real, naive = figures["aa_real"], figures["aa_real_ratchet"]
    print(f"  drawn from them  judge {real:6.3f}  [{low:.3f}, {high:.3f}]   ratchet {naive:.3f}   of {studies}")
    print(f"{time.perf_counter() - began:.0f} s")
    print(
        json.dumps(
            {key: round(value, 4) for key, value in figures.items()} | {"studies": studies, "studies_others": others}
        )
    )


if __name__ == "__main__":
    main()
