"""The Slurm executor on a real Slurm: two nodes on loopback, with munge and without accounting."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import PATIENCE_S
from tests.launch.slurm_cluster import SlurmCluster
from tests.launch.studies import executed, kill_engines, make_study, start_engine, until

from looplab.config.lab import SlurmConfig
from looplab.launch.base import Ended, Executor, LaunchEvent, LaunchSpec, Queued, Resources, Slot, Started
from looplab.launch.slurm import SlurmExecutor, batch_script, job_key, seconds_of
from looplab.testing.executors import GATED, ExecutorContract, ExecutorHarness

pytestmark = pytest.mark.slow

PATIENT_S = max(PATIENCE_S, 90.0)
QUICK = SlurmConfig(poll=0.3, lease=8.0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def harness(tmp_path: Path, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExecutorHarness]:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "runs"
    folder.mkdir()
    harness = ExecutorHarness(folder, lambda: SlurmExecutor(config=QUICK), PATIENT_S)
    yield harness
    harness.close()
    subprocess.run(["scancel", "--quiet", "--me"], check=False)


class TestSlurmExecutor(ExecutorContract):
    patience_s = PATIENT_S

    @pytest.fixture(autouse=True)
    def _slurm(self, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)

    def make_executor(self) -> Executor:
        return SlurmExecutor(config=QUICK)


# -- what Slurm decides


def test_a_run_waits_gets_the_devices_that_slurm_gives_and_names_its_place(harness: ExecutorHarness) -> None:
    executor = harness.executor()
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['LOOPLAB_DEVICES'], os.environ['SECRET'])"
    spec = harness.spec(
        harness.python(code + "; import time; time.sleep(1)"), slot=Slot("slurm0", fixed=False),
        resources=Resources(devices=2), env={"SECRET": "s3cr3t-value"}, secrets=frozenset({"SECRET"}),
    )  # fmt: skip
    executor.start(spec)
    events: list[LaunchEvent] = []
    while not any(isinstance(event, Ended) for event in events):
        events += executor.poll(1.0)
    assert isinstance(events[0], Queued)
    (started,) = [event for event in events if isinstance(event, Started)]
    assert len(started.place.devices) == 2
    assert started.place.job
    given = ",".join(started.place.devices)
    assert harness.log() == f"{given} {given} s3cr3t-value\n"
    files = [path for path in spec.run_dir.iterdir() if path.name != "train.log"]
    assert not [path for path in files if b"s3cr3t-value" in path.read_bytes()]
    assert harness.file("place.json")["devices"] == list(started.place.devices)


def test_a_run_gets_the_environment_of_the_request_and_that_of_its_node(
    harness: ExecutorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = {"HF_TOKEN": "hf_s3cr3t-value", "CUDA_VISIBLE_DEVICES": "7", "SSH_TTY": "/dev/pts/1", "SLURM_JOB_ID": "9"}
    for name, value in engine.items():
        monkeypatch.setenv(name, value)
    executor = harness.executor()
    monkeypatch.setenv("LATER", "1")  # the environment is that of the moment when the executor was made
    executor.start(
        harness.spec(harness.python("import os, json; print(json.dumps(dict(os.environ)))"), env={"OWN": "1"})
    )
    assert harness.end(executor).ok
    seen = json.loads(harness.log())
    assert (seen["HF_TOKEN"], seen["OWN"], seen["PATH"]) == ("hf_s3cr3t-value", "1", os.environ["PATH"])
    assert seen["SLURM_JOB_ID"] == harness.file("place.json")["job"] != "9"
    assert seen.get("CUDA_VISIBLE_DEVICES") != "7"
    assert not {"SSH_TTY", "LATER", "LOOPLAB_SECRETS"} & set(seen)
    assert {"HF_TOKEN", "PATH"} <= set(harness.file("launch.json")["passed"])
    files = [path for path in (harness.folder / "r1").iterdir() if path.name != "train.log"]
    assert not [path for path in files if b"s3cr3t-value" in path.read_bytes()]


def test_a_preempted_run_is_reported_as_preempted(harness: ExecutorHarness, cluster: SlurmCluster) -> None:
    executor = harness.executor()
    executor.start(harness.spec(["/bin/sleep", "600"], resources=Resources(cores=8)))
    harness.started(executor)
    cluster.command("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
    end = harness.end(executor)
    assert (end.reason, end.is_lost) == ("preempted", True)


def test_a_run_whose_slurmd_dies_lives_on_and_its_own_word_wins(
    harness: ExecutorHarness, cluster: SlurmCluster
) -> None:
    executor, go = harness.executor(), harness.folder / "go"
    executor.start(harness.spec(harness.python(GATED, harness.folder / "trace", go, 7)))
    harness.started(executor)
    host = harness.file("place.json")["slurm"]["SLURMD_NODENAME"]
    cluster.kill_daemon(host)
    harness.until(lambda: "down" in cluster.command("sinfo", "-h", "-n", host, "-o", "%t"))
    harness.nothing_more(executor)
    go.touch()
    end = harness.end(executor)
    assert (end.code, end.reason) == (7, None)
    cluster.start_node(host)
    cluster.await_idle()


def test_a_lost_node_loses_the_run_and_the_next_attempt_runs(harness: ExecutorHarness, cluster: SlurmCluster) -> None:
    executor, go, trace = harness.executor(), harness.folder / "go", harness.folder / "trace"
    argv = harness.python(GATED, trace, go, 0)
    executor.start(harness.spec(argv))
    harness.started(executor)
    host = harness.file("place.json")["slurm"]["SLURMD_NODENAME"]
    cluster.lose_node(host)
    end = harness.end(executor)
    assert (end.reason, end.attempt) == ("lost", 1)
    go.touch()
    executor.start(harness.spec(argv, attempt=2))
    assert harness.end(executor).ok
    assert trace.read_text() == "started\nstarted\n"
    cluster.start_node(host)
    cluster.await_idle()


def test_a_controller_that_restarts_loses_nothing(harness: ExecutorHarness, cluster: SlurmCluster) -> None:
    executor, go = harness.executor(), harness.folder / "go"
    for i in range(4):
        executor.start(harness.spec(harness.python(GATED, harness.folder / f"trace{i}", go, i), f"r{i}"))
    harness.until((harness.folder / "trace3").exists)
    cluster.stop_controller()
    executor.start(harness.spec(harness.python(GATED, harness.folder / "trace4", go, 4), "r4"))
    cluster.start_controller()
    go.touch()
    ends = harness.ends(executor, *(f"r{i}" for i in range(5)))
    assert [ends[f"r{i}"].code for i in range(5)] == [0, 1, 2, 3, 4]
    assert [(harness.folder / f"trace{i}").read_text() for i in range(5)] == ["started\n"] * 5
    cluster.await_idle()


def test_a_submission_whose_answer_was_lost_is_found_by_its_name(harness: ExecutorHarness) -> None:
    first, second, go = harness.executor(), harness.executor(), harness.folder / "go"
    first.start(harness.spec(harness.python(GATED, harness.folder / "trace", go, 7)))
    harness.until((harness.folder / "trace").exists)
    first.close()
    noted = harness.file("job.json")
    (harness.folder / "r1/job.json").write_text(json.dumps({**noted, "id": None}))
    assert second.adopt("r1", harness.folder / "r1")
    go.touch()
    assert harness.end(second).code == 7
    assert (harness.folder / "trace").read_text() == "started\n"


def test_a_run_that_waits_can_be_stopped_and_never_starts(harness: ExecutorHarness) -> None:
    executor, trace = harness.executor(), harness.folder / "trace"
    executor.start(harness.spec(harness.python("open(r'" + str(trace) + "', 'w')"), resources=Resources(devices=99)))
    executor.start(
        harness.spec(["/bin/true"], "r2", resources=Resources(constraints={"begin": "now+1hour"})),
    )
    assert harness.end(executor).reason == "not started"  # no node has so many devices
    executor.stop("r2", "stop", 10)
    assert harness.end(executor, "r2").reason == "stop"
    assert not trace.exists()


# -- whole studies


@pytest.fixture
def study(tmp_path: Path, harness: ExecutorHarness) -> Path:
    """A study on the cluster; `harness` has set its environment."""
    return make_study(tmp_path / "lab", "{slurm: {poll: 0.3, lease: 8}}", seconds=0.3, slots=8)


def test_an_engine_that_is_killed_loses_no_run_and_starts_none_twice(study: Path) -> None:
    kill_engines(study, kills=3, seed=1)


def test_code_that_changes_while_a_run_is_queued_is_not_what_it_runs(study: Path, cluster: SlurmCluster) -> None:
    config = study / "lab.yaml"
    config.write_text(config.read_text().replace("{slurm: {", "{slurm: {sbatch: [--hold], "))
    engine = start_engine(study, "run", "--runs", "3")
    held = ("squeue", "--me", "--noheader", "--array", "--format=%i %r")
    until(lambda: cluster.command(*held).count("JobHeldUser") == 3, engine)
    (study / "train.py").write_text("raise SystemExit('new code')")
    cluster.command("scontrol", "release", ",".join(line.split()[0] for line in cluster.command(*held).splitlines()))
    assert engine.wait(PATIENT_S) == 0, (study / "engine.log").read_text()
    assert len(executed(study)) == 3
    assert "while it was queued" not in (study / "engine.log").read_text()
    assert not [path for path in (study / "outputs/killed/_shared").glob("*tree-*") if path.is_dir()]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_engines_are_killed_fifty_times(study: Path, seed: int) -> None:
    kill_engines(study, kills=5, seed=100 + seed)


def test_a_cluster_that_does_not_answer_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "missing.conf"))
    folder = make_study(tmp_path / "lab", "slurm", seconds=0.3, slots=2)
    engine = start_engine(folder, "run", "--runs", "1")
    assert engine.wait(PATIENT_S) == 2
    assert "Slurm cannot be reached: " in (folder / "engine.log").read_text()
    assert not executed(folder)
    assert not list((folder / "outputs").glob("*/0*"))


@pytest.mark.parametrize(
    ("limit", "seconds"), [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-12", 129600), ("UNLIMITED", None)]
)
def test_time_limits_are_read_as_slurm_reads_them(limit: str, seconds: float | None) -> None:
    assert seconds_of(limit) == seconds


def test_the_name_of_a_job_depends_on_its_folder_and_attempt_alone(tmp_path: Path) -> None:
    assert job_key([tmp_path], 1) == job_key([tmp_path], 1) != job_key([tmp_path], 2)
    assert "--signal=B:USR1@40" in batch_script(SlurmConfig(), [_some_spec(tmp_path)], "k")


def _some_spec(folder: Path) -> LaunchSpec:
    return LaunchSpec("r", folder, ["/bin/true"], path="/bin/true", cwd=folder, slot=Slot("slurm0", fixed=False))
