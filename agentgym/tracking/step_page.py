"""The MLflow page of a finished step, made from its commits, apart from the points.

It has data, the checkpoint as a logged model, a table of outcomes, traces and a description.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from agentgym.config import RunConfig
from agentgym.pages import estimate, gain, label
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.store.manifest import Manifest, sha256
from agentgym.store.runstore import RunStore
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.points import Point
from agentgym.tracking.saved_view import NOTE, NOTE_OURS, RESULT, VIEWS, is_replaceable, link_to
from agentgym.tracking.step_data import EpisodeTrace, drawn, inputs_of, trace_of
from agentgym.types import Trajectory
from envs.plain import plain

RESULT_FILE, TABLE = "result.json", "outcomes_table.json"  # an evaluation's; MLflow's table
EVALUATED = "eval/"  # metrics that a logged model gets
MAX_NOTE = 7000  # characters; MLflow takes 8000
MANIFEST = "mlflow.agentgym.manifest"  # tag of a step's run: digest of its last commit
STORE_KEY = "step_key"  # tag of a logged model: digest of the checkpoint


def show_step(
    cfg: RunConfig,
    store: RunStore,
    tracker: Tracker,
    manifest: Manifest,
    points: Sequence[Point],
    runs: tuple[str, str],
    title: str,
) -> None:
    """Write the MLflow page of a finished step: its data, traces and description, and for an
    evaluation the checkpoint as a logged model and a table of outcomes.

    runs: MLflow runs of the pipeline and of the step; points: the points of the last commit.
    title: begins the description. The data of a step that made the splits is the pipeline's, too.
    """
    parent_id, child_id = runs
    data = inputs_of(cfg, store, manifest)
    tracker.log_inputs(child_id, data)
    if "splits.json" in manifest.blobs:
        tracker.log_inputs(parent_id, data)
    if is_evaluated(manifest):
        step = str(manifest.results["checkpoint"])
        digest = manifest.parents[step]
        made_by = tracker.find_run({"mlflow.parentRunId": parent_id, MANIFEST: digest})
        tags = {STORE_KEY: digest, "step": step, "store": store.root}
        params = checkpoint_params(manifest)
        model_id = tracker.checkpoint_model(step, made_by or child_id, tags, params)
        of_model = [
            replace(p, metrics={k: v for k, v in p.metrics.items() if k.startswith(EVALUATED)})
            for p in points[-1:]
        ]
        dataset = (data[0].name, data[0].digest)
        tracker.deliver(child_id, of_model, model_id=model_id, dataset=dataset)
        tracker.log_artifacts(child_id, {TABLE: table_of(store, manifest)})
        tracker.set_tags(child_id, table_tags([TABLE]))
    if cfg.tracking.traces:
        for trace in traces_of(store, manifest, cfg.tracking.traces):
            tracker.log_trace(trace, child_id)
    describe(tracker, child_id, note_of_step(manifest, title))


def checkpoint_params(evaluation: Manifest) -> dict[str, str]:
    """Return the params of an evaluated checkpoint's logged model: `step` and `global_step`."""
    results = evaluation.results
    return {"step": str(results["checkpoint"]), "global_step": str(results["global_step"])}


def note_tags(note: str) -> dict[str, str]:
    """Return the tags with a description and its digest, which shows if a person changed it."""
    return {NOTE: plain(note), NOTE_OURS: sha256(plain(note).encode())}


def traces_of(store: RunStore, manifest: Manifest, count: int) -> list[EpisodeTrace]:
    """Return the traces of up to `count` episodes, drawn from a step's last commit that has any."""
    last, episodes = episodes_of(store, manifest)
    return [trace_of(last, episode) for episode in drawn(episodes, manifest.key, count)]


def episodes_of(store: RunStore, manifest: Manifest) -> tuple[Manifest, list[Trajectory]]:
    """Return (a step's last commit with episodes, its episodes); (manifest, []) without one."""
    for commit in reversed(store.history(manifest.step, manifest.key)):
        if TRAJECTORIES in commit.records:
            return commit, decode_trajectories(store.read(commit, TRAJECTORIES))
    return manifest, []


def is_evaluated(manifest: Manifest) -> bool:
    """Return True for the step of an evaluation, whose page also has a model and a table."""
    return RESULT_FILE in manifest.blobs and "summary" in manifest.results


def result_points(manifest: Manifest) -> list[Point]:
    """Return the `result_metrics` of a finished evaluation's step, as a point; [] for others."""
    if not (manifest.done and is_evaluated(manifest)):
        return []
    _, success, gained = _average(manifest.results)
    metrics = result_metrics(success["mean"], gained)
    step, time_ms = int(manifest.results["global_step"]), round(1000 * manifest.created_at)
    return [Point(step, time_ms, metrics)]


def result_metrics(success: float, gained: Mapping[str, float] | None) -> dict[str, float]:
    """Return an evaluation's result as metrics: shares of 1, rounded to four decimals.
    gained: the gain over its baseline, as mean, low and high; None: not compared.
    """
    row = {"success": success}
    if gained is not None:
        row |= {"gain": gained["mean"], "gain_low": gained["low"], "gain_high": gained["high"]}
    return {f"{RESULT}{name}": round(value, 4) for name, value in row.items()}


def _average(results: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """Return the name of an evaluation's success averaged over samples, it, and its gain or None,
    both with intervals.
    """
    key = next(name for name in results["summary"] if name.startswith("avg_at_"))
    return key, results["summary"][key], results.get("paired", {}).get(key)


def table_of(store: RunStore, manifest: Manifest) -> bytes:
    """Return the JSON text of `outcomes_table` for an evaluation's commit."""
    table = outcomes_table(json.loads(store.read(manifest, RESULT_FILE)))
    return json.dumps(table, separators=(",", ":")).encode()


def table_tags(paths: Iterable[str]) -> dict[str, str]:
    """Return the tag of a run that makes MLflow's UI open those of its artifacts as tables whose
    names end in _table.json.
    """
    tables = [{"path": p, "type": "table"} for p in paths if p.endswith("_table.json")]
    return {"mlflow.loggedArtifacts": json.dumps(tables)}


def successes(result: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Return item's id -> success (0 or 1) of each of its episodes, the greedy one first.
    None: the episode does not count. result: the content of RESULT_FILE.
    """
    rows: dict[str, list[float | None]] = {}
    for row in result["slots"]:
        slot = dict(zip(result["columns"], row, strict=True))
        counts = slot["outcome"] in ("scored", "truncated")
        rows.setdefault(slot["item_id"], []).append(float(slot["success"]) if counts else None)
    return rows


def outcomes_table(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result's table in MLflow's format: `columns`, and `data` with a row per item."""
    return {
        "columns": ["item", "greedy", "samples solved", "samples"],
        "data": [
            [item, greedy, sum(success or 0.0 for success in samples), len(samples)]
            for item, (greedy, *samples) in successes(result).items()
        ],
    }


def describe(tracker: Tracker, run_id: str, note: str) -> None:
    """Set a run's description to `note`, unless a person wrote or changed the present one."""
    tags = tracker.client.get_run(run_id).data.tags
    if is_replaceable(tags.get(NOTE, ""), plain(note), tags.get(NOTE_OURS, "")):
        tracker.set_tags(run_id, note_tags(note))


def note_of_step(manifest: Manifest, title: str) -> str:
    """Return a step's description: an evaluation's result, title, commit, and the interval of each
    success rate.
    """
    lines = [f"**{title}** · commit {manifest.seq}, manifest `{manifest.digest[:12]}`"]
    results = manifest.results
    if isinstance(results.get("summary"), Mapping):
        lines = [_result(results), "", *lines, "", *_numbers(results)]
    return "\n".join(lines)


def note_of_pipeline(
    cfg: RunConfig, tracker: Tracker, report: Manifest, run_key: str, parent_id: str
) -> str:
    """Return the description of a pipeline's run: its result, its settings, its numbers before and
    after training, the move of the alias, links relative to the server's address, and two commands.
    report: the commit of the pipeline's report.
    """
    horizon = " > ".join(map(str, cfg.horizon.max_turns))
    lines = [
        _result(report.results["after"]),
        "",
        f"Run `r{run_key[:12]}`: recipe {cfg.algorithm.recipe}, on {cfg.env_names}, horizon"
        f" {horizon}, seed {cfg.seed}",
        "",
    ]
    for title in ("before", "after"):
        lines += [f"**{title}**", "", *_numbers(report.results[title]), ""]
    registered = report.results["model"]
    model, version = str(registered["model"]), str(registered["version"])
    here = f"#/experiments/{tracker.experiment_id}"
    lines += [
        f"**{registered['alias']}** {registered['told']}",
        "",
        f"- [report]({here}/runs/{parent_id}/artifacts/report.html)",
        f"- [charts]({link_to(tracker.experiment_id, VIEWS[0])})",
        f"- [{model} version {version}](#/models/{model.replace(' ', '%20')}/versions/{version})",
        f"- every episode: `agentgym view r{run_key[:12]}`; is it true:"
        f" `agentgym audit r{run_key[:12]}`",
    ]
    return "\n".join(lines)


def note_of_comparison(run_id: str, text: str, files: Iterable[str]) -> str:
    """Return a comparison's description: `text`, cut so that all fits MAX_NOTE, then its figures.
    files: paths of the run's artifacts; those that end in .png are the figures.
    """
    pictures = [
        f"![{path}](get-artifact?path={quote(path)}&run_uuid={run_id})"
        for path in sorted(files)
        if path.endswith(".png")
    ]
    lines, room = [], MAX_NOTE - sum(map(len, pictures))
    for line in text.splitlines():
        room -= len(line) + 1
        if room < 0:
            lines += ["", "The rest is among the artifacts."]
            break
        lines.append(line)
    return "\n\n".join(["\n".join(lines), *pictures])


def _result(results: Mapping[str, Any]) -> str:
    """Return an evaluation's success and its gain over its baseline in one line of Markdown."""
    key, success, gained = _average(results)
    compared = "" if gained is None else f", gain {gain(gained)} points"
    counted = f"{label(key)}, {results['num_items']} items"
    return f"**Success {estimate(success)} %{compared}** ({counted})"


def _numbers(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of a Markdown table of success rates and their intervals."""
    rows = [
        f"| {name.replace('_', ' ')} | {100 * interval['mean']:.1f} % |"
        f" {100 * interval['low']:.1f} to {100 * interval['high']:.1f} |"
        for name, interval in results["summary"].items()
    ]
    return [f"| success, {results['num_items']} items | | interval |", "|---|---|---|", *rows]
