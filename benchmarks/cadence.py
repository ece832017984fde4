"""Check that a run ends the same for every commit cadence and number of kills.

`python benchmarks/cadence.py [--every 1 5 1000] [--kills 10]`. For each `store.commit_every` it
trains one deterministic run of two stages without interruption, and one that is killed at random
moments of its training and restarted each time.
Writes docs/results/cadence.json; fails if the two differ, or if MLflow contains a point twice.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from chaos_project import repeated_points
from harness import ROOT, parser_of, stage_commits, write

from agentgym.audit import audit
from agentgym.config import RunConfig, load_config
from agentgym.pipeline.run import run_with_parents
from agentgym.pipeline.table import open_store
from agentgym.store.manifest import Manifest

SHORT = [
    "deterministic=true",
    "horizon.kind=stepwise",
    "horizon.max_turns=[5,8]",
    "horizon.stage_steps=[6,6]",
    "rollout.items_per_step=8",
    "validation.every=4",
    "validation.num_items=8",
]
STAGES = ("stage-1", "stage-2")
CHILD = """
import sys
from agentgym.config import load_config
from agentgym.pipeline.run import run_with_parents
cfg = load_config(overrides=sys.argv[1:])
import agentgym.training.rl
print("begins", flush=True)
run_with_parents("stage-2", cfg)
"""
LIMIT_S = 900.0


def main() -> int:
    parser = parser_of(__doc__, "cadence.json")
    parser.add_argument("--every", type=int, nargs="+", default=[1, 5, 1000])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random kill times")
    chosen = parser.parse_args()
    os.chdir(ROOT)
    rng, rows = random.Random(chosen.seed), []  # noqa: S311  (kill times, no secrets)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        run_with_parents("warm-start", settings(base, 1))
        for every in chosen.every:
            twin, victim = Path(folder, f"twin-{every}"), Path(folder, f"victim-{every}")
            for copy_folder in (twin, victim):
                shutil.copytree(base, copy_folder)
            began = time.monotonic()
            run_with_parents("stage-2", settings(twin, every))
            alone_s = time.monotonic() - began
            landed = kill_often(victim, every, chosen.kills, alone_s, rng)
            rows.append(compared(settings(twin, every), settings(victim, every), every, landed))
            print(rows[-1])
    write(chosen.out, {"settings": SHORT, "rows": rows})
    fine = all(row["identical"] and not row["repeated_points"] and row["audit"] for row in rows)
    return 0 if fine else 1


def settings(folder: Path, every: int) -> RunConfig:
    return load_config(overrides=overrides(folder, every))


def overrides(folder: Path, every: int) -> list[str]:
    commits = f"store.path={folder / 'store'}", f"store.commit_every={every}"
    return [*SHORT, "store.max_mib_per_minute=0", *commits]


def kill_often(
    folder: Path, every: int, kills: int, alone_s: float, rng: random.Random
) -> list[int]:
    """Kill the run `kills` times, then let it end. Result: the durable optimizer step after each
    kill.
    """
    landed: list[int] = []
    while len(landed) < kills:
        # with rare commits, each kill may lose a whole stage
        process = started(overrides(folder, every))
        try:
            process.wait(rng.uniform(0.2, 0.8 * alone_s))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            landed.append(durable_step(settings(folder, every)))
        else:
            if process.returncode:
                raise RuntimeError(f"a run ended with code {process.returncode}")
            break  # the run ended before all kills were done
    process = started(overrides(folder, every))
    if process.wait(LIMIT_S):
        raise RuntimeError(f"the run after the kills ended with code {process.returncode}")
    return landed


def started(settings: list[str]) -> subprocess.Popen[bytes]:
    """Start a run of both stages; return it once it is about to begin."""
    command = [sys.executable, "-c", CHILD, *settings]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def durable_step(cfg: RunConfig) -> int:
    heads = [head for head in open_store(cfg).heads() if head.step in STAGES]
    return max((int(head.state["global_step"]) for head in heads), default=0)


def compared(twin: RunConfig, victim: RunConfig, every: int, landed: list[int]) -> dict[str, Any]:
    victim_commits, twin_commits = stage_commits(victim), stage_commits(twin)
    written = sum(
        blob.size
        for manifest in twin_commits
        for blob in (*manifest.blobs.values(), *manifest.records.values())
    )
    return {
        "commit_every": every,
        "kills": len(landed),
        "durable_step_after_each": landed,
        "optimizer_steps": len(twin_commits),
        "commits": sum(bool(manifest.blobs) for manifest in twin_commits),
        "identical": [identity(manifest) for manifest in victim_commits]
        == [identity(manifest) for manifest in twin_commits],
        "final": victim_commits[-1].digest[:12],
        "repeated_points": len(repeated_points(victim.state_dir / "mlflow.db")),
        "audit": audit(victim, num_episodes=8).ok,
        "mib_per_optimizer_step": round(written / len(twin_commits) / 2**20, 2),
    }


def identity(manifest: Manifest) -> tuple[Any, ...]:
    """Return the commit's weights (if it has any), items, draws and results."""
    return manifest.digest, manifest.state, manifest.blobs


if __name__ == "__main__":
    sys.exit(main())
