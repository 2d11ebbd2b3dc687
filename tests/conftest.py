"""What all tests share: patience, and a process whose signals do not depend on who runs the tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from looplab.runs.redact import forget

collect_ignore = ["onboard/shelf"]

CLUSTER_TESTS = ("test_slurm.py", "test_ray.py", "test_recipes_on_slurm.py")
"""Files whose tests start a cluster."""
PATIENCE_S = 300.0
"""Seconds that a test waits for what must come. Only a failing test, or a very busy machine, takes as long."""

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # before torch is imported; on busy cores, threads only wait for each other

hypothesis.settings.register_profile(
    "looplab",
    deadline=None,  # how long an example takes depends on what else the machine does
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize="LOOPLAB_TEST_RANDOM" not in os.environ,  # with it: other examples for each --hypothesis-seed
    max_examples=int(os.environ.get("LOOPLAB_TEST_EXAMPLES", "100")),
    database=None,
)
hypothesis.settings.load_profile("looplab")


def pytest_configure() -> None:
    """Give the processes that tests start default signals, whoever runs the tests; in the workers of xdist too.

    In the background of a shell, or under nohup, signals are ignored, and programs inherit that; a handler they do not
    inherit. So one that does nothing takes its place: a Ctrl-C meant for others still does not end the tests.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup`, all tests of a cluster run in one worker: each worker would start a cluster of its own.

    xdist has marks for that, which have no effect with recent versions of pytest.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByCluster(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(CLUSTER_TESTS) else nodeid

    return ByCluster(config, log)


@pytest.fixture(autouse=True)
def _no_remembered_secrets() -> Iterator[None]:
    """Each test knows the secrets of its own environment alone."""
    yield
    forget()


@pytest.fixture
def shared_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """One folder mounted twice by FUSE, as on two hosts: locks are forwarded, and neither mount caches."""
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("FUSE cannot be used: no bindfs, or /dev/fuse is closed")
    mounts = tmp_path / "host1", tmp_path / "host2"
    (tmp_path / "server").mkdir()
    options = "--multithreaded", "--enable-lock-forwarding", "-o", "direct_io,attr_timeout=0,entry_timeout=0"
    servers = []
    for mount in mounts:
        mount.mkdir()
        servers.append(subprocess.Popen(["bindfs", "-f", *options, str(tmp_path / "server"), str(mount)]))
    try:
        while not all(map(os.path.ismount, mounts)):
            if any(server.poll() is not None for server in servers):
                pytest.skip("FUSE cannot be used: bindfs does not mount")
            time.sleep(0.01)
        yield mounts
    finally:
        for mount in mounts:
            unmount = ["umount"] if os.getuid() == 0 else ["fusermount", "-u"]
            subprocess.run([*unmount, str(mount)], check=False, capture_output=True)
        for server in servers:
            server.terminate()
            server.wait()
