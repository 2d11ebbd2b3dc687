"""Policies: from observations to what to do and what it is worth; feed-forward or recurrent, small or of images.

One contract for all: `forward` takes observations [n, ...] or [steps, n, ...] with the memory before the first of them
and the steps at which episodes begin, and gives the head's numbers, values and the memory afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, cast

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from looplab.errors import LabError


class Head(Protocol):
    """How the numbers of a policy's last layer are read as a distribution over actions."""

    @property
    def size(self) -> int:
        """Numbers that the policy must give."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one action."""
        ...

    @property
    def dtype(self) -> Any: ...

    def sample(self, numbers: Tensor, uniform: np.random.Generator) -> tuple[Any, Any]:
        """Actions and their log-probabilities, as arrays."""
        ...

    def judge(self, numbers: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each action, and the entropy."""
        ...

    def best(self, numbers: Tensor) -> Any:
        """The likeliest action."""
        ...


@dataclass(frozen=True)
class Discrete:
    size: int
    shape: tuple[int, ...] = ()
    dtype: Any = np.int64

    def sample(self, numbers: Tensor, uniform: np.random.Generator) -> tuple[Any, Any]:
        logits = numbers.double().cpu().numpy()
        logits = logits - logits.max(axis=-1, keepdims=True)
        weights = np.exp(logits)
        total = weights.sum(axis=-1, keepdims=True)
        heights = np.cumsum(weights, axis=-1)
        draws = uniform.random((len(logits), 1)) * total
        actions = np.minimum((heights <= draws).sum(axis=-1), self.size - 1)
        chosen = np.take_along_axis(logits, actions[:, None], axis=-1) - np.log(total)
        return actions, chosen[:, 0].astype(np.float32)

    def judge(self, numbers: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        logs = torch.log_softmax(numbers, dim=-1)
        chosen = logs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return chosen, -(logs.exp() * logs).sum(-1)

    def best(self, numbers: Tensor) -> Any:
        return numbers.argmax(-1).cpu().numpy()


@dataclass(frozen=True)
class Gaussian:
    """Each number of an action by itself; the policy gives its mean and the logarithm of its spread. What lies outside
    of the bounds is clipped by the caller, after its probability was taken."""

    shape: tuple[int, ...]
    dtype: Any = np.float32

    @property
    def size(self) -> int:
        return 2 * int(np.prod(self.shape))

    def _parts(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        means, spreads = numbers.chunk(2, dim=-1)
        return means, spreads.clamp(-20, 2)

    def sample(self, numbers: Tensor, uniform: np.random.Generator) -> tuple[Any, Any]:
        means, spreads = self._parts(numbers)
        noise = uniform.standard_normal(tuple(means.shape), dtype=np.float32)
        flat = means.cpu().numpy() + np.exp(spreads.cpu().numpy()) * noise
        logs = self.judge(numbers, torch.from_numpy(flat).to(numbers.device))[0]
        return flat.reshape(len(flat), *self.shape), logs.cpu().numpy()

    def judge(self, numbers: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        means, spreads = self._parts(numbers)
        off = (actions.reshape(means.shape) - means) * torch.exp(-spreads)
        logs = -0.5 * off.square() - spreads - 0.9189385332046727
        return logs.sum(-1), (spreads + 1.4189385332046727).sum(-1)

    def best(self, numbers: Tensor) -> Any:
        means = self._parts(numbers)[0]
        return means.cpu().numpy().reshape(len(means), *self.shape)


def head_of(space: gym.Space[Any]) -> Head:
    if isinstance(space, gym.spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, gym.spaces.Box):
        return Gaussian(space.shape)
    raise LabError(f"no policy for actions of the kind {type(space).__name__}", hint="take Discrete or Box actions")


class Policy(nn.Module):
    memory: int = 0
    """Numbers that are carried from step to step; 0: none."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, seen: Tensor, memory: Tensor, begins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The head's numbers, values, and the memory after the last step."""
        raise NotImplementedError


class SmallPolicy(Policy):
    """Two networks of equal shape, one for actions and one for values, computed as one batch of two: half as many
    operations, which are what a small network costs."""

    def __init__(self, inputs: int, head: Head, hidden: Sequence[int] = (64, 64)) -> None:
        super().__init__(head)
        sizes = [inputs, *hidden]
        self.weights = nn.ParameterList([_orthogonal(2, a, b, gain=2**0.5) for a, b in pairwise(sizes)])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(2, 1, b)) for b in hidden])
        wide = head.size // 2 if isinstance(head, Gaussian) else head.size
        self.actor = nn.Linear(sizes[-1], wide)
        self.critic = nn.Linear(sizes[-1], 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)
        nn.init.orthogonal_(self.critic.weight, 1.0)
        nn.init.zeros_(self.actor.bias)
        nn.init.zeros_(self.critic.bias)
        self.spread = nn.Parameter(torch.zeros(wide)) if isinstance(head, Gaussian) else None

    def forward(self, seen: Tensor, memory: Tensor, begins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = seen.reshape(-1, self.weights[0].shape[1]).float()
        both = flat.expand(2, *flat.shape)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            both = torch.tanh(torch.baddbmm(bias, both, weight))
        numbers = self.actor(both[0])
        if self.spread is not None:
            numbers = torch.cat([numbers, self.spread.expand_as(numbers)], dim=-1)
        shape = begins.shape
        return numbers.view(*shape, -1), self.critic(both[1]).view(shape), memory


def _orthogonal(copies: int, rows: int, columns: int, gain: float) -> nn.Parameter:
    weights = torch.empty(copies, rows, columns)
    for weight in weights:
        nn.init.orthogonal_(weight, gain)
    return nn.Parameter(weights)


class ImagePolicy(Policy):
    """A small convolutional network over stacked frames [channels, height, width]; above it, with `memory`, a GRU."""

    def __init__(self, shape: Sequence[int], head: Head, *, width: int = 256, memory: int = 0) -> None:
        super().__init__(head)
        self.memory = memory
        self.eyes = nn.Sequential(
            nn.Conv2d(shape[0], 16, 8, stride=4), nn.ReLU(),
            nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2), nn.ReLU(),
            nn.Flatten(),
        )  # fmt: skip
        with torch.no_grad():
            found = self.eyes(torch.zeros(1, *shape)).shape[1]
        self.body = nn.Linear(found, width)
        self.cell = nn.GRUCell(width, memory) if memory else None
        self.actor = nn.Linear(memory or width, head.size)
        self.critic = nn.Linear(memory or width, 1)
        for layer in (*self.eyes, self.body):
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.orthogonal_(layer.weight, 2**0.5)
                nn.init.zeros_(cast(Tensor, layer.bias))
        nn.init.orthogonal_(self.actor.weight, 0.01)
        nn.init.orthogonal_(self.critic.weight, 1.0)

    def forward(self, seen: Tensor, memory: Tensor, begins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = begins.shape
        flat = seen.reshape(-1, *seen.shape[len(shape) :])
        # Channels last in memory: on processors, convolutions are a quarter faster so.
        shown = (flat.float() * (1 / 255)).contiguous(memory_format=torch.channels_last)
        x = torch.relu(self.body(self.eyes(shown)))
        if self.cell is not None:
            x, memory = remember(self.cell, x.view(*shape, -1), memory, begins)
            x = x.reshape(-1, self.memory)
        return self.actor(x).view(*shape, -1), self.critic(x).view(shape), memory


class RecurrentPolicy(Policy):
    """A GRU between two small layers, for vectors that do not say everything."""

    def __init__(self, inputs: int, head: Head, *, width: int = 64, memory: int = 64) -> None:
        super().__init__(head)
        self.memory = memory
        self.inputs = inputs
        self.body = nn.Linear(inputs, width)
        self.cell = nn.GRUCell(width, memory)
        self.actor = nn.Linear(memory, head.size)
        self.critic = nn.Linear(memory, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def forward(self, seen: Tensor, memory: Tensor, begins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = begins.shape
        x = torch.tanh(self.body(seen.reshape(-1, self.inputs).float())).view(*shape, -1)
        x, memory = remember(self.cell, x, memory, begins)
        return self.actor(x), self.critic(x).squeeze(-1), memory


def remember(cell: nn.GRUCell, x: Tensor, memory: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    """Through the steps one after the other; where an episode begins, all is forgotten first."""
    keep = (~begins).to(x.dtype).unsqueeze(-1)
    if begins.dim() == 1:
        memory = cell(x, memory * keep)
        return memory, memory
    states = []
    for t in range(len(x)):
        memory = cell(x[t], memory * keep[t])
        states.append(memory)
    return torch.stack(states), memory


def make_policy(seen: gym.Space[Any], acts: gym.Space[Any], *, memory: int = 0, width: int | None = None) -> Policy:
    """The policy that fits: of images where observations are [channels, height, width] of bytes, else a small one."""
    head = head_of(acts)
    if not isinstance(seen, gym.spaces.Box):
        raise LabError(f"no policy for observations of the kind {type(seen).__name__}", hint="flatten them to a Box")
    if seen.dtype == np.uint8 and len(seen.shape) == 3:
        return ImagePolicy(seen.shape, head, width=width or 256, memory=memory)
    inputs = int(np.prod(seen.shape))
    if memory:
        return RecurrentPolicy(inputs, head, width=width or 64, memory=memory)
    return SmallPolicy(inputs, head, (width or 64, width or 64))
