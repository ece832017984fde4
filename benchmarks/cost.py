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
from typing import Any

from harness import checkout, commit_of, origin, output_of, parser_of, pipeline_in, read, write

RUN_S = 3600


def main() -> int:
    parser = parser_of(__doc__, "cost.json")
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
    before_s, after_s = (statistics.fmean(run["cpu_s"] for run in side) for side in runs)
    case: dict[str, Any] = {"cpu_ratio": round(after_s / before_s, 3)}
    for name, *side in zip(("before", "after"), commits, overrides, runs, strict=True):
        case[name] = dict(zip(("commit", "set", "runs"), side, strict=True))
    write(chosen.out, {**read(chosen.out, {}), chosen.case: {**origin(), **case}})
    print(f"{chosen.case}: {case['cpu_ratio']} of the CPU-seconds")
    return 0


def run(tree: Path, home: Path, overrides: list[str]) -> dict[str, float]:
    """Run a checkout's whole pipeline from an empty state. Errors: RuntimeError if it fails."""
    home.mkdir()
    output_of(["-m", "dvc", "pull", "--quiet"], cwd=tree, timeout_s=RUN_S)
    before = os.times()
    pipeline_in(tree, home, *overrides)
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
