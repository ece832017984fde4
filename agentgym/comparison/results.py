"""Results of a comparison: success per row with its spread over seeds, paired intervals, learning
curves and their cost.

Reads the store and computes; nothing here runs a model. The success of a row is the mean over seeds
of the mean over items, with `crossed_interval` of a share. Its gain is the same mean of
`row - its start` by item and seed, and a contrast that of `a - b` over the seeds that both rows
have; both with the interval of a difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentgym.comparison.described import Comparison
from agentgym.comparison.evaluations import CellEvaluation, curves_json, read_judged
from agentgym.comparison.figures import AXES, Table
from agentgym.comparison.matrix import Cell, comparison_key, contrast_rows, names_in
from agentgym.comparison.tables import CEILING, logged_metrics, logged_tables, result_files
from agentgym.evaluation.intervals import (
    FloatArray,
    Interval,
    SuccessKind,
    crossed_interval,
    family_codes,
)
from agentgym.evaluation.numbers import Table as Outcomes
from agentgym.evaluation.numbers import keys, per_item
from agentgym.evaluation.stored import stored_result
from agentgym.pipeline.table import finished, open_store, steps_of
from agentgym.store.manifest import Manifest
from agentgym.store.posix import write_whole
from agentgym.tracking.deliver import CellPoints, committed_points, deliver_comparison
from agentgym.tracking.points import Point
from agentgym.tracking.step_page import result_metrics

VALIDATION = "validation/success"


@dataclass(frozen=True)
class Checkpoint:
    """Validation success after an optimizer step, and the cost of training up to it."""

    cost: Mapping[str, float]  # by AXES
    success: float


@dataclass(frozen=True)
class CellResult:
    """Results of one finished run of a comparison.
    `after` and `start` map a key of `per_item` to a value per item, NaN if its episodes failed:
    after training, and for the checkpoint that training began with.
    """

    cell: Cell
    after: Mapping[str, FloatArray]
    # of the checkpoint it trained from; None if it trained nothing
    start: Mapping[str, FloatArray] | None
    curve: tuple[Checkpoint, ...]
    cost: Mapping[str, float]  # of the whole training, by AXES; see `_costs`
    training: Sequence[Point]  # of its optimizer steps
    evaluated: Sequence[Point]  # of the evaluations before and after
    families: tuple[str | None, ...] | None = None  # of each item; None: not known
    judged: CellEvaluation | None = None  # the evaluation after, in a column of environments


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
        """Names of the row's numbers, greedy first if it was played; no pass@1: it equals avg@n."""
        judged = self.cells[0].judged
        return judged.keys if judged else [k for k in self.cells[0].after if k != "pass_at_1"]

    @property
    def confidence(self) -> float:
        protocol = self.first.protocol
        return protocol.confidence if protocol else self.first.cfg.evaluation.confidence

    def success(self, key: str) -> Estimate:
        return self._estimate(np.stack([result.after[key] for result in self.cells]), "share")

    def gain(self, key: str) -> Estimate | None:
        """Gain over the row's own start; None if a cell trained nothing."""
        starts = self._starts(key)
        after = np.stack([result.after[key] for result in self.cells])
        return None if starts is None else self._estimate(after - starts, "difference")

    def start(self, key: str) -> Estimate | None:
        starts = self._starts(key)
        return None if starts is None else self._estimate(starts, "share")

    def _starts(self, key: str) -> FloatArray | None:
        values = [result.start[key] for result in self.cells if result.start is not None]
        return np.stack(values) if len(values) == len(self.cells) else None

    def minus(self, other: Row, key: str, *, confidence: float | None = None) -> Estimate:
        """Return the difference of this row minus `other`, over the seeds that both have.
        key: a number's name, see `keys`; confidence: None: that of this row.
        Errors: ValueError if they share no seed.
        """
        shared = [seed for seed in self.seeds if seed in other.seeds]
        if not shared:
            raise ValueError(
                f"{self.name} and {other.name} have no finished seed in common; run both, then"
                " compare"
            )
        ours, theirs = ({c.cell.seed: c.after[key] for c in row.cells} for row in (self, other))
        gains = np.stack([ours[seed] - theirs[seed] for seed in shared])
        return self._estimate(gains, "difference", confidence)

    def limit(self, other: Row, key: str) -> str:
        """Return `ceiling` or `floor` if both means are within CEILING of 1 or 0; else ""."""
        both = [row.success(key).interval.mean for row in (self, other)]
        return "ceiling" if min(both) > 1 - CEILING else "floor" if max(both) < CEILING else ""

    def _estimate(
        self, values: FloatArray, kind: SuccessKind, confidence: float | None = None
    ) -> Estimate:
        codes = family_codes(self.cells[0].families)
        level = confidence or self.confidence
        interval = crossed_interval(values, kind=kind, confidence=level, codes=codes)
        return Estimate(interval, tuple(float(mean) for mean in np.nanmean(values, axis=1)))


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and items, with its interval and the value of each seed."""

    interval: Interval
    per_seed: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        # sample standard deviation
        spread = float(np.std(self.per_seed, ddof=1)) if len(self.per_seed) > 1 else None
        bounds = {name: round(value, 5) for name, value in self.interval.to_json().items()}
        return bounds | {"per_seed": [_round(v) for v in self.per_seed], "sd": _round(spread)}


def read_rows(cells: Sequence[Cell]) -> tuple[list[Row], list[Cell]]:
    """Return (rows of the finished cells, in the cells' order; unfinished cells)."""
    by_row: dict[str, list[CellResult]] = {}
    missing = []
    for cell in cells:
        answers = cell.answers()
        if answers is None:
            missing.append(cell)
        else:
            by_row.setdefault(cell.row, []).append(_read_cell(cell, answers))
    return [Row(name, tuple(results)) for name, results in by_row.items()], missing


def training_curve(points: Sequence[Point]) -> tuple[tuple[Checkpoint, ...], dict[str, float]]:
    """Return (validated checkpoints, total cost by AXES) from the points of training steps."""
    steps = _costs(points)
    validated = [(point, cost) for point, cost in steps if VALIDATION in point.metrics]
    curve = tuple(Checkpoint(cost, point.metrics[VALIDATION]) for point, cost in validated)
    return curve, steps[-1][1] if steps else dict.fromkeys(AXES, 0.0)


def _costs(points: Sequence[Point]) -> list[tuple[Point, dict[str, float]]]:
    """Return each training step with the cost of training up to its end, by AXES.
    Turns and tokens are of the episodes that are kept; seconds, processor seconds and hours of
    accelerators are of the training process, without servers and validation.
    """
    total, steps = dict.fromkeys(AXES, 0.0), []
    for point in points:
        metric = point.metrics.get
        played = metric("rollout/num_episodes", 0.0) * (1.0 - metric("rollout/env_error_frac", 0.0))
        wall_s = metric("time/step_s", 0.0) - metric("time/validate_s", 0.0)
        spent = {
            "turns": played * metric("rollout/turns_mean", 0.0),
            "tokens": played * metric("rollout/tokens_mean", 0.0),
            "sampled_tokens": played * metric("rollout/action_tokens_mean", 0.0),
            "wall_s": wall_s,
            "cpu_s": metric("time/cpu_s", 0.0),
            "accelerator_h": wall_s * metric("perf/accelerators", 0.0) / 3600,
        }
        sums = {axis: total[axis] + value for axis, value in spent.items()}
        total = {"step": float(point.step), **sums}
        steps.append((point, total))
    return steps


def table(
    comparison: Comparison, cells: Sequence[Cell], rows: Sequence[Row], missing: Sequence[Cell]
) -> dict[str, Any]:
    """Return the whole comparison as JSON types, the only source of figures and text.
    Keys: name, title, key, confidence (None without rows), environments (only if these are the
    columns), rows, contrasts (those with a seed in common), missing (titles of unfinished cells).
    Errors: as `contrast_rows`.
    """
    by_name = {row.name: row for row in rows}
    names = contrast_rows(comparison, cells)
    contrasts = [(by_name[a], by_name[b]) for a, b in names if a in by_name and b in by_name]
    columns = list(comparison.environments)
    return {
        "name": comparison.name,
        "title": comparison.title,
        "key": comparison_key(comparison, cells),
        "confidence": rows[0].confidence if rows else None,
        **({"environments": columns} if columns else {}),
        "rows": [_row_json(row) for row in rows],
        "contrasts": [
            _contrast_json(a, b, len(columns)) for a, b in contrasts if {*a.seeds} & {*b.seeds}
        ],
        "missing": [cell.title for cell in missing],
    }


def _contrast_json(a: Row, b: Row, num_columns: int) -> dict[str, Any]:
    contrast = {
        "a": a.name,
        "b": b.name,
        "difference": {key: a.minus(b, key).to_json() for key in a.keys},
        "limit": {key: a.limit(b, key) for key in a.keys},
    }
    if not num_columns:
        return contrast
    level = 1 - (1 - a.confidence) / num_columns  # Bonferroni's, over the columns
    strict = {key: a.minus(b, key, confidence=level).interval for key in a.keys}
    return {
        "environment": a.first.environment,
        "of": [a.first.method, b.first.method],
        **contrast,
        "shown": {key: interval.low > 0 or interval.high < 0 for key, interval in strict.items()},
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
            "best": [max((p.success for p in cell.curve), default=None) for cell in row.cells],
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
    (env_protocol,) = row.first.protocol.envs
    by_id = env_protocol.items.ids or env_protocol.items.file
    return {
        "split": "given" if by_id else env_protocol.items.split,
        "num_items": len(judged.table.items),
        **{name: getattr(env_protocol, name) for name in names},
    }


def _column_json(row: Row) -> dict[str, Any]:
    """Return a column's environment, method and curves; {} if columns are not environments."""
    seeds = [cell.judged for cell in row.cells if cell.judged is not None]
    if not seeds:
        return {}
    named = {"environment": row.first.environment, "method": row.first.method}
    return {**named, **curves_json(seeds, row.confidence)}


def _by_axis(costs: Sequence[Mapping[str, float]], digits: int) -> dict[str, list[float | None]]:
    """Return axis -> costs rounded to `digits`, for axes in all `costs`; older ones have fewer."""
    shared = [axis for axis in AXES if all(axis in cost for cost in costs)]
    return {axis: [_round(cost[axis], digits) for cost in costs] for axis in shared}


def _read_cell(cell: Cell, answers: dict[str, Manifest]) -> CellResult:
    store = open_store(cell.cfg)
    completed = finished(cell.cfg, store)
    trained = [name for name, s in steps_of(cell.cfg).items() if s.stage and name in cell.steps]
    points = [p for name in trained for p in committed_points(store, name, completed[name].key)]
    curve, cost = training_curve(points)
    if cell.protocol is not None:
        judged = read_judged(cell, answers)
        last, first = judged[cell.until], judged.get(cell.start)
        starts = first.per_item if first else None
        families, step = last.table.families, points[-1].step if points else 0
        means = {f"eval/{key}": float(np.nanmean(last.per_item[key])) for key in last.keys}
        summary = [Point(step, round(1000 * answers[cell.until].created_at), means)]
        return CellResult(cell, last.per_item, starts, curve, cost, points, summary, families, last)
    baseline = completed[cell.evaluation].results.get("paired", {}).get("baseline")
    names = [name for name in (baseline, cell.evaluation) if name]
    evaluated = [p for name in names for p in committed_points(store, name, completed[name].key)]
    tables = [Outcomes.of(stored_result(store, completed[name]).slots) for name in names]
    *before, after = [_per_item(cell, table) for table in tables]
    start, families = before[0] if before else None, tables[-1].families
    return CellResult(cell, after, start, curve, cost, points, evaluated, families)


def _per_item(cell: Cell, table: Outcomes) -> dict[str, FloatArray]:
    every = per_item(table.greedy, table.samples)
    return {key: every[key] for key in keys(table.samples.shape[1], cell.cfg.evaluation.k)}


def _round(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def write_comparison(comparison: Comparison, cells: Sequence[Cell], out: Path) -> dict[str, Any]:
    """Write table and figures of the finished cells to the folder `out` and, if there are any, to
    MLflow. Idempotent. Return the table.
    """
    rows, missing = read_rows(cells)
    result = table(comparison, cells, rows, missing)
    files = result_files(result)
    for name, content in files.items():
        write_whole(out / name, content)
    if rows:
        publish(result, cells, rows, files)
    return result


def publish(
    result: Table, cells: Sequence[Cell], rows: Sequence[Row], files: Mapping[str, bytes]
) -> None:
    """Send numbers, tables and figures to MLflow, in a run with a child per finished cell.
    Idempotent. cells: of the whole comparison; result, rows, files: of `table`, `read_rows` (at
    least one) and `result_files`.
    """
    shown = []
    for row in rows:
        names = {"row": row.name, "recipe": row.first.recipe, "horizon": row.first.horizon}
        for cell_result in row.cells:
            cell = cell_result.cell
            tags = {**names, "seed": str(cell.seed)}
            points = [*map(_charted, _costs(cell_result.training)), *cell_result.evaluated]
            points.append(_result_point(replace(row, cells=(cell_result,)), points))
            shown.append(CellPoints(cell.title, cell.cfg, cell.run_key, tags, points))
    files, metrics = {**files, **logged_tables(result)}, logged_metrics(result)
    last_ms = max(point.time_ms for cell_points in shown for point in cell_points.points)
    # the step grows with the number of finished cells, so that the newest numbers are the latest
    numbers = Point(len(shown), last_ms, metrics)
    params = {**names_in(cells), **result["rows"][0]["evaluation"]}
    deliver_comparison(result["name"], result["key"], shown, files, params, numbers)


def _result_point(row: Row, points: Sequence[Point]) -> Point:
    """Return the point with the result of a row's one cell, at the last of the cell's points."""
    last = max(points, key=lambda point: point.time_ms)
    average = next(key for key in row.keys if key.startswith("avg"))
    gain = row.gain(average)
    gained = None if gain is None else asdict(gain.interval)
    return replace(last, metrics=result_metrics(row.success(average).interval.mean, gained))


def _charted(step: tuple[Point, dict[str, float]]) -> Point:
    """Return the point of one training step with the metrics that the comparison's charts use."""
    point, cost = step
    names = ("rollout/success", VALIDATION)
    success = {name: value for name, value in point.metrics.items() if name in names}
    costs = {f"cost/{axis}": cost[axis] for axis in AXES if axis != "step"}
    return Point(point.step, point.time_ms, {**success, **costs})
