"""Duration of SciWorld's first sessions, and differences of its games from the stock engine's.

Cold: as soon as a new server reports that it is ready, eight sessions are opened at once, each on
another kind of task.
Order: 46 games, two of each published kind, with the recorded solution of each.
They are played by our server's pool, by the stock engine with our Java options, and by the stock
engine with its own, from the first game to the last and from the last to the first; one game after
the other in one process each time.
Writes docs/results/sciworld_engine.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
from typing import Any
from unittest.mock import patch

import psutil
from harness import completed, cpu_seconds, env_server, parser_of, write

from agentgym.rollouts.pools import EnvPool
from agentgym.types import Item
from envs.sciworld import stock
from envs.sciworld.gold import solution
from envs.sciworld.jvm import java_options
from envs.sciworld.slots import Place, SlotPool
from envs.sciworld.tasks import PUBLISHED, VARIATIONS, Task

GAMES = [Task(name, variation) for name in PUBLISHED for variation in (0, VARIATIONS[name] // 2)]
FIRST_TASKS = (0, 120, 700, 1500, 2940, 3300, 4140, 4300)  # eight kinds
# actions for games without a known solution
WALK = ("look around", "wait1", "inventory", "open door to hallway", "go to hallway", "look around")
REPEATABLE = ("-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2")
Transcript = list[tuple[str, ...]]


async def open_at_once(endpoint: str, number: int) -> float:
    """Return the seconds until all eight sessions have their first observation."""
    async with (
        EnvPool([endpoint], request_timeout_s=120) as pool,
        contextlib.AsyncExitStack() as stack,
    ):
        items = [Item("sciworld", task) for task in FIRST_TASKS]
        opening = [pool.session(item, f"first-{number}-{item.task_id}") for item in items]
        began = time.perf_counter()
        await asyncio.gather(*map(stack.enter_async_context, opening))
        return time.perf_counter() - began


def cold_start() -> dict[str, Any]:
    began, load = time.perf_counter(), os.getloadavg()[0]
    with env_server("sciworld") as endpoint:
        ready_s = time.perf_counter() - began
        processes = psutil.Process().children(recursive=True)
        resident = [p.memory_info().rss for p in processes if p.name() == "java"]
        opened_s, cpu_s = [], [cpu_seconds(processes)]
        for number in range(3):
            opened_s.append(asyncio.run(open_at_once(endpoint, number)))
            cpu_s.append(cpu_seconds(processes))
    return {
        "ready_s": round(ready_s, 2),
        "java_mib_when_ready": round(sum(resident) / 2**20),
        "cpu_s_until_ready": round(cpu_s[0], 2),
        # at once, closed, at once again
        "eight_sessions_s": [round(elapsed_s, 2) for elapsed_s in opened_s],
        "eight_sessions_cpu_s": [round(b - a, 2) for a, b in itertools.pairwise(cpu_s)],
        "load_average": round(load, 1),
    }


def play(slot: Place, *, backwards: bool = False) -> list[Transcript]:
    played: dict[Task, Transcript] = {}
    for task in reversed(GAMES) if backwards else GAMES:
        played[task] = [slot.call("l", task.name, str(task.variation))]
        played[task] += [slot.call("s", action) for action in solution(task) or WALK]
    return [played[task] for task in GAMES]


def play_ours() -> list[Transcript]:
    pool = SlotPool()
    try:
        return play(pool.acquire())
    finally:
        pool.close()


def play_stock(*, repeatable: bool = False, backwards: bool = False) -> list[Transcript]:
    """Play on the stock engine, with equal identity hashes or not; its memory is bounded."""

    def options(heap_mib: int) -> list[str]:
        return [one for one in java_options(heap_mib) if repeatable or one not in REPEATABLE]

    with patch.object(stock, "java_options", options):
        slot = stock.start()
    try:
        return play(slot, backwards=backwards)
    finally:
        slot.end()


def differing(one: list[Transcript], other: list[Transcript]) -> list[dict[str, Any]]:
    """Return a row per game with other texts, scores or ends: first difference, kind."""
    rows = []
    for task, left, right in zip(GAMES, one, other, strict=True):
        pairs = zip(left, right, strict=True)
        turns = [turn for turn, (mine, theirs) in enumerate(pairs) if mine != theirs]
        if turns:
            outcomes = [[texts[-3:-1] for texts in transcript] for transcript in (left, right)]
            rows.append(
                {
                    "game": f"{task.name} {task.variation}",
                    "turns": len(left),
                    "differing_turns": len(turns),
                    "first": turns[0],
                    "order_alone": all(_words(left[turn]) == _words(right[turn]) for turn in turns),
                    "same_scores": outcomes[0] == outcomes[1],
                }
            )
    return rows


def _words(texts: tuple[str, ...]) -> list[str]:
    return sorted(" ".join(texts).replace(",", " ").replace(".", " ").split())


def main() -> None:
    parser = parser_of(__doc__, "sciworld_engine.json")
    parser.add_argument("--starts", type=int, default=3, help="cold starts, one after the other")
    arguments = parser.parse_args()
    cold_starts = [cold_start() for _ in range(arguments.starts)]
    ours, bound = play_ours(), play_stock(repeatable=True)
    forwards, backwards = play_stock(), play_stock(backwards=True)
    order = {
        "java": completed(["java", "-version"]).stderr.splitlines()[0],
        "games": len(GAMES),
        "turns": sum(len(transcript) for transcript in ours),
        "ours_against_stock_under_our_options": differing(ours, bound),
        "ours_against_stock": differing(ours, forwards),
        "stock_against_stock_in_another_order_of_games": differing(forwards, backwards),
    }
    write(arguments.out, {"cold_starts": cold_starts, "order": order})
    print(json.dumps({"cold_starts": cold_starts, "order": order}, indent=1))


if __name__ == "__main__":
    main()
