"""Presentation of an evaluation: lines for a terminal, a figure, and one page that needs no network
and runs no script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from agentgym.evaluation.passk import FAILED, Interval
from agentgym.evaluation.report import (
    EpisodeExample,
    EvaluationRow,
    episodes_html,
    evaluation_png,
    facts_html,
    figure_html,
    label,
    notes_html,
    page_html,
    percent,
)
from agentgym.evaluation.result import Result
from agentgym.types import Usage

PAGE, FIGURE = "report.html", "evaluation.png"
SHOWN_ERRORS = 8
SHOWN_KEYS = ("greedy", "avg_at_", "pass_at_")


def headline(result: Result) -> list[str]:
    """Return three lines per environment: success, failed slots as failures, and coverage."""
    lines = []
    for env, numbers in result.numbers.items():
        lines.append(f"{env}: {_numbers(numbers['summary'])}")
        lines.append(f"  failed as failures: {_numbers(numbers[FAILED])}")
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
                f" in {percent(retried['success'])} %, the others in"
                f" {percent(retried['success_of_first_tries'] or 0.0)} %"
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


def render(result: Result, examples: Sequence[EpisodeExample]) -> dict[str, bytes]:
    """Return the figure and the page, by file name; no figure if no number is in all its rows."""
    rows = [_row(env, numbers) for env, numbers in result.numbers.items() if numbers["summary"]]
    figures = {}
    if rows:
        shared = [key for key in rows[0].summary if all(key in row.summary for row in rows)]
        figures[FIGURE] = evaluation_png([_only(row, shared) for row in rows]) if shared else b""
    facts = {
        "evaluation": result.digest,
        "policy": str(result.about.get("policy", "")),
        "protocol": str(result.about.get("protocol", "")),
        **usage_facts(result),
    }
    sections = [
        notes_html(list(notes(result))),
        _table(result),
        "".join(figure_html("Success", png) for png in figures.values() if png),
        *(_families(env, numbers) for env, numbers in result.numbers.items()),
        _failed(failures(result)),
        episodes_html(examples),
        facts_html(facts),
    ]
    title = f"{result.about.get('policy', 'a policy')} · {' + '.join(result.numbers)}"
    page = page_html(title, [section for section in sections if section]).encode()
    return {**{name: png for name, png in figures.items() if png}, PAGE: page}


def _numbers(summary: Mapping[str, Any]) -> str:
    shown = [
        f"{label(key)} {percent(row['mean'])} [{percent(row['low'])}, {percent(row['high'])}]"
        for key, row in summary.items()
        if key != "pass_at_1"
    ]
    return ", ".join(shown) or "nothing counts"


def _row(env: str, numbers: Mapping[str, Any]) -> EvaluationRow:
    summary, failed = (
        {
            key: Interval(**row)
            for key, row in numbers[part].items()
            if key.startswith(SHOWN_KEYS) and key != "pass_at_1"
        }
        for part in ("summary", FAILED)
    )
    return EvaluationRow(
        env, env, summary, None, numbers["num_items"], 0, numbers["coverage"], failed
    )


def _only(row: EvaluationRow, keys: Sequence[str]) -> EvaluationRow:
    summary = {key: row.summary[key] for key in keys}
    return EvaluationRow(row.name, row.title, summary, None, row.num_items, row.max_turns)


def _table(result: Result) -> str:
    head = ("items", "episodes", "coverage", "success", "failed as failures", "reward", "turns")
    body = []
    for env, numbers in result.numbers.items():
        reward, turns = numbers["reward"], numbers["turns_to_success"]
        cells = (
            str(numbers["num_items"]),
            f"{numbers['num_counted']} of {numbers['num_slots']}",
            f"{percent(numbers['coverage'])} %",
            _numbers(numbers["summary"]),
            _numbers(numbers[FAILED]),
            "–" if reward is None else f"{reward['mean']:.3f}",
            "–" if turns is None else f"{turns['median']:g}",
        )
        cells_html = "".join(
            f"<td>{escape(cell).replace(', ', '<br>') if column in (3, 4) else escape(cell)}</td>"
            for column, cell in enumerate(cells)
        )
        body.append(f'<tr><th scope="row">{escape(env)}</th>{cells_html}</tr>')
    return _section("Evaluation", ("environment", *head), body) + (
        '<p class="caption">Success in percent with its interval. Episodes that failed (not the'
        " policy’s doing) are left out of “success” and are failures in the next column;"
        " coverage is the share of the episodes asked for that count. Turns: the median of"
        " episodes that succeed.</p>"
    )


def _families(env: str, numbers: Mapping[str, Any]) -> str:
    if not numbers["by_family"]:
        return ""
    body = [
        f'<tr><th scope="row">{escape(family)}</th><td>{_share(row["success"])}</td>'
        f"<td>{row['num_items']}</td></tr>"
        for family, row in numbers["by_family"].items()
    ]
    return _section(f"{env} by kind of task", ("kind", "success, %", "items"), body)


def _share(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "nothing counts"
    return f"{percent(row['mean'])} [{percent(row['low'])}, {percent(row['high'])}]"


def _failed(rows: Sequence[tuple[str, int, str, str]]) -> str:
    if not rows:
        return ""
    body = [
        f'<tr><th scope="row">{escape(slot)}</th><td>{attempt}</td><td>{escape(outcome)}</td>'
        f'<td class="range">{escape(error[:300])}</td></tr>'
        for slot, attempt, outcome, error in rows[:200]
    ]
    more = f"; the first 200 of {len(rows)}" if len(rows) > 200 else ""
    return _section(f"Attempts that failed{more}", ("episode", "attempt", "outcome", "error"), body)


def _section(title: str, head: Sequence[str], body: Sequence[str]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f'<section><h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{cells}</tr>'
        f"</thead><tbody>{''.join(body)}</tbody></table></div></section>"
    )
