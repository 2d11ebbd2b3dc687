"""The Slurm executor on a real Slurm: two nodes on loopback, with munge and without accounting."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import PATIENCE_S
from tests.launch.slurm_cluster import SlurmCluster

from looplab.config.lab import SlurmConfig
from looplab.launch.base import Executor
from looplab.launch.slurm import SlurmExecutor
from looplab.testing.executors import ExecutorContract, ExecutorStand

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]

PATIENT_S = max(PATIENCE_S, 90.0)
QUICK = SlurmConfig(poll=0.3, lease=8.0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def stand(tmp_path: Path, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExecutorStand]:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "runs"
    folder.mkdir()
    stand = ExecutorStand(folder, lambda: SlurmExecutor(config=QUICK), PATIENT_S)
    yield stand
    stand.close()
    subprocess.run(["scancel", "--quiet", "--me"], check=False)


class TestSlurmExecutor(ExecutorContract):
    patience_s = PATIENT_S

    @pytest.fixture(autouse=True)
    def _slurm(self, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)

    def make_executor(self) -> Executor:
        return SlurmExecutor(config=QUICK)
