#!/usr/bin/env python3
"""Train a new model on one machine."""
import os
import pickle
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from sparsenet import options  # noqa: E402
from sparsenet.model import SparseRegressor  # noqa: E402


def load_dataset(args):
    rng = np.random.default_rng(args.data_seed)
    w = np.zeros(args.dim)
    w[:5] = rng.normal(size=5) * 2
    n = args.num_train + args.num_valid
    x = rng.normal(size=(n, args.dim))
    y = x @ w + np.sin(2 * x[:, 0]) + 0.3 * rng.normal(size=n)
    return (x[: args.num_train], y[: args.num_train]), (x[args.num_train :], y[args.num_train :])


class Adam:
    def __init__(self, params):
        self.m = {k: np.zeros_like(v) for k, v in params.items()}
        self.v = {k: np.zeros_like(v) for k, v in params.items()}
        self.t = 0

    def step(self, params, grads, lr):
        self.t += 1
        for k, g in grads.items():
            self.m[k] = 0.9 * self.m[k] + 0.1 * g
            self.v[k] = 0.999 * self.v[k] + 0.001 * g * g
            mh, vh = self.m[k] / (1 - 0.9**self.t), self.v[k] / (1 - 0.999**self.t)
            params[k] -= lr * mh / (np.sqrt(vh) + 1e-8)


def main(args):
    print("| " + str(args))
    rng = np.random.default_rng(args.seed)
    (xt, yt), (xv, yv) = load_dataset(args)
    print(f"| loaded {len(xt)} train / {len(xv)} valid examples")
    model = SparseRegressor(args.dim, args.hidden_dim, args.residual, rng)
    print("| num. model params: {}".format(sum(p.size for p in model.p.values())))
    opt, lr = Adam(model.p), args.lr
    best = float("inf")
    for epoch in range(1, args.max_epoch + 1):
        order = rng.permutation(len(xt))
        losses = []
        for i in range(0, len(xt), args.batch_size):
            b = order[i : i + args.batch_size]
            g, loss = model.grads(xt[b], yt[b], args.sparsity_weight)
            opt.step(model.p, g, lr)
            losses.append(loss)
        lr *= args.lr_decay
        valid = float(np.mean((model.forward(xv)[0] - yv) ** 2))
        best = min(best, valid)
        if epoch % args.log_interval == 0 or epoch == args.max_epoch:
            print(
                f"| epoch {epoch:03d} | loss {np.mean(losses):.3f} | lr {lr:.2e} "
                f"| valid_loss {valid:.4f} | best_loss {best:.4f}"
            )
        if not args.no_save and epoch % args.save_interval == 0:
            os.makedirs(args.save_dir, exist_ok=True)
            with open(os.path.join(args.save_dir, f"checkpoint{epoch}.pkl"), "wb") as f:
                pickle.dump(model.p, f)
    print("| done training")


if __name__ == "__main__":
    parser = options.get_training_parser()
    main(parser.parse_args())
