"""Cost of a WebArena session and step: `python benchmarks/webarena.py`.

One server process with its browser; this process serves the pages and generates the load.
First, steps on a page of 260 elements: CPU time of Chromium, its driver and the server over the
steps, latency, and PSS at growing numbers of open sessions.
Then, whole episodes on the embedded sites, closed loop.
Writes docs/results/webarena.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from harness import env_server, output_of, parser_of, pss_bytes, quantile, serving_app, write
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route

from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.pools import EnvPool
from agentgym.types import Item
from envs.webarena.chromium import BROWSER_VARIABLE, find_browser

ROWS = 130  # each with a link and a button
STEPS = 8  # most steps of an episode on the embedded sites
GOAL_CPU_MS, GOAL_PSS_MIB = 130, 90
PAGE = "<!doctype html><title>Big</title><table>{}</table>".format(
    "".join(
        f"<tr><td><a href='#{row}'>Item {row}</a></td><td><button onclick=\"this.textContent +="
        f" '!'\">Buy {row}</button></td></tr>"
        for row in range(ROWS)
    )
)


class Processes:
    def __init__(self, pid: int) -> None:
        self._server = psutil.Process(pid)

    def each(self) -> list[psutil.Process]:
        return [self._server, *self._server.children(recursive=True)]

    def cpu_ms(self) -> dict[str, float]:
        """Return CPU milliseconds so far, by part. Only correct while no process ends."""
        spent = {"chromium": 0.0, "driver": 0.0, "server": 0.0}
        for process in self.each():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                name = process.name()
                part = "driver" if "node" in name else "chromium"
                if process.pid == self._server.pid:
                    part = "server"
                spent[part] += 1000 * (times.user + times.system)
        return spent

    def pss_mib(self) -> float:
        return pss_bytes(self.each()) / 2**20


def quantiles(seconds: list[float]) -> dict[str, float]:
    return {
        "p50_ms": round(1000 * statistics.median(seconds), 1),
        "p99_ms": round(1000 * quantile(seconds, 0.99), 1),
    }


async def steps(endpoints: list[str], counts: list[int], per_session: int) -> list[dict[str, Any]]:
    """Click on the big page with each number of open sessions, all of them acting."""
    rows = []
    async with EnvPool(endpoints, request_timeout_s=120) as pool:
        processes = Processes((await pool.info())[0].pid)
        await asyncio.sleep(1)
        empty_mib = processes.pss_mib()
        for count in counts:
            async with contextlib.AsyncExitStack() as stack:
                sessions = [
                    await stack.enter_async_context(
                        pool.session(Item("webarena", 0), f"big {count} {n}")
                    )
                    for n in range(count)
                ]
                for session in sessions:
                    await session.step("scroll [up]")
                times: list[float] = []

                async def act(session: Any, times: list[float] = times) -> None:
                    for number in range(per_session):
                        began = time.perf_counter()
                        reply = await session.step(f"click [{5 + 4 * (number % 4)}]")
                        times.append(time.perf_counter() - began)
                        assert "OBSERVATION" in reply.observation, reply.observation

                before, began = processes.cpu_ms(), time.perf_counter()
                await asyncio.gather(*(act(session) for session in sessions))
                wall_s, after = time.perf_counter() - began, processes.cpu_ms()
                parts = {
                    part: round((after[part] - before[part]) / len(times), 1) for part in after
                }
                pss = processes.pss_mib()
                row = {
                    "sessions": count,
                    "steps_per_s": round(len(times) / wall_s, 2),
                    **quantiles(times),
                    "cpu_ms_per_step": round(sum(parts.values()), 1),
                    "of_which": parts,
                    "pss_mib": round(pss, 1),
                    "pss_mib_per_session": round((pss - empty_mib) / count, 1),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


async def episodes(endpoints: list[str], counts: list[int], seconds: float) -> list[dict[str, Any]]:
    """Play the embedded tasks with the expert, closed loop."""
    rows = []
    numbers = itertools.count()
    async with EnvPool(endpoints, request_timeout_s=120) as pool:
        for count in counts:
            times: list[float] = []
            opened: list[float] = []
            num_played = failed = 0
            until = time.perf_counter() + seconds

            async def client(
                times: list[float] = times, opened: list[float] = opened, until: float = until
            ) -> tuple[int, int]:
                played = lost = 0
                while time.perf_counter() < until:
                    number = next(numbers)
                    try:
                        began = time.perf_counter()
                        async with pool.session(
                            Item("webarena", number % 97), f"episode {number}"
                        ) as session:
                            opened.append(time.perf_counter() - began)
                            for _ in range(STEPS):
                                action = await session.expert()
                                began = time.perf_counter()
                                reply = await session.step(action)
                                times.append(time.perf_counter() - began)
                                if reply.terminated:
                                    break
                        played += 1
                    except EnvError as error:
                        lost += 1
                        print(error)
                return played, lost

            began = time.perf_counter()
            ends = await asyncio.gather(*(client() for _ in range(count)))
            wall_s = time.perf_counter() - began
            num_played, failed = sum(end[0] for end in ends), sum(end[1] for end in ends)
            row = {
                "sessions": count,
                "sessions_per_minute": round(60 * num_played / wall_s, 1),
                "steps_per_s": round(len(times) / wall_s, 2),
                **quantiles(times),
                "open_ms": round(1000 * statistics.median(opened), 1),
                "errors": failed,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = parser_of(__doc__, "webarena.json")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--steps", type=int, default=30, help="of each session on the big page")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each embedded measurement")
    parser.add_argument("--browser", default="", help="program; default: what the server finds")
    arguments = parser.parse_args()
    if arguments.browser:
        os.environ[BROWSER_VARIABLE] = arguments.browser
    browser = find_browser()
    site = Starlette(routes=[Route("/{path:path}", lambda _: HTMLResponse(PAGE))])
    with tempfile.TemporaryDirectory() as folder, serving_app(lambda _: site) as url:
        task = {
            "sites": ["shopping"],
            "task_id": 0,
            "start_url": "__SHOPPING__/",
            "intent": "Buy item 3.",
            "storage_state": None,
            "geolocation": None,
            "eval": {"eval_types": ["string_match"], "reference_answers": {"exact_match": "x"}},
        }
        tasks = Path(folder) / "tasks.json"
        tasks.write_text(json.dumps([task]), encoding="utf-8")
        big = {"options": {"tasks": str(tasks), "sites": {"shopping": url}}, "max_sessions": 64}
        with env_server("webarena", **big) as endpoint:
            on_page = asyncio.run(steps([endpoint], arguments.sessions, arguments.steps))
    with env_server("webarena", expert=True, max_sessions=64) as endpoint:
        whole = asyncio.run(episodes([endpoint], arguments.sessions, arguments.seconds))
    result = {
        "browser": output_of([browser, "--version"], timeout_s=30).strip(),
        "program": Path(browser).name,
        "load_before_and_after": [round(value, 1) for value in psutil.getloadavg()],
        "goals": {"cpu_ms_per_step": GOAL_CPU_MS, "pss_mib_per_session": GOAL_PSS_MIB},
        "steps_on_a_page_of_260_elements": on_page,
        "expert_episodes_on_the_embedded_sites": whole,
    }
    write(arguments.out, result)


if __name__ == "__main__":
    main()
