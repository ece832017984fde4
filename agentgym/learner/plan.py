"""What a learner begins with, as bytes that travel to the process it is built in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from safetensors.torch import load as load_safetensors

from agentgym.config import OptimizerConfig
from agentgym.learner.learner import LocalLearner
from agentgym.learner.process_group import ProcessGroup
from agentgym.models.model import load_weights, model_from_blobs
from agentgym.models.networks import ValueNet


@dataclass(frozen=True)
class LearnerPlan:
    """All that a learner begins with, as bytes that travel to the process it is built in."""

    architecture: str  # config.json
    weights: bytes
    optimizer: OptimizerConfig
    total_steps: int
    critic: bytes | None = None  # weights; empty: a new one on the policy's body
    critic_lr: float | None = None
    reference: bytes | None = None  # weights
    # by blob name; empty: new ones
    optimizer_states: Mapping[str, bytes] = field(default_factory=dict)

    def build(self, ranks: ProcessGroup | None = None) -> LocalLearner:
        """The learner, or this rank's part of it."""
        model = model_from_blobs(self.architecture, self.weights)
        critic = None
        if self.critic is not None:
            critic = ValueNet(model_from_blobs(self.architecture, self.weights))
            if self.critic:
                load_weights(critic, load_safetensors(self.critic))
        reference = (
            None if self.reference is None else model_from_blobs(self.architecture, self.reference)
        )
        learner = LocalLearner(
            model,
            self.optimizer,
            total_steps=self.total_steps,
            ranks=ranks,
            critic=critic,
            critic_lr=self.critic_lr,
            reference=reference,
        )
        if self.optimizer_states:
            learner.load_optimizers(self.optimizer_states)
        return learner
