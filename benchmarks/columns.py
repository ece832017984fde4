"""Three recipes in three environments from one file, killed once in the middle.

Runs comparisons/three-environments.yaml with `flows.compare`. Once KILL_AFTER of its nine cells are
done, the command and all its descendants are killed, and the same command runs again. All steps
done before the kill must still be done, with the same commits. Writes
docs/results/three-environments.{json,md,png} and its other figures, and docs/results/columns.json,
which describes the kill.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT, parser_of, write

from agentgym.comparison.described import load_comparison
from agentgym.comparison.matrix import Cell, cells_of

COMPARISON = "comparisons/three-environments.yaml"
KILL_AFTER = 4
DEADLINE_S = 6 * 3600.0


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--comparison", default=COMPARISON)
    parser.add_argument("--state", type=Path, default=ROOT / ".agentgym/columns")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--parallel", type=int, default=os.cpu_count())
    parser.add_argument("--kill-after", type=int, default=KILL_AFTER, metavar="CELLS")
    chosen = parser.parse_args()
    overrides = (f"store.path={chosen.state.resolve() / 'store'}",)
    cells = cells_of(load_comparison(chosen.comparison), overrides)
    command = [
        *(sys.executable, "-m", "flows.compare", chosen.comparison, *overrides),
        *("--parallel", str(chosen.parallel), "--out", str(chosen.out)),
    ]
    began = time.monotonic()
    killed = interrupted(command, cells, chosen.kill_after)
    before = commits(chosen.state)
    subprocess.run(command, cwd=ROOT, check=True, timeout=DEADLINE_S)
    lost = sorted(name for name, data in before.items() if commits(chosen.state).get(name) != data)
    result = {
        "comparison": chosen.comparison,
        "cells": len(cells),
        "killed_when_done": killed,
        "commits_then": len(before),
        "commits_lost_or_changed": lost,
        "cells_done_after": sum(cell.is_done() for cell in cells),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    write(chosen.out / "columns.json", result)
    print(json.dumps(result, indent=1))
    return int(bool(lost) or result["cells_done_after"] < len(cells))


def interrupted(command: list[str], cells: tuple[Cell, ...], after: int) -> list[str]:
    """Kill the command, with all it started, once `after` cells are done; return these cells."""
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None and sum(cell.is_done() for cell in cells) < after:
        if time.monotonic() > deadline:
            break
        time.sleep(15.0)  # polling uses CPU time that the cells need
    titles = [cell.title for cell in cells if cell.is_done()]
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
    time.sleep(5.0)  # cells end with their parent process
    return titles


def commits(state: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(state)): path.read_bytes()
        for path in sorted((state / "store/steps").glob("*/manifests/*.json"))
    }


if __name__ == "__main__":
    sys.exit(main())
