"""Transformers checkpoints with our own decoding loop: batched, steered per row, nothing computed twice.

A row keeps the keys and values of its prefix, and the logits and hidden states of its last token. So a control point
costs one token, a null probe only its own tokens, and finished rows leave the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from looplab.errors import LabError

from .base import Completion, Finish, Floats, Injection, SamplingParams, check_request
from .cache import KVCache
from .checkpoint import TokenizerWrapper, eos_token_ids, fingerprint, model_folder, steered_rows
from .draw import draw
from .llama import LlamaCore, SteeringVectors, is_llama
from .module import ModuleCore
from .split import SplitSession

PREFILL_TOKENS = 4096
"""Maximum number of tokens per prefill, including padding."""


class HFBackend:
    """See the contract in `base.py`."""

    name = "transformers"

    def __init__(
        self,
        name_or_path: str,
        *,
        dtype: str = "float32",
        device: str = "auto",
        threads: int = 1,
        max_model_len: int = 8192,
        max_num_seqs: int = 64,
        chat: bool = False,
        fast: bool = True,
    ) -> None:
        """`fast=False` uses `module.py` even for models that `llama.py` supports."""
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        torch.set_num_threads(threads)
        folder = model_folder(name_or_path)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            kind = dtype if dtype == "auto" else getattr(torch, dtype)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
            model = model.to(device).eval()
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, AttributeError) as error:
            raise LabError(f"cannot load the model: {error}", file=folder) from error
        config = model.config
        if not set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}:
            raise LabError(
                f"the {config.model_type} model has layers without keys and values", hint="use model.backend: vllm"
            )
        limits = (max_model_len, getattr(config, "max_position_embeddings", None), _sliding_window(config))
        self.max_len = min(limit for limit in limits if limit)
        self.fingerprint = fingerprint(folder)
        self.tokenizer = TokenizerWrapper(tokenizer, chat)
        self.eos_tokens = eos_token_ids(model.generation_config, tokenizer)
        with torch.inference_mode():
            self.core: LlamaCore | ModuleCore = ModuleCore(model) if not fast else _core(model, self.max_len)
        self.n_layers, self.width = self.core.n_layers, self.core.width
        self.max_num_seqs = max_num_seqs
        self._injections_applied = 0

    def apply_chat_template(self, prompt: str) -> str:
        return self.tokenizer.apply_chat_template(prompt)

    @torch.inference_mode()
    def start_session(self, prompts: Sequence[str], seeds: Sequence[int]) -> HFSession | SplitSession:
        if len(prompts) > self.max_num_seqs:
            return SplitSession(partial(HFSession, self), prompts, seeds, self.max_num_seqs)
        return HFSession(self, prompts, seeds)

    def injections_applied(self) -> int:
        return self._injections_applied

    def close(self) -> None:
        del self.core


def _sliding_window(config: Any) -> int | None:
    """Return the length of the sliding window; None if there is none. Our cache does not support longer rows."""
    kinds = getattr(config, "layer_types", None)
    used = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    return getattr(config, "sliding_window", None) if used else None


def _core(model: Any, max_len: int) -> LlamaCore | ModuleCore:
    """Return the fast implementation if it reproduces the model's logits on a few tokens, otherwise the module."""
    if not is_llama(model.config) or _sliding_window(model.config):
        return ModuleCore(model)
    core = LlamaCore(model, max_len)
    size = min(12, max_len - 1)
    tokens = torch.arange(1, size + 1, device=model.device)[None] % model.config.vocab_size
    expected = model(input_ids=tokens).logits[:, -1].float()
    lengths = torch.tensor([size], device=model.device)
    actual, _ = core.prefill(tokens, lengths, KVCache(core.n_layers, 1, size), 0)
    tolerance = 1e-4 if core.dtype == torch.float32 else 5e-2
    close = torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    return core if close else ModuleCore(model)


@dataclass
class _HFRow:
    prompt: list[int]
    seed: int
    slot: int = 0
    tokens: list[int] = field(default_factory=list)
    """Generated tokens."""
    known: bool = False
    """Whether keys, values, logits and states of the last token are computed, without injection."""
    ended: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[-1]


class HFSession:
    """Rows are stored in the slots of one cache. Active rows are moved to the front, so that a forward sees a view."""

    def __init__(self, backend: HFBackend, prompts: Sequence[str], seeds: Sequence[int]) -> None:
        self._backend, self._core = backend, backend.core
        encoded = backend.tokenizer.encode(prompts, backend.max_len)
        self._rows = [_HFRow(tokens, seed) for tokens, seed in zip(encoded, seeds, strict=True)]
        longest = max((row.length for row in self._rows), default=1)
        self._cache = KVCache(self._core.n_layers, len(self._rows), longest + 64)
        self._row_in_slot: list[int] = [0] * len(self._rows)
        """Row in each slot."""
        self._used = longest
        """Number of positions written so far."""
        self._prefill()

    def _prefill(self) -> None:
        """Prefill each distinct prompt once, batching prompts of similar length."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, row in enumerate(self._rows):
            groups.setdefault(tuple(row.prompt), []).append(number)
        distinct = sorted(groups, key=len)
        order = [groups[prompt][0] for prompt in distinct]
        order += [number for prompt in distinct for number in groups[prompt][1:]]
        for slot, number in enumerate(order):
            self._rows[number].slot = slot
        self._row_in_slot = order
        start = 0
        self._logits: Tensor | None = None
        while start < len(distinct):
            end = start + 1
            while end < len(distinct) and (end + 1 - start) * len(distinct[end]) <= PREFILL_TOKENS:
                end += 1
            batch, longest = distinct[start:end], len(distinct[end - 1])
            tokens = self._tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in batch])
            lengths = self._tensor([len(prompt) for prompt in batch])
            logits, states = self._core.prefill(tokens, lengths, self._cache, start)
            self._store(order[start:end], logits, states)
            start = end
        for prompt in distinct:
            first, *others = groups[prompt]
            for other in others:
                self._cache.copy(self._rows[first].slot, self._rows[other].slot, len(prompt))
                assert self._logits is not None
                self._store([other], self._logits[[first]], self._states[[first]])

    def _tensor(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, device=self._core.device)

    def _store(self, rows: Sequence[int], logits: Tensor, states: Tensor) -> None:
        if self._logits is None:
            self._logits = logits.new_zeros(len(self._rows), logits.shape[-1])
            self._states = states.new_zeros(len(self._rows), *states.shape[1:])
        where = self._tensor(list(rows))
        self._logits[where] = logits
        self._states[where] = states
        for row in rows:
            self._rows[row].known = True

    @torch.inference_mode()
    def hidden_states(self, rows: Sequence[int], layers: Sequence[int]) -> Floats:
        self._ensure_known(rows)
        picked: Floats = self._states[self._tensor(list(rows))][:, self._tensor(list(layers))].cpu().numpy()
        return picked

    def _ensure_known(self, rows: Sequence[int]) -> None:
        """Process the last token of the rows that have no logits and states yet."""
        new = [row for row in rows if not self._rows[row].known]
        if new:
            self._move_to_front(new, 0)
            new = self._row_in_slot[: len(new)]
            self._store(new, *self._step(0, new, [self._rows[row].last for row in new], {}, capture=True))

    @torch.inference_mode()
    def generate(
        self,
        rows: Sequence[int],
        limits: Sequence[int],
        injections: Sequence[Injection | None],
        until: str | None,
        sampling: SamplingParams,
        commit: bool = True,
    ) -> list[Completion]:
        check_request(rows, limits, injections, self._core.n_layers, self._core.width)
        completions = {row: Completion([], "", [], "eos" if self._rows[row].ended else "length") for row in rows}
        budget = {
            row: min(limit, self._backend.max_len - self._rows[row].length)
            for row, limit in zip(rows, limits, strict=True)
        }
        steered = {row: injection for row, injection in zip(rows, injections, strict=True) if injection is not None}
        active = [row for row in rows if budget[row] > 0 and not self._rows[row].ended]
        first = [row for row in active if row in steered]
        plain = [row for row in active if row not in steered]
        self._ensure_known(plain)
        self._move_to_front(first, 0)
        self._move_to_front(plain, len(first))
        active_rows = self._row_in_slot[: len(active)]
        undo = None
        if first:
            first = active_rows[: len(first)]
            known = [row for row in first if self._rows[row].known]
            if known and not commit:
                places = self._tensor([self._rows[row].length - 1 for row in known])
                undo = known, places, self._cache.read(self._tensor([self._rows[row].slot for row in known]), places)
            logits = self._inject(first, steered)
        if plain:
            assert self._logits is not None
            kept = self._logits[self._tensor(active_rows[len(first) :])]
            logits = torch.cat([logits, kept]) if first else kept
        if active:
            self._decode(active_rows, logits, completions, budget, until, sampling)
        if undo:
            known, places, held = undo
            self._cache.write(self._tensor([self._rows[row].slot for row in known]), places, held)
        for number in active:
            row, completion = self._rows[number], completions[number]
            completion.text = self._backend.tokenizer.text([*row.prompt[-4:], *row.tokens], completion.tokens)
            if commit:
                row.tokens += completion.tokens
                row.known, row.ended = False, completion.finish == "eos"
        return [completions[row] for row in rows]

    def _inject(self, rows: Sequence[int], steered: dict[int, Injection]) -> Tensor:
        """Process the last token of the rows, from slot 0 on, with the injections."""
        steering: SteeringVectors = {
            layer: (self._tensor(which), torch.from_numpy(added).to(self._core.device))
            for layer, (which, added) in steered_rows([steered[row] for row in rows]).items()
        }
        self._backend._injections_applied += len(rows)
        return self._step(0, rows, [self._rows[row].last for row in rows], steering, capture=False)[0]

    def _step(
        self, ahead: int, rows: Sequence[int], tokens: Sequence[int], steering: SteeringVectors, capture: bool
    ) -> tuple[Tensor, Tensor]:
        """Process one token per row in the first slots, `ahead` positions after their last one."""
        positions = [self._rows[row].length - 1 + ahead for row in rows]
        kv_len = max(positions) + 1
        self._used = max(self._used, kv_len)
        return self._core.step(self._tensor(tokens), self._tensor(positions), kv_len, self._cache, 0, steering, capture)

    def _decode(
        self,
        active_rows: list[int],
        logits: Tensor,
        completions: dict[int, Completion],
        budget: dict[int, int],
        until: str | None,
        sampling: SamplingParams,
    ) -> None:
        """Generate token by token until all rows have finished; finished rows leave the front slots."""
        tokenizer, eos_tokens = self._backend.tokenizer, self._backend.eos_tokens
        delimiter_tokens = tokenizer.delimiter_tokens(until) if until else frozenset()
        ahead = 0
        while True:
            ahead += 1
            tokens, logprobs = self._sample(active_rows, logits, ahead - 1, sampling)
            unfinished, still = [], []
            for place, (row, token, logprob) in enumerate(zip(active_rows, tokens, logprobs, strict=True)):
                completion = completions[row]
                completion.tokens.append(token)
                completion.logprobs.append(logprob)
                finish: Finish | None = None
                if token in eos_tokens:
                    finish = "eos"
                elif token in delimiter_tokens and until in tokenizer.text(self._context(row), completion.tokens):  # type: ignore[operator]
                    finish = "delimiter"
                elif ahead >= budget[row]:
                    finish = "length"
                if finish is None:
                    unfinished.append(row)
                    still.append(place)
                else:
                    completion.finish = finish
            if not unfinished:
                return
            if len(unfinished) < len(active_rows):
                self._move_to_front(unfinished, 0)
                active_rows = self._row_in_slot[: len(unfinished)]
                token_of = dict(zip(unfinished, (tokens[place] for place in still), strict=True))
                tokens = [token_of[row] for row in active_rows]
            logits, _ = self._step(ahead, active_rows, tokens, {}, capture=False)

    def _context(self, row: int) -> list[int]:
        held = self._rows[row]
        return held.tokens if len(held.tokens) >= 4 else [*held.prompt[-4:], *held.tokens]

    def _sample(
        self, rows: Sequence[int], logits: Tensor, ahead: int, sampling: SamplingParams
    ) -> tuple[list[int], list[float]]:
        if sampling.temperature <= 0:
            tokens = logits.argmax(dim=-1, keepdim=True)
            return tokens[:, 0].tolist(), logits.log_softmax(dim=-1).gather(1, tokens)[:, 0].tolist()
        held = [self._rows[row] for row in rows]
        positions = [len(row.tokens) + ahead for row in held]
        drawn, logprobs = draw(logits.cpu().numpy(), [row.seed for row in held], positions, sampling)
        return drawn.tolist(), logprobs.tolist()

    def _move_to_front(self, rows: Sequence[int], start: int) -> None:
        """Move the rows to the slots from `start` on, in any order, with as few swaps as possible."""
        end = start + len(rows)
        outside = [row for row in rows if not start <= self._rows[row].slot < end]
        if not outside:
            return
        wanted = set(rows)
        holes = [slot for slot in range(start, end) if self._row_in_slot[slot] not in wanted]
        for row, slot in zip(outside, holes, strict=True):
            other, place = self._row_in_slot[slot], self._rows[row].slot
            self._cache.swap(slot, place, self._used)
            self._row_in_slot[slot], self._row_in_slot[place] = row, other
            self._rows[row].slot, self._rows[other].slot = slot, place

    def park(self) -> None:
        self._move(torch.device("cpu"))

    def resume(self) -> None:
        self._move(self._core.device)

    @torch.inference_mode()
    def _move(self, device: torch.device) -> None:
        """Move the state of the rows to a device."""
        self._cache.to(device)
        if self._logits is not None:
            self._logits, self._states = self._logits.to(device), self._states.to(device)

    def text(self, row: int) -> str:
        held = self._rows[row]
        return self._backend.tokenizer.text(held.prompt, held.tokens)

    def tokens(self, row: int) -> list[int]:
        return list(self._rows[row].tokens)

    def close(self) -> None:
        self._rows = []
        self._cache = KVCache(0, 0, 1)
        self._logits = None
