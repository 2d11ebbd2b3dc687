"""The slots of one scheduler: which are free, held, prequeued, or blocked because another process uses their device.

A pool knows nothing of processes or devices. A function that is passed in decides whether a slot can be used
(`Devices.why_busy` for this machine), and an executor that refuses a start for its device is reported with `reject`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from looplab.launch.base import Slot

RETRY_S = 2.0
"""Seconds until a slot whose device is in use is checked again."""

NextT = TypeVar("NextT")
"""What is prequeued on a slot: the run that starts there next."""


class SlotPool(Generic[NextT]):
    """Slots, and the runs that hold them. A run is any string that names it.

    Args:
        slots: All slots, in the order in which they are given out.
        why_busy: Returns why a slot cannot be used now; None: it can. Asked only for free slots that are wanted.
        on_wait: Called with a sentence when a slot begins to wait for its device.
    """

    def __init__(
        self,
        slots: Iterable[Slot],
        why_busy: Callable[[Slot], str | None] | None = None,
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._free = deque(slots)
        self._held: dict[str, Slot] = {}
        self._next: dict[str, deque[tuple[str, NextT]]] = {}  # slot → the runs that start there next, in order
        self._blocked: dict[str, tuple[float, str]] = {}  # slot → when to check its device again, and why it waits
        self._gone: set[str] = set()  # names of slots that the executor has lost
        self._why_busy = why_busy
        self._on_wait = on_wait

    @property
    def free(self) -> int:
        """Number of slots without a run, blocked ones included."""
        return len(self._free)

    def slot_of(self, run: str) -> Slot | None:
        """Return the slot that a run holds; None if it holds none."""
        return self._held.get(run)

    def take(self) -> Slot | None:
        """Remove the next free slot that can be used, and return it; None if there is none. `hold` or `put_back`
        follows."""
        for _ in range(len(self._free)):
            slot = self._free.popleft()
            if not self._is_blocked(slot):
                return slot
            self._free.append(slot)
        return None

    def put_back(self, slot: Slot) -> None:
        """Return a slot that was taken and not used; it comes last."""
        self._free_again(slot)

    def hold(self, run: str, slot: Slot) -> None:
        """Assign a taken slot to a run."""
        self._held[run] = slot

    def claim(self, run: str, name: str | None) -> Slot | None:
        """Assign a slot to a run that is running in it already; None if there is no free slot of that name."""
        slot = next((slot for slot in self._free if slot.name == name), None)
        if slot is not None:
            self._free.remove(slot)
            self._held[run] = slot
        return slot

    def release(self, run: str) -> tuple[Slot, NextT] | None:
        """Free the slot of a run that has ended. If another run is prequeued on it, that one holds it from now on, and
        is returned with the slot."""
        slot = self._held.pop(run, None)
        if slot is None:
            return None
        self._blocked.pop(slot.name, None)  # it was used, so a new wait is reported again
        successors = self._next.get(slot.name)
        if not successors:
            self._free_again(slot)
            return None
        next_run, what = successors.popleft()
        self._held[next_run] = slot
        return slot, what

    def add(self, slots: Iterable[Slot]) -> None:
        """Add new slots of the executor; known ones are left alone."""
        known = {slot.name for slot in (*self._free, *self._held.values())}
        self._free.extend(slot for slot in slots if slot.name not in known)
        self._gone -= {slot.name for slot in slots}

    def remove(self, names: Iterable[str]) -> None:
        """Remove slots that the executor has lost: at once, or when the run that holds one is released."""
        self._gone |= set(names)
        self._free = deque(slot for slot in self._free if slot.name not in self._gone)

    def reject(self, run: str, holder: str | None) -> None:
        """Free the slot of a run that was not started. With a holder of its device, the slot waits before it is used
        again; an empty string is an unknown holder."""
        slot = self._held.pop(run, None)
        if slot is None:  # it was adopted, and its slot does not exist any more
            return
        self._free_again(slot)
        if holder is not None:
            self._block(slot, f"its device is held by {holder or 'another run'}")

    # -- runs that start when another one ends

    def prequeue(self, run: str, slot: Slot, what: NextT) -> None:
        """Note a run that starts in a held slot when its holder and those prequeued before have ended."""
        self._next.setdefault(slot.name, deque()).append((run, what))

    def without_successors(self, n: int) -> list[tuple[str, Slot]]:
        """Return the held slots with fewer than n prequeued runs, each with the last run of its line."""
        found = []
        for run, slot in self._held.items():
            successors = self._next.get(slot.name, ())
            if len(successors) < n:
                found.append((successors[-1][0] if successors else run, slot))
        return found

    def prequeued(self) -> list[str]:
        """Return the runs that are prequeued."""
        return [run for successors in self._next.values() for run, _ in successors]

    def forget(self, run: str) -> NextT | None:
        """Remove a prequeued run and return it; None if it is not prequeued."""
        for successors in self._next.values():
            for one in successors:
                if one[0] == run:
                    successors.remove(one)
                    return one[1]
        return None

    # -- devices that others use

    def waits(self) -> Iterator[str]:
        """Yield why free slots wait, as sentences."""
        for slot in self._free:
            if slot.name in self._blocked:
                yield f"{slot.name}: {self._blocked[slot.name][1]}"

    def _free_again(self, slot: Slot) -> None:
        if slot.name not in self._gone:
            self._free.append(slot)

    def _is_blocked(self, slot: Slot) -> bool:
        blocked = self._blocked.get(slot.name)
        if blocked is not None and blocked[0] > time.monotonic():
            return True
        why = self._why_busy(slot) if self._why_busy is not None else None
        if why is not None:
            self._block(slot, why)
        return why is not None

    def _block(self, slot: Slot, why: str) -> None:
        if slot.name not in self._blocked:
            self._on_wait(f"{slot.name}: {why}; waiting (share: true shares it)")
        self._blocked[slot.name] = (time.monotonic() + RETRY_S, why)
