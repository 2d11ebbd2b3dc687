import argparse
import json
import logging
from datetime import datetime
from pathlib import Path

import numpy as np


class Cliff:
    """The cliff walking gridworld, 4 x 12."""

    def reset(self):
        self.pos = (3, 0)
        return self.index()

    def index(self):
        return self.pos[0] * 12 + self.pos[1]

    def step(self, a):
        dr, dc = [(-1, 0), (0, 1), (1, 0), (0, -1)][a]
        self.pos = (min(max(self.pos[0] + dr, 0), 3), min(max(self.pos[1] + dc, 0), 11))
        if self.pos[0] == 3 and 0 < self.pos[1] < 11:
            self.pos = (3, 0)
            return self.index(), -100.0, False
        return self.index(), -1.0, self.pos == (3, 11)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--algo", choices=["q_learning", "sarsa", "expected_sarsa"], default="q_learning")
    p.add_argument("--alpha", type=float, default=0.1)
    p.add_argument("--gamma", type=float, default=1.0)
    p.add_argument("--epsilon", type=float, default=0.1)
    p.add_argument("--epsilon_decay", type=float, default=1.0)
    p.add_argument("--episodes", type=int, default=500)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--outdir", type=Path, default=Path("outputs"))
    return p.parse_args()


def main():
    args = parse()
    out = args.outdir / datetime.now().strftime("%Y%m%d_%H%M%S")
    (out / "checkpoints").mkdir(parents=True)
    (out / "args.json").write_text(json.dumps(vars(args), default=str, indent=2))
    logging.basicConfig(filename=out / "train.log", level=logging.INFO, format="%(asctime)s | %(levelname)s | %(message)s")
    print("logging to", out)

    rng = np.random.default_rng(args.seed)
    env, Q, eps = Cliff(), np.zeros((48, 4)), args.epsilon
    act = lambda s: int(rng.integers(4)) if rng.random() < eps else int(rng.choice(np.flatnonzero(Q[s] == Q[s].max())))
    returns = []
    with open(out / "metrics.jsonl", "w") as metrics:
        for ep in range(args.episodes):
            s, total, done, n = env.reset(), 0.0, False, 0
            a = act(s)
            while not done and n < 1000:
                s2, r, done = env.step(a)
                a2 = act(s2)
                if args.algo == "sarsa":
                    target = Q[s2, a2]
                elif args.algo == "expected_sarsa":
                    target = (1 - eps) * Q[s2].max() + eps * Q[s2].mean()
                else:
                    target = Q[s2].max()
                Q[s, a] += args.alpha * (r + args.gamma * target * (not done) - Q[s, a])
                s, a, total, n = s2, a2, total + r, n + 1
            eps *= args.epsilon_decay
            returns.append(total)
            if (ep + 1) % 50 == 0:
                row = {"episode": ep + 1, "mean_return": float(np.mean(returns[-50:])), "epsilon": eps}
                metrics.write(json.dumps(row) + "\n")
                logging.info("episode %d: mean return of the last 50 = %.2f", ep + 1, row["mean_return"])
    np.save(out / "checkpoints" / "q.npy", Q)
    (out / "summary.json").write_text(json.dumps({"final_mean_return": float(np.mean(returns[-100:]))}))


if __name__ == "__main__":
    main()
