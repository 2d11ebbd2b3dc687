"""A small training to be killed: python trainer.py OUT KIND STEPS WORKERS. Ends with the hash of all that it learned.

`python trainer.py serve` forks one for each line of arguments that it reads, and says its pid: the imports, which take
longer than the training, are then made once.
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
from looplab.rl.metrics import Sinks, exact_rows
from looplab.rl.policies import make_policy
from looplab.rl.ppo import Ppo, PpoSettings
from looplab.rl.replay import Replay
from looplab.rl.runner import Plan, Runner

KINDS = ("ppo", "ppo-overlap", "impala-per", "impala-per-overlap", "ppo-memory")


def leaves(state: Any) -> Any:
    """All that is in a state, as bytes, in an order of its own."""
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
    found = hashlib.sha256()
    for leaf in leaves(state):
        found.update(leaf)
    return found.hexdigest()


def main(argv: list[str]) -> None:
    out, kind, steps, workers = Path(argv[0]), argv[1], int(argv[2]), int(argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(3)
    envs = SupervisedVectorEnv(
        [partial(gym.make, "CartPole-v1")] * 4, workers=workers, context="fork", snapshot_every=20
    )
    policy = make_policy(envs.single_observation_space, envs.single_action_space, memory=8 * kind.endswith("memory"))
    learner: Any
    if kind.startswith("ppo"):
        learner, replay = Ppo(policy, PpoSettings(epochs=2), 0), None
    else:
        learner = Impala(policy, ImpalaSettings())
        replay = Replay(entries=512, seed=1)
    sinks = Sinks(trainkit.Logger(out / "metrics.jsonl"))
    plan = Plan(steps, rollout=16, overlap=kind.endswith("overlap"), save_every=3, replay_batch=32, replay_every=2)
    runner = Runner(envs, learner, plan, out, sinks, 0, replay=replay, tell=lambda text: print(text, file=sys.stderr))
    runner.run()
    state = {"learner": learner.state_dict(), "replay": replay and replay.state_dict(), "counters": runner.counters}
    told = {"state": digest(state), "metrics": digest(list(exact_rows(out / "metrics.jsonl")))}
    (out / "result.json").write_text(json.dumps(told))
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
