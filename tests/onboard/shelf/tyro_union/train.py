import numpy as np

def make(seed, n=400, d=8):
    rng = np.random.default_rng(0)
    w = rng.normal(size=d)
    x = rng.normal(size=(n, d)); y = (x @ w + rng.normal(size=n) * .8 > 0).astype(float)
    return x[:300], y[:300], x[300:], y[300:], np.random.default_rng(seed)

def sig(z): return 1 / (1 + np.exp(-z))

def ll(w, x, y):
    p = np.clip(sig(x @ w), 1e-7, 1 - 1e-7)
    return float(-(y * np.log(p) + (1 - y) * np.log(1 - p)).mean())

from dataclasses import dataclass
from typing import Union, Annotated
import tyro

@dataclass
class Sgd:
    """Plain SGD."""
    lr: float = 0.1
    momentum: float = 0.9

@dataclass
class Adam:
    """Adam."""
    lr: float = 0.003
    beta1: float = 0.9

@dataclass
class Args:
    optimizer: Union[Sgd, Adam]
    epochs: int = 5
    l2: float = 1e-4
    seed: int = 3

def main(args: Args):
    x, y, xv, yv, rng = make(args.seed)
    w = rng.normal(size=8) * .1
    v = 0
    for e in range(args.epochs):
        for i in rng.permutation(300)[:100]:
            g = (sig(x[i] @ w) - y[i]) * x[i] + args.l2 * w
            m = args.optimizer.momentum if isinstance(args.optimizer, Sgd) else args.optimizer.beta1
            v = m * v + g
            w = w - args.optimizer.lr * v
        print(f"epoch {e}: loss/train {ll(w, x, y):.4f} loss/val {ll(w, xv, yv):.4f}")

if __name__ == "__main__":
    main(tyro.cli(Args))
