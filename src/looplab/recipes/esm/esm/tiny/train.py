"""Train the tiny Llama of this recipe: `python -m esm.tiny.train --out model` (one thread, a few CPU minutes).

It learns to answer the questions of tiny/task.py like their authors, including their mistakes. The same seed produces
the same weights on the same machine. AutoTokenizer and AutoModelForCausalLM load the folder without network access.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from looplab.errors import LabError

from . import task

KINDS = ("steerable", "slips")
EOS, PAD, UNKNOWN = "<eos>", "<pad>", "<unk>"
BATCH = 64
LEARNING_RATE = 3e-3
Model = Any  # a LlamaForCausalLM and a PreTrainedTokenizerFast, whose own types are too loose to be checked
Words = Any


def tokenizer() -> Words:
    """Return a word-level tokenizer; words include the preceding space, so that decoding is lossless."""
    splitter = pre_tokenizers.Split(Regex(r"\n| ?[A-Za-z]+| ?\d+| ?[^\sA-Za-z\d]+"), "isolated")
    pieces = {f" {number}" for number in range(100)} | {"\n"}
    for kind in KINDS:
        for text in islice(task.texts(kind, seed=0), 2000):  # contains every word of the language many times
            pieces |= {piece for piece, _ in splitter.pre_tokenize_str(task.prompt(text.question) + text.solution)}
    vocabulary = {piece: i for i, piece in enumerate([PAD, EOS, UNKNOWN, *sorted(pieces)])}
    words: Any = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    words.pre_tokenizer = splitter
    words.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=words,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def new_model(words: Words) -> Model:
    """Return an untrained model: four layers, width 128, four heads, tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=words.convert_tokens_to_ids(EOS),
        pad_token_id=words.convert_tokens_to_ids(PAD),
    )
    make: Any = LlamaForCausalLM
    return make(config)


def batches(words: Words, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids and labels, half of each kind, padded on the right; the loss covers the solution only."""
    streams = [task.texts(kind, seed) for kind in KINDS]
    pad, eos = words.convert_tokens_to_ids(PAD), words.convert_tokens_to_ids(EOS)
    while True:
        rows = [text for stream in streams for text in islice(stream, BATCH // len(streams))]
        prompts = words([task.prompt(row.question) for row in rows])["input_ids"]
        solutions = words([row.solution for row in rows])["input_ids"]
        longest = max(len(p) + len(s) + 1 for p, s in zip(prompts, solutions, strict=True))
        ids = torch.full((len(rows), longest), pad)
        labels = torch.full((len(rows), longest), -100)
        for i, (prompt, solution) in enumerate(zip(prompts, solutions, strict=True)):
            written = torch.tensor([*prompt, *solution, eos])
            ids[i, : len(written)] = written
            labels[i, len(prompt) : len(written)] = written[len(prompt) :]
        yield ids, labels


@torch.no_grad()
def greedy_texts(model: Model, words: Words, questions: list[str]) -> list[str]:
    """Return the model's greedy solution of each question."""
    encoded = words([task.prompt(question) for question in questions], return_tensors="pt", padding=True)
    out = model.generate(
        encoded["input_ids"], attention_mask=encoded["attention_mask"], max_new_tokens=48, do_sample=False
    )
    return list(words.batch_decode(out[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True))


def greedy_accuracy(model: Model, words: Words, kind: str, n: int) -> float:
    """Return the accuracy on questions that are not used for training, dev or test."""
    asked = task.examples(kind, "train", n, seed=0)
    model.eval()
    answers = greedy_texts(model, words, [example.question for example in asked])
    model.train()
    right = [answer.endswith(f"#### {example.gold}") for answer, example in zip(answers, asked, strict=True)]
    return sum(right) / n


def train(steps: int, seed: int, report_every: int = 100) -> tuple[Model, Words]:
    """Train a model; return it and its tokenizer. Prints loss and accuracy."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    words = tokenizer()
    model = new_model(words).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(words)} tokens, {steps} steps", flush=True)
    started, losses = time.process_time(), []
    for step, (ids, labels) in enumerate(islice(batches(words, seed), steps), start=1):
        rate = min(1.0, step / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        # Padding is on the right and has no loss, so the causal mask is sufficient.
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % report_every == 0:
            shares = "  ".join(f"{kind} {greedy_accuracy(model, words, kind, 100):.2f}" for kind in KINDS)
            mean = sum(losses[-report_every:]) / report_every
            print(f"step {step}  loss {mean:.4f}  {shares}  {time.process_time() - started:.0f} CPU-s", flush=True)
    return model.eval(), words


def save(model: Model, words: Words, out: Path, made: str) -> str:
    """Write the model folder atomically; return the hash of the weights."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        model.save_pretrained(fresh)
        words.save_pretrained(fresh)
        digest = hashlib.sha256((fresh / "model.safetensors").read_bytes()).hexdigest()
        (fresh / "README.md").write_text(f"{made}\nsha256 of model.safetensors: {digest}\n")
        for path in fresh.iterdir():
            path.chmod(0o644)  # weights and temporary folders are private by default
            with path.open("rb") as written:
                os.fsync(written.fileno())
        fresh.chmod(0o755)
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
            out.rename(old / out.name)
            fresh.rename(out)
            shutil.rmtree(old)
        else:
            fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return digest


def main(argv: list[str] | None = None) -> None:
    """Train and save a model."""
    parser = argparse.ArgumentParser(description="train the tiny Llama of this recipe")
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="model folder; an existing model is replaced")
    flags = parser.parse_args(argv)
    if flags.out.exists() and any(flags.out.iterdir()) and not (flags.out / "config.json").exists():
        raise LabError("this folder contains something other than a model", file=flags.out, hint="use another --out")
    model, words = train(flags.steps, flags.seed)
    made = f"Made by `python -m esm.tiny.train --steps {flags.steps} --seed {flags.seed}` on texts of esm/tiny/task.py."
    print(f"{flags.out}: sha256 {save(model, words, flags.out, made)}")


if __name__ == "__main__":
    main()
