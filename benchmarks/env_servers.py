"""Speed of environment servers over HTTP on keep-alive connections.

Each server is one process; the load comes from another.
Without `--server` it starts ours, one of each environment, and measures both dialects.
`--server NAME=DIALECT=URL` measures a running server, ours or AgentGym's, in the same run; `NAME`
selects the actions to send.
Closed loop: every session sends its next action once the last one is answered, and begins another
episode after STEPS actions.
Prints steps per second, latency and memory, and writes docs/results/envs.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import statistics
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import uvloop
from harness import cpu_seconds, env_server, parser_of, processes_at, quantile, write

STEPS = 20  # per episode
ACTIONS = {
    "babyai": (
        "turn left",
        "move forward",
        "turn right",
        "move forward",
        "go to red ball 1",
        "pickup",
    ),
    "textcraft": (
        "get 1 oak log",
        "inventory",
        "craft 4 oak planks using 1 oak log",
        "get 2 string",
        "get 1 diamond",
    ),
    "sciworld": (
        "open door to kitchen",
        "go to kitchen",
        "look around",
        "open cupboard",
        "pick up thermometer",
        "inventory",
        "look at table",
    ),
    "searchqa": (
        "<search>Naerholt town river</search>",
        "<search>a lake in the north</search>",
        "<search>founded the company</search>",
    ),
}
OPTIONS = {
    "babyai": {"levels": "agentgym", "view": "agentgym", "actions": "high", "reward": "minigrid"}
}


@dataclass(frozen=True)
class Target:
    env: str
    dialect: str  # native | agentgym
    url: str
    label: str
    token: str = field(default="", repr=False)  # that the server requires


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


async def episode(connection: Connection, target: Target, number: int, times: list[float]) -> float:
    """Play STEPS actions. Return the seconds until the first observation."""
    began = time.perf_counter()
    if target.dialect == "native":
        key = f"{id(times)}-{number}"
        created = await connection.post("/create", {"request_key": key, "task_id": number % 500})
        end: dict[str, Any] = {"session_id": created["session_id"]}
    else:
        bodies: dict[str, Any] = {"textcraft": {}, "searchqa": {"id": number % 500}}
        created = await connection.post("/create", bodies.get(target.env))
        number_of_env = created["id"] if isinstance(created, dict) else created
        name = "env_idx" if target.env == "searchqa" else "id"
        await connection.post(
            "/reset", {name: number_of_env, "id" if name == "env_idx" else "data_idx": number % 500}
        )
        end = {name: number_of_env}
    opened = time.perf_counter() - began
    actions = itertools.cycle(ACTIONS[target.env])
    for turn in range(1, STEPS + 1):
        body = {**end, "action": next(actions)}
        if target.dialect == "native":
            body["turn"] = turn
        sent_s = time.perf_counter()
        answer = await connection.post("/step", body)
        times.append(time.perf_counter() - sent_s)
        if answer.get("done") or answer.get("terminated") or answer.get("truncated"):
            break
    await connection.post("/close", end)
    return opened


async def measure(target: Target, num_sessions: int, seconds: float) -> dict[str, Any]:
    """Return a row for this number of sessions. Memory and CPU time are None if it is remote."""
    times: list[float] = []
    opened: list[float] = []
    numbers = itertools.count()
    errors = 0
    until = time.perf_counter() + seconds

    async def session() -> None:
        nonlocal errors
        connection = Connection(target.url, target.token)
        await connection.open()
        while time.perf_counter() < until:
            try:
                opened.append(await episode(connection, target, next(numbers), times))
            except (RuntimeError, OSError, asyncio.IncompleteReadError):
                errors += 1
                connection.close()
                await connection.open()
        connection.close()

    processes = processes_at(urllib.parse.urlsplit(target.url).port or 80)
    cpu_s, server_s = cpu_seconds(processes), cpu_seconds(processes[:1])
    engine_s = engine_seconds(target.url)
    began = time.perf_counter()
    await asyncio.gather(*(session() for _ in range(num_sessions)))
    wall_s = time.perf_counter() - began
    processes = processes_at(urllib.parse.urlsplit(target.url).port or 80)
    per_step = 1000 / len(times)

    def local(figure: float) -> float | None:
        return round(figure, 3) if processes else None

    return {
        "label": target.label,
        "env": target.env,
        "dialect": target.dialect,
        "sessions": num_sessions,
        "steps_per_s": round(len(times) / wall_s, 1),
        "p50_ms": round(1000 * statistics.median(times), 3),
        "p99_ms": round(1000 * quantile(times, 0.99), 3),
        # median, of create and reset together
        "create_ms": round(1000 * statistics.median(opened), 3) if opened else float("nan"),
        # of the server and the processes it started
        "rss_mib": local(sum(process.memory_info().rss for process in processes) / 2**20),
        "cpu_ms_per_step": local(per_step * (cpu_seconds(processes) - cpu_s)),
        "server_ms_per_step": local(per_step * (cpu_seconds(processes[:1]) - server_s)),
        # of these, inside a simulator that counts them itself
        "engine_ms_per_step": (
            round(per_step * (engine_seconds(target.url) - engine_s), 3) if engine_s else None
        ),
        "errors": errors,
    }


def engine_seconds(url: str) -> float:
    """Return the simulator's CPU-seconds from the server's metrics; 0 if they contain none."""
    with contextlib.suppress(OSError):
        address = f"{url.removesuffix('/agentgym')}/metrics"
        text = urllib.request.urlopen(address, timeout=10).read().decode()  # noqa: S310
        counted = re.search(r"^env_engine_cpu_seconds (\S+)", text, re.M)
        return float(counted[1]) if counted else 0.0
    return 0.0


def main() -> None:
    parser = parser_of(__doc__, "envs.json")
    parser.add_argument("envs", nargs="*", choices=[*ACTIONS, []], help="default: all")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each measurement")
    warm = "seconds of warm-up load before each measurement, for JIT compilers"
    parser.add_argument("--warm", type=float, default=0.0, help=warm)
    form = "NAME=DIALECT=URL"
    parser.add_argument("--server", action="append", default=[], metavar=form, help="it runs")
    arguments = parser.parse_args()
    targets = [
        Target(env, dialect, url.rstrip("/"), url)
        for env, dialect, url in (text.split("=", 2) for text in arguments.server)
    ]
    uvloop.install()
    rows = []
    with contextlib.ExitStack() as stack:
        for env in arguments.envs or sorted({target.env for target in targets}) or ACTIONS:
            settings = {"options": OPTIONS.get(env, {}), "max_sessions": 512}
            url = stack.enter_context(env_server(env, **settings))
            targets += [
                Target(env, dialect, url + path, "ours", url.token)
                for dialect, path in (("native", ""), ("agentgym", "/agentgym"))
            ]
        for target in targets:
            for num_sessions in arguments.sessions:
                if arguments.warm:
                    asyncio.run(measure(target, num_sessions, arguments.warm))
                rows.append(asyncio.run(measure(target, num_sessions, arguments.seconds)))
                print(*(f"{name} {value}" for name, value in rows[-1].items()), sep=", ")
    write(arguments.out, {"rows": rows})


if __name__ == "__main__":
    main()
