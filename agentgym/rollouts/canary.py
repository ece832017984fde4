"""Proof that the weights an engine samples with are the learner's."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentgym.algorithms.batch import Batch
from agentgym.types import EngineMismatch, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

STALE_SHARE = 0.1  # of the limit: a smaller change of the learner may be noise
NUM_TEXTS, TEXT_TOKENS = 4, 128  # of the run's own text, which is used if noise is high

# Share of the learner's change that must have arrived: 1 if the weights are the learner's, 0 if
# they are the old ones, 0.5 to 0.7 if half of the tensors were taken (SmolLM2-135M, bfloat16).
# It is judged only if the change is at least CHANGE_TO_NOISE times the earlier gap between engine
# and learner (rounding then hides 6 % of it) and if the estimate's standard error is small.
ARRIVED, CHANGE_TO_NOISE, STANDARD_ERROR = 0.75, 4.0, 1 / 16


@dataclass(frozen=True, slots=True)
class Seen:
    """Log-probabilities [N] of one comparison, by the learner (ours) and the engine (theirs)."""

    ours: Tensor
    theirs: Tensor
    gap: float  # nats, root mean square of their difference


class Canary:
    """Token sequences whose log-probabilities learner and engine must agree on after a publish."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, limit: float, takes_text: bool = False
    ) -> None:
        """Build the fixed sequences.

        limit: nats, see `agentgym.models.tolerance`.
        takes_text: score the run's own text, too, on which an update changes most. In half
        precision, changes on any other text are smaller than rounding.
        """
        self._limit = limit
        self._takes_text = self._is_half = takes_text
        self._digest = ""
        self.sequences = canary_sequences(tokenizer)

    def sent(self, digest: str, version: int) -> None:
        """Log if a publish has the same weights as the one before, to the bit: then no comparison
        can show if they arrived. digest: of the weights.
        """
        if digest == self._digest:
            logger.log(
                logging.WARNING if self._is_half else logging.INFO,
                "weights version %d changes no stored bit: no update was made, or one that is"
                " smaller than their dtype keeps (optimizer.lr, model.dtype)",
                version,
            )
        self._digest = digest

    def take(self, trajectories: Sequence[Trajectory]) -> None:
        """Add the beginnings of the first episodes that a run played, once, if `takes_text`."""
        if self._takes_text and trajectories:
            texts = [
                list(trajectory.input_ids[:TEXT_TOKENS]) for trajectory in trajectories[:NUM_TEXTS]
            ]
            # a new list: a publish in another thread may still use the old one
            self.sequences = self.sequences + [text for text in texts if len(text) > 1]
            self._takes_text = False

    def score(self, learner: Any, sequences: list[list[int]] | None = None) -> Tensor:
        """Return the learner's log-probabilities [N] of every token but each sequence's first.

        sequences: the sequences that the engine scores; default: the present ones.
        """
        sequences = self.sequences if sequences is None else sequences
        tokens = torch.tensor([token for sequence in sequences for token in sequence])
        starts = torch.cumsum(torch.tensor([0, *map(len, sequences)]), 0)
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[starts[:-1]] = False
        zeros, groups = (
            torch.zeros(len(tokens)),
            torch.zeros(len(sequences), dtype=torch.int64),
        )
        scores: Tensor = learner.score(
            Batch(tokens, starts, mask, zeros, zeros, groups, groups.bool(), 1.0)
        )
        return scores[mask]

    def compare(
        self,
        ours: Tensor,
        theirs: list[Tensor],
        version: int,
        engine: str = "the engine",
        before: Seen | None = None,
    ) -> Seen:
        """Compare the scores of learner and engine after a publish; return the comparison.

        ours: [N] of the learner.
        theirs: N of the engine, in pieces.
        before: the comparison after an earlier publish, None if there is none.
        Errors: EngineMismatch if the scores differ by more than the limit, which allows for the
        noise of the engine's kernels; if the learner's scores changed and the engine's not by a
        bit; if the engine's scores followed only a part of the learner's change.
        """
        whole = torch.cat(theirs)
        comparison = Seen(ours, whole, _rms(ours - whole))
        if not comparison.gap <= self._limit:
            raise EngineMismatch(
                f"weights version {version} did not reach {engine}: canary prompts differ by"
                f" {comparison.gap:.3g} nats (limit {self._limit:g})"
            )
        if before is None or len(before.ours) != len(ours):
            return comparison
        if torch.equal(before.theirs, comparison.theirs):
            change = float((before.ours - ours).abs().max())
            if change > STALE_SHARE * self._limit:
                raise EngineMismatch(
                    f"weights version {version} did not reach {engine}: it scores canary prompts as"
                    f" before to the bit, the learner by up to {change:.3g} nats otherwise"
                )
            return replace(comparison, ours=before.ours)  # small changes add up
        share = arrived_share(before, comparison)
        if share is not None and not share >= ARRIVED:
            raise EngineMismatch(
                f"weights version {version} did not reach {engine} as a whole: canary prompts moved"
                f" by {share:.0%} of the learner's change (at least {ARRIVED:.0%})"
            )
        return comparison


def arrived_share(before: Seen, after: Seen) -> float | None:
    """Return the share of the learner's change that the engine followed: a least-squares estimate.

    None if the change is too small compared to the noise.
    """
    change, followed = after.ours - before.ours, after.theirs - before.theirs
    square = float(change.square().sum())
    if not square or _rms(change) < CHANGE_TO_NOISE * before.gap:
        return None
    share = float((followed * change).sum()) / square
    error = _rms(followed - share * change) / math.sqrt(square)
    return share if error <= STANDARD_ERROR else None


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def canary_sequences(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return four sequences of 16 tokens; they depend on the size of the vocabulary alone."""
    size = len(tokenizer)
    return [
        [(7 * sequence + 13 * column) % size for column in range(1, 17)] for sequence in range(4)
    ]
