"""What a run costs on a cluster, beside what the cluster itself offers; called by `launch.py --executor ray|slurm`.

    python benchmarks/launch.py --executor slurm [--quick]
    python benchmarks/launch.py --executor ray [--quick]
    python benchmarks/launch.py --executor simulated [--quick]

`slurm` and `ray` start a small cluster on loopback. Runs of `true` are executed by looplab and, alternately, by plain
sbatch (one call a job, all of them queued at once) or plain Ray tasks; ratios are medians over the repeats. `adopt_s`
is the time from `looplab resume` to the line that says that the last running run of a killed engine was adopted.

`simulated`: 100,000 proposals wait for 1,000 slots of an executor that starts nothing and whose clock is simulated.
Everything else is real: folders, ledger, engine. `busy_share` is CPU time of the engine per simulated second, with runs
of 20 s; `x_last_tenth` what a run of the last tenth costs beside one of the second (1: no growth).
`continuous_…` are those of a second study, in which each free slot gets the next proposal at once (`--continuous`), as
for submitted commands. `--quick` ends each study after some of the runs; the others stay queued.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from looplab.config.lab import load_lab
from looplab.launch.base import Ended, Executor, ExecutorTraits, Exit, LaunchEvent, LaunchSpec, Place, Queued, Started
from looplab.launch.executors import make_executor
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.loop.engine import Engine
from looplab.loop.lock import StudyLock
from looplab.loop.setup import RunOptions, prepare

ROOT = Path(__file__).parents[1]
CORES = 4
"""Slots of the Ray cluster."""
ADOPTED = 8
QUEUED = 100_000
SLOTS = 1_000
RUN_S = 20.0
"""Mean duration of a simulated run, in simulated seconds."""
TICK_S = 0.1
"""Simulated seconds that pass with each call of `poll`."""
LAB = """
study: bench
launch: {{command: {command}}}
base: base.json
knobs: {{x: {{type: int, low: 0, high: 1000000}}}}
slots: {{count: {slots}, gpus: none, cores: none}}
round_size: {runs}
executor: {executor}
"""
GATED = "touch $LOOPLAB_RUN_DIR/here; while [ ! -e {gate} ]; do sleep 0.1; done"


def make_lab(folder: Path, executor: str, *, runs: int, slots: int, command: str = '["true"]') -> Path:
    folder.mkdir(parents=True)
    text = LAB.format(command=command, slots=slots, runs=runs, executor=executor)
    (folder / "lab.yaml").write_text(text)
    (folder / "base.json").write_text('{"x": 0, "train": {"lr": 0.1, "steps": 1000}}')
    return folder


def propose(folder: Path, count: int) -> Ledger:
    """Put so many proposals into the ledger of a lab."""
    ledger = Ledger(load_lab(folder).ledger_path)
    record = StudyLedger(ledger, "bench")
    record.open(None, "min")
    for first in range(1, count, 1000):
        with ledger.write():
            for i in range(first, min(first + 1000, count)):
                record.propose("person", [f"x@set={i}"], "benchmark")
    return ledger


def run_study(
    folder: Path, executor: Executor | None, count: int, queued: int | None = None, *, continuous: bool = False
) -> tuple[float, float]:
    """Run a study of `count` runs, of so many that are queued; return wall and CPU seconds of the engine."""
    ledger = propose(folder, queued or count)
    lab = load_lab(folder)
    study = lab.study(None)
    setup = prepare(
        lab, study, RunOptions(rounds=1) if queued is None else RunOptions(runs=count, continuous=continuous)
    )
    began, cpu = time.perf_counter(), time.process_time()
    with StudyLock(lab.folder, "bench"):
        used = executor or make_executor(lab.folder, study)
        try:
            Engine(setup, ledger, used).run()
        finally:
            used.close()
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    runs = [run for run in StudyLedger(ledger, "bench").runs() if run.status is not None]
    assert len(runs) == count, f"{len(runs)} runs instead of {count}"
    assert {run.status for run in runs} == {"ok"}, [run for run in runs if run.status != "ok"][:2]
    assert ledger.first_broken_link() is None
    return took, cpu


def adoption(folder: Path, executor: str) -> float:
    """Return how long it takes to adopt the runs of a killed engine, in seconds."""
    gate = folder.parent / f"{folder.name}.gate"
    command = json.dumps(["/bin/sh", "-c", GATED.format(gate=gate)])
    make_lab(folder, executor, runs=ADOPTED, slots=ADOPTED, command=command)
    propose(folder, ADOPTED).close()
    looplab = str(Path(sys.executable).with_name("looplab"))
    engine = subprocess.Popen(
        [looplab, "run", "--lab", str(folder), "--rounds", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len(list(folder.glob("outputs/bench/*/here"))) < ADOPTED:
        if engine.poll() is not None:
            raise SystemExit("the engine ended by itself")
        time.sleep(0.05)
    time.sleep(1.0)  # it has noticed
    engine.kill()
    engine.wait()
    began, adopted = time.perf_counter(), 0
    resumed = subprocess.Popen(
        [looplab, "resume", "--lab", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert resumed.stdout is not None
    while adopted < ADOPTED:
        line = resumed.stdout.readline()
        if not line:
            raise SystemExit(f"only {adopted} of {ADOPTED} runs were adopted")
        adopted += "adopted" in line
    took = time.perf_counter() - began
    gate.touch()
    resumed.stdout.read()
    resumed.wait()
    return took


# -- Slurm


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(ROOT))
    from tests.launch.slurm_cluster import SlurmCluster

    cluster = SlurmCluster(folder)
    cluster.start()
    os.environ.update(cluster.env)
    try:
        yield
    finally:
        cluster.stop()


def plain_sbatch(folder: Path, count: int) -> float:
    """Submit so many jobs, and wait until Slurm lists none of them."""
    folder.mkdir()
    began = time.perf_counter()
    for n in range(count):
        script = f"#!/bin/sh\ntrue\ntouch {folder}/{n}\n"
        subprocess.run(
            ["sbatch", "--parsable", "--output=/dev/null", "--job-name=plain"], input=script, text=True, check=True,
            capture_output=True,
        )  # fmt: skip
    while len(os.listdir(folder)) < count:
        time.sleep(0.05)
    return time.perf_counter() - began


def measure_slurm(root: Path, *, quick: bool) -> dict[str, Any]:
    count, repeats = (24, 2) if quick else (200, 5)
    executor = f"{{slurm: {{jobs: {count}}}}}"
    pairs = []
    with slurm_cluster(root / "slurm"):
        plain_sbatch(root / "warm", 4)
        for n in range(repeats):
            plain = plain_sbatch(root / f"plain{n}", count)
            ours, _ = run_study(make_lab(root / f"lab{n}", executor, runs=count, slots=count), None, count)
            pairs.append((plain, ours))
        adopt_s = adoption(root / "adopted", executor)
    return {**ratio("sbatch", pairs, count), "adopt_s": round(adopt_s, 2), "repeats": repeats, "runs": count}


# -- Ray


def measure_ray(root: Path, *, quick: bool) -> dict[str, Any]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray
    from ray.cluster_utils import Cluster

    count, repeats = (200, 2) if quick else (1000, 5)
    for attempt in range(3):  # Ray gives its processes 30 s to start, which a busy machine may not have
        try:
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CORES, "include_dashboard": False})
            break
        except Exception as error:  # noqa: BLE001 (it raises a plain one)
            if attempt == 2:
                raise SystemExit(f"Ray does not start here: {error}") from None
    ray.init(address=cluster.address, log_to_driver=False)

    @ray.remote(num_cpus=1, max_retries=0)
    def task() -> int:
        return subprocess.run(["true"], check=False).returncode

    def plain() -> float:
        while ray.available_resources().get("CPU", 0) < CORES:  # the actors of the study before end
            time.sleep(0.05)
        began = time.perf_counter()
        assert ray.get([task.remote() for _ in range(count)]) == [0] * count
        return time.perf_counter() - began

    executor = f"{{ray: {{address: '{cluster.address}', slots: {CORES}, idle: 2s}}}}"
    try:
        plain()
        run_study(make_lab(root / "warm", executor, runs=20, slots=CORES), None, 20)
        pairs = []
        for n in range(repeats):
            bare = plain()
            ours, _ = run_study(make_lab(root / f"lab{n}", executor, runs=count, slots=CORES), None, count)
            pairs.append((bare, ours))
        cluster.add_node(num_cpus=ADOPTED)
        adopt_s = adoption(root / "adopted", executor.replace(f"slots: {CORES}", f"slots: {ADOPTED}"))
    finally:
        ray.shutdown()
        cluster.shutdown()
    return {**ratio("ray_tasks", pairs, count), "adopt_s": round(adopt_s, 2), "repeats": repeats, "runs": count}


def ratio(what: str, pairs: list[tuple[float, float]], count: int) -> dict[str, Any]:
    plain, ours = (statistics.median(column) / count * 1000 for column in zip(*pairs, strict=True))
    factor = statistics.median(one / other for other, one in pairs)
    print(f"plain {what.replace('_', ' '):9s} {plain:8.2f} ms a run     1.00 ×")
    print(f"looplab         {ours:8.2f} ms a run   {factor:6.2f} ×")
    return {f"x_{what}": round(factor, 3), "ms_per_run": round(ours, 2), "plain_ms_per_run": round(plain, 2)}


# -- simulated


class SimulatedExecutor:
    """Queues runs, starts each in a free one of its slots, and ends it after its simulated duration."""

    traits = ExecutorTraits(name="simulated", places="theirs", queues=True, prequeues=False)

    def __init__(self, slots: int, seed: int = 0) -> None:
        self._free = slots
        self._rng = random.Random(seed)
        self._waiting: deque[str] = deque()
        self._ends: list[tuple[float, str, float]] = []
        self._events: deque[LaunchEvent] = deque()
        self.now = 0.0
        self.ended_at: list[float] = []
        """CPU time of this process when each run ended."""
        self.busy_s = 0.0
        """Simulated seconds that all slots together were used."""

    def start(self, spec: LaunchSpec, after: str | None = None) -> None:
        self._waiting.append(spec.run_id)
        self._events.append(Queued(spec.run_id, spec.run_id, "Resources"))

    def cancel(self, run_id: str) -> None:
        pass

    def stop(self, run_id: str, reason: str, grace: float) -> None:
        pass

    def adopt(self, run_id: str, run_dir: Path, record_dir: Path | None = None, attempt: int = 1) -> bool:
        return False

    def is_alive(self, run_dir: Path, record_dir: Path | None = None) -> bool:
        return False

    def stop_detached(self, run_dirs: Any, grace: float) -> tuple[list[str], list[str]]:
        return [], []

    def poll(self, timeout: float) -> list[LaunchEvent]:
        self.now += TICK_S
        while self._ends and self._ends[0][0] <= self.now:
            _, run_id, seconds = heapq.heappop(self._ends)
            self._free += 1
            self.busy_s += seconds
            now = time.time()
            self.ended_at.append(time.process_time())
            self._events.append(Ended(run_id, Exit(0, started=now - seconds, ended=now)))
        while self._free and self._waiting:
            self._free -= 1
            run_id, seconds = self._waiting.popleft(), self._rng.uniform(0.5 * RUN_S, 1.5 * RUN_S)
            heapq.heappush(self._ends, (self.now + seconds, run_id, seconds))
            self._events.append(Started(run_id, Place("simulated", 1, run_id), time.time()))
        found = list(self._events)
        self._events.clear()
        return found

    def growth(self) -> float:
        """Return what a run of the last tenth cost beside one of the second; in the first, the slots are filled."""
        tenth = len(self.ended_at) // 10
        second, last = (self.ended_at[end] - self.ended_at[end - tenth] for end in (2 * tenth, -1))
        return round(last / second, 2)

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def measure_simulated(root: Path, *, quick: bool) -> dict[str, Any]:
    count = 3 * SLOTS if quick else QUEUED
    executor = SimulatedExecutor(SLOTS)
    folder = make_lab(root / "lab", "{freeze: true}", runs=QUEUED, slots=SLOTS)
    took, cpu = run_study(folder, executor, count, QUEUED)
    shutil.rmtree(folder)
    at_once = SimulatedExecutor(SLOTS)
    folder = make_lab(root / "continuous", "{freeze: true}", runs=QUEUED, slots=SLOTS)
    _, continuous_cpu = run_study(folder, at_once, count, QUEUED, continuous=True)
    figures = {
        "queued": QUEUED,
        "slots": SLOTS,
        "runs": count,
        "seconds": round(took, 1),
        "ms_per_run": round(1000 * took / count, 2),
        "cpu_ms_per_run": round(1000 * cpu / count, 2),
        "simulated_s": round(executor.now, 1),
        "slots_used": round(executor.busy_s / executor.now / SLOTS, 3),
        "busy_share": round(cpu / executor.now, 3),
        "x_last_tenth": executor.growth(),
        "continuous_cpu_ms_per_run": round(1000 * continuous_cpu / count, 2),
        "continuous_x_last_tenth": at_once.growth(),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    print(f"{count:,} of {QUEUED:,} queued runs on {SLOTS:,} slots: {figures['ms_per_run']} ms a run")
    return figures


MEASURE: dict[str, Callable[..., dict[str, Any]]] = {
    "slurm": measure_slurm,
    "ray": measure_ray,
    "simulated": measure_simulated,
}


def main(executor: str, root: Path, *, quick: bool) -> None:
    """Measure in the folder `root`, which is removed."""
    try:
        figures = MEASURE[executor](root, quick=quick)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({**figures, "load": round(os.getloadavg()[0], 1)}))
