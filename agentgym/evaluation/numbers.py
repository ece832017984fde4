"""What an evaluation says, from what became of its slots: by environment, as JSON types.

It may be asked while the evaluation runs: it then speaks of what has been played.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import fisher_exact

from agentgym.evaluation.passk import FAILED, bootstrap_interval
from agentgym.evaluation.protocol import EvaluationProtocol
from agentgym.evaluation.result import Slot, coverage_of, outcome_table
from agentgym.evaluation.score import Asked, intervals

Array = NDArray[np.float64]
FEWEST_RETRIED = 5  # slots, below which a shift by retries cannot be told from chance


def numbers_of(slots: Sequence[Slot], protocol: EvaluationProtocol) -> dict[str, Any]:
    """Of every environment, by its name, of what has been played so far; JSON types."""
    asked = Asked(protocol.confidence, protocol.num_bootstrap, protocol.seed)
    of_env: dict[str, list[Slot]] = {each.env.name: [] for each in protocol.envs}
    for slot in slots:
        of_env[slot.env].append(slot)
    return {env: _env_numbers(own, asked) for env, own in of_env.items()}


def _env_numbers(slots: Sequence[Slot], asked: Asked) -> dict[str, Any]:
    played = [slot for slot in slots if slot.outcome is not None]
    counted = [slot for slot in played if slot.counts]
    result: dict[str, Any] = {
        "num_items": len({slot.item_id for slot in slots}),
        "num_slots": len(slots),
        "num_played": len(played),
        "num_counted": len(counted),
        "coverage": coverage_of(slots),
        "coverage_of_played": coverage_of(played),
        **_conventions(played, asked),
        "reward": _reward(counted, asked),
        **_effort(counted),
        "by_family": _families(counted),
        "retried": _retried(counted, asked.confidence),
    }
    return result


def _conventions(played: Sequence[Slot], asked: Asked) -> dict[str, Any]:
    """Of the slots that were played; {} where none counts."""
    if not any(slot.counts for slot in played):
        return {"summary": {}, FAILED: {}}
    _, greedy, samples = outcome_table(played)
    failed = _failed_table(played)
    return {
        "summary": _summary(greedy, samples, asked),
        FAILED: _summary(failed[:, 0], failed[:, 1:], asked),
    }


def _failed_table(played: Sequence[Slot]) -> Array:
    """As `outcome_table`, greedy first, failed slots as failures; NaN where nothing was played."""
    rows = {item: row for row, item in enumerate(dict.fromkeys(slot.item_id for slot in played))}
    table = np.full((len(rows), 1 + max(slot.sample for slot in played)), np.nan)
    for slot in played:
        table[rows[slot.item_id], slot.sample] = float(slot.counts and slot.success)
    return table


def _summary(greedy: Array, samples: Array, asked: Asked) -> dict[str, Any]:
    """Without what nobody played: a protocol may have no greedy episodes, or none but those."""
    has_greedy, has_samples = not np.isnan(greedy).all(), bool((~np.isnan(samples)).any())
    counts = (~np.isnan(samples)).sum(axis=1)
    most = int(counts.max()) if has_samples else 0
    k = ks(most)
    filled = greedy if has_greedy else np.zeros(len(greedy))
    if not has_samples:
        samples = np.zeros((len(greedy), 1))
    found = intervals(filled, samples, k if has_samples else (1,), asked)
    return {
        name: row
        for name, row in found.items()
        if (has_greedy if name == "greedy" else has_samples)
    }


def ks(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the most."""
    powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return tuple(dict.fromkeys([*powers, most])) if most else ()


def _reward(counted: Sequence[Slot], asked: Asked) -> dict[str, Any] | None:
    """Mean over items of the mean reward of their slots."""
    of_item: dict[str, list[float]] = {}
    for slot in counted:
        of_item.setdefault(slot.item_id, []).append(float(slot.reward or 0.0))
    if not of_item:
        return None
    means = np.array([np.mean(rewards) for rewards in of_item.values()])
    return bootstrap_interval(
        means,
        confidence=asked.confidence,
        num_bootstrap=asked.num_bootstrap,
        seed=asked.seed,
    ).to_json()


def _effort(counted: Sequence[Slot]) -> dict[str, Any]:
    """Turns and tokens it takes to succeed, at the median; actions that were none; success within
    so many turns. None: not known, or nothing succeeded.
    """
    won = [slot for slot in counted if slot.success]
    tokens = [slot.usage.output_tokens for slot in won if slot.usage.known["output"]]
    known = [slot for slot in counted if slot.num_invalid is not None]
    turns = sum(slot.num_turns for slot in known)
    longest = max((slot.num_turns for slot in counted), default=0)
    within = [
        round(sum(slot.num_turns <= most for slot in won) / len(counted), 6)
        for most in range(1, longest + 1)
    ]
    return {
        "turns_to_success": median(slot.num_turns for slot in won) if won else None,
        "tokens_to_success": median(tokens) if tokens and len(tokens) == len(won) else None,
        "invalid_actions": sum(slot.num_invalid or 0 for slot in known) / turns if turns else None,
        "success_within_turns": within,
    }


def _families(counted: Sequence[Slot]) -> dict[str, Any]:
    """Success by the kinds of task that the environment tells."""
    of_family: dict[str, list[Slot]] = {}
    for slot in counted:
        if slot.family is not None:
            of_family.setdefault(slot.family, []).append(slot)
    return {
        family: {
            "success": sum(slot.success for slot in own) / len(own),
            "num_items": len({slot.item_id for slot in own}),
            "num_slots": len(own),
        }
        for family, own in sorted(of_family.items())
    }


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
