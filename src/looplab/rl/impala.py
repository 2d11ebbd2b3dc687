"""An actor-critic in the style of A3C and IMPALA (Espeholt et al. 2018).

Each rollout is learned from once, with V-trace targets or GAE. With a replay, the learner also takes replayed
transitions: their off-policy error is corrected by the clipped importance ratio, and the bias of the priorities by
importance-sampling weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from looplab.rl.collect import RolloutBuffer
from looplab.rl.flat import FlatParameters, make_adam, set_learning_rate
from looplab.rl.policies import ActorCritic, mean_or_zero
from looplab.rl.returns import compute_targets


@dataclass(frozen=True)
class ImpalaSettings:
    learning_rate: float = 6e-4
    returns: Literal["vtrace", "gae"] = "vtrace"
    """Estimator of returns and advantages."""
    gamma: float = 0.99
    lam: float = 1.0
    """Lambda of V-trace or GAE."""
    rho_bar: float = 1.0
    """Clipping threshold of the importance ratios in the TD errors."""
    c_bar: float = 1.0
    """Clipping threshold of the importance ratios in the trace."""
    value_coef: float = 0.5
    entropy_coef: float = 0.01
    max_grad_norm: float = 0.5
    adam_eps: float = 1e-5
    normalise: bool = False
    """Normalise advantages over the rollout."""
    replay_coef: float = 1.0
    """Weight of the loss on replayed transitions."""


class Impala:
    """The IMPALA-style learner."""

    def __init__(self, policy: ActorCritic, settings: ImpalaSettings, seed: int = 0) -> None:
        self.policy, self.settings = policy, settings
        self.flat = FlatParameters(policy)
        self.optimizer = make_adam(self.flat, settings.learning_rate, settings.adam_eps)
        self.priorities: NDArray[Any] = np.zeros((0, 0), np.float32)
        """Replay priorities of the last rollout, [steps, envs]: the absolute advantages."""

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
        set_learning_rate(self.optimizer, s.learning_rate * progress_remaining)
        device = self.flat.vector.device
        obs = torch.from_numpy(rollout.obs).to(device)
        episode_starts = torch.from_numpy(rollout.episode_starts).to(device)
        hidden_state = torch.from_numpy(rollout.hidden_state[0]).to(device)
        actions = torch.from_numpy(rollout.actions).to(device)
        old_log_probs = torch.from_numpy(rollout.log_probs).to(device)
        valid = torch.from_numpy(rollout.valid).to(device)
        chosen = torch.from_numpy(rollout.valid & ~rollout.scripted).to(device)  # by the policy, not by a script
        logits, values, _ = self.policy(obs, hidden_state, episode_starts)
        log_probs, entropies = self.policy.head.log_prob_and_entropy(logits[:-1], actions)
        ratios = None
        if lag and s.returns == "vtrace":
            ratios = (log_probs.detach() - old_log_probs).exp().cpu().numpy()
        targets = compute_targets(
            rollout.rewards, values.detach().cpu().numpy(), rollout.terminated, rollout.truncated,
            gamma=s.gamma, lam=s.lam, ratios=ratios, rho_bar=s.rho_bar, c_bar=s.c_bar,
        )  # fmt: skip
        all_advantages = targets.pg_advantages if s.returns == "vtrace" else targets.advantages
        self.priorities = np.abs(all_advantages)
        advantages = torch.from_numpy(all_advantages).to(device)[chosen]
        returns = torch.from_numpy(targets.returns).to(device)[valid]
        if s.normalise and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -mean_or_zero(advantages * log_probs[chosen])
        value_loss = torch.nn.functional.mse_loss(values[:-1][valid], returns)
        entropy = mean_or_zero(entropies[chosen])
        grad_norm = self._optimize(policy_loss + s.value_coef * value_loss - s.entropy_coef * entropy)
        return {
            "policy_loss": policy_loss.item(),
            "value_loss": value_loss.item(),
            "entropy": entropy.item(),
            "grad_norm": grad_norm.item(),
        }

    def learn_from_replay(
        self, batch: Mapping[str, NDArray[Any]], weights: NDArray[Any]
    ) -> tuple[dict[str, float], NDArray[Any]]:
        """Update the policy on replayed transitions.

        Args:
            batch: Fields of the transitions, as the runner stores them.
            weights: Importance-sampling weights that correct for the priorities.

        Returns:
            Metrics of the update, and the absolute TD errors, which are the new priorities.
        """
        s = self.settings
        device = self.flat.vector.device
        obs, hidden_state = (  # stacked by torch, which aligns memory (see `_aligned_zeros` in collect.py)
            torch.stack([torch.from_numpy(batch[name]) for name in names]).to(device)
            for names in (("obs", "next_obs"), ("hidden_state", "next_hidden_state"))
        )
        hidden_state = hidden_state.float()
        episode_starts = torch.zeros(obs.shape[:2], dtype=torch.bool, device=device)
        logits, values, _ = self.policy(obs.flatten(0, 1), hidden_state.flatten(0, 1), episode_starts.flatten())
        n = len(weights)
        actions = torch.from_numpy(batch["actions"]).to(device)
        log_probs, entropies = self.policy.head.log_prob_and_entropy(logits[:n], actions)
        rewards, old_log_probs, is_weights = (
            torch.from_numpy(np.asarray(x, np.float32)).to(device)
            for x in (batch["rewards"], batch["log_probs"], weights)
        )
        not_terminated = torch.from_numpy(~batch["terminated"]).to(device)
        with torch.no_grad():
            rho = (log_probs - old_log_probs).exp().clamp(max=s.rho_bar)
            td_errors = rewards + s.gamma * not_terminated * values[n:] - values[:n]
            advantages, returns = rho * td_errors, values[:n] + rho * td_errors
        policy_loss = -(is_weights * advantages * log_probs).mean()
        value_loss = (is_weights * (values[:n] - returns).square()).mean()
        loss = policy_loss + s.value_coef * value_loss - s.entropy_coef * (is_weights * entropies).mean()
        self._optimize(s.replay_coef * loss)
        stats = {"replay_policy_loss": policy_loss.item(), "replay_value_loss": value_loss.item()}
        return stats, td_errors.abs().cpu().numpy()

    def _optimize(self, loss: Tensor) -> Tensor:
        """Take one optimizer step and return the gradient norm before clipping."""
        self.flat.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        grad_norm = self.flat.clip_grad_norm(self.settings.max_grad_norm)
        self.optimizer.step()
        return grad_norm

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
