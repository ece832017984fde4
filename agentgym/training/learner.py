"""What updates the weights, for reinforcement learning and supervised learning alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentgym.algorithms.advantages import ADVANTAGES
from agentgym.algorithms.batch import Batch
from agentgym.algorithms.losses import LOSSES, aggregation_weights, importance_weights, mismatch
from agentgym.algorithms.recipe import RECIPES
from agentgym.attention import PackedRows, require_ragged
from agentgym.config import AlgorithmConfig, OptimiserConfig

MICRO_BATCH_TOKENS = 16_384  # tokens of one forward and backward
HEAD_CHUNK_TOKENS = 4_096  # action tokens whose logits exist at one time


class EngineMismatch(RuntimeError):
    """The engine does not sample from the policy the learner trains."""


def learning_rate(config: OptimiserConfig, step: int, total_steps: int) -> float:
    """The rate at optimiser step 1 .. total_steps: a pure function of the step, never 0 at the first update."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    shape = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * shape)


class Learner:
    """Holds the trained weights and the optimiser's state."""

    def __init__(self, model: Any, config: OptimiserConfig, *, total_steps: int) -> None:
        require_ragged(model)
        self.model = model.train()
        self._config, self._total_steps = config, total_steps
        self._optimiser = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)

    def action_logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) of every action token, [n] each, at the temperature it was sampled at."""
        assert not batch.action_mask[batch.starts[:-1]].any(), "a row's first token has nothing before it that could have sampled it"
        layout = PackedRows(batch.starts)
        decoder, head = self.model.get_decoder(), self.model.get_output_embeddings()
        hidden = decoder(
            input_ids=batch.input_ids[None], position_ids=layout.position[None], use_cache=False, layout=layout
        ).last_hidden_state[0]
        positions = batch.action_mask.nonzero()[:, 0]

        def head_logprobs(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            logp = torch.log_softmax(head(states).float() / batch.temperature, -1)
            return logp.gather(1, targets[:, None])[:, 0], -(logp.detach().exp() * logp.detach()).sum(-1)

        parts = [
            checkpoint(head_logprobs, hidden[chunk - 1], batch.input_ids[chunk], use_reentrant=False)
            if len(positions) > HEAD_CHUNK_TOKENS
            else head_logprobs(hidden[chunk - 1], batch.input_ids[chunk])
            for chunk in torch.split(positions, HEAD_CHUNK_TOKENS)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        """[N] log-probabilities under the present weights; 0 where action_mask is false."""
        result = torch.zeros(len(batch.input_ids))
        for rows in _micro_batches(batch):
            part = batch.select(rows)
            tokens = torch.isin(batch.row, rows) & batch.action_mask
            result[tokens] = self.action_logprobs(part)[0]
        return result

    def update(self, batch: Batch, config: AlgorithmConfig, *, step: int, seed: int) -> dict[str, float]:
        """One optimiser step of the recipe: `epochs` x `minibatches` updates of the weights.

        step: from 1. Result: metrics by name.
        Errors: EngineMismatch where engine and learner disagree by more than `max_mismatch_kl`; FloatingPointError where
        a loss or gradient is not finite (the weights are then unchanged).
        """
        recipe = RECIPES[config.recipe]
        old = self.score(batch)
        gap = mismatch(old[batch.action_mask], batch.logprobs[batch.action_mask])
        if not gap["kl"] <= config.max_mismatch_kl:
            raise EngineMismatch(
                f"step {step}: engine and learner differ by KL {gap['kl']:.3g} nats per token (limit {config.max_mismatch_kl:g}, largest "
                f"single difference {gap['max_abs']:.3g}); the engine holds other weights, another precision or another temperature"
            )
        advantages = ADVANTAGES[recipe.advantages](batch.returns, batch.group_ids)
        signal = advantages.nonzero()[:, 0]
        metrics = {f"mismatch/{name}": value for name, value in gap.items()}
        metrics["actor/rows_with_signal_frac"] = len(signal) / batch.num_rows
        metrics["actor/lr"] = rate = learning_rate(self._config, step, self._total_steps)
        logs: list[dict[str, float]] = []
        order = np.random.Generator(np.random.Philox(key=[seed, step]))
        num_minibatches = min(config.minibatches, max(len(signal), 1))
        # over the whole batch: where few groups carry signal, few tokens must not count for all of it
        weight = torch.zeros(len(batch.input_ids))
        acted = batch.action_mask
        weight[acted] = num_minibatches * aggregation_weights(batch.row[acted], batch.num_rows, recipe.aggregation)
        for _ in range(config.epochs):
            shuffled = signal[torch.from_numpy(order.permutation(len(signal)))]
            for rows in shuffled.tensor_split(num_minibatches):
                if len(rows):
                    logs.append(self._policy_update(batch, rows.sort().values, old, advantages, weight, config, rate))
        for name in logs[0] if logs else ():
            metrics[f"actor/{name}"] = float(np.mean([log[name] for log in logs]))
        return metrics

    def _policy_update(
        self, batch: Batch, rows: Tensor, old: Tensor, advantages: Tensor, weight: Tensor, config: AlgorithmConfig, rate: float
    ) -> dict[str, float]:
        """One update of the weights from the named rows. weight: [N], of each token's loss."""
        recipe = RECIPES[config.recipe]
        sums = {"loss": 0.0, "entropy": 0.0, "clip_frac": 0.0, "ratio_kl": 0.0}
        self._optimiser.zero_grad(set_to_none=True)
        for micro in _micro_batches(batch, rows):
            part = batch.select(micro)
            tokens = torch.isin(batch.row, micro) & batch.action_mask
            logprobs, entropy = self.action_logprobs(part)
            before, token_advantages = old[tokens], advantages[batch.row[tokens]]
            losses = LOSSES[recipe.policy_loss](logprobs, before, token_advantages, clip_low=config.clip_low, clip_high=config.clip_high)
            losses = losses * importance_weights(before, batch.logprobs[tokens], config.importance_cap)
            loss = (losses * weight[tokens]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                ratio = (logprobs - before).exp()
                outside = (ratio > 1 + config.clip_high) | (ratio < 1 - config.clip_low)
                sums["loss"] += float(loss.detach())
                sums["entropy"] += float((entropy * weight[tokens]).sum())
                sums["clip_frac"] += float((outside * weight[tokens]).sum())
                sums["ratio_kl"] += float(((ratio - 1 - (logprobs - before)) * weight[tokens]).sum())
        norm, share = self._apply(rate, sums["loss"]), float(weight[torch.isin(batch.row, rows)].sum())
        return {"loss": sums.pop("loss"), "grad_norm": norm, **{name: value / share for name, value in sums.items()}}

    def supervised(self, batch: Batch, *, step: int) -> dict[str, float]:
        """One optimiser step of maximum likelihood on the action tokens of demonstrations. step: from 1."""
        num_tokens = int(batch.action_mask.sum())
        if not num_tokens:
            raise ValueError("a supervised batch without a single action token; check the action mask of the demonstrations")
        total = 0.0
        self._optimiser.zero_grad(set_to_none=True)
        for rows in _micro_batches(batch):
            loss = -self.action_logprobs(batch.select(rows))[0].sum() / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        rate = learning_rate(self._config, step, self._total_steps)
        return {"sft/loss": total, "sft/lr": rate, "sft/grad_norm": self._apply(rate, total)}

    def _apply(self, rate: float, loss: float) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.grad_clip))
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise FloatingPointError(f"loss {loss} with gradient norm {norm} is not finite; the weights were not changed")
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        return norm

    def optimiser_blob(self) -> bytes:
        """The optimiser's state as safetensors, by parameter name."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            for key, value in self._optimiser.state.get(parameter, {}).items():
                tensors[f"{name}:{key}"] = value.contiguous()
        return bytes(save_safetensors(tensors))

    def load_optimiser(self, blob: bytes) -> None:
        """The inverse of `optimiser_blob`, for a model of the same parameters."""
        saved: dict[str, dict[str, Tensor]] = {}
        for name, tensor in load_safetensors(blob).items():
            parameter, _, key = name.rpartition(":")
            saved.setdefault(parameter, {})[key] = tensor
        for name, parameter in self.model.named_parameters():
            if name in saved:
                self._optimiser.state[parameter] = saved[name]


def _micro_batches(batch: Batch, rows: Tensor | None = None) -> Iterator[Tensor]:
    """Consecutive rows whose padded size stays under the token budget; at least one row each."""
    lengths = (batch.starts[1:] - batch.starts[:-1]).tolist()
    chosen: list[int] = []
    longest = 0
    for row in range(batch.num_rows) if rows is None else rows.tolist():
        longest = max(longest, lengths[row])
        if chosen and longest * (len(chosen) + 1) > MICRO_BATCH_TOKENS:
            yield torch.tensor(chosen)
            chosen, longest = [], lengths[row]
        chosen.append(row)
    if chosen:
        yield torch.tensor(chosen)
