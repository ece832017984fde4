"""Presentation of `versus`: lines for a terminal, figures, and one page that needs no network and
runs no script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from agentgym.comparison.report import COLOURS
from agentgym.evaluation.report import (
    MUTED,
    figure_html,
    label,
    notes_html,
    page_html,
    percent,
    png_of,
    points,
    style,
)

Json = Mapping[str, Any]
PAGE = "comparison.html"
SHOWN_ITEMS = 40  # of a list of names; all are in the JSON
AXES = {
    "turns": "turns an episode may have",
    "tokens": "tokens the policy may say in an episode",
    "seconds": "seconds an episode may take",
    "k": "k",
}
_SAYS = {
    "better": "is better than",
    "worse": "is worse than",
    "mixed": "is better in some environments and worse in others than",
    "not shown": "is not shown to differ from",
}


def lines(versus: Json) -> list[str]:
    """Return a verdict per comparison and its evidence, environment by environment."""
    text = []
    for contrast in versus["contrasts"]:
        text.append(sentence(contrast))
        for env, row in contrast["envs"].items():
            text += [f"  {line}" for line in env_lines(env, row)]
    return text


def sentence(contrast: Json) -> str:
    if contrast["same_policy"]:
        return f"{contrast['after']} is the same policy as {contrast['before']}"
    return f"{contrast['after']} {_SAYS[contrast['verdict']]} {contrast['before']}"


def env_lines(env: str, row: Json) -> list[str]:
    gain = row["difference"]
    test = "McNemar's exact test" if row["test"] == "mcnemar_exact" else "t"
    text = [
        f"{env}: {percent(row['before'])} -> {percent(row['after'])} %, {points(gain['mean'])}"
        f" points [{points(gain['low'])}, {points(gain['high'])}], p = {row['p_value']:.3g}"
        + (f" (Holm {row['p_adjusted']:.3g})" if row["p_adjusted"] != row["p_value"] else "")
        + f" by {test} over {row['num_clusters']} {row['clusters']}",
        f"{len(row['wins'])} items won, {row['num_ties']} tied, {len(row['losses'])} lost",
        f"the smallest difference {row['num_items']} items x {row['num_samples']} show in 4 of 5"
        f" cases: {percent(row['detectable'])} points",
    ]
    if row["verdict"] == "not shown" and row["needed_items"]:
        text.append(f"a difference like this one takes {row['needed_items']} items to show")
    return text


def table_markdown(versus: Json) -> str:
    """Return a table of every result against the first one, a column per environment."""
    envs = list(versus["results"][0]["envs"])
    rows = ["| | " + " | ".join(envs) + " |", "|---" * (1 + len(envs)) + "|"]
    first = versus["contrasts"][0]["envs"]
    cells = [f"{percent(first[env]['before'])} %" for env in envs]
    rows.append(f"| {_plain(versus['baseline'])} | " + " | ".join(cells) + " |")
    for contrast in versus["contrasts"]:
        cells = [_cell(contrast["envs"][env]) for env in envs]
        rows.append(f"| {_plain(contrast['after'])} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def files(versus: Json) -> dict[str, bytes]:
    """Return the figures as PNG and the page as HTML, by file name."""
    figures = {
        "differences.png": ("Differences", differences_png(versus)),
        **{f"{name}.png": (caption, png) for name, caption, png in _curve_figures(versus)},
    }
    sections = [
        notes_html([*map(sentence, versus["contrasts"]), *_notes(versus)]),
        _table(versus),
        *(figure_html(caption, png) for caption, png in figures.values()),
        *(
            _items(contrast, env, row)
            for contrast in versus["contrasts"]
            for env, row in contrast["envs"].items()
        ),
    ]
    title = " · ".join(result["name"] for result in versus["results"])
    page = page_html(title, [section for section in sections if section]).encode()
    return {**{name: png for name, (_, png) in figures.items()}, PAGE: page}


def differences_png(versus: Json) -> bytes:
    """Draw each difference with its interval; grey: too small to be shown with these items."""
    from matplotlib.figure import Figure

    rows = [
        (f"{contrast['after']}\n{env}", row)
        for contrast in versus["contrasts"]
        for env, row in contrast["envs"].items()
    ]
    figure = Figure(figsize=(8.0, 1.2 + 0.62 * len(rows)), facecolor="white")
    axes = figure.subplots()
    style(axes, grid="x")
    for y, (_, row) in enumerate(rows):
        gain, room = row["difference"], 100 * row["detectable"]
        axes.plot([-room, room], [y, y], color="#e3e7eb", linewidth=9, zorder=1)
        colour = {"better": COLOURS[3], "worse": COLOURS[2]}.get(row["verdict"], MUTED)
        axes.plot([100 * gain["low"], 100 * gain["high"]], [y] * 2, color=colour, zorder=2)
        axes.plot(100 * gain["mean"], y, "o", color=colour, zorder=3)
    axes.axvline(0, color=MUTED, linewidth=1)
    axes.set_yticks(range(len(rows)), [_drawn(name) for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"points of success over {_drawn(versus['baseline'])}")
    return png_of(figure)


def curves_png(named: Sequence[tuple[str, Json]], axis: str) -> bytes:
    """Draw several policies in one figure; the bands are intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.8), facecolor="white")
    axes = figure.subplots()
    style(axes)
    for number, (name, curve) in enumerate(named):
        colour = COLOURS[1:][number % (len(COLOURS) - 1)]
        mean, low, high = (
            [100 * estimate[part] for estimate in curve["success"]]
            for part in ("mean", "low", "high")
        )
        axes.plot(curve["budgets"], mean, color=colour, label=_drawn(name), drawstyle="steps-post")
        axes.fill_between(curve["budgets"], low, high, color=colour, alpha=0.12, step="post")
    axes.set_ylim(0, 100)
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel("success, %")
    axes.legend(frameon=False, fontsize=8)
    return png_of(figure)


def _curve_figures(versus: Json) -> list[tuple[str, str, bytes]]:
    """Return (file name without .png, caption, PNG) per environment and axis, if it has curves."""
    figures = []
    for env in versus["results"][0]["envs"]:
        by_name = [(result["name"], result["envs"][env]) for result in versus["results"]]
        for axis in ("turns", "tokens", "seconds"):
            named = [
                (name, curve)
                for name, numbers in by_name
                for curve in numbers["curves"]
                if curve["axis"] == axis and len(curve["budgets"]) > 1
            ]
            if named:
                caption = f"{env}: success against {AXES[axis]}"
                figures.append((f"{env}_{axis}", caption, curves_png(named, axis)))
        for kind in ("pass_at", "pass_hat"):
            named = [
                (name, _over_k(numbers["pass_curves"].get(kind, ()))) for name, numbers in by_name
            ]
            if all(len(curve["budgets"]) > 1 for _, curve in named):
                sign = "pass@k" if kind == "pass_at" else "pass^k"
                figures.append((f"{env}_{kind}", f"{env}: {sign}", curves_png(named, "k")))
    return figures


def _over_k(rows: Sequence[Any]) -> Json:
    known = [(k, row) for k, row in enumerate(rows, 1) if row is not None]
    return {"budgets": [k for k, _ in known], "success": [row for _, row in known]}


def _notes(versus: Json) -> list[str]:
    notes = [
        f"Paired item by item; differences in points of success, {100 * versus['confidence']:g} %"
        " intervals. A verdict is what stays after Holm's correction over environments."
    ]
    for result in versus["results"]:
        for env, numbers in result["envs"].items():
            if numbers["no_turns_curve"]:
                notes.append(f"No curve against turns for {env}: {numbers['no_turns_curve']}.")
            cut = next((c["cut_otherwise"] for c in numbers["curves"] if c["axis"] == "turns"), 0.0)
            if cut:
                notes.append(
                    f"{result['name']}, {env}: {percent(cut)} % of the episodes were cut by another"
                    " limit than turns; more turns would not have helped these."
                )
    return list(dict.fromkeys(notes))


def _table(versus: Json) -> str:
    head = "".join(
        f"<th>{name}</th>"
        for name in (
            *("environment", "before", "after", "points", "p (Holm)", "won / tied / lost"),
            *("detectable", "items needed", "verdict"),
        )
    )
    body = "".join(
        f'<tr><th scope="row">{escape(contrast["after"])}</th><td>{escape(env)}</td>'
        f"<td>{percent(row['before'])}</td><td>{percent(row['after'])}</td>"
        f"<td>{_range(row['difference']).replace(' [', '<br>[')}</td>"
        f"<td>{row['p_value']:.3g}<br>({row['p_adjusted']:.3g})</td>"
        f"<td>{len(row['wins'])} / {row['num_ties']} / {len(row['losses'])}</td>"
        f"<td>{percent(row['detectable'])}</td><td>{row['needed_items'] or '–'}</td>"
        f"<td>{escape(row['verdict'])}</td></tr>"
        for contrast in versus["contrasts"]
        for env, row in contrast["envs"].items()
    )
    return (
        f"<section><h2>Against {escape(versus['baseline'])}</h2><div"
        f' class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody>'
        "</table></div></section>"
    )


def _items(contrast: Json, env: str, row: Json) -> str:
    """Return HTML with the items won and lost and the families' gains; empty if there are none."""
    parts = []
    for title, names in (("won", row["wins"]), ("lost", row["losses"])):
        if names:
            more = f" and {len(names) - SHOWN_ITEMS} more" if len(names) > SHOWN_ITEMS else ""
            shown = escape(", ".join(names[:SHOWN_ITEMS]))
            parts.append(f"<dt>{title}</dt><dd>{shown}{more}</dd>")
    for family, gain in row["by_family"].items():
        parts.append(f"<dt>{escape(family)}</dt><dd>{points(gain)} points</dd>")
    if not parts:
        return ""
    title = f"{contrast['after']}, {env}"
    return f"<section><h2>{escape(title)}</h2><dl>{''.join(parts)}</dl></section>"


def _range(gain: Json) -> str:
    return f"{points(gain['mean'])} [{points(gain['low'])}, {points(gain['high'])}]"


def _cell(row: Json) -> str:
    mark = {"better": " better", "worse": " worse"}.get(row["verdict"], "")
    return f"{percent(row['after'])} % ({_range(row['difference'])}){mark}"


def _plain(name: str) -> str:
    return label(name).replace("|", "\\|")


def _drawn(text: str) -> str:
    """Return the text with dollar signs escaped: matplotlib would read formulas between them."""
    return text.replace("$", "\\$")
