"""The update of ppo.py in C (`looplab.rl.fused`), several times faster; equal up to rounding.

Used for float32 networks on the CPU, only while ppo.py is unchanged. After a change, set the hash below if this file
still computes the same, or leave it: torch then does the update.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from looplab.rl import fused
from looplab.rl.flat import FlatParameters

Floats = npt.NDArray[np.float32]

if TYPE_CHECKING:
    from looplab.recipes.drone import ppo
    from looplab.recipes.drone.ppo import DronePolicy, DroneRollout
    from looplab.recipes.drone.settings import TrainConfig
else:
    import ppo

PPO_SHA256 = "4be71c5de3d5680724f8862e6e825174fe99483994ce300d00b24a2b2db71086"


class FusedUpdate:
    """A policy and its optimizer, evaluated and updated in C. Their names, shapes and states do not change."""

    def __init__(self, policy: DronePolicy, optimizer: torch.optim.Optimizer) -> None:
        self.flat = FlatParameters(policy)
        self.policy, self.optimizer = policy, optimizer
        layers = [[layer for layer in net if isinstance(layer, nn.Linear)] for net in (policy.actor, policy.critic)]
        layout = fused.MlpLayout(
            inputs=layers[0][0].in_features,
            weights=[[layer.weight for layer in net[:-1]] for net in layers],
            biases=[[layer.bias for layer in net[:-1]] for net in layers],
            heads=[(net[-1].weight, net[-1].bias) for net in layers],
            transposed=True,
            log_std=policy.log_std,
        )
        self._mlp = fused.FusedMlp(self.flat, layout)
        self._library = fused.load()
        matrices = [p for p in policy.parameters() if p.ndim == 2]
        self._scratch = torch.zeros(max(self._library.looplab_muon_size(*p.shape) for p in matrices))

    def forward(self, obs: Tensor) -> tuple[Floats, Floats]:
        """Return the means of the actions, and the values."""
        return self._mlp.forward(obs.numpy())

    def update(
        self, rollout: DroneRollout, next_values: Tensor, train: TrainConfig, rng: torch.Generator
    ) -> dict[str, float]:
        """Do what `ppo.update` does, which see."""
        advantages = ppo.compute_advantages(rollout, next_values, train.gamma, train.gae_lambda)
        returns = advantages + rollout.values
        columns = fused.Columns(
            obs=rollout.obs.flatten(0, 1).numpy(),
            actions=rollout.actions.flatten(0, 1).numpy(),
            log_probs=rollout.log_probs.flatten().numpy(),
            advantages=advantages.flatten().numpy(),
            returns=returns.flatten().numpy(),
            old_values=rollout.values.flatten().numpy(),
        )
        loss = fused.Loss(
            clip=train.clip_coef, value_clip=train.vf_clip_coef, value_coef=train.vf_coef, value_scale=0.5,
            entropy_coef=train.ent_coef, min_log_std=-math.inf, max_log_std=math.inf, normalise=2,
        )  # fmt: skip
        stats = []
        step = self._step_function()
        for _ in range(train.update_epochs):
            order = torch.randperm(train.batch_size, generator=rng)
            for minibatch in torch.split(order, train.minibatch_size):
                row = self._mlp.gradient(loss, columns, minibatch.numpy(), train.max_grad_norm or math.inf)
                if not math.isfinite(row[-1]):
                    raise ppo.NonFiniteUpdate("the gradient is not finite")
                stats.append(row[:-1])
                step()
        means = dict(zip(fused.STATS, np.mean(stats, axis=0).tolist(), strict=False))
        return means | ppo.explained_variance(means, rollout, returns)

    def _step_function(self) -> Callable[[], object]:
        """Return a function that takes one step of the optimizer, valid while its state is not replaced."""
        if not isinstance(self.optimizer, ppo.Muon):
            return self.optimizer.step
        calls: list[Callable[[], object]] = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.initial_state(parameter, group)
                calls.append(self._muon_call(parameter, state, group))
        return lambda: [call() for call in calls]

    def _muon_call(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Callable[[], object]:
        assert parameter.grad is not None
        library, start = self._library, (parameter.data_ptr(), parameter.grad.data_ptr())
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        if group["matrices"]:
            settings = (beta1, lr * ppo.matrix_scale(parameter), 1 - lr * decay, self._scratch.data_ptr())
            momentum, shape = state["momentum"].data_ptr(), parameter.shape
            return lambda: library.looplab_muon(*start, momentum, *shape, *settings)
        adam = fused.AdamSettings(lr, beta1, beta2, group["eps"], decay)
        moments, size = (state["first"].data_ptr(), state["second"].data_ptr()), parameter.numel()

        def step() -> None:
            state["step"] += 1
            library.looplab_adam(*start, *moments, size, state["step"], ctypes.addressof(adam))

        return step


def why_not(train: TrainConfig) -> str | None:
    """Return why the update cannot be done in C; None if it can."""
    if train.device != "cpu" or train.precision != "float32" or train.compile:
        return "train.device, train.precision or train.compile need torch"
    if sha256(Path(ppo.__file__).read_bytes()).hexdigest() != PPO_SHA256:
        return "ppo.py was changed, and fused_update.py does not have its hash"
    return "it could not be compiled" if fused.load() is None else None
