"""Train a small neural network to read handwritten digits, in plain numpy, on one core, in a few seconds.

    python train.py --config configs/baseline.json --out runs/try

The data set is scikit-learn's 1,797 digits of 8 × 8 pixels. Read this file from top to bottom, and change it. Every
epoch logs train/loss, val/loss, val/accuracy and val/error to metrics.jsonl; at the end test/accuracy, measured once on
digits that nothing was tuned on, is written to trainer_summary.json.
"""

import argparse
import json
import os
import time
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads only add overhead to matrices this small

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

# --- data: 50 % train, 25 % validation, 25 % test; the split does not depend on the seed

digits = load_digits()
pixels = (digits.data / 16.0).astype(np.float32)
order = np.random.default_rng(12345).permutation(len(pixels))
train_idx, val_idx, test_idx = np.split(order, [897, 1347])
mean = pixels[train_idx].mean(axis=0)
x_train, y_train = pixels[train_idx], digits.target[train_idx]
x_val, y_val = pixels[val_idx], digits.target[val_idx]
x_test, y_test = pixels[test_idx], digits.target[test_idx]

# --- model: `layers` hidden layers of `hidden` units, then 10 logits; all randomness comes from the seed

rng = np.random.default_rng(config["seed"])
sizes = [64, *[model["hidden"]] * model["layers"], 10]
init_gain = 2.0 if model["activation"] == "relu" else 1.0
weights = [
    rng.normal(0.0, np.sqrt(init_gain / fan_in), (fan_in, fan_out)).astype(np.float32)
    for fan_in, fan_out in pairwise(sizes)
]
biases = [np.zeros(fan_out, np.float32) for fan_out in sizes[1:]]
weight_velocity = [np.zeros_like(weight) for weight in weights]  # momentum buffers
bias_velocity = [np.zeros_like(bias) for bias in biases]


def activate(z: Floats) -> Floats:
    if model["activation"] == "relu":
        return np.maximum(z, 0.0)
    half = np.float32(0.5)
    return np.tanh(z) if model["activation"] == "tanh" else half + half * np.tanh(half * z)


def activation_grad(a: Floats) -> Floats:
    """Return the derivative of the activation function, given its output."""
    if model["activation"] == "relu":
        return (a > 0.0).astype(np.float32)
    return 1.0 - a * a if model["activation"] == "tanh" else a * (1.0 - a)


def log_softmax(logits: Floats) -> Floats:
    z: Floats = logits - logits.max(axis=1, keepdims=True)
    total: Floats = np.exp(z).sum(axis=1, keepdims=True)
    return z - np.log(total)


def evaluate(x: Floats, y: Ints) -> tuple[float, float]:
    """Return the mean cross-entropy and the accuracy."""
    a = x - mean
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        a = activate(a @ weight + bias)
    log_probs = log_softmax(a @ weights[-1] + biases[-1])
    return float(-log_probs[np.arange(len(y)), y].mean()), float((log_probs.argmax(axis=1) == y).mean())


def augment(x: Floats) -> Floats:
    """Return randomly shifted and noisy copies of the digits, to reduce overfitting."""
    if data["shift"] > 0:
        # Shift each digit by up to `shift` (at most 1) pixels along both axes, with linear interpolation.
        offset = rng.uniform(-data["shift"], data["shift"], (2, len(x), 1, 1)).astype(np.float32)
        stay, forward, backward = 1.0 - np.abs(offset), np.maximum(offset, 0.0), np.maximum(-offset, 0.0)
        image = np.pad(x.reshape(-1, 8, 8), [(0, 0), (1, 1), (1, 1)])
        image = stay[0] * image[:, 1:-1] + forward[0] * image[:, :-2] + backward[0] * image[:, 2:]
        image = stay[1] * image[:, :, 1:-1] + forward[1] * image[:, :, :-2] + backward[1] * image[:, :, 2:]
        x = image.reshape(-1, 64)
    if data["noise"] > 0:
        x = x + data["noise"] * rng.standard_normal(x.shape, np.float32)
    return x


# --- training: minibatch SGD with momentum

logger = trainkit.Logger(args.out / "metrics.jsonl")
batch_size = train["batch_size"]
keep = 1.0 - model["dropout"]
best_accuracy = 0.0
start_time = time.perf_counter()
np.seterr(over="ignore", invalid="ignore")  # a diverged run logs NaN; no need for warnings

for epoch in range(train["epochs"]):
    lr = train["learning_rate"]
    if train["schedule"] == "cosine":
        lr *= 0.5 + 0.5 * np.cos(np.pi * epoch / train["epochs"])
    x_epoch = augment(x_train) - mean
    order = rng.permutation(len(x_epoch))
    losses = []
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        y = y_train[batch]

        # Forward pass: keep the activations for the backward pass.
        activations, masks = [x_epoch[batch]], []
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            a = activate(activations[-1] @ weight + bias)
            masks.append((rng.random(a.shape) < keep) / np.float32(keep) if keep < 1.0 else np.float32(1.0))
            activations.append(a * masks[-1])
        log_probs = log_softmax(activations[-1] @ weights[-1] + biases[-1])
        losses.append(-log_probs[np.arange(len(y)), y].mean())

        # Backward pass: the gradient of the cross-entropy in the logits is softmax minus one-hot.
        delta = np.exp(log_probs)
        delta[np.arange(len(y)), y] -= 1.0
        delta /= len(y)
        for layer in reversed(range(len(weights))):
            weight_grad = activations[layer].T @ delta + train["weight_decay"] * weights[layer]
            bias_grad = delta.sum(axis=0)
            if layer > 0:
                # Undo the division by `keep` (inverted dropout) to get the output of the activation function.
                delta = (delta @ weights[layer].T) * masks[layer - 1] * activation_grad(activations[layer] * keep)
            weight_velocity[layer] = train["momentum"] * weight_velocity[layer] - lr * weight_grad
            bias_velocity[layer] = train["momentum"] * bias_velocity[layer] - lr * bias_grad
            weights[layer] += weight_velocity[layer]
            biases[layer] += bias_velocity[layer]

    val_loss, val_accuracy = evaluate(x_val, y_val)
    best_accuracy = max(best_accuracy, val_accuracy)
    logger.log(
        {
            "train/loss": np.mean(losses),
            "val/loss": val_loss,
            "val/accuracy": val_accuracy,
            "val/error": 1.0 - val_accuracy,
            "learning_rate": lr,
        },
        step=epoch,
    )
    if (epoch + 1) % max(1, train["epochs"] // 10) == 0:
        print(f"epoch {epoch + 1:4d}  train/loss {np.mean(losses):.4f}  val/accuracy {val_accuracy:.4f}", flush=True)

test_loss, test_accuracy = evaluate(x_test, y_test)
logger.summary(
    {
        "val/accuracy": val_accuracy,
        "val/accuracy_best": best_accuracy,
        "test/accuracy": test_accuracy,
        "test/loss": test_loss,
        "epochs": train["epochs"],
        "parameters": sum(weight.size for weight in weights) + sum(bias.size for bias in biases),
        "seconds": round(time.perf_counter() - start_time, 3),
    }
)
