"""Train Mario: PPO or an IMPALA-style learner on the real game, on vector envs that survive.

    python train.py --config configs/base.json --out runs/try --total-steps 200000

Every key of the config is a flag too (--train.gamma 0.98), and the usual short ones are known (see --help). A folder
that has a checkpoint is gone on with, exactly; --resume FOLDER goes on with another one's. SIGTERM and Ctrl-C save
first. Rows are in metrics.jsonl (docs/metrics-schema.md), the machine's state in monitor.jsonl.
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
from looplab.rl.metrics import Sinks, to_parquet
from looplab.rl.monitor import Monitor
from looplab.rl.policies import Policy, make_policy
from looplab.rl.ppo import Ppo, PpoSettings
from looplab.rl.replay import Replay
from looplab.rl.runner import Plan, Runner
from looplab.rl.scripts import Script, forward, parse, probe_forward
from looplab.rl.shaping import FIELDS, Ram, Shaping, ShapingSettings

if TYPE_CHECKING:
    from looplab.recipes.mario.mario.env import ACTIONS, INFO_FIELDS, MarioEnv
    from looplab.recipes.mario.mario.settings import Settings, add_flags, read_settings
    from looplab.recipes.mario.mario.video import record
else:  # the package beside this file, also where it was copied to be changed
    from mario.env import ACTIONS, INFO_FIELDS, MarioEnv
    from mario.settings import Settings, add_flags, read_settings
    from mario.video import record

FORWARD = {"RIGHT", "B"}


def make_env(settings: Settings, render: bool = False) -> Shaping:
    game, reward = settings.env, settings.reward
    env = MarioEnv(
        stages=((game.world, game.stage),), actions=game.action_type, frame_skip=game.frame_skip,
        frame_stack=game.frame_stack, noops=game.noops, max_steps=game.max_steps, core=game.core,
        render_mode="rgb_array" if render else None,
    )  # fmt: skip
    return Shaping(
        env,
        ShapingSettings(
            env_weight=reward.env_weight, distance_weight=reward.distance_weight, score_weight=reward.score_weight,
            time_weight=reward.time_weight, scale_start=reward.scale_start, scale_final=reward.scale_final,
            anneal_steps=reward.anneal_steps, terminal_bonus=reward.terminal_bonus, stagnation=reward.stagnation,
            ram=Ram(reward.ram_x_high, reward.ram_x_low) if reward.ram_x_parse else None,
        ),
    )  # fmt: skip


def make_envs(settings: Settings, out: Path) -> SupervisedVectorEnv:
    game, vector = settings.env, settings.vector
    fields = tuple(dict.fromkeys((*FIELDS, *INFO_FIELDS)))
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


def make_script(settings: Settings) -> Script | None:
    script, actions = settings.script, ACTIONS[settings.env.action_type]
    if script.sequence:
        plays = parse(script.sequence, actions)
    elif script.forward_frames:
        action = script.forward_action
        if script.probe_forward:
            probe = probe_forward(partial(make_env, settings), range(len(actions)), script.probe_forward)
            action = probe.best
            print(f"forward is action {action} ({'+'.join(actions[action]) or 'none'}): moved {probe.moved}")
        if action is None:
            action = next(i for i, names in enumerate(actions) if set(names) == FORWARD)
        plays = forward(script.forward_frames, action)
    else:
        return None
    return Script(plays, settings.env.num_envs, every_episode=script.every_episode)


def make_learner(settings: Settings, policy: Policy) -> Ppo | Impala:
    t = settings.train
    if t.algorithm == "ppo":
        if settings.replay.enabled:
            raise LabError("the replay is for impala", hint="--algorithm impala, or --per false")
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


def make_replay(settings: Settings) -> Replay | None:
    r = settings.replay
    if not r.enabled:
        return None
    return Replay(
        entries=r.entries, memory=int(r.max_memory_gb * 2**30), alpha=r.alpha, beta=r.beta, beta_final=r.beta_final,
        beta_entries=r.beta_samples, seed=settings.train.seed,
    )  # fmt: skip


def train(settings: Settings, out: Path, resume: Path | None = None) -> Runner:
    t, log = settings.train, settings.log
    out.mkdir(parents=True, exist_ok=True)
    trainkit.atomic_write(out / "settings.json", json_of(settings))
    torch.set_num_threads(1)
    torch.manual_seed(t.seed)
    script = make_script(settings)
    envs = make_envs(settings, out)
    try:
        device = torch.device(t.device)
        spaces = (envs.single_observation_space, envs.single_action_space)
        policy = make_policy(*spaces, memory=t.memory, width=t.width).to(device)
        learner = make_learner(settings, policy)
        board = out / "tensorboard" if log.enable_tensorboard else None
        wandb = {"dir": str(out), "config": settings.plain()} if log.enable_wandb else None
        plan = Plan(
            t.total_steps, rollout=t.rollout_steps, overlap=t.overlap_collect, anneal=t.anneal,
            log_every=log.log_interval, save_every=log.checkpoint_interval, replay_batch=settings.replay.batch,
            replay_every=settings.replay.per_sample_interval, compile=t.compile,
        )  # fmt: skip
        with Sinks(trainkit.Logger(out / "metrics.jsonl"), board, wandb) as sinks, Monitor(
            out / "monitor.jsonl", log.monitor_period
        ) as monitor:  # fmt: skip
            runner = Runner(
                envs, learner, plan, out, sinks, t.seed, script=script, replay=make_replay(settings), extra=monitor.row
            )
            print(f"{envs.num_envs} envs, {len(envs.diagnostics()) or 'no'} workers, {t.total_steps:,} steps -> {out}")
            runner.run(resume)
        to_parquet(out / "metrics.jsonl", out / "metrics.parquet")
        for report in envs.diagnostics():
            if report.restarts:
                print(f"worker {report.worker}: {report.restarts} restarts")
    finally:
        envs.close()
    return runner


def json_of(settings: Settings) -> bytes:
    import json

    return (json.dumps(settings.plain(), indent=2) + "\n").encode()


class Player:
    """A trained policy that plays one env."""

    def __init__(self, policy: Policy, seed: int = 0, greedy: bool = False) -> None:
        self._policy, self._greedy = policy, greedy
        self._chance = np.random.default_rng(seed)
        self.begin()

    def begin(self) -> None:
        self._memory = torch.zeros(1, self._policy.memory)

    def __call__(self, seen: Any) -> int:
        with torch.inference_mode():
            tensor = torch.from_numpy(np.asarray(seen)[None])
            numbers, _, self._memory = self._policy(tensor, self._memory, torch.zeros(1, dtype=torch.bool))
        head = self._policy.head
        return int(head.best(numbers)[0] if self._greedy else head.sample(numbers, self._chance)[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=None)
    parser.add_argument(
        "--out", type=Path, default=None, help="the run's folder; else $LOOPLAB_RUN_DIR, else runs/mario"
    )
    parser.add_argument("--resume", type=Path, default=None, help="go on with the newest checkpoint under this folder")
    parser.add_argument("--from-env", action="store_true", help="take the variables of resume.sh")
    add_flags(parser)
    args = parser.parse_args()
    inside = "LOOPLAB_RUN_DIR" in os.environ
    out = args.out or (trainkit.run_dir() if inside else Path("runs/mario"))
    try:
        settings = read_settings(args.config, vars(args), os.environ if args.from_env else {})
        runner = train(settings, out, args.resume)
        counters = runner.counters
        trainkit.Logger(out / "metrics.jsonl").summary(
            {"global_step": counters["global_step"], "global_update": counters["global_update"]}
        )
        if settings.log.record_video:
            env = make_env(settings, render=True)
            episode = record(env, Player(runner.learner.policy.cpu()), out / "episode.gif", seed=settings.train.seed)
            print(f"episode.gif: x_pos {episode.info['x_pos']} after {episode.steps} steps")
            env.close()
    except LabError as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
