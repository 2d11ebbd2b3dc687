"""A session of more rows than a backend computes at once: several smaller sessions that look like one.

They take turns. A session that waits for its turn is parked: its state leaves the device, so that the memory there
depends on `model.max_num_seqs` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from .base import Completion, Floats, GenerationSession, Injection, SamplingParams, check_rows


class ParkableSession(GenerationSession, Protocol):
    """A session that can wait without occupying the device."""

    def park(self) -> None:
        """Move the state of the rows to host memory."""
        ...

    def resume(self) -> None:
        """Move it back."""
        ...


class SplitSession:
    """Consecutive rows in sessions of at most `size` rows."""

    def __init__(
        self,
        start: Callable[[Sequence[str], Sequence[int]], ParkableSession],
        prompts: Sequence[str],
        seeds: Sequence[int],
        size: int,
    ) -> None:
        self._size, self._count = size, len(prompts)
        self._active: ParkableSession | None = None
        self._parts: list[ParkableSession] = []
        for first in range(0, len(prompts), size):
            self._park()
            self._active = start(prompts[first : first + size], seeds[first : first + size])
            self._parts.append(self._active)

    def _park(self) -> None:
        if self._active is not None:
            self._active.park()

    def _in_turn(self, rows: Sequence[int]) -> Iterator[tuple[ParkableSession, list[int], list[int]]]:
        """Yield each session that has some of the rows, with their places in `rows` and their numbers in it."""
        for number, part in enumerate(self._parts):
            places = [place for place, row in enumerate(rows) if row // self._size == number]
            if places:
                if part is not self._active:
                    self._park()
                    part.resume()
                    self._active = part
                yield part, places, [rows[place] % self._size for place in places]

    def hidden_states(self, rows: Sequence[int], layers: Sequence[int]) -> Floats:
        found: list[Floats | None] = [None] * len(rows)
        for part, places, numbers in self._in_turn(rows):
            for place, state in zip(places, part.hidden_states(numbers, layers), strict=True):
                found[place] = state
        return np.stack([state for state in found if state is not None])

    def generate(
        self,
        rows: Sequence[int],
        limits: Sequence[int],
        injections: Sequence[Injection | None],
        until: str | None,
        sampling: SamplingParams,
        commit: bool = True,
    ) -> list[Completion]:
        check_rows(rows, limits, injections)
        found: dict[int, Completion] = {}
        for part, places, numbers in self._in_turn(rows):
            completions = part.generate(
                numbers, [limits[place] for place in places], [injections[place] for place in places],
                until, sampling, commit,
            )  # fmt: skip
            found |= zip(places, completions, strict=True)
        return [found[place] for place in range(len(rows))]

    def text(self, row: int) -> str:
        return self._parts[row // self._size].text(row % self._size)

    def tokens(self, row: int) -> list[int]:
        return self._parts[row // self._size].tokens(row % self._size)

    def close(self) -> None:
        for part in self._parts:
            part.close()
        self._parts, self._active = [], None
