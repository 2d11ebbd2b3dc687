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

import argparse
def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, required=True)
    p.add_argument("--epochs", type=int, required=True)
    p.add_argument("--dropout", type=float, required=True)
    p.add_argument("--seed", type=int, required=True)
    return p.parse_args()
def main():
    a = parse()
    x, y, xv, yv, rng = make(a.seed)
    w = rng.normal(size=8)
    for e in range(a.epochs):
        for i in rng.permutation(300):
            m = rng.random(8) > a.dropout
            w -= a.lr * (sig((x[i]*m) @ w) - y[i]) * x[i]*m
    print("Final metrics: {'loss': %r, 'f1': %r}" % (ll(w, xv, yv), float(((xv @ w > 0) == yv).mean())))
main()
