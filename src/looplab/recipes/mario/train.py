"""Train Mario: PPO or an IMPALA-style learner on the real game, on supervised vector envs.

    python train.py --config configs/base.json --out runs/try --total-steps 200000

Every key of the config is also a flag (--train.gamma 0.98), and common keys have short flags (see --help). A folder
with a checkpoint is resumed exactly, and only with the settings it was saved with, unless --allow-changes is given;
--resume FOLDER resumes the newest checkpoint under another folder that fits. SIGTERM and Ctrl-C save a checkpoint
first. Metrics go to metrics.jsonl (`python -m looplab.rl.metrics` and mario/metrics.py explain them), the machine's
load to monitor.jsonl, lost workers to diagnostics/worker_restarts.log.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from looplab import trainkit
from looplab.errors import LabError
from looplab.rl import SupervisedVectorEnv
from looplab.rl.impala import Impala, ImpalaSettings
from looplab.rl.metrics import MetricsWriter, to_parquet
from looplab.rl.monitor import SystemMonitor
from looplab.rl.policies import ActorCritic, make_policy
from looplab.rl.ppo import Ppo, PpoSettings
from looplab.rl.replay import PrioritizedReplay
from looplab.rl.runner import Runner, TrainingPlan
from looplab.rl.scripts import ActionScript, parse_script

if TYPE_CHECKING:
    from looplab.recipes.mario.mario.env import ACTIONS, INFO_FIELDS, MarioEnv
    from looplab.recipes.mario.mario.forward import probe_forward
    from looplab.recipes.mario.mario.metrics import FIELDS
    from looplab.recipes.mario.mario.settings import MarioSettings, add_flags, read_settings
    from looplab.recipes.mario.mario.shaping import (
        SHAPING_INFO_FIELDS,
        RamAddresses,
        RewardShaping,
        ShapingSettings,
    )
    from looplab.recipes.mario.mario.video import record_episode
else:  # the package next to this file, also in a copy of the recipe
    from mario.env import ACTIONS, INFO_FIELDS, MarioEnv
    from mario.forward import probe_forward
    from mario.metrics import FIELDS
    from mario.settings import MarioSettings, add_flags, read_settings
    from mario.shaping import SHAPING_INFO_FIELDS, RamAddresses, RewardShaping, ShapingSettings
    from mario.video import record_episode

FORWARD_BUTTONS = {"RIGHT", "B"}


def make_env(settings: MarioSettings, render: bool = False) -> RewardShaping:
    game, reward = settings.env, settings.reward
    env = MarioEnv(
        stages=((game.world, game.stage),), actions=game.action_type, frame_skip=game.frame_skip,
        frame_stack=game.frame_stack, noops=game.noops, max_steps=game.max_steps, core=game.core,
        render_mode="rgb_array" if render else None,
    )  # fmt: skip
    return RewardShaping(
        env,
        ShapingSettings(
            env_weight=reward.env_weight, distance_weight=reward.distance_weight, score_weight=reward.score_weight,
            time_weight=reward.time_weight, scale_start=reward.scale_start, scale_final=reward.scale_final,
            anneal_steps=reward.anneal_steps, terminal_bonus=reward.terminal_bonus, stagnation=reward.stagnation,
            ram=RamAddresses(reward.ram_x_high, reward.ram_x_low) if reward.ram_x_parse else None,
        ),
    )  # fmt: skip


def make_envs(settings: MarioSettings, out: Path) -> SupervisedVectorEnv:
    game, vector = settings.env, settings.vector
    fields = tuple(dict.fromkeys((*SHAPING_INFO_FIELDS, *INFO_FIELDS)))
    return SupervisedVectorEnv(
        [partial(make_env, settings)] * game.num_envs,
        workers="auto" if game.workers is None else game.workers,
        info_fields=fields,
        prewarm=vector.parent_prewarm,
        start_delay=vector.worker_start_delay,
        serialise_start=vector.serialise_start,
        reset_deadline=vector.env_reset_timeout,
        step_deadline=vector.env_step_timeout,
        snapshot_every=vector.snapshot_every,
        slow_step=vector.slow_step,
        slow_threshold=vector.slow_step_trace_threshold,
        slow_window=vector.slow_step_trace_window,
        diagnostics_dir=out / "diagnostics",
        copy=False,
    )


def make_script(settings: MarioSettings) -> ActionScript | None:
    """Return the script of the settings; None if the policy acts from the start."""
    s, actions = settings.script, ACTIONS[settings.env.action_type]
    if s.sequence:
        script = parse_script(s.sequence, actions)
    elif s.forward_frames:
        action = s.forward_action
        if s.probe_forward:
            probe = probe_forward(partial(make_env, settings), range(len(actions)), s.probe_forward)
            action = probe.best_action
            print(f"forward is action {action} ({'+'.join(actions[action]) or 'none'}): distances {probe.distances}")
        if action is None:
            action = next(i for i, names in enumerate(actions) if set(names) == FORWARD_BUTTONS)
        if s.forward_frames < 1 or action < 0:
            raise LabError(f"a script of {s.forward_frames} steps of action {action} cannot be played")
        script = [(action, s.forward_frames)]
    else:
        return None
    return ActionScript(script, settings.env.num_envs, every_episode=s.every_episode)


def make_learner(settings: MarioSettings, policy: ActorCritic) -> Ppo | Impala:
    t = settings.train
    if t.algorithm == "ppo":
        if settings.replay.enabled:
            raise LabError("only impala can use a replay", hint="--algorithm impala, or --per false")
        return Ppo(
            policy,
            PpoSettings(
                learning_rate=t.learning_rate, epochs=t.epochs, minibatch=t.minibatch, gamma=t.gamma, lam=t.lam,
                clip=t.clip, value_coef=t.value_coef, entropy_coef=t.entropy_coef, max_grad_norm=t.max_grad_norm,
            ),
            t.seed,
        )  # fmt: skip
    return Impala(
        policy,
        ImpalaSettings(
            learning_rate=t.learning_rate, returns="gae" if t.returns == "gae" else "vtrace", gamma=t.gamma, lam=t.lam,
            value_coef=t.value_coef, entropy_coef=t.entropy_coef, max_grad_norm=t.max_grad_norm,
        ),
    )  # fmt: skip


def make_replay(settings: MarioSettings) -> PrioritizedReplay | None:
    r = settings.replay
    if not r.enabled:
        return None
    return PrioritizedReplay(
        entries=r.entries, max_bytes=int(r.max_memory_gb * 2**30), alpha=r.alpha, beta=r.beta, beta_final=r.beta_final,
        beta_entries=r.beta_samples, seed=settings.train.seed,
    )  # fmt: skip


def train(settings: MarioSettings, out: Path, resume: Path | None = None, *, allow_changes: bool = False) -> Runner:
    """Train into the folder `out`, resuming the checkpoint there or under `resume`."""
    t, log = settings.train, settings.log
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(t.seed)
    script = make_script(settings)
    envs = make_envs(settings, out)
    try:
        device = torch.device(t.device)
        spaces = (envs.single_observation_space, envs.single_action_space)
        policy = make_policy(*spaces, hidden_size=t.memory, width=t.width).to(device)
        learner = make_learner(settings, policy)
        tensorboard = out / "tensorboard" if log.enable_tensorboard else None
        wandb = {"dir": str(out), "config": settings.as_dict()} if log.enable_wandb else None
        plan = TrainingPlan(
            t.total_steps, rollout=t.rollout_steps, overlap=t.overlap_collect, anneal=t.anneal,
            log_every=log.log_interval, save_every=log.checkpoint_interval, replay_batch=settings.replay.batch,
            replay_every=settings.replay.per_sample_interval, compile=t.compile,
        )  # fmt: skip
        logger = trainkit.Logger(out / "metrics.jsonl")
        with (
            MetricsWriter(logger, tensorboard=tensorboard, wandb=wandb, extra_fields=FIELDS) as metrics,
            SystemMonitor(out / "monitor.jsonl", log.monitor_period) as monitor,
        ):
            runner = Runner(
                envs, learner, plan, out_dir=out, metrics=metrics, seed=t.seed, script=script,
                settings=settings.identity(), replay=make_replay(settings), extra_metrics=monitor.gpu_metrics,
            )  # fmt: skip
            print(f"{envs.num_envs} envs, {len(envs.diagnostics()) or 'no'} workers, {t.total_steps:,} steps -> {out}")
            write_parquet(out)  # of a process that was killed
            runner.restore(resume, allow_changes=allow_changes)
            trainkit.atomic_write(out / "settings.json", to_json(settings))
            try:
                runner.train()
            finally:
                write_parquet(out)
        if envs.restarts:
            print(f"{envs.restarts} restarts of workers: see {out / 'diagnostics' / 'worker_restarts.log'}")
    finally:
        envs.close()
    return runner


def write_parquet(out: Path) -> None:
    """Write the rows logged so far to metrics.parquet."""
    if (out / "metrics.jsonl").exists():
        to_parquet(out / "metrics.jsonl", out / "metrics.parquet", extra_fields=FIELDS)


def to_json(settings: MarioSettings) -> bytes:
    import json

    return (json.dumps(settings.as_dict(), indent=2) + "\n").encode()


class Player:
    """Plays one env with a trained policy: maps an observation to an action."""

    def __init__(self, policy: ActorCritic, seed: int = 0, greedy: bool = False) -> None:
        self._policy, self._greedy = policy, greedy
        self._rng = np.random.default_rng(seed)
        self._hidden_state = torch.zeros(1, policy.hidden_size)

    def __call__(self, obs: Any) -> int:
        with torch.inference_mode():
            batch = torch.from_numpy(np.asarray(obs)[None])
            episode_starts = torch.zeros(1, dtype=torch.bool)
            logits, _, self._hidden_state = self._policy(batch, self._hidden_state, episode_starts)
        head = self._policy.head
        return int(head.mode(logits)[0] if self._greedy else head.sample(logits, self._rng)[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=None, help="JSON file with the settings")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder of the run (default: $LOOPLAB_RUN_DIR, or runs/mario)"
    )
    parser.add_argument(
        "--resume", type=Path, default=None, help="resume the newest checkpoint under this folder that fits"
    )
    parser.add_argument("--allow-changes", action="store_true", help="resume with other settings than the checkpoint's")
    parser.add_argument("--from-env", action="store_true", help="read the environment variables of resume.sh")
    add_flags(parser)
    args = parser.parse_args()
    out = args.out or (trainkit.run_dir() if "LOOPLAB_RUN_DIR" in os.environ else Path("runs/mario"))
    try:
        settings = read_settings(args.config, vars(args), os.environ if args.from_env else {})
        runner = train(settings, out, args.resume, allow_changes=args.allow_changes)
        counters = runner.counters
        trainkit.Logger(out / "metrics.jsonl").summary(
            {"global_step": counters["global_step"], "global_update": counters["global_update"]}
        )
        if settings.log.record_video:
            env = make_env(settings, render=True)
            player = Player(runner.learner.policy.cpu())
            episode = record_episode(env, player, out / "episode.gif", seed=settings.train.seed)
            print(f"episode.gif: x_pos {episode.info['x_pos']} after {episode.steps} steps")
            env.close()
    except LabError as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
