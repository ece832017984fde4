"""Which sequences are on which rank, and which of them go through the network together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def deal(
    lengths: Sequence[int], sequences: Sequence[int], *, num_ranks: int, unit: int
) -> list[list[int]]:
    """The sequences of each rank, in the order given, about as many tokens on each: the longest
    first, each to the rank that has the fewest tokens (Graham's longest-processing-time rule).

    lengths: tokens of every sequence of the batch. unit: so many neighbors of `sequences` stay
    together; their number is a multiple of it.
    """
    units = [sequences[first : first + unit] for first in range(0, len(sequences), unit)]
    tokens = [sum(lengths[sequence] for sequence in each) for each in units]
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(units)), key=lambda index: (-tokens[index], index)):
        rank = loads.index(min(loads))
        dealt[rank].append(index)
        loads[rank] += tokens[index]
    return [[sequence for index in sorted(own) for sequence in units[index]] for own in dealt]


def micro_batches(
    lengths: Sequence[int], sequences: Sequence[int], *, tokens: int, unit: int, padded: bool
) -> Iterator[list[int]]:
    """Consecutive sequences whose size stays within the budget of `tokens`; at least `unit` of
    them, and a multiple of it.

    padded: each sequence counts as the longest beside it.
    """
    chosen: list[int] = []
    total = longest = 0
    for first in range(0, len(sequences), unit):
        block = sequences[first : first + unit]
        more = sum(lengths[sequence] for sequence in block)
        widest = max(longest, *(lengths[sequence] for sequence in block))
        size = widest * (len(chosen) + unit) if padded else total + more
        if chosen and size > tokens:
            yield chosen
            chosen, total, widest = [], 0, max(lengths[sequence] for sequence in block)
        chosen = [*chosen, *block]
        total, longest = total + more, widest
    if chosen:
        yield chosen
