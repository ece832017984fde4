"""Presentation of an evaluation: lines for a terminal, a figure, and one page that needs no network
and runs no script.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agentgym.evaluation.passk import FAILED, Interval
from agentgym.evaluation.report import EvaluationRow, evaluation_png
from agentgym.evaluation.result import Result
from agentgym.pages import estimate, label, percent, single_page
from agentgym.types import Trajectory, Usage

PAGE, FIGURE = "report.html", "evaluation.png"
SHOWN_KEYS = ("greedy", "avg_at_", "pass_at_")


def headline(result: Result) -> list[str]:
    """Return three lines per environment: success, failed slots as failures, and coverage."""
    lines = []
    for env, numbers in result.numbers.items():
        lines.append(f"{env}: {', '.join(_numbers(numbers['summary']))}")
        lines.append(f"  failed as failures: {', '.join(_numbers(numbers[FAILED]))}")
        lines.append(
            f"  coverage {numbers['coverage']:.1%}: {numbers['num_counted']} of"
            f" {numbers['num_slots']} episodes count"
            + (
                f", {numbers['num_played']} played"
                if numbers["num_played"] < numbers["num_slots"]
                else ""
            )
        )
    return lines


def notes(result: Result) -> Iterator[str]:
    """Yield the notes on a result that a reader needs, one line each."""
    yield from result.about.get("notes", ())
    if not result.about.get("valid", True):
        yield (
            f"This result is invalid: coverage {result.coverage:.1%} is below"
            f" {result.about['min_coverage']:.1%}."
        )
    outcomes = {name: num for name, num in result.outcomes.items() if num}
    yield "Outcomes: " + ", ".join(f"{num} {name}" for name, num in outcomes.items()) + "."
    yield from _lost_replies(result)
    for env, numbers in result.numbers.items():
        retried = numbers["retried"]
        if retried["num"]:
            yield (
                f"{env}: {retried['num']} episodes that count needed another attempt; they succeed"
                f" in {percent(retried['success'])}, the others in"
                f" {percent(retried['success_of_first_tries'] or 0.0)}"
                + (
                    f". They differ (p = {retried['p_value']:.3g}): the failures changed which"
                    " episodes were seen."
                    if retried["differs"]
                    else "."
                )
            )


def _lost_replies(result: Result) -> Iterator[str]:
    """Yield lines on replies that were cut or filtered, by environment; they were still played."""
    for env in result.envs:
        usage = sum((slot.total_usage for slot in result.of(env)), Usage())
        replies = usage.num_calls - usage.num_failed
        if usage.num_cut:
            yield (
                f"{env}: {usage.num_cut} of {replies} replies were cut at the limit of their"
                " tokens, perhaps before the action; --max-new-tokens raises it."
            )
        if usage.num_filtered:
            yield f"{env}: {usage.num_filtered} of {replies} replies were held back by a filter."


def failures(result: Result) -> list[tuple[str, int, str, str]]:
    """Return every attempt that failed: item and sample, number of the attempt, outcome, error."""
    return [
        (f"{slot.item_id} #{slot.sample}", number, str(attempt.outcome), attempt.error)
        for slot in result.slots
        for number, attempt in enumerate(slot.failed, 1)
    ]


def usage_facts(result: Result) -> dict[str, str]:
    """Return calls, tokens and cost; unknown numbers stay unknown.

    Cached tokens of our own engine are left out: they depend on its other work, not on the policy.
    """
    usage, tokens = result.usage, result.usage.known
    if "engine" in result.identity.get("policy", {}):
        del tokens["cached"]
    facts = {"calls": f"{usage.num_calls} ({usage.num_failed} failed)"}
    for name, known in tokens.items():
        least = getattr(usage, f"{name}_tokens")
        unknown = "unknown" + (f", at least {least}" if least else "")
        facts[f"{name} tokens"] = unknown if known is None else str(known)
    if cost := result.about.get("cost"):
        about = "" if cost["exact"] else "at least "
        facts["cost"] = f"{about}{cost['amount']:.6g} {cost['currency']}"
    return facts


def render(result: Result, examples: Iterable[Trajectory]) -> dict[str, bytes]:
    """Return the page (HTML) and the figure (PNG), by file name. The figure has a row for each
    environment and shows the success rates that all of them have; without such a rate there is
    none.
    """
    shown = {
        env: {
            key: Interval(**row)
            for key, row in numbers["summary"].items()
            if key.startswith(SHOWN_KEYS) and key != "pass_at_1"
        }
        for env, numbers in result.numbers.items()
        if numbers["summary"]
    }
    shared = [
        key for key in next(iter(shown.values()), ()) if all(key in s for s in shown.values())
    ]
    rows = [
        EvaluationRow(env, env, {key: summary[key] for key in shared}, None, 0, 0)
        for env, summary in shown.items()
    ]
    figure = evaluation_png(rows) if shared else b""
    page = single_page(
        "evaluation.html",
        title=f"{result.about.get('policy', 'a policy')} · {' + '.join(result.numbers)}",
        notes=list(notes(result)),
        envs=result.numbers,
        failed=FAILED,
        lines_of=_numbers,
        figure=figure,
        failures=failures(result),
        episodes=[(trajectory.item.env, trajectory) for trajectory in examples],
        facts={
            "evaluation": result.digest,
            "policy": str(result.about.get("policy", "")),
            "protocol": str(result.about.get("protocol", "")),
            **usage_facts(result),
        },
    )
    return {FIGURE: figure, PAGE: page} if figure else {PAGE: page}


def _numbers(summary: Mapping[str, Any]) -> list[str]:
    """Return a line for each success rate: name, percent and interval."""
    rows = [f"{label(key)} {estimate(row)}" for key, row in summary.items() if key != "pass_at_1"]
    return rows or ["nothing counts"]
