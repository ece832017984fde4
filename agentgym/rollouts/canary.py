"""Proof that the weights an engine samples with are the learner's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from agentgym.algorithms.batch import Batch
from agentgym.types import EngineMismatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


STALE_SHARE = 0.1  # of the limit: a smaller change of the learner's may be noise of its own


@dataclass(frozen=True, slots=True)
class Seen:
    """Log-probabilities of one comparison, [N] each."""

    ours: torch.Tensor
    theirs: torch.Tensor
    gap: float  # nats, the largest difference


class Canary:
    """What learner and engine must agree on after a publish."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limit: float) -> None:
        """limit: nats, see `agentgym.models.tolerance`."""
        self._limit = limit
        self.sequences = canary_sequences(tokenizer)

    def score(self, learner: Any) -> torch.Tensor:
        """[n] the learner's log-probabilities of every token but each sequence's first."""
        tokens = torch.tensor([token for sequence in self.sequences for token in sequence])
        starts = torch.cumsum(torch.tensor([0, *map(len, self.sequences)]), 0)
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[starts[:-1]] = False
        zeros, groups = (
            torch.zeros(len(tokens)),
            torch.zeros(len(self.sequences), dtype=torch.int64),
        )
        scores: torch.Tensor = learner.score(
            Batch(tokens, starts, mask, zeros, zeros, groups, groups.bool(), 1.0)
        )
        return scores[mask]

    def compare(
        self,
        ours: torch.Tensor,
        theirs: list[torch.Tensor],
        version: int,
        engine: str = "the engine",
        before: Seen | None = None,
    ) -> Seen:
        """ours: [N]; theirs: as many in pieces; before: what this engine last said, None where it
        was not asked yet.

        Errors: EngineMismatch where they differ by more than the limit, which has room for the
        noise of the engine's kernels, or where ours changed and theirs not by a bit.
        """
        seen = Seen(ours, whole := torch.cat(theirs), float((ours - whole).abs().max()))
        if not seen.gap <= self._limit:
            raise EngineMismatch(
                f"weights version {version} did not reach {engine}: canary prompts differ by"
                f" {seen.gap:.3g} nats (limit {self._limit:g})"
            )
        if before is not None and torch.equal(before.theirs, seen.theirs):
            change = float((before.ours - ours).abs().max())
            if change > STALE_SHARE * self._limit:
                raise EngineMismatch(
                    f"weights version {version} did not reach {engine}: it scores canary prompts as"
                    f" before to the bit, the learner by up to {change:.3g} nats otherwise"
                )
            return replace(seen, ours=before.ours)  # small changes add up
        return seen


def canary_sequences(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """A few fixed token sequences that exercise every layer."""
    size = len(tokenizer)
    return [
        [(7 * sequence + 13 * column) % size for column in range(1, 17)] for sequence in range(4)
    ]
