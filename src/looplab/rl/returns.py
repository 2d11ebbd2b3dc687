"""Value targets and advantages: V-trace (Espeholt et al. 2018), whose on-policy case is GAE (Schulman et al. 2016).

Arrays are [steps, envs]. The vector env resets in the step after an episode ends (Gymnasium's `NEXT_STEP` autoreset):
the observation after the last step of an episode is that episode's final observation, so its value is available to
bootstrap a truncated episode. The following step only resets and is not a transition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Targets:
    returns: FloatArray
    """Targets of the value function: the V-trace values, or the lambda-returns of GAE."""
    advantages: FloatArray
    """`returns` minus the values: the lambda-weighted sum of TD errors. On-policy this is GAE."""
    pg_advantages: FloatArray
    """Advantages of the V-trace policy gradient: one-step TD errors with the next return as bootstrap."""


def compute_targets(
    rewards: FloatArray,
    values: FloatArray,
    terminated: BoolArray,
    truncated: BoolArray,
    *,
    gamma: float,
    lam: float,
    ratios: FloatArray | None = None,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> Targets:
    """Return value targets and advantages of a rollout.

    Args:
        rewards: Rewards, [steps, envs].
        values: Value estimates, [steps + 1, envs]; the last row bootstraps.
        terminated: Whether a step ended its episode in a terminal state.
        truncated: Whether a step ended its episode for another reason; its value is bootstrapped.
        gamma: Discount factor.
        lam: Lambda of GAE or V-trace.
        ratios: Importance ratios of the learner's policy to the behaviour policy; None means on-policy.
        rho_bar: Clipping threshold of the ratios in the TD errors.
        c_bar: Clipping threshold of the ratios in the trace.
    """
    steps = len(rewards)
    is_ratios = np.ones_like(rewards) if ratios is None else ratios
    rho = np.minimum(is_ratios, rho_bar)
    c = lam * np.minimum(is_ratios, c_bar)
    not_done = ~(terminated | truncated)
    next_values = np.where(terminated, np.float32(0), values[1:])
    td_errors = rho * (rewards + gamma * next_values - values[:-1])
    discounts = gamma * c * not_done
    advantages = np.empty_like(td_errors)
    last_advantage: Any = np.zeros(rewards.shape[1:], rewards.dtype)
    for t in range(steps - 1, -1, -1):
        last_advantage = td_errors[t] + discounts[t] * last_advantage
        advantages[t] = last_advantage
    returns = values[:-1] + advantages
    # The policy gradient bootstraps from the next return, but never from beyond the end of the episode.
    next_returns = np.where(not_done, np.concatenate([returns[1:], values[-1:]]), next_values)
    pg_advantages = rho * (rewards + gamma * next_returns - values[:-1])
    return Targets(returns=returns, advantages=advantages, pg_advantages=pg_advantages)
