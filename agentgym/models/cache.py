"""The engine's key-value cache, and attention of new tokens to the cached ones."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentgym.models.attention import GROUP_SEQUENCES, Variant, attend_padded, within_window

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class KeyValueCache:
    """Keys and values of growing sequences, each in a slot. Memory grows with the number of slots
    and of tokens per slot that were used so far.
    """

    size: tuple[int, int]  # slots, tokens per slot
    keys: list[Tensor]  # per layer [slots, tokens, KV, D]
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
        """Begin with an empty cache.
        num_slots, context_tokens: maxima, which callers must not exceed. like: any tensor of the
        cache's dtype and device.
        """
        self._most = (num_slots, context_tokens)
        self._num_layers, self._head = num_layers, (num_kv_heads, head_dim)
        self._like = like.new_empty(0)
        self.free()

    def reserve(self, num_slots: int, num_tokens: int) -> None:
        """Make room for these numbers of slots and of tokens per slot; keep contents.
        A dimension that must grow at least doubles, up to its limit.
        """
        slots, tokens = before = self.size
        most_slots, most_tokens = self._most
        self.size = _grown(slots, num_slots, most_slots), _grown(tokens, num_tokens, most_tokens)
        if self.size == before:
            return
        for layers in (self.keys, self.values):
            for layer, previous in enumerate(layers):  # one at a time, to save memory
                layers[layer] = self._like.new_zeros((*self.size, *self._head))
                layers[layer][:slots, :tokens] = previous

    @torch.inference_mode()
    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` of slot `source` to slot `target`; make room for them."""
        self.reserve(target + 1, num_tokens)
        for layer in (*self.keys, *self.values):
            layer[target, :num_tokens] = layer[source, :num_tokens]

    def free(self) -> None:
        """Drop all contents and release the memory."""
        self.size = (0, 0)
        self.keys, self.values = (
            [self._like.view(0, 0, *self._head)] * self._num_layers for _ in range(2)
        )

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in (*self.keys, *self.values))

    @staticmethod
    def of(model: PreTrainedModel, *, num_slots: int, context_tokens: int) -> KeyValueCache:
        """Make an empty cache that fits the model."""
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


def _grown(current: int, needed: int, limit: int) -> int:
    return current if needed <= current else max(needed, min(2 * current, limit))


class CachedRows:
    """A `Layout` of new tokens: each attends to itself and to the tokens before it in its slot."""

    def __init__(
        self, cache: KeyValueCache, slots: list[int], cached: list[int], new: list[int]
    ) -> None:
        """Reserve room in the cache and group the R sequences by length.
        slots, cached, new: [R] slot of each sequence, number of its cached and of its new tokens.
        """
        cache.reserve(max(slots) + 1, max(map(operator.add, cached, new)))
        self.cache, device = cache, cache.keys[0].device
        lengths = torch.tensor(new, device=device)
        ends = torch.cumsum(lengths, 0)
        starts, num_cached = ends - lengths, torch.tensor(cached, device=device)
        sequence = torch.repeat_interleave(torch.arange(len(slots), device=device), lengths)
        self.position = (num_cached - starts)[sequence] + torch.arange(len(sequence), device=device)
        slot = torch.tensor(slots, device=device)
        # [N] index of each new token in a layer of the cache
        self._place = slot[sequence] * cache.size[1] + self.position
        self.last = ends - 1  # [R] packed index of each sequence's last token
        # group sequences of similar length: each is padded to the longest of its group
        order = sorted(range(len(slots)), key=lambda index: (cached[index] + new[index], index))
        sequences = torch.stack([slot, starts, num_cached, lengths])
        self._groups: list[_SlotGroup] = []
        for alike in (
            [index for index in order if new[index] == 1],
            [index for index in order if new[index] > 1],
        ):
            for first in range(0, len(alike), GROUP_SEQUENCES):
                members = alike[first : first + GROUP_SEQUENCES]
                num_new = max(new[index] for index in members)
                length = max(cached[index] + new[index] for index in members)
                group = _SlotGroup(sequences[:, members], num_new=num_new, length=length)
                self._groups.append(group)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """Store key and value of the new tokens in the cache, and attend.
        query [N, H, D]; key, value [N, KV, D]. Result: [N, H, D].
        """
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.flatten(0, 1).index_copy_(0, self._place, key)
        values.flatten(0, 1).index_copy_(0, self._place, value)
        attended = torch.empty_like(query)
        for group in self._groups:
            attended.index_copy_(0, group.token, group.attend(keys, values, query, variant))
        return attended


class _SlotGroup:
    """R sequences, padded to the longest and attended to in one call.
    A shorter sequence repeats its last token, which gives the same result again.
    """

    def __init__(self, sequences: Tensor, *, num_new: int, length: int) -> None:
        """Compute the padded indices and the mask.
        sequences: [4, R], the slot of each, its start in the packed tokens, and its numbers of
        cached and of new tokens; num_new, length (T, L): the largest number of new tokens and of
        all tokens of a sequence.
        """
        slots, starts, cached, new = sequences
        self._slots, self._length = slots, length
        # [R, T]
        column = torch.minimum(torch.arange(num_new, device=slots.device), (new - 1)[:, None])
        self.token = (starts[:, None] + column).flatten()  # packed indices of the padded tokens
        self._query_position = (cached[:, None] + column)[:, None]
        # [R, 1, T, L]
        mask = torch.arange(length, device=slots.device) <= self._query_position[..., None]
        self._masks: dict[int | None, Tensor] = {None: mask}

    def attend(self, keys: Tensor, values: Tensor, query: Tensor, variant: Variant) -> Tensor:
        """Attend for the rows of `query` whose indices are in `token`. query [N, H, D];
        keys, values [S, C, KV, D], S slots of C tokens. Result: [R * T, H, D].
        """
        # index_select is several times as fast as indexing with a tensor
        rows = query.index_select(0, self.token).view(len(self._slots), -1, *query.shape[1:])
        row_keys, row_values = (
            tensor[:, : self._length].index_select(0, self._slots).transpose(1, 2)
            for tensor in (keys, values)
        )
        mask = self._mask(variant.window)
        attended = attend_padded(rows.transpose(1, 2), row_keys, row_values, mask, variant)
        return attended.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None) -> Tensor:
        """Return the causal mask of a window (None: unlimited), [R, 1, T, L] bool."""
        if window not in self._masks:
            self._masks[window] = within_window(self._masks[None], self._query_position, window)
        return self._masks[window]
