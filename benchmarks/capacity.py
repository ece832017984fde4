"""Sessions that one environment server can keep on this machine: `python benchmarks/capacity.py`.

One server at a time, started as for a run; the load comes from this process over keep-alive
connections. All sessions are opened first; then each sends its next action as soon as it has an
answer, and replaces an ended episode by a new session. For each number of sessions it measures
steps per second, latency, errors and memory, and the CPU time of the server and its engine.
A server has reached its limit if a session is refused, an action fails, or its memory is used up.
Writes docs/results/capacity.json, with which agentgym/deploy/manifests.py must agree, and a table
next to it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import resource
import statistics
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

import psutil
import uvloop
from harness import cpu_seconds, env_server, origin, parser_of, processes_at, quantile, table, write

from agentgym.types import Endpoint

MANY = (1, 64, 128, 256, 512, 1024, 4096)
COUNTS = {
    "babyai": MANY,
    "textcraft": MANY,
    "searchqa": MANY,
    "sciworld": (1, 4, 8, 16, 32, 64),
    "webarena": (1, 4, 8, 16, 32),
}
STEPS = 20  # per episode
ACTIONS = {
    "babyai": "turn left, move forward, turn right, move forward, go to red ball 1, pickup",
    "textcraft": (
        "get 1 oak log, inventory, craft 4 oak planks using 1 oak log, get 2 string, get 1 diamond"
    ),
    "sciworld": (
        "open door to kitchen, go to kitchen, look around, open cupboard, pick up thermometer,"
        " inventory, look at table"
    ),
    "searchqa": (
        "<search>Naerholt town river</search>, <search>a lake in the north</search>,"
        " <search>founded the company</search>"
    ),
}
OPTIONS = {
    "babyai": {"levels": "agentgym", "view": "agentgym", "actions": "high", "reward": "minigrid"}
}
SLOW = {"sciworld": 2.0, "webarena": 2.0}  # factor on the duration of the measurement
TASKS = {"webarena": 97}  # number of task ids, from 0; 500 in the others
OPENED_AT_ONCE = 32
TIMEOUT_S = 60.0  # of one request
FAILED = (RuntimeError, OSError, EOFError, TimeoutError)
NUMBERS = itertools.count()  # of the sessions of all loads: no request key may be used again


class Connection:
    """One keep-alive connection with little overhead: the server runs on the same machine."""

    def __init__(self, url: str, token: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._bearer = f"Authorization: Bearer {token}\r\n" if token else ""
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._prefix = parts.path.rstrip("/")

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    async def post(self, route: str, body: Any) -> Any:
        payload = b"" if body is None else json.dumps(body).encode()
        head = (
            f"POST {self._prefix}{route} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type:"
            f" application/json\r\n{self._bearer}Content-Length: {len(payload)}\r\n\r\n"
        )
        self._writer.write(head.encode() + payload)
        status, length = await self._head()
        answer = json.loads(await self._reader.readexactly(length))
        if status != 200 or (isinstance(answer, dict) and "error" in answer):
            raise RuntimeError(f"{route}: {status} {answer}")
        return answer

    async def _head(self) -> tuple[int, int]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(
            int(line[15:]) for line in lines if line.lower().startswith("content-length:")
        )
        return int(lines[0].split(" ")[1]), length

    def close(self) -> None:
        self._writer.close()


class Load:
    """Sessions of one server that act in a closed loop."""

    def __init__(self, env: str, endpoint: Endpoint) -> None:
        self.env, self.url, self.token = env, str(endpoint), endpoint.token
        self.times: list[float] = []
        self.opened: list[float] = []
        self.errors: list[str] = []
        self._gate = asyncio.Semaphore(OPENED_AT_ONCE)

    async def open(self, connection: Connection) -> str:
        number = next(NUMBERS)
        task = {"request_key": f"load-{number}", "task_id": number % TASKS.get(self.env, 500)}
        began = time.perf_counter()
        reply = await self._ask(connection, "/create", task)
        self.opened.append(time.perf_counter() - began)
        return reply["session_id"]

    async def _ask(self, connection: Connection, route: str, body: Any) -> Any:
        """Post a request; repeat it (idempotent) if the server has closed the idle connection."""
        try:
            return await asyncio.wait_for(connection.post(route, body), TIMEOUT_S)
        except (ConnectionError, asyncio.IncompleteReadError):
            connection.close()
            await connection.open()
            return await asyncio.wait_for(connection.post(route, body), TIMEOUT_S)

    async def hold(self) -> tuple[Connection, str] | None:
        """Open a session. Return None if it is refused."""
        async with self._gate:
            connection = Connection(self.url, self.token)
            try:
                await asyncio.wait_for(connection.open(), TIMEOUT_S)
                return connection, await self.open(connection)
            except FAILED as error:
                self.errors.append(f"{type(error).__name__} {error}"[:300])
                return None

    async def act(self, connection: Connection, session: str, until: float) -> None:
        """Play one episode after the other until the given time."""
        try:
            turn = 0
            while time.perf_counter() < until:
                turn += 1
                if self.env in ACTIONS:
                    actions = ACTIONS[self.env].split(", ")
                    action = actions[turn % len(actions)]
                else:
                    expert = await self._ask(connection, "/expert", {"session_id": session})
                    action = expert["action"]
                body = {"session_id": session, "turn": turn, "action": action}
                began = time.perf_counter()
                reply = await self._ask(connection, "/step", body)
                self.times.append(time.perf_counter() - began)
                if reply["terminated"] or reply["truncated"] or turn == STEPS:
                    await self._ask(connection, "/close", {"session_id": session})
                    session, turn = await self.open(connection), 0
            await self._ask(connection, "/close", {"session_id": session})
        except FAILED as error:
            self.errors.append(f"{type(error).__name__} {error}"[:300])
        finally:
            connection.close()


def spent_ms(url: str) -> list[float]:
    """Return CPU milliseconds so far: of all the server's processes, of its first one, and inside
    a simulator that counts them itself (0 if none does).
    """
    processes = processes_at(int(url.rpartition(":")[2]))
    metrics = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()  # noqa: S310
    engine = re.search(r"^env_engine_cpu_seconds (\S+)", metrics, re.M)
    parts = (cpu_seconds(processes), cpu_seconds(processes[:1]), float(engine[1]) if engine else 0)
    return [1000 * part for part in parts]


async def measure(
    env: str, endpoint: Endpoint, count: int, seconds: float
) -> tuple[dict[str, Any], list[str]]:
    """Return (row for this number of sessions, errors)."""
    load, url = Load(env, endpoint), str(endpoint)
    held = [held for held in await asyncio.gather(*(load.hold() for _ in range(count))) if held]
    before, began = spent_ms(url), time.perf_counter()
    await asyncio.gather(*(load.act(*session, began + seconds) for session in held))
    wall_s, num = time.perf_counter() - began, max(1, len(load.times))
    cpu, server, engine = (
        round((now - then) / num, 3) for now, then in zip(spent_ms(url), before, strict=True)
    )
    processes = processes_at(int(url.rpartition(":")[2]))
    row = {
        "env": env,
        "sessions": count,
        "held": len(held),  # sessions that were opened
        "steps_per_s": round(len(load.times) / wall_s, 1),
        "p50_ms": round(1000 * quantile(load.times, 0.5), 3),
        "p99_ms": round(1000 * quantile(load.times, 0.99), 3),
        # while all the others are being opened
        "open_p50_ms": round(1000 * statistics.median(load.opened or [0.0]), 1),
        "cpu_ms_per_step": cpu,  # with child processes
        "server_ms_per_step": server,
        "engine_ms_per_step": engine,
        "rss_mib": round(sum(process.memory_info().rss for process in processes) / 2**20, 1),
        "errors": len(load.errors),
    }
    return row, load.errors


def climb(
    env: str, counts: Sequence[int], seconds: float, most_mib: float
) -> tuple[list[dict[str, Any]], str]:
    """Return (rows for growing numbers of sessions, the reason if the server reached its limit)."""
    rows, seconds = [], seconds * SLOW.get(env, 1.0)
    settings = {"options": OPTIONS.get(env, {}), "max_sessions": max(counts)}
    with env_server(env, expert=env not in ACTIONS, **settings) as endpoint:
        if env in SLOW:  # warm up browsers and compilers
            asyncio.run(measure(env, endpoint, counts[1], seconds))
        for count in counts:
            row, errors = asyncio.run(measure(env, endpoint, count, seconds))
            rows.append(row)
            print(json.dumps(row), flush=True)
            if errors:
                return rows, f"{count} sessions: {errors[0]}"
            if (mib := row["rss_mib"]) > most_mib:
                return rows, f"{count} sessions take {mib:g} MiB, of {most_mib:g} allowed"
    return rows, ""


def to_markdown(result: dict[str, Any]) -> str:
    cpu, cores = ", ".join(result["machine"]["cpu"]), result["machine"]["cores"]
    columns = {
        "held": "sessions",
        "steps_per_s": "steps/s",
        "p50_ms": "p50 ms",
        "p99_ms": "p99 ms",
        "open_p50_ms": "opened in ms",
        "cpu_ms_per_step": "CPU ms a step",
        "rss_mib": "MiB",
        "errors": "errors",
    }
    head = (
        f"One server at a time and the program that asks it, on {cores} cores of {cpu}, by"
        f" `{result['command']}` ({result['wall_s']:.0f} s). All sessions act as fast as they"
        " are answered, so that latency is what a step costs times how many wait.\n"
        "A policy that thinks in between leaves more room."
    )
    lines = ["# What one environment server holds", "", head, ""]
    lines += table(
        ("server", *columns.values()),
        ((row["env"], *(f"{row[column]:g}" for column in columns)) for row in result["rows"]),
    )
    lines += ["", "Where a server was at its limit:", ""]
    lines += [f"- {env}: {why or 'it met none'}" for env, why in result["limits"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = parser_of(__doc__, "capacity.json")
    parser.add_argument("envs", nargs="*", choices=[*COUNTS, []], help="default: all")
    twice = "of each measurement; twice as long for servers with slow steps"
    parser.add_argument("--seconds", type=float, default=5.0, help=twice)
    parser.add_argument("--sessions", type=int, nargs="+", help="these numbers, at least two")
    parser.add_argument("--memory", type=float, default=4096.0, help="MiB that a server may take")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    uvloop.install()
    began, load = time.monotonic(), psutil.getloadavg()[0]
    rows, limits = [], {}
    for env in arguments.envs or COUNTS:
        counts = arguments.sessions or COUNTS[env]
        measured, limits[env] = climb(env, counts, arguments.seconds, arguments.memory)
        rows += measured
        print(f"{env}: {limits[env] or 'no limit was met'}", flush=True)
    result = {
        "load_before": round(load, 1),
        "wall_s": round(time.monotonic() - began, 1),
        "limits": limits,
        "rows": rows,
    }
    write(arguments.out, result)
    table = to_markdown({**origin(), **result})
    arguments.out.with_suffix(".md").write_text(table, encoding="utf-8")
    print(f"{result['wall_s']:g} s")


if __name__ == "__main__":
    main()
