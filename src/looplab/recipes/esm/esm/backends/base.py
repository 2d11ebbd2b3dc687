"""Contract of a backend that generates text segment by segment and can be steered between segments.

A session is a batch of rows, of which at most `model.max_num_seqs` are computed at once. A row consists of its prompt,
the tokens generated so far, and the committed injections. All outputs for a row are a function of these and of the
row's seed, and do not depend on the other rows.

This holds up to rounding: kernels choose the order of additions depending on the batch shape, the position of the row
and the CPU. The same calls with the same prompts in the same order are bit-identical on one machine with the same
number of threads (but not on vLLM, whose cache keeps earlier batches).

An injection is added to the output of one layer at one token: the last token of the prefix, before generation
continues. A committed injection stays part of the row: all later tokens attend to the steered position.
`hidden_states` returns the states of the last token *before* anything is injected there; for a row without committed
injections they equal those of a fresh prefill.
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
class SamplingParams:
    """How tokens are sampled."""

    max_new_tokens: int
    """Budget of the whole answer; `generate` takes the limit of one completion."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling."""
    seed: int = 0
    """Combined with the seed of the row and the position of the token."""


@dataclass(frozen=True)
class Injection:
    """A steering vector, added to the residual stream at one token."""

    vector: Floats
    """(width,) float32."""
    layer: int
    """Layer whose output it is added to, from 0."""
    scale: float
    """Factor on the vector."""


@dataclass
class Completion:
    """What one call of `generate` produced for one row."""

    tokens: list[int]
    """New tokens, including EOS."""
    text: str
    """Their text, without special tokens."""
    logprobs: list[float]
    """Log probability of each token under the steered model, at temperature 1."""
    finish: Finish
    """Why generation stopped."""


class GenerationSession(Protocol):
    """A batch of rows, each with its own state."""

    def hidden_states(self, rows: Sequence[int], layers: Sequence[int]) -> Floats:
        """Return the layers' outputs at the last token of each row: [rows, layers, width] float32. Cached."""
        ...

    def generate(
        self,
        rows: Sequence[int],
        limits: Sequence[int],
        injections: Sequence[Injection | None],
        until: str | None,
        sampling: SamplingParams,
        commit: bool = True,
    ) -> list[Completion]:
        """Continue each row until its new text contains `until`, it ends with EOS, or its limit is reached.

        Args:
            rows: Indices of the rows.
            limits: Maximum number of new tokens, per row.
            injections: Injection at the last token of the prefix, per row.
            until: Stop string. The completion keeps text of the last token beyond it. None: no stop string.
            sampling: How tokens are sampled.
            commit: False is a probe: the rows are unchanged afterwards.

        Returns:
            One completion per row; empty, with finish `eos`, for rows that have already ended.
        """
        ...

    def text(self, row: int) -> str:
        """Return the text generated for the row so far."""
        ...

    def tokens(self, row: int) -> list[int]:
        """Return the tokens generated for the row so far."""
        ...

    def close(self) -> None:
        """Free the state of the rows."""
        ...


class Backend(Protocol):
    """A loaded model."""

    name: str
    """`transformers`, `vllm` or `toy`."""
    n_layers: int
    """Number of layers that can be read and steered."""
    width: int
    """Size of a hidden state."""
    fingerprint: str
    """Hash of weights and tokenizer; artifacts of another model are rejected."""

    def apply_chat_template(self, prompt: str) -> str:
        """Return the prompt in the model's chat template if `prompt.chat` is on, otherwise unchanged."""
        ...

    def start_session(self, prompts: Sequence[str], seeds: Sequence[int]) -> GenerationSession:
        """Start a batch: one row per prompt, one sampling seed per row."""
        ...

    def injections_applied(self) -> int:
        """Return the number of injections applied since the backend was created."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


class ModelOptions(Protocol):
    """The `model` section of the config, as needed by a backend."""

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


def make_backend(model: ModelOptions, chat: bool = False) -> Backend:
    """Load the model with the backend given in the config."""
    if model.backend == "toy":
        from .toy import ToyBackend

        return ToyBackend(model.max_num_seqs)
    if model.backend == "transformers":
        from .hf import HFBackend

        return HFBackend(
            model.name_or_path,
            dtype=model.dtype,
            device=model.device,
            threads=model.threads,
            max_model_len=model.max_model_len,
            max_num_seqs=model.max_num_seqs,
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
    raise LabError(f"unknown model.backend {model.backend!r}", hint=f"use one of {', '.join(BACKENDS)}")


def check_rows(rows: Sequence[int], limits: Sequence[int], injections: Sequence[Injection | None]) -> None:
    """Raise LabError for a call of `generate` whose lists do not fit together."""
    if not len(rows) == len(limits) == len(injections):
        raise LabError(f"generate: {len(rows)} rows, {len(limits)} limits and {len(injections)} injections")
    if len(set(rows)) != len(rows):
        raise LabError("generate: a row occurs twice")


def check_request(
    rows: Sequence[int], limits: Sequence[int], injections: Sequence[Injection | None], n_layers: int, width: int
) -> None:
    """Raise LabError for an invalid call of `generate`; the same for all backends."""
    check_rows(rows, limits, injections)
    for injection in injections:
        if injection is None:
            continue
        if not 0 <= injection.layer < n_layers:
            raise LabError(f"injection at layer {injection.layer}, but the model has layers 0 to {n_layers - 1}")
        if injection.vector.shape != (width,):
            raise LabError(f"injection of shape {injection.vector.shape}, but the model is {width} wide")
