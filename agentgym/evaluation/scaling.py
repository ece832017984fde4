"""Success against an episode's budget: turns, sampled tokens, seconds; all from one evaluation at
the largest horizon.

A policy that does not know its number of turns plays the first h of them alike whatever the horizon
is, so an episode of a longer one, cut after h turns, is the episode of a separate run at h: the
same tokens, by the same random numbers, the same rewards. `truncate` cuts it;
`tests/agentgym/evaluation/test_scaling.py` plays both and compares them to the bit.
`obstacle` detects policies that do know their horizon.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgym.evaluation.clustered import clustered_intervals, family_codes
from agentgym.evaluation.passk import Interval
from agentgym.evaluation.result import Slot
from agentgym.types import Status, Trajectory

FloatArray = NDArray[np.float64]
# how the environment ended an episode: a longer horizon changes nothing
_ENDED = (Status.TERMINATED, Status.ENV_LIMIT)
_COUNTED = r"(?:turns?|steps?|rounds?|actions?|moves?|interactions?)"
_TELLS_LEFT = re.compile(
    rf"\b(?:\d+ {_COUNTED} (?:left|remain)|remaining {_COUNTED}\b"
    rf"|{_COUNTED} \d+ (?:of|/) \d+)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Curve:
    """Success as a function of an episode's budget."""

    axis: str
    budgets: tuple[float, ...]
    success: tuple[Interval, ...]
    # among the slots that count at the last budget: share cut by another limit than turns
    cut_otherwise: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "budgets": list(self.budgets),
            "success": [interval.to_json() for interval in self.success],
            "cut_otherwise": self.cut_otherwise,
        }


def obstacle(texts: Iterable[str], max_turns: int) -> str:
    """Return why episodes at a horizon of `max_turns` say nothing about a shorter one; empty: no
    reason is known.

    texts: everything that the policy was shown: instructions and observations.
    """
    named = re.compile(rf"\b{max_turns} (?:\w+ )?{_COUNTED}\b", re.IGNORECASE)
    for text in texts:
        for pattern in (named, _TELLS_LEFT):
            if match := pattern.search(text):
                start = max(match.start() - 30, 0)
                quote = " ".join(text[start : match.end() + 30].split())
                return (
                    f"the policy is told its horizon ({quote!r}): with another one it would have"
                    " acted otherwise; evaluate once for each horizon"
                )
    return ""


def truncate(trajectory: Trajectory, max_turns: int) -> Trajectory:
    """Return the episode as a run with a horizon of `max_turns` would have recorded it, except for
    its id and its times.

    A failure after that many turns did not happen in that run. The last observation of a cut
    episode is not among its tokens, as evaluations record them.
    Errors: ValueError if the episode was played with a shorter horizon.
    """
    if max_turns > trajectory.max_turns or max_turns < 1:
        raise ValueError(
            f"an episode of at most {trajectory.max_turns} turns does not tell of {max_turns};"
            " evaluate with a horizon as long as the longest one asked for"
        )
    turns, status = trajectory.turns, trajectory.status
    ended = len(turns) < max_turns or (len(turns) == max_turns and status in _ENDED)
    if ended:
        return replace(trajectory, max_turns=max_turns)
    first_turns = turns[:max_turns]
    end = first_turns[-1].end
    return replace(
        trajectory,
        max_turns=max_turns,
        status=Status.MAX_TURNS,
        reward=sum(turn.reward for turn in first_turns),
        success=False,
        turns=first_turns,
        input_ids=trajectory.input_ids[:end],
        action_mask=trajectory.action_mask[:end],
        logprobs=trajectory.logprobs[:end],
        error=None,
    )


def by_turns(
    slots: Sequence[Slot], max_turns: int, *, confidence: float, horizons: Sequence[int] = ()
) -> Curve:
    """Return one environment's success at each horizon (default: every one up to `max_turns`), as
    `truncate` would give it, from the slots alone. Errors: ValueError for a horizon outside 1 ..
    `max_turns`, or if no episode counts.
    """
    chosen = tuple(horizons or range(1, max_turns + 1))
    if max(chosen) > max_turns or min(chosen) < 1:
        raise ValueError(f"horizons must be from 1 to the {max_turns} turns that were played")
    return _curve("turns", chosen, _within_turns(slots, chosen), slots, confidence, max_turns)


def values_by_turns(slots: Sequence[Slot], horizons: Sequence[int]) -> FloatArray:
    """Return the share of an item's episodes that succeed within each horizon, [horizons, items].

    Items are in order of first appearance; NaN if no episode counts.
    """
    return _of_items(_within_turns(slots, horizons), slots)[0]


def _within_turns(slots: Sequence[Slot], horizons: Sequence[int]) -> FloatArray:
    """Success by horizon, [horizons, slots]; NaN: unplayed, or an error came first."""
    rows = [
        [
            float(slot.success and slot.num_turns <= horizon)
            # an attempt that failed later had not failed by then
            if slot.counts or (slot.outcome is not None and slot.num_turns >= horizon)
            else np.nan
            for slot in slots
        ]
        for horizon in horizons
    ]
    return np.array(rows)


def within(
    slots: Sequence[Slot],
    costs: Sequence[float | None],
    axis: str,
    *,
    confidence: float,
    num: int = 20,
) -> Curve | None:
    """Return success within a number of tokens or seconds, at `num` budgets up to the most
    expensive success.

    costs: of each slot's whole episode; a success counts at budgets of its cost or more. None if
    the cost of a success is not known, or nothing succeeded.
    """
    won = [cost for slot, cost in zip(slots, costs, strict=True) if slot.counts and slot.success]
    dearest = [cost for cost in won if cost is not None]
    if not won or len(dearest) < len(won):
        return None
    budgets = np.unique(np.quantile(dearest, np.linspace(0, 1, num)))
    counts = np.array([slot.counts for slot in slots])
    spent = np.array([np.inf if cost is None else cost for cost in costs])
    success = np.array([slot.success for slot in slots])
    rows = np.where(counts, success & (spent <= budgets[:, None]), np.nan)
    return _curve(axis, tuple(map(float, budgets)), rows, slots, confidence, 0)


def _of_items(rows: FloatArray, slots: Sequence[Slot]) -> tuple[FloatArray, FloatArray]:
    """Return (means, counts) over each item's slots that are not NaN, [budgets, items]. rows:
    [budgets, slots].
    """
    columns = {item: column for column, item in enumerate(dict.fromkeys(s.item_id for s in slots))}
    of_item = np.zeros((len(slots), len(columns)))
    of_item[np.arange(len(slots)), [columns[slot.item_id] for slot in slots]] = 1
    known = ~np.isnan(rows)
    count = known.astype(np.float64) @ of_item
    hits = np.where(known, rows, 0.0) @ of_item
    return np.divide(hits, count, out=np.full_like(count, np.nan), where=count > 0), count


def _curve(
    axis: str,
    budgets: Sequence[float],
    rows: FloatArray,
    slots: Sequence[Slot],
    confidence: float,
    max_turns: int,
) -> Curve:
    """Return a curve from rows [budgets, slots]; each item's slots are averaged first."""
    values, count = _of_items(rows, slots)
    if (count.sum(axis=1) == 0).any():
        raise ValueError(f"no episode counts at some of the {axis}; look at the outcomes")
    families: dict[str, str | None] = dict.fromkeys(slot.item_id for slot in slots)
    for slot in slots:
        families[slot.item_id] = families[slot.item_id] or slot.family
    estimate = clustered_intervals(
        values, family_codes(list(families.values())), kind="share", confidence=confidence
    )
    num = (count > 0).sum(axis=1)
    intervals = tuple(
        Interval(round(float(mean), 6), round(float(low), 6), round(float(high), 6), int(items))
        for mean, low, high, items in zip(*estimate, num, strict=True)
    )
    counted = [slot for slot in slots if slot.counts]
    cut = [s for s in counted if s.outcome == "truncated" and s.num_turns < max_turns]
    return Curve(axis, tuple(budgets), intervals, len(cut) / max(len(counted), 1))
