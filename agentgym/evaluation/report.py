"""Rows, curves and figures of a report, and an evaluation as lines for a terminal and as one page.

matplotlib is imported inside the figures (it is slow) and used through its Figure class, so no
global state is touched.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agentgym.evaluation.intervals import FAILED, Interval
from agentgym.evaluation.result import Result
from agentgym.pages import estimate, label, percent, single_page
from agentgym.steps.step import Stage
from agentgym.types import Trajectory, Usage


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One checkpoint's evaluation. Rows are in order of training and compared with the first."""

    name: str  # short, for the figure
    title: str  # for the table
    summary: Mapping[str, Interval]  # main numbers by name, success as shares
    # per-item difference to the first row; None for the first
    paired: Mapping[str, Interval] | None
    num_items: int
    max_turns: int
    coverage: float = 1.0  # share of the episodes that count
    # the summary with failed episodes as failures of the policy
    failed: Mapping[str, Interval] | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """A success rate over optimizer steps, which are counted through all stages."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]  # shares, NaN if nothing was measured
    smooth: bool = False  # noisy: drawn faint, with a running mean on top


INK, MUTED, GRID = "#1f2933", "#66727f", "#e3e7eb"
_SERIES = ("#3b6ea8", "#c8702a", "#4b8b5f", "#7a5c99")  # distinct in gray, too
_STAGES = ("#f6f8fa", "#eaeff4")
_SMOOTHING_STEPS = 7  # width of the running mean
LEGEND: Any = {"frameon": False, "loc": "upper center", "fontsize": 9}


def learning_curve_png(
    curves: Sequence[Curve],
    stages: Sequence[Stage],
    evaluations: Mapping[str, tuple[int, Interval]],
) -> bytes:
    """Return a PNG of success over optimizer steps, with shaded stages and evaluations as points.
    evaluations: title -> (step, success).
    """
    import pandas as pd

    figure, axes = _figure(10.0, 4.6)
    above = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
    for number, stage in enumerate(stages):
        ends = (stage.first_step - 0.5, stage.last_step + 0.5)
        axes.axvspan(*ends, color=_STAGES[number % 2], zorder=0)
        title = f"stage {stage.index}\nmax_turns {stage.max_turns}"
        pen = {"color": MUTED, "fontsize": 9, "linespacing": 1.35}
        axes.text(sum(ends) / 2, 1.015, title, **above, **pen)
    for number, curve in enumerate(curves):
        colour = _SERIES[number % len(_SERIES)]
        if curve.smooth:
            axes.plot(curve.steps, curve.values, color=colour, alpha=0.28, linewidth=1.0)
            label = f"{curve.name}, mean of {_SMOOTHING_STEPS} steps"
            values = pd.Series(curve.values, dtype=float)
            smoothed = values.rolling(_SMOOTHING_STEPS, 1, center=True).mean()
            axes.plot(curve.steps, smoothed, color=colour, linewidth=2.0, label=label)
        else:
            pen = {"linewidth": 1.2, "marker": "o", "markersize": 5}
            axes.plot(curve.steps, curve.values, color=colour, label=curve.name, **pen)
    for number, (title, (step, interval)) in enumerate(evaluations.items()):
        pen = {"color": INK, "markersize": 6, "capsize": 4, "elinewidth": 1.3, "zorder": 5}
        pen |= {"fmt": "Ds^v"[number % 4], "label": title}
        axes.errorbar([step], [interval.mean], yerr=_error_bars([interval]), **pen)
    axes.margins(x=0.02)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("success")
    if curves or evaluations:
        axes.legend(**LEGEND, bbox_to_anchor=(0.5, -0.14), ncols=4)
    return png_of(figure)


def evaluation_png(rows: Sequence[EvaluationRow]) -> bytes:
    """Return a PNG with a group of bars per success rate of the first row; a bar per row, with its
    interval. Errors: ValueError without rows, KeyError if a row lacks a rate.
    """
    if not rows:
        raise ValueError("an evaluation figure needs at least one row")
    from matplotlib import colormaps

    keys = list(rows[0].summary)
    figure, axes = _figure(max(6.0, 1.6 + 0.75 * len(keys) * len(rows)), 3.8)
    width = 0.8 / len(rows)
    # gray for the first row, the darkest blue for the last
    colours = ["#b3bdc8", *colormaps["Blues"](np.linspace(0.75, 0.45, len(rows) - 1)[::-1])]
    for number, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        intervals = [row.summary[key] for key in keys]
        places = np.arange(len(keys)) + (number - (len(rows) - 1) / 2) * width
        means, bars = [interval.mean for interval in intervals], _error_bars(intervals)
        axes.bar(places, means, width * 0.92, color=colour, label=row.name)
        axes.errorbar(places, means, yerr=bars, fmt="none", color=INK, elinewidth=1.1, capsize=3)
        for x, interval in zip(places, intervals, strict=True):
            text, y = f"{100 * interval.mean:.1f}", interval.high + 0.02
            axes.text(x, y, text, ha="center", fontsize=9, color=INK)
    axes.set_ylim(0, 1.08)
    axes.set_xticks(range(len(keys)), [label(key) for key in keys])
    axes.tick_params(axis="x", length=0, labelcolor=INK, labelsize=10)
    axes.set_ylabel("success")
    axes.legend(**LEGEND, bbox_to_anchor=(0.5, -0.1), ncols=len(rows))
    return png_of(figure)


def _error_bars(intervals: Sequence[Interval]) -> NDArray[np.float64]:
    """Distances from each mean down to its low and up to its high, [2, len], at least 0."""
    below = [max(0.0, interval.mean - interval.low) for interval in intervals]
    above = [max(0.0, interval.high - interval.mean) for interval in intervals]
    return np.array([below, above])


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure and its axes; the y axis shows shares in percent. width, height: inches."""
    from matplotlib.ticker import MultipleLocator, PercentFormatter

    figure, ((axes,),) = panels((width, height))
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    axes.yaxis.set_major_locator(MultipleLocator(0.2))
    return figure, axes


def panels(
    size: tuple[float, float],
    rows: int = 1,
    columns: int = 1,
    *,
    grid: Literal["x", "y"] = "y",
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Any, Any]:
    """Return a white figure and its axes, [rows, columns], with a gray bottom spine alone.
    size: width and height, inches; grid: the axis that has grid lines; sharex, sharey: all panels
    have the same axis.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, facecolor="white")
    panel_grid = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
    for axes in panel_grid.flat:
        axes.grid(axis=grid, color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(MUTED)
        axes.tick_params(colors=MUTED, labelsize=9, length=0)
        axes.xaxis.label.set_color(MUTED)
        axes.yaxis.label.set_color(MUTED)
    return figure, panel_grid


def drawn(text: str) -> str:
    """Return the text with dollar signs escaped: matplotlib would read formulas between them."""
    return text.replace("$", "\\$")


def png_of(figure: Any) -> bytes:
    """Return the figure as PNG, which names the Matplotlib version; equal ones give equal bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=160, bbox_inches="tight")
    return buffer.getvalue()


def svg_of(figure: Any) -> bytes:
    """Return the figure as SVG, without a date; equal ones give equal bytes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "agentgym"}):
        FigureCanvasSVG(figure)
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return buffer.getvalue()


def drawn_by(png: bytes) -> tuple[str, bytes]:
    """Split a PNG into (name of the program that drew it, the PNG without that name).
    The name is empty if the PNG has none.
    """
    at = png.find(b"tEXtSoftware\0")
    if at < 4:
        return "", png
    end = at + 4 + int.from_bytes(png[at - 4 : at])
    return png[at + 13 : end].decode("latin-1"), png[: at - 4] + png[end + 4 :]


PAGE, FIGURE = "report.html", "evaluation.png"
SHOWN_KEYS = ("greedy", "avg_at_", "pass_at_")


def headline(result: Result) -> list[str]:
    """Return lines for each environment: success, coverage and, if slots failed, success with
    these as failures.
    """
    lines = []
    for env, numbers in result.numbers.items():
        lines.append(f"{env}: {', '.join(_numbers(numbers['summary']))}")
        if numbers["coverage"] < 1:
            lines.append(f"  failed as failures: {', '.join(_numbers(numbers[FAILED]))}")
        played, num_slots = numbers["num_played"], numbers["num_slots"]
        lines.append(
            f"  coverage {numbers['coverage']:.1%}: {numbers['num_counted']} of {num_slots}"
            f" episodes count{f', {played} played' if played < num_slots else ''}"
        )
    return lines


def notes(result: Result) -> Iterator[str]:
    """Yield lines for readers: notes, invalid coverage, outcomes, lost replies, and retries."""
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
                f" {percent(retried['success_of_first_tries'] or 0.0)}."
            ) + (
                f" They differ (p = {retried['p_value']:.3g}): the failures changed which episodes"
                " were seen."
                if retried["differs"]
                else ""
            )


def _lost_replies(result: Result) -> Iterator[str]:
    """Yield a line per environment on replies cut at the token limit, and on filtered replies."""
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
    """Return (item and sample, number of the attempt, outcome, error) of each failed attempt."""
    return [
        (f"{slot.item_id} #{slot.sample}", number, str(attempt.outcome), attempt.error)
        for slot in result.slots
        for number, attempt in enumerate(slot.failed, 1)
    ]


def usage_facts(result: Result) -> dict[str, str]:
    """Return calls, tokens and cost (if known) as text, by name, without our own engine's cached
    tokens: these depend on its other work, not on the policy.
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
    """Return files by name: PAGE (HTML with the `examples`) and, unless the environments have no
    success rate in common, FIGURE (PNG of those).
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
    first, *_ = (*shown.values(), {})
    shared = [key for key in first if all(key in summary for summary in shown.values())]
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
    """Return a line for each rate but pass@1: name, percent, interval; without any, a remark."""
    rows = [f"{label(key)} {estimate(row)}" for key, row in summary.items() if key != "pass_at_1"]
    return rows or ["nothing counts"]
