"""Response times and resources of `agentgym view` with 100,000 episodes.

The episodes are those of expert and random play on BabyAI, TextCraft and SearchQA, played once and
repeated with other ids, outcomes and log-probabilities; they have a token for each four characters.
The store contains them as four runs would. The server is the real command in a separate process,
queried over HTTP; a tenth of the episodes is committed while it runs.
Writes docs/results/viewer.json.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from harness import ROOT, cpu_seconds, kept, parser_of, quantile, table, write

from agentgym.defaults import set_process_defaults

set_process_defaults()

from agentgym.records import TRAJECTORIES, decode_trajectories, encode_trajectories  # noqa: E402
from agentgym.store.manifest import sha256  # noqa: E402
from agentgym.store.runstore import RunStore, store_at  # noqa: E402
from agentgym.types import Item, Learned, Status, Trajectory, Turn  # noqa: E402
from envs.registry import load_spec  # noqa: E402

RUNS, GROUP, PER_COMMIT = 4, 8, 256
MAX_TURNS = 20
INSTRUCTIONS = 100  # tokens before the first observation
POOL = {"babyai": 300, "textcraft": 120, "searchqa": 80}  # episodes that are played
SHARES = {"babyai": 0.6, "textcraft": 0.25, "searchqa": 0.15}
ROUNDS = 25  # per question
START_LIMIT_S = 1_800.0
CONFIG = {
    "env": {"name": "babyai", "options": {}, "dialect": "native", "weight": 1.0},
    "mix": [],
    "algorithm": {"recipe": "grpo"},
    "horizon": {"max_turns": [MAX_TURNS]},
}


def main() -> int:
    parser = parser_of(__doc__, "viewer.json", state=True)
    parser.add_argument("--episodes", type=int, default=100_000)
    arguments = parser.parse_args()
    with kept(arguments.state) as folder:
        measurements = measure(arguments.episodes, folder)
    write(arguments.out, measurements)
    print(json.dumps(measurements, indent=1))
    return 0


def measure(count: int, folder: Path) -> dict[str, Any]:
    """Serve a store (built first if it is empty), add commits to it, and time questions."""
    store = store_at(folder / "store", lease_ttl_s=30.0)
    if not store.marks():
        fill(store, count)
    commits = [commit for head in store.heads() for commit in store.history(head.step, head.key)]
    size = sum(path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file())
    sampled = decode_trajectories(store.read(commits[0], TRAJECTORIES))
    first, late = PER_COMMIT * len(commits), max(1, len(commits) // 10)
    with Server(folder) as server:
        built_s, cpu_s = server.wait_for(first)
        before, began = server.cpu_s(), time.perf_counter()
        for manifest in commits[:late]:
            records = {TRAJECTORIES: store.read(manifest, TRAJECTORIES)}
            add(store, manifest.step, manifest.key, manifest.state, manifest.config, records)
        committed_s = time.perf_counter() - began
        total = first + PER_COMMIT * late
        server.wait_for(total)
        added_cpu_s = server.cpu_s() - before
        return {
            "episodes": total,
            "commits": len(commits) + late,
            "mean_turns": round(statistics.mean(len(played.turns) for played in sampled), 1),
            "mean_tokens": round(statistics.mean(len(played.input_ids) for played in sampled)),
            "store_mib": round(size / 2**20, 1),
            "index_mib": round(server.index_bytes() / 2**20, 1),
            "build": {
                "episodes": first,
                "seconds": round(built_s, 1),
                "cpu_s": round(cpu_s, 1),
                "episodes_per_cpu_s": round(first / cpu_s),
            },
            "extend": {
                "episodes": total - first,
                "cpu_s": round(added_cpu_s, 1),
                "episodes_per_cpu_s": round((total - first) / added_cpu_s),
                "committed_within_s": round(committed_s, 1),
            },
            "milliseconds": questions(server),
            "peak_mib": round(server.peak_mib(), 1),
            "idle_cpu_share": round(server.idle_share(), 4),
            # includes other programs; CPU times hardly depend on it
            "load_average": round(os.getloadavg()[1], 1),
        }


LIMITS = {  # milliseconds
    "first page": 300,
    "filter": 100,
    "facet": 100,
    "search, many hits": 200,
    "search, few hits": 200,
    "longest episodes": 200,
}


def text_of(result: dict[str, Any]) -> str:
    """Return the part of docs/reference/viewer-index.md about the result."""
    build, extend, idle = result["build"], result["extend"], 100 * result["idle_cpu_share"]
    head = (
        f"{result['episodes']:,} episodes of {result['mean_turns']:g} turns and"
        f" {result['mean_tokens']} tokens, {result['store_mib']:g} MiB in the store,"
        f" {result['index_mib']:g} MiB of index. Built at {build['episodes_per_cpu_s']:,}"
        f" episodes a second of CPU, extended at {extend['episodes_per_cpu_s']:,}; at most"
        f" {result['peak_mib']:g} MiB of memory; {idle:.2g} % of a core"
        " while it follows a store in which nothing changes."
    )
    end = (
        f"Times over HTTP, page included, on {result['machine']['cores']} cores with a load of"
        f" {result['load_average']:g}."
    )
    rows = [
        (name, LIMITS.get(name, ""), *(f"{row[key]:g}" for key in ("cpu", "median", "first")))
        for name, row in result["milliseconds"].items()
    ]
    titles = ("milliseconds of", "limit", "the server's CPU", "median", "first time")
    return "\n".join([head, "", *table(titles, rows, "|---|--:|--:|--:|--:|"), "", end])


def fill(store: RunStore, count: int) -> None:
    """Commit `count` episodes, as four runs would."""
    rng = random.Random(1)  # noqa: S311
    pool = {env: [played(env, task) for task in range(num)] for env, num in POOL.items()}
    for run, step, episodes in commits_of(count, pool, rng):
        name, state = f"stage-{1 + run % 2}", {"global_step": step, "max_turns": MAX_TURNS}
        records = {TRAJECTORIES: encode_trajectories(episodes)}
        add(store, name, sha256(f"{name} {run}".encode()), state, {**CONFIG, "seed": run}, records)


class Server:
    """Separate process that runs `agentgym view`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._began = folder, time.perf_counter()

    def __enter__(self) -> Server:
        command = [sys.executable, "-m", "agentgym", "view", "--port", "0"]
        command += ["--set", f"store.path={self._folder / 'store'}", "--params", "params.yaml"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        ((self._token, host),) = re.findall(r"http://agentgym:(\S+)@(\S+)/login", line)
        self._address = f"http://{host}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def ask(self, path: str) -> str:
        request = urllib.request.Request(  # noqa: S310 - our own server
            f"{self._address}{path}", headers={"Authorization": f"Bearer {self._token}"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310
            return str(reply.read().decode())

    def wait_for(self, episodes: int) -> tuple[float, float]:
        """Wait until `episodes` are listed. Return wall and CPU seconds since the start."""
        deadline = time.perf_counter() + START_LIMIT_S
        while time.perf_counter() < deadline:
            if self.listed() >= episodes:
                return time.perf_counter() - self._began, self.cpu_s()
            time.sleep(0.5)
        raise TimeoutError(f"{episodes} episodes are not listed after {START_LIMIT_S:g} s")

    def listed(self) -> int:
        match = re.search(r"<strong>([\d,]+)", self.ask("/episodes"))
        return int(match[1].replace(",", "")) if match else 0

    def cpu_s(self) -> float:
        return cpu_seconds([psutil.Process(self._process.pid)])

    def peak_mib(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024

    def index_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._folder.glob("viewer/index-*.sqlite*"))

    def idle_share(self, seconds: float = 20.0) -> float:
        """Return the used share of a core without requests and changes of the store."""
        before, began = self.cpu_s(), time.perf_counter()
        time.sleep(seconds)
        return (self.cpu_s() - before) / (time.perf_counter() - began)


def questions(server: Server) -> dict[str, dict[str, float]]:
    """Return each question's milliseconds over HTTP, connection and page included."""
    addresses = re.findall(r'href="(/e/[^"?]+)', server.ask("/episodes?sort=tokens"))
    (second,) = re.findall(r'href="([^"]+)" rel="next"', server.ask("/episodes"))[:1]
    following = second.replace("&amp;", "&")
    listed = server.ask("/episodes?env=babyai")
    item, *_ = re.findall(r'class="open" href="[^"]+">([a-z]+_\d+)', listed)
    paths: dict[str, Callable[[int], str]] = {
        "first page": lambda n: "/episodes",
        "runs": lambda n: "/",
        "next page": lambda n: following,
        "filter": lambda n: f"/episodes?env=textcraft&success=no&sort=turns&turns={n % 9}..",
        "facet": lambda n: f"/episodes?status=max_turns&stage=stage-{1 + n % 2}",
        "sorted": lambda n: f"/episodes?sort={('reward', 'advantage', 'turns', 'tokens')[n % 4]}",
        "search, many hits": lambda n: "/episodes?q=red+ball",
        "search, few hits": lambda n: f"/episodes?q=%22birch+planks%22+{('log', 'chest')[n % 2]}",
        "search in a run": lambda n: "/episodes?q=answer&env=searchqa&success=yes",
        "item": lambda n: f"/item/{item}",
        "longest episodes": lambda n: addresses[n % len(addresses)],
        "with tokens": lambda n: f"{addresses[n % len(addresses)]}?overlay=engine",
        "group": lambda n: f"{addresses[n % len(addresses)]}/group",
        "training": lambda n: "/training",
    }
    return {name: timed(server, path) for name, path in paths.items()}


def timed(server: Server, path: Callable[[int], str]) -> dict[str, float]:
    """Milliseconds of the first request, median and p95 of the others, mean of the server's CPU."""
    times = []
    cpu_s = server.cpu_s()
    for number in range(ROUNDS):
        if number == 1:
            cpu_s = server.cpu_s()
        began = time.perf_counter()
        server.ask(path(number))
        times.append(1000 * (time.perf_counter() - began))
    return {
        "first": round(times[0], 1),
        "median": round(statistics.median(times[1:]), 1),
        "p95": round(quantile(times[1:], 0.95), 1),
        "cpu": round(1000 * (server.cpu_s() - cpu_s) / len(times[1:]), 1),
    }


def commits_of(
    count: int, pool: dict[str, list[Trajectory]], rng: random.Random
) -> Iterator[tuple[int, int, list[Trajectory]]]:
    """Yield (run, optimizer step, episodes) until there are `count` episodes."""
    envs, weights = list(SHARES), list(SHARES.values())
    for number in range(count // PER_COMMIT):
        run, step = number % RUNS, 1 + number // RUNS
        episodes: list[Trajectory] = []
        while len(episodes) < PER_COMMIT:
            template = rng.choice(pool[rng.choices(envs, weights)[0]])
            task = rng.randrange(2_000)
            episodes += [varied(template, task, sample, step, rng) for sample in range(GROUP)]
        yield run, step, episodes[:PER_COMMIT]


def add(store: RunStore, step: str, key: str, state: Any, config: Any, records: Any) -> None:
    """Commit records as the step's next commit."""
    nothing: dict[str, Any] = {name: {} for name in ("parents", "blobs", "results", "timings")}
    with store.open(step, key) as writer:
        writer.commit(done=False, state=state, config=config, records=records, **nothing)


def varied(
    template: Trajectory, task: int, sample: int, step: int, rng: random.Random
) -> Trajectory:
    """Return another sample with other ids, outcome and numbers, perhaps cut at the end."""
    success, num = rng.random() < 0.5, len(template.turns)
    turns = template.turns if success else template.turns[: num - rng.randint(0, num // 3)]
    length = turns[-1].end
    mask = template.action_mask[:length]
    logprobs = tuple(round(-rng.expovariate(2.0), 5) if is_action else 0.0 for is_action in mask)
    learned, num = None, sum(mask)
    if rng.random() < 0.1:
        learned = Learned(logprobs[:num], (0.5,) * num, (1.01,) * num, "", (0.4,) * num)
    return replace(
        template,
        item=Item(template.item.env, task, "train"),
        sample=sample,
        step=step,
        status=Status.TERMINATED if success else Status.MAX_TURNS,
        reward=float(success),
        success=success,
        turns=tuple(replace(turn, version=step - 1) for turn in turns),
        input_ids=tuple(rng.choices(range(3, 30_000), k=length)),
        action_mask=mask,
        logprobs=logprobs,
        learned=learned,
        id=f"{step:08x}{sample:08x}",
        timing={"wall_s": 1.0, "began_s": 1.7e9 + step * 60 + sample},
    )


def played(env: str, task: int) -> Trajectory:
    """Play an episode: random actions first, then the expert's."""
    world = load_spec(env, {}).make()
    first = world.reset(task)
    turns: list[Turn] = []
    mask: list[bool] = [False] * (INSTRUCTIONS + len(first) // 4)
    while len(turns) < MAX_TURNS:
        hints = world.hints()
        lost = len(turns) < task % 15  # turns before the expert takes over
        action = hints[(task + len(turns)) % len(hints)] if lost else world.expert().next_action()
        result = world.step(action)
        start = len(mask)
        mask += [True] * (1 + len(action) // 4)
        end = len(mask)
        mask += [False] * (1 + len(result.observation) // 4)
        turns.append(Turn(action, result.observation, result.reward, start, end, info=result.info))
        if result.terminated or result.truncated:
            break
    world.close()
    num = len(mask)
    tokens = (1,) * num, tuple(mask), (0.0,) * num
    outcome = Status.TERMINATED, 1.0, True
    return Trajectory(Item(env, task), 0, 1, MAX_TURNS, *outcome, first, tuple(turns), *tokens)


if __name__ == "__main__":
    sys.exit(main())
