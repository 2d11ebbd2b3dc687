"""What a run costs beside other launchers: `true`, many times, on 4 slots.

    python benchmarks/launch_peers.py [--quick] [--runs 200]

Beside looplab: a bare pool of threads, task-spooler, HyperQueue, Optuna (journal storage, 4 threads) and Ray tasks,
each where it is installed. They record less: a pool and Ray nothing, task-spooler and HyperQueue the exit code and the
output, Optuna a row; looplab has for each run a folder, a config, a capsule, hashes, a summary and its place in the
ledger. All are measured in turn, and the medians compared. HyperQueue's client looks once a second whether a job is
over, so few runs say little about it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

from launch import SLOTS, bare, fresh_folder, ours

Launcher = Callable[[int], float]
"""Starts so many runs and waits for them; returns the seconds."""


@contextlib.contextmanager
def looplab_runs() -> Iterator[Launcher]:
    root = fresh_folder()
    try:
        yield lambda n: ours(n, root)[0]
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def bare_pool() -> Iterator[Launcher]:
    yield bare


@contextlib.contextmanager
def task_spooler() -> Iterator[Launcher]:
    program = shutil.which("tsp") or shutil.which("ts")
    if program is None or "spool" not in subprocess.run([program, "-h"], capture_output=True, text=True).stdout.lower():
        raise ModuleNotFoundError("task-spooler is not installed (apt install task-spooler)")
    folder = tempfile.mkdtemp(prefix="looplab-bench-")
    env = {**os.environ, "TS_SOCKET": f"{folder}/socket", "TMPDIR": folder, "TS_MAXFINISHED": "100000"}

    def call(*words: str) -> None:
        subprocess.run([program, *words], env=env, check=True, stdout=subprocess.DEVNULL)

    def launch(n: int) -> float:
        began = time.perf_counter()
        for _ in range(n):
            call("-n", "true")
        while subprocess.run([program], env=env, capture_output=True, text=True).stdout.count("finished") < n:
            time.sleep(0.01)
        seconds = time.perf_counter() - began
        call("-C")
        return seconds

    call("-S", str(SLOTS))
    try:
        yield launch
    finally:
        call("-K")
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def hyperqueue_tasks() -> Iterator[Launcher]:
    from hyperqueue import Job, LocalCluster
    from hyperqueue.cluster import WorkerConfig

    folder = tempfile.mkdtemp(prefix="looplab-bench-")

    def launch(n: int) -> float:
        began = time.perf_counter()
        job = Job(default_workdir=folder)
        for _ in range(n):
            job.program(["true"])
        client.wait_for_jobs([client.submit(job)])
        return time.perf_counter() - began

    with LocalCluster(worker_config=WorkerConfig(cores=SLOTS)) as cluster:
        client = cluster.client()
        yield launch
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def optuna_trials() -> Iterator[Launcher]:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folder = tempfile.mkdtemp(prefix="looplab-bench-")

    def objective(trial: optuna.Trial) -> float:
        trial.suggest_int("x", 0, 1_000_000)
        return float(subprocess.run(["true"]).returncode)

    def launch(n: int) -> float:
        storage = JournalStorage(JournalFileBackend(f"{folder}/{time.monotonic_ns()}.log"))
        study = optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler(seed=0))
        began = time.perf_counter()
        study.optimize(objective, n_trials=n, n_jobs=SLOTS)
        return time.perf_counter() - began

    yield launch
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ray_tasks() -> Iterator[Launcher]:
    import ray

    ray.init(num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, logging_level="error")

    @ray.remote(num_cpus=1)
    def task() -> int:
        return subprocess.run(["true"]).returncode

    def launch(n: int) -> float:
        began = time.perf_counter()
        assert ray.get([task.remote() for _ in range(n)]) == [0] * n
        return time.perf_counter() - began

    try:
        ray.get([task.remote() for _ in range(SLOTS)])  # its workers are there
        yield launch
    finally:
        ray.shutdown()


LAUNCHERS = {
    "looplab": looplab_runs, "bare": bare_pool, "task_spooler": task_spooler, "hyperqueue": hyperqueue_tasks,
    "optuna": optuna_trials, "ray": ray_tasks,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="300 runs and 2 repeats")
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(LAUNCHERS), choices=list(LAUNCHERS))
    options = parser.parse_args()
    n = options.runs or (300 if options.quick else 1000)
    repeats = options.repeats or (2 if options.quick else 5)
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        launchers: dict[str, Launcher] = {}
        for name in options.only:
            try:
                launchers[name] = stack.enter_context(LAUNCHERS[name]())
            except (ImportError, OSError, subprocess.CalledProcessError) as error:
                print(f"{name} is left out: {error}")
        for _ in range(repeats):
            for name, launch in launchers.items():
                seconds.setdefault(name, []).append(launch(n))
    ms = {name: 1000 * statistics.median(taken) / n for name, taken in seconds.items()}
    print(f"\n{n} runs of `true` on {SLOTS} slots\n{'':14}{'ms a run':>10}{'× looplab':>12}")
    for name, value in ms.items():
        print(f"{name:14}{value:10.2f}{value / ms['looplab'] if 'looplab' in ms else float('nan'):12.2f}")
    ratios = {f"x_{name}": round(ms[name] / ms["looplab"], 2) for name in ms if "looplab" in ms and name != "looplab"}
    print(json.dumps({**{f"{name}_ms": round(value, 3) for name, value in ms.items()}, **ratios, "repeats": repeats}))


if __name__ == "__main__":
    main()
