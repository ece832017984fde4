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

import harness
import psutil
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
BUTTON = "<button onclick=\"this.textContent += '!'\">Buy {0}</button>"
ROW = f"<tr><td><a href='#{{0}}'>Item {{0}}</a></td><td>{BUTTON}</td></tr>"
PAGE = f"<!doctype html><title>Big</title><table>{''.join(map(ROW.format, range(ROWS)))}</table>"


def cpu_ms(processes: list[psutil.Process]) -> dict[str, float]:
    """Return CPU milliseconds so far, by part. Only correct while no process ends.
    processes: the server first.
    """
    spent = {"chromium": 0.0, "driver": 0.0, "server": 0.0}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            part = "driver" if "node" in process.name() else "chromium"
            part = "server" if process == processes[0] else part
            spent[part] += 1000 * harness.cpu_seconds([process])
    return spent


def quantiles(seconds: list[float]) -> dict[str, float]:
    return {
        "p50_ms": round(1000 * statistics.median(seconds), 1),
        "p99_ms": round(1000 * harness.quantile(seconds, 0.99), 1),
    }


async def steps(endpoints: list[str], counts: list[int], per_session: int) -> list[dict[str, Any]]:
    """Click on the big page with each number of open sessions, all of them acting."""
    rows = []
    async with EnvPool(endpoints, request_timeout_s=120) as pool:
        server = psutil.Process((await pool.info())[0].pid)

        def processes() -> list[psutil.Process]:
            return [server, *server.children(recursive=True)]

        async def act(session: Any, times: list[float]) -> None:
            for number in range(per_session):
                began = time.perf_counter()
                reply = await session.step(f"click [{5 + 4 * (number % 4)}]")
                times.append(time.perf_counter() - began)
                assert "OBSERVATION" in reply.observation, reply.observation

        await asyncio.sleep(1)
        empty = harness.pss_bytes(processes())
        for count in counts:
            times: list[float] = []
            async with contextlib.AsyncExitStack() as stack:
                opening = [
                    pool.session(Item("webarena", 0), f"big {count} {n}") for n in range(count)
                ]
                sessions = [await stack.enter_async_context(session) for session in opening]
                for session in sessions:
                    await session.step("scroll [up]")
                before, began = cpu_ms(processes()), time.perf_counter()
                await asyncio.gather(*(act(session, times) for session in sessions))
                wall_s, after = time.perf_counter() - began, cpu_ms(processes())
                pss = harness.pss_bytes(processes())
            parts = {part: round((after[part] - before[part]) / len(times), 1) for part in after}
            row = {
                "sessions": count,
                "steps_per_s": round(len(times) / wall_s, 2),
                **quantiles(times),
                "cpu_ms_per_step": round(sum(parts.values()), 1),
                "of_which": parts,
                "pss_mib": round(pss / 2**20, 1),
                "pss_mib_per_session": round((pss - empty) / count / 2**20, 1),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


async def episodes(endpoints: list[str], counts: list[int], seconds: float) -> list[dict[str, Any]]:
    """Play the embedded tasks with the expert, closed loop."""
    rows, numbers = [], itertools.count()

    async def play(pool: EnvPool, number: int, opened: list[float], times: list[float]) -> None:
        began = time.perf_counter()
        async with pool.session(Item("webarena", number % 97), f"episode {number}") as session:
            opened.append(time.perf_counter() - began)
            for _ in range(STEPS):
                action = await session.expert()
                began = time.perf_counter()
                reply = await session.step(action)
                times.append(time.perf_counter() - began)
                if reply.terminated:
                    break

    async with EnvPool(endpoints, request_timeout_s=120) as pool:
        for count in counts:
            times: list[float] = []
            opened: list[float] = []
            lost: list[EnvError] = []

            async def client(until: float, *lists: list[float], lost: list[EnvError] = lost) -> int:
                num_played = 0
                while time.perf_counter() < until:
                    try:
                        await play(pool, next(numbers), *lists)
                        num_played += 1
                    except EnvError as error:
                        lost.append(error)
                        print(error)
                return num_played

            began = time.perf_counter()
            clients = (client(began + seconds, opened, times) for _ in range(count))
            num_played = sum(await asyncio.gather(*clients))
            wall_s = time.perf_counter() - began
            row = {
                "sessions": count,
                "sessions_per_minute": round(60 * num_played / wall_s, 1),
                "steps_per_s": round(len(times) / wall_s, 2),
                **quantiles(times),
                "open_ms": round(1000 * statistics.median(opened), 1),
                "errors": len(lost),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = harness.parser_of(__doc__, "webarena.json")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--steps", type=int, default=30, help="of each session on the big page")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each embedded measurement")
    parser.add_argument("--browser", default="", help="program; default: what the server finds")
    arguments = parser.parse_args()
    if arguments.browser:
        os.environ[BROWSER_VARIABLE] = arguments.browser
    browser = find_browser()
    site = Starlette(routes=[Route("/{path:path}", lambda _: HTMLResponse(PAGE))])
    with tempfile.TemporaryDirectory() as folder, harness.serving_app(lambda _: site) as url:
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
        with harness.env_server("webarena", **big) as endpoint:
            on_page = asyncio.run(steps([endpoint], arguments.sessions, arguments.steps))
    with harness.env_server("webarena", expert=True, max_sessions=64) as endpoint:
        whole = asyncio.run(episodes([endpoint], arguments.sessions, arguments.seconds))
    result = {
        "browser": harness.output_of([browser, "--version"], timeout_s=30).strip(),
        "program": Path(browser).name,
        "load_before_and_after": [round(value, 1) for value in psutil.getloadavg()],
        "goals": {"cpu_ms_per_step": GOAL_CPU_MS, "pss_mib_per_session": GOAL_PSS_MIB},
        "steps_on_a_page_of_260_elements": on_page,
        "expert_episodes_on_the_embedded_sites": whole,
    }
    harness.write(arguments.out, result)


if __name__ == "__main__":
    main()
