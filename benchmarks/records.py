"""Size and decoding time of an episode's record: `python benchmarks/records.py`.

Synthetic episodes of 12 turns with a run's usual information, written alternately in schema 1 and
in schema 2. Writes docs/results/records.json.
"""

from __future__ import annotations

import gzip
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TypeVar

from pipeline import ROOT, machine

from agentgym.records import decode_trajectories, encode_trajectories
from agentgym.types import Item, Status, Trajectory, Turn

OUT = ROOT / "docs/results/records.json"
EPISODES, TURNS, ROUNDS = 1_000, 12, 5
T = TypeVar("T")


def episode(number: int, turns: int = TURNS) -> Trajectory:
    """Return an episode of BabyAI's size: six action and thirty observation tokens a turn."""
    draw = random.Random(number)  # noqa: S311
    ids, mask, logprobs, trajectory_turns = [5] * 40, [False] * 40, [0.0] * 40, []
    for turn in range(turns):
        start = len(ids)
        ids += [draw.randrange(256) for _ in range(36)]
        mask += [True] * 6 + [False] * 30
        logprobs += [-draw.random() for _ in range(6)] + [0.0] * 30
        observation = " ".join(
            draw.choice(("red", "blue", "key", "ball", "2", "left")) for _ in range(12)
        )
        trajectory_turns.append(
            Turn(
                draw.choice(("turn left", "move forward", "pickup")),
                observation,
                0.0,
                start,
                start + 6,
                number // 128,
                info={"score": turn, "carrying": draw.choice(("", "red ball"))},
                generate_s=round(draw.random() / 10, 5),
                env_s=round(draw.random() / 100, 5),
            )
        )
    timing = {"generate_s": 0.3, "env_s": 0.05, "wall_s": 0.4, "began_s": 1.8e9}
    return Trajectory(
        Item("babyai", number),
        number % 8,
        number // 128,
        TURNS,
        Status.TERMINATED,
        1.0,
        True,
        "task: go to the red ball",
        tuple(trajectory_turns),
        tuple(ids),
        tuple(mask),
        tuple(logprobs),
        id=f"{number:016x}",
        timing=timing,
    )


def schema_1(trajectory: Trajectory) -> str:
    """Return the line that versions before record schemas wrote."""
    row = asdict(trajectory)
    for name in ("id", "learned"):
        del row[name]
    for turn in row["turns"]:
        for name in ("reply", "info", "generate_s", "env_s"):
            del turn[name]
    return json.dumps({**row, "status": str(trajectory.status)})


def without_news(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with only the fields of schema 1."""
    turns = tuple(
        replace(turn, reply="", info={}, generate_s=0.0, env_s=0.0) for turn in trajectory.turns
    )
    return replace(trajectory, turns=turns, id="", learned=None)


def main() -> int:
    episodes = [episode(number) for number in range(EPISODES)]
    old = gzip.compress(
        "".join(f"{schema_1(trajectory)}\n" for trajectory in episodes).encode(), 3, mtime=0
    )
    new = encode_trajectories(episodes)
    same = encode_trajectories([without_news(trajectory) for trajectory in episodes])
    decode: dict[str, list[float]] = {"schema 1": [], "schema 2": []}
    encode: list[float] = []
    for _ in range(ROUNDS):
        decode["schema 1"].append(timed(lambda: decode_trajectories(old)))
        decode["schema 2"].append(timed(lambda: decode_trajectories(new)))
        encode.append(timed(lambda: encode_trajectories(episodes)))
    result = {
        "machine": machine(),
        "command": " ".join(["python", "benchmarks/records.py", *sys.argv[1:]]),
        "episodes": EPISODES,
        "turns": TURNS,
        "kib_per_episode": {
            "schema 1": round(len(old) / EPISODES / 1024, 3),
            "schema 2": round(len(new) / EPISODES / 1024, 3),
            "schema 2 with what schema 1 held": round(len(same) / EPISODES / 1024, 3),
        },
        "decode_ms_per_episode": {
            name: round(statistics.median(t), 4) for name, t in decode.items()
        },
        "encode_ms_per_episode": round(statistics.median(encode), 4),
    }
    OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(
        json.dumps({k: v for k, v in result.items() if k != "machine"}, indent=1) + "\n"
    )
    return 0


def timed(work: Callable[[], T]) -> float:
    """Milliseconds of CPU time per episode."""
    began = time.process_time()
    work()
    return 1000 * (time.process_time() - began) / EPISODES


if __name__ == "__main__":
    sys.exit(main())
