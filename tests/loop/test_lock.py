"""One engine a study, however often somebody looks whether there is one, and whatever becomes of the lock file."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from looplab.config import disk
from looplab.errors import BusyError, LabError
from looplab.loop import lock
from looplab.loop.lock import StudyLock, engine_pid


def test_the_second_engine_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with StudyLock(tmp_path, "s"):
        assert engine_pid(tmp_path, "s") == os.getpid()
        with pytest.raises(BusyError, match=f"pid {os.getpid()}"), StudyLock(tmp_path, "s"):
            pass
        assert engine_pid(tmp_path, "s") == os.getpid()
    assert engine_pid(tmp_path, "s") is None
    with StudyLock(tmp_path, "s"):
        pass


def test_studies_of_one_lab_do_not_exclude_each_other(tmp_path: Path) -> None:
    with StudyLock(tmp_path, "a"), StudyLock(tmp_path, "b"):
        assert engine_pid(tmp_path, "a") == engine_pid(tmp_path, "b") == os.getpid()
        assert engine_pid(tmp_path, "c") is None


def test_asking_for_an_engine_takes_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StudyLock(tmp_path, "s"):
        pass
    asked: list[int] = []
    real: Callable[..., object] = fcntl.fcntl

    def spy(descriptor: int, command: int, argument: object = 0) -> object:
        asked.append(command)
        return real(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", spy)
    monkeypatch.delattr(fcntl, "flock")
    assert engine_pid(tmp_path, "s") is None
    assert set(asked) == {fcntl.F_OFD_GETLK}


def test_an_engine_starts_while_others_ask_for_it_all_the_time(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom looplab.loop.lock import engine_pid\nprint('x', flush=True)\n"
        "while True: engine_pid(Path(sys.argv[1]), 's')"
    )
    asker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert asker.stdout is not None
    try:
        assert asker.stdout.readline()
        for _ in range(300):
            with StudyLock(tmp_path, "s"):
                pass
    finally:
        asker.kill()
        asker.wait()
        asker.stdout.close()


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_second_engine_does_not_join_when_the_lock_file_is_gone(tmp_path: Path, how: str) -> None:
    with StudyLock(tmp_path, "s"):
        (tmp_path / ".looplab" / "s.lock").unlink()
        if how == "replaced":
            (tmp_path / ".looplab" / "s.lock").touch()
        assert engine_pid(tmp_path, "s") == 0
        with pytest.raises(BusyError), StudyLock(tmp_path, "s"):
            pass
        with pytest.raises(BusyError), StudyLock(tmp_path, "s"):
            pass
    assert engine_pid(tmp_path, "s") is None


def test_a_lab_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="cannot lock"), StudyLock(tmp_path / "lab", "s"):
        pass
    assert engine_pid(tmp_path / "lab", "s") is None
    assert not (tmp_path / "lab").exists()


# -- network disks


def test_engines_of_two_hosts_do_not_join_on_a_disk_that_keeps_locks_from_others(
    shared_disk: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "TOUCH_S", 0.05)
    monkeypatch.setattr(lock, "SILENT_S", 3.0)
    monkeypatch.setattr(lock, "is_held", lambda *_: False)
    for host in shared_disk:
        (host / ".looplab").mkdir(exist_ok=True)
    ours = os.uname()
    there = os.uname_result((ours.sysname, "elsewhere", *ours[2:]))
    with StudyLock(shared_disk[0], "s"):
        assert (shared_disk[1] / ".looplab/s.lock").read_text() == f"{os.getpid()} {ours.nodename}"
        monkeypatch.setattr(lock, "_lock", lambda descriptor: True)  # locks are local to each host
        monkeypatch.setattr(os, "uname", lambda: there)
        assert engine_pid(shared_disk[1], "s") == 0
        with pytest.raises(BusyError, match=f"on host {ours.nodename}"), StudyLock(shared_disk[1], "s"):
            pass
        copied = (tmp_path / "server/.looplab/s.lock").read_bytes()
    assert engine_pid(shared_disk[1], "s") is None
    with StudyLock(shared_disk[1], "s"):  # after a clean end nobody waits
        pass
    # A host that is gone is silent.
    (tmp_path / "server/.looplab/s.lock").write_bytes(copied)
    with pytest.raises(BusyError), StudyLock(shared_disk[1], "s"):
        pass
    os.utime(tmp_path / "server/.looplab/s.lock", (time.time() - 4, time.time() - 4))
    assert engine_pid(shared_disk[1], "s") is None
    with StudyLock(shared_disk[1], "s"):
        pass


@pytest.mark.parametrize(("f_type", "name"), [(0x6969, "NFS"), (0x0BD00BD0, "Lustre"), (0xFF534D42, "CIFS")])
def test_network_disks_are_known_by_statfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, f_type: int, name: str
) -> None:
    monkeypatch.setattr(disk, "filesystem_type", lambda folder: f_type)
    assert disk.network_disk(tmp_path) == name


def test_a_disk_without_locks_is_not_a_busy_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, command: int, request: bytes) -> bytes:
        raise OSError(errno.ENOSYS, "Function not implemented")

    (tmp_path / ".looplab").mkdir()
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(LabError, match="Function not implemented") as failed, StudyLock(tmp_path, "s"):
        pass
    assert "state_dir" in str(failed.value.hint)


def test_local_disks_are_not_refused(tmp_path: Path) -> None:
    assert disk.filesystem_type(tmp_path) != 0
    assert disk.network_disk(Path("/dev/shm")) is None
    assert disk.filesystem_type(tmp_path / "missing") == 0


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_lock_that_is_not_a_file_is_put_aside(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ".looplab" / "toy.lock"
    path.parent.mkdir()
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    assert engine_pid(tmp_path, "toy") is None
    with StudyLock(tmp_path, "toy"):
        assert engine_pid(tmp_path, "toy") == os.getpid()
        assert path.is_file()
    assert len(list(path.parent.glob("toy.lock.changed-*"))) == 1


def test_a_lock_that_is_a_link_is_put_aside_and_the_file_elsewhere_stays(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / ".looplab").mkdir()
    (tmp_path / ".looplab" / "s.lock").symlink_to(tmp_path / "victim")
    with StudyLock(tmp_path, "s"):
        assert engine_pid(tmp_path, "s") == os.getpid()
    assert (tmp_path / "victim").read_text() == "kept"


def test_a_child_that_a_killed_engine_has_just_forked_does_not_keep_the_next_one_out(tmp_path: Path) -> None:
    engine = os.fork()
    if engine == 0:
        StudyLock(tmp_path, "toy").__enter__()
        if os.fork() == 0:
            time.sleep(0.3)
        os._exit(0)
    os.waitpid(engine, 0)
    with StudyLock(tmp_path, "toy"):
        assert engine_pid(tmp_path, "toy") == os.getpid()
