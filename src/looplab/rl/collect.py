"""Collecting experience: one loop that steps the envs, and two ways to call it.

Synchronous: collect, then learn. Overlapped: a thread fills the next rollout while the learner works on the last one.
The policy that acts is then exactly one update old, always, whatever the machine is doing: a fixed lag, which V-trace
corrects, and no race. Scripts, metrics, shaping and tracing live in the one loop and so are the same in both.
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
from looplab.rl.flat import Flat, random_state, set_random_state
from looplab.rl.policies import Policy

Array = NDArray[Any]


@dataclass
class Rollout:
    """[steps, envs, ...] of what happened."""

    seen: Array
    """One row more than steps: the last is what was seen after the last step."""
    begins: Array
    """Whether what was seen is the first of an episode; one row more, too."""
    actions: Array
    logs: Array
    """Log-probability of each action under the policy that acted; 0 where a script did."""
    rewards: Array
    terminated: Array
    truncated: Array
    valid: Array
    """False where the env only reset itself."""
    memory: Array
    """Of a recurrent policy, before each step; one row more."""

    @classmethod
    def empty(cls, steps: int, envs: int, seen: gym.Space[Any], policy: Policy) -> Rollout:
        if not isinstance(seen, gym.spaces.Box):
            raise LabError(f"observations must be a Box, not {type(seen).__name__}", hint="flatten them")
        flags = [np.zeros((steps, envs), np.bool_) for _ in range(3)]
        return cls(
            seen=_zeros((steps + 1, envs, *seen.shape), seen.dtype),
            begins=np.zeros((steps + 1, envs), np.bool_),
            actions=np.zeros((steps, envs, *policy.head.shape), policy.head.dtype),
            logs=np.zeros((steps, envs), np.float32),
            rewards=np.zeros((steps, envs), np.float32),
            terminated=flags[0],
            truncated=flags[1],
            valid=flags[2],
            memory=_zeros((steps + 1, envs, policy.memory), np.float32),
        )

    def state_dict(self) -> dict[str, Array]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        for field in fields(self):
            np.copyto(getattr(self, field.name), state[field.name])


def _zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros for a policy to read, in memory of torch, which is aligned to 64 bytes.

    NumPy aligns to 16, the rest is chance, and BLAS may round differently at another alignment: a training that was
    resumed would then not have the same bits.
    """
    zeros: Array = torch.zeros(shape, dtype=torch.from_numpy(np.zeros(0, dtype)).dtype).numpy()
    return zeros


class Override(Protocol):
    """Somebody who acts in the policy's place for a while: a script."""

    def act(self, begins: Array) -> tuple[Array, Array] | None:
        """Actions [envs] and where they hold; None: nowhere. `begins`: where an episode begins with this step."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Listener(Protocol):
    """Somebody who counts what happens."""

    def add(
        self, rewards: Array, terminated: Array, truncated: Array, valid: Array, infos: Mapping[str, Any]
    ) -> None: ...


class Collector:
    """Steps the envs with a copy of the policy that nobody else touches."""

    def __init__(
        self,
        envs: gym.vector.VectorEnv[Any, Any, Any],
        policy: Policy,
        acting: Policy,
        flat: Flat,
        seed: int,
        *,
        script: Override | None = None,
        listener: Listener | None = None,
    ) -> None:
        mode = envs.metadata.get("autoreset_mode", gym.vector.AutoresetMode.NEXT_STEP)
        if mode != gym.vector.AutoresetMode.NEXT_STEP:
            raise LabError(
                "the envs must reset themselves one step after an episode's end", hint="AutoresetMode.NEXT_STEP"
            )
        self.envs = envs
        self._acting = acting
        self._copy = Flat(acting)
        self._source = flat
        self._device = next(policy.parameters()).device
        self._chance = np.random.default_rng(seed)
        self._seed = seed
        self._script = script
        self._listener = listener
        self._n = envs.num_envs
        self._memory = torch.zeros(self._n, policy.memory, device=self._device)
        self._seen: Array | None = None
        self._begins = np.ones(self._n, np.bool_)
        self._resetting = np.zeros(self._n, np.bool_)
        space = envs.single_action_space
        self._bounds = (space.low, space.high) if isinstance(space, gym.spaces.Box) else None

    def take_weights(self) -> None:
        """Act with the learner's present weights from now on."""
        self._copy.vector.data.copy_(self._source.vector.data)

    def collect(self, into: Rollout) -> Rollout:
        if self._seen is None:
            self._seen, _ = self.envs.reset(seed=self._seed)
        seen, begins, resetting = self._seen, self._begins, self._resetting
        head, memory = self._acting.head, self._memory
        with torch.inference_mode():
            for t in range(len(into.rewards)):
                into.seen[t] = seen
                into.begins[t] = begins
                into.memory[t] = memory.cpu().numpy()
                tensor = torch.from_numpy(into.seen[t]).to(self._device)
                starts = torch.from_numpy(begins).to(self._device)
                numbers, _, memory = self._acting(tensor, memory, starts)
                actions, logs = head.sample(numbers, self._chance)
                forced = self._script.act(begins) if self._script is not None else None
                if forced is not None:
                    actions = np.where(_fit(forced[1], actions), forced[0], actions)
                    logs = np.where(forced[1], np.float32(0), logs)
                into.actions[t], into.logs[t] = actions, logs
                done = actions if self._bounds is None else np.clip(actions, *self._bounds)
                seen, rewards, terminated, truncated, infos = self.envs.step(done)
                into.rewards[t], into.terminated[t], into.truncated[t] = rewards, terminated, truncated
                into.valid[t] = ~resetting
                if self._listener is not None:
                    self._listener.add(rewards, terminated, truncated, into.valid[t], infos)
                begins, resetting = resetting, terminated | truncated
        into.seen[-1], into.begins[-1], into.memory[-1] = seen, begins, memory.cpu().numpy()
        self._seen, self._begins, self._resetting = into.seen[-1].copy(), begins, resetting
        self._memory = memory.clone()
        return into

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "weights": self._copy.vector.detach(),
            "memory": self._memory,
            "seen": self._seen,
            "begins": self._begins,
            "resetting": self._resetting,
            "chance": random_state(self._chance),
        }
        return state | ({"script": self._script.state_dict()} if self._script is not None else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._copy.vector.data.copy_(torch.as_tensor(state["weights"]))
        self._memory = torch.as_tensor(state["memory"]).to(self._device).clone()
        self._seen = None if state["seen"] is None else np.array(state["seen"])
        self._begins, self._resetting = np.array(state["begins"]), np.array(state["resetting"])
        set_random_state(self._chance, dict(state["chance"]))
        if self._script is not None:
            self._script.load_state_dict(state["script"])


def _fit(mask: Array, actions: Array) -> Array:
    return mask.reshape(mask.shape + (1,) * (actions.ndim - mask.ndim))


class Source:
    """Hands the learner one rollout after the other."""

    def __init__(self, collector: Collector, rollouts: tuple[Rollout, Rollout], *, overlap: bool) -> None:
        self.collector = collector
        self.lag = int(overlap)
        """Updates between the weights that acted and those that learn."""
        self._rollouts = rollouts
        self._next = 0
        self._thread = ThreadPoolExecutor(1, "collector") if overlap else None
        self._pending: Future[Rollout] | None = None

    def take(self) -> Rollout:
        """The next rollout. It is the caller's until the next call."""
        if self._thread is None:
            self.collector.take_weights()
            return self.collector.collect(self._rollouts[0])
        if self._pending is None:
            self._begin()
        assert self._pending is not None
        ready = self._pending.result()
        self._begin()
        return ready

    def settle(self) -> None:
        """Wait until nothing is being collected, so that all can be saved."""
        if self._pending is not None:
            self._pending.result()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin(self) -> None:
        assert self._thread is not None
        self.collector.take_weights()
        self._pending = self._thread.submit(self.collector.collect, self._rollouts[self._next])
        self._next = 1 - self._next

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        ready = None if self._pending is None else self._pending.result().state_dict()
        return {"collector": self.collector.state_dict(), "ready": ready}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.collector.load_state_dict(state["collector"])
        if (state["ready"] is None) != (self._thread is None) and state["ready"] is not None:
            raise LabError("this was saved with overlapped collection", hint="go on with it switched on")
        if state["ready"] is not None:
            rollout = self._rollouts[self._next]
            rollout.load_state_dict(state["ready"])
            self._next = 1 - self._next
            self._pending = Future()
            self._pending.set_result(rollout)
