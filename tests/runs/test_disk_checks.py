"""What a disk must do is tried out on it; what other hosts see is read from the mount."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from looplab.runs import disk_checks
from looplab.runs.disk_checks import check_disk, mount_of


def table(tmp_path: Path, *lines: str) -> str:
    (tmp_path / "mountinfo").write_text("\n".join(lines))
    return str(tmp_path / "mountinfo")


def test_a_local_disk_passes_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    assert [(check.name, check.ok) for check in check_disk(tmp_path)] == [
        ("O_EXCL", True), ("rename", True), ("locks", True), ("clock", True),
    ]  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_a_fuse_mount_passes_and_is_known_as_such(shared_disk: tuple[Path, Path]) -> None:
    assert all(check.ok for check in check_disk(shared_disk[0]))
    mount = mount_of(shared_disk[0])
    assert mount is not None
    assert (mount.kind, mount.point) == ("fuse", str(shared_disk[0]))


@pytest.mark.parametrize(
    ("kind", "options", "seconds"),
    [
        ("nfs4", "rw,vers=4.2,acregmin=3", 60.0),
        ("nfs4", "rw,noac", 0.0),
        ("nfs", "rw,acregmax=10,acdirmax=30", 30.0),
        ("lustre", "rw,flock", None),
        ("fuse.sshfs", "rw,user_id=0", 1.0),
    ],
)
def test_the_cache_of_a_mount_is_read_from_its_options(
    tmp_path: Path, kind: str, options: str, seconds: float | None
) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = f"1 0 9:9 / / rw - ext4 /dev/x rw\n2 1 {number} / {tmp_path} rw shared:1 - {kind} server:/data {options}"
    mount = mount_of(tmp_path, table(tmp_path, lines))
    assert mount is not None
    assert (mount.kind, mount.cache_s) == (kind, seconds)


def test_a_mount_point_with_a_blank_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "my data" / "lab"
    folder.mkdir(parents=True)
    escaped = str(tmp_path / "my data").replace(" ", "\\040")
    mount = mount_of(folder, table(tmp_path, "1 0 9:9 / / rw - ext4 x rw", f"2 1 9:8 / {escaped} rw - nfs x rw"))
    assert mount is not None
    assert mount.kind == "nfs"


def test_a_clock_that_is_off_and_a_lock_that_does_not_exclude_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = disk_checks.time.time()
    monkeypatch.setattr(disk_checks.time, "time", lambda: now - 100)
    monkeypatch.setattr(disk_checks.fcntl, "flock", lambda descriptor, how: None)
    found = {check.name: check for check in check_disk(tmp_path)}
    assert not found["clock"].ok
    assert "+100" in found["clock"].found or "+10" in found["clock"].found
    assert (found["locks"].ok, found["locks"].found) == (False, "two holders have an exclusive lock")
