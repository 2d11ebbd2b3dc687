"""All parameters of a module in one vector and their gradients in another.

An optimizer step, a gradient norm or a copy is then one operation instead of one per layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class FlatParameters:
    """Move a module's parameters into one vector and make them views of it. Names and shapes do not change."""

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        self.vector = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters]))
        self.vector.grad = torch.zeros_like(self.vector)
        start = 0
        for p in parameters:
            end = start + p.numel()
            p.data = self.vector.data[start:end].view_as(p)
            p.grad = self.vector.grad[start:end].view_as(p)
            start = end

    @property
    def grad(self) -> Tensor:
        assert self.vector.grad is not None
        return self.vector.grad

    def zero_grad(self) -> None:
        self.grad.zero_()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradient down to `max_norm` and return its norm before clipping."""
        norm: Tensor = torch.linalg.vector_norm(self.grad)
        self.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


def make_adam(flat: FlatParameters, learning_rate: float, eps: float) -> torch.optim.Adam:
    return torch.optim.Adam([flat.vector], lr=learning_rate, eps=eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def get_rng_state(rng: np.random.Generator) -> dict[str, Any]:
    """Return the state of a NumPy generator as plain values."""
    state = rng.bit_generator.state
    return {"name": state["bit_generator"], **{k: v for k, v in state.items() if k != "bit_generator"}}


def set_rng_state(rng: np.random.Generator, state: Mapping[str, Any]) -> None:
    plain = dict(state)
    rng.bit_generator.state = {"bit_generator": plain.pop("name"), **plain}
