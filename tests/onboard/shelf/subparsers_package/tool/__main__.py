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

import os, csv
from tool.args import build

def main():
    a = build().parse_args()
    os.makedirs(a.workdir)
    x, y, xv, yv, rng = make(a.seed)
    w = rng.normal(size=8)
    with open(os.path.join(a.workdir, "log.csv"), "w") as f:
        o = csv.writer(f, delimiter=";")
        o.writerow(["Round #", "Train NLL (nats)", "Valid NLL (nats)", "Wall [s]"])
        for r in range(a.rounds):
            w -= a.eta * (x.T @ (sig(x @ w) - y) / 300 + a.reg * w)
            o.writerow([r, f"{ll(w,x,y):.5f}", f"{ll(w,xv,yv):.5f}", 0.1 * r])
    print("done")

main()
