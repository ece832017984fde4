"""Check that training on the logged episodes gives the recorded weights, by taking the optimizer
steps again.

A stage's last weights follow from its first ones and from the episodes of its optimizer steps; the
warm start's weights follow from the demonstrations. All of these are in the store. Weights whose
steps are not taken again are not proven.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from agentgym.algorithms.advantages import with_advantages
from agentgym.algorithms.batch import why_not
from agentgym.audit.findings import Checks
from agentgym.audit.stored_steps import StepRecord
from agentgym.config import DynamicSamplingConfig, RunConfig
from agentgym.learner.process_group import ProcessGroup
from agentgym.models.checkpoint import load_checkpoint, policy_of
from agentgym.steps.context import StepReader
from agentgym.steps.step import Kind
from agentgym.training.rl import batch_of, plan_learner, with_limit
from agentgym.training.sft import batch_at, learnable, plan_warm_start

# largest deviation of a nondeterministic run's weights, as a share of their whole change
TOLERANCE = 5e-3


def check_updates(
    cfg: RunConfig, steps: Sequence[StepRecord], max_steps: int, checks: Checks
) -> None:
    """Take the optimizer steps of each finished warm start and stage again, and compare the last
    weights with the recorded ones.

    max_steps: a step of the run with more optimizer steps than this is skipped; 0 skips all.
    Offline stages, stages with `rollout.max_staleness` and steps on Ray are always skipped.
    """
    for record in steps:
        if record.step.kind is not Kind.TRAIN or record.final is None:
            continue
        is_stage, num = record.stage is not None, _num_steps(record)
        if is_stage and not cfg.algorithm.loop.samples_every_step:
            why = "only steps of reinforcement learning are taken again"
        elif cfg.compute == "ray" or (is_stage and cfg.rollout.max_staleness):
            why = "steps that several processes took are not taken again"
        elif num > max_steps:
            why = f"--updates {num} takes its {num} optimizer steps again"
        else:
            with checks.guard(f"weights of {record.name}"):
                _check_stage(record, checks)
            continue
        checks.skip(f"weights of {record.name}", why, weighs=max_steps > 0)


def _num_steps(record: StepRecord) -> int:
    """Return how many optimizer steps a finished stage or warm start took."""
    assert record.final is not None
    of_warm_start = record.final.state.get("sft_step", 0)
    return len(record.commits) if record.stage is not None else int(of_warm_start)


def _check_stage(record: StepRecord, checks: Checks) -> None:
    start, final, store = record.checkpoint, record.final, record.store
    assert start is not None
    assert final is not None
    before, recorded = policy_of(store, start).load(), policy_of(store, final).load()
    again = _taken_again(record)
    change = _norm(recorded[name].double() - before[name].double() for name in recorded)
    apart = _norm(recorded[name].double() - again[name].double() for name in recorded)
    num_steps = _num_steps(record)
    checks.counted += num_steps
    share = apart / change if change else float(apart > 0)
    checks.notes.append(f"{record.name}: {share:.1e} of the change")
    limit = 0.0 if record.cfg.deterministic else TOLERANCE
    if not share <= limit:
        checks.fail(
            f"{record.name}: its weights are {share:.2%} of their change away from what its"
            f" {num_steps} optimizer steps make of the logged episodes (limit {limit:.2%})"
        )


def _taken_again(record: StepRecord) -> dict[str, Tensor]:
    """Take the optimizer steps of a stage again on its logged episodes, or those of the warm start
    on the demonstrations, and return the resulting weights.
    """
    cfg, store = record.cfg, record.store
    reader = StepReader(cfg=cfg, step=record.step, store=store, parents=record.parents)
    start = reader.checkpoint
    checkpoint, ranks = load_checkpoint(store, start), ProcessGroup(cfg.compute_device)
    if record.stage is None:
        demos, _ = learnable(reader, checkpoint)
        learner = plan_warm_start(reader, start, checkpoint).build(ranks)
        for step in range(1, _num_steps(record) + 1):
            learner.sft_step(batch_at(cfg, demos, step), step=step)
        return learner.weights()
    algorithm, plan = with_limit(cfg, checkpoint), plan_learner(reader, start, checkpoint)
    signal = isinstance(algorithm, DynamicSamplingConfig)
    learner = plan.build(ranks)
    for commit in record.commits:
        step = int(commit.state["global_step"])
        logged = record.episodes[commit.seq]
        played = [episode for episode in logged if episode.item.split == "train"]
        reasons = why_not(played, truncated=algorithm.truncated or "zero", signal=signal)
        learned = [episode for episode, reason in zip(played, reasons, strict=True) if not reason]
        if learned:
            batch = batch_of(cfg, algorithm, learned, step)
            experience = with_advantages(learner.prepare(batch, algorithm, step=step), algorithm)
            learner.update(experience, algorithm, step=step, seed=cfg.seed)
    return learner.weights()


def _norm(parts: Iterator[Tensor]) -> float:
    return float(torch.stack([part.square().sum() for part in parts]).sum().sqrt())
