"""Check that ordinary runs raise no alarm: `python benchmarks/alarms.py [NAME ...]`.

Every recipe trains once with params.yaml, the default one also with rollouts during the update.
docs/results/alarms.json receives the metrics that the alarms read, a row of numbers per metric, and
the worst value that each alarm measured; runs that the file contains are not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness import config_in, kept, last_stage, origin, parser_of, read, stage_points

from agentgym.algorithms.recipe import RECIPES
from agentgym.config import AlarmsConfig
from agentgym.pipeline.run import run_with_parents
from agentgym.tracking.points import RULES, Point, measured, tripped

RUNS = {name: [f"algorithm.recipe={name}"] for name in RECIPES} | {
    "grpo, max_staleness 1": ["rollout.max_staleness=1"]
}
METRICS = sorted({name for rule in RULES.values() for name in rule.metrics})


def main() -> int:
    parser = parser_of(__doc__, "alarms.json", state=True)
    parser.add_argument("names", nargs="*", default=list(RUNS), metavar="NAME")
    chosen = parser.parse_args()
    result = read(chosen.out, {"runs": {}})
    with kept(chosen.state) as folder:
        for name in chosen.names:
            if name not in result["runs"]:
                cfg = config_in(folder, *RUNS[name])
                run_with_parents(last_stage(cfg), cfg)
                result["runs"][name] = rows(stage_points(cfg))
                result["worst"] = {
                    title: worst(points(row)) for title, row in result["runs"].items()
                }
                result |= origin()
                chosen.out.write_text(text_of(result), encoding="utf-8")
            tripping = sorted(alarms_of(points(result["runs"][name])))
            print(f"{name}: {', '.join(tripping) or 'no alarm'}", flush=True)
    return int(any(alarms_of(points(row)) for row in result["runs"].values()))


def rows(history: Iterable[Point]) -> dict[str, list[float | None]]:
    """Return the alarms' metrics in 5 digits, one value per step; None if not measured."""
    steps = [{m: float(f"{v:.5g}") for m, v in point.metrics.items()} for point in history]
    series = {name: [step.get(name) for step in steps] for name in METRICS}
    return {name: row for name, row in series.items() if any(value is not None for value in row)}


def points(row: Mapping[str, Sequence[float | None]]) -> list[Point]:
    """Return the points of a row, with steps from 1: the inverse of `rows`."""
    by_step = [dict(zip(row, values, strict=True)) for values in zip(*row.values(), strict=True)]
    return [
        Point(step, 0, {name: value for name, value in metrics.items() if value is not None})
        for step, metrics in enumerate(by_step, 1)
    ]


def alarms_of(history: Sequence[Point]) -> set[str]:
    """Return the names of the alarms that these points raise with default limits."""
    return {
        alarm.name
        for end in range(1, len(history) + 1)
        for alarm in tripped(AlarmsConfig(), history[:end])
    }


def worst(history: Sequence[Point]) -> dict[str, float]:
    """Return each measurable alarm's value that is nearest to its limit, or farthest beyond it."""
    worst_values = {}
    for name, rule in RULES.items():
        values = [measured(rule, history[:end])[1] for end in range(1, len(history) + 1)]
        known = [value for value in values if value is not None]
        if known:
            worst_values[name] = float(f"{(min if rule.at_least else max)(known):.3g}")
    return worst_values


def text_of(result: Mapping[str, Any]) -> str:
    """Format as JSON with one line per row of numbers."""
    runs = ",\n".join(
        f'  "{name}": {{\n'
        + ",\n".join(f'   "{metric}": {json.dumps(row)}' for metric, row in metrics.items())
        + "\n  }"
        for name, metrics in result["runs"].items()
    )
    others = {name: value for name, value in result.items() if name != "runs"}
    return json.dumps(others, indent=1).removesuffix("\n}") + f',\n "runs": {{\n{runs}\n }}\n}}\n'


if __name__ == "__main__":
    raise SystemExit(main())
