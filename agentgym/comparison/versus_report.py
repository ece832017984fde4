"""Presentation of `versus`: lines for a terminal, figures, and one page that needs no network and
runs no script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.comparison.figures import COLOURS, lines_png
from agentgym.comparison.overview import literal, markdown
from agentgym.evaluation.report import GRID, MUTED, drawn, panels, png_of
from agentgym.pages import gain, percent, points, single_page

Json = Mapping[str, Any]
PAGE = "comparison.html"
SHOWN_ITEMS = 40  # of a list of names; all are in the JSON
AXES = {
    "turns": "turns an episode may have",
    "tokens": "tokens the policy may say in an episode",
    "seconds": "seconds an episode may take",
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
    mean, low, high = (row["difference"][part] for part in ("mean", "low", "high"))
    test = "McNemar's exact test" if row["test"] == "mcnemar_exact" else "t"
    text = [
        f"{env}: {percent(row['before'], '')} -> {percent(row['after'])}, {points(mean)} points"
        f" [{points(low)}, {points(high)}], p = {row['p_value']:.3g}"
        + (f" (Holm {row['p_adjusted']:.3g})" if row["p_adjusted"] != row["p_value"] else "")
        + f" by {test} over {row['num_clusters']} {row['clusters']}",
        f"{len(row['wins'])} items won, {row['num_ties']} tied, {len(row['losses'])} lost",
        f"the smallest difference {row['num_items']} items x {row['num_samples']} show in 4 of 5"
        f" cases: {percent(row['detectable'], '')} points",
    ]
    if row["verdict"] == "not shown" and row["needed_items"]:
        text.append(f"a difference like this one takes {row['needed_items']} items to show")
    return text


def table_markdown(versus: Json) -> str:
    """Return a table of every result against the first one, a column per environment."""
    envs = list(versus["results"][0]["envs"])
    first = versus["contrasts"][0]["envs"]
    lines = [[literal(versus["baseline"]), *(percent(first[env]["before"]) for env in envs)]]
    for contrast in versus["contrasts"]:
        cells = [_cell(contrast["envs"][env]) for env in envs]
        lines.append([literal(contrast["after"]), *cells])
    return markdown(["", *envs], lines, right=1) + "\n"


def files(versus: Json) -> dict[str, bytes]:
    """Return the figures as PNG and the page as HTML, by file name."""
    figures = {
        "differences.png": ("Differences", differences_png(versus)),
        **{f"{name}.png": (caption, png) for name, caption, png in _curve_figures(versus)},
    }
    page = single_page(
        "versus.html",
        title=" · ".join(result["name"] for result in versus["results"]),
        notes=[*map(sentence, versus["contrasts"]), *_notes(versus)],
        versus=versus,
        figures=figures.values(),
        most=SHOWN_ITEMS,
    )
    return {**{name: png for name, (_, png) in figures.items()}, PAGE: page}


def differences_png(versus: Json) -> bytes:
    """Draw each difference with its interval; grey: too small to be shown with these items."""
    rows = [
        (f"{contrast['after']}\n{env}", row)
        for contrast in versus["contrasts"]
        for env, row in contrast["envs"].items()
    ]
    figure, ((axes,),) = panels((8.0, 1.2 + 0.62 * len(rows)), grid="x")
    for y, (_, row) in enumerate(rows):
        mean, low, high = (100 * row["difference"][part] for part in ("mean", "low", "high"))
        room = 100 * row["detectable"]
        axes.plot([-room, room], [y, y], color=GRID, linewidth=9, zorder=1)
        colour = {"better": COLOURS[3], "worse": COLOURS[2]}.get(row["verdict"], MUTED)
        axes.plot([low, high], [y] * 2, color=colour, zorder=2)
        axes.plot(mean, y, "o", color=colour, zorder=3)
    axes.axvline(0, color=MUTED, linewidth=1)
    axes.set_yticks(range(len(rows)), [drawn(name) for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"points of success over {drawn(versus['baseline'])}")
    return png_of(figure)


def _curve_figures(versus: Json) -> list[tuple[str, str, bytes]]:
    """Return (file name without .png, caption, PNG) per environment and axis, if it has curves."""
    figures = []
    for env in versus["results"][0]["envs"]:
        by_name = {result["name"]: result["envs"][env] for result in versus["results"]}
        for axis in ("turns", "tokens", "seconds"):
            curves = {
                name: (curve["budgets"], curve["success"])
                for name, numbers in by_name.items()
                for curve in numbers["curves"]
                if curve["axis"] == axis and len(curve["budgets"]) > 1
            }
            if curves:
                caption = f"{env}: success against {AXES[axis]}"
                png = lines_png({"": curves}, AXES[axis], stepped=True)
                figures.append((f"{env}_{axis}", caption, png))
        for kind, sign in (("pass_at", "pass@k"), ("pass_hat", "pass^k")):
            curves = {
                name: _over_k(numbers["pass_curves"].get(kind, ()))
                for name, numbers in by_name.items()
            }
            if all(len(budgets) > 1 for budgets, _ in curves.values()):
                png = lines_png({"": curves}, "k", stepped=False)
                figures.append((f"{env}_{kind}", f"{env}: {sign}", png))
    return figures


def _over_k(rows: Sequence[Any]) -> tuple[list[int], list[Json]]:
    known = {k: row for k, row in enumerate(rows, 1) if row is not None}
    return list(known), list(known.values())


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
                    f"{result['name']}, {env}: {percent(cut)} of the episodes were cut by another"
                    " limit than turns; more turns would not have helped these."
                )
    return list(dict.fromkeys(notes))


def _cell(row: Json) -> str:
    mark = {"better": " better", "worse": " worse"}.get(row["verdict"], "")
    return f"{percent(row['after'])} ({gain(row['difference'])}){mark}"
