"""vLLM and the learner on one GPU, in one go: `python benchmarks/gpu.py [CASE ...]`.

Cases run in the order of their value, and each result is written to docs/results/gpu.json as it
comes, with its machine and versions; cases that did not run keep their entries in the file.
`--budget SECONDS` begins no case that a lease of that length would cut off.
`--dry` runs every case's code on the CPU with a tiny model and writes nothing: its figures mean
nothing. Run it with the Python of an environment that has vLLM. Ratios are taken within one run, in
turns. No case takes more than 80 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gpu_engine as engine
import gpu_learner as learner
import torch
<<<<<<< HEAD
from endless import TURNS, episodes, renderer, serving
from harness import RESULTS, ROOT, in_a_process, machine, parser_of, read, stage_points, write
from packed import batch_of, packed, padded, twin_of

from agentgym.algorithms.advantages import with_advantages
from agentgym.algorithms.batch import Batch
from agentgym.config import (
    LearnerConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyGradientConfig,
    RunConfig,
    algorithm_config,
    load_config,
)
from agentgym.learner.learner import LocalLearner
from agentgym.learner.process_group import ProcessGroup
from agentgym.models import attention
from agentgym.models.checkpoint import Checkpoint, new_checkpoint
from agentgym.models.model import new_model, weights_of
from agentgym.models.transport import InProcess
from agentgym.rollouts.policies.engines import open_here
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.types import Completion, SampleKey, Sampling
=======
from gpu_learner import DRY, GPU, Size
from harness import RESULTS, in_a_process, machine, parser_of, read, write
>>>>>>> h-bench

OUT = RESULTS / "gpu.json"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := set(chosen.cases) - CASES.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if not chosen.dry and not torch.cuda.is_available():
        parser.error("no CUDA device here; --dry runs the code on the CPU")
    size, names = DRY if chosen.dry else GPU, chosen.cases or list(CASES)
    if chosen.child:
        chosen.child.write_text(json.dumps(CASES[names[0]](size)), encoding="utf-8")
        return 0
    failed, ends_at = False, time.monotonic() + chosen.budget
    for name in names:  # each in its own process, which frees its GPU memory
        left = ends_at - time.monotonic()
        if left < EXPECTED_S[name]:
            print(f"{name}: skipped, {left:.0f} s are left and {EXPECTED_S[name]} are needed")
            continue
        dry = ["--dry"] * chosen.dry
        try:
            limit = min(1800.0, left)
            result = in_a_process([__file__, name, *dry, "--child"], timeout_s=limit)
        except subprocess.TimeoutExpired:
            print(f"{name}: did not end within {limit:.0f} s", file=sys.stderr)
            result = None
        failed |= result is None
        print(f"{name}: {json.dumps(result, indent=1)}", flush=True)
        if result is not None and not chosen.dry:
            keep(name, result)
    return int(failed)


def table(results: dict[str, Any]) -> str:
    """Return the table of docs/operations.md. results: the content of OUT, or empty."""
    cases = results.get("cases", {})
    rows = ["| case | what it measures | figures |", "|---|---|---|"]
    for name, case in CASES.items():
        result = cases.get(name, {})
        figures = "; ".join(
            f"{key} {value}" for key, value in result.items() if isinstance(value, int | float)
        )
        if figures:
            figures += f" ({result['machine']['gpu']}, `{result['command']}`)"
        rows.append(f"| `{name}` | {(case.__doc__ or '').rstrip('.')} | {figures or 'not run'} |")
    return "\n".join(rows)


def keep(name: str, result: Any) -> None:
    cases, here = read(OUT, {"cases": {}})["cases"], machine()
    here["gpu"] = torch.cuda.get_device_name()
    here["packages"] |= {"vllm": version("vllm"), "cuda": torch.version.cuda}
    cases[name] = {**result, "machine": here, "command": "python benchmarks/gpu.py"}
    write(OUT, {"cases": cases})


<<<<<<< HEAD
def case_ceilings(size: Size) -> dict[str, Any]:
    """The highest rates of the device: a matrix product and a copy"""
    block = torch.empty(size.copied, dtype=torch.uint8, device=size.device)
    copy = seconds(size, block.clone)
    return {
        "matmul_tflops": round(matmul_tflops(size), 1),
        "copy_gb_per_s": round(2 * size.copied / copy / 1e9, 1),
    }


def matmul_tflops(size: Size) -> float:
    """TFLOP/s of a product of two large matrices."""
    square = torch.randn(size.matmul, size.matmul, device=size.device, dtype=size.dtype)
    return 2 * size.matmul**3 / seconds(size, lambda: square @ square) / 1e12


def seconds(size: Size, work: Callable[[], Any]) -> float:
    """Median seconds of 5 calls, after 2 warm-up calls."""

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
    """Whole episodes over HTTP against the same requests put to vLLM by hand"""

    async def measure(endpoint: str) -> list[tuple[float, float]]:
        async with opened(size, size.concurrency) as policy:
            await episodes(endpoint, size.concurrency, policy, concurrency=size.concurrency)
            return [
                (await ours(policy, endpoint, size), await by_hand(policy, size))
                for _ in range(size.rounds)
            ]

    with serving() as endpoint:
        rates = asyncio.run(measure(endpoint))
    return {
        "definition": (
            "sampled tokens per second of episodes that `collect` plays on an environment server"
            " whose steps take no time, and of the same number of growing conversations put to"
            " AsyncLLM.generate without environment, records and log-probs"
        ),
        "episodes": size.num_episodes,
        "concurrency": size.concurrency,
        "turns": TURNS,
        "tokens_per_s": round(statistics.median(rate for rate, _ in rates)),
        "raw_tokens_per_s": round(statistics.median(raw for _, raw in rates)),
        "ratio": round(statistics.median(rate / raw for rate, raw in rates), 3),
    }


async def ours(policy: Any, endpoint: str, size: Size) -> float:
    """Sampled tokens per second of whole episodes."""
    began = time.perf_counter()
    played = await episodes(endpoint, size.num_episodes, policy, concurrency=size.concurrency)
    sampled = sum(sum(episode.action_mask) for episode in played)
    return sampled / (time.perf_counter() - began)


async def by_hand(policy: Any, size: Size) -> float:
    """Sampled tokens per second of the same requests put to vLLM directly."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    names, slots = itertools.count(), asyncio.Semaphore(size.concurrency)
    parameters = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True, detokenize=False)
    start, bridge = renderer().start("go to the red ball"), renderer().bridge("", stopped=True)

    async def one() -> int:
        async with slots:
            ids, sampled = list(start), 0
            for _ in range(TURNS):
                name = f"raw-{next(names)}-{time.perf_counter()}"
                async for output in policy._engine.generate(
                    TokensPrompt(prompt_token_ids=ids), parameters, request_id=name
                ):
                    last = output
                action = last.outputs[0].token_ids
                ids, sampled = [*ids, *action, *bridge], sampled + len(action)
        return sampled

    began = time.perf_counter()
    sampled = sum(await asyncio.gather(*(one() for _ in range(size.num_episodes))))
    return sampled / (time.perf_counter() - began)


def case_publish(size: Size) -> dict[str, Any]:
    """Seconds until the engine samples with new weights, and the longest pause of sampling"""

    async def measure() -> tuple[list[float], list[float]]:
        checkpoint = made(size, seed=1)
        weights = {
            name: tensor.to(size.device) for name, tensor in weights_of(checkpoint.model).items()
        }
        took, gaps, ended = [], [], list[float]()
        async with opened(size, 16) as policy:
            players = [asyncio.ensure_future(stream(policy, number, ended)) for number in range(8)]
            for version in range(1, 2 + size.rounds):
                await asyncio.sleep(2.0)
                began = time.perf_counter()
                await policy.publish(InProcess(weights, version))
                took.append(time.perf_counter() - began)
                await asyncio.sleep(0.5)
                within = [end for end in ended if end >= began - 0.5]
                gaps.append(max(late - early for early, late in itertools.pairwise(within)))
            for player in players:
                player.cancel()
            await asyncio.gather(*players, return_exceptions=True)
        return took, gaps

    took, gaps = asyncio.run(measure())
    return {
        "definition": (
            "publish_s: from the call until the engine samples with the new weights, digests on"
            " both sides and the file between them included; pause_s: the longest time meanwhile"
            " in which none of eight streams of 8-token requests ended one"
        ),
        "bytes": sum(tensor.nbytes for tensor in weights_of(made(size).model).values()),
        "publish_s": round(statistics.median(took[1:]), 3),
        "pause_s": round(statistics.median(gaps[1:]), 3),
    }


async def stream(policy: Any, number: int, ended: list[float]) -> None:
    """Send requests one after the other until cancelled; append the time of each one's end."""
    for turn in itertools.count():
        await policy.generate([5, 6, 7], sampling(number, turn, 8))
        ended.append(time.perf_counter())


def case_start(size: Size) -> dict[str, Any]:
    """Seconds from the start of an engine to its first token, for the first and the second start"""

    async def first_token() -> None:
        async with opened(size, 16) as policy:
            await policy.generate([5, 6, 7], sampling(0, 0, 1))

    took = []
    for _ in range(2):
        began = time.perf_counter()
        asyncio.run(first_token())
        took.append(round(time.perf_counter() - began, 1))
    return {"first_s": took[0], "again_s": took[1]}


def case_logprobs(size: Size) -> dict[str, Any]:
    """Tokens per second of vLLM plain, with log-probabilities, with a seed each, with both"""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "logprobs": {"logprobs": 0},
        "seed": {"seed": 1},
        "both": {"logprobs": 0, "seed": 1},
    }
    names = itertools.count()

    async def rate(policy: Any, options: dict[str, Any]) -> float:
        limit = size.new_tokens
        parameters = SamplingParams(
            temperature=1.0, max_tokens=limit, ignore_eos=True, detokenize=False, **options
        )

        async def one() -> None:
            name = str(next(names))
            # all begin differently, so that none is found in the cache
            ids = [5 + int(digit) for digit in f"{next(names):08d}"] + [5] * size.prompt_tokens
            prompt = TokensPrompt(prompt_token_ids=ids[: size.prompt_tokens])
            async for _ in policy._engine.generate(prompt, parameters, request_id=name):
                pass

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(size.concurrency)))
        return size.concurrency * limit / (time.perf_counter() - began)

    async def measure() -> dict[str, list[float]]:
        rates_of: dict[str, list[float]] = {kind: [] for kind in kinds}
        async with opened(size, size.concurrency) as policy:
            await rate(policy, {})
            for _ in range(size.rounds):
                for kind, options in kinds.items():
                    rates_of[kind].append(await rate(policy, options))
        return rates_of

    rates = {kind: statistics.median(rounds) for kind, rounds in asyncio.run(measure()).items()}
    return {
        "running": size.concurrency,
        "prompt_tokens": size.prompt_tokens,
        "new_tokens": size.new_tokens,
        **{f"{kind}_tokens_per_s": round(rate) for kind, rate in rates.items()},
        "ratio": round(rates["both"] / rates["plain"], 3),
    }


def case_step(size: Size) -> dict[str, Any]:
    """A whole step of the learner, supervised and GRPO: rate, utilization, the scoring pass"""
    batch = actions_of(size, size.trained)
    grpo = algorithm_config("grpo", max_mismatch_kl=1e9)
    assert isinstance(grpo, PolicyGradientConfig)
    pairs = torch.arange(batch.num_sequences, device=size.device) // 2
    won = (torch.arange(batch.num_sequences, device=size.device) % 2).float()
    rewards = torch.zeros_like(batch.rewards)
    rewards[batch.starts[1:] - 1] = won
    batch = replace(batch, group_ids=pairs, rewards=rewards)
    learner = learner_of(size, LearnerConfig(micro_batch_tokens=size.trained[0] * 2))
    steps = itertools.count(1)

    def learn() -> None:
        step = next(steps)
        experience = with_advantages(learner.prepare(batch, grpo, step=step), grpo)
        learner.update(experience, grpo, step=step, seed=0)

    def rate(took: float) -> dict[str, Any]:
        tflops = model_flops(size, batch) / took / 1e12
        peak = peak_tflops(size)
        return {"tokens_per_s": round(batch.num_tokens / took), "mfu": peak and tflops / peak}

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


def case_mismatch(size: Size) -> dict[str, Any]:
    """Log-probabilities of sampled tokens: the engine's minus those of our own forward"""

    async def sample() -> list[Completion]:
        prompts = [[*range(5, 25), number] for number in range(size.sequences)]
        async with opened(size, size.sequences) as policy:
            requests = [
                policy.generate(ids, sampling(number, 0, 200)) for number, ids in enumerate(prompts)
            ]
            return await asyncio.gather(*requests)

    completions = asyncio.run(sample())
    gc.collect()
    model = made(size).model.to(size.device)
    plain = TorchPolicy(model, stop_ids=(), num_slots=1, context_tokens=CONTEXT)
    sequences = [
        [*range(5, 25), number, *completion.ids]
        for number, completion in enumerate(completions)
        if completion.ids
    ]
    scores = asyncio.run(plain.score(sequences))
    pairs = zip(completions, scores, strict=True)
    gaps = torch.cat(
        [torch.tensor(ours.logprobs) - score[-len(ours.ids) :] for ours, score in pairs]
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
    """The default pipeline's steps to the end of its last stage, and its audit"""
    return staged(ROOT / "params.yaml", size.staged)


def case_real(size: Size) -> dict[str, Any]:
    """SmolLM2-135M learns BabyAI (`make real-model` first), and its audit"""
    if size.device == "cpu":
        return staged(ROOT / "params.yaml", size.staged)
    model = f"model.name={ROOT / 'build/smollm2-135m-instruct'}"
    return staged(ROOT / "profiles/small/smollm2-135m-babyai.yaml", [*size.staged, model])


def staged(params: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run every step up to the evaluation of the last stage, audit the run, return its figures."""
    from agentgym.audit import audit
    from agentgym.pipeline.run import run_step
    from agentgym.pipeline.table import finished, open_store, steps_of

    with tempfile.TemporaryDirectory() as folder:
        cfg = load_config(params, [*overrides, f"store.path={folder}/store"])
        took: dict[str, float] = {}
        for name in [step for step in steps_of(cfg) if step not in ("register", "report")]:
            began = time.perf_counter()
            run_step(name, cfg)
            took[name] = round(time.perf_counter() - began, 1)
        if not (report := audit(cfg, num_episodes=16)).ok:
            raise RuntimeError(f"the audit fails: {report.to_json()}")
        steps = finished(cfg, open_store(cfg))
        last_stage = [step for step in steps if step.startswith("stage-")][-1]
        last = stage_points(cfg)[-1].metrics
        success = {
            name.removeprefix("evaluate-"): manifest.results["summary"]
            for name, manifest in steps.items()
            if name.startswith("evaluate-")
        }
    return {
        "minutes": round(sum(took.values()) / 60, 1),
        "greedy_percent": round(100 * success[last_stage]["greedy"]["mean"], 1),
        "seconds": took,
        "success": success,
        "last_step": {
            name: value for name, value in last.items() if name.startswith(("time/", "perf/"))
        },
    }


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
        peak = peak_tflops(size)
        result |= {
            f"{name}_tokens_per_s": round(batch.num_tokens / figures["seconds"]),
            f"{name}_mfu": peak and round(rate / peak, 3),
            f"{name}_of_matmul": round(rate / ceiling, 3),
            f"{name}_peak_gib": figures["peak_gib"],
        }
    return result


def model_flops(size: Size, batch: Batch) -> float:
    """Return the model FLOPs of a forward and backward of the batch.

    All sequences count as if they were as long as the first one of `size.trained`.
    """
    shape = size.model
    width, layers = shape.hidden_size, shape.num_layers
    grouped = width * shape.num_kv_heads // shape.num_heads
    block = layers * (2 * width * (width + grouped) + 3 * width * shape.mlp_size)
    head = size.vocab_size * width
    causal = layers * width * size.trained[0]  # scores and values, half of each
    return 6 * batch.num_tokens * (block + head + causal)


def case_head(size: Size) -> dict[str, Any]:
    """The output head in chunks against whole logits: memory and time"""
    batch = actions_of(size, size.trained)
    result: dict[str, Any] = {
        "definition": "forward and backward of one block and the head, every token an action",
        "tokens": batch.num_tokens,
    }
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
    shape = size.model.model_copy(update={"num_layers": max(2, size.model.num_layers // 4)})
    size = replace(size, model=shape, vocab_size=max(300, size.vocab_size // 10))
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
    """Seconds of a forward and backward of all sequences, and their peak memory."""
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
    """Random tokens, all but the first of each sequence actions."""
    batch = batch_of(lengths, seed=0, vocabulary=size.vocab_size, action_frac=1.0)
    return batch.to(torch.device(size.device))


def peak_tflops(size: Size) -> int | None:
    """Peak TFLOP/s of the device, or None if unknown."""
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


@asynccontextmanager
async def opened(size: Size, num_slots: int) -> AsyncIterator[Any]:
    """Open vLLM with a model of random weights; close it in the end."""
    cfg = RunConfig(
        compute_device=size.device,
        rollout={"engine": "vllm", "concurrency": num_slots},
        model={"context_tokens": CONTEXT},
    )
    policy = open_here(cfg, made(size), num_slots=num_slots, version=0)
    try:
        yield policy
    finally:
        await policy.close()


def sampling(sample: int, turn: int, tokens: int) -> Sampling:
    return Sampling(SampleKey(0, 1, "gpu_0", sample, turn), 1.0, tokens)


=======
>>>>>>> h-bench
# the most valuable first; seconds on an H200, imports included, those of new cases are estimates
EXPECTED: tuple[tuple[Callable[[Size], dict[str, Any]], int], ...] = (
    (learner.case_ceilings, 15),
    (engine.case_publish, 150),
    (engine.case_rollouts, 150),
    (engine.case_logprobs, 120),
    (learner.case_step, 60),
    (learner.case_optimizer, 30),
    (learner.case_training, 120),
    (learner.case_head, 30),
    (engine.case_start, 180),
    (engine.case_real, 280),
    (learner.case_varlen, 30),
    (learner.case_training_7b, 60),
    (engine.case_mismatch, 110),
    (engine.case_staged, 700),
)
CASES = {case.__name__.removeprefix("case_"): case for case, _ in EXPECTED}
EXPECTED_S = {name: seconds for name, (_, seconds) in zip(CASES, EXPECTED, strict=True)}


if __name__ == "__main__":
    sys.exit(main())
