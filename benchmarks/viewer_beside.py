"""Slowdown of a training by a viewer: `python benchmarks/viewer_beside.py`.

The first stage of the default task is trained repeatedly from one warm start, alternately alone and
with an `agentgym view` that follows its store and gets a request for a page each second.
`deterministic: true`, so that all these trainings do the same work; the time of steps is measured
between the ends of the first and the last.
Writes docs/results/viewer_beside.json.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import kept, output_of, parser_of, set_words, write
from scipy.stats import ttest_1samp
from viewer import Server

from agentgym.store.runstore import store_at

PAIRS, STEPS = 8, 24
EVERY_S = 1.0
NEWEST = "the newest episode"
PAGES = ("/", "/episodes", NEWEST, "/training")
START, STAGE = ("prepare", "demonstrate", "initialize", "warm-start"), "stage-1"
TRAINING_S = 1_800.0


def main() -> int:
    chosen = parser_of(__doc__, "viewer_beside.json").parse_args()
    pairs, viewer_costs = [], []
    with kept(None) as folder:
        for step in START:
            run(step, folder / "start")
        for number in range(PAIRS):
            pair = {}
            for case in ("alone", "beside")[:: 1 if number % 2 else -1]:
                state = shutil.copytree(folder / "start", folder / case)
                if case == "alone":
                    pair[case] = trained(state)
                else:
                    pair[case], measurements = beside(state)
                    viewer_costs.append(measurements)
                shutil.rmtree(state)
            pairs.append(pair)
            print(pair, flush=True)
    total = {name: sum(cost[name] for cost in viewer_costs) for name in viewer_costs[0]}
    measurements = {
        "optimizer_steps": STEPS,
        "steps_per_s": pairs,
        "fall": fall([(pair["alone"], pair["beside"]) for pair in pairs]),
        "pages": total["pages"],
        "viewer_core_share": round(total["cpu_s"] / total["wall_s"], 4),
        "load_average": round(os.getloadavg()[2], 1),
    }
    write(chosen.out, measurements)
    print(sentence({**measurements, "machine": {"cores": os.cpu_count()}}))
    return 0


def run(step: str, state: Path) -> None:
    settings = [f"store.path={state / 'store'}", "deterministic=true"]
    settings += [f"horizon.stage_steps=[{STEPS},1,1]"]
    command = ["-m", "agentgym", "step", step, "--params", "params.yaml", *set_words(settings)]
    output_of(command, timeout_s=TRAINING_S)


def trained(state: Path) -> float:
    """Train the first stage from this state; return its optimizer steps per second."""
    run(STAGE, state)
    store = store_at(state / "store", lease_ttl_s=30.0)
    (head,) = store.heads(STAGE)
    ends = [commit.created_at for commit in store.history(STAGE, head.key)]
    assert len(ends) == STEPS
    return round((len(ends) - 1) / (ends[-1] - ends[0]), 5)


def beside(state: Path) -> tuple[float, dict[str, float]]:
    """Call `trained` while a viewer gets requests. Return (steps per second, viewer's cost)."""
    ended = threading.Event()
    with Server(state) as server, ThreadPoolExecutor(1) as pool:
        server.wait_for(1)  # episodes of the warm start
        known = server.listed()
        began_s, began_cpu_s = time.perf_counter(), server.cpu_s()
        visitor = pool.submit(visit, server, ended)
        try:
            rate = trained(state)
        finally:
            ended.set()
        pages = visitor.result()
        wall_s, cpu_s = time.perf_counter() - began_s, server.cpu_s() - began_cpu_s
        server.wait_for(known + STEPS)  # raises if the viewer did not follow
    return rate, {"pages": pages, "cpu_s": cpu_s, "wall_s": wall_s}


def visit(server: Server, ended: threading.Event) -> int:
    """Request a page each second until the event is set; return the number of pages."""
    count, pages = 0, itertools.cycle(PAGES)
    while not ended.wait(EVERY_S):
        page = next(pages)
        if page == NEWEST:
            match = re.search(r'href="(/e/[^"?]+)', server.ask("/episodes"))
            page = f"{match[1]}?overlay=engine" if match else "/"
        server.ask(page)
        count += 1
    return count


def fall(rates: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return by how many percent the second rate is lower: geometric mean, 95 % t interval."""
    logs = [math.log(second / first) for first, second in rates]
    mean, interval = statistics.fmean(logs), ttest_1samp(logs, 0).confidence_interval()
    percent, low, high = (
        round(100 * -math.expm1(bound), 2) for bound in (mean, interval.high, interval.low)
    )
    return {"percent": percent, "low": low, "high": high}


def sentence(result: dict[str, Any]) -> str:
    interval, pairs = result["fall"], result["steps_per_s"]
    return (
        f"While it follows a training and is asked for a page each second, the training's steps per"
        f" second fall by {interval['percent']:g} % (95 % interval {interval['low']:g} to"
        f" {interval['high']:g}): {len(pairs)} pairs of trainings of {result['optimizer_steps']}"
        f" optimizer steps, alone and beside it, on {result['machine']['cores']} cores; the viewer"
        f" takes {100 * result['viewer_core_share']:.2g} % of a core."
    )


if __name__ == "__main__":
    sys.exit(main())
