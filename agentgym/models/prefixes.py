"""Common prefixes of sequences, which may be computed once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

SHARED_FRAC = 0.1  # of a sequence's tokens; a shorter prefix is not shared


def common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences of one type."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Prefixes:
    """Lengths of the prefixes that sequences of a batch share."""

    def __init__(self, input_ids: Tensor, starts: Tensor) -> None:
        """Split a batch into its sequences. input_ids: [N] int; starts: [B + 1] int."""
        ids = input_ids.tolist()
        self._sequences = [ids[start:end] for start, end in pairwise(starts.tolist())]

    def shared(self, before: int, sequence: int) -> int:
        """Return the number of tokens that `sequence` shares with `before`; 0 if they are too few
        to be worth sharing.
        """
        ids = self._sequences[sequence]
        common = common_tokens(self._sequences[before], ids)
        return common if common >= SHARED_FRAC * len(ids) else 0

    def of(self, sequences: Sequence[int]) -> list[int]:
        """Return the number of tokens each sequence shares with the one before it, as
        `PackedSequences` takes it.
        """
        return [0, *(self.shared(before, sequence) for before, sequence in pairwise(sequences))]
