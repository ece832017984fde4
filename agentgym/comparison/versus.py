"""Comparison of evaluation results: each one against the first one, and success as a function of an
episode's budget; as JSON types, and from these as lines, figures and one page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from agentgym.comparison.figures import COLOURS, Figure, lines_figure
from agentgym.config import ConfigError, RunConfig
from agentgym.evaluation.paired import (
    Curve,
    Decision,
    Incomparable,
    align,
    by_turns,
    compare,
    detectable_with,
    obstacle,
    within,
)
from agentgym.evaluation.policies import PolicyName
from agentgym.evaluation.record import EPISODES, find, read_episodes
from agentgym.evaluation.report import GRID, MUTED, drawn, panels, png_of, svg_of
from agentgym.evaluation.result import RESULT, Result, ResultError, Slot
from agentgym.evaluation.stored import NumbersChanged, stored_result
from agentgym.pages import gain, percent, points, single_page
from agentgym.pipeline.contenders import commit_of
from agentgym.pipeline.table import open_store
from agentgym.records import RecordError
from agentgym.store.manifest import BlobMissing, DigestMismatch, Manifest
from agentgym.store.runstore import RunStore
from agentgym.tracking.markdown import literal, markdown

SCHEMA_VERSION = 1
ITEMS = (100, 200, 500)  # numbers of items for which the smallest detectable difference is reported
LOOKED_AT = 50  # episodes searched for a mention of the horizon


@dataclass(frozen=True)
class NamedResult:
    """A result and its name in the comparison."""

    name: str
    result: Result
    folder: Path | None = None  # of its files


def find_result(word: str, cfg: RunConfig) -> NamedResult:
    """Return the result that `word` names: the beginning of an evaluation's digest; a step of a run
    (`:stage-3` or `RUN:stage-3`: the run's own evaluation of it); or a folder or its result.json.
    Files outside `evaluations` of the state folder are not checked, and their names state this.
    Errors: ConfigError, also for damaged episodes.
    """
    path, files = Path(word), cfg.state_dir / "evaluations"
    try:
        if path.name == RESULT or (path.is_dir() and (path / RESULT).is_file()):
            folder = path.parent if path.name == RESULT else path
            if folder.resolve().parent != files.resolve():
                loaded = Result.load(path)
                name = f"{_name(loaded, folder.name)}, not checked: a file"
                return NamedResult(name, loaded, folder)
            word = folder.name
        store = open_store(cfg)
        head = _of_step(cfg, store, word) if ":" in word else find(store, word)
        result, folder = stored_result(store, head), files / head.key[:12]
        return NamedResult(_name(result, folder.name), result, folder if folder.is_dir() else None)
    except (ResultError, NumbersChanged, BlobMissing, DigestMismatch, RecordError) as error:
        raise ConfigError(f"{word}: {error}") from None


def _name(result: Result, location: str) -> str:
    return f"{result.about.get('policy') or 'a policy'} ({location})"


def _of_step(cfg: RunConfig, store: RunStore, word: str) -> Manifest:
    """Return the run's own newest evaluation of a step. word: RUN:STEP or :STEP.
    Errors: ConfigError if there is none.
    """
    name = PolicyName.parse(word)
    weights = commit_of(cfg, store, name.name, run=name.of)
    for head in reversed(store.heads(f"evaluate-{name.name}")):
        if head.done and weights.digest in head.parents.values():
            return head
    raise ConfigError(f"{word} has no evaluation of its run; `agentgym evaluate {word}` makes one")


def versus(named: Sequence[NamedResult], *, confidence: float | None = None) -> dict[str, Any]:
    """Return the comparison of every result with the first one, as JSON types.
    Keys: schema_version, confidence, baseline (name of the first), results, contrasts.
    confidence: None: the protocol's. Errors: ConfigError for fewer than two results, one with too
    low coverage, or two that cannot be compared, for example because they played other items.
    """
    if len(named) < 2:
        raise ConfigError("a comparison needs two results or more")
    first, *others = named
    level = confidence or float(first.result.identity["protocol"].get("confidence", 0.95))
    for entry in named:
        floor = float(entry.result.about.get("min_coverage", 0.0))
        if entry.result.coverage < floor - 1e-9:
            raise ConfigError(
                f"{entry.name} is invalid: coverage {entry.result.coverage:.1%} is below"
                f" {floor:.1%}; see to the environment and run `agentgym evaluate` again"
            )
    contrasts = []
    for other in others:
        try:
            decisions = compare(align(first.result, other.result), confidence=level)
        except (Incomparable, ValueError) as error:
            raise ConfigError(f"{first.name} and {other.name}: {error}") from None
        contrasts.append(_contrast(first, other, decisions, level))
    return {
        "schema_version": SCHEMA_VERSION,
        "confidence": level,
        "baseline": first.name,
        "results": [_result_json(entry, level) for entry in named],
        "contrasts": contrasts,
    }


def _contrast(
    first: NamedResult, other: NamedResult, decisions: dict[str, Decision], confidence: float
) -> dict[str, Any]:
    return {
        "before": first.name,
        "after": other.name,
        "same_policy": first.result.identity["policy"] == other.result.identity["policy"],
        "verdict": overall([decision.verdict for decision in decisions.values()]),
        "envs": {
            env: {
                **asdict(decision),
                "detectable_with": {str(n): detectable_with(decision, n) for n in ITEMS},
            }
            for env, decision in decisions.items()
        },
    }


def overall(verdicts: Sequence[str]) -> str:
    """Return `better` or `worse` if that is the only one in `verdicts`, `mixed` if both are, else
    `not shown`, which does not count.
    """
    shown = set(verdicts) - {"not shown"}
    return "mixed" if len(shown) == 2 else next(iter(shown), "not shown")


def _result_json(named: NamedResult, confidence: float) -> dict[str, Any]:
    result = named.result
    return {
        "name": named.name,
        "digest": result.digest,
        "coverage": result.coverage,
        "envs": {
            env: {
                "summary": result.numbers[env]["summary"],
                "pass_curves": result.numbers[env].get("curves", {}),
                **_curves_json(named, env, confidence),
            }
            for env in result.envs
        },
    }


def _curves_json(named: NamedResult, env: str, confidence: float) -> dict[str, Any]:
    """Return the keys `curves`, success against an episode's budget as `curves` computes it, and
    `no_turns_curve`: why the curve against turns is left out (a text shown to the policy names its
    limit), or "".
    """
    max_turns = horizon_of(named.result, env)
    why = obstacle(_told(named, env), max_turns)
    shown = [
        asdict(curve)
        for curve in curves(named.result, env, max_turns, confidence)
        if curve is not None and not (why and curve.axis == "turns")
    ]
    return {"curves": shown, "no_turns_curve": why}


def horizon_of(result: Result, env: str) -> int:
    """Maximum number of turns by the protocol; if it has none, the turns of the longest episode."""
    for env_protocol in result.identity["protocol"]["envs"]:
        if env_protocol["env"]["name"] == env:
            return int(env_protocol["max_turns"])
    return max(slot.num_turns for slot in result.of(env))


def curves(result: Result, env: str, max_turns: int, confidence: float) -> list[Curve | None]:
    """Return success against turns, generated tokens and seconds; None for tokens or seconds if
    nothing succeeded or those of a success are unknown; an empty list if no sample counts.
    """
    sampled = sampled_slots(result.of(env))
    if not any(slot.counts for slot in sampled):
        return []
    usages = [slot.usage for slot in sampled]
    num_tokens = [float(u.output_tokens) if u.known["output"] else None for u in usages]
    seconds = [slot.wall_s or None for slot in sampled]
    return [
        by_turns(sampled, max_turns, confidence=confidence),
        within(sampled, num_tokens, "tokens", confidence=confidence),
        within(sampled, seconds, "seconds", confidence=confidence),
    ]


def sampled_slots(slots: Sequence[Slot]) -> list[Slot]:
    """Return the sampled slots of one environment; the greedy ones if there are no others."""
    return [slot for slot in slots if slot.sample] or list(slots)


def _told(named: NamedResult, env: str) -> Iterator[str]:
    """Yield texts shown to the policy: instructions; observations of up to LOOKED_AT episodes."""
    yield named.result.about.get("instructions", {}).get(env, "")
    folder = named.folder
    if folder is None or not (folder / EPISODES).is_file():
        return
    rows = (row for row in read_episodes(folder / EPISODES) if row["env"] == env)
    for row in islice(rows, LOOKED_AT):
        yield row["first_observation"]
        yield from (turn["observation"] for turn in row["turns"])


Json = Mapping[str, Any]  # the result of `versus`, or a part of it
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
    """Return lines of text: the verdict of each comparison, and its evidence by environment."""
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
    """Return a Markdown table: results by environment, with the differences to the first one."""
    envs = list(versus["results"][0]["envs"])
    first = versus["contrasts"][0]["envs"]
    lines = [[literal(versus["baseline"]), *(percent(first[env]["before"]) for env in envs)]]
    for contrast in versus["contrasts"]:
        cells = [_cell(contrast["envs"][env]) for env in envs]
        lines.append([literal(contrast["after"]), *cells])
    return markdown(["", *envs], lines, right=1) + "\n"


def files(versus: Json) -> dict[str, bytes]:
    """Return the figures as PNG and SVG and the page as HTML, by file name."""
    figures = [("differences", "Differences", differences_figure(versus)), *_curve_figures(versus)]
    pngs = {name: png_of(figure) for name, _, figure in figures}
    page = single_page(
        "versus.html",
        title=" · ".join(result["name"] for result in versus["results"]),
        notes=[*map(sentence, versus["contrasts"]), *_notes(versus)],
        versus=versus,
        figures=[(caption, pngs[name]) for name, caption, _ in figures],
        most=SHOWN_ITEMS,
    )
    svgs = {f"{name}.svg": svg_of(figure) for name, _, figure in figures}
    return {**{f"{name}.png": png for name, png in pngs.items()}, **svgs, PAGE: page}


def differences_figure(versus: Json) -> Figure:
    """Draw differences with intervals; a gray bar covers those too small to be detected."""
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
    return figure


def _curve_figures(versus: Json) -> list[tuple[str, str, Figure]]:
    """Return (file name without ending, caption, figure) of success by budget and by k for each
    environment.
    """
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
                figure = lines_figure({"": curves}, AXES[axis], stepped=True)
                figures.append((f"{env}_{axis}", caption, figure))
        for kind, sign in (("pass_at", "pass@k"), ("pass_hat", "pass^k")):
            curves = {n: _over_k(row["pass_curves"].get(kind, ())) for n, row in by_name.items()}
            if all(len(budgets) > 1 for budgets, _ in curves.values()):
                figure = lines_figure({"": curves}, "k", stepped=False)
                figures.append((f"{env}_{kind}", f"{env}: {sign}", figure))
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
