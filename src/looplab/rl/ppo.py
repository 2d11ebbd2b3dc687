"""Proximal policy optimization (Schulman et al. 2017) with GAE.

If the behaviour policy lags behind the learner, advantages and returns are corrected by V-trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from looplab.errors import LabError
from looplab.rl.collect import RolloutBuffer
from looplab.rl.flat import FlatParameters, get_rng_state, make_adam, set_learning_rate, set_rng_state
from looplab.rl.fused import STATS, Columns, Loss
from looplab.rl.policies import (
    MAX_LOG_STD,
    MIN_LOG_STD,
    ActorCritic,
    FusedPolicy,
    evaluate,
    fuse,
    mean_or_zero,
    take_rows,
    to_channels_last,
)
from looplab.rl.renamed import rename_keys
from looplab.rl.returns import Targets, compute_targets


@dataclass(frozen=True)
class PpoSettings:
    learning_rate: float = 3e-4
    epochs: int = 10
    """Passes over each rollout."""
    minibatch: int = 64
    """Transitions per optimizer step; for a recurrent policy, whole envs with about as many transitions."""
    gamma: float = 0.99
    lam: float = 0.95
    """Lambda of GAE."""
    clip: float = 0.2
    """Clipping range of the probability ratio."""
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    max_grad_norm: float = 0.5
    normalise: bool = True
    """Normalise advantages within each minibatch."""
    target_kl: float | None = None
    """Stop the epochs early once the KL divergence exceeds 1.5 times this value; None: never."""
    adam_eps: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """The data of one optimizer step."""

    obs: Tensor
    hidden_state: Tensor
    episode_starts: Tensor
    actions: Tensor
    log_probs: Tensor
    """Log-probabilities of the actions under the behaviour policy."""
    advantages: Tensor
    returns: Tensor
    mask: Tensor | None
    """Which steps are transitions; None: all."""
    scripted: Tensor | None
    """Which steps a script chose; None: none."""


def _metrics(means: list[float], targets: Targets, early_stop: bool) -> dict[str, float]:
    explained_variance = 1 - np.var(targets.advantages) / (np.var(targets.returns) + 1e-8)
    return dict(zip(STATS, means, strict=True)) | {
        "explained_variance": float(explained_variance), "early_stop": float(early_stop),
    }  # fmt: skip


class Ppo:
    """The PPO learner. Small networks are trained in C where that is possible; see `policies.fuse`."""

    def __init__(self, policy: ActorCritic, settings: PpoSettings, seed: int) -> None:
        self.policy, self.settings = policy, settings
        self.flat = FlatParameters(policy)
        self.optimizer = make_adam(self.flat, settings.learning_rate, settings.adam_eps)
        self._rng = np.random.default_rng(seed)
        self._fused = fuse(policy, self.flat)

    def learn(self, rollout: RolloutBuffer, lag: int, progress_remaining: float = 1.0) -> dict[str, float]:
        """Update the policy on one rollout.

        Args:
            rollout: The collected steps.
            lag: Updates by which the behaviour policy is behind; 0 means on-policy.
            progress_remaining: Factor of the learning rate, annealed from 1 to 0.

        Returns:
            Metrics of the update.
        """
        s = self.settings
        if not rollout.valid.any():
            raise LabError("this rollout has no transitions: every env only reset", hint="use longer rollouts")
        set_learning_rate(self.optimizer, s.learning_rate * progress_remaining)
        if self._fused is not None and self._fused.usable and type(self)._optimize is Ppo._optimize:
            return self._learn_fused(self._fused, rollout, lag)
        device = self.flat.vector.device
        obs = to_channels_last(torch.from_numpy(rollout.obs).to(device))
        actions = torch.from_numpy(rollout.actions).to(device)
        log_probs = torch.from_numpy(rollout.log_probs).to(device)
        episode_starts = torch.from_numpy(rollout.episode_starts).to(device)
        hidden_state = torch.from_numpy(rollout.hidden_state[0]).to(device)
        with torch.inference_mode():
            logits, values = evaluate(self.policy, obs, hidden_state, episode_starts)
            ratios = None
            if lag:
                new_log_probs, _ = self.policy.head.log_prob_and_entropy(logits[:-1], actions)
                ratios = (new_log_probs - log_probs).exp().cpu().numpy()
        targets = compute_targets(
            rollout.rewards, values.cpu().numpy(), rollout.terminated, rollout.truncated,
            gamma=s.gamma, lam=s.lam, ratios=ratios,
        )  # fmt: skip
        steps = {
            "obs": obs[:-1], "episode_starts": episode_starts[:-1], "actions": actions, "log_probs": log_probs,
            "advantages": torch.from_numpy(targets.advantages).to(device),
            "returns": torch.from_numpy(targets.returns).to(device),
        }  # fmt: skip
        flat_steps = {name: x.flatten(0, 1) for name, x in steps.items()}
        valid = torch.from_numpy(rollout.valid).to(device)
        scripted = torch.from_numpy(rollout.scripted).to(device) if rollout.scripted.any() else None
        stats: list[tuple[Tensor, ...]] = []
        early_stop = False
        for _ in range(s.epochs):
            for indices in self._minibatch_indices(rollout):
                if self.policy.hidden_size:
                    columns = {name: x[:, indices] for name, x in steps.items()}
                    batch = Minibatch(
                        **columns, hidden_state=hidden_state[indices], mask=valid[:, indices],
                        scripted=None if scripted is None else scripted[:, indices],
                    )  # fmt: skip
                else:
                    rows = {name: take_rows(x, indices) for name, x in flat_steps.items()}
                    batch = Minibatch(
                        **rows, hidden_state=hidden_state[:0], mask=None,
                        scripted=None if scripted is None else scripted.flatten()[indices],
                    )  # fmt: skip
                stats.append(self._optimize(batch))
            approx_kl = stats[-1][3]
            if s.target_kl is not None and float(approx_kl) > 1.5 * s.target_kl:
                early_stop = True
                break
        means = torch.stack([torch.stack(row) for row in stats]).mean(0).tolist()
        return _metrics(means, targets, early_stop)

    def _learn_fused(self, fused: FusedPolicy, rollout: RolloutBuffer, lag: int) -> dict[str, float]:
        """Do in C what `learn` does."""
        s = self.settings
        with torch.inference_mode():
            logits, flat_values = fused.logits(rollout.obs)
            values = flat_values.reshape(len(rollout.obs), -1)
            ratios = None
            if lag:
                actions = torch.from_numpy(rollout.actions).flatten(0, 1)
                new_log_probs, _ = self.policy.head.log_prob_and_entropy(logits[: len(actions)], actions)
                ratios = np.exp(new_log_probs.numpy().reshape(rollout.log_probs.shape) - rollout.log_probs)
        targets = compute_targets(
            rollout.rewards, values, rollout.terminated, rollout.truncated,
            gamma=s.gamma, lam=s.lam, ratios=ratios,
        )  # fmt: skip
        actions_by_row = rollout.actions.reshape(rollout.log_probs.size, *self.policy.head.shape)
        columns = Columns(
            obs=fused.flatten(rollout.obs[:-1]),
            actions=actions_by_row.reshape(len(actions_by_row), -1) if self.policy.head.shape else actions_by_row,
            log_probs=rollout.log_probs.reshape(-1),
            advantages=targets.advantages.reshape(-1),
            returns=targets.returns.reshape(-1),
            scripted=rollout.scripted.reshape(-1) if rollout.scripted.any() else None,
        )
        loss = Loss(
            clip=s.clip, value_clip=0.0, value_coef=s.value_coef, value_scale=1.0, entropy_coef=s.entropy_coef,
            min_log_std=MIN_LOG_STD, max_log_std=MAX_LOG_STD, normalise=int(s.normalise),
        )  # fmt: skip
        stats = []
        early_stop = False
        for _ in range(s.epochs):
            minibatches = [indices.numpy() for indices in self._minibatch_indices(rollout)]
            stats.append(fused.mlp.epoch(loss, columns, minibatches, s.max_grad_norm, self.optimizer))
            if s.target_kl is not None and stats[-1][-1][STATS.index("approx_kl")] > 1.5 * s.target_kl:
                early_stop = True
                break
        return _metrics(np.concatenate(stats).mean(0).tolist(), targets, early_stop)

    def _minibatch_indices(self, rollout: RolloutBuffer) -> Iterator[Tensor]:
        """Yield random minibatches of about equal size: transitions, or whole envs for a recurrent policy."""
        if self.policy.hidden_size:
            num_envs = rollout.valid.shape[1]
            size = max(1, self.settings.minibatch // len(rollout.valid))
            order = self._rng.permutation(num_envs)
        else:
            order = self._rng.permutation(np.flatnonzero(rollout.valid.reshape(-1)))
            size = self.settings.minibatch
        for indices in np.array_split(order, -(-len(order) // size)):
            yield torch.from_numpy(indices)

    def _optimize(self, batch: Minibatch) -> tuple[Tensor, ...]:
        """Take one optimizer step and return policy loss, value loss, entropy, KL, clip fraction, gradient norm."""
        s = self.settings
        logits, values, _ = self.policy(batch.obs, batch.hidden_state, batch.episode_starts)
        log_probs, entropy = self.policy.head.log_prob_and_entropy(logits, batch.actions)
        old_log_probs, advantages, returns = batch.log_probs, batch.advantages, batch.returns
        if batch.mask is not None:
            mask = batch.mask
            log_probs, entropy, values = log_probs[mask], entropy[mask], values[mask]
            old_log_probs, advantages, returns = old_log_probs[mask], advantages[mask], returns[mask]
        if batch.scripted is not None:  # the policy did not choose these actions: only the values learn from them
            chosen = ~(batch.scripted if batch.mask is None else batch.scripted[batch.mask])
            log_probs, entropy = log_probs[chosen], entropy[chosen]
            old_log_probs, advantages = old_log_probs[chosen], advantages[chosen]
        if s.normalise and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        log_ratio = log_probs - old_log_probs
        ratio = log_ratio.exp()
        policy_loss = -mean_or_zero(torch.min(advantages * ratio, advantages * ratio.clamp(1 - s.clip, 1 + s.clip)))
        value_loss = torch.nn.functional.mse_loss(values, returns)
        loss = policy_loss + s.value_coef * value_loss
        if s.entropy_coef:
            loss = loss - s.entropy_coef * mean_or_zero(entropy)
        self.flat.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        grad_norm = self.flat.clip_grad_norm(s.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            approx_kl = mean_or_zero(ratio - 1 - log_ratio)
            clip_fraction = mean_or_zero(((ratio - 1).abs() > s.clip).float())
        return (
            policy_loss.detach(),
            value_loss.detach(),
            mean_or_zero(entropy).detach(),
            approx_kl,
            clip_fraction,
            grad_norm,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": get_rng_state(self._rng),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = rename_keys(state)
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        set_rng_state(self._rng, state["rng"])
