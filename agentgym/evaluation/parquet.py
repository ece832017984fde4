"""Every attempt of an evaluation as one parquet file, for further analysis."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from agentgym.evaluation.result import OUTCOME_OF, usage_of
from agentgym.types import Trajectory, Usage, flat

FILE = "episodes.parquet"
ROWS = 2_000  # rows per row group, so at most this many are in memory


def write_episodes(path: Path, attempts: Iterable[Trajectory]) -> int:
    """Write a parquet file with one row per attempt, also failed ones. Return the row count."""
    import pyarrow
    import pyarrow.parquet

    kinds = _schema(pyarrow)
    rows, count = iter(map(to_row, attempts)), 0
    with pyarrow.parquet.ParquetWriter(path, kinds, compression="zstd") as writer:
        while group := list(islice(rows, ROWS)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=kinds))
            count += len(group)
    return count


def read_episodes(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the file, with one row group in memory at a time."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield from file.read_row_group(group).to_pylist()


def to_row(trajectory: Trajectory) -> dict[str, Any]:
    """Return the attempt as a row. Info is JSON text: its keys depend on the environment."""
    outcome, usage = OUTCOME_OF[trajectory.status], usage_of(trajectory)
    return {
        "env": trajectory.item.env,
        "item_id": trajectory.item.item_id,
        "split": trajectory.item.split,
        "sample": trajectory.sample,
        "attempt": trajectory.num_attempts,
        "outcome": str(outcome),
        "status": str(trajectory.status),
        "counts": outcome.counts,
        "success": trajectory.success,
        "reward": trajectory.reward,
        "error": trajectory.error,
        "num_turns": len(trajectory.turns),
        "temperature": trajectory.temperature,
        "max_turns": trajectory.max_turns,
        "first_observation": trajectory.first_observation,
        "turns": [
            {
                "action": turn.action,
                "observation": turn.observation,
                "reward": float(turn.reward),
                "reply": turn.reply or turn.action,
                "info": json.dumps(dict(turn.info)),
                "generate_s": turn.generate_s,
                "env_s": turn.env_s,
            }
            for turn in trajectory.turns
        ],
        "usage": flat(usage),
        "wall_s": float(trajectory.timing.get("wall_s", 0.0)),
        "began_s": float(trajectory.timing.get("began_s", 0.0)),
    }


def _schema(pyarrow: Any) -> Any:
    text, whole, real, flag = (
        pyarrow.string(),
        pyarrow.int64(),
        pyarrow.float64(),
        pyarrow.bool_(),
    )
    turn = pyarrow.struct(
        {
            "action": text,
            "observation": text,
            "reward": real,
            "reply": text,
            "info": text,
            "generate_s": real,
            "env_s": real,
        }
    )
    usage = dict.fromkeys(Usage.__slots__, whole)
    return pyarrow.schema(
        {
            **dict.fromkeys(("env", "item_id", "split"), text),
            **dict.fromkeys(("sample", "attempt"), whole),
            **dict.fromkeys(("outcome", "status"), text),
            **dict.fromkeys(("counts", "success"), flag),
            "reward": real,
            "error": text,
            "num_turns": whole,
            "temperature": real,
            "max_turns": whole,
            "first_observation": text,
            "turns": pyarrow.list_(turn),
            "usage": pyarrow.struct(usage),
            **dict.fromkeys(("wall_s", "began_s"), real),
        }
    )
