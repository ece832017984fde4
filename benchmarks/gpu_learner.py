"""Cases of gpu.py that run the learner, and the sizes and models of all its cases."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from endless import renderer
from packed import batch_of, packed, padded, twin_of

from agentgym.algorithms.advantages import with_advantages
from agentgym.algorithms.batch import Batch
from agentgym.config import (
    LearnerConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyGradientConfig,
    algorithm_config,
)
from agentgym.learner.learner import LocalLearner
from agentgym.learner.process_group import ProcessGroup
from agentgym.models import attention
from agentgym.models.checkpoint import Checkpoint, new_checkpoint
from agentgym.models.model import new_model

CONTEXT = 2048
PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312}  # dense bfloat16, from the data sheets


shape = partial(ModelConfig, context_tokens=CONTEXT)
# Qwen2.5's dimensions, weights drawn at random
GPU_1_5B = shape(hidden_size=1536, num_layers=28, num_heads=12, num_kv_heads=2, mlp_size=8960)
GPU_7B = shape(hidden_size=3584, num_layers=28, num_heads=28, num_kv_heads=4, mlp_size=18_944)
TINY = shape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, mlp_size=96)


@dataclass(frozen=True)
class Size:
    """Sizes of all cases; by default those on a GPU."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    model: ModelConfig = field(default_factory=lambda: GPU_1_5B)
    vocab_size: int = 151_936
    num_episodes: int = 512
    concurrency: int = 256
    rounds: int = 3
    sequences: int = 64  # whose log-probabilities are compared
    matmul: int = 8192  # side of a square
    copied: int = 4 << 30  # bytes
    staged: tuple[str, ...] = ("compute_device=cuda", "rollout.engine=vllm")  # of the staged run
    trained: tuple[int, ...] = (2048,) * 8  # lengths of the sequences of an update
    # lengths of sequences that differ
    mixed: tuple[int, ...] = (256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096)
    prompt_tokens: int = 596  # of a request
    new_tokens: int = 200


GPU = Size()
DRY = Size(
    "cpu",
    torch.float32,
    TINY,
    vocab_size=300,
    num_episodes=6,
    concurrency=4,
    rounds=1,
    sequences=4,
    matmul=64,
    copied=1 << 20,
    staged=(
        *("rollout.engine=vllm", "horizon.stage_steps=[1,1,1]", "warm_start.steps=2"),
        *("rollout.items_per_step=2", "validation.num_items=4", "evaluation.num_items=4"),
        *("evaluation.num_samples=1", "evaluation.k=[1]"),
    ),
    trained=(48,) * 4,
    mixed=(8, 12, 16, 48, 64),
    prompt_tokens=12,
    new_tokens=4,
)


def case_ceilings(size: Size) -> dict[str, Any]:
    """The highest rates of the device: a matrix product and a copy"""
    block = torch.empty(size.copied, dtype=torch.uint8, device=size.device)
    copied = round(2 * size.copied / seconds(size, block.clone) / 1e9, 1)
    return {"matmul_tflops": round(matmul_tflops(size), 1), "copy_gb_per_s": copied}


def matmul_tflops(size: Size) -> float:
    square = torch.randn(size.matmul, size.matmul, device=size.device, dtype=size.dtype)
    return 2 * size.matmul**3 / seconds(size, lambda: square @ square) / 1e12


def seconds(size: Size, work: Callable[[], Any]) -> float:
    """Return the median seconds of 5 calls, after 2 warm-up calls."""
    wait = torch.cuda.synchronize if size.device == "cuda" else lambda: None

    def once() -> float:
        wait()
        began = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - began

    return statistics.median([once() for _ in range(7)][2:])


def case_step(size: Size) -> dict[str, Any]:
    """A whole step of the learner, supervised and GRPO: rate, utilization, the scoring pass"""
    batch = actions_of(size, size.trained)
    grpo = algorithm_config("grpo", max_mismatch_kl=1e9)
    assert isinstance(grpo, PolicyGradientConfig)
    numbers = torch.arange(batch.num_sequences, device=size.device)
    rewards = torch.zeros_like(batch.rewards)
    rewards[batch.starts[1:] - 1] = (numbers % 2).float()
    batch = replace(batch, group_ids=numbers // 2, rewards=rewards)
    learner = learner_of(size, LearnerConfig(micro_batch_tokens=size.trained[0] * 2))
    steps = itertools.count(1)

    def learn() -> None:
        step = next(steps)
        experience = with_advantages(learner.prepare(batch, grpo, step=step), grpo)
        learner.update(experience, grpo, step=step, seed=0)

    def rate(took: float) -> dict[str, Any]:
        mfu = mfu_of(size, model_flops(size, batch) / took / 1e12)
        return {"tokens_per_s": round(batch.num_tokens / took), "mfu": mfu}

    parts = {
        "sft": seconds(size, lambda: learner.sft_step(batch, step=next(steps))),
        "grpo": seconds(size, learn),
    }
    return {
        "definition": "model FLOPs as in `training`; the scoring pass counts as time alone",
        "tokens": batch.num_tokens,
        **{f"{kind}_{name}": value for kind, t in parts.items() for name, value in rate(t).items()},
        "scoring_s": round(seconds(size, lambda: learner.score(batch)), 4),
    }


def case_optimizer(size: Size) -> dict[str, Any]:
    """AdamW's step alone, clipping and rounding included, on masters of float32"""
    learner = learner_of(size, LearnerConfig())
    batch = actions_of(size, (16,))
    learner.sft_step(batch, step=1)
    network = learner._policy
    for master in network._masters.values():
        master.grad = torch.full_like(master, 1e-3)
    took = seconds(size, lambda: network.optimizer_step(2, 0.0))
    return {"parameters": sum(m.numel() for m in network._masters.values()), "step_s": took}


def case_training(size: Size) -> dict[str, Any]:
    """Forward and backward of the learner: model FLOPs utilization and memory"""
    return training(size, ("plain", "checkpointed", "compiled"))


def case_training_7b(size: Size) -> dict[str, Any]:
    """The same of 7 B, with checkpointing, which 80 GB hold"""
    large = replace(size, model=GPU_7B) if size.device == "cuda" else size
    return training(large, ("checkpointed",))


def training(size: Size, kinds: Sequence[str]) -> dict[str, Any]:
    batch = actions_of(size, size.trained)
    flops, ceiling = model_flops(size, batch), matmul_tflops(size)
    result: dict[str, Any] = {
        "definition": (
            "model FLOPs: 6 a token for each weight of blocks and head, and for attention 6 x"
            " layers x width x length, recomputation not counted; mfu: their rate by the peak of"
            " the data sheet, of_matmul by that of a large matrix product in this run"
        ),
        "matmul_tflops": round(ceiling, 1),
    }
    settings_of: dict[str, dict[str, Any]] = {
        "plain": {},
        "checkpointed": {"activation_checkpointing": True},
        "compiled": {"compile": "inductor" if size.device == "cuda" else "aot_eager"},
    }
    for name in kinds:
        settings = LearnerConfig(micro_batch_tokens=1 << 30, **settings_of[name])
        figures = trained(size, batch, settings)
        rate = flops / figures["seconds"] / 1e12
        result |= {
            f"{name}_tokens_per_s": round(batch.num_tokens / figures["seconds"]),
            f"{name}_mfu": mfu_of(size, rate),
            f"{name}_of_matmul": round(rate / ceiling, 3),
            f"{name}_peak_gib": figures["peak_gib"],
        }
    return result


def model_flops(size: Size, batch: Batch) -> float:
    """Return the model FLOPs of a forward and backward of the batch.
    All sequences count as if they were as long as the first one of `size.trained`.
    """
    model = size.model
    width, layers = model.hidden_size, model.num_layers
    grouped = width * model.num_kv_heads // model.num_heads
    block = layers * (2 * width * (width + grouped) + 3 * width * model.mlp_size)
    head = size.vocab_size * width
    causal = layers * width * size.trained[0]  # scores and values, half of each
    return 6 * batch.num_tokens * (block + head + causal)


def case_head(size: Size) -> dict[str, Any]:
    """The output head in chunks against whole logits: memory and time"""
    batch = actions_of(size, size.trained)
    about = "forward and backward of one block and the head, every token an action"
    result: dict[str, Any] = {"definition": about, "tokens": batch.num_tokens}
    small = replace(size, model=size.model.model_copy(update={"num_layers": 1}))
    for name, chunk in {"whole": batch.num_tokens, "chunked": batch.num_tokens // 4}.items():
        settings = LearnerConfig(micro_batch_tokens=1 << 30, head_chunk_tokens=chunk)
        figures = trained(small, batch, settings)
        result |= {
            f"{name}_peak_gib": figures["peak_gib"],
            f"{name}_s": round(figures["seconds"], 4),
        }
    return result


def case_varlen(size: Size) -> dict[str, Any]:
    """Sequences of different lengths: attention without padding, with it, and whole rows padded"""
    # a fourth of the blocks and a tenth of the vocabulary: it compares what lies between the two
    fewer = size.model.model_copy(update={"num_layers": max(2, size.model.num_layers // 4)})
    size = replace(size, model=fewer, vocab_size=max(300, size.vocab_size // 10))
    batch = actions_of(size, size.mixed)
    model = made(size).model.to(size.device)
    twin = twin_of(model)
    able = attention.has_kernel
    times = {"without_padding": seconds(size, lambda: packed(model, batch))}
    try:
        attention.has_kernel = lambda *_: False
        times["attention_padded"] = seconds(size, lambda: packed(model, batch))
    finally:
        attention.has_kernel = able
    times["rows_padded"] = seconds(size, lambda: padded(twin, batch, max(size.mixed)))
    return {
        "definition": "tokens of the sequences per second of a forward and backward",
        "tokens": batch.num_tokens,
        **{f"{name}_tokens_per_s": round(batch.num_tokens / took) for name, took in times.items()},
        "ratio_to_rows": round(times["rows_padded"] / times["without_padding"], 2),
    }


def trained(size: Size, batch: Batch, settings: LearnerConfig) -> dict[str, float]:
    """Return the seconds of a forward and backward of all sequences, and their peak memory."""
    learner = learner_of(size, settings)
    every = torch.arange(batch.num_sequences, device=size.device)

    def learn() -> None:
        dealt = learner.passes.deal(batch, every)
        learner.passes.forward_backward(
            batch, dealt, lambda part, _: (-learner._net(part)[0].mean(), {})
        )
        learner._policy.zero_grad()

    if size.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    took = seconds(size, learn)
    peak = torch.cuda.max_memory_allocated() if size.device == "cuda" else 0
    return {"seconds": took, "peak_gib": round(peak / 2**30, 2)}


def learner_of(size: Size, settings: LearnerConfig) -> LocalLearner:
    ranks, optimizer = ProcessGroup(size.device), OptimizerConfig(lr=1e-6)
    model = made(size).model
    return LocalLearner(model, optimizer, total_steps=1000, ranks=ranks, settings=settings)


def actions_of(size: Size, lengths: Sequence[int]) -> Batch:
    """Return random tokens; all but the first of each sequence are actions."""
    batch = batch_of(lengths, seed=0, vocabulary=size.vocab_size, action_frac=1.0)
    return batch.to(torch.device(size.device))


def mfu_of(size: Size, tflops: float) -> float | None:
    """Return the share of the device's peak TFLOP/s, or None if that is unknown."""
    name = torch.cuda.get_device_name() if size.device == "cuda" else ""
    peaks = [peak for known, peak in PEAK_TFLOPS.items() if known in name]
    return round(tflops / peaks[0], 3) if peaks else None


def made(size: Size, seed: int = 0) -> Checkpoint:
    """Return a model with random weights whose distributions are far from uniform."""
    tokenizer = renderer()._tokenizer
    model = new_model(
        size.model,
        vocab_size=size.vocab_size,
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        seed=seed,
    )
    with torch.no_grad():
        model.model.norm.weight.mul_(4.5 / (0.02 * size.model.hidden_size**0.5))
    return new_checkpoint(model.to(size.dtype), tokenizer)
