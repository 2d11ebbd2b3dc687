"""Train a small neural network to read handwritten digits, in plain numpy, on one core, in a few seconds.

    python train.py --config configs/baseline.json --out runs/try

The data are the 1,797 digits of 8 × 8 pixels that come with scikit-learn. This file is meant to be read from top to
bottom and to be changed. Every epoch it logs train/loss, val/loss, val/accuracy and val/error to metrics.jsonl; at the
end it writes test/accuracy, measured once on digits that nothing was tuned on, to trainer_summary.json.
"""

import argparse
import json
import os
import time
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the matrices are tiny: more threads only wait for each other

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

from looplab import trainkit

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
HERE = Path(__file__).parent
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--config", type=Path, default=HERE / "configs" / "baseline.json")
parser.add_argument("--out", type=Path, default=trainkit.run_dir())
args = parser.parse_args()

config = json.loads(args.config.read_text())
train, model, data = config["train"], config["model"], config["data"]
if train["schedule"] not in ("constant", "cosine"):
    raise SystemExit(f"train.schedule must be constant or cosine, not {train['schedule']!r}")
if model["activation"] not in ("tanh", "relu", "sigmoid"):
    raise SystemExit(f"model.activation must be tanh, relu or sigmoid, not {model['activation']!r}")

# --- the data: half to train on, a quarter to tune on, a quarter to test on; split the same way whatever the seed

digits = load_digits()
pixels = (digits.data / 16.0).astype(np.float32)
order = np.random.default_rng(12345).permutation(len(pixels))
train_part, val_part, test_part = np.split(order, [897, 1347])
mean = pixels[train_part].mean(axis=0)
x_train, y_train = pixels[train_part], digits.target[train_part]
x_val, y_val = pixels[val_part], digits.target[val_part]
x_test, y_test = pixels[test_part], digits.target[test_part]

# --- the network: `layers` hidden layers of `hidden` units, then 10 outputs; the seed drives all that is random

rng = np.random.default_rng(config["seed"])
sizes = [64, *[model["hidden"]] * model["layers"], 10]
gain = 2.0 if model["activation"] == "relu" else 1.0
weights = [
    rng.normal(0.0, np.sqrt(gain / fan_in), (fan_in, fan_out)).astype(np.float32) for fan_in, fan_out in pairwise(sizes)
]
biases = [np.zeros(fan_out, np.float32) for fan_out in sizes[1:]]
weight_steps = [np.zeros_like(weight) for weight in weights]  # what momentum remembers
bias_steps = [np.zeros_like(bias) for bias in biases]


def activate(z: Floats) -> Floats:
    if model["activation"] == "relu":
        return np.maximum(z, 0.0)
    half = np.float32(0.5)
    return np.tanh(z) if model["activation"] == "tanh" else half + half * np.tanh(half * z)


def slope(a: Floats) -> Floats:
    """The derivative of the activation, from the activation itself."""
    if model["activation"] == "relu":
        return (a > 0.0).astype(np.float32)
    return 1.0 - a * a if model["activation"] == "tanh" else a * (1.0 - a)


def log_softmax(z: Floats) -> Floats:
    z = z - z.max(axis=1, keepdims=True)
    total: Floats = np.exp(z).sum(axis=1, keepdims=True)
    return z - np.log(total)


def evaluate(x: Floats, y: Ints) -> tuple[float, float]:
    """The mean cross-entropy and the share of right answers."""
    a = x - mean
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        a = activate(a @ weight + bias)
    log_p = log_softmax(a @ weights[-1] + biases[-1])
    return float(-log_p[np.arange(len(y)), y].mean()), float((log_p.argmax(axis=1) == y).mean())


def augment(x: Floats) -> Floats:
    """Every epoch sees the digits a little moved and a little noisy, so that they are harder to learn by heart."""
    if data["shift"] > 0:
        # Each digit moves by up to `shift` pixels (1 at most) down or up, right or left; what a pixel moves by a
        # fraction is shared with its neighbour.
        by = rng.uniform(-data["shift"], data["shift"], (2, len(x), 1, 1)).astype(np.float32)
        stay, ahead, back = 1.0 - np.abs(by), np.maximum(by, 0.0), np.maximum(-by, 0.0)
        image = np.pad(x.reshape(-1, 8, 8), [(0, 0), (1, 1), (1, 1)])
        image = stay[0] * image[:, 1:-1] + ahead[0] * image[:, :-2] + back[0] * image[:, 2:]
        image = stay[1] * image[:, :, 1:-1] + ahead[1] * image[:, :, :-2] + back[1] * image[:, :, 2:]
        x = image.reshape(-1, 64)
    if data["noise"] > 0:
        x = x + data["noise"] * rng.standard_normal(x.shape, np.float32)
    return x


# --- the training: minibatch gradient descent with momentum

logger = trainkit.Logger(args.out / "metrics.jsonl")
batch_size = train["batch_size"]
keep = 1.0 - model["dropout"]
best = 0.0
began = time.perf_counter()
np.seterr(over="ignore", invalid="ignore")  # a diverged run logs NaN, which says it better than a warning

for epoch in range(train["epochs"]):
    rate = train["learning_rate"]
    if train["schedule"] == "cosine":
        rate *= 0.5 + 0.5 * np.cos(np.pi * epoch / train["epochs"])
    x_epoch = augment(x_train) - mean
    order = rng.permutation(len(x_epoch))
    losses = []
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        y = y_train[batch]

        # Forward: keep what each layer gave, to go back through it.
        activations, masks = [x_epoch[batch]], []
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            a = activate(activations[-1] @ weight + bias)
            masks.append((rng.random(a.shape) < keep) / np.float32(keep) if keep < 1.0 else np.float32(1.0))
            activations.append(a * masks[-1])
        log_p = log_softmax(activations[-1] @ weights[-1] + biases[-1])
        losses.append(-log_p[np.arange(len(y)), y].mean())

        # Backward: the slope of the loss in the outputs is the given probabilities minus the right ones.
        delta = np.exp(log_p)
        delta[np.arange(len(y)), y] -= 1.0
        delta /= len(y)
        for layer in reversed(range(len(weights))):
            weight_slope = activations[layer].T @ delta + train["weight_decay"] * weights[layer]
            bias_slope = delta.sum(axis=0)
            if layer > 0:
                # The activation was divided by `keep` where it was kept; its slope needs it as it was.
                delta = (delta @ weights[layer].T) * masks[layer - 1] * slope(activations[layer] * keep)
            weight_steps[layer] = train["momentum"] * weight_steps[layer] - rate * weight_slope
            bias_steps[layer] = train["momentum"] * bias_steps[layer] - rate * bias_slope
            weights[layer] += weight_steps[layer]
            biases[layer] += bias_steps[layer]

    val_loss, val_accuracy = evaluate(x_val, y_val)
    best = max(best, val_accuracy)
    logger.log(
        {
            "train/loss": np.mean(losses),
            "val/loss": val_loss,
            "val/accuracy": val_accuracy,
            "val/error": 1.0 - val_accuracy,
            "learning_rate": rate,
        },
        step=epoch,
    )
    if (epoch + 1) % max(1, train["epochs"] // 10) == 0:
        print(f"epoch {epoch + 1:4d}  train/loss {np.mean(losses):.4f}  val/accuracy {val_accuracy:.4f}", flush=True)

test_loss, test_accuracy = evaluate(x_test, y_test)
logger.summary(
    {
        "val/accuracy": val_accuracy,
        "val/accuracy_best": best,
        "test/accuracy": test_accuracy,
        "test/loss": test_loss,
        "epochs": train["epochs"],
        "parameters": sum(weight.size for weight in weights) + sum(bias.size for bias in biases),
        "seconds": round(time.perf_counter() - began, 3),
    }
)
