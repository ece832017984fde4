"""A learner's data about a batch before it updates anything."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from agentgym.algorithms.batch import Batch


@dataclass(frozen=True, slots=True)
class Experience:
    """A batch of B sequences, and the inputs of advantages and losses for its n action tokens, in
    order.
    """

    batch: Batch
    # [n] float32: the batch's rewards plus rewards per token, for example a KL penalty
    rewards: Tensor
    # These three are None if the update computes them itself (see `Learner.prepare`).
    logprobs: Tensor | None = None  # [n] of the learner before the update, nats
    # [n] factor of each token's loss that corrects the mismatch of learner and engine
    corrections: Tensor | None = None
    entropies: Tensor | None = None  # [n] of the learner's distributions before the update, nats
    # [n] log-probabilities of the reference model, if there is a KL penalty
    reference: Tensor | None = None
    values: Tensor | None = None  # [n] critic's value of the state in which each token is chosen
    # [B] critic's value of the state after the last action, 0 if the episode was over
    end_values: Tensor | None = None
    advantages: Tensor | None = None  # [n]
    targets: Tensor | None = None  # [n] for the critic
    metrics: dict[str, float] = field(default_factory=dict)  # by name

    @property
    def sequence(self) -> Tensor:
        """[n] int64, ascending: the sequence each token belongs to."""
        return self.batch.sequence[self.batch.action_mask]

    @property
    def turn(self) -> Tensor:
        """[n] int64, ascending from 0: the turn each token belongs to."""
        return self.batch.turn[self.batch.action_mask]

    @property
    def returns(self) -> Tensor:
        """[B] undiscounted sum of each sequence's rewards."""
        none = self.rewards.new_zeros(self.batch.num_sequences)
        return none.index_add_(0, self.sequence, self.rewards)

    def to(self, device: torch.device) -> Experience:
        """Return the experience on another device."""
        moved: dict[str, Any] = {
            part.name: value.to(device)
            for part in fields(self)
            if isinstance(value := getattr(self, part.name), Tensor | Batch)
        }
        return replace(self, **moved)

    @property
    def carrying(self) -> Tensor:
        """[C] int64, ascending: the sequences with an advantage other than 0."""
        carrying: Tensor = torch.unique(self.sequence[self.advantages != 0])
        return carrying

    @property
    def critic_metrics(self) -> dict[str, float]:
        """Metrics of how well the critic's values explain its targets; empty without a critic."""
        if self.values is None or self.targets is None:
            return {}
        spread = float(self.targets.var()) if len(self.targets) > 1 else 0.0
        explained = 1 - float((self.targets - self.values).var()) / spread if spread else 0.0
        mean = float(self.values.mean())
        return {"critic/value_mean": mean, "critic/explained_variance": explained}
