"""Attention over ragged sequences: the learner's packed batches and the engine's key-value cache.

A Hugging Face model built with `attn_implementation=RAGGED` runs its linear layers on tokens packed
end to end and hands queries, keys and values to the `layout` its caller passed to `forward`.
One model code serves both sides, so what the engine samples from is what the learner trains.
Shapes: N tokens, H query heads, KV key and value heads of size D, B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import transformers.utils
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentgym.models.half import is_emulated

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# if scikit-learn is found, transformers imports it and pandas for assisted generation with draft
# models, which is not used here: 1.2 s of a start of 8.1 s
_has_sklearn = transformers.utils.is_sklearn_available
transformers.utils.is_sklearn_available = lambda: False
try:
    import transformers.generation.candidate_generator
    from transformers import AttentionInterface
finally:
    transformers.utils.is_sklearn_available = _has_sklearn

RAGGED = "agentgym_ragged"
GROUP_SEQUENCES = 16  # attended to in one call; fewer need less padding, more need fewer calls


class Layout(Protocol):
    """Assignment of packed tokens to sequences; computes the attention within each sequence."""

    position: Tensor  # [N] of each token in its sequence

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """Attend in one layer. query [N, H, D]; key, value [N, KV, D]. Result: [N, H, D]."""
        ...


@dataclass(frozen=True, slots=True)
class Variant:
    """A layer's settings of causal attention."""

    scaling: float | None = None  # of the scores; None: 1 / sqrt(D)
    window: int | None = None  # a token sees itself and the window - 1 before it; None: all
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


# arguments a model may pass to its attention that do not change the result
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
    """Compute a layer's attention for transformers, by the `layout` that `forward` was called with.

    query [1, H, N, D]; key, value [1, KV, N, D], packed by `layout`. Result: ([1, N, H, D], None).
    Errors: ValueError if the model asks for something that is not computed here.
    """
    unknown = [
        name for name, argument in others.items() if argument is not None and argument is not False
    ]
    unknown = [name for name in unknown if name not in _HARMLESS]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        unknown.append("is_causal=False")
    if module.training and others.get("dropout"):
        unknown.append("dropout while training")
    if unknown:
        raise ValueError(f"{type(module).__name__} attends with {', '.join(unknown)}, unsupported")
    layer: Any = module.layer_idx
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    variant = Variant(scaling, sliding_window, softcap)
    return layout.attend(layer, query, key, value, variant).unsqueeze(0), None


AttentionInterface.register(RAGGED, _ragged_attention)


def run_packed(network: Any, ids: Tensor, layout: Layout, **options: Any) -> Any:
    """Return the output of a model or decoder for packed tokens, as a batch of one. ids: [N]."""
    positions = layout.position[None]
    return network(
        input_ids=ids[None], position_ids=positions, use_cache=False, layout=layout, **options
    )


def leave_uncompiled() -> None:
    """Exclude our attention from torch.compile in this process: its groups vary with the batch."""
    plain = torch.compiler.disable(_ragged_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(RAGGED, plain)


def require_ragged(model: PreTrainedModel) -> None:
    """Raise ValueError if the model's attention is not RAGGED, so that it would ignore a layout."""
    kind = model.config._attn_implementation
    if kind != RAGGED:
        raise ValueError(
            f"the model attends by {kind!r}, expected {RAGGED!r}; build it with"
            " attn_implementation=RAGGED"
        )


def attend_padded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, variant: Variant
) -> Tensor:
    """Compute attention of R sequences, padded to T queries and L keys. Result: [R, H, T, D].

    query [R, H, T, D]; key, value [R, KV, L, D]; mask: bool, broadcast to [R, 1, T, L], true where
    a token may look; None: causal, only for L = T and no softcap. variant: scaling and softcap
    apply. The window is ignored, so the mask must exclude the keys outside it.
    """
    if is_emulated(query):  # float32 takes a quarter to half of the time, and rounds only once
        wide = attend_padded(query.float(), key.float(), value.float(), mask, variant)
        return wide.to(query.dtype)
    gqa = query.shape[1] != key.shape[1]
    if variant.softcap is None:
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=variant.scaling, enable_gqa=gqa
        )
    assert mask is not None
    if gqa:
        key, value = (
            tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value)
        )
    scaling = query.shape[-1] ** -0.5 if variant.scaling is None else variant.scaling
    scores = variant.softcap * torch.tanh(query @ key.transpose(2, 3) * scaling / variant.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value


def has_kernel(query: Tensor, variant: Variant) -> bool:
    """Return True if flash attention computes this without padding: half precision on a CUDA
    device of compute capability 8 or newer, a supported head size D, scores without a cap.
    """
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and variant.softcap is None
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def within_window(mask: Tensor, query_position: Tensor, window: int | None) -> Tensor:
    """Return a copy of mask [..., T, L] that is false for keys `window` or more before the query;
    the mask itself if window is None. query_position: [..., T] index of a query among the keys.
    """
    if window is None:
        return mask
    keys = torch.arange(mask.shape[-1], device=mask.device)
    return mask & (keys > query_position[..., None] - window)


class PackedSequences:
    """Sequences packed end to end, each attending causally only to itself.

    A prefix that a sequence shares with the one before it may be computed once.
    On a CUDA device flash attention reads the packed tokens; if it cannot (see `has_kernel`), and
    on the CPU, they are padded for attention only. The results are equal up to rounding.
    """

    def __init__(self, starts: Tensor, shared: Sequence[int] | None = None) -> None:
        """Compute indices and positions.
        starts: [B + 1] int; sequence b is tokens starts[b]:starts[b + 1], N in all.
        shared: [B] length of the prefix that each sequence shares with the one before it (see
        `Prefixes`), so that M <= N tokens are computed. None: all N are.
        """
        self._starts, self._lengths = starts, np.diff(starts.cpu().numpy())
        self._shared = np.array(shared or [0] * len(self._lengths), dtype=np.int64)
        self._own = self._lengths - self._shared  # computed tokens of each sequence
        self._begins = np.cumsum(self._own) - self._own  # first computed token of each sequence
        # for each computed token, [M]: its sequence, and its index among the sequence's own
        self._sequence = np.repeat(np.arange(len(self._own)), self._own)
        self._offset = np.arange(len(self._sequence)) - self._begins[self._sequence]
        positions = self._offset + self._shared[self._sequence]
        self.position = self._on_device(positions)
        self.computed: Tensor | None = None  # [M] packed index of each; None: all, in order
        self.path: Tensor | None = None  # [N] index of each token among the computed ones
        if self._shared.any():
            first = np.cumsum(self._lengths) - self._lengths
            self.computed = self._on_device(first[self._sequence] + positions)
            self.path = self._on_device(np.concatenate(self._paths()))
        self._masks: dict[tuple[int, int | None], Tensor] = {}  # shared by the layers of a forward

    def _on_device(self, indices: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(indices).to(self._starts.device)

    def _paths(self) -> list[np.ndarray[Any, Any]]:
        """Return, for each sequence, the index of each of its tokens among the computed tokens."""
        paths, before = [], np.zeros(0, dtype=np.int64)
        for shared, begin, num_own in zip(self._shared, self._begins, self._own, strict=True):
            before = np.concatenate([before[:shared], np.arange(begin, begin + num_own)])
            paths.append(before)
        return paths

    def whole(self, states: Tensor) -> Tensor:
        """Expand states [M, ...] of the computed tokens to [N, ...] of all tokens."""
        return states if self.path is None else states.index_select(0, self.path)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """Attend in one layer. query [M, H, D]; key, value [M, KV, D]. Result: [M, H, D]."""
        if self.path is not None and is_emulated(query):  # gradients of shared keys sum in float32
            wide = self.attend(layer, query.float(), key.float(), value.float(), variant)
            return wide.to(query.dtype)
        attend = self._attend_packed if has_kernel(query, variant) else self._attend_padded
        return attend(query, key, value, variant)

    def _attend_packed(self, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        begins, starts = self._bounds
        attended = varlen_attn(
            query,
            self.whole(key),
            self.whole(value),
            begins,
            starts,
            int(self._own.max()),
            int(self._lengths.max()),
            scale=variant.scaling,
            # number of further keys that a query sees before and after its own, with the last
            # query at the last key; -1: all
            window_size=(-1 if variant.window is None else variant.window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(attended, Tensor)
        return attended

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        """Starts of the sequences among the computed tokens and among all, [B + 1] int32 each."""
        begins = np.append(self._begins, len(self._sequence))
        return self._on_device(begins.astype(np.int32)), self._starts.to(torch.int32)

    @cached_property
    def _padding(self) -> tuple[list[_PaddedRows], Tensor]:
        """Return (padded groups, [M] index of each computed token in the results of all groups)."""
        groups, first, begins = [], 0, np.empty_like(self._begins)
        for sequences in self._groups():
            num_own = self._own[sequences]
            column = np.minimum(np.arange(num_own.max()), (num_own - 1)[:, None])  # [R, T]
            groups.append(self._padded(sequences, column))
            begins[sequences] = first + num_own.max() * np.arange(len(num_own))
            first += column.size
        return groups, self._on_device(begins[self._sequence] + self._offset)

    def _groups(self) -> Iterator[np.ndarray[Any, Any]]:
        """Yield groups of at most GROUP_SEQUENCES sequences, as indices, with similar numbers of
        computed tokens. Sequences without computed tokens are left out.
        """
        order = np.argsort(self._own, kind="stable")
        order, first = order[self._own[order] > 0], 0
        # with shared prefixes, the numbers of computed tokens differ much more than the lengths
        ratio = np.inf if self.path is None else 2.0
        for index in range(1, len(order) + 1):
            ends = index == len(order) or index - first == GROUP_SEQUENCES
            if ends or self._own[order[index]] > ratio * self._own[order[first]]:
                yield order[first:index]
                first = index

    def _padded(self, sequences: np.ndarray[Any, Any], column: np.ndarray[Any, Any]) -> _PaddedRows:
        """Return R sequences padded. sequences: [R] indices; column: [R, T] indices among the
        computed tokens of each.
        """
        queries = self._on_device(self._begins[sequences][:, None] + column)
        if self.path is None:
            return _PaddedRows(queries, queries, None)
        lengths = self._lengths[sequences]
        keys = np.minimum(np.arange(lengths.max()), (lengths - 1)[:, None])  # [R, L]
        first = (np.cumsum(self._lengths) - self._lengths)[sequences][:, None]
        position = self._on_device(self._shared[sequences][:, None] + column)
        return _PaddedRows(queries, self.path[self._on_device(first + keys)], position[:, None])

    def _attend_padded(self, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        """Pad groups of sequences on the right, attend, and remove the padding, which no real query
        sees. query [M, H, D]; key, value [M, KV, D]. Result: [M, H, D].
        """
        attended = []
        groups, packed = self._padding
        for index, rows in enumerate(groups):
            padded = [
                tensor.index_select(0, indices.flatten())
                .view(*indices.shape, *tensor.shape[1:])
                .transpose(1, 2)
                for tensor, indices in ((query, rows.queries), (key, rows.keys), (value, rows.keys))
            ]
            mask = self._mask(index, rows, variant)
            part = attend_padded(padded[0], padded[1], padded[2], mask, variant)
            attended.append(part.transpose(1, 2).flatten(0, 1))
        return torch.cat(attended).index_select(0, packed)

    def _mask(self, index: int, rows: _PaddedRows, variant: Variant) -> Tensor | None:
        """Return a group's mask [..., T, L]; None for plain causal attention, which needs none."""
        longest, position = rows.keys.shape[1], rows.position
        is_cut = variant.window is not None and variant.window < longest
        if position is None and variant.softcap is None and not is_cut:
            return None
        if (index, variant.window) not in self._masks:
            key_positions = torch.arange(longest, device=rows.keys.device)
            seen_from = key_positions if position is None else position
            causal = key_positions <= seen_from[..., None]
            self._masks[index, variant.window] = within_window(causal, seen_from, variant.window)
        return self._masks[index, variant.window]


@dataclass(frozen=True, slots=True)
class _PaddedRows:
    """R sequences attended to in one call, each padded by repeating its last token."""

    queries: Tensor  # [R, T] indices of computed tokens
    keys: Tensor  # [R, L] indices of computed tokens
    position: Tensor | None  # [R, 1, T] index of each query among the keys; None: 0, 1, ...
