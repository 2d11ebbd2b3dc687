"""The frozen evaluation: how many fish a policy brings through an episode. Versions must not change it.

    python evaluate.py --checkpoint experiments/v1/artifacts/checkpoints --out result.json
    python evaluate.py --random

Always the same ponds (seeds 1000, 1001, …), 25 fish in each, every fish steered by the policy from its own observation
alone, always with the action that the policy holds best: the same weights give the same numbers, and episode i of one
version is the same pond as episode i of another.

A checkpoint is a folder with `policy.json`, `{"format": "fish-policy-1", "weights": "policy.npz", "sizes": [18, 64, 5],
"activation": "tanh"}`, and the file that it names, with float32 arrays w0, b0, w1, b1, … for x @ w + b. Nothing of a
version's code is run, and nothing in these files can be.
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

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the matrices are small: more threads only wait for each other

import numpy as np
import numpy.typing as npt

from looplab.errors import LabError

if TYPE_CHECKING:
    from looplab.recipes.fish.fish_env import ACTIONS, OBSERVATIONS, STEPS, FishSchool, Floats, Ints
else:  # the file beside this one, wherever the lab is
    from fish_env import ACTIONS, OBSERVATIONS, STEPS, FishSchool, Floats, Ints

EPISODES = 32
FIRST_SEED = 1000
NUM_FISH = 25
FORMAT = "fish-policy-1"
ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, np.float32(0.0)),
}
MOST_LAYERS, MOST_UNITS = 8, 2048

Act = Callable[[Floats], Ints]
"""From observations (ponds, fish, 18) to actions (ponds, fish)."""


@dataclass(frozen=True)
class Policy:
    """A network read from a checkpoint; it acts by the highest of its last layer."""

    weights: tuple[Floats, ...]
    """One matrix a layer (inputs, outputs)."""
    biases: tuple[Floats, ...]
    activation: str
    """Between the layers: tanh or relu."""
    sha256: str
    """Of the file with the weights."""

    def __call__(self, observations: Floats) -> Ints:
        # One product for each pond, so that its rounding, and with it its whole life, does not depend on the others.
        x = observations
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x @ weight + bias
            if layer < len(self.weights) - 1:
                x = ACTIVATIONS[self.activation](x)
        actions: Ints = x.argmax(axis=-1)
        return actions


def load_policy(folder: Path) -> Policy:
    """The policy of a checkpoint folder; whatever is wrong with it is a LabError that says what."""
    file = folder / "policy.json"
    try:
        layout = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "train first, or name the folder with policy.json"
        raise LabError(f"there is no checkpoint: {error.strerror}", file=file, hint=hint) from error
    except ValueError as error:  # neither UTF-8 nor JSON
        raise LabError(f"the checkpoint's layout is not JSON: {error}", file=file) from error
    if not isinstance(layout, dict) or layout.get("format") != FORMAT:
        raise LabError(f"this is no policy of the format {FORMAT!r}", file=file, hint="see the top of evaluate.py")
    sizes, activation, name = layout.get("sizes"), layout.get("activation"), layout.get("weights")
    if not isinstance(sizes, list) or not all(type(size) is int and 1 <= size <= MOST_UNITS for size in sizes):
        raise LabError(f"`sizes` must be a list of whole numbers within 1 … {MOST_UNITS}, not {sizes!r}", file=file)
    if not 2 <= len(sizes) <= MOST_LAYERS + 1 or (sizes[0], sizes[-1]) != (OBSERVATIONS, ACTIONS):
        hint = f"{OBSERVATIONS} observations, up to {MOST_LAYERS - 1} hidden layers, {ACTIONS} actions"
        raise LabError(f"`sizes` does not fit the fish: {sizes}", file=file, hint=hint)
    if activation not in ACTIVATIONS:
        raise LabError(f"`activation` must be one of {', '.join(ACTIVATIONS)}, not {activation!r}", file=file)
    if not isinstance(name, str) or Path(name).name != name:
        raise LabError(f"`weights` must name a file of the same folder, not {name!r}", file=file)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        shapes |= {f"w{layer}": (inputs, outputs), f"b{layer}": (outputs,)}
    arrays = _arrays(folder / name, shapes)
    layers = range(len(sizes) - 1)
    return Policy(
        tuple(arrays[f"w{layer}"] for layer in layers),
        tuple(arrays[f"b{layer}"] for layer in layers),
        activation,
        hashlib.sha256((folder / name).read_bytes()).hexdigest(),
    )


def _arrays(file: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Floats]:
    """The arrays of these shapes from an npz file, and no others."""
    room = sum(4 * int(np.prod(shape)) + 1024 for shape in shapes.values())
    found: dict[str, Floats] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            names = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
        if names.keys() != shapes.keys() or sum(names.values()) > room:  # before anything is unpacked
            raise LabError(f"the weights are not those of `sizes`: found {', '.join(sorted(names)[:20])}", file=file)
        with np.load(file, allow_pickle=False) as loaded:
            for name, shape in shapes.items():
                found[name] = loaded[name]
                if found[name].dtype != np.float32 or found[name].shape != shape:
                    is_ = f"{found[name].dtype} {found[name].shape}"
                    raise LabError(f"{name} is {is_}, but `sizes` says float32 {shape}", file=file)
    except OSError as error:
        raise LabError(f"the weights cannot be read: {error.strerror or error}", file=file) from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise LabError(f"the weights cannot be read: {error}", file=file, hint="save them by numpy.savez") from error
    if not all(np.isfinite(array).all() for array in found.values()):
        raise LabError("the weights are not all finite numbers", file=file, hint="the training has diverged")
    return found


def random_policy(seed: int = 0) -> Act:
    """Any action for every fish, in every step: what a policy has to beat."""
    rng = np.random.default_rng(seed)
    return lambda observations: rng.integers(0, ACTIONS, observations.shape[:-1])


def evaluate(act: Act, episodes: int = EPISODES, first_seed: int = FIRST_SEED) -> dict[str, Any]:
    """Play the episodes, each once, to the end."""
    school = FishSchool(episodes, NUM_FISH, seed=first_seed, restart=False)
    returned = np.zeros((episodes, NUM_FISH))
    observations = school.observe()
    for _ in range(STEPS):
        step = school.step(act(observations))
        observations = step.observations
        returned += step.rewards
    survival = school.alive.mean(axis=1)
    low, high = interval(survival)
    percentiles = {f"p{q}": float(np.percentile(school.death_step, q)) for q in (10, 25, 50, 75, 90)}
    return {
        "survival_rate": float(survival.mean()),
        "survival_low": low,
        "survival_high": high,
        "min_survival": float(survival.min()),
        "death_step": percentiles,  # survivors count as 500
        "mean_return": float(returned.mean()),
        "episodes": episodes,
        "first_seed": first_seed,
        "num_fish": NUM_FISH,
        "survival_values": survival.tolist(),
        "return_values": returned.mean(axis=1).tolist(),
    }


def interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of the mean, by 10,000 bootstrap samples; always the same for the same values."""
    drawn = np.random.default_rng(0).integers(0, len(values), (10_000, len(values)))
    low, high = np.percentile(values[drawn].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
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
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--checkpoint", type=Path, help="a folder with policy.json")
    who.add_argument("--random", action="store_true", help="fish that do anything")
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--out", type=Path, help="where to write the JSON; without it, it is printed")
    args = parser.parse_args()
    try:
        if args.episodes < 1:
            raise LabError(f"--episodes must be 1 or more, not {args.episodes}")
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
