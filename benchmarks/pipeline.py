"""Success and cost of the default pipeline: `python benchmarks/pipeline.py --seeds 0 1 2`.

Each seed runs `python -m flows.pipeline seed=N` from an empty state.
Writes docs/results/pipeline.json and, from the first seed, docs/learning_curve.png.
For a profile: `--params profiles/textcraft-cpu.yaml --seeds 0 --out docs/results/textcraft.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from agentgym.config import load_config
from agentgym.pipeline.table import finished, open_store

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--params", type=Path, default=ROOT / "params.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/pipeline.json")
    parser.add_argument("--curve", type=Path, help="PNG of the first seed's learning curve")
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs, one a seed")
    arguments = parser.parse_args()
    is_default = arguments.out == parser.get_default("out")
    curve = arguments.curve or (ROOT / "docs/learning_curve.png" if is_default else None)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    keep_options = ["--keep", str(arguments.keep)]
    command = " ".join(["python", *(word for word in sys.argv if word not in keep_options)])
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            runs.append(run(arguments.params, seed, (arguments.keep or Path(folder)) / str(seed)))
            image = runs[-1].pop("learning_curve")
            if curve is not None and len(runs) == 1:
                curve.write_bytes(image)
            results = {"machine": machine(), "command": command, "runs": runs}
            arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def run(params: Path, seed: int, state: Path) -> dict[str, Any]:
    """Measure one whole run from an empty state, and a second one that finds everything done."""
    overrides = [f"seed={seed}", f"store.path={state / 'store'}"]
    command = [sys.executable, "-m", "flows.pipeline", "--params", str(params), *overrides]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
    }
    environment["PREFECT_HOME"] = str(state / "prefect")
    seconds, cpu, printed, peaks = [], [], [], []
    for _ in range(2):
        began, cpu_began = time.perf_counter(), _cpu_of_children()
        with peak_memory() as peak:
            process = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                check=True,
                timeout=14400,
                stdout=subprocess.PIPE,
            )
        printed.append(process.stdout.decode())
        sys.stdout.write(printed[-1])
        peaks.append(round(peak["bytes"] / 2**30, 2))
        seconds.append(round(time.perf_counter() - began, 1))
        cpu.append(round(_cpu_of_children() - cpu_began, 1))
    pace = re.search(r"^pace +(\d+) times the reference work, ([\d.]+) s", printed[0], re.M)
    parts = re.search(r"^time +(.+)$", printed[0], re.M)
    assert pace is not None
    assert parts is not None
    expected = re.search(r"^the whole run takes about (.+) \(", printed[0], re.M)
    audit = [sys.executable, "-m", "agentgym", "audit", "--episodes", "8", "--params", str(params)]
    for override in overrides:
        audit += ["--set", override]
    audited = subprocess.run(audit, cwd=ROOT, env=environment, timeout=7200, check=False)
    cfg = load_config(params, overrides)
    store = open_store(cfg)
    steps = finished(cfg, store)
    return {
        "peak_gib": peaks[0],  # of all processes of the run; shared memory counts once
        "disk_gib": round(sum(_disk(path) for path in state.rglob("*")) / 2**30, 2),
        "said_before": expected[1] if expected else None,
        "audit": "passed" if audited.returncode == 0 else f"exit code {audited.returncode}",
        "seed": seed,
        "learning_curve": store.read(steps["report"], "learning_curve.png"),
        "wall_s": seconds[0],
        "cpu_s": cpu[0],
        "again_s": seconds[1],
        "parts_s": {
            name.strip(): int(value) for name, value in re.findall(r"([a-z ]+) (\d+) s", parts[1])
        },
        "pace": {"multiple": int(pace[1]), "reference_s": float(pace[2])},
        "steps_s": {
            name: round(manifest.timings.get("wall_s", 0.0), 1) for name, manifest in steps.items()
        },
        "evaluations": {
            manifest.results["checkpoint"]: {
                "summary": manifest.results["summary"],
                "paired": manifest.results.get("paired"),
            }
            for name, manifest in steps.items()
            if name.startswith("evaluate-")
        },
    }


@contextmanager
def peak_memory(every_s: float = 1.0) -> Iterator[dict[str, int]]:
    """Measure the peak memory of all children of this process. Yield a dict; `bytes` has it."""
    peak, ended = {"bytes": 0}, threading.Event()

    def watch() -> None:
        while not ended.wait(every_s):
            total = 0
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    total += child.memory_full_info().pss
            peak["bytes"] = max(peak["bytes"], total)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


def _disk(path: Path) -> float:
    """Return bytes on the disk; each of n hard links counts 1/n."""
    stat = path.lstat()
    return 0 if path.is_dir() else stat.st_blocks * 512 / stat.st_nlink


def _cpu_of_children() -> float:
    """Return CPU seconds of ended children and their ended children."""
    times = os.times()
    return times.children_user + times.children_system


def in_a_process(arguments: list[str], *, timeout_s: float) -> Any:
    """Run a Python program that writes JSON to the path in its last argument. Return that value.
    None if the program failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        process = subprocess.run(
            [sys.executable, *arguments, str(path)], cwd=ROOT, timeout=timeout_s
        )
        return json.loads(path.read_text(encoding="utf-8")) if process.returncode == 0 else None


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


if __name__ == "__main__":
    main()
