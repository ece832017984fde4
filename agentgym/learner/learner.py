"""The learner, for reinforcement learning, supervised learning and preferences alike.

Every rank runs the same code on the same batch: it computes its share of the sequences, and
sums over ranks make the rest global. Denominators, statistics and the order of updates never
depend on the number of ranks or micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentgym.algorithms.batch import Batch, Experience
from agentgym.algorithms.losses import aggregation_weights, kl_penalty, preference_loss
from agentgym.algorithms.recipe import recipe_of
from agentgym.config import ActorCriticConfig, LearnerConfig, OptimizerConfig, PolicyGradientConfig
from agentgym.defaults import return_memory
from agentgym.learner.micro_batches import (
    Dealt,
    LossFunction,
    Passes,
    TrainingFlops,
    all_sequences,
    device_peak_tflops,
    head_chunk_tokens,
    minibatches,
)
from agentgym.learner.objective import critic_objective, policy_objective, scored
from agentgym.learner.optimizer import OptimizedNetwork
from agentgym.learner.process_group import ProcessGroup
from agentgym.models.adapter import Adapter, is_matrix, merged_weights, without_adapter
from agentgym.models.architecture import ADAPTER, WEIGHTS
from agentgym.models.checkpoint import CRITIC, CRITIC_OPTIMIZER, OPTIMIZER
from agentgym.models.networks import PolicyNet, ValueNet, checkpoint_blocks, compile_blocks
from agentgym.models.tensorfiles import Snapshot, StoredTensors


class LocalLearner:
    """One rank's networks and optimizers: scores batches, updates weights and copies its state."""

    def __init__(
        self,
        model: Any,
        config: OptimizerConfig,
        *,
        total_steps: int,
        ranks: ProcessGroup | None = None,
        critic: ValueNet | None = None,
        critic_lr: float | None = None,
        reference: Any = None,
        settings: LearnerConfig | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Take over the networks: they are moved to the ranks' device and sharded in place, in
        evaluation mode. Optimizers begin anew; see `load_optimizers`.
        model, reference: causal language models built with RAGGED attention; the reference is never
        trained, and may be the model itself, scored without its adapter.
        total_steps: length of the learning-rate schedule. ranks: None: one process on the CPU.
        critic_lr: None: that of `config`. adapter: the model's, if only its matrices are trained.
        """
        self.ranks, self._settings = ranks or ProcessGroup(), settings or LearnerConfig()
        self.model = model.eval()  # no dropout, because the engine samples without it
        self.passes, share = Passes(self._settings, self.ranks), self._settings.share_prefixes
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        chunk = head_chunk_tokens(self._settings, self.ranks.device, vocab_size)
        self._net, self._adapter = PolicyNet(model, chunk, share_prefixes=share), adapter
        self._reference = self._net if reference is model else None
        self._critic = critic
        self._flops = TrainingFlops.of(model, model)
        self._critic_flops = [] if critic is None else [TrainingFlops.of(critic, critic.body)]
        networks: list[nn.Module] = [self._net, *([] if critic is None else [critic])]
        if reference is not None and reference is not model:
            frozen = reference.eval().requires_grad_(False)
            self._reference = PolicyNet(frozen, chunk, share_prefixes=share)
            networks.append(self._reference)
        for network in networks:
            if self._settings.compile != "none":
                compile_blocks(network, self._settings.compile)
            if self._settings.activation_checkpointing:
                checkpoint_blocks(network)
            self.ranks.shard(network)

        offload = self._settings.offload_optimizer
        optimized = partial(
            OptimizedNetwork, total_steps=total_steps, ranks=self.ranks, offload=offload
        )
        self._policy, self._values = optimized(model, config), None
        if critic is not None:
            critic_config = config.model_copy(update={"lr": critic_lr or config.lr})
            self._values = optimized(critic.eval(), critic_config)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights for engines by name, whole and detached: with the adapter merged, or
        only its matrices if `adapter.alone`. They may share memory with the learner's weights.
        All ranks must call it.
        """
        return dict(self._published())

    def weights_on_host(self) -> dict[str, Tensor]:
        """Copy `weights` to host memory, one at a time. Rank 0 returns them, other ranks {}.
        All ranks must call it.
        """
        copies = {}
        for name, tensor in self._published():
            if self.ranks.rank == 0:
                copies[name] = tensor.to("cpu", copy=True)
        return copies

    def _published(self) -> Iterator[tuple[str, Tensor]]:
        parameters, whole = self._policy.weights(), self.ranks.whole
        adapter = self._adapter
        if adapter is not None and not adapter.alone:
            return merged_weights(parameters, adapter.scale, whole)
        return (
            (name, whole(part))
            for name, part in parameters.items()
            if adapter is None or is_matrix(name)
        )

    def snapshot(self, with_optimizer: bool = True) -> Snapshot:
        """Copy to host memory this rank's part of what another learner needs to continue: trained
        weights, critic and, unless `with_optimizer` is False, the optimizers' states.
        """
        trained = WEIGHTS if self._adapter is None else ADAPTER
        files = self.ranks.snapshot(self._policy.parameters(), trained)
        if self._values is not None:
            files |= self.ranks.snapshot(self._values.parameters(), CRITIC)
        if with_optimizer:
            files |= self.ranks.snapshot(self._policy.state(), OPTIMIZER)
        if with_optimizer and self._values is not None:
            files |= self.ranks.snapshot(self._values.state(), CRITIC_OPTIMIZER)
        return Snapshot(files)

    def load_optimizers(self, states: Mapping[str, StoredTensors]) -> None:
        """Load the optimizers' states. states: by file name, for example `optimizer.safetensors`.
        Errors: KeyError if one is missing; those of `OptimizedNetwork.load_state`.
        """
        self._policy.load_state(states[OPTIMIZER])
        if self._values is not None:
            self._values.load_state(states[CRITIC_OPTIMIZER])

    def peak_tflops(self, of_device: float | None) -> float | None:
        """Return the sum of all ranks' peak rates, TFLOP/s; None if unknown.
        of_device: peak rate of one device; None looks it up by the device's name.
        """
        per_rank = of_device or device_peak_tflops(self.ranks.device)
        return per_rank and per_rank * self.ranks.size

    def score(self, batch: Batch) -> Tensor:
        """Return [N] log-probabilities under the weights, on the CPU; 0 at tokens not sampled."""
        return self.passes.scores(self._net, batch.to(self.ranks.device))[0].cpu()

    def score_reference(self, batch: Batch) -> Tensor:
        """Return `score` under the reference. Errors: ValueError without a reference."""
        return self._reference_scores(batch.to(self.ranks.device)).cpu()

    def drop_reference(self) -> None:
        """Drop the reference, so that its memory is freed. `score_reference` then fails."""
        self._reference = None

    def prepare(self, batch: Batch, algorithm: PolicyGradientConfig, *, step: int) -> Experience:
        """Return a batch's experience before the update, on the learner's device, without
        advantages: log-probabilities of learner and reference, corrections, a critic's values.

        If the KL penalty is a part of the rewards, they contain it, and the reference is left out.
        If only one update follows (`_merges`), and rewards need no log-probabilities, the learner's
        are left out: `update` takes them from its own forward. step: from 1.
        Errors: EngineMismatch if engine and learner disagree by more than `max_mismatch_kl`;
        ValueError for a batch without action tokens, or without a critic or reference it needs.
        """
        batch, recipe = batch.to(self.ranks.device), recipe_of(algorithm.recipe)
        acted = batch.action_mask
        if not acted.any():
            raise ValueError(
                "a batch without a single action token; there is nothing to learn from"
            )
        in_reward = bool(algorithm.kl_coef) and (algorithm.kl_place or recipe.kl_place) == "reward"
        scores = None
        if in_reward or not self._merges(algorithm, step):
            scores = self.passes.scores(self._net, batch)[:, acted]
        rewards, reference = batch.rewards[acted], None
        if algorithm.kl_coef:
            if self._reference is None:
                raise ValueError(
                    f"algorithm.kl_coef {algorithm.kl_coef:g} needs a reference model; none was"
                    " given to the learner"
                )
            reference = self._reference_scores(batch)[acted]
        if in_reward:
            assert scores is not None
            assert reference is not None
            estimator = algorithm.kl_estimator or recipe.kl_estimator
            rewards = rewards - algorithm.kl_coef * kl_penalty(scores[0], reference, estimator)
        values = ends = None
        if isinstance(algorithm, ActorCriticConfig):
            if self._critic is None:
                raise ValueError(
                    f"recipe {algorithm.recipe} needs a critic; none was given to the learner"
                )
            values, ends = self.passes.values(self._critic, batch)
            bootstraps = batch.truncated & (
                (algorithm.truncated or recipe.truncated) == "bootstrap"
            )
            ends = torch.where(bootstraps, ends, 0.0)
        experience = Experience(batch, rewards, reference=reference, values=values, end_values=ends)
        if scores is not None:
            experience = scored(experience, scores, algorithm, step)
        return replace(experience, reference=None) if in_reward else experience

    def _merges(self, algorithm: PolicyGradientConfig, step: int) -> bool:
        """Return True if the log-probabilities before the only update can come from its forward:
        with shared prefixes, one epoch of one minibatch, and no critic warmup.
        """
        is_only = algorithm.epochs == algorithm.minibatches == 1
        return self._settings.share_prefixes and is_only and not _is_warming(algorithm, step)

    def update(
        self, experience: Experience, algorithm: PolicyGradientConfig, *, step: int, seed: int
    ) -> tuple[Experience, dict[str, float]]:
        """Take one training step of the recipe: `epochs` x `minibatches` updates.

        experience: of `prepare`, with advantages added; step: from 1; seed: of the minibatches.
        Result: (the experience with log-probabilities, metrics by name that are not in it).
        Errors: FloatingPointError at the first update whose loss or gradient is not finite;
        EngineMismatch as in `prepare` (weights unchanged); ValueError without advantages.
        """
        experience = experience.to(self.ranks.device)
        if experience.advantages is None:
            raise ValueError("an experience without advantages; see `with_advantages`")
        num_sequences, sequence = experience.batch.num_sequences, experience.sequence
        carrying = torch.unique(sequence[experience.advantages != 0])  # [C], ascending
        has_more = experience.targets is not None or experience.reference is not None
        # entropy, reference KL and critic losses need all sequences, also those without advantage
        signal = all_sequences(experience.batch) if has_more or algorithm.entropy_coef else carrying
        num_minibatches = min(algorithm.minibatches, max(len(signal), 1))
        # computed over the whole batch: a token has the same weight whether few or many groups
        # carry signal
        weights = num_minibatches * aggregation_weights(
            sequence,
            num_sequences,
            algorithm.aggregation or recipe_of(algorithm.recipe).aggregation,
            algorithm.constant_length,
        )
        critic_loss = critic_objective(self._critic, experience, algorithm, num_minibatches)
        is_warming = _is_warming(algorithm, step)
        rest = self._rest(experience, signal)
        computed = experience.rewards.new_zeros(2, len(experience.rewards))
        policy_loss = policy_objective(self._net, experience, algorithm, weights, computed)
        logs: dict[str, list[float]] = {}
        tflop = 0.0
        networks = self._critic_flops if is_warming else [self._flops, *self._critic_flops]
        for chosen in minibatches(signal, algorithm.epochs, num_minibatches, key=(seed, step)):
            dealt = self.passes.deal(experience.batch, chosen)
            tflop += dealt.tflop(networks)
            if not is_warming:
                self._policy.zero_grad()
                logged = self.passes.forward_backward(experience.batch, dealt, policy_loss)
                if experience.logprobs is None:
                    scores = rest + self._of_all_ranks(computed, sequence, dealt)
                    experience = scored(experience, scores, algorithm, step)
                self._optimize(self._policy, step, logged)
                share = float(weights[torch.isin(sequence, chosen)].sum())
                _collect(logs, "actor", logged, share)
            if critic_loss is not None and self._critic is not None:
                assert self._values is not None
                logged = self._step(self._values, experience.batch, dealt, step, critic_loss)
                _collect(logs, "critic", logged, 1.0)
        if experience.logprobs is None:  # no sequence carries signal
            experience = scored(experience, rest, algorithm, step)
        return experience, {
            "actor/lr": self._policy.rate(step),
            "actor/sequences_with_signal_frac": len(carrying) / num_sequences,
            "perf/update_tflop": tflop,
            **{name: float(np.mean(values)) for name, values in logs.items()},
            **experience.critic_metrics,
        }

    def _rest(self, experience: Experience, signal: Tensor) -> Tensor:
        """Return [2, n] log-probabilities and entropies of the sequences not in `signal`, 0 for the
        others; all 0 if the experience has its log-probabilities. signal: [C] int64 indices.
        """
        batch = experience.batch
        if experience.logprobs is not None:
            return torch.zeros(2, len(experience.rewards), device=batch.rewards.device)
        every = all_sequences(batch)
        outside = every[~torch.isin(every, signal)]
        return self.passes.scores(self._net, batch, outside)[:, batch.action_mask]

    def _of_all_ranks(self, computed: Tensor, sequence: Tensor, dealt: Dealt) -> Tensor:
        """Sum [2, n] scores over ranks, each rank's for the sequences dealt to it; 0 for others."""
        of_rank = [index for part in dealt.ranks[self.ranks.rank] for index in part]
        is_of_rank = torch.isin(sequence, torch.tensor(of_rank, device=computed.device))
        return self.ranks.all_sum(torch.where(is_of_rank, computed, 0.0))

    def sft_step(self, batch: Batch, *, step: int) -> dict[str, float]:
        """Take one optimizer step of maximum likelihood on demonstrations; return metrics by name.
        step: from 1. Errors: ValueError for a batch without action tokens; FloatingPointError, with
        unchanged weights, if loss or gradient is not finite.
        """
        batch = batch.to(self.ranks.device)
        num_tokens = int(batch.action_mask.sum())
        if not num_tokens:
            raise ValueError(
                "a supervised batch without a single action token; check the action mask of the"
                " demonstrations"
            )

        def loss(part: Batch, at: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs, entropy = self._net(part)
            return -logprobs.sum() / num_tokens, {"entropy": entropy.detach() / num_tokens}

        dealt = self.passes.deal(batch, all_sequences(batch))
        logged = self._step(self._policy, batch, dealt, step, loss)
        return {
            "sft/loss": logged["loss"],
            "sft/lr": self._policy.rate(step),
            "sft/grad_norm": logged["grad_norm"],
            "sft/entropy": logged["entropy"],
            "perf/update_tflop": dealt.tflop([self._flops]),
        }

    def dpo_step(
        self, batch: Batch, reference: Tensor, *, beta: float, label_smoothing: float, step: int
    ) -> dict[str, float]:
        """Take one optimizer step of direct preference optimization; return metrics by name.
        Sequence 2i of the batch is preferred to 2i + 1. reference: [N], of `score_reference`.
        beta, label_smoothing: see `preference_loss`. step: from 1.
        Errors: as `sft_step`; ValueError for an odd number of sequences or one without actions.
        """
        batch = batch.to(self.ranks.device)
        num_acting = len(torch.unique(batch.sequence[batch.action_mask]))
        if batch.num_sequences % 2 or num_acting != batch.num_sequences:
            raise ValueError(
                f"preferences come as pairs of sequences that act, got {batch.num_sequences}; check"
                " the pairs"
            )
        num_pairs, num_tokens = batch.num_sequences // 2, int(batch.action_mask.sum())
        reference_logprobs = reference.to(self.ranks.device)[batch.action_mask]

        def loss(part: Batch, at: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs, entropy = self._net(part)
            gain = logprobs - reference_logprobs[at]
            sequence = part.sequence[part.action_mask]
            sums = gain.new_zeros(part.num_sequences).index_add(0, sequence, gain)
            chosen, rejected = sums[0::2], sums[1::2]
            losses = preference_loss(chosen, rejected, beta=beta, label_smoothing=label_smoothing)
            margin = (chosen - rejected).detach()
            return (losses / num_pairs).sum(), {
                "accuracy": (margin > 0) / num_pairs,
                "margin": beta * margin / num_pairs,
                "entropy": entropy.detach() / num_tokens,
            }

        dealt = self.passes.deal(batch, all_sequences(batch), unit=2)
        logged_sums = self._step(self._policy, batch, dealt, step, loss)
        return {f"dpo/{name}": value for name, value in logged_sums.items()} | {
            "dpo/lr": self._policy.rate(step),
            "perf/update_tflop": dealt.tflop([self._flops]),
        }

    def _step(
        self, network: OptimizedNetwork, batch: Batch, dealt: Dealt, step: int, loss: LossFunction
    ) -> dict[str, float]:
        """Take one update of one network. Return loss, logged values and `grad_norm`, by name."""
        network.zero_grad()
        logged = self.passes.forward_backward(batch, dealt, loss)
        self._optimize(network, step, logged)
        return logged

    def _optimize(self, optimized: OptimizedNetwork, step: int, logged: dict[str, float]) -> None:
        logged["grad_norm"] = optimized.optimizer_step(step, logged["loss"])
        return_memory()

    def _reference_scores(self, batch: Batch) -> Tensor:
        """Return [N] log-probabilities under the reference. Errors: ValueError without one."""
        if self._reference is None:
            raise ValueError("a reference model is needed; none was given to the learner")
        if self._reference is not self._net:
            return self.passes.scores(self._reference, batch)[0]
        with without_adapter(self.model):
            return self.passes.scores(self._net, batch)[0]


def _is_warming(algorithm: PolicyGradientConfig, step: int) -> bool:
    """Return True if only the critic learns in this step."""
    return isinstance(algorithm, ActorCriticConfig) and step <= algorithm.critic_warmup_steps


def _collect(
    logs: dict[str, list[float]], prefix: str, logged: dict[str, float], share: float
) -> None:
    """Append an update's logged values to the lists in `logs`, named `prefix`/name: loss and norm
    unchanged, sums divided by `share`, the weight of the sequences that took part.
    """
    for name, value in logged.items():
        logs.setdefault(f"{prefix}/{name}", []).append(
            value if name in ("loss", "grad_norm") else value / share
        )
