"""The engine's key-value cache, and attention of new tokens to what it holds."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentgym.models.attention import GROUP_SEQUENCES, Variant, attend_padded, within_window

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class KeyValueCache:
    """Keys and values of growing sequences, each in a slot. It holds as many slots, and as many
    tokens of each, as were used so far.
    """

    size: tuple[int, int]  # slots, tokens of each
    keys: list[Tensor]  # of each layer [slots, tokens, KV, D]
    values: list[Tensor]

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
        """num_slots, context_tokens: at most. like: any tensor [...] of the dtype and on the device
        wanted.
        """
        self._most = (num_slots, context_tokens)
        self._num_layers, self._head = num_layers, (num_kv_heads, head_dim)
        self._like = like.new_empty(0)
        self.free()

    def reserve(self, num_slots: int, num_tokens: int) -> None:
        """Make room; twice as much as before where that is more. What is held stays."""
        slots, tokens = held = self.size
        self.size = (
            _grown(slots, num_slots, self._most[0]),
            _grown(tokens, num_tokens, self._most[1]),
        )
        if self.size == held:
            return
        for layers in (self.keys, self.values):
            for layer, before in enumerate(layers):  # one at a time: never twice the whole
                layers[layer] = self._like.new_zeros((*self.size, *self._head))
                layers[layer][:slots, :tokens] = before

    @torch.inference_mode()
    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Let a slot begin with what another holds."""
        self.reserve(target + 1, num_tokens)
        for layer in (*self.keys, *self.values):
            layer[target, :num_tokens] = layer[source, :num_tokens]

    def free(self) -> None:
        """Forget everything and give the memory back."""
        self.size = (0, 0)
        self.keys, self.values = (
            [self._like.view(0, 0, *self._head)] * self._num_layers for _ in range(2)
        )

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in (*self.keys, *self.values))

    @staticmethod
    def of(model: PreTrainedModel, *, num_slots: int, context_tokens: int) -> KeyValueCache:
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


def _grown(held: int, needed: int, most: int) -> int:
    return held if needed <= held else max(needed, min(2 * held, most))


class CachedRows:
    """New tokens of some slots, attending to everything those slots hold."""

    def __init__(
        self, cache: KeyValueCache, slots: list[int], cached: list[int], new: list[int]
    ) -> None:
        """For each sequence: its slot, how many tokens the slot holds already, how many come
        now.
        """
        cache.reserve(max(slots) + 1, max(map(operator.add, cached, new)))
        self.cache, device = cache, cache.keys[0].device
        lengths = torch.tensor(new, device=device)
        ends = torch.cumsum(lengths, 0)
        starts, held = ends - lengths, torch.tensor(cached, device=device)
        sequence = torch.repeat_interleave(torch.arange(len(slots), device=device), lengths)
        self.position = (held - starts)[sequence] + torch.arange(len(sequence), device=device)
        slot = torch.tensor(slots, device=device)
        # in a layer of the cache
        self._place = slot[sequence] * cache.size[1] + self.position
        self.last = ends - 1  # [R] packed index of each sequence's last token
        # sequences of about as many tokens together: each is padded to the longest beside it
        order = sorted(range(len(slots)), key=lambda r: (cached[r] + new[r], r))
        self._groups: list[_SlotGroup] = []
        for alike in ([r for r in order if new[r] == 1], [r for r in order if new[r] > 1]):
            for first in range(0, len(alike), GROUP_SEQUENCES):
                sequences = alike[first : first + GROUP_SEQUENCES]
                self._groups.append(
                    _SlotGroup(
                        slot[sequences],
                        starts[sequences],
                        held[sequences],
                        lengths[sequences],
                        num_new=max(new[r] for r in sequences),
                        length=max(cached[r] + new[r] for r in sequences),
                    )
                )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """query [N, H, D]; key, value [N, KV, D], kept. Result: [N, H, D]."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.flatten(0, 1).index_copy_(0, self._place, key)
        values.flatten(0, 1).index_copy_(0, self._place, value)
        attended = torch.empty_like(query)
        for group in self._groups:
            attended.index_copy_(0, group.token, group.attend(keys, values, query, variant))
        return attended


class _SlotGroup:
    """Rows padded to the longest and attended to at once.
    A sequence shorter than that repeats its last token, which then is the same again.
    """

    def __init__(
        self,
        slots: Tensor,
        starts: Tensor,
        cached: Tensor,
        new: Tensor,
        *,
        num_new: int,
        length: int,
    ) -> None:
        """slots, starts (in the packed tokens), cached, new: [R] of each sequence; num_new, length:
        the most new tokens and the most tokens of any.
        """
        self._slots, self._length = slots, length
        column = torch.minimum(
            torch.arange(num_new, device=slots.device), (new - 1)[:, None]
        )  # [R, T]
        self.token = (starts[:, None] + column).flatten()  # packed index of each
        self._query_position = (cached[:, None] + column)[:, None]
        # [R, 1, T, L]
        mask = torch.arange(length, device=slots.device) <= self._query_position[..., None]
        self._masks: dict[int | None, Tensor] = {None: mask}

    def attend(self, keys: Tensor, values: Tensor, query: Tensor, variant: Variant) -> Tensor:
        """keys, values [S, C, KV, D]; query [N, H, D], of which these are the rows `token`.
        Result: [R * T, H, D], theirs.
        """
        # several times as fast as indexing with a tensor
        own = query.index_select(0, self.token).view(len(self._slots), -1, *query.shape[1:])
        held_keys, held_values = (
            each[:, : self._length].index_select(0, self._slots).transpose(1, 2)
            for each in (keys, values)
        )
        mask = self._mask(variant.window)
        attended = attend_padded(own.transpose(1, 2), held_keys, held_values, mask, variant)
        return attended.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None) -> Tensor:
        """[R, 1, T, L] bool."""
        if window not in self._masks:
            self._masks[window] = within_window(self._masks[None], self._query_position, window)
        return self._masks[window]
