"""Cases of gpu.py that run vLLM, or a whole pipeline with it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from endless import TURNS, episodes, renderer, serving
from gpu_learner import CONTEXT, Size, made
from harness import ROOT, config_in, kept, stage_points

from agentgym.config import RunConfig
from agentgym.models.model import weights_of
from agentgym.models.transport import InProcess
from agentgym.rollouts.policies.engines import open_here
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.types import Completion, SampleKey, Sampling

NAMES = itertools.count()  # of requests


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
    began = time.perf_counter()
    played = await episodes(endpoint, size.num_episodes, policy, concurrency=size.concurrency)
    sampled = sum(sum(episode.action_mask) for episode in played)
    return sampled / (time.perf_counter() - began)


async def by_hand(policy: Any, size: Size) -> float:
    slots, options = asyncio.Semaphore(size.concurrency), {"max_tokens": 32}
    start, bridge = renderer().start("go to the red ball"), renderer().bridge("", stopped=True)

    async def one() -> int:
        async with slots:
            ids, sampled = list(start), 0
            for _ in range(TURNS):
                action = await generated(policy, ids, options)
                ids, sampled = [*ids, *action, *bridge], sampled + len(action)
        return sampled

    began = time.perf_counter()
    sampled = sum(await asyncio.gather(*(one() for _ in range(size.num_episodes))))
    return sampled / (time.perf_counter() - began)


async def generated(policy: Any, ids: list[int], options: dict[str, Any]) -> Sequence[int]:
    """Return the tokens that vLLM samples after these ids. options: for SamplingParams."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    parameters = SamplingParams(temperature=1.0, ignore_eos=True, detokenize=False, **options)
    name, prompt = f"raw-{next(NAMES)}", TokensPrompt(prompt_token_ids=ids)
    async for output in policy._engine.generate(prompt, parameters, request_id=name):
        last = output
    return last.outputs[0].token_ids


def case_publish(size: Size) -> dict[str, Any]:
    """Seconds until the engine samples with new weights, and the longest pause of sampling"""

    async def measure() -> tuple[list[float], list[float]]:
        tensors = weights_of(made(size, seed=1).model)
        weights = {name: tensor.to(size.device) for name, tensor in tensors.items()}
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
    """Send requests one after the other until canceled; append the end time of each."""
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
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "logprobs": {"logprobs": 0},
        "seed": {"seed": 1},
        "both": {"logprobs": 0, "seed": 1},
    }
    numbers, limit = itertools.count(), size.new_tokens

    async def rate(policy: Any, options: dict[str, Any]) -> float:
        # all begin differently, so that none is found in the cache
        begins = [f"{next(numbers):08d}" for _ in range(size.concurrency)]
        prompts = [[*(5 + int(d) for d in begin), *[5] * size.prompt_tokens] for begin in begins]
        options = {"max_tokens": limit, **options}
        began = time.perf_counter()
        requests = (generated(policy, ids[: size.prompt_tokens], options) for ids in prompts)
        await asyncio.gather(*requests)
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


def case_mismatch(size: Size) -> dict[str, Any]:
    """Log-probabilities of sampled tokens: the engine's minus those of our own forward"""

    async def sample() -> list[Completion]:
        prompts = [[*range(5, 25), number] for number in range(size.sequences)]
        async with opened(size, size.sequences) as policy:
            numbered = enumerate(prompts)
            requests = [policy.generate(ids, sampling(number, 0, 200)) for number, ids in numbered]
            return await asyncio.gather(*requests)

    completions = asyncio.run(sample())
    gc.collect()
    model = made(size).model.to(size.device)
    plain = TorchPolicy(model, stop_ids=(), num_slots=1, context_tokens=CONTEXT)
    numbered = [(n, completion.ids) for n, completion in enumerate(completions) if completion.ids]
    sequences = [[*range(5, 25), number, *ids] for number, ids in numbered]
    scores = asyncio.run(plain.score(sequences))
    pairs = zip(completions, scores, strict=True)
    parts = [torch.tensor(ours.logprobs) - score[-len(ours.ids) :] for ours, score in pairs]
    gaps = torch.cat(parts).double()
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

    with kept(None) as folder:
        cfg = config_in(folder, *overrides, params=params)
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
        evaluations = {name: step for name, step in steps.items() if name.startswith("evaluate-")}
        success = {
            name.removeprefix("evaluate-"): step.results["summary"]
            for name, step in evaluations.items()
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
