"""A training run from the first step to the last: collect, learn, replay, log, save.

The checkpoint contains everything that the next update depends on: weights, optimizer, replay, envs, rollouts that were
collected but not yet learned from, every random generator, the counters, and the length of metrics.jsonl. A run that is
killed at any moment and started again ends with the same bits as one that was not.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym

from looplab.errors import LabError
from looplab.rl.collect import ActionOverride, Collector, RolloutBuffer, RolloutSource
from looplab.rl.episode_stats import EpisodeStats
from looplab.rl.flat import FlatParameters
from looplab.rl.metrics import PHASE_TIMES, MetricsWriter
from looplab.rl.policies import ActorCritic
from looplab.rl.replay import PrioritizedReplay
from looplab.trainkit.checkpoint import Checkpoints
from looplab.trainkit.resume import TrainingState
from looplab.trainkit.stop import stopping


class Learner(Protocol):
    """What the runner needs of a learner. One that can use a replay also has `learn_from_replay` and `priorities`."""

    @property
    def policy(self) -> ActorCritic: ...
    @property
    def flat(self) -> FlatParameters: ...

    def learn(self, rollout: RolloutBuffer, lag: int, progress_remaining: float = 1.0) -> dict[str, float]:
        """Update the policy on one rollout.

        Args:
            rollout: The collected steps; valid during the call only.
            lag: Updates by which the behaviour policy is behind; 0 means on-policy.
            progress_remaining: Factor of the learning rate, annealed from 1 to 0.

        Returns:
            Metrics of the update.
        """
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainingPlan:
    """Length of a run, and how often it learns, logs and saves."""

    total_steps: int
    """Transitions over all envs."""
    rollout: int = 128
    """Steps of each env per update."""
    overlap: bool = False
    """Collect the next rollout while learning from the last one."""
    anneal: bool = False
    """Decrease the learning rate linearly to 0."""
    log_every: int = 1
    """Updates between two rows of metrics."""
    save_every: int = 50
    """Updates between two checkpoints."""
    keep: int | None = 2
    """Checkpoints to keep; None: all."""
    replay_batch: int = 256
    """Transitions per replay batch."""
    replay_every: int = 1
    """Updates between two replay batches; every transition is stored regardless."""
    compile: bool = False
    """Compile the policy with torch.compile."""


class Runner:
    """Runs a training: collects, learns, logs, saves and resumes."""

    def __init__(
        self,
        envs: gym.vector.VectorEnv[Any, Any, Any],
        learner: Learner,
        plan: TrainingPlan,
        *,
        out_dir: Path,
        metrics: MetricsWriter,
        seed: int,
        script: ActionOverride | None = None,
        settings: Mapping[str, Any] | None = None,
        replay: PrioritizedReplay | None = None,
        extra_metrics: Callable[[], Mapping[str, float]] | None = None,
        echo: Callable[[str], object] = print,
    ) -> None:
        """
        Args:
            envs: Vector env with `NEXT_STEP` autoreset. Its state is saved if it has `state_dict`.
            learner: For example `Ppo` or `Impala`.
            plan: Length and intervals of the run.
            out_dir: Folder of the run; checkpoints go to its subfolder `checkpoints`.
            metrics: Writer of the rows. Its declared fields with `info` are computed from the envs' infos.
            seed: Seeds the envs and the sampling of actions.
            script: Acts in place of the policy where it wants to.
            settings: What a resumed run must share with the run that saved the checkpoint; None: not compared.
            replay: Replay of transitions, for learners that support one.
            extra_metrics: Called for each row; returns declared fields to add to it.
            echo: Receives messages for the user.

        Raises:
            LabError: The learner does not support a replay.
        """
        if replay is not None and not hasattr(learner, "learn_from_replay"):
            raise LabError(f"{type(learner).__name__} does not support a replay", hint="use Impala, or no replay")
        self.envs, self.learner, self.plan, self.metrics = envs, learner, plan, metrics
        self.replay, self._extra_metrics, self._echo = replay, extra_metrics, echo
        self.episode_stats = EpisodeStats(envs.num_envs, metrics.fields.values())
        policy = learner.policy
        behaviour_policy = copy.deepcopy(policy)
        if plan.compile:
            policy.compile()  # in place: the names of the parameters do not change
        collector = Collector(
            envs, behaviour_policy, learner.flat, seed=seed, script=script, listener=self.episode_stats
        )
        space = envs.single_observation_space
        first, second = (RolloutBuffer.zeros(plan.rollout, envs.num_envs, space, policy) for _ in range(2))
        self.source = RolloutSource(collector, (first, second), overlap=plan.overlap)
        self.counters: dict[str, Any] = {
            "global_step": 0, "global_update": 0, "num_envs": envs.num_envs, "rollout_steps": plan.rollout,
            "whole": True, "backend": self.source.collector.backend,
        }  # fmt: skip
        """Saved in the checkpoint. `whole` is False while an update is unfinished; `backend`: see `Collector`."""
        self._reported_restarts: int = getattr(envs, "restarts", 0)
        self._pending_stats: dict[str, float] = {}
        """Metrics of the last update, until a row contains them."""
        self._phase_ms = dict.fromkeys(PHASE_TIMES, 0.0)
        self._start_time = time.perf_counter()
        self._start_step = 0
        # The names of the parts are keys of the checkpoint.
        parts: dict[str, Any] = {"learner": learner, "source": self.source, "tally": self.episode_stats}
        if hasattr(envs, "state_dict"):
            parts["envs"] = envs
        if replay is not None:
            parts["replay"] = replay
        self.training_state = TrainingState(
            parts=parts, counters=self.counters, settings=settings, metrics=metrics.logger
        )
        self.checkpoints = Checkpoints(out_dir / "checkpoints", keep=plan.keep)

    def run(self, resume: Path | None = None, *, allow_changes: bool = False) -> None:
        """Restore the newest checkpoint, if there is one, and train to the end; see `restore` and `train`."""
        self.restore(resume, allow_changes=allow_changes)
        self.train()

    def restore(self, resume: Path | None = None, *, allow_changes: bool = False) -> None:
        """Restore the newest checkpoint.

        Args:
            resume: Folder whose newest checkpoint that fits is resumed; None resumes the run's own folder, if it has
                one.
            allow_changes: Resume with other settings than those of the checkpoint.

        Raises:
            LabError: `resume` has no usable checkpoint, or the settings differ from those of the checkpoint.
        """
        backend = self.counters["backend"]
        self.counters["backend"] = "torch"  # as in checkpoints of older versions
        loaded = self.training_state.resume(
            resume or self.checkpoints.folder, "settings" if allow_changes else (), self._echo,
            skip_unfit=resume is not None,
        )  # fmt: skip
        previous, self.counters["backend"] = self.counters["backend"], backend
        if loaded is not None:
            if previous != backend:
                self._echo(f"the checkpoint was computed by {previous}, now {backend} is used: rounding differs")
            self._echo(f"resuming from {loaded.path} at step {self.counters['global_step']:,}")
            if not self.counters["whole"]:
                self._echo("this checkpoint was saved by an error during an update; the run is not an exact repetition")
                self.counters["whole"] = True
        elif resume is not None:
            raise LabError(f"no usable checkpoint under {resume}", hint="omit the resume option to start a new run")
        else:
            self._set_old_metrics_aside()

    def train(self) -> None:
        """Train to the end of the plan. A signal or an error saves a checkpoint first; see `stopping`."""
        self._start_time, self._start_step = time.perf_counter(), self.counters["global_step"]
        try:
            with self.checkpoints:
                with stopping(save=self._save_on_exit) as stop:
                    while self.counters["global_step"] < self.plan.total_steps and not stop:
                        self.update()
                if self._pending_stats:  # a run that ends between two rows still logs its last update
                    self._log_row(self._pending_stats)
                self.save()
        finally:
            self.source.close()

    def _set_old_metrics_aside(self) -> None:
        """Move away the rows of an attempt that ended before its first checkpoint; they would be duplicated."""
        path = Path(self.metrics.logger.path)
        if path.exists() and path.stat().st_size:
            aside = path.with_suffix(".before.jsonl")
            self._echo(f"found {path.name} but no checkpoint: starting a new run; the old rows are in {aside.name}")
            path.replace(aside)

    def update(self) -> None:
        """Collect one rollout and learn from it; then log and save if due."""
        plan, counters = self.plan, self.counters
        counters["whole"] = False
        start = time.perf_counter()
        rollout = self.source.next_rollout()
        collected = time.perf_counter()
        progress_remaining = max(0.0, 1 - counters["global_step"] / plan.total_steps) if plan.anneal else 1.0
        stats = self.learner.learn(rollout, self.source.lag, progress_remaining)
        learned = time.perf_counter()
        counters["global_step"] += int(rollout.valid.sum())
        counters["global_update"] += 1
        if self.replay is not None:
            stats |= self._learn_from_replay(rollout)
        end = time.perf_counter()
        self._phase_ms["collect_ms"] += 1000 * (collected - start)
        self._phase_ms["learn_ms"] += 1000 * (learned - collected)
        self._phase_ms["replay_ms"] += 1000 * (end - learned)
        counters["whole"] = True
        self._pending_stats = stats
        self._report_lost_workers()
        if counters["global_update"] % plan.log_every == 0:
            self._log_row(stats)
        if counters["global_update"] % plan.save_every == 0:
            self.save()

    def _learn_from_replay(self, rollout: RolloutBuffer) -> dict[str, float]:
        """Store the rollout's transitions and, if due, learn from a batch; return the metrics of that."""
        replay, learner = self.replay, self.learner
        assert replay is not None
        valid = rollout.valid & ~rollout.scripted
        replay.push(
            {
                "obs": rollout.obs[:-1][valid],
                "next_obs": rollout.obs[1:][valid],
                "actions": rollout.actions[valid],
                "rewards": rollout.rewards[valid],
                "log_probs": rollout.log_probs[valid],
                "terminated": rollout.terminated[valid],
                "hidden_state": rollout.hidden_state[:-1][valid],
                "next_hidden_state": rollout.hidden_state[1:][valid],
            },
            learner.priorities[valid],  # type: ignore[attr-defined]
        )
        if self.counters["global_update"] % self.plan.replay_every or len(replay) < self.plan.replay_batch:
            return {}
        batch = replay.sample(self.plan.replay_batch)
        stats, td_errors = learner.learn_from_replay(batch.data, batch.weights)  # type: ignore[attr-defined]
        replay.update_priorities(batch.indices, td_errors)
        return dict(stats)

    def _report_lost_workers(self) -> None:
        """Report workers that were replaced since the last call."""
        restarts = getattr(self.envs, "restarts", 0)
        if restarts > self._reported_restarts:
            for report in self.envs.diagnostics():  # type: ignore[attr-defined]
                if report.restarts:
                    self._echo(
                        f"worker {report.worker} was replaced ({report.reasons[-1]}), its restart {report.restarts}"
                    )
            self._reported_restarts = restarts

    def _log_row(self, stats: Mapping[str, float]) -> None:
        if self.source.lag:
            self.source.wait()  # a row must not depend on the progress of the collecting thread
        now = time.perf_counter()
        counters = self.counters
        row = {"global_step": counters["global_step"], "global_update": counters["global_update"], **stats}
        row |= self.episode_stats.pop_row()
        if self.replay is not None:
            row |= self.replay.statistics()
        row |= self._phase_ms
        row["steps_per_second"] = (counters["global_step"] - self._start_step) / max(now - self._start_time, 1e-9)
        if hasattr(self.envs, "restarts"):
            row["worker_restarts"] = self.envs.restarts
        row["model_compiled"] = self.plan.compile
        if self._extra_metrics is not None:
            row |= self._extra_metrics()
        self.metrics.log(row, counters["global_step"])
        self._pending_stats = {}
        self._phase_ms = dict.fromkeys(PHASE_TIMES, 0.0)

    def save(self) -> None:
        """Save a checkpoint."""
        start = time.perf_counter()
        self.source.wait()
        self.training_state.save(self.checkpoints, self.counters["global_step"])
        self._phase_ms["checkpoint_ms"] += 1000 * (time.perf_counter() - start)

    def _save_on_exit(self) -> None:
        """Save after a signal, between two updates, or after an error, in the middle of one."""
        try:
            self.save()
            self.checkpoints.wait()
        except (LabError, OSError, RuntimeError, ValueError) as error:
            self._echo(f"the state could not be saved ({error}); the previous checkpoint is unchanged")
