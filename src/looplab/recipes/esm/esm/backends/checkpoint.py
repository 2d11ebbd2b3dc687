"""Model folder, fingerprint and tokenizer: shared by all backends that load a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from looplab.errors import LabError

WEIGHTS = ("*.safetensors",)
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


def model_folder(name: str) -> Path:
    """Return the folder of a model; download it if `name` is a name on the Hugging Face hub."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise LabError("not a model folder: it has no config.json", file=folder)
        return folder
    if folder.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise LabError(
            f"no model folder {name!r} (model.name_or_path)",
            hint="use a folder with config.json and *.safetensors; `python run.py fetch-model` creates one",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.model", *WEIGHTS]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise LabError(
            f"model {name!r} is not a folder, and could not be downloaded: {error}",
            hint="check model.name_or_path, or use the path of a folder",
        ) from error


def fingerprint(folder: Path) -> str:
    """Hash weights and tokenizer; the result is the same for every backend and dtype."""
    files = sorted(path for pattern in (*WEIGHTS, *TOKENIZER) for path in folder.glob(pattern))
    if not any(path.suffix == ".safetensors" for path in files):
        raise LabError("the model folder has no *.safetensors", file=folder)
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def eos_token_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the EOS tokens."""
    eos_tokens = getattr(generation_config, "eos_token_id", None)
    if eos_tokens is None:
        eos_tokens = tokenizer.eos_token_id
    return frozenset() if eos_tokens is None else frozenset([eos_tokens] if isinstance(eos_tokens, int) else eos_tokens)


class TokenizerWrapper:
    """Encoding, decoding, and the tokens that can complete a delimiter."""

    def __init__(self, tokenizer: Any, chat: bool) -> None:
        if chat and not tokenizer.chat_template:
            raise LabError("prompt.chat is on, but the tokenizer of this model has no chat template")
        self._tokenizer, self._chat = tokenizer, chat
        self._rust = getattr(tokenizer, "backend_tokenizer", None)
        self._delimiter_tokens: dict[str, frozenset[int]] = {}

    def apply_chat_template(self, prompt: str) -> str:
        if not self._chat:
            return prompt
        turns = [{"role": "user", "content": prompt}]
        return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def encode(self, prompts: Sequence[str], longest: int) -> list[list[int]]:
        """Encode prompts. Raises LabError if one is empty or has `longest` tokens or more."""
        if not prompts:
            return []
        # A chat template writes the special tokens itself.
        found: list[list[int]] = self._tokenizer(list(prompts), add_special_tokens=not self._chat)["input_ids"]
        for number, tokens in enumerate(found):
            if not tokens:
                raise LabError(f"prompt {number} is empty")
            if len(tokens) >= longest:
                raise LabError(
                    f"prompt {number} has {len(tokens)} tokens, but model.max_model_len allows {longest - 1}",
                    hint="raise model.max_model_len, or shorten the prompt",
                )
        return found

    def text(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Decode `tokens` in the context of `before`: some tokenizers add spaces only within a text."""
        anchor = list(before[-4:])
        return self._decode([*anchor, *tokens])[len(self._decode(anchor)) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._rust is not None:  # the same text at a tenth of the cost
            return str(self._rust.decode(tokens, skip_special_tokens=True))
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def delimiter_tokens(self, delimiter: str) -> frozenset[int]:
        """Return the tokens that can complete the delimiter: those with its last character, and partial characters."""
        if delimiter not in self._delimiter_tokens:
            last = delimiter[-1]
            texts = [self._decode([token]) for token in range(len(self._tokenizer))]
            # Tokenizers may drop or add a space at the start of a text, so any token may end in a space.
            anything = last == " "
            found = (i for i, text in enumerate(texts) if anything or last in text or "\ufffd" in text)
            self._delimiter_tokens[delimiter] = frozenset(found)
        return self._delimiter_tokens[delimiter]


def steered_rows(injections: Sequence[Any]) -> dict[int, tuple[list[int], npt.NDArray[np.float32]]]:
    """Group injections by layer: their indices, and the scaled vectors."""
    by_layer: dict[int, list[int]] = {}
    for number, injection in enumerate(injections):
        if injection is not None:
            by_layer.setdefault(injection.layer, []).append(number)
    return {
        layer: (rows, np.stack([np.float32(injections[row].scale) * injections[row].vector for row in rows]))
        for layer, rows in by_layer.items()
    }
