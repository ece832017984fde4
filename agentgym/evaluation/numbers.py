"""What an evaluation says, from what became of its slots: by environment, as JSON types.

It may be asked while the evaluation runs: it then speaks of what has been played. Two conventions
stand beside each other: slots that failed left out (`summary`), and taken for failures of the
policy. Where they differ much, neither is the truth: coverage says how much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.stats import fisher_exact

from agentgym.evaluation import estimates
from agentgym.evaluation.clustered import clustered_interval, family_codes
from agentgym.evaluation.passk import FAILED, Interval
from agentgym.evaluation.protocol import EvaluationProtocol
from agentgym.evaluation.result import Outcome, Result, Slot, coverage_of
from envs.wire import PARTS

Array = NDArray[np.float64]
FEWEST_RETRIED = 5  # slots, below which a shift by retries cannot be told from chance


def numbers_of(slots: Sequence[Slot], protocol: EvaluationProtocol) -> dict[str, Any]:
    """Of every environment, by its name, of what has been played so far; JSON types."""
    of_env: dict[str, list[Slot]] = {each.env.name: [] for each in protocol.envs}
    for slot in slots:
        of_env[slot.env].append(slot)
    return {env: _env_numbers(own, protocol.confidence) for env, own in of_env.items()}


def headline(result: Result, k: Sequence[int], confidence: float) -> dict[str, Any]:
    """Return the main numbers over all environments and, where there are several, of each.

    k: of pass@k. Errors: ValueError where too few episodes count for a number.
    """

    def numbers(slots: Sequence[Slot]) -> dict[str, Any]:
        table = Table.of(slots)
        found, names = _conventions(table, confidence), keys(table.samples.shape[1], k)
        if missing := [name for name in names if name not in found["summary"]]:
            raise ValueError(
                f"{missing[0]}: no item has enough valid episodes; look at eval/env_error_frac and"
                " the environment's log"
            )
        return {
            **{part: {name: found[part][name] for name in names} for part in ("summary", FAILED)},
            "coverage": coverage_of(slots),
        }

    num_out = sum(not slot.counts for slot in result.slots)
    found = {**numbers(result.slots), "num_env_errors": num_out}
    if len(result.envs) > 1:
        found["by_env"] = {
            env: {"num_items": len({slot.item_id for slot in own}), **numbers(own)}
            for env in sorted(result.envs)
            for own in (result.of(env),)
        }
    return found


def keys(num_samples: int, k: Sequence[int]) -> list[str]:
    """Names of the main numbers: `greedy`, `avg_at_<n>`, and `pass_at_<k>` for each k."""
    return ["greedy", f"avg_at_{num_samples}", *(f"pass_at_{number}" for number in k)]


def metrics_of(found: Mapping[str, Any], result: Result) -> dict[str, float]:
    """Return main numbers under metric names. found: as `headline` returns it."""
    metrics: dict[str, float] = {}
    by_env = found.get("by_env", {})
    for prefix, own in (("eval", found), *((f"eval/{env}", row) for env, row in by_env.items())):
        for part, place in (("summary", prefix), (FAILED, f"{prefix}/{FAILED}")):
            metrics |= {f"{place}/{name}": float(row["mean"]) for name, row in own[part].items()}
        metrics[f"{prefix}/coverage"] = float(own["coverage"])
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
    """Return the mean difference after - before of each main number, item by item.

    It is narrower than two intervals show, because an item's difficulty cancels. An item that has
    too few episodes in either is left out.
    Errors: ValueError where none is left, or the two are of other items or samples.
    """
    ours, theirs = Table.of(after.slots), Table.of(before.slots)
    if (ours.items, ours.samples.shape) != (theirs.items, theirs.samples.shape):
        raise ValueError(
            "paired evaluations need the same items and samples, got"
            f" {theirs.samples.shape} and {ours.samples.shape}"
        )
    one = estimates.per_item(theirs.greedy, theirs.samples)
    other = estimates.per_item(ours.greedy, ours.samples)
    found = {}
    for name in keys(ours.samples.shape[1], k):
        gained = other[name] - one[name]
        if np.isnan(gained).all():
            raise ValueError(f"{name}: no item has enough valid episodes in both evaluations")
        found[name] = clustered_interval(
            gained, ours.families, kind="difference", confidence=confidence
        ).to_json()
    return found


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
        # what every interval takes for its clusters
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
    """Slots by item and sample, [I, n]; NaN where one does not count."""

    items: tuple[str, ...]
    families: tuple[str | None, ...]
    greedy: Array  # [I] success
    samples: Array  # [I, n] success
    failed: Array  # [I, 1 + n] success, greedy first; a slot that failed is a failure
    reward: Array  # [I, 1 + n]
    turns: Array
    tokens: Array  # that the policy said; NaN where that is not known, too
    invalid: Array  # actions that changed nothing

    @classmethod
    def of(cls, played: Sequence[Slot]) -> Self:
        rows = {item: row for row, item in enumerate(dict.fromkeys(s.item_id for s in played))}
        shape = len(rows), 1 + max((slot.sample for slot in played), default=0)
        success, failed, reward, turns, tokens, invalid = np.full((6, *shape), np.nan)
        families: dict[str, str | None] = dict.fromkeys(rows)
        for slot in played:
            place = rows[slot.item_id], slot.sample
            families[slot.item_id] = families[slot.item_id] or slot.family
            failed[place] = float(slot.counts and slot.success)
            if not slot.counts:
                continue
            success[place], turns[place] = float(slot.success), slot.num_turns
            reward[place] = np.nan if slot.reward is None else slot.reward
            said = slot.usage.known["output"]
            tokens[place] = said if said else np.nan  # 0: a policy without tokens
            invalid[place] = np.nan if slot.num_invalid is None else slot.num_invalid
        envs = {slot.env for slot in played}
        if len(envs) > 1 and any(families.values()):  # an item without a family is alone
            of_item = {slot.item_id: slot.env for slot in played}
            families = {
                item: f"{of_item[item]} {family}" if family else item
                for item, family in families.items()
            }
        return cls(
            *(tuple(rows), tuple(families.values()), success[:, 0], success[:, 1:]),
            *(failed, reward, turns, tokens, invalid),
        )

    @property
    def main(self) -> slice:
        """Columns of the samples; of the greedy episodes where there are no others."""
        return slice(1, None) if self.samples.size else slice(0, 1)


def _conventions(table: Table, confidence: float) -> dict[str, Any]:
    """Of the slots that were played; {} where none counts."""
    if np.isnan(table.greedy).all() and np.isnan(table.samples).all():
        return {"summary": {}, FAILED: {}, "curves": {}}
    found = estimates.success(table.greedy, table.samples, table.families, confidence=confidence)
    failed = estimates.success(
        table.failed[:, 0], table.failed[:, 1:], table.families, confidence=confidence
    )
    most = table.samples.shape[1]
    names = ["greedy", f"avg_at_{most}"]
    names += [f"pass_{how}_{k}" for how in ("at", "hat") for k in ks(most)]
    return {
        "summary": {name: row for name in names if (row := _json(found.get(name)))},
        FAILED: {name: row for name in names if (row := _json(failed.get(name)))},
        # for every k up to the number of samples; null: undefined
        "curves": {
            f"pass_{how}": [_json(found[f"pass_{how}_{k}"]) for k in range(1, most + 1)]
            for how in ("at", "hat")
        },
    }


def ks(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the most."""
    powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return tuple(dict.fromkeys([*powers, most])) if most else ()


def _effort(table: Table, counted: Sequence[Slot], confidence: float) -> dict[str, Any]:
    """Reward, what a success takes, actions that changed nothing, success within so many turns.
    None: not known, or nothing succeeded.
    """
    success = np.column_stack([table.greedy, table.samples])[:, table.main]
    reward = estimates.mean_reward(
        table.reward[:, table.main], table.families, confidence=confidence
    )
    known = ~np.isnan(table.invalid)
    invalid = estimates.ratio(
        np.where(known, table.invalid, 0.0).sum(axis=1),
        np.where(known, table.turns, 0.0).sum(axis=1),
        table.families,
        confidence=confidence,
    )
    longest = max((slot.num_turns for slot in counted), default=0)
    won = [slot.num_turns for slot in counted if slot.success]
    return {
        "reward": _json(reward),
        **{
            f"{name}_to_success": _taken(
                estimates.to_success(
                    cost[:, table.main], success, table.families, confidence=confidence
                )
            )
            for name, cost in (("turns", table.turns), ("tokens", table.tokens))
        },
        "invalid_actions": _json(invalid),
        "success_within_turns": [
            round(sum(turns <= most for turns in won) / len(counted), 6)
            for most in range(1, longest + 1)
        ],
    }


def _taken(found: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if found is None else {**found, "mean": _json(found["mean"])}


def _families(table: Table, confidence: float) -> dict[str, Any]:
    """Success by the kinds of task that the environment tells."""
    success = np.column_stack([table.greedy, table.samples])[:, table.main]
    found = estimates.by_family(success, table.families, confidence=confidence)
    return {name: {**row, "success": _json(row["success"])} for name, row in found.items()}


def _parts(counted: Sequence[Slot]) -> dict[str, Any]:
    """What outcomes are made of, as the environment tells at the end: the mean of each part over
    the episodes that were judged by it.
    """
    told: dict[str, list[float]] = {}
    for slot in counted:
        for name, value in _numbers(slot.info.get(PARTS), ""):
            told.setdefault(name, []).append(value)
    return {
        name: {"mean": sum(values) / len(values), "num_episodes": len(values)}
        for name, values in sorted(told.items())
    }


def _numbers(part: Any, name: str) -> Iterator[tuple[str, float]]:
    """Of a tree of parts, the numbers; a list is one part, met where all of it is."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from _numbers(value, f"{name}.{key}" if name else str(key))
    elif isinstance(part, list) and part and all(isinstance(each, int | float) for each in part):
        yield name, float(min(part))
    elif isinstance(part, int | float):
        yield name, float(part)


def _json(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else interval.to_json()


def _retried(counted: Sequence[Slot], confidence: float) -> dict[str, Any]:
    """Success of slots that needed another attempt, beside those that did not: where they
    differ, the failures fell on other episodes than chance would have chosen. Fisher's exact test.
    """
    again = [slot.success for slot in counted if slot.failed]
    first = [slot.success for slot in counted if not slot.failed]
    result: dict[str, Any] = {
        "num": len(again),
        "success": sum(again) / len(again) if again else None,
        "success_of_first_tries": sum(first) / len(first) if first else None,
        "p_value": None,
        "differs": False,
    }
    if len(again) >= FEWEST_RETRIED and first:
        table = [[sum(part), len(part) - sum(part)] for part in (again, first)]
        result["p_value"] = float(fisher_exact(table)[1])
        result["differs"] = result["p_value"] < 1 - confidence
    return result
