"""Runs on a real Ray cluster of three nodes on loopback: the contract, lost nodes, and engines that are killed."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S
from tests.launch.studies import executed, kill_engines, make_study, start_engine, until
from tests.loop.killing import RUNS

from looplab.config.lab import RayConfig
from looplab.launch.base import Ended, Executor, ExecutorContext, LaunchEvent, LaunchSpec, Resources, Slot, Started
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.testing.executors import GATED, ExecutorContract

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="Ray is not installed")


class SmallCluster:
    """A head without cores, and two nodes with eight cores and four devices that do not exist."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = [self.add() for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver=False)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=8, num_gpus=4)

    def lose(self) -> None:
        """Kill a node, and replace it by a new one."""
        self.cluster.remove_node(self.nodes.pop(0), allow_graceful=False)
        self.nodes.append(self.add())

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="session")
def cluster() -> Iterator[SmallCluster]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    why, found = "", None
    for _ in range(3):  # Ray gives its processes 30 s to start, which a busy machine may not have
        try:
            found = SmallCluster()
            break
        except Exception as error:
            why = str(error)
    if found is None:
        pytest.skip(f"Ray does not start here: {why}")
    yield found
    found.close()


def make(cluster: SmallCluster, lab: Path, resources: Resources | None = None) -> Executor:
    from looplab.launch.ray import RayExecutor

    return RayExecutor(ExecutorContext(lab, "s"), RayConfig(address=cluster.address, idle=5.0), resources)


class TestRayExecutor(ExecutorContract):
    patience_s = PATIENCE_S

    @pytest.fixture(autouse=True)
    def _on(self, cluster: SmallCluster, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.cluster, self.lab = cluster, tmp_path_factory.getbasetemp()

    def make_executor(self) -> Executor:
        return make(self.cluster, self.lab)


def spec(folder: Path, run_id: str, argv: list[str], slot: str = "ray0", attempt: int = 1) -> LaunchSpec:
    (folder / run_id).mkdir(exist_ok=True)
    return LaunchSpec(run_id, folder / run_id, argv, argv[0], folder, Slot(slot, fixed=False), attempt=attempt)


class Seen:
    """All events of an executor so far."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.events: list[LaunchEvent] = []

    def first(self, kind: type, count: int) -> dict[str, Any]:
        """Return the last event of a kind of each run, once there are those of so many runs."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = {event.run_id: event for event in self.events if isinstance(event, kind)}  # type: ignore[attr-defined]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, f"only {self.events} came"
            self.events += self.executor.poll(1.0)


def test_the_devices_of_a_run_are_those_that_ray_assigns(cluster: SmallCluster, tmp_path: Path) -> None:
    executor = make(cluster, tmp_path, Resources(devices=2))
    argv = ["/bin/sh", "-c", "echo $CUDA_VISIBLE_DEVICES = $LOOPLAB_DEVICES = {looplab.devices}; sleep 1"]
    for name in ("ray0", "ray1"):
        executor.start(spec(tmp_path, name, argv, name))
    seen = Seen(executor)
    seen.first(Ended, 2)
    started = seen.first(Started, 2)
    for name, event in started.items():
        shown = (tmp_path / name / "train.log").read_text().strip().split(" = ")
        assert set(shown) == {",".join(event.place.devices)}
        assert len(event.place.devices) == 2
        assert event.place.job.startswith(name)
    executor.close()


def test_a_run_on_a_lost_node_is_lost_and_its_next_attempt_continues_elsewhere(
    cluster: SmallCluster, tmp_path: Path
) -> None:
    executor = make(cluster, tmp_path)
    trace, go = tmp_path / "trace", tmp_path / "go"
    argv = [sys.executable, "-I", "-S", "-c", GATED, str(trace), str(go), "0"]
    names = [f"ray{n}" for n in range(8)]  # more than Ray packs on one node
    for name in names:
        executor.start(spec(tmp_path, name, argv, name))
    Seen(executor).first(Started, len(names))
    cluster.lose()
    seen = Seen(executor)
    run_id, ended = next(iter(seen.first(Ended, 1).items()))
    assert ended.exit.is_lost
    executor.start(spec(tmp_path, run_id, argv, run_id, attempt=2))
    go.touch()
    while (last := seen.first(Ended, 1)[run_id]).exit.attempt == 1:
        seen.events += executor.poll(1.0)
    assert (last.exit.code, last.exit.reason) == (0, None)
    executor.close()


def ray_study(cluster: SmallCluster, folder: Path, seconds: float, slots: int) -> Path:
    executor = f"{{ray: {{address: '{cluster.address}', idle: 5s}}}}"
    return make_study(folder, executor, seconds=seconds, slots=slots)


def test_a_node_that_is_lost_in_the_middle_of_a_study_costs_no_run(cluster: SmallCluster, tmp_path: Path) -> None:
    folder = ray_study(cluster, tmp_path / "lab", seconds=3.0, slots=12)  # each node has room for eight
    engine = start_engine(folder, "run", "--runs", str(RUNS))
    until(lambda: len(executed(folder)) >= 12, engine)
    cluster.lose()
    assert engine.wait(PATIENCE_S) in (0, 1), (folder / "engine.log").read_text()
    runs = StudyLedger(Ledger(folder / ".looplab/ledger.db"), "killed").runs()
    assert len(runs) == RUNS
    assert {run.status for run in runs} == {"ok", "failed"}  # those that fail by themselves, and no others
    assert sum(run.status == "failed" for run in runs) == 4
    for run_id, times in Counter(executed(folder)).items():
        attempts = list((folder / "outputs/killed" / run_id / "record").glob("attempt-*"))
        assert times <= 1 + len(attempts), f"{run_id} was started {times} times in {1 + len(attempts)} attempts"
    assert set(executed(folder)) == {run.id for run in runs}
    assert list((folder / "outputs/killed").glob("*/record/attempt-2"))  # some were on that node


def test_an_engine_that_is_killed_loses_no_run_and_starts_none_twice(cluster: SmallCluster, tmp_path: Path) -> None:
    kill_engines(ray_study(cluster, tmp_path / "lab", seconds=0.3, slots=4), kills=3, seed=1)


def test_a_run_that_a_killed_engine_has_handed_over_stays_where_it_is(cluster: SmallCluster, tmp_path: Path) -> None:
    first, second = make(cluster, tmp_path), make(cluster, tmp_path)
    trace, go = tmp_path / "trace", tmp_path / "go"
    argv = [sys.executable, "-I", "-S", "-c", GATED, str(trace), str(go), "0"]
    first.start(spec(tmp_path, "r1", argv, "ray0", attempt=2))
    Seen(first).first(Started, 1)
    first.close()
    handed_over = (tmp_path / "r1/job.json").read_text()
    second.start(spec(tmp_path, "r1", argv, "ray1", attempt=2))  # the ledger does not know of that attempt
    seen = Seen(second)
    assert seen.first(Started, 1)["r1"].place.job == json.loads(handed_over)["actor"]
    go.touch()
    ended = seen.first(Ended, 1)["r1"]
    assert (ended.exit.code, ended.exit.attempt) == (0, 2)
    assert (tmp_path / "r1/job.json").read_text() == handed_over
    assert trace.read_text() == "started\n"
    second.close()


# -- nodes that do not share the disk of the lab

WRITER = """
import os, sys, time
run = os.environ["LOOPLAB_RUN_DIR"]
os.makedirs(run + "/checkpoints")
open(run + "/checkpoints/model.pt", "wb").write(b"w" * 20_000_000)
os.symlink("/etc/passwd", run + "/link")
log = open(run + "/metrics.jsonl", "a", buffering=1)
step = 0
while not os.path.exists(sys.argv[1]):
    log.write('{"step": %d}\\n' % step)
    step += 1
    time.sleep(0.05)
print("ran in", run)
sys.exit(3)
"""


def test_a_run_on_another_disk_is_streamed_and_copied_back(cluster: SmallCluster, tmp_path: Path) -> None:
    from looplab.launch.ray import RayExecutor

    node, lab = tmp_path / "node", tmp_path / "lab"
    lab.mkdir()
    config = RayConfig(address=cluster.address, idle=5.0, folder=str(node), copy_mb=30)
    executor = RayExecutor(ExecutorContext(lab, "s"), config)
    go = tmp_path / "go"
    wanted = spec(lab, "r1", [sys.executable, "-I", "-S", "-c", WRITER, str(go)])
    (lab / "r1/config.json").write_text("{}")
    executor.start(replace(wanted, env={"LOOPLAB_RUN_DIR": str(lab / "r1")}))
    seen = Seen(executor)
    seen.first(Started, 1)
    metrics = lab / "r1/metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > 5):  # while it runs
        assert time.monotonic() < deadline
        seen.events += executor.poll(0.1)
    assert list(node.glob("runs/*-r1/metrics.jsonl"))
    go.touch()
    ended = seen.first(Ended, 1)["r1"]
    assert ended.exit.code == 3
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(len(steps)))
    assert (lab / "r1/checkpoints/model.pt").stat().st_size == 20_000_000
    assert str(node) in (lab / "r1/train.log").read_text()
    assert (lab / "r1/exit.json").exists()
    assert not (lab / "r1/link").exists()
    until_gone = time.monotonic() + PATIENCE_S
    while list(node.glob("runs/*")):
        assert time.monotonic() < until_gone
        time.sleep(0.05)
    executor.close()


def test_engines_that_are_killed_lose_nothing_of_runs_on_other_disks(cluster: SmallCluster, tmp_path: Path) -> None:
    executor = f"{{ray: {{address: '{cluster.address}', idle: 5s, folder: '{tmp_path}/node'}}}}"
    folder = make_study(tmp_path / "lab", executor, seconds=0.3, slots=4)
    kill_engines(folder, kills=2, seed=7)
    scores = list((folder / "outputs/killed").glob("*/metrics.jsonl"))
    assert len(scores) == RUNS
    assert all(path.read_text().startswith('{"step": 0, "score": ') for path in scores)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:6379"])
def test_a_cluster_that_does_not_answer_is_reported_before_anything_starts(tmp_path: Path, address: str) -> None:
    folder = make_study(tmp_path / "lab", f"{{ray: {{address: '{address}'}}}}", seconds=0.3, slots=2)
    engine = start_engine(folder, "run", "--runs", "1")
    assert engine.wait(PATIENCE_S) == 2
    said = (folder / "engine.log").read_text()
    assert f"cannot connect to the Ray cluster at {address}: " in said
    assert "Traceback" not in said
    assert not executed(folder)
    assert not list((folder / "outputs").glob("*/0*"))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_engines_are_killed_fifty_times(cluster: SmallCluster, tmp_path: Path, seed: int) -> None:
    kill_engines(ray_study(cluster, tmp_path / "lab", seconds=0.3, slots=4), kills=5, seed=100 + seed)
