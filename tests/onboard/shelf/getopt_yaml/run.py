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

import sys, yaml, getopt
opts, rest = getopt.getopt(sys.argv[1:], "c:o:", ["config=", "out="])
conf = "conf/exp.yaml"; out = "."
for k, v in opts:
    if k in ("-c", "--config"): conf = v
    if k in ("-o", "--out"): out = v
C = yaml.safe_load(open(conf))
o, t = C["optimizer"], C["training"]
x, y, xv, yv, rng = make(t["seed"])
w = rng.normal(size=8)
print("%-8s %-12s %-12s" % ("epoch", "train", "valid"))
for e in range(t["epochs"]):
    for i in rng.permutation(300):
        w -= float(o["lr"]) * ((sig(x[i] @ w) - y[i]) * x[i] + o["weight_decay"] * w)
    print("%-8d %-12.5f %-12.5f" % (e, ll(w, x, y), ll(w, xv, yv)))
