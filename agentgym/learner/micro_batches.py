"""Which sequences are on which rank, and which of them go through the network together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from agentgym.algorithms.batch import Batch
from agentgym.learner.flops import TrainingFlops
from agentgym.models.prefixes import Prefixes


class Dealt:
    """Sequences of a batch, dealt to ranks and there to micro-batches."""

    def __init__(
        self,
        batch: Batch,
        sequences: Sequence[int],
        *,
        num_ranks: int,
        tokens: int,
        unit: int,
        padded: bool,
        share_prefixes: bool,
    ) -> None:
        """tokens, unit, padded: see `micro_batches`."""
        self.idle = list(sequences[:unit])  # a rank without work computes these, too
        self._lengths = batch.lengths.tolist()
        self._prefixes = Prefixes(batch.input_ids, batch.starts) if share_prefixes else None
        sharing = {} if self._prefixes is None else {"shared": self._prefixes.shared}
        self.ranks = [
            list(
                micro_batches(
                    self._lengths, own, tokens=tokens, unit=unit, padded=padded, **sharing
                )
            )
            for own in deal(self._lengths, sequences, num_ranks=num_ranks, unit=unit)
        ]

    def largest(self, rank: int) -> int:
        """Return the tokens that the rank's largest micro-batch computes."""
        return max((sum(lengths) - sum(shared) for lengths, shared in self._sizes(rank)), default=0)

    def _sizes(self, rank: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the lengths of each micro-batch's sequences, and how much of each is shared."""
        for part in self.ranks[rank]:
            shared = [0] * len(part) if self._prefixes is None else self._prefixes.of(part)
            yield [self._lengths[sequence] for sequence in part], shared

    def tflop(self, networks: Sequence[TrainingFlops]) -> float:
        """Return 1e12 operations that an update of the networks asks for, on all ranks."""
        lengths, shared = [], []
        for rank in range(len(self.ranks)):
            for of_part, shared_of_part in self._sizes(rank):
                lengths += of_part
                shared += shared_of_part
        counts = torch.tensor(lengths), torch.tensor(shared)
        return sum(network.tflop(*counts) for network in networks)


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
    lengths: Sequence[int],
    sequences: Sequence[int],
    *,
    tokens: int,
    unit: int,
    padded: bool,
    shared: Callable[[int, int], int] = lambda _before, _sequence: 0,
) -> Iterator[list[int]]:
    """Yield consecutive sequences whose size stays within the budget of `tokens`; at least `unit`
    of them, and a multiple of it.

    padded: each sequence that shares no tokens counts as the longest beside it.
    shared: tokens of a sequence that the one before it has, too, and that count once.
    """

    def grown(size: _Size, before: int | None, block: Sequence[int]) -> _Size:
        for sequence in block:
            held = 0 if before is None else shared(before, sequence)
            size, before = size.plus(lengths[sequence], held), sequence
        return size

    chosen: list[int] = []
    size = _Size()
    for first in range(0, len(sequences), unit):
        block = list(sequences[first : first + unit])
        more = grown(size, chosen[-1] if chosen else None, block)
        if chosen and (more.padded if padded else more.tokens) > tokens:
            yield chosen
            chosen, more = [], grown(_Size(), None, block)
        chosen, size = chosen + block, more
    if chosen:
        yield chosen


@dataclass(frozen=True, slots=True)
class _Size:
    """Tokens of a micro-batch that are computed."""

    tokens: int = 0
    sharing: int = 0  # those of sequences that share some
    num_alone: int = 0  # sequences that share none
    longest_alone: int = 0

    @property
    def padded(self) -> int:
        return self.sharing + self.num_alone * self.longest_alone

    def plus(self, length: int, shared: int) -> _Size:
        tokens = self.tokens + length - shared
        if shared:
            return replace(self, tokens=tokens, sharing=self.sharing + length - shared)
        longest = max(self.longest_alone, length)
        return _Size(tokens, self.sharing, self.num_alone + 1, longest)
