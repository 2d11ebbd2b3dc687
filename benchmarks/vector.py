"""The supervised vector env compared with Gymnasium's AsyncVectorEnv and SyncVectorEnv, and a soak test with faults.

    python benchmarks/vector.py [--quick]
    python benchmarks/vector.py --soak [--steps 1000000] [--faults 100] [--seed 0]

CartPole-v1 and dm_control's fish/swim (if dm_control is installed), 8 and 64 envs, the same actions for all:
  auto        SupervisedVectorEnv with its defaults: it measures the envs and chooses the number of workers
  workers     SupervisedVectorEnv with as many workers as cores, whatever that costs: every step can be replayed
  async       Gymnasium's AsyncVectorEnv, one process per env, shared memory
  sync        Gymnasium's SyncVectorEnv, one process
All are built first and measured in turn, so that noise of the machine affects all; figures are medians over the rounds,
ratios are medians of the ratios within a round. Steps are steps of one env; infos are included. The last line is JSON:
`vec8_x_async` and similar names are ratios of `auto`, those with `workers` ratios of `workers`. Those with `cpu` count
steps per second of CPU time, over all processes, instead of wall-clock time: on a shared machine only these measure the
cost of a step. `--quick`: `auto` and `async` only, without 8 fish.

The soak test steps 8 CartPoles, hits a worker with SIGKILL, SIGSTOP, SIGSEGV or an exception at random moments, and
compares every observation, reward, flag and info with SyncVectorEnv's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # two threads per process would only slow the others down
warnings.filterwarnings("ignore", message=".*DISPLAY.*")

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv  # noqa: E402

from looplab.rl import SupervisedVectorEnv  # noqa: E402

Make = Callable[[], gym.Env[Any, Any]]
CORES = len(os.sched_getaffinity(0))
KINDS: dict[str, Callable[[list[Make]], Any]] = {
    "auto": SupervisedVectorEnv,
    "workers": lambda makers: SupervisedVectorEnv(makers, workers=CORES),
    "async": AsyncVectorEnv,
    "sync": SyncVectorEnv,
}


class Swim(gym.Env[Any, Any]):
    """dm_control's fish/swim."""

    metadata = {"render_modes": []}  # noqa: RUF012 (so in gymnasium)

    def __init__(self) -> None:
        from dm_control import suite

        self.game = suite.load("fish", "swim", task_kwargs={"random": 0})
        spec = self.game.action_spec()
        self.action_space = gym.spaces.Box(spec.minimum, spec.maximum, dtype=np.float64)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, self._flat(self.game.reset()).shape, np.float64)

    def _flat(self, now: Any) -> Any:
        return np.concatenate([np.ravel(part) for part in now.observation.values()])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.game.task.random.seed(seed)
        return self._flat(self.game.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        now = self.game.step(action)
        return self._flat(now), float(now.reward), False, now.last(), {}


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def speed(venv: Any, actions: Any, seconds: float) -> tuple[float, float]:
    """Return env steps per second of wall-clock time, and per second of CPU time."""
    venv.step(actions[0])
    processes = [report.pid for report in venv.diagnostics()] if hasattr(venv, "diagnostics") else []
    processes += [process.pid for process in getattr(venv, "processes", [])]
    worked = work([os.getpid(), *filter(None, processes)])
    done, began = 0, time.perf_counter()
    while (now := time.perf_counter() - began) < seconds:
        for _ in range(4):
            venv.step(actions[done % len(actions)])
            done += 1
    worked = work([os.getpid(), *filter(None, processes)]) - worked
    return float(done * venv.num_envs / now), float(done * venv.num_envs / worked)


def work(processes: list[int]) -> float:
    """Return the CPU seconds of these processes."""
    threads = [thread for pid in processes for thread in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def side_by_side(
    make: Make, count: int, kinds: Sequence[str], rounds: int, seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the steps per second of each kind, and the ratios."""
    venvs = {kind: KINDS[kind]([make] * count) for kind in kinds}
    chosen = venvs["auto"].workers
    first = next(iter(venvs.values()))
    first.action_space.seed(0)
    actions = [first.action_space.sample() for _ in range(64)]
    for venv in venvs.values():
        venv.reset(seed=0)
    table = [{kind: speed(venv, actions, seconds) for kind, venv in venvs.items()} for _ in range(rounds)]
    for venv in venvs.values():
        venv.close()
    speeds = {kind: statistics.median(row[kind][0] for row in table) for kind in kinds}
    ratios = {
        f"{ours}{sort}_x_{peer}": statistics.median(row[ours][place] / row[peer][place] for row in table)
        for place, sort in enumerate(("", "_cpu"))
        for ours in ("auto", "workers")
        for peer in ("async", "sync")
        if ours in kinds and peer in kinds
    }
    return speeds, {**ratios, "workers_chosen": chosen}


def compare(quick: bool) -> dict[str, float]:
    worlds: dict[str, Make] = {"vec": cartpole}
    with contextlib.suppress(ImportError):
        import dm_control.suite  # noqa: F401 (and so forked processes need not import it)

        worlds["fish"] = Swim
    found: dict[str, float] = {}
    kinds = ("auto", "async") if quick else tuple(KINDS)
    names = ("auto_x_async",) if quick else ("auto_x_async", "workers_x_async", "auto_x_sync")
    print("".join(f"{name:>10}" for name in ("steps/s", *kinds)) + "".join(f"{name:>17}" for name in names))
    for name, make in worlds.items():
        for count in (64,) if quick and name == "fish" else (8, 64):
            speeds, ratios = side_by_side(make, count, kinds, 5 if quick else 9, 0.2 if quick else 1.0)
            for key, value in ratios.items():
                found[f"{name}{count}_{key.removeprefix('auto_')}"] = value
            figures = "".join(f"{speeds[kind]:>10,.0f}" for kind in kinds)
            print(f"{name + ' ' + str(count):>10}{figures}" + "".join(f"{ratios[name]:>17.2f}" for name in names))
    return found


class Raising(gym.Wrapper[Any, Any, Any, Any]):
    """Raises at given steps, once each, recorded in a file."""

    def __init__(self, env: gym.Env[Any, Any], at: frozenset[int], folder: Path) -> None:
        super().__init__(env)
        self.at, self.folder, self.count = at, folder, 0

    def step(self, action: Any) -> Any:
        self.count += 1
        if self.count in self.at:
            mark = self.folder / str(self.count)
            if not mark.exists():
                mark.touch()
                raise RuntimeError("as planned")
        return self.env.step(action)


def same(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, tuple):
        return all(map(same, one, two))
    return bool(one.dtype == two.dtype and one.tobytes() == two.tobytes())


def soak(steps: int, faults: int, seed: int) -> dict[str, float]:
    chance = random.Random(seed)
    count = 8
    turns = steps // count
    plan = {turn: chance.choice(["kill", "stop", "segv", "raise"]) for turn in chance.sample(range(20, turns), faults)}
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}
    with tempfile.TemporaryDirectory() as folder:
        # a step of the vector env may reset an env, which then counts one step less: hence a little earlier
        raising = frozenset(int(turn * 0.95) for turn, kind in plan.items() if kind == "raise")
        makers: list[Make] = [lambda: Raising(cartpole(), raising, Path(folder)), *[cartpole] * (count - 1)]
        venv = SupervisedVectorEnv(makers, workers=CORES, max_restarts=10 * faults, step_deadline=1.0)
        reference = SyncVectorEnv([cartpole] * count)
        numbers = np.random.default_rng(0)
        corrupt = int(not same(venv.reset(seed=1), reference.reset(seed=1)))
        began, spent = time.perf_counter(), 0.0
        longest = 0.0
        for turn in range(turns):
            if plan.get(turn, "raise") != "raise":
                pid = chance.choice(venv.diagnostics()).pid
                timer = threading.Timer(chance.random() * 2e-4, os.kill, (pid, signals[plan[turn]]))
                timer.start()
            actions = numbers.integers(0, 2, count)
            start = time.perf_counter()
            mine = venv.step(actions)
            took = time.perf_counter() - start
            spent, longest = spent + took, max(longest, took)
            corrupt += not same(mine, reference.step(actions))
            if plan.get(turn, "raise") != "raise":
                timer.join()
        reports = venv.diagnostics()
        venv.close()
    return {
        "soak_steps": turns * count,
        "soak_faults": faults,
        "soak_restarts": sum(report.restarts for report in reports),
        "soak_replayed": sum(report.replayed for report in reports),
        "soak_corrupt": corrupt,
        "soak_longest_step_s": round(longest, 3),
        "soak_steps_per_s": round(turns * count / spent),
        "soak_seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--soak", action="store_true")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = soak(given.steps, given.faults, given.seed) if given.soak else compare(given.quick)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
