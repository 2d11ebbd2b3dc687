"""Proximal policy optimisation: the network, the advantages, the update, and the Muon optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from looplab.rl.returns import compute_targets

if TYPE_CHECKING:
    from looplab.recipes.drone.settings import Train

HIDDEN = 64
FIRST_STD = 0.6


class Diverged(Exception):
    """The loss or the gradient is no longer a finite number; the weights are still those of before."""


class Policy(nn.Module):
    """An actor, which gives the mean of a normal distribution over actions, and a critic, apart from each other."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.actor = _layers(observations, actions, 0.01)
        self.critic = _layers(observations, 1, 1.0)
        self.log_std = nn.Parameter(torch.full((actions,), math.log(FIRST_STD)))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Mean actions, and the values of the states."""
        return self.actor(observations), self.critic(observations).squeeze(-1)

    def log_prob(self, mean: Tensor, actions: Tensor) -> Tensor:
        scaled = (actions - mean) * torch.exp(-self.log_std)
        return (-0.5 * scaled.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()


def _layers(inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
    linear = [nn.Linear(inputs, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, outputs)]
    for layer, gain in zip(linear, (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])


@dataclass(frozen=True)
class Rollout:
    """What all drones did between two updates; the first axis is time, the second the drone."""

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    """Of the actions, when they were chosen."""
    values: Tensor
    """What the critic said then."""
    rewards: Tensor
    done: Tensor
    """1 where the episode ended with this step."""


def advantages(rollout: Rollout, after: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimation; `after` is the critic's value of what came after the last step."""
    rewards, values = (x.cpu().numpy() for x in (rollout.rewards, torch.cat([rollout.values, after[None]])))
    done = rollout.done.cpu().numpy() > 0
    found = compute_targets(rewards, values, done, np.zeros_like(done), gamma=gamma, lam=gae_lambda).advantages
    return torch.from_numpy(found).to(rollout.rewards.device)


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    after: Tensor,
    train: Train,
    generator: torch.Generator,
) -> dict[str, float]:
    """Learn from a rollout; gives the losses, averaged over the minibatches."""
    gained = advantages(rollout, after, train.gamma, train.gae_lambda)
    returns = gained + rollout.values
    columns = [rollout.observations, rollout.actions, rollout.log_probs, rollout.values, gained, returns]
    flat = [column.flatten(0, 1) for column in columns]
    device = policy.log_std.device
    seen: list[Tensor] = []
    for _ in range(train.update_epochs):
        order = torch.randperm(train.batch_size, generator=generator).to(flat[0].device)
        for minibatch in torch.split(order, train.minibatch_size):
            optimizer.zero_grad(set_to_none=True)
            spread, middle = torch.std_mean(flat[4][minibatch], correction=0)
            for piece in torch.split(minibatch, train.max_minibatch_size):
                observations, actions, log_probs, values, gain, target = (c[piece].to(device) for c in flat)
                gain = (gain - middle.to(device)) / (spread.to(device) + 1e-8)
                loss, parts = _loss(policy, observations, actions, log_probs, values, gain, target, train)
                (loss * (len(piece) / len(minibatch))).backward()  # type: ignore[no-untyped-call]
                seen.append(parts)
            norm = nn.utils.clip_grad_norm_(policy.parameters(), train.max_grad_norm or math.inf)
            if not math.isfinite(float(norm)):
                raise Diverged("the gradient is not finite")
            optimizer.step()
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
    losses = dict(zip(names, torch.stack(seen).mean(0).tolist(), strict=True))
    if not all(map(math.isfinite, losses.values())):
        raise Diverged("the loss is not finite")
    rest = (returns - rollout.values).var()
    losses["explained_variance"] = float(1.0 - rest / returns.var()) if returns.var() > 0 else 0.0
    return losses


def _loss(
    policy: Policy,
    observations: Tensor,
    actions: Tensor,
    log_probs: Tensor,
    values: Tensor,
    gain: Tensor,
    target: Tensor,
    train: Train,
) -> tuple[Tensor, Tensor]:
    with torch.autocast(observations.device.type, getattr(torch, train.precision), train.precision != "float32"):
        mean, value = policy(observations)
    mean, value = mean.float(), value.float()
    log_ratio = policy.log_prob(mean, actions) - log_probs
    ratio = log_ratio.exp()
    limited = ratio.clamp(1 - train.clip_coef, 1 + train.clip_coef)
    policy_loss = -torch.minimum(gain * ratio, gain * limited).mean()
    near = values + (value - values).clamp(-train.vf_clip_coef, train.vf_clip_coef)
    value_loss = 0.5 * torch.maximum((value - target).square(), (near - target).square()).mean()
    entropy = policy.entropy()
    loss = policy_loss + train.vf_coef * value_loss - train.ent_coef * entropy
    with torch.no_grad():
        kl = (ratio - 1 - log_ratio).mean()
        clipped = ((ratio - 1).abs() > train.clip_coef).float().mean()
    return loss, torch.stack([policy_loss.detach(), value_loss.detach(), entropy.detach(), kl, clipped])


def make_optimizer(policy: Policy, train: Train) -> torch.optim.Optimizer:
    betas = (train.adam_beta1, train.adam_beta2)
    if train.optimizer == "muon":
        return Muon(policy.parameters(), train.learning_rate, betas, train.adam_eps)
    kind = torch.optim.AdamW if train.optimizer == "adamw" else torch.optim.Adam
    return kind(policy.parameters(), lr=train.learning_rate, betas=betas, eps=train.adam_eps)


def orthogonalised(matrix: Tensor, steps: int = 5) -> Tensor:
    """About the nearest matrix whose singular values are all 1, by Newton-Schulz iterations; they end within 0.6 … 1.3.

    The polynomial is chosen so that small singular values grow fast; it does not settle at 1, and need not.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x: Tensor = wide / (torch.linalg.vector_norm(wide) + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for matrices, AdamW for the rest.

    The step of a matrix is scaled to the usual size of Adam's, so that one learning rate serves both.
    """

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        listed = list(parameters)
        matrices = [p for p in listed if p.ndim == 2]
        others = [p for p in listed if p.ndim != 2]
        groups = [{"params": matrices, "matrices": True}, {"params": others, "matrices": False}]
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__([group for group in groups if group["params"]], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            move = self._move_matrix if group["matrices"] else self._move_other
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    move(parameter, group)

    def _move_matrix(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, beta = self.state[parameter], group["betas"][0]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"]
        momentum.lerp_(parameter.grad, 1 - beta)
        ahead = parameter.grad.lerp(momentum, beta)
        parameter.add_(orthogonalised(ahead), alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))

    def _move_other(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state.update(step=0, first=torch.zeros_like(parameter), second=torch.zeros_like(parameter))
        state["step"] += 1
        state["first"].lerp_(parameter.grad, 1 - beta1)
        state["second"].lerp_(parameter.grad.square(), 1 - beta2)
        first = state["first"] / (1 - beta1 ** state["step"])
        second = state["second"] / (1 - beta2 ** state["step"])
        parameter.addcdiv_(first, second.sqrt() + group["eps"], value=-group["lr"])
