"""Comparison of policies: paired item by item, and success against an episode's budget.

An item's difficulty cancels in the difference of two policies on it, so a paired comparison sees
what two intervals side by side hide. Items of a family move together, so with `FEWEST` families or
more they are the clusters, and the answer holds for other families of the kind; with fewer it holds
for these families. The test is McNemar's exact one if each item was played once and is a cluster of
its own, else Student's t on the clusters; `benchmarks/decisions.py` measures both.
P-values are corrected for the number of environments (Holm).

All budgets (turns, sampled tokens, seconds) are read from one evaluation at the largest horizon. A
policy that does not know its number of turns plays the first h of them alike whatever the horizon
is, so its episode cut after h turns is that of a separate run at h. `obstacle` detects others, and
`tests/agentgym/evaluation/test_scaling.py` compares both runs to the bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit
from scipy.stats import binomtest

from agentgym.evaluation.intervals import (
    FloatArray,
    Interval,
    Moments,
    clustered_intervals,
    family_codes,
    moments,
)
from agentgym.evaluation.numbers import Table, item_means
from agentgym.evaluation.result import Result, Slot, differences, families_of

Verdict = Literal["better", "worse", "not shown"]
POWER = 0.8  # probability with which a detectable difference is shown
NUM_BUDGETS = 20  # of tokens or seconds, up to those of the most expensive success
MAX_SHOWN = 12  # most differences of two questions that an error lists


class Incomparable(ValueError):
    """Error for two results of different questions, or if one of them is not finished."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two policies on the items of one environment; NaN if a slot of that policy does not count."""

    items: tuple[str, ...]
    families: tuple[str | None, ...]
    before: FloatArray  # [I, n] success of the first policy
    after: FloatArray  # [I, n] success of the second policy


@dataclass(frozen=True, slots=True)
class Decision:
    """Statistics of one pair, in units of success; differences are after - before."""

    num_items: int
    num_samples: int
    clusters: Literal["families", "items"]
    num_clusters: int
    before: float
    after: float
    difference: Interval
    test: Literal["mcnemar_exact", "clustered_t"]
    p_value: float
    wins: tuple[str, ...]  # items on which the second policy is ahead
    losses: tuple[str, ...]
    num_ties: int
    # the smallest difference that this many items show with probability POWER
    detectable: float
    # items that would show the observed difference; None: it is 0
    needed_items: int | None
    by_family: Mapping[str, float]
    p_adjusted: float = 1.0  # Holm's, over the environments
    verdict: Verdict = "not shown"


def compare(pairs: Mapping[str, Pair], *, confidence: float) -> dict[str, Decision]:
    """Return each environment's decision, by name, with p-values corrected for their number.
    Errors: ValueError if nothing counts.
    """
    decisions = {env: decide(pair, confidence=confidence) for env, pair in pairs.items()}
    adjusted = holm([decision.p_value for decision in decisions.values()])
    result = {}
    for (env, decision), p_adjusted in zip(decisions.items(), adjusted, strict=True):
        verdict: Verdict = "not shown"
        if p_adjusted < 1 - confidence:
            verdict = "better" if decision.difference.mean > 0 else "worse"
        result[env] = replace(decision, p_adjusted=p_adjusted, verdict=verdict)
    return result


def decide(pair: Pair, *, confidence: float) -> Decision:
    """Return one environment's decision, without verdict and correction for several environments.
    Errors: ValueError if nothing counts.
    """
    mean_before, mean_after, count = means_in_both(pair)
    gained = mean_after - mean_before
    if np.isnan(gained).all():
        raise ValueError("no slot counts in both results; look at their outcomes")
    codes = family_codes(pair.families)
    gain_moments = moments(gained[None], codes, kind="difference")
    alone = codes is None and bool((count <= 1).all())
    signs = [(item, gain) for item, gain in zip(pair.items, gained, strict=True) if gain == gain]
    detectable = float(np.minimum(detectable_difference(gain_moments, confidence).item(), 1.0))
    mean = gain_moments.mean.item()
    return Decision(
        num_items=len(signs),
        num_samples=pair.before.shape[1],
        clusters="items" if codes is None else "families",
        num_clusters=len(signs) if codes is None else len(np.unique(codes[~np.isnan(gained)])),
        before=float(np.nanmean(mean_before)),
        after=float(np.nanmean(mean_after)),
        difference=gain_moments.interval(confidence, -1.0, 1.0),
        test="mcnemar_exact" if alone else "clustered_t",
        p_value=mcnemar_exact(gained) if alone else gain_moments.p_value().item(),
        wins=tuple(item for item, gain in signs if gain > 0),
        losses=tuple(item for item, gain in signs if gain < 0),
        num_ties=sum(not gain for _, gain in signs),
        detectable=detectable,
        needed_items=math.ceil(len(signs) * (detectable / mean) ** 2) if mean else None,
        by_family={
            family: float(gains.mean())
            for family, gains in gains_by_family(pair.families, gained).items()
            if len(gains)
        },
    )


def means_in_both(pair: Pair) -> tuple[FloatArray, FloatArray, NDArray[np.int_]]:
    """Return (means before, means after, counts) of each item's samples that count in both, [I]."""
    valid = ~(np.isnan(pair.before) | np.isnan(pair.after))
    before, after = (np.where(valid, success, np.nan) for success in (pair.before, pair.after))
    return item_means(before), item_means(after), valid.sum(axis=1)


def mcnemar_exact(
    gained: FloatArray, alternative: Literal["two-sided", "greater"] = "two-sided"
) -> float:
    """P-value of these wins and losses, if both are equally likely; 1 if there are none.
    gained: [I] of single episodes: 1 (win), 0, -1 (loss) or NaN.
    alternative: "greater" tests whether wins are more frequent than losses.
    Source: McNemar 1947, with the binomial distribution itself.
    """
    won, lost = int((gained > 0).sum()), int((gained < 0).sum())
    return float(binomtest(won, won + lost, 0.5, alternative).pvalue) if won + lost else 1.0


def detectable_difference(gain: Moments, confidence: float) -> FloatArray:
    """Smallest true difference that the t test shows with probability POWER, [...]."""
    level = stdtrit(gain.freedom, (1 + confidence) / 2) + stdtrit(gain.freedom, POWER)
    return np.asarray(level * np.sqrt(gain.variance))


def detectable_with(decision: Decision, num_items: int) -> float:
    """Return the smallest difference that `num_items` items like the decision's would show with
    probability POWER, if families grow in proportion; at most 1.
    """
    return float(min(1.0, decision.detectable * math.sqrt(decision.num_items / num_items)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number, in order (family-wise error rate; Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def align(before: Result, after: Result) -> dict[str, Pair]:
    """Return environment -> Pair of both results: the sampled episodes if there are any, else the
    greedy ones. Errors: Incomparable if questions or slots differ, or a result is not finished.
    """
    if unlike := differences(before.identity, after.identity):
        more = f"\n  and {len(unlike) - MAX_SHOWN} more" if len(unlike) > MAX_SHOWN else ""
        raise Incomparable(
            "the results answer different questions (the first one's and the second one's value):"
            + "".join(f"\n  {line}" for line in unlike[:MAX_SHOWN])
            + more
            + "\nevaluate both policies by one protocol"
        )
    for name, result in (("first", before), ("second", after)):
        if not result.is_complete:
            left = result.outcomes["not_played"]
            raise Incomparable(
                f"the {name} result is not finished: {left} of {len(result.slots)} episodes were"
                " not played; run the same `agentgym evaluate` again, it continues"
            )
    return {env: _pair(before.of(env), after.of(env)) for env in before.envs}


def _pair(before: Sequence[Slot], after: Sequence[Slot]) -> Pair:
    keys = [[(slot.item_id, slot.sample) for slot in slots] for slots in (before, after)]
    if keys[0] != keys[1]:
        missing = set(keys[0]) ^ set(keys[1])
        item, sample = min(missing) if missing else keys[1][0]
        raise Incomparable(
            f"the results have different slots, {item} sample {sample} among them; evaluate both"
            " policies by one protocol"
        )
    tables = [Table.of(slots) for slots in (before, after)]
    families = families_of([*before, *after])
    successes = (t.samples if t.samples.size else t.greedy[:, None] for t in tables)
    return Pair(tables[0].items, families, *successes)


def gains_by_family(families: Sequence[str | None], gained: FloatArray) -> dict[str, FloatArray]:
    """Return family -> its differences that are not NaN, maybe none; skip items of no family."""
    family_of_item = np.array(families, dtype=object)
    return {
        family: gained[(family_of_item == family) & ~np.isnan(gained)]
        for family in sorted({family for family in families if family is not None})
    }


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
    budgets: list[float]
    success: list[Interval]
    # among the slots that count at the last budget: share cut by another limit than turns
    cut_otherwise: float = 0.0


def obstacle(texts: Iterable[str], max_turns: int) -> str:
    """Return why success at a shorter horizon cannot be read from these episodes: a text names the
    policy's number of turns, or those left. Empty if none does.
    texts: all instructions and observations.
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


def by_turns(slots: Sequence[Slot], max_turns: int, *, confidence: float) -> Curve:
    """Return one environment's success at each horizon from 1 to `max_turns`.
    Errors: ValueError if no episode counts at one of them.
    """
    horizons = range(1, max_turns + 1)
    rows = _within_turns(slots, horizons)
    return _curve("turns", horizons, rows, slots, confidence, max_turns)


def values_by_turns(slots: Sequence[Slot], horizons: Sequence[int]) -> FloatArray:
    """Share of each item's episodes that succeed within each horizon, [horizons, items]; NaN if
    none of them counts.
    """
    return _of_items(_within_turns(slots, horizons), slots)[0]


def _within_turns(slots: Sequence[Slot], horizons: Sequence[int]) -> FloatArray:
    """Success by horizon, [horizons, slots]; NaN: unplayed, or an error came first."""
    rows = [
        [
            float(slot.success and slot.num_turns <= horizon)
            # an attempt that failed after this horizon is a valid episode up to it
            if slot.counts or (slot.outcome is not None and slot.num_turns >= horizon)
            else np.nan
            for slot in slots
        ]
        for horizon in horizons
    ]
    return np.array(rows)


def within(
    slots: Sequence[Slot], costs: Sequence[float | None], axis: str, *, confidence: float
) -> Curve | None:
    """Return success within a budget of tokens or seconds, at NUM_BUDGETS quantiles of the cost of
    successes. costs: of each slot's whole episode; a success counts at budgets of its cost or more.
    axis: the unit, `Curve.axis`. None if the cost of a success is not known, or nothing succeeded.
    """
    won = [cost for slot, cost in zip(slots, costs, strict=True) if slot.counts and slot.success]
    dearest = [cost for cost in won if cost is not None]
    if not won or len(dearest) < len(won):
        return None
    budgets = np.unique(np.quantile(dearest, np.linspace(0, 1, NUM_BUDGETS)))
    counts = np.array([slot.counts for slot in slots])
    spent = np.array([np.inf if cost is None else cost for cost in costs])
    success = np.array([slot.success for slot in slots])
    rows = np.where(counts, success & (spent <= budgets[:, None]), np.nan)
    return _curve(axis, list(map(float, budgets)), rows, slots, confidence, 0)


def _of_items(rows: FloatArray, slots: Sequence[Slot]) -> tuple[FloatArray, FloatArray]:
    """Return (mean, number) of each item's slots that are not NaN, both [budgets, items].
    rows: [budgets, slots].
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
    """Return a curve from rows [budgets, slots]; each item's slots are averaged first.
    max_turns: 0 if the axis is not turns. Errors: ValueError if no slot counts at a budget.
    """
    values, count = _of_items(rows, slots)
    if (count.sum(axis=1) == 0).any():
        raise ValueError(f"no episode counts at some of the {axis}; look at the outcomes")
    codes = family_codes(families_of(slots))
    estimate = clustered_intervals(values, codes, kind="share", confidence=confidence)
    num = (count > 0).sum(axis=1)
    intervals = [
        Interval(round(float(mean), 6), round(float(low), 6), round(float(high), 6), int(items))
        for mean, low, high, items in zip(*estimate, num, strict=True)
    ]
    counted = [slot for slot in slots if slot.counts]
    cut = [s for s in counted if s.outcome == "truncated" and s.num_turns < max_turns]
    return Curve(axis, list(budgets), intervals, len(cut) / max(len(counted), 1))
