"""A training from its first step to its last: collect, learn, replay, log, save; stopped or killed, it goes on exactly.

Everything that the next update depends on is in the checkpoint: weights, optimizer, replay, envs, what was collected
but not yet learned from, every random generator, the counters, and the length of metrics.jsonl. A training that was
killed at any moment and is started again ends with the same bits as one that was not.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch

from looplab.errors import LabError
from looplab.rl.collect import Array, Collector, Override, Rollout, Source
from looplab.rl.flat import Flat
from looplab.rl.metrics import TIMES, Sinks
from looplab.rl.policies import Policy
from looplab.rl.replay import Replay
from looplab.trainkit.checkpoint import Checkpoints
from looplab.trainkit.resume import TrainingState
from looplab.trainkit.stop import stopping


class Learner(Protocol):
    @property
    def policy(self) -> Policy: ...
    @property
    def flat(self) -> Flat: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    def learn(self, rollout: Rollout, lag: int, left: float = 1.0) -> dict[str, float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Plan:
    total_steps: int
    """Transitions of all envs together."""
    rollout: int = 128
    """Steps of each env between two updates."""
    overlap: bool = False
    anneal: bool = False
    """The learning rate falls to 0 until the end."""
    log_every: int = 1
    """Updates."""
    save_every: int = 50
    """Updates."""
    keep: int | None = 2
    """Checkpoints."""
    replay_batch: int = 256
    replay_every: int = 1
    """Updates between two samples of the replay; everything is put into it all the same."""
    compile: bool = False


SUMS = {"shaping_dx": "env_distance_delta_sum", "shaping_raw": "env_shaping_raw_sum",
        "shaping_scaled": "env_shaping_scaled_sum", "stagnation": "env_stagnations",
        "worker_restarted": "env_restarts"}  # fmt: skip
LAST = {"shaping_dx": "env_shaping_last_dx", "shaping_raw": "env_shaping_last_raw",
        "shaping_scaled": "env_shaping_last_scaled", "shaping_scale": "env_shaping_scale",
        "ram_parse_failures": "env_shaping_parse_fail"}  # fmt: skip
"""Fields of an env's info, and what a row of the metrics calls their sums and their last values."""


class Tally:
    """Counts what happens in the envs, from one row of the metrics to the next. Sums are over all envs."""

    def __init__(self, envs: int) -> None:
        self.returns = np.zeros(envs)
        self.lengths = np.zeros(envs, np.int64)
        self.furthest = np.zeros(envs)
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._ended: list[tuple[float, int, float]] = []
        self._steps = 0
        self._x_sum = self._x_max = 0.0
        self._x_count = 0

    def add(self, rewards: Array, terminated: Array, truncated: Array, valid: Array, infos: Mapping[str, Any]) -> None:
        self._steps += int(valid.sum())
        self.returns += rewards
        self.lengths += valid
        if infos:
            self._look(valid, infos)
        ended = terminated | truncated
        if ended.any():
            for env in np.flatnonzero(ended):
                self._ended.append((float(self.returns[env]), int(self.lengths[env]), float(self.furthest[env])))
            self.returns[ended] = 0.0
            self.lengths[ended] = 0
            self.furthest[ended] = 0.0

    def _look(self, valid: Array, infos: Mapping[str, Any]) -> None:
        """An env that only reset itself tells where it starts, which is no step."""
        x = infos.get("x_pos")
        if x is not None:
            known = infos["_x_pos"] & valid
            if known.any():
                at = np.asarray(x, float)[known]
                self._x_sum += float(at.sum())
                self._x_count += len(at)
                self._x_max = max(self._x_max, float(at.max()))
                self.furthest[known] = np.maximum(self.furthest[known], at)
        for name, field in SUMS.items():
            if name in infos:
                there = infos[f"_{name}"] & valid
                values = infos[name][there]
                amount = there.sum() if values.dtype == object else np.asarray(values, float).sum()
                self._sums[field] = self._sums.get(field, 0.0) + float(amount)
        for name, field in LAST.items():
            if name in infos:
                there = infos[f"_{name}"] & valid
                if there.any():
                    self._last[field] = float(np.asarray(infos[name], float)[there][-1])

    def row(self) -> dict[str, float]:
        """What is known since the last row. What was not seen is not in it, and never 0."""
        row: dict[str, float] = {**self._sums, **self._last}
        if self._ended:
            returns, lengths, furthest = (np.array(x, float) for x in zip(*self._ended, strict=True))
            row["episodes"] = float(len(returns))
            row["episode_return_mean"], row["episode_return_max"] = float(returns.mean()), float(returns.max())
            row["episode_length_mean"] = float(lengths.mean())
            if self._x_count:
                row["episode_max_x_mean"] = float(furthest.mean())
        if self._x_count:
            row |= {"env_mean_x_pos": self._x_sum / self._x_count, "env_max_x_pos": self._x_max}
        self._clear()
        return row

    def state_dict(self) -> dict[str, Any]:
        return {
            "returns": self.returns, "lengths": self.lengths, "furthest": self.furthest, "sums": dict(self._sums),
            "last": dict(self._last), "ended": [list(row) for row in self._ended], "steps": self._steps,
            "x": [self._x_sum, self._x_max, self._x_count],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.returns, self.lengths = np.array(state["returns"]), np.array(state["lengths"])
        self.furthest = np.array(state["furthest"])
        self._sums, self._last = dict(state["sums"]), dict(state["last"])
        self._ended = [(row[0], row[1], row[2]) for row in state["ended"]]
        self._steps = state["steps"]
        self._x_sum, self._x_max, self._x_count = state["x"]


class Runner:
    """Ties the parts together. `extra` gives more numbers for each row (the replay's and the monitor's are there)."""

    def __init__(
        self,
        envs: gym.vector.VectorEnv[Any, Any, Any],
        learner: Learner,
        plan: Plan,
        out: Path,
        sinks: Sinks,
        seed: int,
        *,
        script: Override | None = None,
        replay: Replay | None = None,
        extra: Callable[[], dict[str, float]] | None = None,
        tell: Callable[[str], object] = print,
    ) -> None:
        if replay is not None and not hasattr(learner, "learn_again"):
            raise LabError(f"{type(learner).__name__} does not learn from a replay", hint="take Impala, or no replay")
        self.envs, self.learner, self.plan, self.out, self.sinks = envs, learner, plan, out, sinks
        self.replay, self._extra, self._tell = replay, extra, tell
        self.tally = Tally(envs.num_envs)
        policy = learner.policy
        acting = copy.deepcopy(policy)
        if plan.compile:
            policy.compile()  # in place: names of parameters stay as they are
        collector = Collector(envs, policy, acting, learner.flat, seed, script=script, listener=self.tally)
        space = envs.single_observation_space
        first, second = (Rollout.empty(plan.rollout, envs.num_envs, space, policy) for _ in range(2))
        self.source = Source(collector, (first, second), overlap=plan.overlap)
        self.counters: dict[str, Any] = {"global_step": 0, "global_update": 0, "num_envs": envs.num_envs,
                                         "rollout_steps": plan.rollout, "whole": True}  # fmt: skip
        self._told: dict[str, float] = {}
        """What the learner said of the last update, until it is in a row."""
        self._times = dict.fromkeys(TIMES, 0.0)
        self._began = time.perf_counter()
        self._steps_before = 0
        parts: dict[str, Any] = {"learner": learner, "source": self.source, "tally": self.tally}
        if hasattr(envs, "state_dict"):
            parts["envs"] = envs
        if replay is not None:
            parts["replay"] = replay
        self.training_state = TrainingState(parts=parts, counters=self.counters, metrics=sinks.metrics)
        self.checkpoints = Checkpoints(out / "checkpoints", keep=plan.keep)

    def run(self, resume: Path | None = None) -> None:
        """Train to the end. A signal or an error saves first, and then goes its way: see `stopping`."""
        where = resume or self.checkpoints.folder
        loaded = self.training_state.resume(where, tell=self._tell)
        if loaded is not None:
            self._tell(f"going on from {loaded.path}: step {self.counters['global_step']:,}")
            if not self.counters["whole"]:
                self._tell(
                    "it was saved by an error in the middle of an update: what follows is not an exact repetition"
                )
                self.counters["whole"] = True
        elif resume is not None:
            raise LabError(f"no usable checkpoint under {resume}", hint="leave the resuming out to begin anew")
        else:
            self._set_aside()
        self._began, self._steps_before = time.perf_counter(), self.counters["global_step"]
        try:
            with self.checkpoints:
                with stopping(save=self._save_last) as stop:
                    while self.counters["global_step"] < self.plan.total_steps and not stop:
                        self.update()
                if self._told:  # a training shorter than the way to the next row has one all the same
                    self._log(self._told)
                self.save()
        finally:
            self.source.close()

    def _set_aside(self) -> None:
        """Rows of an attempt that ended before its first checkpoint would be there twice."""
        rows = Path(self.sinks.metrics.path)
        if rows.exists() and rows.stat().st_size:
            aside = rows.with_suffix(".before.jsonl")
            self._tell(f"{rows.name} is there, but no checkpoint: beginning anew; the old rows are in {aside.name}")
            rows.replace(aside)

    def update(self) -> None:
        """One rollout, learned from; then the row and the checkpoint that are due."""
        plan, counters = self.plan, self.counters
        counters["whole"] = False
        began = time.perf_counter()
        rollout = self.source.take()
        collected = time.perf_counter()
        left = max(0.0, 1 - counters["global_step"] / plan.total_steps) if plan.anneal else 1.0
        told = self.learner.learn(rollout, self.source.lag, left)
        learned = time.perf_counter()
        counters["global_step"] += int(rollout.valid.sum())
        counters["global_update"] += 1
        if self.replay is not None:
            told |= self._learn_again(rollout)
        done = time.perf_counter()
        for name, seconds in (("collect_ms", collected - began), ("learn_ms", learned - collected),
                              ("replay_ms", done - learned)):  # fmt: skip
            self._times[name] += 1000 * seconds
        counters["whole"] = True
        self._told = told
        if counters["global_update"] % plan.log_every == 0:
            self._log(told)
        if counters["global_update"] % plan.save_every == 0:
            self.save()

    def _learn_again(self, rollout: Rollout) -> dict[str, float]:
        replay, learner = self.replay, self.learner
        assert replay is not None
        keep = rollout.valid
        replay.push(
            {
                "seen": rollout.seen[:-1][keep], "next_seen": rollout.seen[1:][keep], "actions": rollout.actions[keep],
                "rewards": rollout.rewards[keep], "logs": rollout.logs[keep], "terminated": rollout.terminated[keep],
                "memory": rollout.memory[:-1][keep], "next_memory": rollout.memory[1:][keep],
            },
            learner.priorities[keep],  # type: ignore[attr-defined]
        )  # fmt: skip
        if self.counters["global_update"] % self.plan.replay_every or len(replay) < self.plan.replay_batch:
            return {}
        sample = replay.sample(self.plan.replay_batch)
        told, errors = learner.learn_again(sample.data, sample.weights)  # type: ignore[attr-defined]
        replay.update(sample.indices, errors)
        return dict(told)

    def _log(self, told: dict[str, float]) -> None:
        if self.source.lag:
            self.source.settle()  # what a row says must not depend on how far the other thread has got
        now = time.perf_counter()
        counters = self.counters
        row = {"global_step": counters["global_step"], "global_update": counters["global_update"], **told}
        row |= self.tally.row()
        if self.replay is not None:
            row |= self.replay.statistics()
        row |= self._times
        row["steps_per_second"] = (counters["global_step"] - self._steps_before) / max(now - self._began, 1e-9)
        row["model_compiled"] = self.plan.compile
        if self._extra is not None:
            row |= self._extra()
        self.sinks.log(row, counters["global_step"])
        self._told = {}
        self._times = dict.fromkeys(TIMES, 0.0)

    def save(self) -> None:
        began = time.perf_counter()
        self.source.settle()
        self.training_state.save(self.checkpoints, self.counters["global_step"])
        self._times["checkpoint_ms"] += 1000 * (time.perf_counter() - began)

    def _save_last(self) -> None:
        """After a signal: all, between two updates. After an error: whatever there is, and marked as such."""
        try:
            self.save()
            self.checkpoints.wait()
        except (LabError, OSError, RuntimeError, ValueError) as error:
            self._tell(f"the state could not be saved ({error}); the last checkpoint before it is as it was")
