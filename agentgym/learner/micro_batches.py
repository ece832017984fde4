"""Distribution of a batch's sequences over ranks, and there over micro-batches."""

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
        """Deal the sequences. tokens, unit, padded: see `micro_batches`."""
        self.idle = list(sequences[:unit])  # computed by a rank without work, and not counted
        self._lengths = batch.lengths.tolist()
        self._prefixes = Prefixes(batch.input_ids, batch.starts) if share_prefixes else None
        sharing = {} if self._prefixes is None else {"shared": self._prefixes.shared}
        self.ranks = [
            list(
                micro_batches(
                    self._lengths, of_rank, tokens=tokens, unit=unit, padded=padded, **sharing
                )
            )
            for of_rank in deal(self._lengths, sequences, num_ranks=num_ranks, unit=unit)
        ]

    def largest(self, rank: int) -> int:
        """Return the tokens that the rank's largest micro-batch computes."""
        return max((sum(lengths) - sum(shared) for lengths, shared in self._sizes(rank)), default=0)

    def _sizes(self, rank: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the lengths of each micro-batch's sequences, and their shared tokens."""
        for part in self.ranks[rank]:
            shared = [0] * len(part) if self._prefixes is None else self._prefixes.of(part)
            yield [self._lengths[sequence] for sequence in part], shared

    def tflop(self, networks: Sequence[TrainingFlops]) -> float:
        """Return the number of operations, in 1e12, of an update of the networks, on all ranks."""
        lengths, shared = [], []
        for rank in range(len(self.ranks)):
            for part_lengths, part_shared in self._sizes(rank):
                lengths += part_lengths
                shared += part_shared
        counts = torch.tensor(lengths), torch.tensor(shared)
        return sum(network.tflop(*counts) for network in networks)


def deal(
    lengths: Sequence[int], sequences: Sequence[int], *, num_ranks: int, unit: int
) -> list[list[int]]:
    """Return each rank's sequences, in the order given, with about equal tokens on each rank.

    The longest unit goes first, each to the rank with the fewest tokens (Graham's
    longest-processing-time rule).
    lengths: tokens of every sequence of the batch.
    unit: number of neighbors in `sequences` that stay together; divides their number.
    """
    units = [sequences[first : first + unit] for first in range(0, len(sequences), unit)]
    tokens = [sum(lengths[sequence] for sequence in members) for members in units]
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(units)), key=lambda index: (-tokens[index], index)):
        rank = loads.index(min(loads))
        dealt[rank].append(index)
        loads[rank] += tokens[index]
    return [
        [sequence for index in sorted(indices) for sequence in units[index]] for indices in dealt
    ]


def micro_batches(
    lengths: Sequence[int],
    sequences: Sequence[int],
    *,
    tokens: int,
    unit: int,
    padded: bool,
    shared: Callable[[int, int], int] = lambda _before, _sequence: 0,
) -> Iterator[list[int]]:
    """Yield consecutive sequences within the budget of `tokens`, in multiples of `unit`.

    A single unit may exceed the budget.
    padded: a sequence that shares no tokens counts as long as the longest such sequence.
    shared: tokens that a sequence has in common with the one before it; they count once.
    """

    def grown(size: _Size, before: int | None, block: Sequence[int]) -> _Size:
        for sequence in block:
            num_shared = 0 if before is None else shared(before, sequence)
            size, before = size.plus(lengths[sequence], num_shared), sequence
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
    """The computed tokens of a micro-batch."""

    tokens: int = 0
    sharing: int = 0  # of sequences that share tokens
    num_alone: int = 0  # sequences that share no tokens
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
