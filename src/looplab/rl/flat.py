"""All parameters of a module in one vector, and their gradients in another: what an optimizer, a norm or a copy then
costs is one operation instead of one for each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Flat:
    """Moves a module's parameters into one vector that they become views of. Names and shapes stay as they were."""

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

    def clear(self) -> None:
        self.grad.zero_()

    @property
    def grad(self) -> Tensor:
        assert self.vector.grad is not None
        return self.vector.grad

    def clip(self, limit: float) -> Tensor:
        """Shorten the gradient to `limit`; gives its length before."""
        length: Tensor = torch.linalg.vector_norm(self.grad)
        self.grad.mul_((limit / (length + 1e-6)).clamp(max=1.0))
        return length


def adam(flat: Flat, rate: float, eps: float) -> torch.optim.Adam:
    return torch.optim.Adam([flat.vector], lr=rate, eps=eps, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def random_state(generator: Any) -> dict[str, Any]:
    """Of a NumPy generator, as plain values."""
    state = generator.bit_generator.state
    return {"name": state["bit_generator"], **{k: v for k, v in state.items() if k != "bit_generator"}}


def set_random_state(generator: Any, state: dict[str, Any]) -> None:
    plain = dict(state)
    generator.bit_generator.state = {"bit_generator": plain.pop("name"), **plain}
