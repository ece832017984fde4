"""CPU-seconds of the default pipeline at two commits, in alternation on one machine.

    python benchmarks/cost.py BEFORE [AFTER] [--before-set KEY=VALUE ...] [--after-set ...]

The overrides make both play the same number of items and samples in as many optimizer steps.
CPU time is that of the command and all its descendants; the sampled success is that of the last
evaluation. Writes docs/results/cost.json under the name `--case`; other cases stay.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

from harness import RESULTS, checkout, commit_of, origin, output_of, parser_of, read, write

OUT = RESULTS / "cost.json"
RUN_S = 3600


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", default="HEAD", help="a commit")
    parser.add_argument("--case", required=True, help="its name in the result")
    parser.add_argument("--before-set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--after-set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--times", type=int, default=2)
    chosen = parser.parse_args()
    commits = [commit_of(chosen.before), commit_of(chosen.after)]
    overrides = [chosen.before_set, chosen.after_set]
    runs: list[list[dict[str, float]]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        with checkout(commits[0], state) as before, checkout(commits[1], state) as after:
            for turn in range(chosen.times):
                for side, tree in enumerate((before, after)):
                    home = state / f"{side}-{turn}"
                    runs[side].append(run(tree, home, [f"seed={turn}", *overrides[side]]))
                    print(commits[side], runs[side][-1], flush=True)
    cases = [
        {"commit": commit, "set": chosen_set, "runs": case_runs}
        for commit, chosen_set, case_runs in zip(commits, overrides, runs, strict=True)
    ]
    ratio = total(runs[1], "cpu_s") / total(runs[0], "cpu_s")
    result = read(OUT, {})
    result[chosen.case] = {
        **origin(),
        "before": cases[0],
        "after": cases[1],
        "cpu_ratio": round(ratio, 3),
    }
    write(OUT, result)
    sys.stdout.write(f"{chosen.case}: {ratio:.3f} of the CPU-seconds\n")
    return 0


def total(runs: list[dict[str, float]], name: str) -> float:
    return statistics.fmean(run_numbers[name] for run_numbers in runs)


def run(tree: Path, home: Path, overrides: list[str]) -> dict[str, float]:
    """Run a checkout's whole pipeline from an empty state. Errors: RuntimeError if it fails."""
    home.mkdir()
    output_of(["-m", "dvc", "pull", "--quiet"], cwd=tree, timeout_s=RUN_S)
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
    }
    before = os.times()
    output_of(
        ["-m", "flows.pipeline", *overrides, f"store.path={home / 'store'}"],
        cwd=tree,
        env={**variables, "PYTHONPATH": str(tree), "PREFECT_HOME": str(home / "prefect")},
        timeout_s=RUN_S,
    )
    now = os.times()
    spent = now.children_user + now.children_system - before.children_user - before.children_system
    return {"cpu_s": round(spent, 1), "wall_s": round(now.elapsed - before.elapsed, 1)} | {
        "sampled_success": last_success(home / "store")
    }


def last_success(store: Path) -> float:
    """Mean success at temperature 1 in the manifest of the last stage's evaluation."""
    manifests = sorted((store / "steps").glob("evaluate-stage-*/manifests/*.json"))
    return float(read(manifests[-1])["results"]["summary"]["avg_at_4"]["mean"])


if __name__ == "__main__":
    sys.exit(main())
