import json
import logging
import os
import sys

import numpy as np
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split

with open(sys.argv[1] if len(sys.argv) > 1 else "config.json") as f:
    cfg = json.load(f)

os.makedirs(cfg["save_dir"], exist_ok=True)
logging.basicConfig(
    level=getattr(logging, cfg.get("log_level", "INFO")),
    format="%(asctime)s %(message)s",
    handlers=[logging.FileHandler(os.path.join(cfg["save_dir"], "train.log"), mode="w"), logging.StreamHandler()],
)
json.dump(cfg, open(os.path.join(cfg["save_dir"], "config.json"), "w"), indent=4)

rng = np.random.RandomState(cfg["seed"])
X, y = load_wine(return_X_y=True)
X = (X - X.mean(0)) / X.std(0)
Xtr, Xte, ytr, yte = train_test_split(X, y, test_size=0.4, random_state=3, stratify=y)

sizes = [X.shape[1]] + cfg["model"]["layers"] + [3]
Ws = [rng.randn(a, b) * np.sqrt(2.0 / a) for a, b in zip(sizes, sizes[1:])]
bs = [np.zeros(b) for b in sizes[1:]]
vel = [np.zeros_like(w) for w in Ws + bs]


def forward(x):
    acts = [x]
    for i, (W, b) in enumerate(zip(Ws, bs)):
        x = x @ W + b
        if i < len(Ws) - 1:
            x = np.maximum(x, 0)
        acts.append(x)
    e = np.exp(x - x.max(1, keepdims=True))
    return acts, e / e.sum(1, keepdims=True)


opt = cfg["optimizer"]
for ep in range(cfg["trainer"]["epochs"]):
    perm = rng.permutation(len(Xtr))
    for i in range(0, len(perm), cfg["trainer"]["batch_size"]):
        idx = perm[i : i + cfg["trainer"]["batch_size"]]
        x = Xtr[idx]
        mask = rng.rand(*x.shape) >= cfg["model"]["input_dropout"]
        acts, p = forward(x * mask)
        d = p.copy()
        d[np.arange(len(idx)), ytr[idx]] -= 1
        d /= len(idx)
        gW, gb = [], []
        for k in reversed(range(len(Ws))):
            gW.insert(0, acts[k].T @ d + opt["args"]["weight_decay"] * Ws[k])
            gb.insert(0, d.sum(0))
            d = (d @ Ws[k].T) * (acts[k] > 0)
        for j, (prm, g) in enumerate(zip(Ws + bs, gW + gb)):
            vel[j] = opt["args"]["momentum"] * vel[j] - opt["args"]["lr"] * g
            prm += vel[j]
    p = forward(Xte)[1]
    val_loss = -np.log(p[np.arange(len(yte)), yte] + 1e-9).mean()
    if (ep + 1) % cfg["trainer"]["log_step"] == 0:
        logging.info("    epoch          : %d", ep + 1)
        logging.info("    val_loss       : %.6f", val_loss)
        logging.info("    val_accuracy   : %.4f", (p.argmax(1) == yte).mean())
