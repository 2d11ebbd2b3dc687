"""What all tests share: patience, and a process whose signals do not depend on who runs the tests."""

from __future__ import annotations

import os
import signal

import hypothesis

PATIENCE_S = 300.0
"""Seconds that a test waits for what must come. Only a failing test, or a very busy machine, takes as long."""

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # before torch is imported; on busy cores, threads only wait for each other

hypothesis.settings.register_profile(
    "looplab",
    deadline=None,  # how long an example takes depends on what else the machine does
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=True,
    database=None,
)
hypothesis.settings.load_profile("looplab")


def pytest_configure() -> None:
    """Start from Python's own signal handlers, in the workers of xdist too: a test run in the background of a shell
    or under nohup inherits ignored signals, and so would every process that it starts."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
