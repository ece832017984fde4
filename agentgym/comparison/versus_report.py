"""What `versus` found, for people: lines for a terminal, figures, and one page that needs no
network and runs no script.
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


def lines(found: Json) -> list[str]:
    """A verdict per comparison, and what it rests on, environment by environment."""
    told = []
    for contrast in found["contrasts"]:
        told.append(sentence(contrast))
        for env, each in contrast["envs"].items():
            told += [f"  {line}" for line in env_lines(env, each)]
    return told


def sentence(contrast: Json) -> str:
    if contrast["same_policy"]:
        return f"{contrast['after']} is the same policy as {contrast['before']}"
    return f"{contrast['after']} {_SAYS[contrast['verdict']]} {contrast['before']}"


def env_lines(env: str, each: Json) -> list[str]:
    gain = each["difference"]
    test = "McNemar's exact test" if each["test"] == "mcnemar_exact" else "t"
    told = [
        f"{env}: {percent(each['before'])} -> {percent(each['after'])} %, {points(gain['mean'])}"
        f" points [{points(gain['low'])}, {points(gain['high'])}], p = {each['p_value']:.3g}"
        + (f" (Holm {each['p_adjusted']:.3g})" if each["p_adjusted"] != each["p_value"] else "")
        + f" by {test} over {each['num_clusters']} {each['clusters']}",
        f"{len(each['wins'])} items won, {each['num_ties']} tied, {len(each['losses'])} lost",
        f"the smallest difference {each['num_items']} items x {each['num_samples']} show in 4 of 5"
        f" cases: {percent(each['detectable'])} points",
    ]
    if each["verdict"] == "not shown" and each["needed_items"]:
        told.append(f"a difference like this one takes {each['needed_items']} items to show")
    return told


def table_markdown(found: Json) -> str:
    """Every result against the first one, a column per environment."""
    envs = list(found["results"][0]["envs"])
    rows = ["| | " + " | ".join(envs) + " |", "|---" * (1 + len(envs)) + "|"]
    first = found["contrasts"][0]["envs"]
    cells = [f"{percent(first[env]['before'])} %" for env in envs]
    rows.append(f"| {_plain(found['baseline'])} | " + " | ".join(cells) + " |")
    for contrast in found["contrasts"]:
        cells = [_cell(contrast["envs"][env]) for env in envs]
        rows.append(f"| {_plain(contrast['after'])} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def files(found: Json) -> dict[str, bytes]:
    """The figures and the page, by file name."""
    figures = {
        "differences.png": ("Differences", differences_png(found)),
        **{f"{name}.png": (caption, png) for name, caption, png in _curve_figures(found)},
    }
    sections = [
        notes_html([*map(sentence, found["contrasts"]), *_notes(found)]),
        _table(found),
        *(figure_html(caption, png) for caption, png in figures.values()),
        *(
            _items(contrast, env, each)
            for contrast in found["contrasts"]
            for env, each in contrast["envs"].items()
        ),
    ]
    title = " · ".join(each["name"] for each in found["results"])
    page = page_html(title, [each for each in sections if each]).encode()
    return {**{name: png for name, (_, png) in figures.items()}, PAGE: page}


def differences_png(found: Json) -> bytes:
    """Each difference with its interval; grey: what this set could not have shown."""
    from matplotlib.figure import Figure

    rows = [
        (f"{contrast['after']}\n{env}", each)
        for contrast in found["contrasts"]
        for env, each in contrast["envs"].items()
    ]
    figure = Figure(figsize=(8.0, 1.2 + 0.62 * len(rows)), facecolor="white")
    axes = figure.subplots()
    style(axes, grid="x")
    for place, (_, each) in enumerate(rows):
        gain, room = each["difference"], 100 * each["detectable"]
        axes.plot([-room, room], [place, place], color="#e3e7eb", linewidth=9, zorder=1)
        colour = {"better": COLOURS[3], "worse": COLOURS[2]}.get(each["verdict"], MUTED)
        axes.plot([100 * gain["low"], 100 * gain["high"]], [place] * 2, color=colour, zorder=2)
        axes.plot(100 * gain["mean"], place, "o", color=colour, zorder=3)
    axes.axvline(0, color=MUTED, linewidth=1)
    axes.set_yticks(range(len(rows)), [_drawn(name) for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"points of success over {_drawn(found['baseline'])}")
    return png_of(figure)


def curves_png(named: Sequence[tuple[str, Json]], axis: str) -> bytes:
    """Several policies in one figure; the bands are intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.8), facecolor="white")
    axes = figure.subplots()
    style(axes)
    for number, (name, curve) in enumerate(named):
        colour = COLOURS[1:][number % (len(COLOURS) - 1)]
        mean, low, high = (
            [100 * each[part] for each in curve["success"]] for part in ("mean", "low", "high")
        )
        axes.plot(curve["budgets"], mean, color=colour, label=_drawn(name), drawstyle="steps-post")
        axes.fill_between(curve["budgets"], low, high, color=colour, alpha=0.12, step="post")
    axes.set_ylim(0, 100)
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel("success, %")
    axes.legend(frameon=False, fontsize=8)
    return png_of(figure)


def _curve_figures(found: Json) -> list[tuple[str, str, bytes]]:
    """(file name, caption, PNG) of each environment and axis that some result has."""
    figures = []
    for env in found["results"][0]["envs"]:
        own = [(each["name"], each["envs"][env]) for each in found["results"]]
        for axis in ("turns", "tokens", "seconds"):
            named = [
                (name, curve)
                for name, told in own
                for curve in told["curves"]
                if curve["axis"] == axis and len(curve["budgets"]) > 1
            ]
            if named:
                caption = f"{env}: success against {AXES[axis]}"
                figures.append((f"{env}_{axis}", caption, curves_png(named, axis)))
        for kind in ("pass_at", "pass_hat"):
            named = [(name, _over_k(told["pass_curves"].get(kind, ()))) for name, told in own]
            if all(len(curve["budgets"]) > 1 for _, curve in named):
                sign = "pass@k" if kind == "pass_at" else "pass^k"
                figures.append((f"{env}_{kind}", f"{env}: {sign}", curves_png(named, "k")))
    return figures


def _over_k(rows: Sequence[Any]) -> Json:
    known = [(k, row) for k, row in enumerate(rows, 1) if row is not None]
    return {"budgets": [k for k, _ in known], "success": [row for _, row in known]}


def _notes(found: Json) -> list[str]:
    notes = [
        f"Paired item by item; differences in points of success, {100 * found['confidence']:g} %"
        " intervals. A verdict is what stays after Holm's correction over environments."
    ]
    for each in found["results"]:
        for env, own in each["envs"].items():
            if own["no_turns_curve"]:
                notes.append(f"No curve against turns for {env}: {own['no_turns_curve']}.")
            cut = next((c["cut_otherwise"] for c in own["curves"] if c["axis"] == "turns"), 0.0)
            if cut:
                notes.append(
                    f"{each['name']}, {env}: {percent(cut)} % of the episodes were cut by another"
                    " limit than turns; more turns would not have helped these."
                )
    return list(dict.fromkeys(notes))


def _table(found: Json) -> str:
    head = "".join(
        f"<th>{name}</th>"
        for name in (
            *("environment", "before", "after", "points", "p (Holm)", "won / tied / lost"),
            *("detectable", "items needed", "verdict"),
        )
    )
    body = "".join(
        f'<tr><th scope="row">{escape(contrast["after"])}</th><td>{escape(env)}</td>'
        f"<td>{percent(each['before'])}</td><td>{percent(each['after'])}</td>"
        f"<td>{_range(each['difference']).replace(' [', '<br>[')}</td>"
        f"<td>{each['p_value']:.3g}<br>({each['p_adjusted']:.3g})</td>"
        f"<td>{len(each['wins'])} / {each['num_ties']} / {len(each['losses'])}</td>"
        f"<td>{percent(each['detectable'])}</td><td>{each['needed_items'] or '–'}</td>"
        f"<td>{escape(each['verdict'])}</td></tr>"
        for contrast in found["contrasts"]
        for env, each in contrast["envs"].items()
    )
    return (
        f"<section><h2>Against {escape(found['baseline'])}</h2><div"
        f' class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody>'
        "</table></div></section>"
    )


def _items(contrast: Json, env: str, each: Json) -> str:
    """The items by name, and the families."""
    parts = []
    for title, names in (("won", each["wins"]), ("lost", each["losses"])):
        if names:
            more = f" and {len(names) - SHOWN_ITEMS} more" if len(names) > SHOWN_ITEMS else ""
            shown = escape(", ".join(names[:SHOWN_ITEMS]))
            parts.append(f"<dt>{title}</dt><dd>{shown}{more}</dd>")
    for family, gain in each["by_family"].items():
        parts.append(f"<dt>{escape(family)}</dt><dd>{points(gain)} points</dd>")
    if not parts:
        return ""
    title = f"{contrast['after']}, {env}"
    return f"<section><h2>{escape(title)}</h2><dl>{''.join(parts)}</dl></section>"


def _range(gain: Json) -> str:
    return f"{points(gain['mean'])} [{points(gain['low'])}, {points(gain['high'])}]"


def _cell(each: Json) -> str:
    mark = {"better": " better", "worse": " worse"}.get(each["verdict"], "")
    return f"{percent(each['after'])} % ({_range(each['difference'])}){mark}"


def _plain(name: str) -> str:
    return label(name).replace("|", "\\|")


def _drawn(text: str) -> str:
    """As it stands: matplotlib would read formulas between dollar signs."""
    return text.replace("$", "\\$")
