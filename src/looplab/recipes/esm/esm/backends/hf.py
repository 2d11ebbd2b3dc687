"""A transformers checkpoint under a decoding loop of our own: batched, steered by row, and never computing twice.

A row keeps the keys and values of its whole prefix, and for its last token also the logits and the states of all
layers. So a control point costs one token, a null probe nothing but its own tokens, and finished rows leave the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from looplab.errors import LabError

from .base import Finish, Floats, Injection, Piece, Sampling, check_request
from .cache import Cache
from .checkpoint import Words, end_tokens, fingerprint, model_folder, steered_rows
from .draw import draw
from .llama import LlamaCore, Steer, is_llama
from .module import ModuleCore

PREFILL = 4096
"""Tokens that are prefilled in one forward, padding included."""


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
        chat: bool = False,
        fast: bool = True,
    ) -> None:
        """`fast=False` keeps to the hooks of `module.py` where `llama.py` would do."""
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
            raise LabError(f"the model could not be loaded: {error}", file=folder) from error
        config = model.config
        if not set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}:
            raise LabError(
                f"a {config.model_type} model has layers without keys and values", hint="use model.backend: vllm"
            )
        limits = (max_model_len, getattr(config, "max_position_embeddings", None), _window(config))
        self.max_len = min(limit for limit in limits if limit)
        self.fingerprint = fingerprint(folder)
        self.words = Words(tokenizer, chat)
        self.ends = end_tokens(model.generation_config, tokenizer)
        with torch.inference_mode():
            self.core: LlamaCore | ModuleCore = ModuleCore(model) if not fast else _core(model, self.max_len)
        self.n_layers, self.width = self.core.n_layers, self.core.width
        self._fired = 0

    def wrap(self, prompt: str) -> str:
        return self.words.wrap(prompt)

    @torch.inference_mode()
    def open(self, prompts: Sequence[str], seeds: Sequence[int]) -> HFSession:
        return HFSession(self, prompts, seeds)

    def fired(self) -> int:
        return self._fired

    def close(self) -> None:
        del self.core


def _window(config: Any) -> int | None:
    """Beyond a sliding window a row would have to forget, which our cache does not."""
    kinds = getattr(config, "layer_types", None)
    used = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    return getattr(config, "sliding_window", None) if used else None


def _core(model: Any, max_len: int) -> LlamaCore | ModuleCore:
    """The fast forward where it is the model's, shown on a few tokens; else the module itself."""
    if not is_llama(model.config) or _window(model.config):
        return ModuleCore(model)
    core = LlamaCore(model, max_len)
    size = min(12, max_len - 1)
    tokens = torch.arange(1, size + 1, device=model.device)[None] % model.config.vocab_size
    wanted = model(input_ids=tokens).logits[:, -1].float()
    lengths = torch.tensor([size], device=model.device)
    found, _ = core.prefill(tokens, lengths, Cache(core.n_layers, 1, size), 0)
    slack = 1e-4 if core.dtype == torch.float32 else 5e-2
    close = torch.allclose(found, wanted, rtol=slack, atol=slack * float(wanted.abs().max()))
    return core if close else ModuleCore(model)


@dataclass
class _Row:
    prompt: list[int]
    seed: int
    slot: int = 0
    tokens: list[int] = field(default_factory=list)
    """Generated ones."""
    known: bool = False
    """Whether keys, values, logits and states of its last token are there, with nothing injected into it."""
    ended: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[-1]


class HFSession:
    """Rows live in the slots of one cache; those at work are brought to the front, so a forward sees them as a view."""

    def __init__(self, backend: HFBackend, prompts: Sequence[str], seeds: Sequence[int]) -> None:
        self._backend, self._core = backend, backend.core
        encoded = backend.words.encode(prompts, backend.max_len)
        self._rows = [_Row(tokens, seed) for tokens, seed in zip(encoded, seeds, strict=True)]
        longest = max((row.length for row in self._rows), default=1)
        self._cache = Cache(self._core.n_layers, len(self._rows), longest + 64)
        self._at: list[int] = [0] * len(self._rows)
        """Which row is in a slot."""
        self._used = longest
        """Positions of the cache that were ever written."""
        self._prefill()

    def _prefill(self) -> None:
        """Each distinct prompt once, those of like length together."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, row in enumerate(self._rows):
            groups.setdefault(tuple(row.prompt), []).append(number)
        distinct = sorted(groups, key=len)
        order = [groups[prompt][0] for prompt in distinct]
        order += [number for prompt in distinct for number in groups[prompt][1:]]
        for slot, number in enumerate(order):
            self._rows[number].slot = slot
        self._at = order
        start = 0
        self._logits: Tensor | None = None
        while start < len(distinct):
            end = start + 1
            while end < len(distinct) and (end + 1 - start) * len(distinct[end]) <= PREFILL:
                end += 1
            batch, longest = distinct[start:end], len(distinct[end - 1])
            tokens = self._tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in batch])
            lengths = self._tensor([len(prompt) for prompt in batch])
            logits, states = self._core.prefill(tokens, lengths, self._cache, start)
            self._keep(order[start:end], logits, states)
            start = end
        for prompt in distinct:
            first, *others = groups[prompt]
            for other in others:
                self._cache.copy(self._rows[first].slot, self._rows[other].slot, len(prompt))
                assert self._logits is not None
                self._keep([other], self._logits[[first]], self._states[[first]])

    def _tensor(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, device=self._core.device)

    def _keep(self, rows: Sequence[int], logits: Tensor, states: Tensor) -> None:
        if self._logits is None:
            self._logits = logits.new_zeros(len(self._rows), logits.shape[-1])
            self._states = states.new_zeros(len(self._rows), *states.shape[1:])
        where = self._tensor(list(rows))
        self._logits[where] = logits
        self._states[where] = states
        for row in rows:
            self._rows[row].known = True

    @torch.inference_mode()
    def states(self, rows: Sequence[int], layers: Sequence[int]) -> Floats:
        self._learn(rows)
        picked: Floats = self._states[self._tensor(list(rows))][:, self._tensor(list(layers))].cpu().numpy()
        return picked

    def _learn(self, rows: Sequence[int]) -> None:
        """Forward the last token of the rows where that was not done yet."""
        new = [row for row in rows if not self._rows[row].known]
        if new:
            self._gather(new, 0)
            new = self._at[: len(new)]
            self._keep(new, *self._step(0, new, [self._rows[row].last for row in new], {}, capture=True))

    @torch.inference_mode()
    def generate(
        self,
        rows: Sequence[int],
        limits: Sequence[int],
        injections: Sequence[Injection | None],
        until: str | None,
        sampling: Sampling,
        commit: bool = True,
    ) -> list[Piece]:
        check_request(rows, limits, injections, self._core.n_layers, self._core.width)
        pieces = {row: Piece([], "", [], "eos" if self._rows[row].ended else "length") for row in rows}
        room = {
            row: min(limit, self._backend.max_len - self._rows[row].length)
            for row, limit in zip(rows, limits, strict=True)
        }
        steered = {row: injection for row, injection in zip(rows, injections, strict=True) if injection is not None}
        active = [row for row in rows if room[row] > 0 and not self._rows[row].ended]
        first = [row for row in active if row in steered]
        plain = [row for row in active if row not in steered]
        self._learn(plain)
        self._gather(first, 0)
        self._gather(plain, len(first))
        at_work = self._at[: len(active)]
        undo = None
        if first:
            first = at_work[: len(first)]
            known = [row for row in first if self._rows[row].known]
            if known and not commit:
                places = self._tensor([self._rows[row].length - 1 for row in known])
                undo = known, places, self._cache.read(self._tensor([self._rows[row].slot for row in known]), places)
            logits = self._inject(first, steered)
        if plain:
            assert self._logits is not None
            kept = self._logits[self._tensor(at_work[len(first) :])]
            logits = torch.cat([logits, kept]) if first else kept
        if active:
            self._decode(at_work, logits, pieces, room, until, sampling)
        if undo:
            known, places, held = undo
            self._cache.write(self._tensor([self._rows[row].slot for row in known]), places, held)
        for number in active:
            row, piece = self._rows[number], pieces[number]
            piece.text = self._backend.words.text([*row.prompt[-4:], *row.tokens], piece.tokens)
            if commit:
                row.tokens += piece.tokens
                row.known, row.ended = False, piece.finish == "eos"
        return [pieces[row] for row in rows]

    def _inject(self, rows: Sequence[int], steered: dict[int, Injection]) -> Tensor:
        """Forward the last token of the rows, from slot 0 on, with the injections added."""
        steer: Steer = {
            layer: (self._tensor(which), torch.from_numpy(added).to(self._core.device))
            for layer, (which, added) in steered_rows([steered[row] for row in rows]).items()
        }
        self._backend._fired += len(rows)
        return self._step(0, rows, [self._rows[row].last for row in rows], steer, capture=False)[0]

    def _step(
        self, ahead: int, rows: Sequence[int], tokens: Sequence[int], steer: Steer, capture: bool
    ) -> tuple[Tensor, Tensor]:
        """One token for the rows in the first slots, `ahead` places after their last one."""
        positions = [self._rows[row].length - 1 + ahead for row in rows]
        reach = max(positions) + 1
        self._used = max(self._used, reach)
        return self._core.step(self._tensor(tokens), self._tensor(positions), reach, self._cache, 0, steer, capture)

    def _decode(
        self,
        at_work: list[int],
        logits: Tensor,
        pieces: dict[int, Piece],
        room: dict[int, int],
        until: str | None,
        sampling: Sampling,
    ) -> None:
        """Token by token until every row has finished; a row that has leaves the front slots."""
        words, ends = self._backend.words, self._backend.ends
        enders = words.enders(until) if until else frozenset()
        ahead = 0
        while True:
            ahead += 1
            tokens, logprobs = self._choose(at_work, logits, ahead - 1, sampling)
            going, still = [], []
            for place, (row, token, logprob) in enumerate(zip(at_work, tokens, logprobs, strict=True)):
                piece = pieces[row]
                piece.tokens.append(token)
                piece.logprobs.append(logprob)
                finish: Finish | None = None
                if token in ends:
                    finish = "eos"
                elif token in enders and until in words.text(self._before(row), piece.tokens):  # type: ignore[operator]
                    finish = "delimiter"
                elif ahead >= room[row]:
                    finish = "length"
                if finish is None:
                    going.append(row)
                    still.append(place)
                else:
                    piece.finish = finish
            if not going:
                return
            if len(going) < len(at_work):
                self._gather(going, 0)
                at_work = self._at[: len(going)]
                token_of = dict(zip(going, (tokens[place] for place in still), strict=True))
                tokens = [token_of[row] for row in at_work]
            logits, _ = self._step(ahead, at_work, tokens, {}, capture=False)

    def _before(self, row: int) -> list[int]:
        held = self._rows[row]
        return held.tokens if len(held.tokens) >= 4 else [*held.prompt[-4:], *held.tokens]

    def _choose(
        self, rows: Sequence[int], logits: Tensor, ahead: int, sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        if sampling.temperature <= 0:
            tokens = logits.argmax(dim=-1, keepdim=True)
            return tokens[:, 0].tolist(), logits.log_softmax(dim=-1).gather(1, tokens)[:, 0].tolist()
        held = [self._rows[row] for row in rows]
        positions = [len(row.tokens) + ahead for row in held]
        drawn, logprobs = draw(logits.cpu().numpy(), [row.seed for row in held], positions, sampling)
        return drawn.tolist(), logprobs.tolist()

    def _gather(self, rows: Sequence[int], start: int) -> None:
        """Bring the rows into the slots from `start` on, in any order, with the fewest exchanges."""
        end = start + len(rows)
        outside = [row for row in rows if not start <= self._rows[row].slot < end]
        if not outside:
            return
        wanted = set(rows)
        holes = [slot for slot in range(start, end) if self._at[slot] not in wanted]
        for row, slot in zip(outside, holes, strict=True):
            other, place = self._at[slot], self._rows[row].slot
            self._cache.swap(slot, place, self._used)
            self._at[slot], self._at[place] = row, other
            self._rows[row].slot, self._rows[other].slot = slot, place

    def text(self, row: int) -> str:
        held = self._rows[row]
        return self._backend.words.text(held.prompt, held.tokens)

    def tokens(self, row: int) -> list[int]:
        return list(self._rows[row].tokens)

    def close(self) -> None:
        self._rows = []
        self._cache = Cache(0, 0, 1)
        self._logits = None
