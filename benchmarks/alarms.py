"""Check that ordinary runs raise no alarm: `python benchmarks/alarms.py [NAME ...]`.

Every recipe trains once with params.yaml, the default one also with rollouts during the update.
docs/results/alarms.json receives the metrics that the alarms read, a row of numbers per metric, and
the worst value that each alarm measured; runs that the file contains are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import ROOT, machine

from agentgym.algorithms.recipe import RECIPES
from agentgym.config import AlarmsConfig, load_config
from agentgym.pipeline.run import run_with_parents
from agentgym.pipeline.table import finished, open_store
from agentgym.steps.step import stages
from agentgym.tracking.alarms import RULES, measured, tripped
from agentgym.tracking.deliver import committed_points
from agentgym.tracking.points import Point

OUT = ROOT / "docs/results/alarms.json"
RUNS = {name: [f"algorithm.recipe={name}"] for name in RECIPES} | {
    "grpo, max_staleness 1": ["rollout.max_staleness=1"]
}
METRICS = sorted({name for rule in RULES.values() for name in rule.metrics})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(RUNS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--state", help="folder that keeps the runs (default: a temporary one)")
    chosen = parser.parse_args()
    result = (
        json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.exists() else {"runs": {}}
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.names:
            if name not in result["runs"]:
                result["runs"][name] = rows(run(RUNS[name], chosen.state or folder))
                result |= {
                    "machine": machine(),
                    "command": "python benchmarks/alarms.py",
                    "worst": {
                        name_of_run: worst(points(row))
                        for name_of_run, row in result["runs"].items()
                    },
                }
                chosen.out.write_text(text_of(result), encoding="utf-8")
            tripping = sorted(alarms_of(points(result["runs"][name])))
            sys.stdout.write(f"{name}: {', '.join(tripping) or 'no alarm'}\n")
            sys.stdout.flush()
    return int(any(alarms_of(points(row)) for row in result["runs"].values()))


def run(changes: Sequence[str], folder: str) -> list[Point]:
    """Train one run; return the points of its training."""
    cfg = load_config(ROOT / "params.yaml", [*changes, f"store.path={folder}/store"])
    names = [stage.name for stage in stages(cfg.horizon)]
    run_with_parents(names[-1], cfg)
    store = open_store(cfg)
    completed = finished(cfg, store)
    return [point for name in names for point in committed_points(store, name, completed[name].key)]


def rows(history: Iterable[Point]) -> dict[str, list[float | None]]:
    """Metrics that the alarms read, in 5 digits, a value per optimizer step; None if it was not
    measured.
    """
    metrics = [point.metrics for point in history]
    series = {
        name: [_short(step_metrics.get(name)) for step_metrics in metrics] for name in METRICS
    }
    return {name: row for name, row in series.items() if any(value is not None for value in row)}


def points(row: Mapping[str, Sequence[float | None]]) -> list[Point]:
    """Points of a row; the inverse of `rows`, with steps from 1."""
    return [
        Point(
            step,
            0,
            {name: value for name, value in zip(row, values, strict=True) if value is not None},
        )
        for step, values in enumerate(zip(*row.values(), strict=True), 1)
    ]


def alarms_of(history: Sequence[Point]) -> set[str]:
    """Names of the alarms that a run with these points raises by default."""
    return {
        alarm.name
        for end in range(1, len(history) + 1)
        for alarm in tripped(AlarmsConfig(), history[:end])
    }


def worst(history: Sequence[Point]) -> dict[str, float]:
    """Value of each measurable alarm that is nearest to its limit, or farthest beyond it."""
    worst_values = {}
    for name, rule in RULES.items():
        values = [measured(rule, history[:end])[1] for end in range(1, len(history) + 1)]
        known = [value for value in values if value is not None]
        if known:
            worst_values[name] = float(f"{(min if rule.at_least else max)(known):.3g}")
    return worst_values


def text_of(result: Mapping[str, Any]) -> str:
    """JSON with a line per row of numbers."""
    runs = ",\n".join(
        f'  "{name}": {{\n'
        + ",\n".join(f'   "{metric}": {json.dumps(row)}' for metric, row in metrics.items())
        + "\n  }"
        for name, metrics in result["runs"].items()
    )
    others = {name: value for name, value in result.items() if name != "runs"}
    return json.dumps(others, indent=1).removesuffix("\n}") + f',\n "runs": {{\n{runs}\n }}\n}}\n'


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


if __name__ == "__main__":
    raise SystemExit(main())
