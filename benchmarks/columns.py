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

from harness import RESULTS, ROOT, parser_of, write

from agentgym.comparison.described import load_comparison
from agentgym.comparison.matrix import Cell, cells_of

COMPARISON = "comparisons/three-environments.yaml"
KILL_AFTER = 4
DEADLINE_S = 6 * 3600.0


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--state", type=Path, default=ROOT / ".agentgym/columns")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    store = chosen.state.resolve() / "store"
    cells = cells_of(load_comparison(COMPARISON), (f"store.path={store}",))
    command = [sys.executable, "-m", "flows.compare", COMPARISON, f"store.path={store}"]
    command += ["--parallel", str(os.cpu_count()), "--out", str(chosen.out)]
    began = time.monotonic()
    killed = interrupted(command, cells)
    before = commits(store)
    subprocess.run(command, cwd=ROOT, check=True, timeout=DEADLINE_S)
    after = commits(store)
    lost = [name for name, data in before.items() if after.get(name) != data]
    result = {
        "comparison": COMPARISON,
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


def interrupted(command: list[str], cells: tuple[Cell, ...]) -> list[str]:
    """Kill the command, with all it started, once KILL_AFTER cells are done; return these cells."""
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        if sum(cell.is_done() for cell in cells) >= KILL_AFTER:
            break
        time.sleep(15.0)  # polling uses CPU time that the cells need
    titles = [cell.title for cell in cells if cell.is_done()]
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
    time.sleep(5.0)  # cells end with their parent process
    return titles


def commits(store: Path) -> dict[str, bytes]:
    paths = sorted((store / "steps").glob("*/manifests/*.json"))
    return {str(path.relative_to(store)): path.read_bytes() for path in paths}


if __name__ == "__main__":
    sys.exit(main())
