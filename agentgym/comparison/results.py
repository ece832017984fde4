"""What a comparison found: success per row with its spread over seeds, paired intervals, learning
curves and their cost.

Reads the store and computes; nothing here runs a model. How sure a number is:

| number | estimate | interval |
|---|---|---|
| success of a row | mean over seeds of the mean over items | `seeds.crossed_interval` of a share |
| gain of a row | the same of `row - its start`, by item and seed | the same, of a difference |
| contrast of two rows | the same of `a - b`, over seeds of both | the same, of a difference |

It speaks about other seeds and other items alike, of fewer than `seeds.FEWEST_SEEDS` seeds about
other items alone, and the value of every seed is reported beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentgym.comparison.described import Comparison
from agentgym.comparison.judged import Judged, curves_json, interval_of, read_judged
from agentgym.comparison.matrix import Cell, comparison_key, contrast_rows
from agentgym.comparison.report import AXES, CEILING, Table
from agentgym.comparison.shown import logged_tables, result_files
from agentgym.evaluation.clustered import family_codes
from agentgym.evaluation.estimates import per_item
from agentgym.evaluation.numbers import Table as Outcomes
from agentgym.evaluation.numbers import keys
from agentgym.evaluation.passk import FloatArray, Interval
from agentgym.evaluation.seeds import Kind, crossed_interval
from agentgym.evaluation.stored import stored_result
from agentgym.pipeline.table import finished, open_store, steps_of
from agentgym.store.files import write_whole
from agentgym.store.manifest import Manifest
from agentgym.tracking.deliver import CellPoints, committed_points, deliver_comparison
from agentgym.tracking.points import Point

VALIDATION = "validation/success"


@dataclass(frozen=True)
class Checkpoint:
    """Validation success after an optimizer step, and what training had cost by then."""

    cost: Mapping[str, float]  # by AXES
    success: float


@dataclass(frozen=True)
class CellResult:
    """One finished cell.
    Tables are by key of `estimates.per_item`, one value per item, NaN where its episodes failed.
    """

    cell: Cell
    after: Mapping[str, FloatArray]
    # of the checkpoint it trained from; None where it trained nothing
    start: Mapping[str, FloatArray] | None
    curve: tuple[Checkpoint, ...]
    cost: Mapping[str, float]  # of the whole training, by AXES; see `_costs`
    training: tuple[Point, ...]  # of its optimizer steps
    evaluated: tuple[Point, ...]  # of the evaluations before and after
    judged: Judged | None = None  # the evaluation after, in a column of environments
    families: tuple[str | None, ...] | None = None  # of each item; None: in `judged`, or not kept


@dataclass(frozen=True)
class Row:
    """The finished cells of one row of the table, by seed."""

    name: str
    cells: tuple[CellResult, ...]

    @property
    def first(self) -> Cell:
        return self.cells[0].cell

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(result.cell.seed for result in self.cells)

    @property
    def keys(self) -> list[str]:
        """Greedy first; pass@1 is avg@n under another name."""
        judged = self.cells[0].judged
        return judged.keys if judged else [k for k in self.cells[0].after if k != "pass_at_1"]

    @property
    def confidence(self) -> float:
        protocol = self.first.protocol
        return protocol.confidence if protocol else self.first.cfg.evaluation.confidence

    def success(self, key: str) -> Estimate:
        return self._estimate(np.stack([result.after[key] for result in self.cells]), "share")

    def gain(self, key: str) -> Estimate | None:
        """Over the row's own start; None where it trained nothing."""
        differences = [
            result.after[key] - result.start[key]
            for result in self.cells
            if result.start is not None
        ]
        return (
            self._estimate(np.stack(differences), "difference")
            if len(differences) == len(self.cells)
            else None
        )

    def start(self, key: str) -> Estimate | None:
        values = [result.start[key] for result in self.cells if result.start is not None]
        return self._estimate(np.stack(values), "share") if len(values) == len(self.cells) else None

    def minus(self, other: Row, key: str, *, confidence: float | None = None) -> Estimate:
        """Over the seeds both have. confidence: default, the row's.
        Errors: ValueError where they share none, or were not evaluated on as many items.
        """
        shared = [seed for seed in self.seeds if seed in other.seeds]
        if not shared:
            raise ValueError(
                f"{self.name} and {other.name} have no finished seed in common; run both, then"
                " compare"
            )
        ours, theirs = (
            {result.cell.seed: result.after[key] for result in row.cells} for row in (self, other)
        )
        return self._estimate(
            np.stack([ours[seed] - theirs[seed] for seed in shared]), "difference", confidence
        )

    def limit(self, other: Row, key: str) -> str:
        """`ceiling` or `floor` where both rows are within CEILING of it, else nothing: a
        contrast there has no room.
        """
        both = [row.success(key).interval.mean for row in (self, other)]
        return "ceiling" if min(both) > 1 - CEILING else "floor" if max(both) < CEILING else ""

    def _estimate(
        self, values: FloatArray, kind: Kind, confidence: float | None = None
    ) -> Estimate:
        level, judged = confidence or self.confidence, self.cells[0].judged
        if judged is None:
            codes = family_codes(self.cells[0].families)
            interval = crossed_interval(values, kind=kind, confidence=level, codes=codes)
        else:
            mean, low, high = interval_of(values, judged, kind, level)
            num_items = int((~np.isnan(values)).any(axis=0).sum())
            interval = Interval(mean.item(), low.item(), high.item(), num_items)
        return Estimate(interval, tuple(float(mean) for mean in np.nanmean(values, axis=1)))


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and items, with its interval and the value of each seed."""

    interval: Interval
    per_seed: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        # sample standard deviation
        spread = float(np.std(self.per_seed, ddof=1)) if len(self.per_seed) > 1 else None
        return {
            **_rounded(self.interval.to_json()),
            "per_seed": [_round(value) for value in self.per_seed],
            "sd": _round(spread),
        }


def read_rows(cells: Sequence[Cell]) -> tuple[list[Row], list[Cell]]:
    """Rows of what the store holds, in the cells' order, and the cells that are not done."""
    found: dict[str, list[CellResult]] = {}
    missing = []
    for cell in cells:
        answers = cell.answers()
        if answers is None:
            missing.append(cell)
        else:
            found.setdefault(cell.row, []).append(_read_cell(cell, answers))
    return [Row(name, tuple(results)) for name, results in found.items()], missing


def training_curve(points: Sequence[Point]) -> tuple[tuple[Checkpoint, ...], dict[str, float]]:
    """(validated checkpoints, cost of the whole by AXES) from the points of training steps, in
    order.
    """
    steps = _costs(points)
    curve = tuple(
        Checkpoint(cost, point.metrics[VALIDATION])
        for point, cost in steps
        if VALIDATION in point.metrics
    )
    return curve, steps[-1][1] if steps else dict.fromkeys(AXES, 0.0)


def _costs(points: Sequence[Point]) -> list[tuple[Point, dict[str, float]]]:
    """Each training step with what training had cost by its end: turns, tokens (observations and
    actions) and sampled tokens of the episodes that are kept; seconds, processor seconds of the
    training process and hours of the accelerators it held, all without servers and validation.
    """
    total, steps = dict.fromkeys(AXES, 0.0), []
    for point in points:
        had = point.metrics.get
        played = had("rollout/num_episodes", 0.0) * (1.0 - had("rollout/env_error_frac", 0.0))
        wall_s = had("time/step_s", 0.0) - had("time/validate_s", 0.0)
        spent = {
            "turns": played * had("rollout/turns_mean", 0.0),
            "tokens": played * had("rollout/tokens_mean", 0.0),
            "sampled_tokens": played * had("rollout/action_tokens_mean", 0.0),
            "wall_s": wall_s,
            "cpu_s": had("time/cpu_s", 0.0),
            "accelerator_h": wall_s * had("perf/accelerators", 0.0) / 3600,
        }
        total = {"step": float(point.step)} | {
            axis: total[axis] + value for axis, value in spent.items()
        }
        steps.append((point, total))
    return steps


def table(
    comparison: Comparison, cells: Sequence[Cell], rows: Sequence[Row], missing: Sequence[Cell]
) -> dict[str, Any]:
    """Everything the comparison says, as JSON types; the figures and the text are made from
    this alone.
    """
    by_name = {row.name: row for row in rows}
    contrasts = [
        (a, b) for a, b in contrast_rows(comparison, cells) if a in by_name and b in by_name
    ]
    columns = list(comparison.environments)
    return {
        "name": comparison.name,
        "title": comparison.title,
        "key": comparison_key(comparison, cells),
        "confidence": rows[0].confidence if rows else None,
        **({"environments": columns} if columns else {}),
        "rows": [_row_json(row) for row in rows],
        "contrasts": [
            _contrast_json(by_name[a], by_name[b], len(columns))
            for a, b in contrasts
            if set(by_name[a].seeds) & set(by_name[b].seeds)
        ],
        "missing": [cell.title for cell in missing],
    }


def _contrast_json(a: Row, b: Row, num_columns: int) -> dict[str, Any]:
    found = {
        "a": a.name,
        "b": b.name,
        "difference": {key: a.minus(b, key).to_json() for key in a.keys},
        "limit": {key: a.limit(b, key) for key in a.keys},
    }
    if not num_columns:
        return found
    level = 1 - (1 - a.confidence) / num_columns  # Bonferroni's, over the columns
    strict = {key: a.minus(b, key, confidence=level).interval for key in a.keys}
    return {
        "environment": a.first.environment,
        "of": [a.first.method, b.first.method],
        **found,
        "shown": {key: each.low > 0 or each.high < 0 for key, each in strict.items()},
    }


def _row_json(row: Row) -> dict[str, Any]:
    cfg = row.first.cfg
    horizon = cfg.horizon.max_turns
    result: dict[str, Any] = {
        "name": row.name,
        "recipe": row.first.recipe,
        "horizon": row.first.horizon,
        "group": row.first.group,
        "algorithm": cfg.algorithm.recipe,
        "env": [{"name": env.name, "options": env.options} for env in cfg.envs],
        "max_turns": list(horizon),
        "stage_steps": list(cfg.horizon.stage_steps),
        "evaluation": _evaluation_json(row),
        "seeds": list(row.seeds),
        "runs": [f"r{result.cell.run_key[:12]}" for result in row.cells],
        "success": {key: row.success(key).to_json() for key in row.keys},
        **_column_json(row),
    }
    if row.gain(row.keys[0]) is None:
        return result
    starts = {key: row.start(key) for key in row.keys}
    gains = {key: row.gain(key) for key in row.keys}
    return result | {
        "start": {key: start.to_json() for key, start in starts.items() if start},
        "gain": {key: gain.to_json() for key, gain in gains.items() if gain},
        "cost": _by_axis([cell.cost for cell in row.cells], 1),
        "validation": {
            "best": [
                max((point.success for point in cell.curve), default=None) for cell in row.cells
            ],
            "last": [cell.curve[-1].success if cell.curve else None for cell in row.cells],
        },
        "curves": [
            {
                **_by_axis([point.cost for point in cell.curve], 4),
                "success": [_round(point.success) for point in cell.curve],
            }
            for cell in row.cells
        ],
    }


def _evaluation_json(row: Row) -> dict[str, Any]:
    judged, settings = row.cells[0].judged, row.first.cfg.evaluation
    names = ("num_samples", "max_turns", "temperature")
    if judged is None:
        return {name: getattr(settings, name) for name in ("split", "num_items", *names)}
    assert row.first.protocol is not None
    (asked,) = row.first.protocol.envs
    given = asked.items.ids or asked.items.file
    return {
        "split": "given" if given else asked.items.split,
        "num_items": len(judged.table.items),
        **{name: getattr(asked, name) for name in names},
    }


def _column_json(row: Row) -> dict[str, Any]:
    """Of a row in one of several columns: which one, and its curves."""
    seeds = [cell.judged for cell in row.cells if cell.judged is not None]
    if not seeds:
        return {}
    named = {"environment": row.first.environment, "method": row.first.method}
    return {**named, **curves_json(seeds, row.confidence)}


def _by_axis(costs: Sequence[Mapping[str, float]], digits: int) -> dict[str, list[float | None]]:
    """Of each axis that all of them know; an earlier version recorded fewer."""
    return {
        axis: [_round(cost[axis], digits) for cost in costs]
        for axis in AXES
        if all(axis in cost for cost in costs)
    }


def _read_cell(cell: Cell, answers: dict[str, Manifest]) -> CellResult:
    store = open_store(cell.cfg)
    done = finished(cell.cfg, store)
    trained = [
        name for name, step in steps_of(cell.cfg).items() if step.stage and name in cell.steps
    ]
    points = [point for name in trained for point in committed_points(store, name, done[name].key)]
    curve, cost = training_curve(points)
    if cell.protocol is not None:
        judged = read_judged(cell, answers)
        after, start = judged[cell.until], judged.get(cell.start)
        starts = start.per_item if start else None
        return CellResult(cell, after.per_item, starts, curve, cost, tuple(points), (), after)
    evaluation = done[cell.evaluation]
    baseline = evaluation.results.get("paired", {}).get("baseline")
    evaluated = [
        point
        for name in (baseline, cell.evaluation)
        if name
        for point in committed_points(store, name, done[name].key)
    ]
    found = Outcomes.of(stored_result(store, evaluation).slots)
    began = Outcomes.of(stored_result(store, done[baseline]).slots) if baseline else None
    return CellResult(
        cell,
        _per_item(cell, found),
        _per_item(cell, began) if began else None,
        curve,
        cost,
        tuple(points),
        tuple(evaluated),
        families=found.families,
    )


def _per_item(cell: Cell, table: Outcomes) -> dict[str, FloatArray]:
    every = per_item(table.greedy, table.samples)
    return {key: every[key] for key in keys(table.samples.shape[1], cell.cfg.evaluation.k)}


def _round(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def _rounded(row: Mapping[str, float]) -> dict[str, float]:
    return {
        name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()
    }


def write_comparison(comparison: Comparison, cells: Sequence[Cell], out: Path) -> dict[str, Any]:
    """The table of what is done, with its figures in the folder `out` and in MLflow.
    Doing it again changes nothing.
    """
    rows, missing = read_rows(cells)
    result = table(comparison, cells, rows, missing)
    files = result_files(result)
    for name, content in files.items():
        write_whole(out / name, content)
    if rows:
        publish(result, rows, files)
    return result


def publish(result: Table, rows: Sequence[Row], files: Mapping[str, bytes]) -> None:
    """Tables and figures to MLflow, with a run per finished cell below them.
    Doing it again changes nothing.
    """
    shown = [
        CellPoints(
            done.cell.title,
            done.cell.cfg,
            done.cell.run_key,
            {
                "row": row.name,
                "recipe": row.first.recipe,
                "horizon": row.first.horizon,
                "seed": str(done.cell.seed),
            },
            [*map(_charted, _costs(done.training)), *done.evaluated],
        )
        for row in rows
        for done in row.cells
    ]
    text = files[f"{result['name']}.md"].decode()
    deliver_comparison(result["name"], result["key"], shown, files, logged_tables(result), text)


def _charted(step: tuple[Point, dict[str, float]]) -> Point:
    """What a chart of a comparison needs of one training step."""
    point, cost = step
    success = {
        name: value
        for name, value in point.metrics.items()
        if name in ("rollout/success", VALIDATION)
    }
    return Point(
        point.step,
        point.time_ms,
        {**success, **{f"cost/{axis}": cost[axis] for axis in AXES if axis != "step"}},
    )
