"""Proximal policy optimization: network, advantages, update, and the Muon optimizer."""

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
    from looplab.recipes.drone.settings import TrainConfig

HIDDEN = 64
INITIAL_STD = 0.6


class NonFiniteUpdate(Exception):
    """The loss or the gradient is not finite."""


class DronePolicy(nn.Module):
    """A Gaussian actor and a critic, as separate networks."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        self.actor = _mlp(obs_dim, action_dim, 0.01)
        self.critic = _mlp(obs_dim, 1, 1.0)
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(INITIAL_STD)))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means of the actions, and the values."""
        return self.actor(obs), self.critic(obs).squeeze(-1)

    def log_prob(self, mean: Tensor, actions: Tensor) -> Tensor:
        scaled = (actions - mean) * torch.exp(-self.log_std)
        return (-0.5 * scaled.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()


def _mlp(inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
    linear = [nn.Linear(inputs, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, outputs)]
    for layer, gain in zip(linear, (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])


@dataclass(frozen=True)
class DroneRollout:
    """Transitions of all drones between two updates; axes: time, drone."""

    obs: Tensor
    actions: Tensor
    log_probs: Tensor
    """Log probabilities of the actions under the behaviour policy."""
    values: Tensor
    """Values under the behaviour policy."""
    rewards: Tensor
    dones: Tensor
    """1 where the episode ended with this step."""


def compute_advantages(rollout: DroneRollout, next_values: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalized advantage estimation; `next_values` are the values after the last step."""
    rewards, values = (x.cpu().numpy() for x in (rollout.rewards, torch.cat([rollout.values, next_values[None]])))
    dones = rollout.dones.cpu().numpy() > 0
    advantages = compute_targets(rewards, values, dones, np.zeros_like(dones), gamma=gamma, lam=gae_lambda).advantages
    return torch.from_numpy(advantages).to(rollout.rewards.device)


def update(
    policy: DronePolicy,
    optimizer: torch.optim.Optimizer,
    rollout: DroneRollout,
    next_values: Tensor,
    train: TrainConfig,
    rng: torch.Generator,
) -> dict[str, float]:
    """Run PPO on one rollout; return the losses, averaged over the minibatches.

    Raises:
        NonFiniteUpdate: The loss or the gradient is not finite. A bad gradient is never applied to the weights.
    """
    advantages = compute_advantages(rollout, next_values, train.gamma, train.gae_lambda)
    returns = advantages + rollout.values
    columns = [rollout.obs, rollout.actions, rollout.log_probs, rollout.values, advantages, returns]
    flat = [column.flatten(0, 1) for column in columns]
    device = policy.log_std.device
    stats: list[Tensor] = []
    for _ in range(train.update_epochs):
        order = torch.randperm(train.batch_size, generator=rng).to(flat[0].device)
        for minibatch in torch.split(order, train.minibatch_size):
            optimizer.zero_grad(set_to_none=True)
            std, mean = torch.std_mean(flat[4][minibatch], correction=0)
            for chunk in torch.split(minibatch, train.max_minibatch_size):
                obs, actions, log_probs, values, adv, ret = (column[chunk].to(device) for column in flat)
                adv = (adv - mean.to(device)) / (std.to(device) + 1e-8)
                loss, losses = _ppo_loss(
                    policy, train,
                    obs=obs, actions=actions, old_log_probs=log_probs, old_values=values, advantages=adv, returns=ret,
                )  # fmt: skip
                (loss * (len(chunk) / len(minibatch))).backward()  # type: ignore[no-untyped-call]
                stats.append(losses)
            norm = nn.utils.clip_grad_norm_(policy.parameters(), train.max_grad_norm or math.inf)
            if not math.isfinite(float(norm)):
                raise NonFiniteUpdate("the gradient is not finite")
            optimizer.step()
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
    means = dict(zip(names, torch.stack(stats).mean(0).tolist(), strict=True))
    return means | explained_variance(means, rollout, returns)


def explained_variance(losses: dict[str, float], rollout: DroneRollout, returns: Tensor) -> dict[str, float]:
    """Return the share of the variance of returns that the values explained; raise if a loss is not finite."""
    if not all(map(math.isfinite, losses.values())):
        raise NonFiniteUpdate("the loss is not finite")
    residual, total = (returns - rollout.values).var(), returns.var()
    return {"explained_variance": float(1.0 - residual / total) if total > 0 else 0.0}


def _ppo_loss(
    policy: DronePolicy,
    train: TrainConfig,
    *,
    obs: Tensor,
    actions: Tensor,
    old_log_probs: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the loss, and for logging: policy loss, value loss, entropy, approximate KL, clip fraction."""
    with torch.autocast(obs.device.type, getattr(torch, train.precision), train.precision != "float32"):
        mean, values = policy(obs)
    mean, values = mean.float(), values.float()
    log_ratio = policy.log_prob(mean, actions) - old_log_probs
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - train.clip_coef, 1 + train.clip_coef)
    policy_loss = -torch.minimum(advantages * ratio, advantages * clipped_ratio).mean()
    clipped_values = old_values + (values - old_values).clamp(-train.vf_clip_coef, train.vf_clip_coef)
    value_loss = 0.5 * torch.maximum((values - returns).square(), (clipped_values - returns).square()).mean()
    entropy = policy.entropy()
    loss = policy_loss + train.vf_coef * value_loss - train.ent_coef * entropy
    with torch.no_grad():
        approx_kl = (ratio - 1 - log_ratio).mean()
        clip_fraction = ((ratio - 1).abs() > train.clip_coef).float().mean()
    return loss, torch.stack([policy_loss.detach(), value_loss.detach(), entropy.detach(), approx_kl, clip_fraction])


def make_optimizer(policy: DronePolicy, train: TrainConfig) -> torch.optim.Optimizer:
    betas = (train.adam_beta1, train.adam_beta2)
    if train.optimizer == "muon":
        return Muon(policy.parameters(), train.learning_rate, betas, train.adam_eps)
    kind = torch.optim.AdamW if train.optimizer == "adamw" else torch.optim.Adam
    return kind(policy.parameters(), lr=train.learning_rate, betas=betas, eps=train.adam_eps)


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """Approximate the nearest orthogonal matrix with Newton-Schulz iterations; singular values end up in 0.6 … 1.3.

    The polynomial makes small singular values grow fast; it does not converge to 1, and need not.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x: Tensor = wide / (torch.linalg.vector_norm(wide) + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def matrix_scale(matrix: Tensor) -> float:
    """Return the factor that gives an orthogonalized step the typical size of Adam's."""
    return 0.2 * math.sqrt(max(matrix.shape))


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices, AdamW for all other parameters.

    Steps of matrices are scaled to the typical size of Adam's, so that one learning rate fits both.
    """

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        params = list(parameters)
        matrices = [p for p in params if p.ndim == 2]
        others = [p for p in params if p.ndim != 2]
        groups = [{"params": matrices, "matrices": True}, {"params": others, "matrices": False}]
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__([group for group in groups if group["params"]], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            update = self._update_matrix if group["matrices"] else self._update_other
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    update(parameter, group)

    def initial_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter, which its first step creates."""
        state: dict[str, Any] = self.state[parameter]
        if not state and group["matrices"]:
            state["momentum"] = torch.zeros_like(parameter)
        elif not state:
            state.update(step=0, first=torch.zeros_like(parameter), second=torch.zeros_like(parameter))
        return state

    def _update_matrix(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, beta = self.initial_state(parameter, group), group["betas"][0]
        momentum = state["momentum"]
        momentum.lerp_(parameter.grad, 1 - beta)
        nesterov = parameter.grad.lerp(momentum, beta)
        parameter.add_(orthogonalize(nesterov), alpha=-group["lr"] * matrix_scale(parameter))

    def _update_other(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, (beta1, beta2) = self.initial_state(parameter, group), group["betas"]
        state["step"] += 1
        state["first"].lerp_(parameter.grad, 1 - beta1)
        state["second"].lerp_(parameter.grad.square(), 1 - beta2)
        first = state["first"] / (1 - beta1 ** state["step"])
        second = state["second"] / (1 - beta2 ** state["step"])
        parameter.addcdiv_(first, second.sqrt() + group["eps"], value=-group["lr"])
