"""vLLM and the learner on one GPU, in one go: `python benchmarks/gpu.py [CASE ...]`.

`--dry-run` runs every case's code on the CPU with a tiny model and writes nothing: its figures mean
nothing. Writes docs/results/gpu.json; cases not asked for keep what the file says of them.
Run it with the Python of an environment that has vLLM. Ratios are taken within one run, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from packed import batch_of, packed, padded, twin_of
from pipeline import ROOT, in_a_process, machine  # of this folder
from rollouts import TURNS, Latency, endless, episodes, renderer, serving

from agentgym.algorithms.batch import Batch
from agentgym.config import LearnerConfig, ModelConfig, OptimizerConfig, RunConfig, load_config
from agentgym.learner.learner import LocalLearner
from agentgym.learner.process_group import SingleProcess
from agentgym.models import attention
from agentgym.models.checkpoint import Checkpoint, new_checkpoint
from agentgym.models.model import new_model, weights_of
from agentgym.models.transport import InProcess
from agentgym.rollouts.policies.engines import open_policy
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.types import Completion, SampleKey, Sampling

RESULTS = ROOT / "docs/results/gpu.json"
CONTEXT = 2048
PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312}  # dense bfloat16, of the data sheets


@dataclass(frozen=True)
class Size:
    """Of model and load."""

    device: str
    dtype: torch.dtype
    model: ModelConfig
    vocab_size: int
    num_episodes: int
    concurrency: int
    rounds: int
    sequences: int  # whose log-probabilities are compared
    matmul: int  # side of a square
    copied: int  # bytes
    staged: tuple[str, ...]  # overrides of the staged run
    trained: tuple[int, ...]  # lengths of the sequences of an update
    mixed: tuple[int, ...]  # and of one whose lengths differ


# Qwen2.5-1.5B's dimensions, weights drawn at random
GPU = Size(
    "cuda",
    torch.bfloat16,
    ModelConfig(
        hidden_size=1536,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        mlp_size=8960,
        context_tokens=CONTEXT,
    ),
    vocab_size=151_936,
    num_episodes=512,
    concurrency=256,
    rounds=3,
    sequences=64,
    matmul=8192,
    copied=4 << 30,
    staged=("compute_device=cuda", "rollout.engine=vllm"),
    trained=(2048,) * 8,
    mixed=(256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096),
)
DRY = Size(
    "cpu",
    torch.float32,
    ModelConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        mlp_size=96,
        context_tokens=CONTEXT,
    ),
    vocab_size=300,
    num_episodes=6,
    concurrency=4,
    rounds=1,
    sequences=4,
    matmul=64,
    copied=1 << 20,
    staged=(
        "rollout.engine=vllm",
        "horizon.stage_steps=[1,1,1]",
        "warm_start.steps=2",
        "rollout.items_per_step=2",
        "validation.num_items=4",
        "evaluation.num_items=4",
        "evaluation.num_samples=1",
        "evaluation.k=[1]",
    ),
    trained=(48,) * 4,
    mixed=(8, 12, 16, 48, 64),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := set(chosen.cases) - CASES.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if not chosen.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device here; --dry-run runs the code on the CPU")
    size, names = DRY if chosen.dry_run else GPU, chosen.cases or list(CASES)
    if chosen.child:
        chosen.child.write_text(json.dumps(CASES[names[0]](size)), encoding="utf-8")
        return 0
    failed = False
    for name in names:  # each in a process of its own: what it held of the GPU is free again
        dry = ["--dry-run"] * chosen.dry_run
        result = in_a_process([__file__, name, *dry, "--child"], timeout_s=1800)
        failed |= result is None
        print(f"{name}: {json.dumps(result, indent=1)}", flush=True)
        if result is not None and not chosen.dry_run:
            keep(name, result)
    return int(failed)


def table(results: dict[str, Any]) -> str:
    """Of docs/operations.md. results: of RESULTS, or empty."""
    cases = results.get("cases", {})
    rows = ["| case | what it measures | figures |", "|---|---|---|"]
    for name, case in CASES.items():
        found = cases.get(name, {})
        told = "; ".join(
            f"{key} {value}" for key, value in found.items() if isinstance(value, int | float)
        )
        if told:
            told += f" ({found['machine']['gpu']}, `{found['command']}`)"
        rows.append(f"| `{name}` | {(case.__doc__ or '').rstrip('.')} | {told or 'not run'} |")
    return "\n".join(rows)


def keep(name: str, result: Any) -> None:
    written = (
        json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {"cases": {}}
    )
    here = {**machine(), "gpu": torch.cuda.get_device_name()}
    written["cases"][name] = {**result, "machine": here, "command": "python benchmarks/gpu.py"}
    RESULTS.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def case_ceilings(size: Size) -> dict[str, Any]:
    """What the device can do at most, in the same run."""
    block = torch.empty(size.copied, dtype=torch.uint8, device=size.device)
    copy = seconds(size, block.clone)
    return {
        "matmul_tflops": round(matmul_tflops(size), 1),
        "copy_gb_per_s": round(2 * size.copied / copy / 1e9, 1),
    }


def matmul_tflops(size: Size) -> float:
    """Of a product of two large matrices."""
    square = torch.randn(size.matmul, size.matmul, device=size.device, dtype=size.dtype)
    return 2 * size.matmul**3 / seconds(size, lambda: square @ square) / 1e12


def seconds(size: Size, work: Callable[[], Any]) -> float:
    """Median of 5 after two that warm up."""

    def once() -> float:
        if size.device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if size.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return statistics.median([once() for _ in range(7)][2:])


def case_rollouts(size: Size) -> dict[str, Any]:
    """Whole episodes over HTTP against the same requests put to vLLM by hand."""

    async def measure(endpoint: str) -> list[tuple[float, float]]:
        policy = opened(size, size.concurrency)
        try:
            await episodes(endpoint, size.concurrency, policy, concurrency=size.concurrency)
            return [
                (await ours(policy, endpoint, size), await by_hand(policy, size))
                for _ in range(size.rounds)
            ]
        finally:
            await policy.close()

    with serving(endless, Latency(0, 0)) as (endpoint, _):
        found = asyncio.run(measure(endpoint))
    return {
        "definition": (
            "sampled tokens per second of episodes that `collect` plays on an environment server"
            " whose steps take no time, and of the same number of growing conversations put to"
            " AsyncLLM.generate without environment, records and log-probs"
        ),
        "episodes": size.num_episodes,
        "concurrency": size.concurrency,
        "turns": TURNS,
        "tokens_per_s": round(statistics.median(each for each, _ in found)),
        "raw_tokens_per_s": round(statistics.median(each for _, each in found)),
        "ratio": round(statistics.median(each / raw for each, raw in found), 3),
    }


async def ours(policy: Any, endpoint: str, size: Size) -> float:
    """Sampled tokens per second."""
    began = time.perf_counter()
    played = await episodes(endpoint, size.num_episodes, policy, concurrency=size.concurrency)
    sampled = sum(sum(each.action_mask) for each in played)
    return sampled / (time.perf_counter() - began)


async def by_hand(policy: Any, size: Size) -> float:
    """Sampled tokens per second."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    names, slots = itertools.count(), asyncio.Semaphore(size.concurrency)
    asked = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True, detokenize=False)
    start, heard = renderer().start("go to the red ball"), renderer().bridge("", stopped=True)

    async def one() -> int:
        async with slots:
            ids, sampled = list(start), 0
            for _ in range(TURNS):
                name = f"raw-{next(names)}-{time.perf_counter()}"
                async for output in policy._engine.generate(
                    TokensPrompt(prompt_token_ids=ids), asked, request_id=name
                ):
                    last = output
                said = last.outputs[0].token_ids
                ids, sampled = [*ids, *said, *heard], sampled + len(said)
        return sampled

    began = time.perf_counter()
    sampled = sum(await asyncio.gather(*(one() for _ in range(size.num_episodes))))
    return sampled / (time.perf_counter() - began)


def case_publish(size: Size) -> dict[str, Any]:
    """How long new weights take to reach the engine, and how long nothing is sampled meanwhile."""

    async def measure() -> tuple[list[float], list[float]]:
        checkpoint = made(size, seed=1)
        weights = {
            name: each.to(size.device) for name, each in weights_of(checkpoint.model).items()
        }
        policy, took, gaps = opened(size, 16), [], []
        try:
            ended: list[float] = []
            players = [asyncio.ensure_future(stream(policy, number, ended)) for number in range(8)]
            for version in range(1, 2 + size.rounds):
                await asyncio.sleep(2.0)
                began = time.perf_counter()
                await policy.publish(InProcess(weights, version))
                took.append(time.perf_counter() - began)
                await asyncio.sleep(0.5)
                within = [each for each in ended if each >= began - 0.5]
                gaps.append(max(late - early for early, late in itertools.pairwise(within)))
            for each in players:
                each.cancel()
            await asyncio.gather(*players, return_exceptions=True)
        finally:
            await policy.close()
        return took, gaps

    took, gaps = asyncio.run(measure())
    return {
        "definition": (
            "publish_s: from the call until the engine samples with the new weights, digests on"
            " both sides and the file between them included; pause_s: the longest time meanwhile"
            " in which none of eight streams of 8-token requests ended one"
        ),
        "bytes": sum(each.nbytes for each in weights_of(made(size).model).values()),
        "publish_s": round(statistics.median(took[1:]), 3),
        "pause_s": round(statistics.median(gaps[1:]), 3),
    }


async def stream(policy: Any, number: int, ended: list[float]) -> None:
    """Requests one after the other, until cancelled."""
    for turn in itertools.count():
        await policy.generate([5, 6, 7], sampling(number, turn, 8))
        ended.append(time.perf_counter())


def case_mismatch(size: Size) -> dict[str, Any]:
    """Log-probabilities of sampled tokens: the engine's minus those of our own forward."""

    async def sample() -> list[Completion]:
        policy = opened(size, size.sequences)
        try:
            prompts = [[*range(5, 25), number] for number in range(size.sequences)]
            return await asyncio.gather(
                *(
                    policy.generate(ids, sampling(number, 0, 200))
                    for number, ids in enumerate(prompts)
                )
            )
        finally:
            await policy.close()

    said = asyncio.run(sample())
    gc.collect()
    model = made(size).model.to(size.device)
    plain = TorchPolicy(model, stop_ids=(), num_slots=1, context_tokens=CONTEXT)
    sequences = [[*range(5, 25), number, *each.ids] for number, each in enumerate(said) if each.ids]
    scores = asyncio.run(plain.score(sequences))
    gaps = torch.cat(
        [
            torch.tensor(each.logprobs) - score[-len(each.ids) :]
            for each, score in zip(said, scores, strict=True)
        ]
    ).double()
    return {
        "tokens": len(gaps),
        "mean_nats": round(float(gaps.mean()), 5),
        "sd_nats": round(float(gaps.std()), 5),
        "max_nats": round(float(gaps.abs().max()), 4),
        "k3": round(float((torch.expm1(-gaps) + gaps).mean()), 6),
        "outside_10_percent": round(float(((torch.exp(gaps) - 1).abs() > 0.1).double().mean()), 4),
    }


def case_staged(size: Size) -> dict[str, Any]:
    """The default pipeline's steps to the end of its last stage, and its audit."""
    from agentgym.audit import audit
    from agentgym.pipeline.run import run_step
    from agentgym.pipeline.table import finished, open_store
    from agentgym.steps.context import METRICS
    from agentgym.tracking.points import decode_points

    with tempfile.TemporaryDirectory() as folder:
        overrides = [*size.staged, f"store.path={folder}/store"]
        cfg = load_config(ROOT / "params.yaml", overrides)
        names = ("prepare", "demonstrate", "initialize", "warm-start", "evaluate-warm-start")
        took: dict[str, float] = {}
        for name in (*names, "stage-1", "stage-2", "stage-3", "evaluate-stage-3"):
            began = time.perf_counter()
            run_step(name, cfg)
            took[name] = round(time.perf_counter() - began, 1)
        if not (report := audit(cfg, num_episodes=16)).ok:
            raise RuntimeError(f"the audit fails: {report.to_json()}")
        store = open_store(cfg)
        steps = finished(cfg, store)
        last = decode_points(store.read(steps["stage-3"], METRICS))[-1].metrics
    success = steps["evaluate-stage-3"].results["summary"]
    return {
        "minutes": round(sum(took.values()) / 60, 1),
        "greedy_percent": round(100 * success["greedy"]["mean"], 1),
        "seconds": took,
        "success": success,
        "last_step": {
            name: value for name, value in last.items() if name.startswith(("time/", "perf/"))
        },
    }


def case_training(size: Size) -> dict[str, Any]:
    """Forward and backward of the learner: model FLOPs utilization and memory"""
    batch = actions_of(size, size.trained)
    weights = weights_of(made(size).model)
    block = sum(each.numel() for name, each in weights.items() if ".layers." in name)
    head, layers = size.vocab_size * size.model.hidden_size, size.model.num_layers
    causal = layers * size.model.hidden_size * size.trained[0]  # scores and values, half of each
    flops = 6 * batch.num_tokens * (block + head + causal)
    ceiling = matmul_tflops(size)
    result: dict[str, Any] = {
        "definition": (
            "model FLOPs: 6 a token for each weight of blocks and head, and for attention 6 x"
            " layers x width x length, recomputation not counted; mfu: their rate by the peak of"
            " the data sheet, of_matmul by that of a large matrix product in this run"
        ),
        "matmul_tflops": round(ceiling, 1),
    }
    for name, settings in {
        "plain": {},
        "checkpointed": {"activation_checkpointing": True},
        "compiled": {"compile": "inductor" if size.device == "cuda" else "aot_eager"},
    }.items():
        told = trained(size, batch, LearnerConfig(micro_batch_tokens=1 << 30, **settings))
        rate = flops / told["seconds"] / 1e12
        peak = peak_tflops(size)
        result |= {
            f"{name}_tokens_per_s": round(batch.num_tokens / told["seconds"]),
            f"{name}_mfu": peak and round(rate / peak, 3),
            f"{name}_of_matmul": round(rate / ceiling, 3),
            f"{name}_peak_gib": told["peak_gib"],
        }
    return result


def case_head(size: Size) -> dict[str, Any]:
    """The output head in chunks against whole logits: memory and time"""
    batch = actions_of(size, size.trained)
    result: dict[str, Any] = {
        "definition": "forward and backward of one block and the head, every token an action",
        "tokens": batch.num_tokens,
    }
    small = replace(size, model=size.model.model_copy(update={"num_layers": 1}))
    for name, chunk in {"whole": batch.num_tokens, "chunked": batch.num_tokens // 4}.items():
        told = trained(
            small, batch, LearnerConfig(micro_batch_tokens=1 << 30, head_chunk_tokens=chunk)
        )
        result |= {f"{name}_peak_gib": told["peak_gib"], f"{name}_s": round(told["seconds"], 4)}
    return result


def case_varlen(size: Size) -> dict[str, Any]:
    """Sequences of different lengths: attention without padding, with it, and whole rows padded"""
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
    """Seconds of a forward and backward of all sequences, and the most memory it takes."""
    learner = LocalLearner(
        made(size).model,
        OptimizerConfig(),
        total_steps=1,
        ranks=SingleProcess(size.device),
        settings=settings,
    )
    every = torch.arange(batch.num_sequences, device=size.device)

    def learn() -> None:
        learner.forward_backward(batch, every, lambda part, _: (-learner._net(part)[0].mean(), {}))
        learner._policy.zero_grad()

    if size.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    took = seconds(size, learn)
    peak = torch.cuda.max_memory_allocated() if size.device == "cuda" else 0
    return {"seconds": took, "peak_gib": round(peak / 2**30, 2)}


def actions_of(size: Size, lengths: Sequence[int]) -> Batch:
    """Random tokens, all but the first of each sequence actions."""
    batch = batch_of(lengths, seed=0, vocabulary=size.vocab_size, action_frac=1.0)
    return batch.to(torch.device(size.device))


def peak_tflops(size: Size) -> int | None:
    """Of the device, where it is known."""
    name = torch.cuda.get_device_name() if size.device == "cuda" else ""
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


def made(size: Size, seed: int = 0) -> Checkpoint:
    """A model of random weights whose distributions are far from uniform."""
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


def opened(size: Size, num_slots: int) -> Any:
    cfg = RunConfig(
        compute_device=size.device,
        rollout={"engine": "vllm", "concurrency": num_slots},
        model={"context_tokens": CONTEXT},
    )
    return open_policy(cfg, made(size), num_slots=num_slots, version=0)


def sampling(sample: int, turn: int, tokens: int) -> Sampling:
    return Sampling(SampleKey(0, 1, "gpu_0", sample, turn), 1.0, tokens)


CASES: dict[str, Callable[[Size], dict[str, Any]]] = {
    "ceilings": case_ceilings,
    "rollouts": case_rollouts,
    "publish": case_publish,
    "mismatch": case_mismatch,
    "training": case_training,
    "head": case_head,
    "varlen": case_varlen,
    "staged": case_staged,
}


if __name__ == "__main__":
    sys.exit(main())
