"""An actor-critic in the manner of A3C and IMPALA (Espeholt et al. 2018): each rollout is learned from once, with
V-trace targets or generalised advantages, and, if there is a replay, from what it gives as well.

What comes from the replay was done by an older policy: it is weighted by the clipped ratio of the two policies, and by
the importance weights that undo the priorities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from looplab.rl.collect import Rollout
from looplab.rl.flat import Flat, adam, set_rate
from looplab.rl.policies import Policy
from looplab.rl.returns import targets


@dataclass(frozen=True)
class ImpalaSettings:
    learning_rate: float = 6e-4
    returns: Literal["vtrace", "gae"] = "vtrace"
    gamma: float = 0.99
    lam: float = 1.0
    rho_bar: float = 1.0
    c_bar: float = 1.0
    value_coef: float = 0.5
    entropy_coef: float = 0.01
    max_grad_norm: float = 0.5
    adam_eps: float = 1e-5
    normalise: bool = False
    replay_coef: float = 1.0
    """Weight of what is learned from the replay."""


class Impala:
    def __init__(self, policy: Policy, settings: ImpalaSettings, seed: int = 0) -> None:
        self.policy, self.settings = policy, settings
        self.flat = Flat(policy)
        self.optimizer = adam(self.flat, settings.learning_rate, settings.adam_eps)
        self.priorities: NDArray[Any] = np.zeros((0, 0), np.float32)
        """How surprising each transition of the last rollout was, for the replay."""

    def learn(self, rollout: Rollout, lag: int, left: float = 1.0) -> dict[str, float]:
        s = self.settings
        set_rate(self.optimizer, s.learning_rate * left)
        device = self.flat.vector.device
        seen, begins, memory, actions, before, valid = (
            torch.from_numpy(x).to(device)
            for x in (rollout.seen, rollout.begins, rollout.memory[0], rollout.actions, rollout.logs, rollout.valid)
        )
        numbers, values, _ = self.policy(seen, memory, begins)
        logs, entropy = self.policy.head.judge(numbers[:-1], actions)
        ratios = None
        if lag and s.returns == "vtrace":
            ratios = (logs.detach() - before).exp().cpu().numpy()
        found = targets(
            rollout.rewards, values.detach().cpu().numpy(), rollout.terminated, rollout.truncated,
            gamma=s.gamma, lam=s.lam, ratios=ratios, rho_bar=s.rho_bar, c_bar=s.c_bar,
        )  # fmt: skip
        gains = found.advantages if s.returns == "vtrace" else found.deltas
        self.priorities = np.abs(gains)
        advantages = torch.from_numpy(gains).to(device)[valid]
        if s.normalise:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -(advantages * logs[valid]).mean()
        value_loss = torch.nn.functional.mse_loss(values[:-1][valid], torch.from_numpy(found.values).to(device)[valid])
        spread = entropy[valid].mean()
        length = self._step(policy_loss + s.value_coef * value_loss - s.entropy_coef * spread)
        return {
            "policy_loss": policy_loss.item(),
            "value_loss": value_loss.item(),
            "entropy": spread.item(),
            "grad_norm": length.item(),
        }

    def learn_again(self, batch: Mapping[str, NDArray[Any]], weights: NDArray[Any]) -> tuple[dict[str, float], Any]:
        """From transitions of the replay; gives the errors that become their new priorities."""
        s = self.settings
        device = self.flat.vector.device
        seen, memory = (  # stacked by torch, whose memory is aligned (see collect.py)
            torch.stack([torch.from_numpy(batch[name]) for name in names]).to(device)
            for names in (("seen", "next_seen"), ("memory", "next_memory"))
        )
        memory = memory.float()
        begins = torch.zeros(seen.shape[:2], dtype=torch.bool, device=device)
        numbers, values, _ = self.policy(seen.flatten(0, 1), memory.flatten(0, 1), begins.flatten())
        n = len(weights)
        actions = torch.from_numpy(batch["actions"]).to(device)
        logs, entropy = self.policy.head.judge(numbers[:n], actions)
        rewards, before, use = (
            torch.from_numpy(np.asarray(x, np.float32)).to(device) for x in (batch["rewards"], batch["logs"], weights)
        )
        going = torch.from_numpy(~batch["terminated"]).to(device)
        with torch.no_grad():
            rho = (logs - before).exp().clamp(max=s.rho_bar)
            errors = rewards + s.gamma * going * values[n:] - values[:n]
            advantages, goals = rho * errors, values[:n] + rho * errors
        policy_loss = -(use * advantages * logs).mean()
        value_loss = (use * (values[:n] - goals).square()).mean()
        loss = policy_loss + s.value_coef * value_loss - s.entropy_coef * (use * entropy).mean()
        self._step(s.replay_coef * loss)
        told = {"replay_policy_loss": policy_loss.item(), "replay_value_loss": value_loss.item()}
        return told, errors.abs().cpu().numpy()

    def _step(self, loss: Tensor) -> Tensor:
        self.flat.clear()
        loss.backward()  # type: ignore[no-untyped-call]
        length = self.flat.clip(self.settings.max_grad_norm)
        self.optimizer.step()
        return length

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
