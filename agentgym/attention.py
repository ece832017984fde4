"""Attention over ragged rows, for the learner's packed batches and the engine's key-value cache alike.

A Hugging Face model built with `attn_implementation=RAGGED` runs its linear layers on tokens packed end to end and
hands queries, keys and values to the `layout` its caller passed to `forward`. One model code serves both sides, so
what the engine samples from is what the learner trains.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

RAGGED = "agentgym_ragged"


class Layout(Protocol):
    """Where the tokens of a packed forward belong."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [N, H, D]; key, value [N, KV, D]. Result: [N, H, D]."""
        ...


def _ragged_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, layout: Layout, **_: Any
) -> tuple[Tensor, None]:
    layer = module.layer_idx
    assert isinstance(layer, int)
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    return layout.attend(layer, packed[0], packed[1], packed[2], scaling).unsqueeze(0), None


AttentionInterface.register(RAGGED, _ragged_attention)


def require_ragged(model: Any) -> None:
    """Errors: ValueError where the model would ignore the layout without a word."""
    kind = model.config._attn_implementation
    if kind != RAGGED:
        raise ValueError(f"the model attends by {kind!r}, expected {RAGGED!r}; build it with attn_implementation=RAGGED")


class PackedRows:
    """Rows packed end to end, each attending causally to itself alone."""

    def __init__(self, starts: Tensor) -> None:
        """starts: [B + 1] int; row b is tokens starts[b]:starts[b + 1]."""
        lengths = starts[1:] - starts[:-1]
        self.num_rows, self.longest = len(lengths), int(lengths.max())
        self.row = torch.repeat_interleave(torch.arange(self.num_rows, device=starts.device), lengths)
        self.position = torch.arange(int(starts[-1]), device=starts.device) - starts[self.row]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Pads for the attention alone; right padding never reaches a real query under a causal mask."""
        padded = scaled_dot_product_attention(
            self._pad(query), self._pad(key), self._pad(value), is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return padded.transpose(1, 2)[self.row, self.position]

    def _pad(self, packed: Tensor) -> Tensor:
        padded = packed.new_zeros(self.num_rows, self.longest, *packed.shape[1:])
        return padded.index_put((self.row, self.position), packed).transpose(1, 2)


class KeyValueCache:
    """Keys and values of `num_slots` growing rows."""

    def __init__(self, *, num_layers: int, num_slots: int, context_tokens: int, num_kv_heads: int, head_dim: int, like: Tensor) -> None:
        shape = (num_layers, num_slots, context_tokens, num_kv_heads, head_dim)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)


class CachedRows:
    """New tokens of some slots, attending to everything those slots hold."""

    def __init__(self, cache: KeyValueCache, slots: list[int], cached: list[int], new: list[int]) -> None:
        """For each row: its slot, how many tokens the slot holds already, how many come now."""
        device = cache.keys.device
        self.cache = cache
        self.rows = torch.tensor(slots, device=device)
        lengths = torch.tensor(new, device=device)
        self.row = torch.repeat_interleave(torch.arange(len(slots), device=device), lengths)
        ends = torch.cumsum(lengths, 0)
        self.column = torch.arange(int(ends[-1]), device=device) - (ends - lengths)[self.row]
        self.position = torch.tensor(cached, device=device)[self.row] + self.column
        self.slot = self.rows[self.row]
        self.last = ends - 1  # [R] packed index of each row's last token
        self.num_new, self.length = max(new), max(c + n for c, n in zip(cached, new, strict=True))
        query_position = torch.tensor(cached, device=device)[:, None] + torch.arange(self.num_new, device=device)
        self.mask = (torch.arange(self.length, device=device) <= query_position[:, :, None]).unsqueeze(1)  # [R, 1, T, L]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slot, self.position] = key
        values[self.slot, self.position] = value
        padded = query.new_zeros(len(self.rows), self.num_new, *query.shape[1:])
        padded[self.row, self.column] = query
        attended = scaled_dot_product_attention(
            padded.transpose(1, 2),
            keys[self.rows, : self.length].transpose(1, 2),
            values[self.rows, : self.length].transpose(1, 2),
            attn_mask=self.mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended.transpose(1, 2)[self.row, self.column]
