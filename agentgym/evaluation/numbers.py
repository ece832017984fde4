"""Numbers of an evaluation, computed from its slots: by environment, as JSON types.

They can be computed while the evaluation runs and then cover the episodes played so far. There are
two conventions: failed slots are left out (`summary`), or count as failures of the policy
(`FAILED`). If they differ much, neither is the truth, and coverage shows how much is missing.

Estimates are functions of arrays, a row per item and a column per sample; NaN is an episode that
does not count. Every interval knows its clusters: all samples of an item, and all items of a family
if families are known (`agentgym.evaluation.intervals`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.stats import fisher_exact

from agentgym.evaluation.intervals import (
    FAILED,
    FloatArray,
    Interval,
    clustered_interval,
    clustered_intervals,
    curves,
    family_codes,
    moments,
)
from agentgym.evaluation.protocol import EvaluationProtocol
from agentgym.evaluation.result import Outcome, Result, Slot, coverage_of, families_of
from envs.wire import PARTS

FEWEST_RETRIED = 5  # slots; with fewer, a shift by retries cannot be distinguished from chance


def numbers_of(slots: Sequence[Slot], protocol: EvaluationProtocol) -> dict[str, Any]:
    """Return environment -> its numbers as JSON types, from the slots played so far: counts,
    coverage, success by either convention, effort, families, parts of the outcome, and retries.
    """
    of_env: dict[str, list[Slot]] = {env_protocol.env.name: [] for env_protocol in protocol.envs}
    for slot in slots:
        of_env[slot.env].append(slot)
    return {env: _env_numbers(env_slots, protocol.confidence) for env, env_slots in of_env.items()}


def headline(result: Result, k: Sequence[int], confidence: float) -> dict[str, Any]:
    """Return `summary` (intervals by the names of `keys`, without failed slots), FAILED (the same
    with failed slots as failures), `coverage` and `num_env_errors` (slots that do not count). If
    there are several environments, `by_env` has `num_items` and the first three of each.
    k: of pass@k. Errors: ValueError if too few episodes count.
    """

    def numbers(slots: Sequence[Slot]) -> dict[str, Any]:
        table = Table.of(slots)
        conventions, names = _conventions(table, confidence), keys(table.samples.shape[1], k)
        if missing := [name for name in names if name not in conventions["summary"]]:
            raise ValueError(
                f"{missing[0]}: no item has enough valid episodes; look at eval/env_error_frac and"
                " the environment's log"
            )
        return {
            "summary": {name: conventions["summary"][name] for name in names},
            FAILED: {name: conventions[FAILED][name] for name in names},
            "coverage": coverage_of(slots),
        }

    main = numbers(result.slots)
    main["num_env_errors"] = sum(not slot.counts for slot in result.slots)
    if len(result.envs) > 1:
        main["by_env"] = {
            env: {"num_items": len({slot.item_id for slot in env_slots}), **numbers(env_slots)}
            for env in sorted(result.envs)
            for env_slots in (result.of(env),)
        }
    return main


def keys(num_samples: int, k: Sequence[int]) -> list[str]:
    """Return names of main numbers: `greedy`, `avg_at_<num_samples>`, `pass_at_<k>` for each k."""
    return ["greedy", f"avg_at_{num_samples}", *(f"pass_at_{number}" for number in k)]


def metrics_of(main: Mapping[str, Any], result: Result) -> dict[str, float]:
    """Return metrics `eval/...` and `eval/<env>/...`. main: the result of `headline`."""
    metrics: dict[str, float] = {}
    by_env = main.get("by_env", {})
    for prefix, block in (("eval", main), *((f"eval/{env}", row) for env, row in by_env.items())):
        for part, stem in (("summary", prefix), (FAILED, f"{prefix}/{FAILED}")):
            metrics |= {f"{stem}/{name}": float(row["mean"]) for name, row in block[part].items()}
        metrics[f"{prefix}/coverage"] = float(block["coverage"])
    counted = [slot for slot in result.slots if slot.counts]
    num_cut = sum(slot.outcome is Outcome.TRUNCATED for slot in counted)
    return metrics | {
        "eval/turns_mean": sum(slot.num_turns for slot in counted) / len(counted),
        "eval/truncated_frac": num_cut / len(counted),
        "eval/env_error_frac": 1 - len(counted) / len(result.slots),
    }


def paired(
    before: Result, after: Result, k: Sequence[int], confidence: float
) -> dict[str, dict[str, Any]]:
    """Return the mean over items of after - before with its interval, by main number; see `keys`.
    An item with too few episodes in either result is left out. k: of pass@k.
    Errors: ValueError if none is left, or if the two have different items or samples.
    """
    table_after, table_before = Table.of(after.slots), Table.of(before.slots)
    unlike = table_after.items != table_before.items
    if unlike or table_after.samples.shape != table_before.samples.shape:
        raise ValueError(
            "paired evaluations need the same items and samples, got"
            f" {table_before.samples.shape} and {table_after.samples.shape}"
        )
    success_before = per_item(table_before.greedy, table_before.samples)
    success_after = per_item(table_after.greedy, table_after.samples)
    gains = {}
    for name in keys(table_after.samples.shape[1], k):
        gained = success_after[name] - success_before[name]
        if np.isnan(gained).all():
            raise ValueError(f"{name}: no item has enough valid episodes in both evaluations")
        gains[name] = clustered_interval(
            gained, table_after.families, kind="difference", confidence=confidence
        ).to_json()
    return gains


def _env_numbers(slots: Sequence[Slot], confidence: float) -> dict[str, Any]:
    played = [slot for slot in slots if slot.outcome is not None]
    counted = [slot for slot in played if slot.counts]
    table = Table.of(played)
    codes = family_codes(table.families)
    return {
        "num_items": len({slot.item_id for slot in slots}),
        "num_slots": len(slots),
        "num_played": len(played),
        "num_counted": len(counted),
        # the clusters of every interval
        "clusters": {
            "kind": "items" if codes is None else "families",
            "num": len(table.items) if codes is None else len(np.unique(codes)),
        },
        "coverage": coverage_of(slots),
        "coverage_of_played": coverage_of(played),
        **_conventions(table, confidence),
        **_effort(table, counted, confidence),
        "by_family": _families(table, confidence),
        "parts": _parts(counted),
        "retried": _retried(counted, confidence),
    }


@dataclass(frozen=True)
class Table:
    """Success and effort by item and sample, [I, n]; NaN for a slot that does not count."""

    items: tuple[str, ...]
    families: tuple[str | None, ...]
    greedy: FloatArray  # [I] success
    samples: FloatArray  # [I, n] success
    failed: FloatArray  # [I, 1 + n] success, greedy first; a slot that failed is a failure
    reward: FloatArray  # [I, 1 + n]
    turns: FloatArray
    tokens: FloatArray  # generated by the policy; NaN also if not known
    invalid: FloatArray  # actions that changed nothing

    @classmethod
    def of(cls, played: Sequence[Slot]) -> Self:
        rows = {item: row for row, item in enumerate(dict.fromkeys(s.item_id for s in played))}
        shape = len(rows), 1 + max((slot.sample for slot in played), default=0)
        success, failed, reward, turns, tokens, invalid = np.full((6, *shape), np.nan)
        families = families_of(played)
        for slot in played:
            index = rows[slot.item_id], slot.sample
            failed[index] = float(slot.counts and slot.success)
            if not slot.counts:
                continue
            success[index], turns[index] = float(slot.success), slot.num_turns
            reward[index] = np.nan if slot.reward is None else slot.reward
            num_output = slot.usage.known["output"]
            tokens[index] = num_output if num_output else np.nan  # 0: a policy without tokens
            invalid[index] = np.nan if slot.num_invalid is None else slot.num_invalid
        envs = {slot.env for slot in played}
        if len(envs) > 1 and any(families):  # an item without a family is alone
            of_item = {slot.item_id: slot.env for slot in played}
            families = tuple(
                f"{of_item[item]} {family}" if family else item
                for item, family in zip(rows, families, strict=True)
            )
        return cls(
            *(tuple(rows), families, success[:, 0], success[:, 1:]),
            *(failed, reward, turns, tokens, invalid),
        )

    @property
    def main(self) -> slice:
        """Columns of the samples; of the greedy episodes if there are no others."""
        return slice(1, None) if self.samples.size else slice(0, 1)


def _conventions(table: Table, confidence: float) -> dict[str, Any]:
    """Return `summary` (without failed slots), FAILED (with them as failures) and `curves` (pass@k
    and pass^k for every k); {} each if none counts.
    """
    if np.isnan(table.greedy).all() and np.isnan(table.samples).all():
        return {"summary": {}, FAILED: {}, "curves": {}}
    summary = success(table.greedy, table.samples, table.families, confidence=confidence)
    failed = success(table.failed[:, 0], table.failed[:, 1:], table.families, confidence=confidence)
    num_samples = table.samples.shape[1]
    names = ["greedy", f"avg_at_{num_samples}"]
    names += [f"pass_{how}_{k}" for how in ("at", "hat") for k in ks(num_samples)]
    return {
        "summary": {name: row for name in names if (row := _json(summary.get(name)))},
        FAILED: {name: row for name in names if (row := _json(failed.get(name)))},
        # for every k up to the number of samples; null: undefined
        "curves": {
            f"pass_{how}": [_json(summary[f"pass_{how}_{k}"]) for k in range(1, num_samples + 1)]
            for how in ("at", "hat")
        },
    }


def ks(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and `largest`; empty for 0."""
    powers = [2**power for power in range(largest.bit_length()) if 2**power <= largest]
    return tuple(dict.fromkeys([*powers, largest])) if largest else ()


def _effort(table: Table, counted: Sequence[Slot], confidence: float) -> dict[str, Any]:
    """Return `reward`, `turns_to_success` and `tokens_to_success` (means), `invalid_actions` (share
    of actions that changed nothing) and `success_within_turns` (share of episodes that succeed
    within 1, 2, ... turns). None: not known, or nothing succeeded.
    """
    success = np.column_stack([table.greedy, table.samples])[:, table.main]
    reward = mean_reward(table.reward[:, table.main], table.families, confidence=confidence)
    known = ~np.isnan(table.invalid)
    refused, turns = (np.where(known, a, 0.0).sum(axis=1) for a in (table.invalid, table.turns))
    invalid = ratio(refused, turns, table.families, confidence=confidence)
    longest = max((slot.num_turns for slot in counted), default=0)
    won = [slot.num_turns for slot in counted if slot.success]

    def to_one(cost: FloatArray) -> dict[str, Any] | None:
        spent = to_success(cost[:, table.main], success, table.families, confidence=confidence)
        return None if spent is None else {**spent, "mean": _json(spent["mean"])}

    return {
        "reward": _json(reward),
        "turns_to_success": to_one(table.turns),
        "tokens_to_success": to_one(table.tokens),
        "invalid_actions": _json(invalid),
        "success_within_turns": [
            round(sum(turns <= budget for turns in won) / len(counted), 6)
            for budget in range(1, longest + 1)
        ],
    }


def _families(table: Table, confidence: float) -> dict[str, Any]:
    """Number of items and success of each family (kind of task), as JSON types."""
    success = np.column_stack([table.greedy, table.samples])[:, table.main]
    families = by_family(success, table.families, confidence=confidence)
    return {name: {**row, "success": _json(row["success"])} for name, row in families.items()}


def _parts(counted: Sequence[Slot]) -> dict[str, Any]:
    """`mean` and `num_episodes` of each part of a graded outcome (`info[PARTS]`), by its name."""
    parts: dict[str, list[float]] = {}
    for slot in counted:
        for name, value in _numbers(slot.info.get(PARTS), ""):
            parts.setdefault(name, []).append(value)
    return {
        name: {"mean": sum(values) / len(values), "num_episodes": len(values)}
        for name, values in sorted(parts.items())
    }


def _numbers(part: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield (dotted name, number) of each part below `part`, which is called `name`. A list of
    numbers counts as its minimum; other values, for example text, are skipped.
    """
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from _numbers(value, f"{name}.{key}" if name else str(key))
    elif isinstance(part, list) and part and all(isinstance(value, int | float) for value in part):
        yield name, float(min(part))
    elif isinstance(part, int | float):
        yield name, float(part)


def _json(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else interval.to_json()


def _retried(counted: Sequence[Slot], confidence: float) -> dict[str, Any]:
    """Success of slots that needed another attempt, compared with the others (Fisher's exact test).
    If it `differs`, the failures did not fall on random episodes. Without others, or with fewer
    than FEWEST_RETRIED, nothing is tested and `p_value` is None.
    """
    retried = [slot.success for slot in counted if slot.failed]
    first_tries = [slot.success for slot in counted if not slot.failed]
    result: dict[str, Any] = {
        "num": len(retried),
        "success": sum(retried) / len(retried) if retried else None,
        "success_of_first_tries": sum(first_tries) / len(first_tries) if first_tries else None,
        "p_value": None,
        "differs": False,
    }
    if len(retried) >= FEWEST_RETRIED and first_tries:
        table = [[sum(part), len(part) - sum(part)] for part in (retried, first_tries)]
        result["p_value"] = float(fisher_exact(table)[1])
        result["differs"] = result["p_value"] < 1 - confidence
    return result


Families = Sequence[str | None]


def success(
    greedy: FloatArray, samples: FloatArray, families: Families | None = None, *, confidence: float
) -> dict[str, Interval | None]:
    """Return the mean and interval of `greedy`, `avg_at_<n>`, `pass_at_<k>` and `pass_hat_<k>`, by
    name, for every k up to n. None: no item has enough samples that count.
    greedy: [I], samples: [I, n]; 1, 0, or NaN. families: [I].
    An item with fewer than k samples is left out of pass@k and pass^k. Errors: as `per_item`.
    """
    rows = per_item(greedy, samples)
    values = np.stack(list(rows.values()))
    result: dict[str, Interval | None] = dict.fromkeys(rows)
    has_value: NDArray[np.bool_] = np.asarray(~np.isnan(values).all(axis=1))
    known, codes = values[has_value], family_codes(families)
    intervals = clustered_intervals(known, codes, kind="share", confidence=confidence)
    counts = (~np.isnan(known)).sum(axis=1)
    columns = [column.tolist() for column in (*intervals, counts)]
    for name, *row in zip(compress(rows, has_value), *columns, strict=True):
        result[name] = Interval(*row)
    return result


def per_item(greedy: FloatArray, samples: FloatArray) -> dict[str, FloatArray]:
    """Return the items' values by the names of `success`, [I]; NaN for too few samples.
    Errors: ValueError for other shapes or values.
    """
    if greedy.ndim != 1 or samples.ndim != 2 or len(greedy) != len(samples):
        raise ValueError(
            f"an evaluation is greedy [I] and samples [I, n], got {greedy.shape} and"
            f" {samples.shape}"
        )
    for name, values in (("greedy", greedy), ("samples", samples)):
        if not (np.isnan(values) | (values == 0) | (values == 1)).all():
            raise ValueError(f"{name} must hold success as 1 or 0, or NaN; pass success, not score")
    num_samples = samples.shape[1]
    n, c = (~np.isnan(samples)).sum(axis=1), np.nansum(samples, axis=1)
    at, hat = curves(n, c, num_samples)
    share = np.divide(c, n, out=np.full(len(n), np.nan), where=n > 0)
    return {
        "greedy": greedy,
        f"avg_at_{num_samples}": share,
        **{f"pass_at_{k + 1}": at[:, k] for k in range(num_samples)},
        **{f"pass_hat_{k + 1}": hat[:, k] for k in range(num_samples)},
    }


def mean_reward(
    rewards: FloatArray, families: Families | None = None, *, confidence: float
) -> Interval | None:
    """Mean over items of the items' mean reward, with interval; None if nothing counts.
    rewards: [I, n].
    """
    values = item_means(rewards)
    if np.isnan(values).all():
        return None
    return clustered_interval(values, families, kind="number", confidence=confidence)


def ratio(
    part: FloatArray, whole: FloatArray, families: Families | None = None, *, confidence: float
) -> Interval | None:
    """Return the sum of `part` over the sum of `whole`, both [I], with its interval, for example
    invalid actions over actions. None if the whole is 0. Items with NaN in either are left out.
    The interval is that of the linearized ratio (Cochran 1977, section 6.4), clustered.
    """
    total = np.nansum(whole)
    if total <= 0:
        return None
    known = ~(np.isnan(part) | np.isnan(whole))
    value = float(part[known].sum() / whole[known].sum())
    off = np.where(known, (part - value * whole) / whole[known].mean(), np.nan)
    around = moments(off[None], family_codes(families), kind="number").interval(confidence)
    low, high = max(value + around.low, 0.0), value + around.high
    return Interval(value, low, high, int((whole[known] > 0).sum()))


def to_success(
    cost: FloatArray, samples: FloatArray, families: Families | None = None, *, confidence: float
) -> dict[str, Any] | None:
    """Return `mean` (with interval) and `median` cost of successful episodes, and `num_episodes`.
    cost, samples (success; 1, 0 or NaN): [I, n]. None if nothing succeeded or a cost is not known.
    """
    won = samples == 1
    if not won.any() or np.isnan(cost[won]).any():
        return None
    counted = won.sum(axis=1).astype(np.float64)
    spent = np.where(won, cost, 0.0).sum(axis=1)
    mean = ratio(spent, counted, families, confidence=confidence)
    assert mean is not None
    return {"mean": mean, "median": float(np.median(cost[won])), "num_episodes": int(won.sum())}


def by_family(
    samples: FloatArray, families: Families, *, confidence: float
) -> dict[str, dict[str, Any]]:
    """Return each family's `num_items` and `success` (None if nothing counts), by its name.
    samples: [I, n]. Items are the clusters; those without a family are left out.
    """
    values, family_of = item_means(samples), np.array(families, dtype=object)
    result = {}
    for family in sorted({family for family in families if family is not None}):
        means = values[family_of == family]
        known = not np.isnan(means).all()
        interval = clustered_interval(means, kind="share", confidence=confidence) if known else None
        result[family] = {"num_items": len(means), "success": interval}
    return result


def item_means(values: FloatArray) -> FloatArray:
    """Mean over the samples that count, [I]; NaN if none does. values: [I, n]."""
    count = (~np.isnan(values)).sum(axis=1)
    total = np.nansum(values, axis=1)
    return np.asarray(np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0))
