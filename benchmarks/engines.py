"""The default task learned through vLLM and the built-in engine: `python benchmarks/engines.py`.

With the same seeds, to the end of the last stage and its evaluation; and how many tokens a second
each engine samples for whole episodes, in turns. `make measure NAME=engines` runs it with the
Python of an environment that has vLLM. Writes docs/results/engines.json; `--continue` runs what
that lacks.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from endless import TURNS, episodes, renderer, serving
from gpu_learner import DRY, made
from harness import ROOT, config_in, in_a_process, parser_of, read, results_of, write

from agentgym.config import RunConfig, load_config
from agentgym.pipeline.run import run_step
from agentgym.rollouts.policies.engines import open_here

ENGINES = ("torch", "vllm")
STEPS = (
    *("prepare", "demonstrate", "initialize", "warm-start", "evaluate-warm-start"),
    *("stage-1", "stage-2", "stage-3", "evaluate-stage-3"),
)
NUM_EPISODES, CONCURRENCY, ROUNDS = 256, 64, 3


def main() -> int:
    parser = parser_of(__doc__, "engines.json", seeds=(0, 1, 2))
    parser.add_argument("--continue", dest="goes_on", action="store_true")
    parser.add_argument("--child", nargs=3, help="ENGINE SEED PATH, used by this program itself")
    chosen = parser.parse_args()
    if chosen.child:
        engine, seed, path = chosen.child
        Path(path).write_text(json.dumps(learn(engine, int(seed))), encoding="utf-8")
        return 0
    result = read(chosen.out, {"learned": {}}) if chosen.goes_on else {"learned": {}}
    for seed in chosen.seeds:
        for engine in ENGINES:
            if f"{engine} {seed}" in result["learned"]:
                continue
            learned = in_a_process([__file__, "--child", engine, str(seed)], timeout_s=7200)
            if learned is None:
                return 1
            result["learned"][f"{engine} {seed}"] = learned
            write(chosen.out, result)
            print(engine, seed, json.dumps(learned), flush=True)
    if "throughput" not in result:
        result["throughput"] = throughput()
    result["verdict"] = verdict(result["learned"], chosen.seeds)
    write(chosen.out, result)
    print(json.dumps({name: result[name] for name in ("throughput", "verdict")}, indent=1))
    return 0 if result["verdict"]["ok"] else 1


def learn(engine: str, seed: int) -> dict[str, Any]:
    """Return the success on the test items after the last stage, and the seconds of each step."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = config_in(folder, f"rollout.engine={engine}", f"seed={seed}")
        took = {}
        for name in STEPS:
            began = time.perf_counter()
            run_step(name, cfg)
            took[name] = round(time.perf_counter() - began, 1)
        summary = results_of(cfg, STEPS[-1])["summary"]
    return {"sampled": summary["avg_at_4"], "greedy": summary["greedy"], "seconds": took}


def verdict(learned: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
    """Check that sampled success through vLLM lies within the built-in engine's intervals."""
    built_in = [learned[f"torch {seed}"]["sampled"] for seed in seeds]
    means = [learned[f"vllm {seed}"]["sampled"]["mean"] for seed in seeds]
    low, high = min(score["low"] for score in built_in), max(score["high"] for score in built_in)
    return {
        "torch": [round(100 * score["mean"], 1) for score in built_in],
        "vllm": [round(100 * mean, 1) for mean in means],
        "interval": [round(100 * low, 1), round(100 * high, 1)],
        "ok": all(low <= mean <= high for mean in means),
    }


def throughput() -> dict[str, Any]:
    """Measure the sampled tokens per second of each engine, with the model of params.yaml."""
    rates: dict[str, list[float]] = {name: [] for name in ENGINES}
    with serving() as endpoint:
        for _ in range(ROUNDS):
            for name in ENGINES:
                rates[name].append(asyncio.run(tokens_per_s(name, endpoint)))
    ratios = [vllm / torch for vllm, torch in zip(rates["vllm"], rates["torch"], strict=True)]
    return {
        "definition": (
            "sampled tokens per second of episodes on an environment server whose steps take no"
            " time, each engine in turn, its start not counted; median"
        ),
        "episodes": NUM_EPISODES,
        "concurrency": CONCURRENCY,
        "turns": TURNS,
        **{f"{name}_tokens_per_s": round(statistics.median(rates[name])) for name in ENGINES},
        "vllm_over_torch": round(statistics.median(ratios), 2),
    }


async def tokens_per_s(engine: str, endpoint: str) -> float:
    longer = {"context_tokens": 2048}
    model = load_config(ROOT / "params.yaml").model.model_copy(update=longer)
    size = replace(DRY, model=model, vocab_size=len(renderer()._tokenizer))
    cfg = RunConfig(rollout={"engine": engine}, model=longer)
    policy = open_here(cfg, made(size), num_slots=CONCURRENCY, version=0)
    try:
        await episodes(endpoint, CONCURRENCY, policy, concurrency=CONCURRENCY)
        began = time.perf_counter()
        played = await episodes(endpoint, NUM_EPISODES, policy, concurrency=CONCURRENCY)
        return sum(sum(episode.action_mask) for episode in played) / (time.perf_counter() - began)
    finally:
        await policy.close()


if __name__ == "__main__":
    sys.exit(main())
