"""Any causal language model of transformers, with forward hooks on its layers; for Llama `llama.py` is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from looplab.errors import LabError

from .cache import KVCache, flat_indices, write_at
from .llama import SteeringVectors


class _CacheView(TransformersCache):
    """Adapter of our KV cache to the interface of transformers, for one forward pass."""

    def __init__(self, cache: KVCache, slot: int, rows: int, positions: Tensor | None, kv_len: int) -> None:
        super().__init__(layers=[])
        self._cache, self._slots, self._positions, self._kv_len = cache, slice(slot, slot + rows), positions, kv_len

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        if key_states.shape != value_states.shape:
            raise LabError("the model has keys and values of different shapes", hint="use model.backend: vllm")
        keys, values = (held[self._slots] for held in self._cache.layer(layer_idx, key_states))
        if self._positions is None:
            keys[:, :, : self._kv_len] = key_states
            values[:, :, : self._kv_len] = value_states
        else:
            where = flat_indices(self._positions, keys.shape[1], self._cache.capacity)
            write_at(keys, where, key_states[:, :, 0])
            write_at(values, where, value_states[:, :, 0])
        return keys[:, :, : self._kv_len], values[:, :, : self._kv_len]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._positions is None else self._kv_len - 1


class ModuleCore:
    """Runs the model with hooks that read the layers' outputs and add to them."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self.model = model
        self.n_layers, self.width = config.num_hidden_layers, config.hidden_size
        self.device, self.dtype = model.device, model.dtype
        lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
        stacks = [part for part in lists if len(part) == self.n_layers]
        if not stacks:
            raise LabError(f"cannot find the layers of the {config.model_type} model")
        self._steer: SteeringVectors = {}
        self._states: list[Tensor] = []
        for number, layer in enumerate(stacks[0]):
            layer.register_forward_hook(lambda _module, _input, output, number=number: self._hook(number, output))

    def _hook(self, number: int, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        if number in self._steer:
            rows, added = self._steer[number]
            x = x.clone()
            x[rows, -1] += added.to(x.dtype)
        self._states.append(x[:, -1])
        return (x, *output[1:]) if isinstance(output, tuple) else x

    def prefill(self, tokens: Tensor, lengths: Tensor, cache: KVCache, slot: int) -> tuple[Tensor, Tensor]:
        """Prefill slots from `slot` on with [rows, longest] prompts; return logits and states of the last tokens."""
        rows, longest = tokens.shape
        cache.grow(longest)
        hidden = torch.ones(longest, longest, dtype=torch.bool, device=self.device).triu(1)
        mask = torch.zeros(longest, longest, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill_(hidden, torch.finfo(self.dtype).min).expand(rows, 1, -1, -1)
        positions = torch.arange(longest, device=self.device).expand(rows, -1)
        self._steer = {}
        self._call(self.model.base_model, tokens, positions, mask, _CacheView(cache, slot, rows, None, longest))
        # Run the last token of each row again, to get its logits and states without computing those of all tokens.
        last = tokens.gather(1, lengths[:, None] - 1)[:, 0]
        return self.step(last, lengths - 1, longest, cache, slot, {}, capture=True)

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv_len: int,
        cache: KVCache,
        slot: int,
        steering: SteeringVectors,
        capture: bool,
    ) -> tuple[Tensor, Tensor]:
        """Process one token per slot, from `slot` on; `kv_len` is the length of the longest row, including it."""
        cache.grow(kv_len)
        seen = torch.arange(kv_len, device=self.device) <= positions[:, None]
        mask = torch.zeros(len(tokens), kv_len, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill_(~seen, torch.finfo(self.dtype).min)[:, None, None]
        view = _CacheView(cache, slot, len(tokens), positions, kv_len)
        self._steer = steering
        out = self._call(self.model, tokens[:, None], positions[:, None], mask, view)
        return out.logits[:, -1].float(), torch.stack(self._states, dim=1).float()

    def _call(self, module: Any, tokens: Tensor, positions: Tensor, mask: Tensor, view: _CacheView) -> Any:
        self._states = []
        return module(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=view, use_cache=True
        )
