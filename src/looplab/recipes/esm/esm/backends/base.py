"""The contract of an engine that generates text piece by piece and can be steered between the pieces.

A session holds a batch of rows. A row is its prompt, what was generated so far, and the injections that were committed;
everything a backend answers about a row is a function of these and of the row's own seed, never of the other rows.

That holds up to rounding: kernels choose their order of additions by the shape of the batch, by the position of the row
and by the CPU. The same calls on the same prompts in the same order have the same bits, on one machine with one number
of threads (but not on vLLM, whose cache remembers earlier batches).

An injection is added to the output of one layer at one token: the last of the prefix, when the piece begins. A
committed one stays part of the row: all later tokens attend to the steered position. `states` are those of the last
token *before* anything is injected there; on a row without committed injections they equal those of a fresh prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from looplab.errors import LabError

Floats = npt.NDArray[np.float32]
Finish = Literal["delimiter", "eos", "length"]
BACKENDS = ("transformers", "vllm", "toy")


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    max_new_tokens: int
    """The budget of a whole answer; the limit of one piece is given to `generate`."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens that holds this much probability."""
    seed: int = 0
    """Mixed with the seed of the row and the position of the token."""


@dataclass(frozen=True)
class Injection:
    """A vector added to the residual stream, once."""

    vector: Floats
    """(width,) float32."""
    layer: int
    """It is added to the output of this layer, counted from 0."""
    scale: float
    """The factor of the vector."""


@dataclass
class Piece:
    """What one call generated for one row."""

    tokens: list[int]
    """New tokens, the end-of-text token included."""
    text: str
    """Their text, special tokens left out."""
    logprobs: list[float]
    """Log-probability of each token under the steered model at temperature 1."""
    finish: Finish
    """Why it ended."""


class Session(Protocol):
    """A batch of rows, each with its own state."""

    def states(self, rows: Sequence[int], layers: Sequence[int]) -> Floats:
        """Output of the layers at the last token of each row: [rows, layers, width] float32. Computed once a point."""
        ...

    def generate(
        self,
        rows: Sequence[int],
        limits: Sequence[int],
        injections: Sequence[Injection | None],
        until: str | None,
        sampling: Sampling,
        commit: bool = True,
    ) -> list[Piece]:
        """Go on from each row until `until` occurs in its new text, it ends, or its limit is reached.

        A token may carry text beyond the delimiter; the piece keeps it. `commit=False` is a probe: afterwards the rows
        are as before. A row that has ended gives an empty piece with finish `eos`.
        """
        ...

    def text(self, row: int) -> str:
        """What was generated for the row so far, as text."""
        ...

    def tokens(self, row: int) -> list[int]:
        """What was generated for the row so far."""
        ...

    def close(self) -> None:
        """Free the state of the rows."""
        ...


class Backend(Protocol):
    """A loaded model."""

    name: str
    """Which engine: `transformers`, `vllm` or `toy`."""
    n_layers: int
    """Layers that can be read and steered: 0 … n_layers − 1."""
    width: int
    """Width of a hidden state."""
    fingerprint: str
    """Hash of weights and tokenizer: artifacts of another model do not fit."""

    def wrap(self, prompt: str) -> str:
        """The prompt as the model wants it: in its chat template where `prompt.chat` is on, else unchanged."""
        ...

    def open(self, prompts: Sequence[str], seeds: Sequence[int]) -> Session:
        """Start a batch: one row per prompt, one sampling seed per row."""
        ...

    def fired(self) -> int:
        """How many injections really acted since the backend was made."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


class ModelSettings(Protocol):
    """What a backend wants to know of the section `model` of the config."""

    @property
    def backend(self) -> str: ...
    @property
    def name_or_path(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def gpu_memory_utilization(self) -> float: ...
    @property
    def tensor_parallel_size(self) -> int: ...


def make_backend(model: ModelSettings, chat: bool = False) -> Backend:
    """Load the model on the engine that the config names."""
    if model.backend == "toy":
        from .toy import ToyBackend

        return ToyBackend()
    if model.backend == "transformers":
        from .hf import HFBackend

        return HFBackend(
            model.name_or_path,
            dtype=model.dtype,
            device=model.device,
            threads=model.threads,
            max_model_len=model.max_model_len,
            chat=chat,
        )
    if model.backend == "vllm":
        from .vllm import VLLMBackend

        return VLLMBackend(
            model.name_or_path,
            dtype=model.dtype,
            threads=model.threads,
            max_model_len=model.max_model_len,
            max_num_seqs=model.max_num_seqs,
            gpu_memory_utilization=model.gpu_memory_utilization,
            tensor_parallel_size=model.tensor_parallel_size,
            chat=chat,
        )
    raise LabError(f"model.backend {model.backend!r} is not known", hint=f"one of {', '.join(BACKENDS)}")


def check_request(
    rows: Sequence[int], limits: Sequence[int], injections: Sequence[Injection | None], n_layers: int, width: int
) -> None:
    """The same complaint from every backend about a call that cannot be meant."""
    if not len(rows) == len(limits) == len(injections):
        raise LabError(f"generate: {len(rows)} rows, {len(limits)} limits and {len(injections)} injections")
    if len(set(rows)) != len(rows):
        raise LabError("generate: a row is named twice")
    for injection in injections:
        if injection is None:
            continue
        if not 0 <= injection.layer < n_layers:
            raise LabError(f"injection at layer {injection.layer}, but the model has layers 0 to {n_layers - 1}")
        if injection.vector.shape != (width,):
            raise LabError(f"injection of shape {injection.vector.shape}, but the model is {width} wide")
