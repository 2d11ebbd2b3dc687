"""Where a model lies, what tells it from others, and its text: what all engines that load a checkpoint share."""

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
    """The folder of a model; one that is named as on the Hugging Face hub is fetched from there."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise LabError("not a model folder: it has no config.json", file=folder)
        return folder
    if folder.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise LabError(
            f"there is no model folder {name!r} (model.name_or_path)",
            hint="give a folder with config.json and *.safetensors; `python run.py fetch-model` makes one",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.model", *WEIGHTS]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise LabError(
            f"model {name!r} is neither a folder here nor could it be fetched: {error}",
            hint="check model.name_or_path, or give the path of a folder",
        ) from error


def fingerprint(folder: Path) -> str:
    """Hash of weights and tokenizer, the same for every engine and dtype."""
    files = sorted(path for pattern in (*WEIGHTS, *TOKENIZER) for path in folder.glob(pattern))
    if not any(path.suffix == ".safetensors" for path in files):
        raise LabError("the model folder has no *.safetensors", file=folder)
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()[:16]


def end_tokens(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens after which a text is over."""
    ends = getattr(generation_config, "eos_token_id", None)
    if ends is None:
        ends = tokenizer.eos_token_id
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)


class Words:
    """Text to tokens and back, and which tokens may end a delimiter."""

    def __init__(self, tokenizer: Any, chat: bool) -> None:
        if chat and not tokenizer.chat_template:
            raise LabError("prompt.chat is on, but the tokenizer of this model has no chat template")
        self._tokenizer, self._chat = tokenizer, chat
        self._rust = getattr(tokenizer, "backend_tokenizer", None)
        self._enders: dict[str, frozenset[int]] = {}

    def wrap(self, prompt: str) -> str:
        if not self._chat:
            return prompt
        turns = [{"role": "user", "content": prompt}]
        return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def encode(self, prompts: Sequence[str], longest: int) -> list[list[int]]:
        """Tokens of each prompt; one that is empty or longer than `longest` is an error."""
        if not prompts:
            return []
        # A chat template writes the special tokens itself.
        found: list[list[int]] = self._tokenizer(list(prompts), add_special_tokens=not self._chat)["input_ids"]
        for number, tokens in enumerate(found):
            if not tokens:
                raise LabError(f"prompt {number} is empty: there is no token to go on from")
            if len(tokens) >= longest:
                raise LabError(
                    f"prompt {number} has {len(tokens)} tokens, and model.max_model_len leaves room for {longest - 1}",
                    hint="raise model.max_model_len, or shorten the prompt",
                )
        return found

    def text(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """What `tokens` read as after `before`: some tokenizers write a space between words only within a text."""
        anchor = list(before[-4:])
        return self._decode([*anchor, *tokens])[len(self._decode(anchor)) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._rust is not None:  # the same text at a tenth of the cost
            return str(self._rust.decode(tokens, skip_special_tokens=True))
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def enders(self, delimiter: str) -> frozenset[int]:
        """Tokens that may complete the delimiter: those with its last character, and parts of characters."""
        if delimiter not in self._enders:
            last = delimiter[-1]
            texts = [self._decode([token]) for token in range(len(self._tokenizer))]
            # A tokenizer may drop or add a space at the start of a text: then any token may end in a space.
            anything = last == " "
            found = (i for i, text in enumerate(texts) if anything or last in text or "\ufffd" in text)
            self._enders[delimiter] = frozenset(found)
        return self._enders[delimiter]


def steered_rows(injections: Sequence[Any]) -> dict[int, tuple[list[int], npt.NDArray[np.float32]]]:
    """By layer: the numbers of the injections that act there, and what each adds."""
    by_layer: dict[int, list[int]] = {}
    for number, injection in enumerate(injections):
        if injection is not None:
            by_layer.setdefault(injection.layer, []).append(number)
    return {
        layer: (rows, np.stack([np.float32(injections[row].scale) * injections[row].vector for row in rows]))
        for layer, rows in by_layer.items()
    }
