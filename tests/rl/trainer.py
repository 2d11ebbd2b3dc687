"""A small training to be killed: python trainer.py OUT KIND STEPS WORKERS. Writes a hash of its final state.

`python trainer.py serve` forks a training for each line of arguments it reads and prints its pid: the imports, which
take longer than the training, then happen once.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium as gym
import numpy as np
import torch

from looplab import trainkit
from looplab.rl import SupervisedVectorEnv
from looplab.rl.impala import Impala, ImpalaSettings
from looplab.rl.metrics import MetricsWriter, exact_rows
from looplab.rl.policies import make_policy
from looplab.rl.ppo import Ppo, PpoSettings
from looplab.rl.replay import PrioritizedReplay
from looplab.rl.runner import Runner, TrainingPlan

KINDS = ("ppo", "ppo-overlap", "impala-per", "impala-per-overlap", "ppo-memory")


def leaves(state: Any) -> Any:
    """Yield the contents of a state as bytes, in a fixed order."""
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            yield str(key).encode()
            yield from leaves(state[key])
    elif isinstance(state, list | tuple):
        for value in state:
            yield from leaves(value)
    elif isinstance(state, torch.Tensor):
        yield state.detach().numpy().tobytes()
    elif isinstance(state, np.ndarray):
        yield state.tobytes()
    else:
        yield repr(state).encode()


def digest(state: Any) -> str:
    sha256 = hashlib.sha256()
    for leaf in leaves(state):
        sha256.update(leaf)
    return sha256.hexdigest()


def main(argv: list[str]) -> None:
    out, kind, steps, workers = Path(argv[0]), argv[1], int(argv[2]), int(argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(3)
    envs = SupervisedVectorEnv(
        [partial(gym.make, "CartPole-v1")] * 4, workers=workers, context="fork", snapshot_every=20
    )
    policy = make_policy(
        envs.single_observation_space, envs.single_action_space, hidden_size=8 * kind.endswith("memory")
    )
    learner: Any
    if kind.startswith("ppo"):
        learner, replay = Ppo(policy, PpoSettings(epochs=2), 0), None
    else:
        learner = Impala(policy, ImpalaSettings())
        replay = PrioritizedReplay(entries=512, seed=1)
    metrics = MetricsWriter(trainkit.Logger(out / "metrics.jsonl"))
    plan = TrainingPlan(
        steps, rollout=16, overlap=kind.endswith("overlap"), save_every=3, replay_batch=32, replay_every=2
    )
    runner = Runner(
        envs, learner, plan, out_dir=out, metrics=metrics, seed=0, replay=replay,
        echo=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    runner.run()
    state = {"learner": learner.state_dict(), "replay": replay and replay.state_dict(), "counters": runner.counters}
    result = {"state": digest(state), "metrics": digest(list(exact_rows(out / "metrics.jsonl")))}
    (out / "result.json").write_text(json.dumps(result))
    envs.close()


def serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            main(line.split())
            return
        print(child, flush=True)


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else main(sys.argv[1:])
