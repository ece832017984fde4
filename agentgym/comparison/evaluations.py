"""Stored evaluations of the cells in an environment's column; their curves over turns and k."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from agentgym.comparison.matrix import Cell
from agentgym.comparison.versus import LOOKED_AT, horizon_of, sampled_slots
from agentgym.evaluation.intervals import FloatArray, Interval, crossed_intervals, family_codes
from agentgym.evaluation.numbers import Table, ks, per_item
from agentgym.evaluation.paired import obstacle, values_by_turns
from agentgym.evaluation.record import attempts_of
from agentgym.evaluation.result import Result
from agentgym.evaluation.stored import stored_result
from agentgym.pipeline.table import open_store
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore


@dataclass(frozen=True)
class CellEvaluation:
    """A finished evaluation of one checkpoint in one environment."""

    result: Result
    told: tuple[str, ...]  # texts shown to the policy in its first episodes

    @cached_property
    def table(self) -> Table:
        return Table.of(self.result.slots)

    @cached_property
    def per_item(self) -> dict[str, FloatArray]:
        """Success by the number's name, for example `pass_at_4`; [I], NaN for too few samples."""
        return per_item(self.table.greedy, self.table.samples)

    @property
    def keys(self) -> list[str]:
        """Names of the numbers that a table shows; greedy first, if it was played."""
        num_samples = self.table.samples.shape[1]
        names = [f"avg_at_{num_samples}", *(f"pass_at_{k}" for k in ks(num_samples) if k > 1)]
        return names if np.isnan(self.table.greedy).all() else ["greedy", *names]

    @property
    def max_turns(self) -> int:
        return horizon_of(self.result, self.result.envs[0])

    @property
    def no_turns_curve(self) -> str:
        """Reason why success at shorter horizons cannot be read from its episodes; else empty."""
        return obstacle(self.told, self.max_turns)


def read_judged(cell: Cell, answers: dict[str, Manifest]) -> dict[str, CellEvaluation]:
    """Return the cell's evaluations, by the step whose checkpoint was evaluated.
    answers: last commits of these evaluations, by the same steps. Errors: as `stored_result`.
    """
    store = open_store(cell.cfg)
    by_step = {}
    for step, answer in answers.items():
        result = stored_result(store, answer)
        by_step[step] = CellEvaluation(result, tuple(_told(store, answer, result)))
    return by_step


def _told(store: RunStore, answer: Manifest, result: Result) -> Iterator[str]:
    yield from result.about.get("instructions", {}).values()
    history = store.history(answer.step, answer.key)
    for trajectory in islice(attempts_of(store, history), LOOKED_AT):
        yield trajectory.first_observation
        yield from (turn.observation for turn in trajectory.turns)


def curves_json(seeds: Sequence[CellEvaluation], confidence: float) -> dict[str, Any]:
    """Return the curves of one row and environment as JSON types, with intervals.
    Keys: evaluations (digests) and coverage, by seed; turns (`budgets` and `success`, or None) and
    no_turns_curve (the reason for None); pass_at and pass_hat for k = 1, 2, ..., if it has samples.
    seeds: the evaluation of each seed, of the same items.
    """
    first = seeds[0]
    num_samples, why = first.table.samples.shape[1], first.no_turns_curve
    horizons = tuple(range(1, first.max_turns + 1))
    by_turns = [values_by_turns(sampled_slots(judged.result.slots), horizons) for judged in seeds]
    success = _intervals(np.stack(by_turns, axis=1), first, confidence)
    over_k = {}
    for how in ("at", "hat") if num_samples else ():
        names = [f"pass_{how}_{k}" for k in range(1, num_samples + 1)]
        values = np.stack([[judged.per_item[name] for judged in seeds] for name in names])
        over_k[f"pass_{how}"] = _intervals(values, first, confidence)
    return {
        "evaluations": [judged.result.digest for judged in seeds],
        "coverage": [round(judged.result.coverage, 6) for judged in seeds],
        "turns": None if why else {"budgets": list(horizons), "success": success},
        "no_turns_curve": why,
        **over_k,
    }


def _intervals(
    values: FloatArray, first: CellEvaluation, confidence: float
) -> list[dict[str, Any]]:
    """Return intervals by budget as JSON types. values: [budgets, seeds, items]. first: an
    evaluation of these items, for their families.
    """
    codes = family_codes(list(first.table.families))
    bounds = crossed_intervals(values, kind="share", confidence=confidence, codes=codes)
    count = (~np.isnan(values)).any(axis=1).sum(axis=1)
    columns = [*(bound.round(6).tolist() for bound in bounds), count.tolist()]
    return [Interval(*row).to_json() for row in zip(*columns, strict=True)]
