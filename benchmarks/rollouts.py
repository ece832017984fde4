"""Cost of rollouts in addition to engine and environment.

    python benchmarks/rollouts.py [CASE ...]

The real `collect`, HTTP client and environment server (in a separate process) run; the engine and
the simulator are fakes with fixed times.
Every ratio compares values of one run.
Writes docs/results/rollouts.json; other cases keep their results in the file.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import heapq
import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline import ROOT, machine  # benchmarks/pipeline.py

from agentgym.defaults import set_process_defaults
from agentgym.models.chat import ChatRenderer
from agentgym.rollouts.collect import collect
from agentgym.rollouts.episode import EpisodeSettings
from agentgym.rollouts.players import token_players
from agentgym.rollouts.pools import EnvPool
from agentgym.types import Completion, Item, Sampling, Trajectory
from envs.env import EnvSpec, StepResult

RESULTS = ROOT / "docs/results/rollouts.json"
# one environment step: log-normal; 1 in 1000 would exceed 3 s and is cut there
MEDIAN_S, SIGMA, LONGEST_S = 0.1, 1.1, 3.0
TURNS = 12
ACTION = "move forward and pick up the red ball"
OBSERVATION = "you see a red ball 3 steps ahead, a wall 2 steps left"


@dataclass(frozen=True)
class Latency:
    """Seconds that one environment step takes: a pure function of task and turn, so that the ideal
    schedule is known.
    """

    median_s: float
    sigma: float

    def __call__(self, task_id: int, turn: int) -> float:
        if self.median_s == 0:
            return 0.0
        # reproducible, not secret
        drawn = random.Random(f"{task_id}-{turn}").lognormvariate(0, self.sigma)  # noqa: S311
        return min(self.median_s * drawn, LONGEST_S)


class Endless:
    """A simulator without cost whose episodes end only at the horizon."""

    def reset(self, task_id: int) -> str:
        return "task: go to the red ball"

    def step(self, action: str) -> StepResult:
        return StepResult(OBSERVATION, 0.0, terminated=False)

    def render(self) -> tuple[str, bytes]:
        return "text/plain", b""

    def expert(self) -> Any:
        raise NotImplementedError

    def close(self) -> None: ...


class FakeEngine:
    """An engine that takes token_s for each token. alone: it processes one batch of all waiting
    requests at a time, as the built-in engine does; else requests run concurrently, as in an engine
    below saturation.
    """

    def __init__(self, ids: Sequence[int], token_s: float, *, alone: bool) -> None:
        self.ids = tuple(ids)
        self.seconds = token_s * len(self.ids)
        self._alone = alone
        self._waiting: list[asyncio.Future[None]] = []
        self._pump: asyncio.Task[None] | None = None

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        if self._alone:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            if self._pump is None or self._pump.done():
                self._pump = asyncio.create_task(self._run())
            await future
        else:
            await asyncio.sleep(self.seconds)
        # new objects, as from a real engine
        return Completion(
            (*self.ids,), tuple(-0.5 - 0.001 * token for token in self.ids), "stop", 0
        )

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            await asyncio.sleep(self.seconds)
            for future in batch:
                if not future.done():
                    future.set_result(None)

    async def publish(self, delivery: Any) -> None: ...


@functools.cache
def renderer() -> ChatRenderer:
    from agentgym.models.model import train_tokenizer

    return ChatRenderer(
        train_tokenizer(
            [ACTION, OBSERVATION, "turn left", "turn right", "task: go to the red ball"] * 3, 300
        )
    )


def serve(spec: Callable[[], EnvSpec], latency: Latency, connection: Any) -> None:
    """Run a server process: the product's application and HTTP settings, with steps that take their
    time.
    """
    import uvicorn

    from envs.connection import server_config
    from envs.server import ServerSettings, make_app

    app = make_app(spec(), ServerSettings(max_sessions=100_000, drain_timeout_s=0.1))
    sessions = app.state.sessions
    step = sessions.step

    async def slow(request: Any) -> bytes:
        session = sessions._by_id.get(request.session_id)
        if session is not None:
            await asyncio.sleep(latency(session.task_id, request.turn))
        return bytes(await step(request))

    sessions.step = slow
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(4096)
    config = server_config(app, sessions.settings.max_sessions)
    config.backlog = 4096
    server = uvicorn.Server(config)

    def obey() -> None:
        """Answer each message with the CPU seconds used so far. A closed pipe ends the server."""
        while not (server.started and sessions.ready):
            time.sleep(0.01)
        connection.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
        try:
            while True:
                connection.recv()
                connection.send(time.process_time())
        except EOFError:
            sessions.abandon()
            server.should_exit = True

    threading.Thread(target=obey, daemon=True).start()
    server.run(sockets=[listener])


def endless() -> EnvSpec:
    return EnvSpec("endless", "", Endless, {}, ())


@contextmanager
def serving(
    spec: Callable[[], EnvSpec], latency: Latency
) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield (endpoint, function that returns the server's CPU seconds so far)."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(spec, latency, there), daemon=True
    )
    process.start()
    there.close()

    def cpu_s() -> float:
        here.send(None)
        return float(here.recv())

    try:
        if not here.poll(120):
            raise RuntimeError("the environment server was not ready within 120 s")
        yield here.recv(), cpu_s
    finally:
        here.close()
        process.join(10)
        if process.is_alive():
            process.kill()


async def episodes(
    endpoint: str,
    num: int,
    engine: FakeEngine,
    *,
    concurrency: int,
    first: int = 0,
    deterministic: bool = False,
) -> list[Trajectory]:
    async with EnvPool([endpoint], request_timeout_s=60) as pool:
        return await collect(
            [(Item("endless", task), 0) for task in range(first, first + num)],
            pool=pool,
            player_of=token_players(engine, renderer()),
            settings=SETTINGS,
            concurrency=concurrency,
            episode_timeout_s=600,
            max_attempts=1,
            max_env_error_frac=0.0,
            deterministic=deterministic,
        )


SETTINGS = EpisodeSettings(
    seed=0, step=1, max_turns=TURNS, temperature=1.0, max_new_tokens=32, context_tokens=2048
)


def case_lockstep(quick: bool) -> dict[str, Any]:
    """Free-running against lock-step at equal concurrency."""
    concurrency, num = (16, 48) if quick else (64, 256)
    runs = []
    for sigma in (SIGMA,) if quick else (SIGMA, 0.5):
        with serving(endless, Latency(MEDIAN_S, sigma)) as (endpoint, _):
            walls = {}
            for name in ("free", "waves", "lockstep"):
                engine = FakeEngine(renderer().action_ids(ACTION), 0.005, alone=True)
                began = time.perf_counter()
                if name == "waves":
                    for first in range(0, num, concurrency):
                        asyncio.run(
                            episodes(
                                endpoint, concurrency, engine, concurrency=concurrency, first=first
                            )
                        )
                else:
                    asyncio.run(
                        episodes(
                            endpoint,
                            num,
                            engine,
                            concurrency=concurrency,
                            deterministic=name == "lockstep",
                        )
                    )
                walls[name] = time.perf_counter() - began
        runs.append(
            {
                "latency": (
                    f"log-normal, median {MEDIAN_S} s, sigma {sigma}, at most {LONGEST_S:g} s"
                ),
                "engine_batch_s": round(engine.seconds, 3),
                "episodes": num,
                "concurrency": concurrency,
                "turns": TURNS,
                **{f"{name}_s": round(wall, 1) for name, wall in walls.items()},
                "lockstep_over_free": round(walls["lockstep"] / walls["free"], 2),
                "waves_over_free": round(walls["waves"] / walls["free"], 2),
            }
        )
    return {
        "definition": (
            "wall time of the same episodes: `free` refills slots and has no barrier; `waves` has"
            " no barrier per turn but starts `concurrency` episodes only when the last of the"
            " previous ones ended; `lockstep` (collect's deterministic mode) also waits for all"
            " live episodes at every turn. The engine works on one batch of whatever waits at a"
            " time, its time the same for every batch size, which favours lock-step."
        ),
        "goal": "lockstep_over_free >= 1.6 on the heavy tail",
        "met": runs[0]["lockstep_over_free"] >= 1.6,
        "runs": runs,
    }


def case_overhead(quick: bool) -> dict[str, Any]:
    """Orchestration overhead at 256 episodes in flight."""
    concurrency, num, token_s = 256, 256 if quick else 1024, 0.01
    latency = Latency(MEDIAN_S, SIGMA)
    engine = FakeEngine(renderer().action_ids(ACTION), token_s, alone=False)
    ideal_durations = [
        TURNS * engine.seconds + sum(latency(task, turn) for turn in range(1, TURNS + 1))
        for task in range(num)
    ]
    with serving(endless, latency) as (endpoint, cpu_s):
        server_before, before, began = cpu_s(), time.process_time(), time.perf_counter()
        trajectories = asyncio.run(episodes(endpoint, num, engine, concurrency=concurrency))
        wall, cpu, server_cpu = (
            time.perf_counter() - began,
            time.process_time() - before,
            cpu_s() - server_before,
        )
    ideal = ideal_wall(ideal_durations, concurrency)
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    assert turns == num * TURNS
    spent = [
        trajectory.timing["generate_s"] + trajectory.timing["env_s"] for trajectory in trajectories
    ]
    overhead = (wall - ideal) / wall
    return {
        "definition": (
            "wall time of the collection beyond an ideal schedule of the same episodes on the same"
            " slots in the same order, in which only the engine's and the environment's set times"
            " pass, as a share of the wall time. CPU: of the whole process, per turn; the server's"
            " is that of its own process."
        ),
        "goal": "overhead <= 0.05",
        "met": overhead <= 0.05,
        "episodes": num,
        "concurrency": concurrency,
        "turns": turns,
        "tokens_per_episode": round(
            statistics.mean(len(trajectory.input_ids) for trajectory in trajectories)
        ),
        "engine_s_per_turn": round(engine.seconds, 3),
        "environment_s_per_turn": round(
            statistics.mean(ideal_durations) / TURNS - engine.seconds, 3
        ),
        "wall_s": round(wall, 2),
        "ideal_wall_s": round(ideal, 2),
        "overhead": round(overhead, 4),
        "overhead_inside_turns": round(sum(spent) / sum(ideal_durations) - 1, 4),
        "client_cpu_ms_per_turn": round(1000 * cpu / turns, 3),
        "server_cpu_ms_per_turn": round(1000 * server_cpu / turns, 3),
        "turns_per_s": round(turns / wall),
    }


def ideal_wall(durations: Sequence[float], slots: int) -> float:
    """Wall time if a free slot takes the next episode immediately, without overhead."""
    free_at = [0.0] * slots
    for duration in durations:
        heapq.heappush(free_at, heapq.heappop(free_at) + duration)
    return max(free_at)


class InProcess:
    """Sessions without a server: 10,000 at once would need 10,000 connections."""

    @asynccontextmanager
    async def session(self, item: Item, request_key: str) -> Any:
        yield self

    observation = "task: go to the red ball"

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(0)
        return StepResult("".join(OBSERVATION), 0.0, terminated=False)


def case_memory(quick: bool) -> dict[str, Any]:
    """Peak memory of one process that plays 10,000 episodes and holds them all."""
    from agentgym.records import encode_trajectories

    num = 1000 if quick else 10_000
    engine = FakeEngine(renderer().action_ids(ACTION), 0.0, alone=False)
    before = memory_mib("VmRSS")
    with serving(endless, Latency(0, 0)) as (endpoint, _):
        served = asyncio.run(episodes(endpoint, num, engine, concurrency=1024))
    resident, peak = memory_mib("VmRSS"), memory_mib("VmHWM")
    tokens = statistics.mean(len(trajectory.input_ids) for trajectory in served)
    size = len(encode_trajectories(served))
    encoded_peak = memory_mib("VmHWM")
    del served
    gc.collect()
    at_once = asyncio.run(
        collect(
            [(Item("endless", task), 0) for task in range(num)],
            pool=InProcess(),  # type: ignore[arg-type]
            player_of=token_players(engine, renderer()),
            settings=SETTINGS,
            concurrency=num,
            episode_timeout_s=3600,
            max_attempts=1,
            max_env_error_frac=0.0,
        )
    )
    assert len(at_once) == num
    whole = memory_mib("VmHWM")
    return {
        "definition": (
            "MiB of this process from /proc/self/status: VmHWM (peak) over everything below; torch"
            " and the tokenizer are loaded before. Over HTTP 1024 episodes are in flight; then the"
            " same number again without HTTP, all alive at once."
        ),
        "goal": "peak_mib <= 2048",
        "met": whole <= 2048,
        "episodes": num,
        "turns": TURNS,
        "tokens_per_episode": round(tokens),
        "before_mib": round(before),
        "held_mib": round(resident),
        "held_kib_per_episode": round((resident - before) * 1024 / num, 1),
        "peak_over_http_mib": round(peak),
        "peak_while_encoding_mib": round(encoded_peak),
        "encoded_mib": round(size / 2**20, 1),
        "peak_mib": round(whole),
    }


def memory_mib(field: str) -> float:
    line = next(
        line
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) / 1024


def case_tracking(quick: bool) -> dict[str, Any]:
    """Share of the default run that its metrics take on their way to MLflow."""
    import agentgym.pipeline.run
    import agentgym.pipeline.table
    import agentgym.steps.context
    import agentgym.tracking.mlflow
    from agentgym.config import load_config

    spent = {"encode": 0.0, "deliver": 0.0}
    longest = {"encode": 0.0, "deliver": 0.0}
    calls = {"encode": 0, "deliver": 0}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                took = time.perf_counter() - began
                spent[name] += took
                longest[name] = max(longest[name], took)
                calls[name] += 1

        return call

    small = ["evaluation.num_items=64", "warm_start.num_demos=100", "warm_start.steps=40"]
    with tempfile.TemporaryDirectory() as folder:
        cfg = load_config(
            ROOT / "params.yaml", [f"store.path={folder}/store", *(small if quick else ())]
        )
        encode, deliver = agentgym.steps.context.encode_points, agentgym.pipeline.run.deliver
        agentgym.steps.context.encode_points, agentgym.pipeline.run.deliver = (
            timed("encode", encode),
            timed("deliver", deliver),
        )
        try:
            began = time.perf_counter()
            for name in agentgym.pipeline.table.steps_of(cfg):
                agentgym.pipeline.run.run_step(name, cfg)
            wall = time.perf_counter() - began
        finally:
            agentgym.steps.context.encode_points, agentgym.pipeline.run.deliver = encode, deliver
    share = sum(spent.values()) / wall
    return {
        "definition": (
            "seconds inside commit's encoding of metrics and inside the delivery to MLflow (its"
            " import and the creation of its database included), of the wall time of all steps of"
            " the default run, one after the other in one process."
        ),
        "goal": "share <= 0.03",
        "met": share <= 0.03,
        "config": "params.yaml" + (" " + " ".join(small) if quick else ""),
        "wall_s": round(wall, 1),
        "encode_s": round(spent["encode"], 3),
        "deliver_s": round(spent["deliver"], 2),
        "first_delivery_s": round(longest["deliver"], 2),
        "deliveries": calls["deliver"],
        "share": round(share, 4),
    }


def case_staleness(quick: bool) -> dict[str, Any]:
    """Rollouts that overlap the update against strictly on-policy ones, by the real training
    step.
    """
    from agentgym.config import RolloutConfig, load_config
    from agentgym.pipeline.run import run_step
    from agentgym.pipeline.table import open_store

    if "max_staleness" not in RolloutConfig.model_fields:
        return {"skipped": "this version has no rollout.max_staleness; nothing was measured"}
    steps = 4 if quick else 16
    settings = [
        f"horizon.stage_steps=[{steps},1,1]",
        "rollout.items_per_step=16",
        "validation.every=0",
        "warm_start.num_demos=100",
    ]
    babyai = functools.partial(waiting, load_config(ROOT / "params.yaml").env.options)
    seconds = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(babyai, Latency(MEDIAN_S, SIGMA)) as (endpoint, _),
    ):
        for staleness in (0, 1):
            overrides = [
                f"store.path={folder}/store",
                *settings,
                f"rollout.max_staleness={staleness}",
            ]
            cfg = load_config(ROOT / "params.yaml", overrides)
            for name in ("prepare", "demonstrate", "initialize", "warm-start"):
                run_step(name, cfg)
            manifest = run_step(
                "stage-1", cfg, environment=lambda _: nullcontext({"babyai": [endpoint]})
            ).manifest
            times = [
                commit.created_at for commit in open_store(cfg).history("stage-1", manifest.key)
            ]
            seconds[staleness] = (times[-1] - times[0]) / (len(times) - 1)
    ratio = seconds[0] / seconds[1]
    return {
        "definition": (
            "mean seconds from commit to commit of stage 1, the first step left out, under"
            " rollout.max_staleness 0 and 1: the default model, 128 episodes a step, a BabyAI"
            f" server whose steps take {MEDIAN_S} s in the median (log-normal, sigma {SIGMA}, at"
            f" most {LONGEST_S:g} s)."
        ),
        "goal": "strict_over_overlapped > 1",
        "met": ratio > 1,
        "optimizer_steps": steps,
        "strict_step_s": round(seconds[0], 2),
        "overlapped_step_s": round(seconds[1], 2),
        "strict_over_overlapped": round(ratio, 2),
    }


def waiting(options: dict[str, Any]) -> EnvSpec:
    """Return BabyAI's spec, marked as blocking: the steps of a batch run concurrently."""
    from envs.babyai import spec

    return replace(spec(options), blocking=True)


CASES = {
    "lockstep": case_lockstep,
    "overhead": case_overhead,
    "memory": case_memory,
    "tracking": case_tracking,
    "staleness": case_staleness,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="smaller sizes for a trial; nothing is written"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.cases) - set(CASES)
    if unknown:
        parser.error(f"unknown case {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    os.chdir(ROOT)
    set_process_defaults()
    if {"tracking", "staleness"} & set(arguments.cases or CASES):
        subprocess.run([sys.executable, "-m", "dvc", "pull", "--quiet"], check=True, timeout=600)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for name in arguments.cases or CASES:
        result = run_alone(name, arguments.quick)
        print(json.dumps({name: result}, indent=1), flush=True)
        if "skipped" in result:
            continue
        results[name] = {
            "about": CASES[name].__doc__,
            **result,
            "command": f"python benchmarks/rollouts.py {name}",
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": machine(),
        }
        if not arguments.quick:
            ordered_results = {name: results[name] for name in CASES if name in results}
            RESULTS.write_text(json.dumps(ordered_results, indent=1) + "\n", encoding="utf-8")
    return 0


def run_alone(name: str, quick: bool) -> dict[str, Any]:
    """Run the case in a fresh process, so that other cases do not affect its memory and imports."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(CASES[name], quick).result()


if __name__ == "__main__":
    sys.exit(main())
