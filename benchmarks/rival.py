"""Episodes per second of ours and of Hugging Face TRL's GRPO: `python benchmarks/rival.py`.

Both train the same warm-started model on the same BabyAI server, items, loss and optimizer, on the
same cores. The first round measures each of TRL's ways; later ones alternate ours and its fastest.
TRL has its own Python environment, which takes torch and transformers from this one. Needs an idle
machine; writes docs/results/rival.json.
"""

from __future__ import annotations

import bisect
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from harness import ROOT, config_in, env_server, output_of, parser_of, repeated, set_words, write

from agentgym.config import RunConfig, load_config
from agentgym.data.items import load_splits, train_stream
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import open_store
from agentgym.tracking.deliver import committed_points

TRL = "trl==1.16.0"
BEFORE = ("prepare", "demonstrate", "initialize", "warm-start")
OURS = (
    *("horizon.kind=fixed", "horizon.max_turns=[12]", "validation.every=0"),
    *("algorithm.minibatches=1", "optimizer.warmup_steps=0"),
)
WAYS = (  # TRL's interface, threads of torch
    ("rollout_func", 1),
    ("rollout_func", 2),
    ("environment_factory", 1),
    ("environment_factory", 2),
)
SAMPLE_S = 0.2
TIMEOUT_S = 900.0


def main() -> None:
    parser = parser_of(__doc__, "rival.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/rival", help="TRL's packages")
    arguments = parser.parse_args()
    python = installed(arguments.folder.resolve())
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        cfg = warm_started(folder)
        ways: Sequence[tuple[str, int]] = WAYS
        for _ in range(arguments.rounds):
            measured = {"ours": ours(cfg, folder, arguments.steps)}
            for way, threads in ways:
                measured[_name(way, threads)] = trl(python, folder, way, threads, arguments.steps)
            for name, run in measured.items():
                runs.setdefault(name, []).append(run)
                print(name, json.dumps(run), flush=True)
            ways = [max(ways, key=lambda way: runs[_name(*way)][0]["episodes_per_s"])]
    result = {
        "rival": TRL,
        "steps": arguments.steps,
        "ways": {name: _medians(measured) for name, measured in runs.items()},
        "runs": runs,
    }
    result["ratio"] = ratio(result["ways"])
    write(arguments.out, result)
    print(json.dumps({name: result[name] for name in ("ways", "ratio")}, indent=1))


def installed(folder: Path) -> Path:
    """Return the Python of an environment with TRL on top of this one's packages."""
    python = folder / "bin/python"
    if not (folder / "lib").is_dir():
        venv.create(folder, with_pip=True)
        site_packages = next(path for path in sys.path if path.endswith("site-packages"))
        (target,) = folder.glob("lib/python*/site-packages")
        (target / "base.pth").write_text(site_packages + "\n", encoding="utf-8")
        subprocess.run([python, "-m", "pip", "install", "-q", TRL], check=True, timeout=TIMEOUT_S)
    return python


def warm_started(folder: Path) -> RunConfig:
    """Make the model from which all ways start, and the file of their items, in order."""
    cfg = config_in(folder / "warm")
    for step in BEFORE:
        run_step(step, cfg)
    export = ["-m", "agentgym", "export", "warm-start", str(folder / "model")]
    output_of([*export, "--set", f"store.path={folder}/warm/store"], timeout_s=TIMEOUT_S)
    splits = load_splits(
        cfg.data.path, "babyai", validation_fraction=cfg.data.validation_fraction, seed=cfg.seed
    )
    stream = train_stream(cfg, splits, {})
    items = [item.task_id for _ in range(60) for item in stream.next(cfg.rollout.items_per_step)]
    (folder / "items.json").write_text(json.dumps(items), encoding="utf-8")
    return cfg


def ours(cfg: RunConfig, folder: Path, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=folder) as state:
        # with MLflow's database, which the run's earlier steps made
        shutil.copytree(folder / "warm", state, dirs_exist_ok=True)
        settings = [f"store.path={state}/store", f"horizon.stage_steps=[{steps}]", *OURS]
        command = ["-m", "agentgym", "step", "stage-1", *set_words(settings)]
        with watched() as samples:
            output_of(command, timeout_s=TIMEOUT_S)
        opened = open_store(load_config(ROOT / "params.yaml", settings))
        heads = [head for head in opened.heads() if head.step == "stage-1"]
        (head,) = (head for head in heads if head.config["horizon"]["max_turns"] == [12])
        rows = [
            {
                "time": point.time_ms / 1000,
                "episodes": point.metrics["rollout/num_episodes"],
                "reward": point.metrics["rollout/success"],
            }
            for point in committed_points(opened, "stage-1", head.key)
        ]
    return rates(rows, samples)


def trl(python: Path, folder: Path, way: str, threads: int, steps: int) -> dict[str, float]:
    options = load_config(ROOT / "params.yaml").env.options
    server = env_server("babyai", options=options, max_sessions=256)
    env = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    with server as url, watched() as samples:
        env["TRL_SERVER_TOKEN"] = url.token
        command = [python, ROOT / "benchmarks/rival_trl.py", way, url, folder / "model"]
        command += [folder / "items.json", threads, steps, folder / "steps.jsonl"]
        subprocess.run(list(map(str, command)), check=True, timeout=TIMEOUT_S, env=env)
    lines = (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    return rates([json.loads(line) for line in lines], samples)


Samples = list[tuple[float, float, int]]  # time, CPU seconds so far, bytes


@contextmanager
def watched() -> Iterator[Samples]:
    """Record the CPU time and the resident memory of all children of this process."""
    samples: Samples = []
    cpu: dict[int, float] = {}

    def look() -> None:
        resident = 0
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error), child.oneshot():
                times = child.cpu_times()
                cpu[child.pid] = max(cpu.get(child.pid, 0.0), times.user + times.system)
                resident += child.memory_info().rss
        samples.append((time.time(), sum(cpu.values()), resident))

    with repeated(look, SAMPLE_S):
        yield samples


def rates(rows: Sequence[dict[str, float]], samples: Samples) -> dict[str, float]:
    """Return rates from the end of the first optimizer step to the end of the last."""
    first, last = rows[0]["time"], rows[-1]["time"]
    num, span = len(rows) - 1, rows[-1]["time"] - rows[0]["time"]
    times = [at for at, _, _ in samples]

    def cpu(at: float) -> float:
        return samples[min(bisect.bisect(times, at), len(times) - 1)][1]

    return {
        "episodes_per_s": round(sum(row["episodes"] for row in rows[1:]) / span, 1),
        "step_s": round(span / num, 3),
        "cpu_step_s": round((cpu(last) - cpu(first)) / num, 3),
        "peak_mib": round(max(resident for _, _, resident in samples) / 2**20),
        "success_first": round(rows[0]["reward"], 3),
        "success_last_3": round(statistics.mean(row["reward"] for row in rows[-3:]), 3),
    }


def ratio(ways: dict[str, dict[str, float]]) -> float:
    """Return our episodes per second divided by those of TRL's fastest way."""
    best = max(way["episodes_per_s"] for name, way in ways.items() if name != "ours")
    return round(ways["ours"]["episodes_per_s"] / best, 2)


def _name(way: str, threads: int) -> str:
    return f"{way}, {threads} threads"


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


if __name__ == "__main__":
    main()
