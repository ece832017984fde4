"""Shared parts of the benchmarks: arguments, result files, commits, processes and their costs.

`python benchmarks/harness.py` lists the benchmarks, which `make measure NAME=...` runs.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results"
PACKAGES = ("agentgym", "envs", "sites", "services", "tasks", "flows")
POLL_S = 0.1
T = TypeVar("T")


# --- arguments and results


def parser_of(
    doc: str | None, result: str = "", *, seeds: Sequence[int] = (), state: bool = False
) -> argparse.ArgumentParser:
    """Return a parser described by the docstring's first line.
    result: a file in docs/results, the default of the option --out. seeds: default of --seeds.
    state: it has the option --state, a folder for `kept`.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if result:
        parser.add_argument("--out", type=Path, default=RESULTS / result, metavar="FILE")
    if seeds:
        parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    if state:
        kept_in = "folder that keeps the runs (default: a temporary one)"
        parser.add_argument("--state", type=Path, help=kept_in)
    return parser


def machine() -> dict[str, Any]:
    """Return the CPU and the versions that the figures depend on."""
    models = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    }
    packages = ("torch", "transformers", "prefect", "mlflow", "dvc", "minigrid")
    return {
        "cpu": sorted(models),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def origin() -> dict[str, Any]:
    """Return the origin that every result contains: machine, command and date."""
    program = os.path.relpath(sys.argv[0], ROOT)
    return {
        "machine": machine(),
        "command": " ".join(["python", program, *sys.argv[1:]]),
        "measured": datetime.now(UTC).date().isoformat(),
    }


def read(path: Path, otherwise: T | None = None) -> Any:
    """Return the content of a JSON file, or `otherwise` if the file is missing."""
    if otherwise is not None and not path.exists():
        return otherwise
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, numbers: Mapping[str, Any], rows: Sequence[str] = ()) -> None:
    """Write a result with its origin as JSON. rows: names of lists with one line per element."""
    result = origin()
    result |= {name: value for name, value in numbers.items() if name not in result}
    text = json.dumps({name: value for name, value in result.items() if name not in rows}, indent=1)
    for name in rows:
        lines = ",\n".join(f"  {json.dumps(row)}" for row in result[name])
        text = f'{text[:-2]},\n "{name}": [' + (f"\n{lines}\n ]" if lines else "]") + "\n}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]], line: str = "") -> list[str]:
    """Return the lines of a Markdown table. line: below the titles."""
    lines = [f"| {' | '.join(titles)} |", line or "|" + "---|" * len(titles)]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def simulated(
    simulate: Callable[[Any, int, Any], T], cases: Sequence[Any], nums: Sequence[int], seed: int
) -> list[T]:
    """Call `simulate(case, num, generator)` for every case, in one process per core.
    Each case has its own random stream: the number of processes changes nothing.
    """
    import numpy as np

    streams = np.random.SeedSequence(seed).spawn(len(cases))
    generators = [np.random.Generator(np.random.Philox(stream)) for stream in streams]
    results = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(simulate, cases, nums, generators):
            results.append(result)
            print(f"{len(results)}/{len(cases)} {result}", file=sys.stderr)
    return results


# --- processes


def completed(
    words: Sequence[str | Path],
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program, with any exit code. If its first word starts with "-", Python runs it."""
    return subprocess.run(
        [sys.executable, *words] if str(words[0]).startswith("-") else words,
        cwd=cwd,
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout_s,
        check=False,
    )


def output_of(words: Sequence[str | Path], **options: Any) -> str:
    """Run a program like `completed`; return its output.
    Errors: RuntimeError with the end of its output.
    """
    process = completed(words, **options)
    if process.returncode:
        printed = (process.stdout + process.stderr)[-3000:]
        raise RuntimeError(f"{' '.join(map(str, words))}: {process.returncode}\n{printed}")
    return process.stdout


def set_words(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def pipeline_in(tree: Path, home: Path, *words: str, timeout_s: float = 3600.0) -> str:
    """Run a checkout's whole pipeline with its state in `home`; return its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    variables = {"PYTHONPATH": str(tree), "PREFECT_HOME": str(home / "prefect")}
    command = ["-m", "flows.pipeline", *words, f"store.path={home / 'store'}"]
    return output_of(command, cwd=tree, env={**kept, **variables}, timeout_s=timeout_s)


def in_a_process(arguments: list[str], *, timeout_s: float) -> Any:
    """Run a Python program that writes JSON to the path in its last argument. Return that value,
    or None if the program failed or took too long.
    """
    with kept(None) as folder:
        path = folder / "result.json"
        words = [sys.executable, *arguments, str(path)]
        try:
            subprocess.run(words, cwd=ROOT, timeout=timeout_s, check=True)
        except subprocess.SubprocessError as error:
            print(error, file=sys.stderr)
            return None
        return read(path)


def wait_for(
    ready: Callable[[], T],
    timeout_s: float,
    what: str,
    process: subprocess.Popen[bytes] | None = None,
    log: Path | None = None,
) -> T:
    """Wait until `ready` returns a true value; return it.
    Errors: RuntimeError with the log's end if it takes too long or the process ends.
    """
    deadline = time.monotonic() + timeout_s
    while not (result := ready()):
        if time.monotonic() > deadline or (process and process.poll() is not None):
            end = log.read_text(encoding="utf-8", errors="replace")[-2000:] if log else ""
            raise RuntimeError(f"{what} within {timeout_s:g} s\n{end}")
        time.sleep(POLL_S)
    return result


def wait_for_url(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers. Errors: RuntimeError if it does not."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answers() -> bool:
        try:
            with opener.open(url, timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    wait_for(answers, 300.0, f"no answer from {url}", process, log)


@contextlib.contextmanager
def serving_app(app_of: Callable[[int], Any]) -> Iterator[str]:
    """Serve an ASGI application from a thread of this process; yield its address.
    app_of: makes the application for a port.
    """
    import uvicorn

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        port = bound.getsockname()[1]
        config = uvicorn.Config(app_of(port), log_level="warning", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            wait_for(lambda: server.started, 60.0, "no server")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(30)


@contextlib.contextmanager
def env_server(name: str, *, expert: bool = False, **settings: Any) -> Iterator[Any]:
    """Serve an environment as a run does; yield its endpoint. settings: of EnvConfig."""
    from agentgym.config import EnvConfig
    from agentgym.deploy.local import local_env

    env = EnvConfig(name=name, **settings)
    with kept(None) as path, local_env(env, expert=expert, log_path=path / "log") as (endpoint,):
        yield endpoint


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def s3_bucket(
    folder: Path, bucket: str, host: str = "127.0.0.1"
) -> Iterator[tuple[Any, dict[str, str]]]:
    """Start an S3 server (moto) with a bucket. Yield (a client, variables that lead there)."""
    import boto3

    from agentgym.deploy.owned import owned_process

    port, log = Path(tempfile.mkdtemp(dir=folder)) / "port", folder / "s3.log"
    command = [sys.executable, "-P", str(ROOT / "tests/s3_server.py"), str(port), host]
    with owned_process(command, log_path=log, env={}) as process:
        wait_for(port.exists, 300.0, "no S3 server", process, log)
        url = f"http://{host}:{port.read_text(encoding='utf-8')}"
        variables = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        client = boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id="test",
            aws_secret_access_key="test",  # noqa: S106 - of a server on loopback
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=bucket)
        yield client, variables


# --- costs


@contextlib.contextmanager
def peak_memory(every_s: float = 1.0) -> Iterator[dict[str, int]]:
    """Measure the peak memory of all children of this process. Yield it in a dict as `bytes`."""
    peak = {"bytes": 0}

    def look() -> None:
        children = psutil.Process().children(recursive=True)
        peak["bytes"] = max(peak["bytes"], pss_bytes(children))

    with repeated(look, every_s):
        yield peak


@contextlib.contextmanager
def repeated(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `look` from a thread every `every_s` seconds until the block ends."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(every_s):
            look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def pss_bytes(processes: Sequence[psutil.Process]) -> int:
    """Return the memory of the processes; shared memory counts once."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def cpu_of_children() -> float:
    """Return CPU seconds of ended children and their ended children."""
    times = os.times()
    return times.children_user + times.children_system


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(process.cpu_times().user + process.cpu_times().system for process in processes)


def processes_at(port: int) -> list[psutil.Process]:
    """Return the local process that listens on the port, and its descendants."""
    for connection in psutil.net_connections(kind="tcp"):
        is_bound = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        if is_bound and connection.pid is not None:
            process = psutil.Process(connection.pid)
            return [process, *process.children(recursive=True)]
    return []


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies; 0 if there are none."""
    ordered = sorted(values) or [0.0]
    return ordered[int(share * (len(ordered) - 1))]


# --- runs, and commits of this repository


@contextlib.contextmanager
def kept(folder: Path | None) -> Iterator[Path]:
    """Yield this folder, or a temporary one if it is None."""
    with tempfile.TemporaryDirectory() as temporary:
        yield folder or Path(temporary)


def config_in(folder: Path | str, *overrides: str, params: Path = ROOT / "params.yaml") -> Any:
    """Return the configuration of a run whose store is in this folder."""
    from agentgym.config import load_config

    return load_config(params, [*overrides, f"store.path={folder}/store"])


def last_stage(cfg: Any) -> str:
    from agentgym.steps.step import stages

    return stages(cfg.horizon)[-1].name


def results_of(cfg: Any, step: str) -> Any:
    """Return the results of a finished step, for example an evaluation's `summary`."""
    from agentgym.pipeline.table import finished, open_store

    return finished(cfg, open_store(cfg))[step].results


def git(*arguments: str) -> str:
    return output_of(["git", *arguments], timeout_s=60).strip()


def commit_of(name: str) -> str:
    return git("rev-parse", "--short=12", f"{name}^{{commit}}")


@contextlib.contextmanager
def checkout(commit: str, state: Path | None = None) -> Iterator[Path]:
    """Yield a worktree with the files of a commit and a link to this installation.
    state: its parent, by default a temporary folder.
    """
    with kept(state) as folder:
        tree = folder / commit
        tree.parent.mkdir(parents=True, exist_ok=True)
        if not tree.exists():
            git("worktree", "add", "--detach", str(tree), commit)
            (tree / ".venv").symlink_to(ROOT / ".venv")
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def stage_commits(cfg: Any) -> list[Any]:
    """Return the manifests of the finished stages, in order."""
    from agentgym.pipeline.table import finished, open_store
    from agentgym.steps.step import stages

    store, names = open_store(cfg), [stage.name for stage in stages(cfg.horizon)]
    done = finished(cfg, store)
    return [commit for name in names for commit in store.history(name, done[name].key)]


def stage_points(cfg: Any) -> list[Any]:
    """Return the finished stages' points, one per optimizer step."""
    from agentgym.pipeline.table import open_store
    from agentgym.steps.context import METRICS
    from agentgym.tracking.points import decode_points

    store = open_store(cfg)
    blobs = (store.read(commit, METRICS) for commit in stage_commits(cfg))
    return [point for blob in blobs for point in decode_points(blob)]


def main() -> None:
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if 'if __name__ == "__main__"' in text and path != Path(__file__):
            about = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            print(f"{path.stem:14} {about}")


if __name__ == "__main__":
    main()
