"""A learner's starting point as references to a store: small to send, built on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from agentgym.config import LearnerConfig, OptimizerConfig
from agentgym.learner.learner import LocalLearner
from agentgym.learner.process_group import ProcessGroup
from agentgym.models.adapter import Adapter, is_matrix, plain_name
from agentgym.models.architecture import ADAPTER_RECORD
from agentgym.models.checkpoint import AdapterRecord
from agentgym.models.model import empty_model, weights_of
from agentgym.models.networks import ValueNet
from agentgym.models.tensorfiles import StoredTensors


@dataclass(frozen=True)
class LearnerPlan:
    """A learner's starting point: settings, and references to stored weights and optimizers."""

    architecture: str  # config.json
    weights: StoredTensors  # of the policy
    optimizer: OptimizerConfig
    total_steps: int
    has_critic: bool = False
    critic: StoredTensors | None = None  # weights; None: a new critic on the policy's body
    critic_lr: float | None = None
    reference: StoredTensors | None = None  # weights; None: no reference
    # by file name; empty: new optimizers
    optimizer_states: Mapping[str, StoredTensors] = field(default_factory=dict)
    settings: LearnerConfig = field(default_factory=LearnerConfig)
    adapter: Adapter | None = None  # its matrices alone are trained; None: all weights are

    def files(self) -> dict[str, bytes]:
        """Return {"adapter.json": the adapter's record} for a commit; {} without an adapter."""
        if self.adapter is None:
            return {}
        return {ADAPTER_RECORD: AdapterRecord.of(self.adapter).model_dump_json().encode()}

    @property
    def size(self) -> int:
        """Bytes that are read to build the learner."""
        sources = (self.weights, self.critic, self.reference, *self.optimizer_states.values())
        return sum(source.size for source in sources if source is not None)

    def build(self, ranks: ProcessGroup | None = None) -> LocalLearner:
        """Build the learner, or this rank's part of it. ranks: None: one process on the CPU.
        Errors: BlobMissing, DigestMismatch; ValueError if stored tensors do not fit; KeyError if an
        optimizer's state is missing.
        """
        model = empty_model(self.architecture, self.weights.dtype)
        if self.adapter is not None:
            self.adapter.inject(model)
        reference = None
        if self.adapter is not None and self.reference == self.adapter.base:
            reference = model
        elif self.reference is not None:
            reference = empty_model(self.architecture, self.reference.dtype)
        critic, body = None, {}
        if self.has_critic:
            like = empty_model(self.architecture, (self.critic or self.weights).dtype)
            names = {parameter: name for name, parameter in like.named_parameters()}
            critic = ValueNet(like, share_prefixes=self.settings.share_prefixes)
            body = {
                name: names[parameter]
                for name, parameter in critic.named_parameters()
                if not name.startswith("head.")
            }
        learner = LocalLearner(
            model,
            self.optimizer,
            total_steps=self.total_steps,
            ranks=ranks,
            critic=critic,
            critic_lr=self.critic_lr,
            reference=reference,
            settings=self.settings,
            adapter=self.adapter,
        )
        if self.adapter is None:
            fill(learner.ranks, model, self.weights)
        else:
            fill_adapted(learner.ranks, model, self.adapter)
        if reference is not None and reference is not model and self.reference is not None:
            fill(learner.ranks, reference, self.reference)
        if critic is not None and self.critic is not None:
            fill(learner.ranks, critic, self.critic)
        elif critic is not None:
            tensors = weights_of(critic)
            for name in tensors.keys() - body.keys():
                tensors[name].zero_()  # the critic's new head
            learner.ranks.load({body[name]: tensors[name] for name in body}, self.weights)
        if self.optimizer_states:
            learner.load_optimizers(self.optimizer_states)
        return learner


def fill(ranks: ProcessGroup, network: nn.Module, stored: StoredTensors) -> None:
    """Load this rank's part of all parameters of a network. Errors: see `LearnerPlan.build`."""
    tensors = weights_of(network)
    stored.require_fit(tensors)
    ranks.load(tensors, stored)


def fill_adapted(ranks: ProcessGroup, model: nn.Module, adapter: Adapter) -> None:
    """Load this rank's parameters of a model with an adapter; matrices that are not stored are new.
    Errors: see `fill`.
    """
    tensors = weights_of(model)
    matrices = {name: tensor for name, tensor in tensors.items() if is_matrix(name)}
    frozen = {plain_name(name): tensor for name, tensor in tensors.items() if not is_matrix(name)}
    adapter.base.require_fit(frozen)
    ranks.load(frozen, adapter.base)
    if adapter.stored is None:
        for name, values in adapter.new_matrices(matrices):
            ranks.copy(matrices[name], values)
    else:
        adapter.stored.require_fit(matrices)
        ranks.load(matrices, adapter.stored)
