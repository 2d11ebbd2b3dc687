"""Slots: which devices and cores a run gets, and what it sees of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.errors import LabError
from looplab.launch.base import Slot
from looplab.launch.slots import core_order, lock_folder, lock_paths, make_slots, slot_environment


def names(slots: list[Slot]) -> list[str]:
    return [slot.name for slot in slots]


# -- devices


def test_without_devices_there_is_one_slot_or_as_many_as_asked_for() -> None:
    assert names(make_slots()) == ["cpu0"]
    assert names(make_slots(count=3)) == ["cpu0", "cpu1", "cpu2"]
    assert {slot.devices for slot in make_slots(count=3)} == {()}


def test_every_device_is_a_slot() -> None:
    slots = make_slots(gpus=["0", "2"])
    assert [(slot.name, slot.devices, slot.device_share) for slot in slots] == [
        ("gpu0", ("0",), 0),
        ("gpu2", ("2",), 0),
    ]


def test_lanes_of_different_devices_come_first() -> None:
    slots = make_slots(gpus=["0", "1"], per_gpu=2)
    assert names(slots) == ["gpu0", "gpu1", "gpu0.1", "gpu1.1"]
    assert [slot.device_share for slot in slots] == [0, 0, 1, 1]
    assert [slot.devices for slot in slots] == [("0",), ("1",), ("0",), ("1",)]


def test_a_cap_spreads_over_the_devices() -> None:
    assert names(make_slots(gpus=["0", "1"], per_gpu=2, count=3)) == ["gpu0", "gpu1", "gpu0.1"]
    assert names(make_slots(gpus=["0", "1"], count=1)) == ["gpu0"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpus": ["0", "1", "0"]}, "listed twice"),
        ({"gpus": ["0"], "per_gpu": 0}, "at least one slot"),
        ({"count": 0}, "at least one slot"),
        ({"gpus": ["0", "1"], "count": 3}, "more slots than 2 device"),
        ({"count": 2, "cores": [[0]], "available": [0, 1]}, "1 set.* for 2 slots"),
        ({"count": 1, "cores": [[0, 7]], "available": [0, 1]}, r"may not use core\(s\) \[7\]"),
    ],
)
def test_impossible_slots_are_rejected(asked: dict[str, object], said: str) -> None:
    with pytest.raises(LabError, match=said) as refused:
        make_slots(**asked)  # type: ignore[arg-type]
    assert refused.value.message


# -- cores


def test_cores_are_shared_out_evenly() -> None:
    assert [slot.cores for slot in make_slots(count=2, available=[0, 1, 2, 3])] == [(0, 1), (2, 3)]
    assert [slot.cores for slot in make_slots(count=3, available=[0, 1, 2, 3])] == [(0, 1), (2,), (3,)]


def test_threads_of_one_core_stay_together() -> None:
    assert [slot.cores for slot in make_slots(count=2, available=[0, 4, 1, 5])] == [(0, 4), (1, 5)]


def test_more_slots_than_cores_take_turns() -> None:
    assert [slot.cores for slot in make_slots(count=5, available=[3, 7])] == [(3,), (7,), (3,), (7,), (3,)]


def test_cores_may_be_left_to_the_system() -> None:
    assert [slot.cores for slot in make_slots(count=3, cores="none")] == [(), (), ()]


def test_cores_may_be_named() -> None:
    slots = make_slots(count=2, cores=[[1, 0], [2], [3]], available=[0, 1, 2, 3])
    assert [slot.cores for slot in slots] == [(1, 0), (2,)]


@given(st.integers(1, 40), st.sets(st.integers(0, 255), min_size=1, max_size=64))
def test_every_slot_has_a_core_and_no_core_lies_idle(n: int, available: set[int]) -> None:
    shares = [slot.cores for slot in make_slots(count=n, available=sorted(available))]
    given_out = [core for share in shares for core in share]
    assert all(shares)
    assert set(given_out) <= available
    if n <= len(available):
        assert sorted(given_out) == sorted(available)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_cores_of_this_process_are_all_ordered() -> None:
    assert sorted(core_order()) == sorted(os.sched_getaffinity(0))


# -- what a run sees


def test_a_run_sees_its_own_devices_and_threads_only() -> None:
    env = slot_environment(Slot("gpu2", devices=("2",), cores=(4, 5)))
    assert env["CUDA_VISIBLE_DEVICES"] == env["HIP_VISIBLE_DEVICES"] == env["LOOPLAB_DEVICES"] == "2"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["LOOPLAB_SLOT"] == "gpu2"
    assert env["LOOPLAB_CORES"] == "4,5"
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == env["OPENBLAS_NUM_THREADS"] == "2"


def test_several_devices_are_listed() -> None:
    assert slot_environment(Slot("g", devices=("0", "3")))["CUDA_VISIBLE_DEVICES"] == "0,3"


def test_a_slot_without_devices_hides_them_all() -> None:
    env = slot_environment(Slot("cpu0"))
    assert env["CUDA_VISIBLE_DEVICES"] == env["HIP_VISIBLE_DEVICES"] == ""
    assert "ZE_AFFINITY_MASK" not in env


def test_a_slot_with_all_cores_says_nothing_about_threads() -> None:
    assert "OMP_NUM_THREADS" not in slot_environment(Slot("cpu0"))


# -- locks


def test_a_lock_is_one_file_a_device_and_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "a/b"))
    assert lock_paths(Slot("cpu0")) == []
    assert lock_paths(Slot("g", ("0", "1"), device_share=1)) == [tmp_path / f"a/b/gpu-{i}.1.lock" for i in (0, 1)]
    assert lock_paths(Slot("m", ("MIG-1/2/3",))) == [tmp_path / "a/b/gpu-MIG-1_2_3.0.lock"]
    assert lock_folder().stat().st_mode & 0o777 == 0o700


def test_a_lock_folder_that_cannot_be_created_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for path in ("file", "file/below"):
        monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / path))
        with pytest.raises(LabError, match="LOOPLAB_LOCK_DIR"):
            lock_folder()


def test_a_lock_folder_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "own")
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "link"))
    with pytest.raises(LabError, match="another user"):
        lock_folder()
    if os.getuid() == 0:
        os.chown(tmp_path / "own", 12345, 12345)
        monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "own"))
        with pytest.raises(LabError, match="another user"):
            lock_folder()
