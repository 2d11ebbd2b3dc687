"""Any causal language model of transformers, through hooks on its layers; for the Llama family `llama.py` is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from looplab.errors import LabError

from .cache import Cache, places, put
from .llama import Steer


class _Window(TransformersCache):
    """Our cache in the form in which a transformers model writes and reads it, for one forward."""

    def __init__(self, cache: Cache, slot: int, rows: int, positions: Tensor | None, reach: int) -> None:
        super().__init__(layers=[])
        self._cache, self._slots, self._positions, self._reach = cache, slice(slot, slot + rows), positions, reach

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        if key_states.shape != value_states.shape:
            raise LabError("the model keeps keys and values of different shapes", hint="use model.backend: vllm")
        keys, values = (held[self._slots] for held in self._cache.layer(layer_idx, key_states))
        if self._positions is None:
            keys[:, :, : self._reach] = key_states
            values[:, :, : self._reach] = value_states
        else:
            where = places(self._positions, keys.shape[1], self._cache.capacity)
            put(keys, where, key_states[:, :, 0])
            put(values, where, value_states[:, :, 0])
        return keys[:, :, : self._reach], values[:, :, : self._reach]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._positions is None else self._reach - 1


class ModuleCore:
    """Hooks on the layers of the module read and add to their outputs."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self.model = model
        self.n_layers, self.width = config.num_hidden_layers, config.hidden_size
        self.device, self.dtype = model.device, model.dtype
        lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
        stacks = [part for part in lists if len(part) == self.n_layers]
        if not stacks:
            raise LabError(f"the layers of a {config.model_type} model were not found")
        self._steer: Steer = {}
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

    def prefill(self, tokens: Tensor, lengths: Tensor, cache: Cache, slot: int) -> tuple[Tensor, Tensor]:
        """Fill slots from `slot` on with [rows, longest] prompts; logits and states of each row's last token."""
        rows, longest = tokens.shape
        cache.grow(longest)
        hidden = torch.ones(longest, longest, dtype=torch.bool, device=self.device).triu(1)
        mask = torch.zeros(longest, longest, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill_(hidden, torch.finfo(self.dtype).min).expand(rows, 1, -1, -1)
        positions = torch.arange(longest, device=self.device).expand(rows, -1)
        self._steer = {}
        self._call(self.model.base_model, tokens, positions, mask, _Window(cache, slot, rows, None, longest))
        # Once more for the last token of each row, which gives logits and states without those of all the others.
        last = tokens.gather(1, lengths[:, None] - 1)[:, 0]
        return self.step(last, lengths - 1, longest, cache, slot, {}, capture=True)

    def step(
        self, tokens: Tensor, positions: Tensor, reach: int, cache: Cache, slot: int, steer: Steer, capture: bool
    ) -> tuple[Tensor, Tensor]:
        """One token for each of the slots from `slot` on; `reach` is the longest row with it."""
        cache.grow(reach)
        seen = torch.arange(reach, device=self.device) <= positions[:, None]
        mask = torch.zeros(len(tokens), reach, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill_(~seen, torch.finfo(self.dtype).min)[:, None, None]
        window = _Window(cache, slot, len(tokens), positions, reach)
        self._steer = steer
        out = self._call(self.model, tokens[:, None], positions[:, None], mask, window)
        return out.logits[:, -1].float(), torch.stack(self._states, dim=1).float()

    def _call(self, module: Any, tokens: Tensor, positions: Tensor, mask: Tensor, window: _Window) -> Any:
        self._states = []
        return module(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=window, use_cache=True
        )
