"""Collect experience: one loop that steps the envs, run synchronously or overlapped with learning.

Synchronous: collect, then learn. Overlapped: a thread fills the next rollout while the learner works on the last one.
The behaviour policy is then exactly one update old, whatever the load of the machine: a fixed lag that V-trace
corrects, and no race. Scripts and statistics live in this one loop and so work the same way in both modes.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from looplab.errors import LabError
from looplab.rl.flat import FlatParameters, get_rng_state, set_rng_state
from looplab.rl.fused import backend_name
from looplab.rl.policies import ActorCritic, fuse
from looplab.rl.renamed import rename_keys

Array = NDArray[Any]


@dataclass(kw_only=True)
class RolloutBuffer:
    """The steps of one rollout, [steps, envs, ...]."""

    obs: Array
    """[steps + 1, envs, ...]; the last row follows the last step."""
    episode_starts: Array
    """Whether each observation is the first of its episode; [steps + 1, envs]."""
    actions: Array
    log_probs: Array
    """Log-probability of each action under the behaviour policy, also where a script chose it."""
    rewards: Array
    terminated: Array
    truncated: Array
    valid: Array
    """False where the env only reset, which is not a transition."""
    scripted: Array
    """Where a script chose the action: the value function learns from these transitions, the policy does not."""
    hidden_state: Array
    """Hidden state of a recurrent policy before each step; [steps + 1, envs, hidden_size]."""

    @classmethod
    def zeros(cls, steps: int, num_envs: int, obs_space: gym.Space[Any], policy: ActorCritic) -> RolloutBuffer:
        """Return an empty buffer for these envs and this policy."""
        if not isinstance(obs_space, gym.spaces.Box):
            raise LabError(f"observations must be a Box, not {type(obs_space).__name__}", hint="flatten them")
        return cls(
            obs=_aligned_zeros((steps + 1, num_envs, *obs_space.shape), obs_space.dtype),
            episode_starts=np.zeros((steps + 1, num_envs), np.bool_),
            actions=np.zeros((steps, num_envs, *policy.head.shape), policy.head.dtype),
            log_probs=np.zeros((steps, num_envs), np.float32),
            rewards=np.zeros((steps, num_envs), np.float32),
            terminated=np.zeros((steps, num_envs), np.bool_),
            truncated=np.zeros((steps, num_envs), np.bool_),
            valid=np.zeros((steps, num_envs), np.bool_),
            scripted=np.zeros((steps, num_envs), np.bool_),
            hidden_state=_aligned_zeros((steps + 1, num_envs, policy.hidden_size), np.float32),
        )

    def state_dict(self) -> dict[str, Array]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        state = rename_keys(state)
        for field in fields(self):  # checkpoints of older versions have no mask of scripted steps
            np.copyto(getattr(self, field.name), state.get(field.name, np.zeros_like(self.scripted)))


def _aligned_zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return zeros in memory that torch allocates, which is aligned to 64 bytes.

    NumPy aligns to 16 bytes only, and BLAS may round differently at another alignment: a resumed training would then
    not be bit-exact.
    """
    zeros: Array = torch.zeros(shape, dtype=torch.from_numpy(np.zeros(0, dtype)).dtype).numpy()
    return zeros


class ActionOverride(Protocol):
    """Acts in place of the policy for some steps, for example a script."""

    def act(self, episode_starts: Array) -> tuple[Array, Array] | None:
        """Choose the actions of this step.

        Args:
            episode_starts: Whether each env starts an episode with this step, [envs].

        Returns:
            Actions [envs] and the mask of the envs they apply to, or None if the policy acts everywhere.
        """
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class StepListener(Protocol):
    """Receives the result of every step of the vector env."""

    def add(
        self, rewards: Array, terminated: Array, truncated: Array, valid: Array, infos: Mapping[str, Any]
    ) -> None: ...


class Collector:
    """Steps the envs with a behaviour policy: a copy of the learner's policy that only the collector uses."""

    def __init__(
        self,
        envs: gym.vector.VectorEnv[Any, Any, Any],
        behaviour_policy: ActorCritic,
        learner_parameters: FlatParameters,
        *,
        seed: int,
        script: ActionOverride | None = None,
        listener: StepListener | None = None,
    ) -> None:
        """
        Args:
            envs: Vector env with `NEXT_STEP` autoreset.
            behaviour_policy: Copy of the learner's policy, on the same device.
            learner_parameters: The learner's parameters, which `sync_weights` copies.
            seed: Seeds the envs and the sampling of actions.
            script: Acts in place of the policy where it wants to.
            listener: Receives the result of every step.
        """
        mode = envs.metadata.get("autoreset_mode", gym.vector.AutoresetMode.NEXT_STEP)
        if mode != gym.vector.AutoresetMode.NEXT_STEP:
            raise LabError("the envs must reset in the step after an episode ends", hint="use AutoresetMode.NEXT_STEP")
        self.envs = envs
        self.behaviour_policy = behaviour_policy
        self._parameters = FlatParameters(behaviour_policy)
        self._fused = fuse(behaviour_policy, self._parameters)
        self._learner_parameters = learner_parameters
        self._device = self._parameters.vector.device
        self._rng = np.random.default_rng(seed)
        self._seed = seed
        self._script = script
        self._listener = listener
        self._hidden_state = torch.zeros(envs.num_envs, behaviour_policy.hidden_size, device=self._device)
        self._obs: Array | None = None
        self._episode_starts = np.ones(envs.num_envs, np.bool_)
        self._resetting = np.zeros(envs.num_envs, np.bool_)
        space = envs.single_action_space
        self._action_bounds = (space.low, space.high) if isinstance(space, gym.spaces.Box) else None

    @property
    def backend(self) -> str:
        """What evaluates the policy; the results of two backends differ in rounding."""
        return backend_name() if self._fused is not None and self._fused.usable else "torch"

    def sync_weights(self) -> None:
        """Copy the learner's present weights into the behaviour policy."""
        self._parameters.vector.data.copy_(self._learner_parameters.vector.data)

    def collect(self, rollout: RolloutBuffer) -> RolloutBuffer:
        """Fill the buffer with the next steps of the envs and return it."""
        if self._obs is None:
            self._obs, _ = self.envs.reset(seed=self._seed)
        obs, episode_starts, resetting = self._obs, self._episode_starts, self._resetting
        policy, hidden_state = self.behaviour_policy, self._hidden_state
        fused = self._fused if self._fused is not None and self._fused.usable else None
        with torch.inference_mode():
            for t in range(len(rollout.rewards)):
                rollout.obs[t] = obs
                rollout.episode_starts[t] = episode_starts
                if fused is not None:
                    logits, _ = fused.logits(rollout.obs[t])
                else:
                    rollout.hidden_state[t] = hidden_state.cpu().numpy()
                    obs_tensor = torch.from_numpy(rollout.obs[t]).to(self._device)
                    starts_tensor = torch.from_numpy(episode_starts).to(self._device)
                    logits, _, hidden_state = policy(obs_tensor, hidden_state, starts_tensor)
                actions, log_probs = policy.head.sample(logits, self._rng)
                override = self._script.act(episode_starts) if self._script is not None else None
                if override is not None:
                    forced_actions, mask = override
                    actions = np.where(_expand_mask(mask, actions), forced_actions, actions)
                    forced = torch.from_numpy(actions).to(self._device)
                    forced_log_probs, _ = policy.head.log_prob_and_entropy(logits, forced)
                    log_probs = np.where(mask, forced_log_probs.cpu().numpy(), log_probs)
                rollout.scripted[t] = override is not None and override[1]
                rollout.actions[t], rollout.log_probs[t] = actions, log_probs
                clipped = actions if self._action_bounds is None else np.clip(actions, *self._action_bounds)
                obs, rewards, terminated, truncated, infos = self.envs.step(clipped)
                rollout.rewards[t], rollout.terminated[t], rollout.truncated[t] = rewards, terminated, truncated
                rollout.valid[t] = ~resetting
                if self._listener is not None:
                    self._listener.add(rewards, terminated, truncated, rollout.valid[t], infos)
                episode_starts, resetting = resetting, terminated | truncated
        rollout.obs[-1], rollout.episode_starts[-1] = obs, episode_starts
        rollout.hidden_state[-1] = hidden_state.cpu().numpy()
        self._obs, self._episode_starts, self._resetting = rollout.obs[-1].copy(), episode_starts, resetting
        self._hidden_state = hidden_state.clone()
        return rollout

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "weights": self._parameters.vector.detach(),
            "hidden_state": self._hidden_state,
            "obs": self._obs,
            "episode_starts": self._episode_starts,
            "resetting": self._resetting,
            "rng": get_rng_state(self._rng),
        }
        return state | ({"script": self._script.state_dict()} if self._script is not None else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = rename_keys(state)
        self._parameters.vector.data.copy_(torch.as_tensor(state["weights"]))
        self._hidden_state = torch.as_tensor(state["hidden_state"]).to(self._device).clone()
        self._obs = None if state["obs"] is None else np.array(state["obs"])
        self._episode_starts, self._resetting = np.array(state["episode_starts"]), np.array(state["resetting"])
        set_rng_state(self._rng, state["rng"])
        if self._script is not None:
            self._script.load_state_dict(state["script"])


def _expand_mask(mask: Array, actions: Array) -> Array:
    """Add axes to a mask [envs] so that it broadcasts over actions [envs, ...]."""
    return mask.reshape(mask.shape + (1,) * (actions.ndim - mask.ndim))


class RolloutSource:
    """Hands the learner one rollout after the other, collected synchronously or in a thread."""

    def __init__(self, collector: Collector, buffers: tuple[RolloutBuffer, RolloutBuffer], *, overlap: bool) -> None:
        """
        Args:
            collector: Steps the envs.
            buffers: Filled in turn when overlapped; otherwise only the first is used.
            overlap: Collect the next rollout in a thread while the learner uses the last one.
        """
        self.collector = collector
        self.lag = int(overlap)
        """Updates by which the behaviour policy is behind the learner."""
        self._buffers = buffers
        self._next = 0
        self._executor = ThreadPoolExecutor(1, "collector") if overlap else None
        self._pending: Future[RolloutBuffer] | None = None

    def next_rollout(self) -> RolloutBuffer:
        """Return the next rollout, which the caller may use until the next call."""
        if self._executor is None:
            self.collector.sync_weights()
            return self.collector.collect(self._buffers[0])
        if self._pending is None:
            self._start_collecting()
        assert self._pending is not None
        ready = self._pending.result()
        self._start_collecting()
        return ready

    def wait(self) -> None:
        """Block until nothing is being collected, so that the state can be saved."""
        if self._pending is not None:
            self._pending.result()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _start_collecting(self) -> None:
        assert self._executor is not None
        self.collector.sync_weights()
        self._pending = self._executor.submit(self.collector.collect, self._buffers[self._next])
        self._next = 1 - self._next

    def state_dict(self) -> dict[str, Any]:
        self.wait()
        ready = None if self._pending is None else self._pending.result().state_dict()
        return {"collector": self.collector.state_dict(), "ready": ready}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.collector.load_state_dict(state["collector"])
        if state["ready"] is None:
            return
        if self._executor is None:
            raise LabError("this checkpoint was saved with overlapped collection", hint="resume with overlap enabled")
        rollout = self._buffers[self._next]
        rollout.load_state_dict(state["ready"])
        self._next = 1 - self._next
        self._pending = Future()
        self._pending.set_result(rollout)
