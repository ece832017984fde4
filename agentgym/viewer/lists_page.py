"""Pages that list runs and episodes."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request

from agentgym.evaluation.record import STEP as EVALUATION
from agentgym.pages import Pages
from agentgym.viewer.bodies import address_of
from agentgym.viewer.decisions import judged
from agentgym.viewer.index import RANGE_COLUMNS, config_of
from agentgym.viewer.query import Query
from agentgym.viewer.viewer import Viewer

COLUMNS = (  # sort key, title, CSS class
    ("item", "item", ""),
    ("", "outcome", ""),
    ("reward", "reward", "n"),
    ("advantage", "advantage", "n"),
    ("turns", "turns", "n"),
    ("tokens", "tokens", "n"),
    ("", "stage", ""),
    ("at", "step", "n"),
    ("version", "weights", "n"),
    ("", "family", ""),
    ("began", "began", ""),
)


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run, as the list of runs shows it."""

    key: str  # its name in the index
    group: str  # of GROUPS
    name: str  # of the run, or of the policy that an evaluation plays
    about: str
    created: float
    done: bool
    stopped: str | None  # why no process works on it; None: one does, or the run is done
    envs: list[str]
    episodes: int
    success: float | None  # of the final evaluation; None: there is none yet
    coverage: float | None  # share of the final evaluation's episodes that count
    left_out: int
    steps: list[sqlite3.Row]  # those with episodes, oldest first
    trains: bool
    query: Query
    left_out_query: Query


LEFT_OUT = ("env_error", "grader_error", "timeout", "interrupted")
GROUPS = {
    "runs": "Runs",
    "evaluations": "Evaluations",
    "gate": "Evaluations that the gate played to judge a version",
}


def add_lists(app: FastAPI, viewer: Viewer, pages: Pages) -> None:
    """Add the pages `/` and `/episodes`."""

    @app.get("/")
    def home() -> str:
        steps = viewer.bodies.steps()
        problems = [
            (f"{viewer.names.step(steps[row['step_id']])}, commit {row['seq']}", row["said"])
            for row in viewer.index.reader.execute("SELECT * FROM problems LIMIT 20")
            if row["step_id"] in steps
        ]
        if viewer.failure:
            problems.insert(0, ("the store", viewer.failure))
        return pages.render(
            "home.html",
            runs=run_rows(viewer, steps),
            groups=GROUPS,
            problems=problems,
            gone=[row for row in steps.values() if row["gone"]],
            total=f"{sum(row[-1] for row in viewer.lists.counts()):,}",
            indexing=viewer.indexing is not None,
            root=viewer.store.root,
            stamp=viewer.index.stamp,
            section="",
        )

    @app.get("/episodes")
    def episodes(request: Request) -> str:
        query = Query.parse(request.query_params.multi_items())
        return pages.render("episodes.html", **list_page(viewer, query))


def list_page(viewer: Viewer, query: Query) -> dict[str, Any]:
    """Return the template context of one page of a query's list of episodes. Errors: BadQuery."""
    page = viewer.lists.page(query)
    form_fields = ("q", "item", *RANGE_COLUMNS, "after", "before")
    return {
        "page": page,
        "query": query,
        "words": query.words,
        "columns": COLUMNS,
        "ranges": list(RANGE_COLUMNS),
        "kept": [pair for pair in query.pairs() if pair[0] not in form_fields],
        "steps": viewer.bodies.steps(),
        "names": viewer.names,
        "address_of": address_of,
        "following": replace(query, after=page.following, before=""),
        "preceding": replace(query, after="", before=page.preceding),
        "export": f"/export.jsonl?{query.first().text}",
        "bundle": f"/bundle.zip?{query.first().text}",
        "stamp": viewer.index.stamp,
        "section": "episodes",
    }


def run_rows(viewer: Viewer, steps: Mapping[int, sqlite3.Row]) -> list[RunRow]:
    """Return a row per run with episodes, newest first; only those of `viewer.runs` if it has any.
    steps: from `Bodies.steps()`.
    """
    reader = viewer.index.reader
    counts: dict[int, list[tuple[str, int, int]]] = {}
    for step_id, env, _, _, status, _, _, _, n in viewer.lists.counts():
        left_out = n if status in LEFT_OUT else 0
        counts.setdefault(step_id, []).append((env, n, left_out))
    members: dict[str, list[int]] = {}
    for row in reader.execute("SELECT run, step_id FROM run_steps"):
        members.setdefault(row["run"], []).append(row["step_id"])
    runs, names, played_by_gate = [], viewer.names, judged(reader)
    for row in reader.execute("SELECT * FROM runs ORDER BY created DESC"):
        run, group = row["name"], "runs"
        if viewer.runs and not run.startswith(viewer.runs):
            continue
        run_steps = sorted((steps[step] for step in members[run]), key=lambda s: s["created"])
        run_counts = [count for step in run_steps for count in counts.get(step["id"], ())]
        if not run_counts:  # the run has no episodes
            continue
        if (last := run_steps[-1])["name"] == EVALUATION:
            group = "gate" if last["key"] in played_by_gate else "evaluations"
        success, coverage = _final_evaluation(run_steps)
        runs.append(
            RunRow(
                run,
                group,
                run if group == "runs" else names.result(last),
                names.about.get(run, ""),
                row["created"],
                bool(row["done"]),
                None if row["done"] else viewer.why_stopped(run),
                sorted({count[0] for count in run_counts}),
                sum(count[1] for count in run_counts),
                success,
                coverage,
                sum(count[2] for count in run_counts),
                [step for step in run_steps if step["id"] in counts],
                any("algorithm" in config_of(step["config"]) for step in run_steps),
                Query({"run": (run,)}),
                Query({"run": (run,), "status": LEFT_OUT}),
            )
        )
    return runs


def _final_evaluation(steps: Sequence[sqlite3.Row]) -> tuple[float | None, float | None]:
    """Return (success, coverage) of the newest weights' finished evaluation.
    The success is the mean over environments, None if no rate was measured. Without a finished
    evaluation both are None.
    """
    finished = [
        (results.get("global_step", 0), step["created"], results)
        for step in steps
        if step["done"] and "coverage" in (results := config_of(step["results"]))
    ]
    if not finished:
        return None, None
    results = max(finished, key=lambda evaluation: evaluation[:2])[2]
    summaries = list(results["envs"].values()) if "envs" in results else [results["summary"]]
    means = [mean for evaluation in summaries if (mean := _mean(evaluation)) is not None]
    return (sum(means) / len(means) if means else None), float(results["coverage"])


def _mean(summary: Mapping[str, Any]) -> float | None:
    """Return a summary's mean success: of samples if measured, else greedy; None without either."""
    sampled = next((name for name in summary if name.startswith("avg_at_")), "greedy")
    interval = summary.get(sampled) or summary.get("greedy")
    return float(interval["mean"]) if interval else None
