import argparse
import sys
import time

import numpy as np
from sklearn.datasets import load_digits


class Progbar:
    """Looks like the one of Keras."""

    def __init__(self, target, width=30):
        self.target, self.width, self.start = target, width, time.time()

    def update(self, i, **values):
        filled = int(self.width * i / self.target)
        bar = "=" * self.width if i == self.target else "=" * max(filled - 1, 0) + ">" + "." * (self.width - max(filled, 1))
        per_step = (time.time() - self.start) / i * 1000
        msg = f"{i}/{self.target} [{bar}] - {time.time() - self.start:.0f}s {per_step:.0f}ms/step"
        msg += "".join(f" - {k}: {v:.4f}" for k, v in values.items())
        # backspaces redraw the line, as Keras does
        sys.stdout.write("\b" * 120 + "\r" + msg + ("\n" if i == self.target and "val_loss" in values else ""))
        sys.stdout.flush()


class Dense:
    def __init__(self, n_in, n_out, rng, relu):
        self.W, self.b, self.relu = rng.normal(0, np.sqrt(2 / n_in), (n_in, n_out)), np.zeros(n_out), relu
        self.mW, self.vW, self.mb, self.vb = 0, 0, 0, 0

    def __call__(self, x):
        self.x, self.z = x, x @ self.W + self.b
        return np.maximum(self.z, 0) if self.relu else self.z

    def backward(self, d, lr, t):
        if self.relu:
            d = d * (self.z > 0)
        gW, gb, dx = self.x.T @ d, d.sum(0), d @ self.W.T
        self.mW, self.vW = 0.9 * self.mW + 0.1 * gW, 0.999 * self.vW + 0.001 * gW**2
        self.mb, self.vb = 0.9 * self.mb + 0.1 * gb, 0.999 * self.vb + 0.001 * gb**2
        c1, c2 = 1 - 0.9**t, 1 - 0.999**t
        self.W -= lr * (self.mW / c1) / (np.sqrt(self.vW / c2) + 1e-7)
        self.b -= lr * (self.mb / c1) / (np.sqrt(self.vb / c2) + 1e-7)
        return dx


def softmax_xent(z, y):
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return -np.log(p[np.arange(len(y)), y] + 1e-9).mean(), p


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--units", type=int, default=64)
    ap.add_argument("--learning_rate", type=float, default=0.001)
    ap.add_argument("--batch_size", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--patience", type=int, default=3, help="early stopping on val_loss")
    ap.add_argument("--random_seed", type=int, default=7)
    args = ap.parse_args()
    rng = np.random.default_rng(args.random_seed)
    X, y = load_digits(return_X_y=True)
    X = X / 16.0
    x, y, xv, yv = X[:1300], y[:1300], X[1300:], y[1300:]
    layers = [Dense(64, args.units, rng, True), Dense(args.units, args.units, rng, True), Dense(args.units, 10, rng, False)]

    def forward(a):
        for layer in layers:
            a = layer(a)
        return a

    t, best, wait = 0, np.inf, 0
    steps = int(np.ceil(len(x) / args.batch_size))
    for epoch in range(args.epochs):
        print(f"Epoch {epoch + 1}/{args.epochs}")
        bar, losses, accs = Progbar(steps), [], []
        for i, idx in enumerate(np.array_split(rng.permutation(len(x)), steps), 1):
            t += 1
            loss, p = softmax_xent(forward(x[idx]), y[idx])
            losses.append(loss)
            accs.append((p.argmax(1) == y[idx]).mean())
            p[np.arange(len(idx)), y[idx]] -= 1
            d = p / len(idx)
            for layer in reversed(layers):
                d = layer.backward(d, args.learning_rate, t)
            bar.update(i, loss=np.mean(losses), accuracy=np.mean(accs))
        val_loss, pv = softmax_xent(forward(xv), yv)
        bar.update(steps, loss=np.mean(losses), accuracy=np.mean(accs), val_loss=val_loss, val_accuracy=(pv.argmax(1) == yv).mean())
        wait = 0 if val_loss < best else wait + 1
        best = min(best, val_loss)
        if wait > args.patience:
            print(f"Epoch {epoch + 1}: early stopping")
            break


if __name__ == "__main__":
    main()
