"""Keys and values of a batch, preallocated and indexed by position.

Position p of a row lies at index p of its slot, so a probe is undone by forgetting its length, rows of any length share
a batch without padding on the left, and a forward sees the first n slots as a view.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Cache:
    """[keys and values, layers, slots, heads, capacity, head width]; made when the first layer writes into it."""

    def __init__(self, layers: int, slots: int, capacity: int) -> None:
        self.layers, self.slots, self.capacity = layers, slots, capacity
        self.data: Tensor | None = None

    def layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer: [slots, heads, capacity, head width]; `like` is [rows, heads, …, width]."""
        if self.data is None:
            shape = (2, self.layers, self.slots, like.shape[1], self.capacity, like.shape[-1])
            # Zeros, not just any memory: a masked position weighs 0, and 0 times NaN is NaN.
            self.data = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self.data[0, layer], self.data[1, layer]

    def grow(self, length: int) -> None:
        """Make room for `length` positions, and half as many again."""
        if length <= self.capacity or self.data is None:
            self.capacity = max(self.capacity, length)
            return
        old = self.data
        self.capacity = length + length // 2
        self.data = torch.zeros((*old.shape[:4], self.capacity, old.shape[5]), dtype=old.dtype, device=old.device)
        self.data[..., : old.shape[4], :] = old

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange two slots."""
        assert self.data is not None
        kept = self.data[:, :, one, :, :length].clone()
        self.data[:, :, one, :, :length] = self.data[:, :, other, :, :length]
        self.data[:, :, other, :, :length] = kept

    def copy(self, source: int, target: int, length: int) -> None:
        """Write one slot over another."""
        assert self.data is not None
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def read(self, slots: Tensor, positions: Tensor) -> Tensor:
        """All that is held of one position a slot."""
        assert self.data is not None
        return self.data[:, :, slots, :, positions]

    def write(self, slots: Tensor, positions: Tensor, held: Tensor) -> None:
        """Put back what `read` gave."""
        assert self.data is not None
        self.data[:, :, slots, :, positions] = held


def places(positions: Tensor, heads: int, capacity: int) -> Tensor:
    """Where one position of each row lies when rows, heads and positions are counted through."""
    rows = len(positions)
    starts = (torch.arange(rows * heads, device=positions.device) * capacity).view(rows, heads)
    return (starts + positions[:, None]).view(-1)


def put(held: Tensor, where: Tensor, new: Tensor) -> None:
    """Write [rows, heads, head width] to the `places` of [rows, heads, capacity, head width]."""
    width = held.shape[-1]
    held.view(-1, width).index_copy_(0, where, new.reshape(-1, width))
