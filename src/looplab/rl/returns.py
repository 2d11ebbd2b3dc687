"""What a state was worth: V-trace targets, of which generalised advantage estimation is the on-policy case.

Arrays are [steps, envs]. The envs reset themselves one step after an episode's end (Gymnasium's NEXT_STEP): the
observation that follows the last step of an episode is the episode's own last one, so its value is there for the
bootstrap of a truncated episode, and the step after it, which only resets, is no transition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Targets:
    values: Floats
    """What the value function should have said."""
    advantages: Floats
    """By how much an action was better than expected, as the policy gradient takes it."""
    deltas: Floats
    """`values` less what the value function did say: the advantage of generalised advantage estimation."""


def targets(
    rewards: Floats,
    values: Floats,
    terminated: Flags,
    truncated: Flags,
    *,
    gamma: float,
    lam: float,
    ratios: Floats | None = None,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> Targets:
    """`values` has one row more than the others. `ratios`: how much likelier the policy of now is to do what was done;
    None: it is the policy that did it, and `deltas` are GAE(lambda)."""
    steps = len(rewards)
    ones = np.ones_like(rewards) if ratios is None else ratios
    rho = np.minimum(ones, rho_bar)
    c = lam * np.minimum(ones, c_bar)
    going = ~(terminated | truncated)
    next_values = np.where(terminated, np.float32(0), values[1:])
    errors = rho * (rewards + gamma * next_values - values[:-1])
    carry = gamma * c * going
    deltas = np.empty_like(errors)
    ahead: Any = np.zeros(rewards.shape[1:], rewards.dtype)
    for t in range(steps - 1, -1, -1):
        ahead = errors[t] + carry[t] * ahead
        deltas[t] = ahead
    goals = values[:-1] + deltas
    # One step ahead the corrected value is used, but never one from beyond the episode's end.
    last = values[-1:]
    next_goals = np.where(going, np.concatenate([goals[1:], last]), next_values)
    advantages = rho * (rewards + gamma * next_goals - values[:-1])
    return Targets(goals, advantages, deltas)
