"""Our own forward pass for Llama models: the same numbers as transformers, at a fraction of the overhead.

Weights are stored transposed, with queries, keys and values in one matrix; the rotary embedding is a complex product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .cache import KVCache, flat_indices, write_at

SteeringVectors = dict[int, tuple[Tensor, Tensor]]
"""By layer: rows of the batch, and the vectors added to them [rows, width]."""


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up: Tensor
    down: Tensor


def is_llama(config: Any) -> bool:
    """Return whether this module implements the model's forward pass."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in ("llama", "qwen2")
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
    )


class LlamaCore:
    """Copies the weights of a transformers model, which can be deleted afterwards."""

    def __init__(self, model: Any, max_len: int) -> None:
        config, body = model.config, model.model
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.n_layers, self.width = config.num_hidden_layers, config.hidden_size
        self.eps = config.rms_norm_eps
        self.embedding: Tensor = body.embed_tokens.weight.detach()
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.norm: Tensor = body.norm.weight.detach()
        self.lm_head: Tensor = model.lm_head.weight.detach().t().contiguous()
        rotary = body.rotary_emb
        angles = torch.outer(torch.arange(max_len, device=self.device, dtype=torch.float32), rotary.inv_freq.float())
        self.rotary = torch.polar(torch.full_like(angles, rotary.attention_scaling), angles)
        self.layers = [self._layer(layer) for layer in body.layers]

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp

        def interleave(rows: Tensor) -> Tensor:
            # Element i is rotated together with element i + head_dim/2: interleave them as complex numbers.
            halves = rows.view(-1, 2, self.head_dim // 2, *rows.shape[1:])
            return halves.transpose(1, 2).reshape(rows.shape)

        weights = [interleave(attention.q_proj.weight), interleave(attention.k_proj.weight), attention.v_proj.weight]
        bias = None
        if attention.q_proj.bias is not None:
            bias = torch.cat(
                [interleave(attention.q_proj.bias), interleave(attention.k_proj.bias), attention.v_proj.bias]
            )
        out_bias = attention.o_proj.bias
        return _Layer(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=torch.cat(weights).detach().t().contiguous(),
            qkv_bias=None if bias is None else bias.detach(),
            out=attention.o_proj.weight.detach().t().contiguous(),
            out_bias=None if out_bias is None else out_bias.detach(),
            post_attention_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach().t().contiguous(),
            down=mlp.down_proj.weight.detach().t().contiguous(),
        )

    def prefill(self, tokens: Tensor, lengths: Tensor, cache: KVCache, slot: int) -> tuple[Tensor, Tensor]:
        """Prefill the slots from `slot` on with [rows, longest] prompts; return logits and states of the last tokens.

        Rows are padded on the right, where the causal mask hides the padding.
        """
        rows, longest = tokens.shape
        cache.grow(longest)
        rotary = self.rotary[:longest].repeat(rows, 1)
        last = torch.arange(rows, device=self.device) * longest + lengths - 1

        def attend(q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
            q, k, v = (part.view(rows, longest, -1, self.head_dim).transpose(1, 2) for part in (q, k, v))
            keys, values = cache.layer(number, k)
            keys[slot : slot + rows, :, :longest] = k
            values[slot : slot + rows, :, :longest] = v
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads < self.heads)
            return attended.transpose(1, 2).reshape(rows * longest, -1)

        return self._run(tokens.reshape(-1), rotary, attend, {}, last, capture=True)

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
        rows = len(tokens)
        cache.grow(kv_len)
        seen = torch.arange(kv_len, device=self.device) <= positions[:, None]
        mask = torch.zeros(rows, kv_len, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))
        mask = mask[:, None, None]
        where = flat_indices(positions, self.kv_heads, cache.capacity)

        def attend(q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
            keys, values = cache.layer(number, k)
            keys, values = keys[slot : slot + rows], values[slot : slot + rows]
            write_at(keys, where, k)
            write_at(values, where, v)
            # Query heads that share keys become one query, so that keys are not copied.
            q = q.view(rows, self.kv_heads, -1, self.head_dim)
            attended = F.scaled_dot_product_attention(q, keys[:, :, :kv_len], values[:, :, :kv_len], attn_mask=mask)
            return attended.reshape(rows, -1)

        return self._run(tokens, self.rotary[positions], attend, steering, None, capture)

    def _run(
        self, tokens: Tensor, rotary: Tensor, attend: Any, steering: SteeringVectors, last: Tensor | None, capture: bool
    ) -> tuple[Tensor, Tensor]:
        x = self.embedding[tokens]
        rotary_width = (self.heads + self.kv_heads) * self.head_dim
        rotary = rotary[:, None]
        states = []
        for number, layer in enumerate(self.layers):
            qkv = _linear(self._rms_norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
            pairs = qkv[:, :rotary_width].float().view(len(qkv), -1, self.head_dim // 2, 2)
            qk = torch.view_as_real(torch.view_as_complex(pairs) * rotary).flatten(2).to(self.dtype)
            v = qkv[:, rotary_width:].view(len(qkv), self.kv_heads, self.head_dim)
            x = x + _linear(attend(qk[:, : self.heads], qk[:, self.heads :], v, number), layer.out, layer.out_bias)
            gate, up = _linear(self._rms_norm(x, layer.post_attention_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + _linear(F.silu(gate) * up, layer.down)
            if number in steering:
                rows, added = steering[number]
                x[rows] += added.to(x.dtype)
            if capture:
                states.append(x if last is None else x[last])
        if last is not None:
            x = x[last]
        logits = _linear(self._rms_norm(x, self.norm), self.lm_head)
        return logits.float(), torch.stack(states, dim=1).float() if capture else x

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), weight, self.eps)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)
