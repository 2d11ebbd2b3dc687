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

import os
from dotenv import load_dotenv
load_dotenv()
LEARNING_RATE = float(os.environ["LEARNING_RATE"])
NUM_EPOCHS = int(os.getenv("NUM_EPOCHS", 10))
SEED = int(os.environ["SEED"])
x, y, xv, yv, rng = make(SEED)
w = rng.normal(size=8)
for e in range(NUM_EPOCHS):
    for i in rng.permutation(300):
        w -= LEARNING_RATE * (sig(x[i] @ w) - y[i]) * x[i]
    print(f"[{e+1}/{NUM_EPOCHS}] val_nll={ll(w, xv, yv):.4f}")
