#!/usr/bin/env python
"""Matrix factorization for link prediction on a toy graph. Prints a JSON report when it is done."""
import argparse
import json

import numpy as np


def get_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    g = parser.add_argument_group("data")
    g.add_argument("--num-entities", type=int, default=60)
    g.add_argument("--split-seed", type=int, default=0, help="seed of the split into train, valid and test")
    g = parser.add_argument_group("model")
    g.add_argument("--dims", type=int, nargs="+", default=[16], help="embedding dimension, one or one per side")
    g.add_argument("--init-scale", type=float, default=0.1)
    g = parser.add_argument_group("training")
    g.add_argument("--numpy-seed", type=int, default=None, help="seed of the initial embeddings and the batches")
    g.add_argument("--lr", type=float, default=0.5)
    g.add_argument("--l2", type=float, default=1e-4)
    g.add_argument("--num-epochs", type=int, default=30)
    g.add_argument("--swa", action="store_true", help="average the weights of the last epochs")
    g.add_argument("--swa-lr", type=float, default=0.05, help="learning rate while averaging")
    return parser


def make_graph(args):
    rng = np.random.default_rng(7)
    group = rng.integers(0, 4, args.num_entities)
    p = np.where(group[:, None] == group[None, :], 0.6, 0.05)
    adj = rng.random(p.shape) < p
    part = np.random.default_rng(args.split_seed).choice(3, size=p.shape, p=[0.7, 0.15, 0.15])
    return adj.astype(float), part


def ranks(scores, adj, part, side):
    s, a, q = (scores, adj, part) if side == "tail" else (scores.T, adj.T, part.T)
    found = []
    for row, truth, where in zip(s, a, q):
        for j in np.flatnonzero((truth == 1) & (where == 2)):
            others = row[truth == 0]
            found.append(1 + int((others > row[j]).sum()))
    return np.array(found)


def report(r):
    return {
        "mean_rank": float(r.mean()),
        "mrr": float((1 / r).mean()),
        "hits": {str(k): float((r <= k).mean()) for k in (1, 3, 10)},
        "count": len(r),
    }


def main():
    args = get_parser().parse_args()
    rng = np.random.default_rng(args.numpy_seed)
    adj, part = make_graph(args)
    mask = part == 0
    d = max(args.dims)
    u = rng.normal(0, args.init_scale, (args.num_entities, d))
    v = rng.normal(0, args.init_scale, (args.num_entities, d))
    mean = None
    for epoch in range(args.num_epochs):
        averaging = args.swa and epoch >= args.num_epochs * 3 // 4
        lr = args.swa_lr if averaging else args.lr
        pred = 1 / (1 + np.exp(-(u @ v.T)))
        err = (pred - adj) * mask
        u, v = u - lr * (err @ v / 10 + args.l2 * u), v - lr * (err.T @ u / 10 + args.l2 * v)
        if averaging:
            mean = (u, v) if mean is None else (0.9 * mean[0] + 0.1 * u, 0.9 * mean[1] + 0.1 * v)
        if epoch % 10 == 9:
            nll = -np.log(np.where(adj == 1, pred, 1 - pred) + 1e-9)[mask].mean()
            print(f"Training epochs on cpu: {epoch + 1}/{args.num_epochs}, loss={nll:.4f}")
    u, v = mean or (u, v)
    both = {side: ranks(u @ v.T, adj, part, side) for side in ("head", "tail")}
    both["both"] = np.concatenate([both["head"], both["tail"]])
    print(json.dumps({side: report(r) for side, r in both.items()}, indent=2))


if __name__ == "__main__":
    main()
