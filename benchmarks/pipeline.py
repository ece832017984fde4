"""What the default pipeline reaches and costs: `python benchmarks/pipeline.py --seeds 0 1 2`.

Each seed runs `python -m flows.pipeline seed=N` from an empty state. Writes docs/results/pipeline.json and, from the first
seed, docs/learning_curve.png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agentgym.config import load_config
from agentgym.steps import finished, open_store

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(seed, Path(folder) / str(seed), picture=seed == seeds[0]) for seed in seeds]
    result = {"machine": machine(), "command": " ".join(["python", "benchmarks/pipeline.py", "--seeds", *map(str, seeds)]), "runs": runs}
    path = ROOT / "docs/results/pipeline.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def run(seed: int, state: Path, *, picture: bool) -> dict[str, Any]:
    """One whole run from an empty state, and a second one that finds everything done."""
    overrides = [f"seed={seed}", f"store.path={state / 'store'}"]
    command = [sys.executable, "-m", "flows.pipeline", *overrides]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment["PREFECT_HOME"] = str(state / "prefect")
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=3600)
        seconds.append(round(time.perf_counter() - began, 1))
    cfg = load_config(ROOT / "params.yaml", overrides)
    store = open_store(cfg)
    done = finished(cfg, store)
    if picture:
        (ROOT / "docs").mkdir(exist_ok=True)
        (ROOT / "docs/learning_curve.png").write_bytes(store.read(done["report"], "learning_curve.png"))
    return {
        "seed": seed,
        "wall_s": seconds[0],
        "again_s": seconds[1],
        "steps_s": {name: round(manifest.timings.get("wall_s", 0.0), 1) for name, manifest in done.items()},
        "evaluations": {
            manifest.results["checkpoint"]: {"summary": manifest.results["summary"], "paired": manifest.results.get("paired")}
            for name, manifest in done.items()
            if name.startswith("evaluate-")
        },
    }


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    models = {line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")}
    packages = ("torch", "transformers", "prefect", "mlflow", "dvc", "minigrid")
    return {
        "cpu": sorted(models),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


if __name__ == "__main__":
    main()
