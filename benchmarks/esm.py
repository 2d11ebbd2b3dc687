"""The decoding loop of the esm recipe beside `generate` of transformers, a control point beside re-prefilling, and DPP.

    python benchmarks/esm.py [--quick] [--model FOLDER]

Tokens per CPU-second (one thread) at batch 1, 64 and 256, tokenizing and prefill included: `generate` decodes plainly,
ours reads the states of all layers and injects another vector with another scale into every row. Both always decode
the same number of tokens, taking turns; figures are medians, ratios medians of the ratios within a turn.

A control point is: read the states, retrieve, probe null and two vectors for 8 tokens each. It is compared with the
same on an engine that forgets: the prefix is prefilled for the states and again for each probe.

The same questions are also decoded in smaller batches, and the answers that come out differently are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import looplab
from looplab.recipes.esm.esm.backends import Injection, SamplingParams
from looplab.recipes.esm.esm.backends.hf import HFBackend
from looplab.recipes.esm.esm.select import dpp
from looplab.recipes.esm.esm.tiny.task import examples

MODEL = Path(looplab.__file__).parent / "recipes/esm/model"
GREEDY = SamplingParams(64)


class Peers:
    """Both engines on the same checkpoint, neither of which ends an answer early."""

    def __init__(self, folder: Path) -> None:
        self.backend = HFBackend(str(folder))
        self.backend.eos_tokens = frozenset()
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        rng = np.random.default_rng(0)
        layers, width = self.backend.n_layers, self.backend.width
        self.injections = [
            Injection(rng.normal(size=width).astype(np.float32), row % layers, 0.01 * (1 + row)) for row in range(256)
        ]

    def generate(self, prompts: list[str], tokens: int) -> list[list[int]]:
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=tokens,
                do_sample=False,
            )
        answers: list[list[int]] = out[:, batch["input_ids"].shape[1] :].tolist()
        return answers

    def ours(self, prompts: list[str], tokens: int, steered: bool = True) -> list[list[int]]:
        rows = range(len(prompts))
        session = self.backend.start_session(prompts, rows)
        if steered:
            session.hidden_states(rows, range(self.backend.n_layers))
        wishes = self.injections[: len(prompts)] if steered else [None] * len(prompts)
        # A delimiter that never comes: looking for it is part of the work.
        completions = session.generate(rows, [tokens] * len(prompts), wishes, "\n\n\n\n", GREEDY)
        return [completion.tokens for completion in completions]


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def control_point(peers: Peers, prompts: list[str], tokens: int, repeats: int) -> dict[str, float]:
    """CPU-milliseconds of one, kept and re-prefilled, and of a single prefill of the prefixes."""
    backend = peers.backend
    rows, count = range(len(prompts)), len(prompts)
    layers = range(backend.n_layers)
    keys = np.random.default_rng(1).normal(size=(256, backend.width)).astype(np.float32)
    probes: list[list[Injection | None]] = [
        [None] * count,
        list(peers.injections[:count]),
        list(peers.injections[-count:]),
    ]

    def retrieve(states: Any) -> None:
        last = states[:, -1]
        near = (last / np.linalg.norm(last, axis=1, keepdims=True)) @ keys.T
        np.argpartition(-near, 16, axis=1)

    def kept(session: Any) -> None:
        retrieve(session.hidden_states(rows, layers))
        for wishes in probes:
            session.generate(rows, [8] * count, wishes, "\n\n\n\n", GREEDY, commit=False)

    def again(prefixes: list[str]) -> None:
        retrieve(backend.start_session(prefixes, rows).hidden_states(rows, layers))
        for wishes in probes:
            backend.start_session(prefixes, rows).generate(rows, [8] * count, wishes, "\n\n\n\n", GREEDY)

    times: dict[str, list[float]] = {"kept": [], "again": [], "prefill": [], "ratio": []}
    for _ in range(repeats):
        session = backend.start_session(prompts, rows)
        session.generate(rows, [tokens] * count, [None] * count, None, GREEDY)
        prefixes = [prompt + session.text(row) for row, prompt in enumerate(prompts)]
        times["kept"].append(1000 * cpu_seconds(lambda session=session: kept(session)))
        times["again"].append(1000 * cpu_seconds(lambda prefixes=prefixes: again(prefixes)))
        times["prefill"].append(1000 * cpu_seconds(lambda prefixes=prefixes: backend.start_session(prefixes, rows)))
        times["ratio"].append(times["again"][-1] / times["kept"][-1])
    return {name: statistics.median(values) for name, values in times.items()}


def differing(decode: Callable[[list[str]], list[list[int]]], prompts: list[str], size: int) -> int:
    """Answers that are not the same in batches of `size` as all together."""
    together = decode(prompts)
    parts = [answer for start in range(0, len(prompts), size) for answer in decode(prompts[start : start + size])]
    return sum(one != other for one, other in zip(together, parts, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: under 45 seconds on an idle core")
    parser.add_argument("--model", type=Path, default=MODEL, help="a folder; default: the tiny model of the recipe")
    options = parser.parse_args()
    torch.set_num_threads(1)
    repeats, tokens = (3, 48) if options.quick else (7, 64)

    peers = Peers(options.model)
    prompts = [example.question for example in examples("steerable", "test", 256, 0)]
    figures: dict[str, float] = {}
    print(
        f"{options.model.name}: {peers.backend.n_layers} layers, width {peers.backend.width}; {tokens} tokens a row; ",
        end="",
    )
    print(f"median of {repeats} turns; one thread; Python {sys.version.split()[0]}, torch {torch.__version__}")
    for batch in (1, 64, 256):
        some = prompts[:batch]
        inner = 8 if batch == 1 else 1  # a single row is over too soon to be timed
        rates: dict[str, list[float]] = {"generate": [], "ours": []}
        peers.generate(some, tokens)
        peers.ours(some, tokens)
        for _ in range(repeats):
            for name, decode in (("generate", peers.generate), ("ours", peers.ours)):
                spent = cpu_seconds(
                    lambda decode=decode, some=some, inner=inner: [decode(some, tokens) for _ in range(inner)]
                )
                rates[name].append(inner * batch * tokens / spent)
        ratio = statistics.median(ours / hf for ours, hf in zip(rates["ours"], rates["generate"], strict=True))
        hf, ours = statistics.median(rates["generate"]), statistics.median(rates["ours"])
        print(f"batch {batch:>3}: generate {hf:>7,.0f} tokens/CPU-s, ours, steered, {ours:>7,.0f}: {ratio:.2f} ×")
        figures |= {f"tok_x_hf_{batch}": round(ratio, 2), f"tok_per_cpu_s_{batch}": round(ours)}

    point = control_point(peers, prompts[:64], tokens, repeats)
    print(
        f"control point of 64 rows (states, retrieval, three probes of 8 tokens): {point['kept']:.0f} CPU-ms; "
        f"with re-prefilling {point['again']:.0f} ms, {point['ratio']:.2f} × as much; "
        f"one prefill is {point['prefill']:.0f} ms"
    )
    figures |= {"control_point_x_reprefill": round(point["ratio"], 2), "control_point_ms": round(point["kept"], 1)}

    size = 16
    asked = prompts if not options.quick else prompts[:128]
    changed = {
        "generate": differing(lambda some: peers.generate(some, tokens), asked, size),
        "ours": differing(lambda some: peers.ours(some, tokens, steered=False), asked, size),
        "ours_alone": differing(lambda some: peers.ours(some, tokens, steered=False), asked[:64], 1),
    }
    print(
        f"answers that change with the batch ({len(asked)} together or {size} at a time): "
        f"generate {changed['generate']}, ours {changed['ours']}; 64 or one at a time: ours {changed['ours_alone']}"
    )
    figures |= {"changed_by_batch_hf": changed["generate"], "changed_by_batch": changed["ours"] + changed["ours_alone"]}

    rng = np.random.default_rng(2)
    keys = rng.normal(size=(5000, 1536)).astype(np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    quality = rng.random(5000)
    turns = 1 if options.quick else 3
    figures["dpp_s"] = round(
        statistics.median(cpu_seconds(lambda: dpp(keys, quality, 256, 0.5, 1e-4)) for _ in range(turns)), 2
    )
    print(f"DPP, 256 of 5000 keys of width 1536: {figures['dpp_s']} CPU-s")
    print(json.dumps({**figures, "repeats": repeats}))


if __name__ == "__main__":
    main()
