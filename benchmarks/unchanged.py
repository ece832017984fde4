"""Do two commits compute the same: `python benchmarks/unchanged.py BEFORE [AFTER]`.

Each commit runs the pipeline in a checkout of its own, deterministic, on the budget of `.ci/run`:
every recipe of RECIPES with every seed of SEEDS.
Equal means: the sha256 of the weights of every step and of the outcomes of every evaluation.
A run that is in the state folder already goes on where it stopped.
Writes docs/results/unchanged.json; exit code 1 where something differs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline import ROOT, machine

from agentgym.tracking.pages import successes

OUT = ROOT / "docs/results/unchanged.json"
RECIPES, SEEDS = ("grpo", "ppo", "dapo", "dpo"), (0, 1)
BUDGET = ("deterministic=true", "evaluation.num_items=128", "horizon.stage_steps=[10,10,15]")
RENAMED = (("initialise", "initialize"), ("optimiser", "optimizer"))  # since the first of these
OUTCOMES, RESULT = "outcomes.json", "result.json"  # of an evaluation: before, and since
COMPARED = (OUTCOMES, ".safetensors")  # how the names of what must be equal end
RUN_S = 3600

Digests = dict[str, str]  # "step/blob" -> sha256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", default="HEAD", help="a commit")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--parallel", type=int, default=os.cpu_count())
    parser.add_argument("--state", type=Path, default=ROOT / ".agentgym/unchanged")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    state = chosen.state.resolve()
    cases = list(itertools.product(chosen.recipes, chosen.seeds))
    commits = [commit_of(chosen.before), commit_of(chosen.after)]
    with (
        checkout(commits[0], state) as before,
        checkout(commits[1], state) as after,
        ThreadPoolExecutor(chosen.parallel) as pool,
    ):
        jobs = [
            (case, [pool.submit(digests, tree, *case) for tree in (before, after)])
            for case in cases
        ]
        runs = [compared(case, *(each.result() for each in both)) for case, both in jobs]
    result = {
        "machine": machine(),
        "command": " ".join(["python", "benchmarks/unchanged.py", *sys.argv[1:]]),
        "before": commits[0],
        "after": commits[1],
        "budget": BUDGET,
        "runs": runs,
    }
    chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(run["num_equal"] and not run["differ"] for run in runs) else 1


def compared(case: tuple[str, int], before: Digests, after: Digests) -> dict[str, Any]:
    recipe, seed = case
    names = sorted(before.keys() | after.keys())
    differ = [name for name in names if before.get(name) != after.get(name)]
    sys.stdout.write(
        f"{recipe} seed {seed}: {len(names) - len(differ)} of {len(names)} equal"
        + "".join(f"\n  differs: {name}" for name in differ)
        + "\n"
    )
    return {
        "recipe": recipe,
        "seed": seed,
        "num_equal": len(names) - len(differ),
        "differ": differ,
        "digests": after,
    }


def digests(tree: Path, recipe: str, seed: int) -> Digests:
    """Of a pipeline, run here where it is not done.
    Errors: RuntimeError where it fails, with the end of what it wrote.
    """
    home = tree.with_name(f"{tree.name}-{recipe}-{seed}")
    home.mkdir(exist_ok=True)
    done = home / "digests.json"
    if not done.exists():
        command = [sys.executable, "-m", "flows.pipeline", *BUDGET]
        command += [f"algorithm.recipe={recipe}", f"seed={seed}", f"store.path={home / 'store'}"]
        told = subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "PREFECT_HOME": str(home / "prefect")},
            capture_output=True,
            text=True,
            timeout=RUN_S,
            encoding="utf-8",
        )
        if told.returncode:
            raise RuntimeError(
                f"{' '.join(command)} in {tree}\n{(told.stdout + told.stderr)[-3000:]}"
            )
        done.write_text(json.dumps(committed(home / "store"), indent=1), encoding="utf-8")
    found: Digests = json.loads(done.read_text(encoding="utf-8"))
    return found


def committed(store: Path) -> Digests:
    """Of the last manifest of every step, as the files say: both commits' layouts are this one."""
    found: Digests = {}
    for step in sorted((store / "steps").iterdir()):
        manifest = json.loads(max((step / "manifests").glob("*.json")).read_text(encoding="utf-8"))
        for name, blob in manifest["blobs"].items():
            if name.endswith(COMPARED):
                found[f"{manifest['step']}/{name}"] = blob["digest"]
            elif name == RESULT and manifest["step"] != "evaluation":
                outcomes = outcomes_of(json.loads((step / "blobs" / blob["digest"]).read_bytes()))
                digest = hashlib.sha256(json.dumps(outcomes).encode()).hexdigest()
                found[f"{manifest['step']}/{OUTCOMES}"] = digest
    for old, new in RENAMED:
        found = {name.replace(old, new): digest for name, digest in found.items()}
    return found


def outcomes_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return what an evaluation's result says as earlier versions wrote it."""
    rows = successes(result)
    return {
        "items": list(rows),
        "greedy": [greedy for greedy, *_ in rows.values()],
        "samples": [samples for _, *samples in rows.values()],
    }


def commit_of(name: str) -> str:
    return git("rev-parse", "--short=12", f"{name}^{{commit}}")


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        encoding="utf-8",
    ).stdout.strip()


@contextmanager
def checkout(commit: str, state: Path) -> Iterator[Path]:
    """The files of a commit, with this installation beside them."""
    tree = state / commit
    state.mkdir(parents=True, exist_ok=True)
    if not tree.exists():
        git("worktree", "add", "--detach", str(tree), commit)
        (tree / ".venv").symlink_to(ROOT / ".venv")
    try:
        yield tree
    finally:
        git("worktree", "remove", "--force", str(tree))


if __name__ == "__main__":
    sys.exit(main())
