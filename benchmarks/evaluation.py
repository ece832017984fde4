"""Overhead of an evaluation over its client and server: `python benchmarks/evaluation.py`.

TextCraft on a separate server process, with a policy that always gives the same action. The bare
client plays the same sessions and steps and records nothing. Both run in one call, the bare client
before and after the evaluation, so that a slow machine slows both.
Writes docs/results/evaluation.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline import ROOT, machine  # benchmarks/pipeline.py

from agentgym.defaults import set_process_defaults

set_process_defaults()

from agentgym.config import EnvConfig, load_config  # noqa: E402
from agentgym.deploy.local import local_env  # noqa: E402
from agentgym.evaluation.protocol import EvaluationRequest  # noqa: E402
from agentgym.pipeline.evaluation import evaluate_policy  # noqa: E402
from agentgym.rollouts.pools import EnvPool  # noqa: E402
from agentgym.types import Item  # noqa: E402
from envs.wire import TOKEN_VARIABLE  # noqa: E402

RESULTS = ROOT / "docs/results/evaluation.json"
ACTION, TURNS, CONCURRENCY = "inventory", 10, 64
BARE_EPISODES = 20_000  # before the evaluation, and again after it


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    items = [Item("textcraft", task) for task in range(arguments.items)]
    with tempfile.TemporaryDirectory(prefix="agentgym-evaluation-") as folder:
        env = EnvConfig(name="textcraft")
        with local_env(env, expert=False, log_path=Path(folder, "server.log")) as endpoints:
            num = min(BARE_EPISODES, arguments.items * arguments.samples)
            before = asyncio.run(bare(endpoints, items, num))
            result = evaluated(endpoints, items, arguments.samples, Path(folder))
            after = asyncio.run(bare(endpoints, items, num))
    rate = statistics.mean((before, after))
    numbers = {
        "items": arguments.items,
        "samples": arguments.samples,
        "turns": TURNS,
        "concurrency": CONCURRENCY,
        "bare_actions_per_s": [round(before, 1), round(after, 1)],
        **result,
        "share_of_bare": round(result["actions_per_s"] / rate, 3),
        "share_of_bare_with_files": round(result["actions_per_s_with_files"] / rate, 3),
        "command": f"python benchmarks/evaluation.py --items {arguments.items} --samples"
        f" {arguments.samples}",
        "machine": machine(),
        "measured": datetime.now(UTC).date().isoformat(),
    }
    arguments.out.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(numbers, indent=1))
    return 0


async def bare(endpoints: Sequence[str], items: Sequence[Item], num: int) -> float:
    """Actions per second of the client alone."""
    waiting = iter(range(num))
    async with EnvPool(endpoints, request_timeout_s=60) as pool:
        # after this check, requests are sent in batches, as in an evaluation
        await pool.check(EnvConfig(name="textcraft"), allow_expert=False)

        async def work() -> None:
            for number in waiting:
                key = f"{time.time_ns()}-{number}"
                async with pool.session(items[number % len(items)], key) as session:
                    for _ in range(TURNS):
                        await session.step(ACTION)

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        return num * TURNS / (time.perf_counter() - began)


def evaluated(
    endpoints: Sequence[str], items: Sequence[Item], samples: int, folder: Path
) -> dict[str, Any]:
    """Play the same with `evaluate_policy`, which records everything."""
    protocol = folder / "protocol.yaml"
    env = {"name": "textcraft", "endpoints": [str(endpoint) for endpoint in endpoints]}
    env_protocol = {
        "env": env,
        "items": {"ids": [item.item_id for item in items]},
        "num_samples": samples,
        "max_turns": TURNS,
        "instructions": False,
    }
    protocol.write_text(
        json.dumps({"envs": [env_protocol], "concurrency": CONCURRENCY}), encoding="utf-8"
    )
    cfg = load_config(ROOT / "params.yaml", [f"store.path={folder}/state/store"])
    os.environ[TOKEN_VARIABLE] = endpoints[0].token  # type: ignore[attr-defined]
    began = time.perf_counter()
    evaluation = evaluate_policy(
        cfg, EvaluationRequest(policy=f"echo:{ACTION}", protocol=str(protocol))
    )
    wall_s = time.perf_counter() - began
    num = sum(slot.num_turns for slot in evaluation.result.slots)
    assert evaluation.result.coverage == 1.0, evaluation.result.outcomes
    assert num == len(items) * samples * TURNS
    unit = 1024 if sys.platform == "linux" else 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    size = sum(path.stat().st_size for path in evaluation.folder.iterdir())
    return {
        "episodes": len(evaluation.result.slots),
        "actions_per_s": round(num / evaluation.result.clock["took_s"], 1),
        "actions_per_s_with_files": round(num / wall_s, 1),
        "took_s": evaluation.result.clock["took_s"],
        "wall_s": round(wall_s, 2),
        "peak_gib": round(peak / 2**30, 3),
        "files_mib": round(size / 2**20, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
