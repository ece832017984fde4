"""Compare the results of two commits: `python benchmarks/unchanged.py BEFORE [AFTER]`.

Each commit runs the pipeline in a checkout of its own, deterministic, on the budget of `.ci/run`:
every recipe of RECIPES with every seed of SEEDS.
Compared are the sha256 of the weights of every step and of the outcomes of every evaluation.
A run that is in the state folder already continues from its last commit.
Writes docs/results/unchanged.json; exit code 1 if something differs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import ROOT, checkout, commit_of, parser_of, pipeline_in, read, write

from agentgym.tracking.step_page import successes

RECIPES, SEEDS = ("grpo", "ppo", "dapo", "dpo"), (0, 1)
BUDGET = ("deterministic=true", "evaluation.num_items=128", "horizon.stage_steps=[10,10,15]")
OUTCOMES, RESULT = "outcomes.json", "result.json"  # of an evaluation: before, and since
COMPARED = (OUTCOMES, ".safetensors")  # endings of the names of files that must be equal

Digests = dict[str, str]  # "step/blob" -> sha256


def main() -> int:
    parser = parser_of(__doc__, "unchanged.json")
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", default="HEAD", help="a commit")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--parallel", type=int, default=os.cpu_count())
    parser.add_argument("--state", type=Path, default=ROOT / ".agentgym/unchanged")
    arguments = parser.parse_args()
    state = arguments.state.resolve()
    cases = list(itertools.product(arguments.recipes, arguments.seeds))
    commits = [commit_of(arguments.before), commit_of(arguments.after)]
    with (
        checkout(commits[0], state) as before,
        checkout(commits[1], state) as after,
        ThreadPoolExecutor(arguments.parallel) as pool,
    ):
        jobs = [
            (case, [pool.submit(digests, tree, *case) for tree in (before, after)])
            for case in cases
        ]
        runs = [compared(case, *(job.result() for job in both)) for case, both in jobs]
    result = {"before": commits[0], "after": commits[1], "budget": BUDGET, "runs": runs}
    write(arguments.out, result)
    return 0 if all(run["num_equal"] and not run["differ"] for run in runs) else 1


def compared(case: tuple[str, int], before: Digests, after: Digests) -> dict[str, Any]:
    recipe, seed = case
    names = sorted(before.keys() | after.keys())
    differ = [name for name in names if before.get(name) != after.get(name)]
    print(f"{recipe} seed {seed}: {len(names) - len(differ)} of {len(names)} equal")
    print(*(f"  differs: {name}\n" for name in differ), sep="", end="")
    return {
        "recipe": recipe,
        "seed": seed,
        "num_equal": len(names) - len(differ),
        "differ": differ,
        "digests": after,
    }


def digests(tree: Path, recipe: str, seed: int) -> Digests:
    """Return the digests of a pipeline, which runs here if it is not done.
    Errors: RuntimeError if it fails, with the end of its output.
    """
    home = tree.with_name(f"{tree.name}-{recipe}-{seed}")
    home.mkdir(exist_ok=True)
    digests_path = home / "digests.json"
    if not digests_path.exists():
        pipeline_in(tree, home, *BUDGET, f"algorithm.recipe={recipe}", f"seed={seed}")
        digests_path.write_text(json.dumps(committed(home / "store"), indent=1), encoding="utf-8")
    return read(digests_path)


def committed(store: Path) -> Digests:
    """Return the digests in every step's last manifest. Both commits must have this layout."""
    result: Digests = {}
    for step in sorted((store / "steps").iterdir()):
        manifest = read(max((step / "manifests").glob("*.json")))
        for name, blob in manifest["blobs"].items():
            if name.endswith(COMPARED):
                result[f"{manifest['step']}/{name}"] = blob["digest"]
            elif name == RESULT and manifest["step"] != "evaluation":
                outcomes = outcomes_of(json.loads((step / "blobs" / blob["digest"]).read_bytes()))
                digest = hashlib.sha256(json.dumps(outcomes).encode()).hexdigest()
                result[f"{manifest['step']}/{OUTCOMES}"] = digest
    return result


def outcomes_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return an evaluation's outcomes in the format of earlier versions."""
    rows = successes(result)
    return {
        "items": list(rows),
        "greedy": [greedy for greedy, *_ in rows.values()],
        "samples": [samples for _, *samples in rows.values()],
    }


if __name__ == "__main__":
    sys.exit(main())
