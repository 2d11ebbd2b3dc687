"""A forward of our own for models of the Llama family: the same numbers as transformers, at a fraction of the overhead.

Weights are held transposed, queries, keys and values as one matrix, and the rotary embedding is one complex product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .cache import Cache, places, put

Steer = dict[int, tuple[Tensor, Tensor]]
"""By layer: which rows of the batch, and what is added to each: [rows, width]."""


@dataclass(frozen=True)
class _Layer:
    before: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    after: Tensor
    gate_up: Tensor
    down: Tensor


def is_llama(config: Any) -> bool:
    """Whether the forward below is that of the model."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in ("llama", "qwen2")
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
    )


class LlamaCore:
    """Weights taken out of a transformers model, which may be dropped afterwards."""

    def __init__(self, model: Any, max_len: int) -> None:
        config, body = model.config, model.model
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.n_layers, self.width = config.num_hidden_layers, config.hidden_size
        self.eps = config.rms_norm_eps
        self.embedding: Tensor = body.embed_tokens.weight.detach()
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.norm: Tensor = body.norm.weight.detach()
        self.lm_head: Tensor = model.lm_head.weight.detach().t().contiguous()
        rotary = body.rotary_emb
        angles = torch.outer(torch.arange(max_len, device=self.device, dtype=torch.float32), rotary.inv_freq.float())
        self.turns = torch.polar(torch.full_like(angles, rotary.attention_scaling), angles)
        self.layers = [self._layer(layer) for layer in body.layers]

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp

        def paired(rows: Tensor) -> Tensor:
            # Element i is rotated with element i + head/2; lay the two side by side, as one complex number.
            halves = rows.view(-1, 2, self.head // 2, *rows.shape[1:])
            return halves.transpose(1, 2).reshape(rows.shape)

        weights = [paired(attention.q_proj.weight), paired(attention.k_proj.weight), attention.v_proj.weight]
        bias = None
        if attention.q_proj.bias is not None:
            bias = torch.cat([paired(attention.q_proj.bias), paired(attention.k_proj.bias), attention.v_proj.bias])
        out_bias = attention.o_proj.bias
        return _Layer(
            before=layer.input_layernorm.weight.detach(),
            qkv=torch.cat(weights).detach().t().contiguous(),
            qkv_bias=None if bias is None else bias.detach(),
            out=attention.o_proj.weight.detach().t().contiguous(),
            out_bias=None if out_bias is None else out_bias.detach(),
            after=layer.post_attention_layernorm.weight.detach(),
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach().t().contiguous(),
            down=mlp.down_proj.weight.detach().t().contiguous(),
        )

    def prefill(self, tokens: Tensor, lengths: Tensor, cache: Cache, slot: int) -> tuple[Tensor, Tensor]:
        """Fill slots from `slot` on with [rows, longest] prompts; logits and states of each row's last token.

        The rows are padded on the right, where a causal mask hides the padding by itself.
        """
        rows, longest = tokens.shape
        cache.grow(longest)
        turns = self.turns[:longest].repeat(rows, 1)
        last = torch.arange(rows, device=self.device) * longest + lengths - 1

        def attend(q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
            q, k, v = (part.view(rows, longest, -1, self.head).transpose(1, 2) for part in (q, k, v))
            keys, values = cache.layer(number, k)
            keys[slot : slot + rows, :, :longest] = k
            values[slot : slot + rows, :, :longest] = v
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads < self.heads)
            return mixed.transpose(1, 2).reshape(rows * longest, -1)

        return self._run(tokens.reshape(-1), turns, attend, {}, last, capture=True)

    def step(
        self, tokens: Tensor, positions: Tensor, reach: int, cache: Cache, slot: int, steer: Steer, capture: bool
    ) -> tuple[Tensor, Tensor]:
        """One token for each of the slots from `slot` on; `reach` is the longest row with it."""
        rows = len(tokens)
        cache.grow(reach)
        seen = torch.arange(reach, device=self.device) <= positions[:, None]
        mask = torch.zeros(rows, reach, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))
        mask = mask[:, None, None]
        where = places(positions, self.kv_heads, cache.capacity)

        def attend(q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
            keys, values = cache.layer(number, k)
            keys, values = keys[slot : slot + rows], values[slot : slot + rows]
            put(keys, where, k)
            put(values, where, v)
            # Heads that share keys become rows of one query: no copy of the keys.
            q = q.view(rows, self.kv_heads, -1, self.head)
            mixed = F.scaled_dot_product_attention(q, keys[:, :, :reach], values[:, :, :reach], attn_mask=mask)
            return mixed.reshape(rows, -1)

        return self._run(tokens, self.turns[positions], attend, steer, None, capture)

    def _run(
        self, tokens: Tensor, turns: Tensor, attend: Any, steer: Steer, last: Tensor | None, capture: bool
    ) -> tuple[Tensor, Tensor]:
        x = self.embedding[tokens]
        turned = (self.heads + self.kv_heads) * self.head
        turns = turns[:, None]
        states = []
        for number, layer in enumerate(self.layers):
            qkv = _times(self._normed(x, layer.before), layer.qkv, layer.qkv_bias)
            pairs = qkv[:, :turned].float().view(len(qkv), -1, self.head // 2, 2)
            qk = torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(2).to(self.dtype)
            v = qkv[:, turned:].view(len(qkv), self.kv_heads, self.head)
            x = x + _times(attend(qk[:, : self.heads], qk[:, self.heads :], v, number), layer.out, layer.out_bias)
            gate, up = _times(self._normed(x, layer.after), layer.gate_up).chunk(2, dim=-1)
            x = x + _times(F.silu(gate) * up, layer.down)
            if number in steer:
                rows, added = steer[number]
                x[rows] += added.to(x.dtype)
            if capture:
                states.append(x if last is None else x[last])
        if last is not None:
            x = x[last]
        logits = _times(self._normed(x, self.norm), self.lm_head)
        return logits.float(), torch.stack(states, dim=1).float() if capture else x

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), weight, self.eps)


def _times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)
