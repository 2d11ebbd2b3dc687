"""Small random checkpoints, and the subject that goes with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = tuple("add sub so the then now is has gets left right we see take give one two three four five".split())  # noqa: SIM905
PROMPTS = (
    "add one two\nso",
    "the left has three\n\nthen the right gets five and now we see two\nis",
    "now",
    "take one give two take three give four\n\nSo the left is",
    "sub five three",
    "we see",
)


def save_tokenizer(folder: Path, kind: str) -> int:
    """Characters as tokens, and one token with text beyond a blank line; the number of tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz0123456789. \n"
    if kind == "qwen2":  # its own class of tokenizer, which works on bytes
        folder.joinpath("vocab.json").write_text(
            json.dumps({"<eos>": 0, **{_as_byte(c): n for n, c in enumerate(letters, 1)}})
        )
        folder.joinpath("merges.txt").write_text("")
        settings = {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<eos>",
            "pad_token": "<eos>",
            "unk_token": "<eos>",
        }
        folder.joinpath("tokenizer_config.json").write_text(json.dumps(settings))
        return len(letters) + 1
    vocabulary = {text: n for n, text in enumerate(["<eos>", "\n\nSo", *letters])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n\nSo|\n|."), "isolated")
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", pad_token="<eos>")
    tokenizer.save_pretrained(folder)
    return len(vocabulary)


def _as_byte(character: str) -> str:
    return {" ": "Ġ", "\n": "Ċ"}.get(character, character)


def save_model(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """A random model whose greedy text does not fall into a loop at once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    size = save_tokenizer(folder, kind)
    settings: dict[str, Any] = {
        "vocab_size": size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": 0,
        **changes,
    }
    if kind == "gpt2":
        settings = {"vocab_size": size, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512,
                    "initializer_range": 0.3, "eos_token_id": 0, "bos_token_id": 0}  # fmt: skip
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name or "ln_" in name:
                weight.normal_(1.0 if name.endswith("weight") else 0.0, 0.2)
        # The end of the text comes when it is forced, not at random.
        model.get_output_embeddings().weight[0] = 0.0
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    return folder
