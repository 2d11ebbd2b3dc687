"""One scheduler of slots: free, held, prequeued, blocked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.launch import pool as pool_module
from looplab.launch.base import Slot
from looplab.launch.pool import SlotPool

A, B = Slot("gpu0", ("0",)), Slot("gpu1", ("1",))


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(pool_module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def start(pool: SlotPool[str], run: str) -> Slot | None:
    slot = pool.take()
    if slot is not None:
        pool.hold(run, slot)
    return slot


def test_slots_are_given_out_in_order_and_come_back_last() -> None:
    pool: SlotPool[str] = SlotPool([A, B])
    assert [start(pool, "1"), start(pool, "2"), start(pool, "3")] == [A, B, None]
    assert pool.release("2") is None
    assert pool.release("1") is None
    assert [pool.take(), pool.take(), pool.take()] == [B, A, None]


def test_a_slot_that_is_not_used_is_put_back() -> None:
    pool: SlotPool[str] = SlotPool([A])
    slot = pool.take()
    assert slot is not None
    assert pool.free == 0
    pool.put_back(slot)
    assert pool.free == 1


def test_an_adopted_run_claims_its_slot() -> None:
    pool: SlotPool[str] = SlotPool([A, B])
    assert pool.claim("1", "gpu1") is B
    assert pool.claim("2", "gpu1") is None, "it is held"
    assert pool.claim("3", "gpu7") is None, "there is no such slot any more"
    assert pool.slot_of("1") is B
    assert pool.slot_of("3") is None
    assert pool.release("3") is None
    assert pool.free == 1


def test_a_prequeued_run_takes_over_the_slot() -> None:
    pool: SlotPool[str] = SlotPool([A])
    start(pool, "1")
    assert pool.without_successors(1) == [("1", A)]
    pool.prequeue("2", A, "second")
    assert pool.without_successors(1) == []
    assert pool.prequeued() == ["2"]
    assert pool.release("1") == (A, "second")
    assert pool.slot_of("2") is A
    assert pool.free == 0
    assert pool.prequeued() == []


def test_several_prequeued_runs_take_over_in_their_order() -> None:
    pool: SlotPool[str] = SlotPool([A])
    start(pool, "1")
    for run in ("2", "3"):
        pool.prequeue(run, A, f"run {run}")
    assert pool.without_successors(2) == []
    assert pool.without_successors(3) == [("3", A)], "the next one follows the last of the line"
    assert pool.release("1") == (A, "run 2")
    assert pool.without_successors(2) == [("3", A)]
    assert pool.forget("3") == "run 3"
    assert pool.without_successors(1) == [("2", A)]
    assert pool.release("2") is None
    assert pool.free == 1


def test_a_prequeued_run_can_be_cancelled() -> None:
    pool: SlotPool[str] = SlotPool([A])
    start(pool, "1")
    pool.prequeue("2", A, "second")
    assert pool.forget("1") is None
    assert pool.forget("2") == "second"
    assert pool.release("1") is None
    assert pool.free == 1


def test_a_device_in_use_is_waited_for_and_reported_once(clock: Clock) -> None:
    busy = {"gpu0": "device 0 is used by python (pid 7)"}
    said: list[str] = []
    asked: list[str] = []

    def why_busy(slot: Slot) -> str | None:
        asked.append(slot.name)
        return busy.get(slot.name)

    pool: SlotPool[str] = SlotPool([A, B], why_busy, said.append)
    assert start(pool, "1") is B
    assert pool.take() is None
    assert asked == ["gpu0", "gpu1"], "a blocked device is not asked again at once"
    assert list(pool.waits()) == ["gpu0: device 0 is used by python (pid 7)"]
    clock.now += pool_module.RETRY_S
    assert pool.take() is None
    assert said == ["gpu0: device 0 is used by python (pid 7); waiting (share: true shares it)"]
    busy.clear()
    clock.now += pool_module.RETRY_S
    assert start(pool, "2") is A
    pool.release("2")
    busy["gpu0"] = "device 0 is used by another"
    assert pool.take() is None
    assert len(said) == 2, "a new wait is reported again"


def test_a_rejected_start_blocks_its_slot_only_if_the_device_is_held(clock: Clock) -> None:
    said: list[str] = []
    pool: SlotPool[str] = SlotPool([A], on_wait=said.append)
    start(pool, "1")
    pool.reject("1", None)
    assert start(pool, "1") is A, "the start was lost: try again at once"
    pool.reject("1", "")
    assert pool.take() is None
    assert said == ["gpu0: its device is held by another run; waiting (share: true shares it)"]
    clock.now += pool_module.RETRY_S
    assert start(pool, "1") is A
    pool.reject("1", "run 0007 of s")
    assert pool.take() is None
    assert len(said) == 1, "it still waits for the same device"


@given(st.lists(st.tuples(st.sampled_from(["start", "end", "reject", "prequeue", "forget"]), st.integers(0, 3))))
def test_no_slot_is_lost_or_held_twice(steps: list[tuple[str, int]]) -> None:
    slots = [Slot(f"cpu{i}") for i in range(3)]
    pool: SlotPool[str] = SlotPool(slots)
    number = 0
    held: dict[str, Slot] = {}
    for what, which in steps:
        number += 1
        running = list(held)
        if what == "start":
            slot = start(pool, str(number))
            if slot is not None:
                held[str(number)] = slot
        elif what == "prequeue":
            for _, slot in pool.without_successors(1 + which)[:1]:
                pool.prequeue(str(number), slot, str(number))
        elif what == "forget":
            for run in pool.prequeued()[:1]:
                assert pool.forget(run) == run
        elif running:
            run = running[which % len(running)]
            slot = held[run]
            if what == "reject":
                if (run, slot) in pool.without_successors(1):
                    pool.reject(run, None)
                    del held[run]
                continue
            del held[run]
            successor = pool.release(run)
            if successor is not None:
                assert successor[0] is slot
                held[successor[1]] = slot
        assert pool.free + len(held) == len(slots)
        assert len({slot.name for slot in held.values()}) == len(held)
        assert all(pool.slot_of(run) is slot for run, slot in held.items())
