import os
import time

import numpy as np

# config (12 factor style, everything from the environment)
LR = float(os.environ.get("LR", "0.1"))
MOMENTUM = float(os.environ.get("MOMENTUM", 0.9))
BATCH_SIZE = int(os.getenv("BATCH_SIZE", 32))
EPOCHS = int(os.getenv("EPOCHS", "30"))
L2 = float(os.getenv("L2_PENALTY", "1e-3"))
SEED = int(os.environ.get("SEED", 0))
USE_FEATURE_CROSSES = os.getenv("USE_FEATURE_CROSSES", "0") in ("1", "true", "True")
MODEL_DIR = os.getenv("MODEL_DIR", "/tmp/model")
JOB_ID = os.environ.get("SLURM_JOB_ID", "local")
DEBUG = bool(os.environ.get("DEBUG"))


def log(msg):
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] [job {JOB_ID}] {msg}", flush=True)


def data():
    r = np.random.default_rng(99)
    X = r.normal(size=(1500, 8))
    z = 1.5 * X[:, 0] - X[:, 1] + 1.2 * X[:, 2] * X[:, 3] + 0.5 * r.normal(size=1500)
    return X, (z > 0).astype(float)


def crosses(X):
    i, j = np.triu_indices(X.shape[1], 1)
    return np.hstack([X, X[:, i] * X[:, j]])


if __name__ == "__main__":
    rng = np.random.default_rng(SEED)
    X, y = data()
    if USE_FEATURE_CROSSES:
        X = crosses(X)
    Xt, yt, Xv, yv = X[:1000], y[:1000], X[1000:], y[1000:]
    w, b = rng.normal(0, 0.01, X.shape[1]), 0.0
    vw, vb = np.zeros_like(w), 0.0
    log(f"starting: lr={LR} bs={BATCH_SIZE} epochs={EPOCHS}")
    for epoch in range(EPOCHS):
        for idx in np.array_split(rng.permutation(len(Xt)), len(Xt) // BATCH_SIZE):
            p = 1 / (1 + np.exp(-(Xt[idx] @ w + b)))
            g = p - yt[idx]
            vw = MOMENTUM * vw - LR * (Xt[idx].T @ g / len(idx) + L2 * w)
            vb = MOMENTUM * vb - LR * g.mean()
            w, b = w + vw, b + vb
        pv = np.clip(1 / (1 + np.exp(-(Xv @ w + b))), 1e-7, 1 - 1e-7)
        logloss = -(yv * np.log(pv) + (1 - yv) * np.log(1 - pv)).mean()
        if DEBUG or epoch % 5 == 4 or epoch == EPOCHS - 1:
            log(f"epoch={epoch + 1} val_logloss={logloss:.5f} val_auc_proxy={((pv > .5) == yv).mean():.4f}")
    os.makedirs(MODEL_DIR, exist_ok=True)
    np.savez(os.path.join(MODEL_DIR, f"model-{JOB_ID}.npz"), w=w, b=b)
    log("done")
