"""Success against what an episode may take: turns, sampled tokens, seconds; all from one evaluation
at the largest horizon.

A policy that is not told how many turns it has plays the first h of them alike whatever the horizon
is, so an episode of a longer one, cut after h turns, is the episode of a separate run at h: the
same tokens, by the same random numbers, the same rewards. `truncate` cuts it;
`tests/agentgym/evaluation/test_scaling.py` plays both and compares them to the bit.
`obstacle` says where that is untrue.
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
    """Success by what an episode may take at most."""

    axis: str
    budgets: tuple[float, ...]
    success: tuple[Interval, ...]
    # of the slots that count at the last budget: the share a limit other than turns has cut
    cut_otherwise: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "budgets": list(self.budgets),
            "success": [each.to_json() for each in self.success],
            "cut_otherwise": self.cut_otherwise,
        }


def obstacle(texts: Iterable[str], max_turns: int) -> str:
    """Why episodes at a horizon of `max_turns` do not tell what a shorter one would give; empty
    where nothing is known. texts: all that the policy was told: instructions and observations.
    """
    named = re.compile(rf"\b{max_turns} (?:\w+ )?{_COUNTED}\b", re.IGNORECASE)
    for text in texts:
        for pattern in (named, _TELLS_LEFT):
            if found := pattern.search(text):
                start = max(found.start() - 30, 0)
                said = " ".join(text[start : found.end() + 30].split())
                return (
                    f"the policy is told its horizon ({said!r}): with another one it would have"
                    " acted otherwise; evaluate once for each horizon"
                )
    return ""


def truncate(trajectory: Trajectory, max_turns: int) -> Trajectory:
    """The episode as a run with a horizon of `max_turns` would have recorded it, but for its id
    and its times.

    A failure after that many turns did not happen there. The last observation of a cut episode is
    not among its tokens, as evaluations record them.
    Errors: ValueError where it was played for fewer turns than that.
    """
    if max_turns > trajectory.max_turns or max_turns < 1:
        raise ValueError(
            f"an episode of at most {trajectory.max_turns} turns does not tell of {max_turns};"
            " evaluate with a horizon as long as the longest one asked for"
        )
    turns, status = trajectory.turns, trajectory.status
    done = len(turns) < max_turns or (len(turns) == max_turns and status in _ENDED)
    if done:
        return replace(trajectory, max_turns=max_turns)
    kept = turns[:max_turns]
    end = kept[-1].end
    return replace(
        trajectory,
        max_turns=max_turns,
        status=Status.MAX_TURNS,
        reward=sum(turn.reward for turn in kept),
        success=False,
        turns=kept,
        input_ids=trajectory.input_ids[:end],
        action_mask=trajectory.action_mask[:end],
        logprobs=trajectory.logprobs[:end],
        error=None,
    )


def by_turns(
    slots: Sequence[Slot], max_turns: int, *, confidence: float, horizons: Sequence[int] = ()
) -> Curve:
    """Of one environment, for each horizon (default: every one up to `max_turns`): what `truncate`
    makes of its episodes, from the slots alone.
    """
    chosen = tuple(horizons or range(1, max_turns + 1))
    if max(chosen) > max_turns or min(chosen) < 1:
        raise ValueError(f"horizons must be from 1 to the {max_turns} turns that were played")
    return _curve("turns", chosen, _within_turns(slots, chosen), slots, confidence, max_turns)


def values_by_turns(slots: Sequence[Slot], horizons: Sequence[int]) -> FloatArray:
    """[horizons, items] The share of an item's episodes that succeed within so many turns, in the
    order in which the items appear; NaN where none counts.
    """
    return _of_items(_within_turns(slots, horizons), slots)[0]


def _within_turns(slots: Sequence[Slot], horizons: Sequence[int]) -> FloatArray:
    """[horizons, slots] success within so many turns; NaN where a slot does not count."""
    rows = [
        [
            float(slot.success and slot.num_turns <= horizon)
            # one that failed later had not failed by then
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
    """Success within so many tokens or seconds, at `num` budgets up to the dearest success. costs:
    of each slot, what its episode took; a success is there at its end. None where a success's cost
    is not known, or nothing succeeded.
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
    """(means, counts) over each item's slots that are not NaN, [budgets, items]. rows: [budgets,
    slots].
    """
    places = {item: place for place, item in enumerate(dict.fromkeys(s.item_id for s in slots))}
    of_item = np.zeros((len(slots), len(places)))
    of_item[np.arange(len(slots)), [places[slot.item_id] for slot in slots]] = 1
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
    """rows: [budgets, slots]; an item's slots are averaged before anything else is made of them."""
    values, count = _of_items(rows, slots)
    if (count.sum(axis=1) == 0).any():
        raise ValueError(f"no episode counts at some of the {axis}; look at the outcomes")
    families: dict[str, str | None] = dict.fromkeys(slot.item_id for slot in slots)
    for slot in slots:
        families[slot.item_id] = families[slot.item_id] or slot.family
    found = clustered_intervals(
        values, family_codes(list(families.values())), kind="share", confidence=confidence
    )
    num = (count > 0).sum(axis=1)
    intervals = tuple(
        Interval(round(float(mean), 6), round(float(low), 6), round(float(high), 6), int(items))
        for mean, low, high, items in zip(*found, num, strict=True)
    )
    counted = [slot for slot in slots if slot.counts]
    cut = [s for s in counted if s.outcome == "truncated" and s.num_turns < max_turns]
    return Curve(axis, tuple(budgets), intervals, len(cut) / max(len(counted), 1))
