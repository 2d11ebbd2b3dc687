"""One engine a study, however often somebody looks whether there is one."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from looplab.errors import BusyError
from looplab.loop.lock import StudyLock, engine_pid


def test_the_second_engine_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with StudyLock(tmp_path, "s"):
        assert engine_pid(tmp_path, "s") == os.getpid()
        with pytest.raises(BusyError, match=f"pid {os.getpid()}"), StudyLock(tmp_path, "s"):
            pass
    assert engine_pid(tmp_path, "s") is None


def test_somebody_who_only_looks_does_not_keep_an_engine_out(tmp_path: Path) -> None:
    with StudyLock(tmp_path, "s"):
        pass
    looking = os.open(tmp_path / ".looplab" / "s.lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)  # as engine_pid does, but slowly
    threading.Timer(0.2, os.close, (looking,)).start()
    with StudyLock(tmp_path, "s"):
        assert engine_pid(tmp_path, "s") == os.getpid()
