"""Report of a run: two figures and one self-contained page.
Pure functions of numbers, no files.

matplotlib is imported inside the figures (it is slow) and used through its Figure class, so no
global state is touched.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agentgym.evaluation.passk import Interval
from agentgym.types import Trajectory


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One checkpoint's evaluation.

    Rows are in order of training; the others are compared with the first.
    """

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


@dataclass(frozen=True, slots=True)
class StageSpan:
    """Optimizer steps first_step .. last_step, both inside, trained with one horizon."""

    title: str
    first_step: int
    last_step: int
    max_turns: int


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """One evaluated checkpoint on the axis of optimizer steps."""

    title: str
    step: int
    interval: Interval


@dataclass(frozen=True, slots=True)
class EpisodeExample:
    """An episode as text, for readers."""

    title: str  # its origin, for example "before training"
    item_id: str
    status: str
    reward: float | None  # None if the environment failed
    success: bool
    goal: str  # the first observation
    turns: tuple[tuple[str, str], ...]  # (action, observation)

    @staticmethod
    def from_trajectory(title: str, trajectory: Trajectory) -> EpisodeExample:
        """Return a trajectory as an example, without its token fields."""
        return EpisodeExample(
            title=title,
            item_id=trajectory.item.item_id,
            status=str(trajectory.status),
            reward=trajectory.reward,
            success=trajectory.success,
            goal=trajectory.first_observation,
            turns=tuple((turn.action, turn.observation) for turn in trajectory.turns),
        )


INK, MUTED, GRID = "#1f2933", "#66727f", "#e3e7eb"
_SERIES = ("#3b6ea8", "#c8702a", "#4b8b5f", "#7a5c99")  # distinct in grey, too
_STAGES = ("#f6f8fa", "#eaeff4")
_SMOOTHING_STEPS = 7  # width of the running mean


def learning_curve_png(
    curves: Sequence[Curve], stages: Sequence[StageSpan], evaluations: Sequence[EvaluationPoint]
) -> bytes:
    """Draw success over optimizer steps on one axis: stages shaded, evaluations as points with
    their intervals.
    """
    figure, axes = _figure(10.0, 4.6)
    for number, stage in enumerate(stages):
        axes.axvspan(
            stage.first_step - 0.5, stage.last_step + 0.5, color=_STAGES[number % 2], zorder=0
        )
        axes.text(
            (stage.first_step + stage.last_step) / 2,
            1.015,
            f"{stage.title}\nmax_turns {stage.max_turns}",
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            color=MUTED,
            fontsize=9,
            linespacing=1.35,
        )
    for number, curve in enumerate(curves):
        colour = _SERIES[number % len(_SERIES)]
        if curve.smooth:
            axes.plot(curve.steps, curve.values, color=colour, alpha=0.28, linewidth=1.0)
            label = f"{curve.name}, mean of {_SMOOTHING_STEPS} steps"
            axes.plot(
                curve.steps, _running_mean(curve.values), color=colour, linewidth=2.0, label=label
            )
        else:
            axes.plot(
                curve.steps,
                curve.values,
                color=colour,
                linewidth=1.2,
                marker="o",
                markersize=5,
                label=curve.name,
            )
    for number, title in enumerate(dict.fromkeys(point.title for point in evaluations)):
        points = [point for point in evaluations if point.title == title]
        intervals = [point.interval for point in points]
        axes.errorbar(
            [point.step for point in points],
            [interval.mean for interval in intervals],
            yerr=_error_bars(intervals),
            fmt="Ds^v"[number % 4],
            color=INK,
            markersize=6,
            capsize=4,
            elinewidth=1.3,
            label=title,
            zorder=5,
        )
    axes.margins(x=0.02)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("success")
    if curves or evaluations:
        axes.legend(
            frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, fontsize=9
        )
    return png_of(figure)


def evaluation_png(rows: Sequence[EvaluationRow]) -> bytes:
    """Draw one group of bars per number, one bar per row, with intervals."""
    if not rows:
        raise ValueError("an evaluation figure needs at least one row")
    keys = list(rows[0].summary)
    figure, axes = _figure(max(6.0, 1.6 + 0.75 * len(keys) * len(rows)), 3.8)
    width = 0.8 / len(rows)
    for number, (row, colour) in enumerate(zip(rows, _shades(len(rows)), strict=True)):
        intervals = [row.summary[key] for key in keys]
        places = np.arange(len(keys)) + (number - (len(rows) - 1) / 2) * width
        means = [interval.mean for interval in intervals]
        axes.bar(places, means, width * 0.92, color=colour, label=row.name)
        axes.errorbar(
            places,
            means,
            yerr=_error_bars(intervals),
            fmt="none",
            color=INK,
            elinewidth=1.1,
            capsize=3,
        )
        for x, interval in zip(places, intervals, strict=True):
            axes.text(
                x,
                interval.high + 0.02,
                f"{100 * interval.mean:.1f}",
                ha="center",
                fontsize=9,
                color=INK,
            )
    axes.set_ylim(0, 1.08)
    axes.set_xticks(range(len(keys)), [label(key) for key in keys])
    axes.tick_params(axis="x", length=0, labelcolor=INK, labelsize=10)
    axes.set_ylabel("success")
    axes.legend(
        frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(rows), fontsize=9
    )
    return png_of(figure)


def report_html(
    title: str,
    facts: Mapping[str, str],
    rows: Sequence[EvaluationRow],
    figures: Mapping[str, bytes],
    episodes: Sequence[EpisodeExample],
    *,
    timings: Mapping[str, float] | None = None,
    confidence: float = 0.95,
    notes: Sequence[str] = (),
) -> str:
    """Return the whole report as one page: no script, no network, every text escaped.

    facts: shown as they are, in order.
    figures: caption -> PNG.
    timings: part of the run -> seconds.
    confidence: of the intervals in `rows`.
    notes: things a reader must know, for example that the data is a stand-in.
    """
    sections = [
        _headline(rows),
        notes_html(notes),
        _evaluation_table(rows, confidence),
        "".join(figure_html(caption, png) for caption, png in figures.items()),
        _timings_table(timings or {}),
        episodes_html(episodes),
        facts_html(facts),
    ]
    return page_html(title, sections)


def page_html(title: str, sections: Sequence[str]) -> str:
    """Return one page of sections whose text is already escaped: no script, no network."""
    return _PAGE.format(
        policy=_POLICY,
        title=escape(title),
        style=_STYLE,
        body="\n".join(section for section in sections if section),
    )


def label(key: str) -> str:
    """Return a metric's name for people: `pass_at_4` -> `pass@4`."""
    return key.replace("_at_", "@")


def _headline(rows: Sequence[EvaluationRow]) -> str:
    """Return HTML tiles, one per number: the last compared row against the first row."""
    compared = [(row.summary, row.paired) for row in rows if row.paired is not None]
    if not compared:
        return ""
    before, (after, paired) = rows[0].summary, compared[-1]
    tiles = []
    for key in after:
        if key not in before or key not in paired:
            continue
        gain = paired[key]
        tiles.append(
            f'<div class="tile"><span class="name">{escape(label(key))}</span><span'
            f' class="value">{percent(before[key].mean)} <span class="to">→</span>'
            f' {percent(after[key].mean)}<small>%</small></span><span class="gain'
            f' {_direction(gain)}">{points(gain.mean)} points</span><span'
            f' class="range">{points(gain.low)} to {points(gain.high)}</span></div>'
        )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def notes_html(notes: Sequence[str]) -> str:
    return (
        f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>'
        if notes
        else ""
    )


def _evaluation_table(rows: Sequence[EvaluationRow], confidence: float) -> str:
    if not rows:
        return ""
    keys = list(dict.fromkeys(key for row in rows for key in row.summary))
    head = "".join(f"<th>{escape(label(key))}</th>" for key in keys)
    body = []
    for row in rows:
        cells = "".join(_cell(row, key) for key in keys)
        body.append(
            f'<tr><th scope="row">{escape(row.title)}</th><td>{row.num_items}</td>'
            f"<td>{row.max_turns}</td><td>{percent(row.coverage)}</td>{cells}</tr>"
        )
    return (
        "<section><h2>Evaluation</h2><div"
        ' class="scroll"><table><thead><tr><th>checkpoint</th><th>items</th><th>max_turns</th>'
        "<th>coverage</th>"
        f"{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        f'<p class="caption">Success in percent with {100 * confidence:g} % intervals over items,'
        " or over their families if five or more are known."
        f" The second line is the mean per-item difference to “{escape(rows[0].title)}” in"
        " points; it is coloured where its "
        "interval excludes 0. pass@k is the unbiased estimate. Coverage is the share of the"
        " episodes that count: those whose environment "
        "failed, or that ran out of time, are left out; where there are any, “failed as failures”"
        " counts them as failures.</p></section>"
    )


def _cell(row: EvaluationRow, key: str) -> str:
    interval = row.summary.get(key)
    if interval is None:
        return "<td>–</td>"
    text = (
        f"<b>{percent(interval.mean)}</b> <span class='range'>{percent(interval.low)} –"
        f" {percent(interval.high)}</span>"
    )
    if interval.num_items < row.num_items:
        text += f" <span class='range'>({interval.num_items} items)</span>"
    if row.coverage < 1 and row.failed is not None and key in row.failed:
        text += f"<br><span class='range'>failed as failures {percent(row.failed[key].mean)}</span>"
    if row.paired is not None and key in row.paired:
        gain = row.paired[key]
        between = f"{points(gain.low)} to {points(gain.high)}"
        text += (
            f"<br><span class='gain {_direction(gain)}'>{points(gain.mean)}</span> <span"
            f" class='range'>{between}</span>"
        )
    return f"<td>{text}</td>"


def figure_html(caption: str, png: bytes) -> str:
    return (
        f"<section><h2>{escape(caption)}</h2><figure><img"
        f' src="data:image/png;base64,{picture_data(png)}"'
        f' alt="{escape(caption)}"></figure></section>'
    )


def _timings_table(timings: Mapping[str, float]) -> str:
    if not timings:
        return ""
    total = sum(timings.values())
    shares = {part: 100 * seconds / total if total else 0.0 for part, seconds in timings.items()}
    body = "".join(
        "<tr><th"
        f' scope="row">{escape(part)}</th><td>{_duration(seconds)}</td><td>{shares[part]:.0f}'
        f' %</td><td class="bar"><svg><rect width="{shares[part]:.1f}%" height="100%"'
        ' rx="2"/></svg></td></tr>'
        for part, seconds in timings.items()
    )
    foot = f'<tr><th scope="row">total</th><td>{_duration(total)}</td><td></td><td></td></tr>'
    return (
        '<section><h2>Time</h2><div class="scroll"><table'
        ' class="times"><thead><tr><th>part</th><th>time</th><th>share</th><th></th></tr>'
        f"</thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table></div></section>"
    )


def episodes_html(episodes: Sequence[EpisodeExample]) -> str:
    if not episodes:
        return ""
    shown = "".join(_episode(episode, number == 0) for number, episode in enumerate(episodes))
    more = (
        "<p class='meta'>All of them, turn by turn and token by token:"
        " <code>agentgym view</code></p>"
    )
    return f"<section><h2>Episodes</h2>{shown}{more}</section>"


def _episode(episode: EpisodeExample, is_open: bool) -> str:
    reward = "no reward" if episode.reward is None else f"reward {episode.reward:g}"
    if episode.reward is None:
        badge, outcome = "none", "failed"
    else:
        badge, outcome = ("good", "solved") if episode.success else ("bad", "not solved")
    turns = "".join(
        f'<li><code class="action">{escape(action) or "(empty)"}</code><div'
        f' class="observation">{escape(observation)}</div></li>'
        for action, observation in episode.turns
    )
    return (
        f"<details{' open' if is_open else ''}><summary><span class='badge"
        f" {badge}'>{outcome}</span> "
        f"<b>{escape(episode.title)}</b> <span class='meta'>{escape(episode.item_id)} ·"
        f" {escape(episode.status)} · {reward} · "
        f"{len(episode.turns)} turn{'' if len(episode.turns) == 1 else 's'}</span></summary>"
        f'<div class="observation goal">{escape(episode.goal)}</div><ol>{turns}</ol></details>'
    )


def facts_html(facts: Mapping[str, str]) -> str:
    if not facts:
        return ""
    body = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()
    )
    return f"<section><h2>Run</h2><dl>{body}</dl></section>"


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "−")


def _direction(gain: Interval) -> str:
    """Return a CSS class: a gain or a loss only if the interval excludes 0."""
    return "good" if gain.low > 0 else "bad" if gain.high < 0 else "even"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean of the window centred on each value, shorter at the ends, without NaN values."""
    half = _SMOOTHING_STEPS // 2
    windows = (
        [v for v in values[max(0, i - half) : i + half + 1] if not math.isnan(v)]
        for i in range(len(values))
    )
    return [sum(window) / len(window) if window else math.nan for window in windows]


def _error_bars(intervals: Sequence[Interval]) -> NDArray[np.float64]:
    """Distances from the mean down and up, [2, len]."""
    below = [max(0.0, interval.mean - interval.low) for interval in intervals]
    above = [max(0.0, interval.high - interval.mean) for interval in intervals]
    return np.array([below, above])


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """Return a styled figure and its axes; inches. The y axis is a share shown in percent."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.subplots()
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    axes.yaxis.set_major_locator(_ticks(0.2))
    style(axes)
    return figure, axes


def style(axes: Any, grid: Literal["x", "y"] = "y") -> None:
    """Style axes: grid lines across the axis `grid`, one muted spine."""
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.xaxis.label.set_color(MUTED)
    axes.yaxis.label.set_color(MUTED)


def _shades(num: int) -> list[tuple[float, ...]]:
    """Return RGB colours: grey for the first bar of a group, then increasingly dark blues."""
    from matplotlib.colors import to_rgb

    light, dark = np.array(to_rgb("#9dbbdb")), np.array(to_rgb(_SERIES[0]))
    blues = (
        [tuple(light + (dark - light) * share) for share in np.linspace(0, 1, num - 1)]
        if num > 2
        else [tuple(dark)] * (num - 1)
    )
    return [to_rgb("#b3bdc8"), *blues]


def _ticks(step: float) -> Any:
    from matplotlib.ticker import MultipleLocator

    return MultipleLocator(step)


def png_of(figure: Any) -> bytes:
    """Return a PNG that names the Matplotlib version; equal figures give equal bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=160, bbox_inches="tight")
    return buffer.getvalue()


def drawn_by(png: bytes) -> tuple[str, bytes]:
    """Return (the program that a picture names, empty for none; the picture without that name)."""
    at = png.find(b"tEXtSoftware\0")
    if at < 4:
        return "", png
    end = at + 4 + int.from_bytes(png[at - 4 : at])
    return png[at + 13 : end].decode("latin-1"), png[: at - 4] + png[end + 4 :]


def picture_data(png: bytes) -> str:
    """Return a picture in base64, for embedding in a page."""
    return base64.b64encode(png).decode()


_STYLE = """
:root { color-scheme: light; --ink: #1f2933; --muted: #66727f; --line: #e3e7eb; --soft: #f6f8fa; \
--good: #1f7a4d; --bad: #b3402a; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", \
"Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; }
main { max-width: 1040px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 20px; font-weight: 650; }
h2 { font-size: 17px; margin: 40px 0 12px; font-weight: 650; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; }
.tile { border: 1px solid var(--line); border-radius: 6px; padding: 12px 16px; display: flex; \
flex-direction: column; }
.tile .name { color: var(--muted); font-size: 13px; }
.tile .value { font-size: 24px; font-weight: 600; white-space: nowrap; }
.tile .to, .tile small { color: var(--muted); font-weight: 400; font-size: 17px; }
.gain.good { color: var(--good); } .gain.bad { color: var(--bad); } .gain.even { color: \
var(--muted); }
.gain { font-weight: 600; }
.notes { margin: 16px 0 0; padding: 10px 16px 10px 34px; background: #fff8e8; border: 1px solid \
#f0e2bd; border-radius: 6px;
  font-size: 14px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 8px 12px; text-align: right; border-bottom: 1px solid var(--line); \
vertical-align: top; white-space: nowrap; }
thead th { color: var(--muted); font-weight: 500; font-size: 13px; border-bottom: 1px solid \
var(--muted); }
th:first-child { text-align: left; padding-left: 0; font-weight: 500; }
tfoot th, tfoot td { border-bottom: 0; font-weight: 600; }
.range, .meta { color: var(--muted); font-size: 13px; }
thead th, tbody th { white-space: normal; overflow-wrap: break-word; } tbody th { min-width: 8em; }
.caption { color: var(--muted); font-size: 13px; max-width: 80ch; margin: 10px 0 0; }
.times { max-width: 640px; } .times .bar { width: 45%; vertical-align: middle; }
.times .bar svg { display: block; width: 100%; height: 8px; fill: #8aa9cc; }
figure { margin: 0; } img { max-width: 100%; height: auto; display: block; max-height: 480px; \
margin: 0 auto; }
details { border: 1px solid var(--line); border-radius: 6px; margin: 0 0 8px; }
summary { padding: 10px 14px; cursor: pointer; }
details ol { margin: 0; padding: 4px 16px 12px 46px; } details li { margin: 8px 0; }
details li::marker { color: var(--muted); font-size: 13px; }
.badge { display: inline-block; border-radius: 4px; padding: 0 8px; font-size: 13px; color: #fff; \
background: var(--bad); }
.badge.good { background: var(--good); } .badge.none { background: var(--muted); }
.action, .observation { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans \
Mono", monospace; font-size: 13px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.action { font-weight: 600; } .observation { color: #48535f; max-height: 14em; overflow: auto; }
.goal { margin: 0 14px; padding: 8px 12px; background: var(--soft); border-radius: 4px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0; font-size: \
14px; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
@media print { main { padding: 0; max-width: none; } details, section { break-inside: avoid; } }
"""

# if some text is not escaped, the page still runs no script, loads nothing and sends nothing
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "img-src data:",
        f"style-src 'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
)

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""
