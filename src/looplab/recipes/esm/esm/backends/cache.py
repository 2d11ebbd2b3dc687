"""Preallocated KV cache of a batch, indexed by position.

Position p of a row is at index p of its slot. So a probe is undone by resetting the length, rows of any length share a
batch without left padding, and a forward pass sees the first n slots as a view.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """[keys and values, layers, slots, heads, capacity, head_dim]; allocated when the first layer writes to it."""

    def __init__(self, layers: int, slots: int, capacity: int) -> None:
        self.layers, self.slots, self.capacity = layers, slots, capacity
        self.data: Tensor | None = None

    def layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer: [slots, heads, capacity, head_dim]; `like`: [rows, heads, …, head_dim]."""
        if self.data is None:
            shape = (2, self.layers, self.slots, like.shape[1], self.capacity, like.shape[-1])
            # Zeros, not uninitialized memory: a masked position has weight 0, and 0 times NaN is NaN.
            self.data = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self.data[0, layer], self.data[1, layer]

    def grow(self, length: int) -> None:
        """Ensure capacity for `length` positions; when it grows, by 50 % more."""
        if length <= self.capacity or self.data is None:
            self.capacity = max(self.capacity, length)
            return
        old = self.data
        self.capacity = length + length // 2
        self.data = torch.zeros((*old.shape[:4], self.capacity, old.shape[5]), dtype=old.dtype, device=old.device)
        self.data[..., : old.shape[4], :] = old

    def to(self, device: torch.device) -> None:
        """Move everything to a device."""
        if self.data is not None:
            self.data = self.data.to(device)

    def swap(self, one: int, other: int, length: int) -> None:
        """Swap two slots."""
        assert self.data is not None
        kept = self.data[:, :, one, :, :length].clone()
        self.data[:, :, one, :, :length] = self.data[:, :, other, :, :length]
        self.data[:, :, other, :, :length] = kept

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy one slot to another."""
        assert self.data is not None
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def read(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return keys and values of one position per slot."""
        assert self.data is not None
        return self.data[:, :, slots, :, positions]

    def write(self, slots: Tensor, positions: Tensor, values: Tensor) -> None:
        """Write back what `read` returned."""
        assert self.data is not None
        self.data[:, :, slots, :, positions] = values


def flat_indices(positions: Tensor, heads: int, capacity: int) -> Tensor:
    """Return the indices of one position per row in flattened [rows, heads, capacity]."""
    rows = len(positions)
    starts = (torch.arange(rows * heads, device=positions.device) * capacity).view(rows, heads)
    return (starts + positions[:, None]).view(-1)


def write_at(values: Tensor, indices: Tensor, new: Tensor) -> None:
    """Write [rows, heads, head_dim] to the `flat_indices` of [rows, heads, capacity, head_dim]."""
    width = values.shape[-1]
    values.view(-1, width).index_copy_(0, indices, new.reshape(-1, width))
