"""Saved views of our experiment in MLflow's UI: charts and columns of its training runs.

MLflow stores a view as a tag of the experiment, `mlflow.sharedViewState.<id>`. Another tag records
the digests of the views we wrote: one that a person changed or deleted stays as it is.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentgym.store.manifest import sha256

PREFIX = "mlflow.sharedViewState."
OURS = "mlflow.agentgym.views"  # tag: id -> sha256 of the value that we wrote
NOTE, NOTE_OURS = "mlflow.note.content", "mlflow.agentgym.note"
# versions of MLflow without a switch in the page open an experiment by this tag
KIND = {"mlflow.experimentKind": "custom_model_development"}
RESULT = "result/"  # prefix of metrics: success, gain over the baseline, bounds of its interval
TRAINING = "tags.kind = 'pipeline'"
CREATED_MS = 1_790_000_000_000  # a constant, so that equal views have equal text


@dataclass(frozen=True, slots=True)
class View:
    """A saved view: charts of the training runs over one axis."""

    key: str
    name: str
    axis: str = ""  # a metric; empty: optimizer steps


VIEWS = (
    View("agentgym-steps", "Training over optimizer steps"),
    View("agentgym-turns", "Training over turns played", "progress/turns"),
    View("agentgym-tokens", "Training over tokens", "progress/tokens"),
)
SECTIONS = {
    "Success": (
        ("validation/success", "success, validation items"),
        ("rollout/success", "success, training episodes"),
        ("eval/greedy", "success, test items, greedy"),
    ),
    "Horizon and turns": (
        ("rollout/max_turns", "horizon: turns an episode may have"),
        ("rollout/turns_mean", "turns an episode takes"),
        ("rollout/truncated_frac", "episodes that were cut"),
    ),
    "Is it learning": (
        ("rollout/entropy", "entropy, nats per action token"),
        ("actor/update_kl", "KL of an update, nats"),
        ("mismatch/kl", "KL, engine against learner, nats"),
        ("actor/grad_norm", "gradient norm"),
    ),
    "Throughput": (
        ("perf/generated_tokens_per_s", "tokens sampled in a second"),
        ("perf/trained_tokens_per_s", "tokens trained on in a second"),
        ("time/step_s", "seconds of an optimizer step"),
    ),
}
COLUMNS = {  # of the table of runs: name -> width, in pixels
    f"metrics.`{RESULT}success`": 108,
    f"metrics.`{RESULT}gain`": 86,
    f"metrics.`{RESULT}gain_low`": 112,
    f"metrics.`{RESULT}gain_high`": 118,
    "tags.`algorithm`": 80,
    "tags.`environment`": 100,
    "tags.`seed`": 60,
    "tags.`horizon`": 85,
}


def tags_of_experiment(present: Mapping[str, str], name: str, experiment_id: str) -> dict[str, str]:
    """Return the tags to set on experiment `name`: KIND, views, description, and OURS with their
    digests. A tag is set if it is missing, or as we wrote it and out of date; not if a person
    changed or deleted it. Empty if all are current. present: the experiment's tags.
    """
    written: dict[str, str] = json.loads(present.get(OURS, "{}"))
    views = {f"{PREFIX}{view.key}": value_of(view) for view in VIEWS}
    wanted = {**KIND, **views, NOTE: note_of_experiment(name, experiment_id)}
    missing, ours = {}, dict(written)
    for tag, value in wanted.items():
        untouched = sha256(present.get(tag, "").encode()) == written.get(tag)
        if (tag not in written and tag not in present) or (untouched and present[tag] != value):
            missing[tag], ours[tag] = value, sha256(value.encode())
    return {**missing, OURS: json.dumps(ours, sort_keys=True)} if missing else {}


def is_replaceable(present: str, note: str, ours: str) -> bool:
    """Return True if `note` differs from `present`, and that is empty or has the sha256 `ours`."""
    return present != note and (not present or sha256(present.encode()) == ours)


def value_of(view: View) -> str:
    """Return the value of a view's tag, in the form that MLflow's "Save view" writes."""
    state = "deflate;" + base64.b64encode(zlib.compress(json.dumps(_state(view)).encode())).decode()
    return json.dumps({"name": view.name, "createdAt": CREATED_MS, "state": state})


def link_to(experiment_id: str, view: View) -> str:
    """Return the link to a view and its charts, relative to the server's address. Charts and the
    kind of work are no part of a saved view: MLflow reads both from the address alone.
    """
    runs_page = f"#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    return f"{runs_page}&viewStateShareKey={view.key}&compareRunsMode=CHART"


def link_to_newest(client: Any) -> str:
    """Return `link_to` the first view of the experiment with the newest pipeline's run; "" if there
    is none. client: an MlflowClient.
    """
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    newest = ["attributes.start_time DESC"]
    runs = client.search_runs(experiments, TRAINING, max_results=1, order_by=newest)
    return link_to(runs[0].info.experiment_id, VIEWS[0]) if runs else ""


def note_of_experiment(name: str, experiment_id: str) -> str:
    """Return the experiment's description, which begins with links to the charts."""
    names = {view.name.removeprefix("Training "): view for view in VIEWS}
    charts = (f"[{name}]({link_to(experiment_id, view)})" for name, view in names.items())
    lines = [
        f"Charts of all training runs of `{name}`: {', '.join(charts)}.",
        "",
        "- A run of a pipeline has its steps below it; the views in the menu *Views* show pipelines"
        " alone, first as a table.",
        "- *Models* has every checkpoint with what its evaluation found; *Traces* has episodes that"
        " were drawn from evaluations and training.",
        "- What a run is and came to stands in its description, its report among its artifacts.",
    ]
    return "\n".join(lines)


def _state(view: View) -> dict[str, Any]:
    """Return the state of MLflow's page of runs that a view restores."""
    sections = {title: f"agentgym-section-{i}" for i, title in enumerate(SECTIONS)}
    axis = {"xAxisKey": "metric" if view.axis else "step", "selectedXAxisMetricKey": view.axis}
    charts = [
        _chart(f"{view.key}-{metric}", sections[title], metric, label, axis)
        for title, metrics in SECTIONS.items()
        for metric, label in metrics
    ]
    return {
        "searchFilter": TRAINING,
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": list(COLUMNS),
        "columnOrder": list(COLUMNS),
        "columnWidths": COLUMNS,
        "runsHiddenMode": "FIRST_20_RUNS",
        "compareRunCharts": charts,
        "compareRunSections": [
            {
                "uuid": key,
                "name": title,
                "display": True,
                "isReordered": True,
                "deleted": False,
                "isGenerated": False,
            }
            for title, key in sections.items()
        ],
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": True,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "globalLineChartConfig": {"lineSmoothness": 0, **axis},
    }


def _chart(
    key: str, section: str, metric: str, label: str, axis: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "uuid": key,
        "type": "LINE",
        "runsCountToCompare": 20,
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": False,
        "displayName": label,
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "lineSmoothness": 0,
        "scaleType": "linear",
        "xAxisScaleType": "linear",
        "range": {},
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "selectedYAxisMetricKey": "metric",
        "ignoreOutliers": False,
        "useGlobalXaxisKey": False,
        "useGlobalLineSmoothing": True,
        **axis,
    }
