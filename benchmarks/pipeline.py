"""Success and cost of the default pipeline: `python benchmarks/pipeline.py --seeds 0 1 2`.

Each seed runs `python -m flows.pipeline seed=N` from an empty state.
Writes docs/results/pipeline.json and, from the first seed, docs/learning_curve.png.
For a profile: `--params profiles/textcraft-cpu.yaml --seeds 0 --out docs/results/textcraft.json`.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

from agentgym.config import load_config
from agentgym.pipeline.table import finished, open_store


def main() -> None:
    parser = harness.parser_of(__doc__, "pipeline.json", seeds=(0, 1, 2))
    parser.add_argument("--params", type=Path, default=harness.ROOT / "params.yaml")
    parser.add_argument("--curve", type=Path, help="PNG of the first seed's learning curve")
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs, one a seed")
    arguments = parser.parse_args()
    is_default = arguments.out == parser.get_default("out")
    curve = arguments.curve or (harness.ROOT / "docs/learning_curve.png" if is_default else None)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            runs.append(run(arguments.params, seed, (arguments.keep or Path(folder)) / str(seed)))
            image = runs[-1].pop("learning_curve")
            if curve is not None and len(runs) == 1:
                curve.write_bytes(image)
            harness.write(arguments.out, {"runs": runs})


def run(params: Path, seed: int, state: Path) -> dict[str, Any]:
    """Measure one whole run from an empty state, and a second one that finds everything done."""
    overrides = [f"seed={seed}", f"store.path={state / 'store'}"]
    words = ["--params", str(params), f"seed={seed}"]
    seconds, cpu, printed, peaks = [], [], [], []
    for _ in range(2):
        began, cpu_began = time.perf_counter(), harness.cpu_of_children()
        with harness.peak_memory() as peak:
            printed.append(harness.pipeline_in(harness.ROOT, state, *words, timeout_s=14400))
        sys.stdout.write(printed[-1])
        peaks.append(round(peak["bytes"] / 2**30, 2))
        seconds.append(round(time.perf_counter() - began, 1))
        cpu.append(round(harness.cpu_of_children() - cpu_began, 1))
    pace = re.search(r"^pace +(\d+) times the reference work, ([\d.]+) s", printed[0], re.M)
    parts = re.search(r"^time +(.+)$", printed[0], re.M)
    assert pace is not None
    assert parts is not None
    expected = re.search(r"^the whole run takes about (.+) \(", printed[0], re.M)
    audit = ["-m", "agentgym", "audit", "--episodes", "8", "--params", str(params)]
    audited = harness.completed([*audit, *harness.set_words(overrides)], timeout_s=7200)
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


def _disk(path: Path) -> float:
    """Return bytes on the disk; each of n hard links counts 1/n."""
    stat = path.lstat()
    return 0 if path.is_dir() else stat.st_blocks * 512 / stat.st_nlink


if __name__ == "__main__":
    main()
