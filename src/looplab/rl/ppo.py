"""Proximal policy optimisation (Schulman et al. 2017), with generalised advantages; where the acting policy lags
behind, with V-trace's corrected ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from looplab.errors import LabError
from looplab.rl.collect import Rollout
from looplab.rl.flat import Flat, adam, random_state, set_random_state, set_rate
from looplab.rl.policies import Policy
from looplab.rl.returns import targets


@dataclass(frozen=True)
class PpoSettings:
    learning_rate: float = 3e-4
    epochs: int = 10
    minibatch: int = 64
    """Transitions a step of the optimizer; of a recurrent policy, whole envs that have about as many."""
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    max_grad_norm: float = 0.5
    normalise: bool = True
    """Advantages, within each minibatch."""
    target_kl: float | None = None
    adam_eps: float = 1e-5


@dataclass(frozen=True)
class Batch:
    """What one step of the optimizer learns from."""

    seen: Tensor
    memory: Tensor
    begins: Tensor
    actions: Tensor
    logs: Tensor
    advantages: Tensor
    goals: Tensor
    use: Tensor | None
    """Which of them count; None: all."""


class Ppo:
    def __init__(self, policy: Policy, settings: PpoSettings, seed: int) -> None:
        self.policy, self.settings = policy, settings
        self.flat = Flat(policy)
        self.optimizer = adam(self.flat, settings.learning_rate, settings.adam_eps)
        self._chance = np.random.default_rng(seed)

    def learn(self, rollout: Rollout, lag: int, left: float = 1.0) -> dict[str, float]:
        """One rollout, several times over. `left`: the share of the training that lies ahead, for the learning rate."""
        s = self.settings
        if not rollout.valid.any():
            raise LabError("in this rollout every env only reset itself", hint="take more steps a rollout")
        set_rate(self.optimizer, s.learning_rate * left)
        device = self.flat.vector.device
        seen = torch.from_numpy(rollout.seen).to(device)
        actions = torch.from_numpy(rollout.actions).to(device)
        logs = torch.from_numpy(rollout.logs).to(device)
        begins = torch.from_numpy(rollout.begins).to(device)
        memory = torch.from_numpy(rollout.memory[0]).to(device)
        with torch.inference_mode():
            numbers, values, _ = self.policy(seen, memory, begins)
            ratios = None
            if lag:
                ratios = (self.policy.head.judge(numbers[:-1], actions)[0] - logs).exp().cpu().numpy()
        found = targets(
            rollout.rewards, values.cpu().numpy(), rollout.terminated, rollout.truncated,
            gamma=s.gamma, lam=s.lam, ratios=ratios,
        )  # fmt: skip
        advantages = torch.from_numpy(found.deltas).to(device)
        goals = torch.from_numpy(found.values).to(device)
        valid = torch.from_numpy(rollout.valid).to(device)
        flat = (seen[:-1], begins[:-1], actions, logs, advantages, goals)
        told: list[tuple[Tensor, ...]] = []
        stopped = False
        for _ in range(s.epochs):
            for part in self._parts(rollout):
                if self.policy.memory:
                    batch = Batch(
                        seen[:-1, part], memory[part], begins[:-1, part], actions[:, part], logs[:, part],
                        advantages[:, part], goals[:, part], valid[:, part],
                    )  # fmt: skip
                else:
                    a, b, c, d, e, f = (x.flatten(0, 1)[part] for x in flat)
                    batch = Batch(a, memory[:0], b, c, d, e, f, None)
                told.append(self._step(batch))
            if s.target_kl is not None and float(told[-1][3]) > 1.5 * s.target_kl:
                stopped = True
                break
        means = torch.stack([torch.stack(row) for row in told]).mean(0).tolist()
        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
        explained = 1 - np.var(found.deltas) / (np.var(found.values) + 1e-8)
        return dict(zip(names, means, strict=True)) | {
            "explained_variance": float(explained), "early_stop": float(stopped),
        }  # fmt: skip

    def _parts(self, rollout: Rollout) -> Iterator[Tensor]:
        """Random minibatches of about the same size: of transitions, or of envs where a policy remembers."""
        if self.policy.memory:
            count = rollout.valid.shape[1]
            size = max(1, self.settings.minibatch // len(rollout.valid))
            order = self._chance.permutation(count)
        else:
            order = self._chance.permutation(np.flatnonzero(rollout.valid.reshape(-1)))
            size = self.settings.minibatch
        for part in np.array_split(order, -(-len(order) // size)):
            yield torch.from_numpy(part)

    def _step(self, batch: Batch) -> tuple[Tensor, ...]:
        s = self.settings
        numbers, values, _ = self.policy(batch.seen, batch.memory, batch.begins)
        logs, entropy = self.policy.head.judge(numbers, batch.actions)
        before, advantages, goals = batch.logs, batch.advantages, batch.goals
        if batch.use is not None:
            use = batch.use
            logs, entropy, values = logs[use], entropy[use], values[use]
            before, advantages, goals = before[use], advantages[use], goals[use]
        if s.normalise and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        off = logs - before
        ratio = off.exp()
        policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(1 - s.clip, 1 + s.clip)).mean()
        value_loss = torch.nn.functional.mse_loss(values, goals)
        loss = policy_loss + s.value_coef * value_loss
        if s.entropy_coef:
            loss = loss - s.entropy_coef * entropy.mean()
        self.flat.clear()
        loss.backward()  # type: ignore[no-untyped-call]
        length = self.flat.clip(s.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            kl = (ratio - 1 - off).mean()
            clipped = ((ratio - 1).abs() > s.clip).float().mean()
        return policy_loss.detach(), value_loss.detach(), entropy.mean().detach(), kl, clipped, length

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "chance": random_state(self._chance),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        set_random_state(self._chance, dict(state["chance"]))
