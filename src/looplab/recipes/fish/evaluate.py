"""The frozen evaluation: the fraction of fish that survive an episode. Versions must not change it.

    python evaluate.py --checkpoint experiments/v1/artifacts/checkpoints --out result.json
    python evaluate.py --random

The ponds are always the same (seeds 1000, 1001, …), with 25 fish each. The policy controls every fish from its own
observation alone and acts greedily, so the same weights produce the same numbers, and episode i is the same pond for
all versions.

A checkpoint is a folder with `policy.json`, `{"format": "fish-policy-1", "weights": "policy.npz", "sizes": [18, 64, 5],
"activation": "tanh"}`, and the weights file it names, with float32 arrays w0, b0, w1, b1, … for x @ w + b. No code of a
version is executed, and these files cannot contain any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads only add overhead to matrices this small

import numpy as np
import numpy.typing as npt

from looplab.errors import LabError

if TYPE_CHECKING:
    from looplab.recipes.fish.fish_env import NUM_ACTIONS, OBS_DIM, STEPS, FishSchool, Floats, Ints
else:  # the module next to this file
    from fish_env import NUM_ACTIONS, OBS_DIM, STEPS, FishSchool, Floats, Ints

EPISODES = 32
FIRST_SEED = 1000
NUM_FISH = 25
FORMAT = "fish-policy-1"
ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, np.float32(0.0)),
}
MAX_LAYERS, MAX_UNITS = 8, 2048

Act = Callable[[Floats], Ints]
"""A policy: from observations (ponds, fish, 18) to actions (ponds, fish)."""


@dataclass(frozen=True)
class SavedPolicy:
    """A greedy policy loaded from a checkpoint."""

    weights: tuple[Floats, ...]
    """One matrix per layer (inputs, outputs)."""
    biases: tuple[Floats, ...]
    activation: str
    """Activation between the layers: tanh or relu."""
    sha256: str
    """SHA-256 of the weights file."""

    def __call__(self, obs: Floats) -> Ints:
        # A batched product with one matrix per pond, so that rounding does not depend on the other ponds.
        x = obs
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x @ weight + bias
            if layer < len(self.weights) - 1:
                x = ACTIVATIONS[self.activation](x)
        actions: Ints = x.argmax(axis=-1)
        return actions


def load_policy(folder: Path) -> SavedPolicy:
    """Load the policy of a checkpoint folder. Raises LabError if it is invalid."""
    file = folder / "policy.json"
    try:
        layout = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "train first, or pass the folder with policy.json"
        raise LabError(f"no checkpoint: {error.strerror}", file=file, hint=hint) from error
    except ValueError as error:  # neither UTF-8 nor JSON
        raise LabError(f"policy.json is not JSON: {error}", file=file) from error
    if not isinstance(layout, dict) or layout.get("format") != FORMAT:
        raise LabError(f"this is not a policy of the format {FORMAT!r}", file=file, hint="see the top of evaluate.py")
    sizes, activation, name = layout.get("sizes"), layout.get("activation"), layout.get("weights")
    if not isinstance(sizes, list) or not all(type(size) is int and 1 <= size <= MAX_UNITS for size in sizes):
        raise LabError(f"`sizes` must be a list of integers from 1 to {MAX_UNITS}, not {sizes!r}", file=file)
    if not 2 <= len(sizes) <= MAX_LAYERS + 1 or (sizes[0], sizes[-1]) != (OBS_DIM, NUM_ACTIONS):
        hint = f"{OBS_DIM} observations, up to {MAX_LAYERS - 1} hidden layers, {NUM_ACTIONS} actions"
        raise LabError(f"`sizes` does not match the environment: {sizes}", file=file, hint=hint)
    if activation not in ACTIVATIONS:
        raise LabError(f"`activation` must be one of {', '.join(ACTIVATIONS)}, not {activation!r}", file=file)
    if not isinstance(name, str) or Path(name).name != name:
        raise LabError(f"`weights` must name a file in the same folder, not {name!r}", file=file)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        shapes |= {f"w{layer}": (inputs, outputs), f"b{layer}": (outputs,)}
    arrays = _load_arrays(folder / name, shapes)
    layers = range(len(sizes) - 1)
    return SavedPolicy(
        weights=tuple(arrays[f"w{layer}"] for layer in layers),
        biases=tuple(arrays[f"b{layer}"] for layer in layers),
        activation=activation,
        sha256=hashlib.sha256((folder / name).read_bytes()).hexdigest(),
    )


def _load_arrays(file: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Floats]:
    """Load exactly the arrays of these shapes from an npz file."""
    max_size = sum(4 * int(np.prod(shape)) + 1024 for shape in shapes.values())
    found: dict[str, Floats] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            names = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
        if names.keys() != shapes.keys() or sum(names.values()) > max_size:  # before anything is unpacked
            raise LabError(f"the weights do not match `sizes`: found {', '.join(sorted(names)[:20])}", file=file)
        with np.load(file, allow_pickle=False) as loaded:
            for name, shape in shapes.items():
                found[name] = loaded[name]
                if found[name].dtype != np.float32 or found[name].shape != shape:
                    actual = f"{found[name].dtype} {found[name].shape}"
                    raise LabError(f"{name} is {actual}, but `sizes` requires float32 {shape}", file=file)
    except OSError as error:
        raise LabError(f"cannot read the weights: {error.strerror or error}", file=file) from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise LabError(f"cannot read the weights: {error}", file=file, hint="save them with numpy.savez") from error
    if not all(np.isfinite(array).all() for array in found.values()):
        raise LabError("the weights are not all finite", file=file, hint="the training has diverged")
    return found


def random_policy(seed: int = 0) -> Act:
    """Return a policy that acts uniformly at random: the baseline to beat."""
    rng = np.random.default_rng(seed)
    return lambda obs: rng.integers(0, NUM_ACTIONS, obs.shape[:-1])


def evaluate(act: Act, episodes: int = EPISODES, first_seed: int = FIRST_SEED) -> dict[str, Any]:
    """Run every episode to its end; return the metrics."""
    school = FishSchool(episodes, NUM_FISH, seed=first_seed, restart=False)
    returns = np.zeros((episodes, NUM_FISH))
    obs = school.observe()
    for _ in range(STEPS):
        step = school.step(act(obs))
        obs = step.obs
        returns += step.rewards
    survival = school.alive.mean(axis=1)
    low, high = bootstrap_interval(survival)
    percentiles = {f"p{q}": float(np.percentile(school.death_step, q)) for q in (10, 25, 50, 75, 90)}
    return {
        "survival_rate": float(survival.mean()),
        "survival_low": low,
        "survival_high": high,
        "min_survival": float(survival.min()),
        "death_step": percentiles,  # survivors count as 500
        "mean_return": float(returns.mean()),
        "episodes": episodes,
        "first_seed": first_seed,
        "num_fish": NUM_FISH,
        "survival_values": survival.tolist(),
        "return_values": returns.mean(axis=1).tolist(),
    }


def bootstrap_interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean, from 10,000 bootstrap samples with a fixed seed."""
    samples = np.random.default_rng(0).integers(0, len(values), (10_000, len(values)))
    low, high = np.percentile(values[samples].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    policies = parser.add_mutually_exclusive_group(required=True)
    policies.add_argument("--checkpoint", type=Path, help="folder with policy.json")
    policies.add_argument("--random", action="store_true", help="evaluate the random policy")
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--out", type=Path, help="JSON file to write; default: print to stdout")
    args = parser.parse_args()
    try:
        if args.episodes < 1:
            raise LabError(f"--episodes must be at least 1, not {args.episodes}")
        policy = None if args.random else load_policy(args.checkpoint)
        result = evaluate(policy or random_policy(), args.episodes)
        result["policy_sha256"] = policy.sha256 if policy else None
        if args.out is None:
            print(json.dumps(result, indent=2))
            return 0
        write_json(args.out, result)
    except LabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    low, high = result["survival_low"], result["survival_high"]
    print(f"survival {result['survival_rate']:.3f} [{low:.3f}, {high:.3f}] in {args.episodes} episodes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
