"""Attention over ragged rows, for the learner's packed batches and the engine's key-value cache
alike.

A Hugging Face model built with `attn_implementation=RAGGED` runs its linear layers on tokens packed
end to end and hands queries, keys and values to the `layout` its caller passed to `forward`.
One model code serves both sides, so what the engine samples from is what the learner trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

RAGGED = "agentgym_ragged"


class Layout(Protocol):
    """Where the tokens of a packed forward belong."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """query [N, H, D]; key, value [N, KV, D]. Result: [N, H, D]."""
        ...


@dataclass(frozen=True, slots=True)
class Variant:
    """How a layer attends, beside causally."""

    scaling: float | None = None  # of the scores; None: 1 / sqrt(D)
    window: int | None = None  # a token sees itself and the window - 1 before it; None: all
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


# arguments a model may hand to its attention that say nothing of its own about the result
_HARMLESS = ("position_ids", "cache_position", "use_cache", "output_attentions", "dropout")


def _ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Errors: ValueError where the model asks for what is not computed here."""
    unknown = [name for name, given in others.items() if given is not None and given is not False]
    unknown = [name for name in unknown if name not in _HARMLESS]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        unknown.append("is_causal=False")
    if module.training and others.get("dropout"):
        unknown.append("dropout while training")
    if unknown:
        raise ValueError(f"{type(module).__name__} attends with {', '.join(unknown)}, unsupported")
    layer = module.layer_idx
    assert isinstance(layer, int)
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    variant = Variant(scaling, sliding_window, softcap)
    return layout.attend(layer, packed[0], packed[1], packed[2], variant).unsqueeze(0), None


AttentionInterface.register(RAGGED, _ragged_attention)


def require_ragged(model: Any) -> None:
    """Errors: ValueError where the model would ignore the layout without a word."""
    kind = model.config._attn_implementation
    if kind != RAGGED:
        raise ValueError(
            f"the model attends by {kind!r}, expected {RAGGED!r}; build it with"
            " attn_implementation=RAGGED"
        )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, variant: Variant
) -> Tensor:
    """query [R, H, T, D]; key, value [R, KV, L, D]; mask: bool, broadcast to [R, 1, T, L], true
    where a token may look; None: causal. Result: [R, H, T, D]."""
    grouped = query.shape[1] != key.shape[1]
    if variant.softcap is None:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=variant.scaling,
            enable_gqa=grouped,
        )
    assert mask is not None
    if grouped:
        key, value = (
            tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value)
        )
    scaling = query.shape[-1] ** -0.5 if variant.scaling is None else variant.scaling
    scores = variant.softcap * torch.tanh(query @ key.transpose(2, 3) * scaling / variant.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value


def _within(mask: Tensor, query_position: Tensor, window: int | None) -> Tensor:
    """mask [..., T, L] without the keys that lie a window or more before the query."""
    if window is None:
        return mask
    keys = torch.arange(mask.shape[-1], device=mask.device)
    return mask & (keys > query_position[..., None] - window)


class PackedRows:
    """Rows packed end to end, each attending causally to itself alone."""

    def __init__(self, starts: Tensor) -> None:
        """starts: [B + 1] int; row b is tokens starts[b]:starts[b + 1]."""
        lengths = starts[1:] - starts[:-1]
        self.num_rows, self.longest = len(lengths), int(lengths.max())
        self.row = torch.repeat_interleave(
            torch.arange(self.num_rows, device=starts.device), lengths
        )
        self.position = torch.arange(int(starts[-1]), device=starts.device) - starts[self.row]
        self._masks: dict[int | None, Tensor] = {}  # by window, shared by the layers of a forward

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """Pads for the attention alone; right padding never reaches a real query."""
        padded = [self._pad(tensor) for tensor in (query, key, value)]
        attended = _attend(padded[0], padded[1], padded[2], self._mask(variant), variant)
        return attended.transpose(1, 2)[self.row, self.position]

    def _mask(self, variant: Variant) -> Tensor | None:
        """[T, L], or None where plain causal attention is meant: the kernels have that built in."""
        if variant.softcap is None and (variant.window is None or variant.window >= self.longest):
            return None
        if variant.window not in self._masks:
            places = torch.arange(self.longest, device=self.row.device)
            causal = places <= places[:, None]
            self._masks[variant.window] = _within(causal, places, variant.window)
        return self._masks[variant.window]

    def _pad(self, packed: Tensor) -> Tensor:
        padded = packed.new_zeros(self.num_rows, self.longest, *packed.shape[1:])
        return padded.index_put((self.row, self.position), packed).transpose(1, 2)


class KeyValueCache:
    """Keys and values of `num_slots` growing rows."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        context_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        like: Tensor,
    ) -> None:
        shape = (num_layers, num_slots, context_tokens, num_kv_heads, head_dim)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)

    @staticmethod
    def of(model: Any, *, num_slots: int, context_tokens: int) -> KeyValueCache:
        """An empty one that fits the model."""
        config = model.config
        heads = config.num_attention_heads
        return KeyValueCache(
            num_layers=config.num_hidden_layers,
            num_slots=num_slots,
            context_tokens=context_tokens,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            like=next(model.parameters()),
        )


class CachedRows:
    """New tokens of some slots, attending to everything those slots hold."""

    def __init__(
        self, cache: KeyValueCache, slots: list[int], cached: list[int], new: list[int]
    ) -> None:
        """For each row: its slot, how many tokens the slot holds already, how many come now."""
        device = cache.keys.device
        self.cache = cache
        lengths = torch.tensor(new, device=device)
        row = torch.repeat_interleave(torch.arange(len(slots), device=device), lengths)
        ends = torch.cumsum(lengths, 0)
        column = torch.arange(int(ends[-1]), device=device) - (ends - lengths)[row]
        self.position = torch.tensor(cached, device=device)[row] + column
        self.slot = torch.tensor(slots, device=device)[row]
        self.last = ends - 1  # [R] packed index of each row's last token
        # one new token beside many would be padded to as many
        single = [index for index, count in enumerate(new) if count == 1]
        several = [index for index, count in enumerate(new) if count > 1]
        self._groups = [
            _SlotGroup.of(cache, group, slots, cached, new, ends - lengths)
            for group in (single, several)
            if group
        ]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slot, self.position] = key
        values[self.slot, self.position] = value
        attended = torch.empty_like(query)
        for group in self._groups:
            attended[group.token] = group.attend(keys, values, query, variant)
        return attended


class _SlotGroup:
    """Rows of about as many new tokens, padded to the longest and attended to at once."""

    @staticmethod
    def of(
        cache: KeyValueCache,
        rows: list[int],
        slots: list[int],
        cached: list[int],
        new: list[int],
        starts: Tensor,
    ) -> _SlotGroup:
        """rows: which of those that slots, cached and new tell of; starts: where each begins in
        the packed tokens.
        """
        return _SlotGroup(
            cache,
            [slots[r] for r in rows],
            [cached[r] for r in rows],
            [new[r] for r in rows],
            starts[rows],
        )

    def __init__(
        self,
        cache: KeyValueCache,
        slots: list[int],
        cached: list[int],
        new: list[int],
        starts: Tensor,
    ) -> None:
        device, num_slots = cache.keys.device, cache.keys.shape[1]
        # where most slots take part all do, the idle ones for nothing: their keys and values need
        # not be copied then
        self._slots = (
            None
            if max(new) == 1 and 2 * len(slots) > num_slots
            else torch.tensor(slots, device=device)
        )
        batch = torch.tensor(slots if self._slots is None else range(len(slots)), device=device)
        lengths = torch.tensor(new, device=device)
        row = torch.repeat_interleave(torch.arange(len(slots), device=device), lengths)
        self._column = (
            torch.arange(len(row), device=device) - (torch.cumsum(lengths, 0) - lengths)[row]
        )
        self._row = batch[row]
        self.token = starts[row] + self._column  # packed index of each
        self._num_rows, self._num_new = num_slots if self._slots is None else len(slots), max(new)
        self._length = max(c + n for c, n in zip(cached, new, strict=True))
        first = torch.zeros(self._num_rows, dtype=torch.int64, device=device)
        first[batch] = torch.tensor(cached, device=device)
        self._query_position = first[:, None, None] + torch.arange(self._num_new, device=device)
        # [R, 1, T, L]
        mask = torch.arange(self._length, device=device) <= self._query_position[..., None]
        self._masks: dict[int | None, Tensor] = {None: mask}

    def attend(self, keys: Tensor, values: Tensor, query: Tensor, variant: Variant) -> Tensor:
        """keys, values [S, C, KV, D]; query [N, H, D], of which these are the rows `token`.
        Result: theirs.
        """
        padded = query.new_zeros(self._num_rows, self._num_new, *query.shape[1:])
        padded[self._row, self._column] = query[self.token]
        held = [
            (
                each[:, : self._length]
                if self._slots is None
                else each[self._slots, : self._length]
            ).transpose(1, 2)
            for each in (keys, values)
        ]
        attended = _attend(
            padded.transpose(1, 2), held[0], held[1], self._mask(variant.window), variant
        )
        return attended.transpose(1, 2)[self._row, self._column]

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            self._masks[window] = _within(self._masks[None], self._query_position, window)
        return self._masks[window]
