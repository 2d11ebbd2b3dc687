"""Episodic steering memory against its rivals, where one direction cannot do: who wins?

    python benchmarks/esm_study.py [--quick] [--study opposed|habits] [--model FOLDER] [--out FOLDER]

Runs a study of the recipe (src/looplab/recipes/esm/studies/): greedy, a majority vote with at least ESM's tokens, one
mean vector with its own layer and scale, ESM with and without probing, shuffled memory, random directions. The plan is
committed, choices are made on dev, the test questions are read once. `opposed` uses the tiny model of the recipe
(minutes), `habits` SmolLM2-135M-Instruct, which is fetched if --model is not given (about an hour).

It can be killed, and continues when started again with the same --out. --quick asks other, fewer questions with the
tiny model: under 60 seconds on an idle core. Also measured: tokens per CPU second of the steered decoding loop,
relative to `generate` of transformers, at batch 64 (`tok_x_hf`). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from esm import MODEL, Peers, cpu_seconds
from looplab.errors import LabError
from looplab.recipes.esm.esm import study
from looplab.recipes.esm.esm.tiny.task import examples

STUDIES = MODEL.parent / "studies"
FIGURES = ("greedy", "esm", "majority", "mean_vector", "random_direction")


def speed(model: Path, turns: int, tokens: int) -> float:
    """Return tokens per CPU second of our loop, with capture and injections, relative to `generate`."""
    peers = Peers(model)
    prompts = [example.question for example in examples("steerable", "dev", 64, 0)]
    peers.ours(prompts, 4)
    peers.generate(prompts, 4)
    ratios = []
    for _ in range(turns):
        theirs = cpu_seconds(lambda: peers.generate(prompts, tokens))
        ratios.append(theirs / cpu_seconds(lambda: peers.ours(prompts, tokens)))
    return statistics.median(ratios)


def log(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="other, fewer questions with the tiny model")
    parser.add_argument("--study", choices=("opposed", "habits"), default="opposed")
    parser.add_argument("--model", type=Path, help="a folder of SmolLM2-135M-Instruct, for habits")
    parser.add_argument("--out", type=Path, help="keeps everything; the same folder continues")
    args = parser.parse_args()
    torch.set_num_threads(1)
    name = "opposed" if args.quick else args.study
    temporary = tempfile.TemporaryDirectory(prefix="esm-study-")
    out = args.out or (Path(temporary.name) if args.quick else Path("outputs") / f"esm_study-{name}")
    model = args.model if name == "habits" and args.model else MODEL
    try:
        if name == "habits" and args.model is None:
            from looplab.recipes.esm.esm.fetch import fetch_model

            model = fetch_model(Path.home() / ".cache/looplab/smollm2-135m-instruct")
        plan = study.load_plan(STUDIES / f"{name}.yaml")
        made = study.prepare(name, plan.rehearsal() if args.quick else plan, model, out)
        result = study.run(made, log)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    log(study.markdown(made, result))
    accuracies = {row["method"]: round(row["acc"], 4) for row in result["methods"]}
    figures: dict[str, Any] = {key: accuracies[key] for key in FIGURES}
    figures |= {
        "n_test": result["n_test"], "esm_minus_best_rival_low": round(result["best_rival"]["ci_low"], 4),
        "tok_x_hf": round(speed(MODEL, 3 if args.quick else 7, 24 if args.quick else 64), 2),
        "best_rival": result["best_rival"]["name"], "study": name, "seeds": len(result["seeds"]),
        "headline": result["headline"],
    }  # fmt: skip
    temporary.cleanup()
    log(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
