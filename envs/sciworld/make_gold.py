"""Script that writes `gold.json.gz`: actions that solve each task, proposed by the engine.
`python -m envs.sciworld.make_gold FOLDER`.

The engine finds them by playing the game internally, which takes about a second; too slow for a
server. Each proposal is played with a server's Java options, cut after the action that solves the
task, and dropped if none does.
FOLDER stores the results so far, so that you can stop the script and run it again; all tasks take
hours of one core.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path

from envs.sciworld.gold import GOLD
from envs.sciworld.jvm import GameFailed, JvmLost
from envs.sciworld.slots import Slot, SlotPool
from envs.sciworld.tasks import PUBLISHED, VARIATIONS

TIMEOUT_S = 120.0


def solve(slot: Slot, task: str, variation: int) -> tuple[list[str], str]:
    """Play the engine's solution. Return (actions that solve the task, ""), or ([], the reason).
    Errors: GameFailed, JvmLost.
    """
    proposed = slot.call("g", task, str(variation))
    slot.call("l", task, str(variation))
    played: list[str] = []
    for action in proposed:
        _, score, completed, moves = slot.call("s", action)
        played.append(action)
        if completed == "true" or float(score) < 0:
            if float(score) >= 0.995:
                return played, ""
            return [], f"ended at {float(score):.2f} after {moves} moves"
    return [], f"not solved after {len(played)} actions"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    add = parser.add_argument
    add("--first", type=int, default=10**6, help="variations of each task, in order")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    known_path = arguments.folder / "known.jsonl"
    rows = []
    if known_path.exists():
        rows = [json.loads(line) for line in known_path.read_text(encoding="utf-8").splitlines()]
    known = {(row["task"], row["variation"]) for row in rows}
    counts = {name: min(VARIATIONS[name], arguments.first) for name in PUBLISHED}
    numbers = range(max(VARIATIONS.values()))
    wanted = [(name, number) for number in numbers for name in counts if number < counts[name]]
    pool = SlotPool(slots_per_jvm=16, call_timeout_s=TIMEOUT_S)
    began = time.monotonic()
    try:
        with known_path.open("a", encoding="utf-8") as file:
            for count, (task, variation) in enumerate(pair for pair in wanted if pair not in known):
                slot = pool.acquire()
                try:
                    actions, failure = solve(slot, task, variation)
                except (GameFailed, JvmLost) as error:
                    actions, failure = [], f"{type(error).__name__} {error}"
                finally:
                    pool.release(slot)
                result = {"actions": actions, "failure": failure}
                rows.append({"task": task, "variation": variation, **result})
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
                if count % 50 == 0:
                    status = f"{len(rows)} known, last {task} {variation} {failure}"
                    print(f"{time.monotonic() - began:.0f}s {status}", flush=True)
    finally:
        pool.close()
        write(rows)


def write(rows: list[dict[str, object]]) -> None:
    """Write GOLD: task -> variation -> actions, an empty list if no solution is known."""
    tree: dict[str, dict[str, object]] = {}
    for row in sorted(rows, key=lambda row: (str(row["task"]), int(str(row["variation"])))):
        tree.setdefault(str(row["task"]), {})[str(row["variation"])] = row["actions"]
    text = json.dumps(tree, indent=0, sort_keys=True)
    with GOLD.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(text.encode())


if __name__ == "__main__":
    main()
