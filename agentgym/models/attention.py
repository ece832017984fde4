"""Attention over ragged sequences: the learner's packed batches and the engine's key-value cache.

A Hugging Face model built with `attn_implementation=RAGGED` runs its linear layers on tokens packed
end to end and hands queries, keys and values to the `layout` its caller passed to `forward`.
One model code serves both sides, so what the engine samples from is what the learner trains.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
import transformers.utils
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# with it transformers imports scikit-learn and pandas, most of a second, for draft models that
# propose tokens, which are not used here
_has_sklearn = transformers.utils.is_sklearn_available
transformers.utils.is_sklearn_available = lambda: False
try:
    import transformers.generation.candidate_generator
    from transformers import AttentionInterface
finally:
    transformers.utils.is_sklearn_available = _has_sklearn

RAGGED = "agentgym_ragged"
GROUP_SEQUENCES = 16  # attended to at once; fewer are padded less, more cost fewer calls


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
    """query [1, H, N, D]; key, value [1, KV, N, D], packed by `layout`. Result: [1, N, H, D].
    Errors: ValueError where the model asks for what is not computed here.
    """
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


def leave_uncompiled() -> None:
    """Let compiled blocks call attention as it is: how it groups sequences changes with the
    batch.
    """
    plain = torch.compiler.disable(_ragged_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(RAGGED, plain)


def require_ragged(model: PreTrainedModel) -> None:
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


def has_kernel(query: Tensor, variant: Variant) -> bool:
    """Whether flash attention computes this without padding: half precision on a CUDA device of
    compute capability 8 or newer, heads [.., D] of a size it has, scores without a cap.
    """
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and variant.softcap is None
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _within(mask: Tensor, query_position: Tensor, window: int | None) -> Tensor:
    """mask [..., T, L] without the keys that lie a window or more before the query."""
    if window is None:
        return mask
    keys = torch.arange(mask.shape[-1], device=mask.device)
    return mask & (keys > query_position[..., None] - window)


class PackedSequences:
    """Rows packed end to end, each attending causally to itself alone.

    On a CUDA device flash attention reads them as they are; where it cannot (see `has_kernel`),
    and on the CPU, they are padded for the attention alone. The results are equal.
    """

    def __init__(self, starts: Tensor) -> None:
        """starts: [B + 1] int; sequence b is tokens starts[b]:starts[b + 1]."""
        device, self._lengths = starts.device, starts[1:] - starts[:-1]
        self._starts = starts
        self._sequence = torch.repeat_interleave(
            torch.arange(len(self._lengths), device=device), self._lengths
        )
        self.position = torch.arange(int(starts[-1]), device=device) - starts[self._sequence]
        self._masks: dict[tuple[int, int | None], Tensor] = {}  # shared by the layers of a forward

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """query [N, H, D]; key, value [N, KV, D]. Result: [N, H, D]."""
        attend = self._attend_packed if has_kernel(query, variant) else self._attend_padded
        return attend(query, key, value, variant)

    def _attend_packed(self, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        starts, longest = self._bounds
        attended = varlen_attn(
            query,
            key,
            value,
            starts,
            starts,
            longest,
            longest,
            scale=variant.scaling,
            # keys before and after a query that it sees beside its own; -1: all
            window_size=(-1 if variant.window is None else variant.window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(attended, Tensor)
        return attended

    @cached_property
    def _bounds(self) -> tuple[Tensor, int]:
        """([B + 1] int32 starts, tokens of the longest)."""
        return self._starts.to(torch.int32), int(self._lengths.max())

    @cached_property
    def _padding(self) -> tuple[list[Tensor], Tensor]:
        """Sequences of about one length together, padded with their own last token: ([R, T] of
        each group the packed index of every padded token, [N] of each packed token its place among
        all padded ones).
        """
        starts, lengths, groups = self._starts, self._lengths, []
        begin, first = torch.empty_like(lengths), 0  # of each sequence among all padded tokens
        for sequences in torch.split(torch.argsort(lengths, stable=True), GROUP_SEQUENCES):
            longest = int(lengths[sequences[-1]])
            places = torch.arange(longest, device=starts.device)
            column = places.minimum((lengths[sequences] - 1)[:, None])
            groups.append(starts[sequences][:, None] + column)
            begin[sequences] = first + longest * torch.arange(len(sequences), device=starts.device)
            first += column.numel()
        return groups, begin[self._sequence] + self.position

    def _attend_padded(self, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        """Right padding never reaches a real query."""
        attended = []
        groups, packed = self._padding
        for group in groups:
            padded = [
                each.index_select(0, group.flatten())
                .view(*group.shape, *each.shape[1:])
                .transpose(1, 2)
                for each in (query, key, value)
            ]
            mask = self._mask(group.shape[1], variant)
            part = _attend(padded[0], padded[1], padded[2], mask, variant)
            attended.append(part.transpose(1, 2).flatten(0, 1))
        return torch.cat(attended).index_select(0, packed)

    def _mask(self, longest: int, variant: Variant) -> Tensor | None:
        """[T, L], or None where plain causal attention is meant: the kernels have that built in."""
        if variant.softcap is None and (variant.window is None or variant.window >= longest):
            return None
        if (longest, variant.window) not in self._masks:
            places = torch.arange(longest, device=self.position.device)
            causal = places <= places[:, None]
            self._masks[longest, variant.window] = _within(causal, places, variant.window)
        return self._masks[longest, variant.window]


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
        attended = _attend(own.transpose(1, 2), held_keys, held_values, mask, variant)
        return attended.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None) -> Tensor:
        """[R, 1, T, L] bool."""
        if window not in self._masks:
            self._masks[window] = _within(self._masks[None], self._query_position, window)
        return self._masks[window]
