"""MLflow as a ledger: it shows the commits of the store, and is never read to decide anything.

MLflow is imported on first use, so that spooling metrics costs nothing.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from agentgym.private import own_login, with_login
from agentgym.tracking.points import LedgerError, Point
from agentgym.tracking.reaching import SUPERSEDED, make_database, prepare_environment, quieten
from agentgym.tracking.saved_view import tags_of_experiment
from agentgym.tracking.step_data import DatasetInput, EpisodeTrace, source_tags
from envs.plain import plain

logger = logging.getLogger(__name__)

MAX_BATCH = 1000  # metrics of one log_batch; MLflow refuses more
MAX_PARAMS = 100  # params of one log_batch
MAX_PARAM_CHARS = 6000
CONTEXT = "mlflow.data.context"  # tag of a run's input: its split
SOURCE_RUN, TRACE_NAME = "mlflow.sourceRun", "mlflow.traceName"
ENDED = "ended"  # tag of a run that ended early: the reason


class Tracker:
    """One experiment of an MLflow store.

    Runs are identified by tags, so that a restarted process continues its run (`find_or_create`).
    """

    def __init__(self, uri: str, experiment: str, artifact_root: Path) -> None:
        """Set the store, opened on first use. uri: `sqlite:////absolute/path.db` or a server's URL.
        experiment: its name. artifact_root: artifacts' folder, used for a local database alone.
        Errors: ValueError for a relative path of a database.
        """
        if uri.startswith("sqlite:") and not uri.startswith("sqlite:////"):
            raise ValueError(
                f"tracking.uri {uri!r} must hold an absolute path, sqlite:////folder/mlflow.db; a"
                " relative one moves with the caller"
            )
        self.uri = uri
        self.experiment = experiment
        self.artifact_root = Path(artifact_root).resolve()

    @cached_property
    def client(self) -> Any:
        """The MLflow client. First use takes seconds, sets environment variables, log levels,
        and creates a missing local database.
        """
        prepare_environment()
        from mlflow import MlflowClient

        quieten()
        if self.uri.startswith("sqlite:"):
            make_database(Path(self.uri.removeprefix("sqlite:///")), self.artifact_root)
        login = own_login(self.uri)
        # another server's login comes from MLflow's environment variables
        uri = with_login(self.uri, login) if login else self.uri
        return MlflowClient(tracking_uri=uri, registry_uri=uri)

    @cached_property
    def experiment_id(self) -> str:
        """Id of the experiment, created if missing. First use updates its views and description.
        Errors: LedgerError if it was deleted.
        """
        from mlflow.exceptions import MlflowException

        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment is None:
            # without an explicit location MLflow stores the first process's working directory
            location = self.artifact_root.as_uri() if self.uri.startswith("sqlite:") else None
            try:
                created = self.client.create_experiment(self.experiment, location)
                experiment = self.client.get_experiment(created)
            except MlflowException:
                # another process created it first
                experiment = self.client.get_experiment_by_name(self.experiment)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage != "active":
            raise LedgerError(
                f"MLflow experiment {self.experiment!r} ({experiment.experiment_id}) is deleted;"
                " `mlflow experiments restore` it, or set tracking.experiment"
            )
        number = str(experiment.experiment_id)
        for name, value in tags_of_experiment(experiment.tags, self.experiment, number).items():
            self.client.set_experiment_tag(number, name, value)
        return number

    def parent_run(
        self, run_key: str, *, params: Mapping[str, Any], tags: Mapping[str, str], title: str = ""
    ) -> str:
        """Find or create a pipeline's run by `find_or_create`, named by `title`. Return its id."""
        identity = {"run_key": run_key, "kind": "pipeline"}
        return self.find_or_create(pipeline_name(title, run_key), identity, params, tags)

    def child_run(
        self,
        parent_id: str,
        name: str,
        step_key: str,
        *,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> str:
        """Find or create a step's run below `parent_id` by `find_or_create`. Return its id."""
        identity = {"mlflow.parentRunId": parent_id, "step_key": step_key, "kind": "step"}
        return self.find_or_create(name, identity, params, tags)

    def evaluation_run(
        self, digest: str, title: str, *, params: Mapping[str, Any], tags: Mapping[str, str]
    ) -> str:
        """Find or create an evaluation's run by `find_or_create` with its digest. Return the id."""
        identity = {"evaluation_key": digest, "kind": "evaluation"}
        return self.find_or_create(f"{title} {digest[:8]}", identity, params, tags)

    def deliver(
        self,
        run_id: str,
        points: Iterable[Point],
        tags: Mapping[str, str] | None = None,
        *,
        model_id: str | None = None,
        dataset: tuple[str, str] = ("", ""),
    ) -> None:
        """Write points with their own timestamps to a run, then its tags. Repeats change nothing.

        model_id: a logged model that gets the points, too.
        dataset: name and digest of the data that they were measured on; empty: not recorded.
        """
        from mlflow.entities import Metric, RunTag

        of_dataset = [part or None for part in dataset]
        metrics = [
            Metric(name, value, point.time_ms, point.step, model_id, *of_dataset)
            for point in points
            for name, value in point.metrics.items()
        ]
        last = max(0, len(metrics) - 1) // MAX_BATCH * MAX_BATCH
        for start in range(0, last, MAX_BATCH):
            self.client.log_batch(run_id, metrics=metrics[start : start + MAX_BATCH])
        # MLflow writes the metrics of a batch before its tags
        run_tags = [RunTag(name, plain(value)) for name, value in (tags or {}).items()]
        self.client.log_batch(run_id, metrics=metrics[last:], tags=run_tags)

    def end_run(self, run_id: str, status: str = "FINISHED") -> None:
        """End a run as FINISHED (removes the tag `ended`), FAILED or KILLED.
        Errors: ValueError for another status.
        """
        if status not in ("FINISHED", "FAILED", "KILLED"):
            raise ValueError(f"status {status!r} must be FINISHED, FAILED or KILLED")
        run = self.client.get_run(run_id)
        if run.info.status != status:
            self.client.set_terminated(run_id, status)
        if status == "FINISHED" and ENDED in run.data.tags:
            self.client.delete_tag(run_id, ENDED)

    def close_run(self, run_id: str, status: str, reason: str) -> None:
        """End a run whose process is gone. Its tag `ended` is `reason` until the run continues."""
        self.set_tags(run_id, {ENDED: reason})
        self.end_run(run_id, status)

    def running(self, kinds: Iterable[str]) -> list[Any]:
        """Return the RUNNING runs of these kinds in this experiment and all named `agentgym-*`."""
        experiment_ids = {
            experiment.experiment_id
            for query in (filter_for({"name": self.experiment}), "name LIKE 'agentgym-%'")
            for experiment in self.client.search_experiments(filter_string=query)
        }
        queries = [filter_for({"attributes.status": "RUNNING", "tags.kind": k}) for k in kinds]
        where = sorted(experiment_ids)
        return [run for query in queries if where for run in self._runs(where, query)]

    def runs_with(self, tags: Mapping[str, str], experiment_id: str = "") -> Iterator[Any]:
        """Yield all runs, not deleted, of an experiment with these tags. Empty: of this one."""
        query = filter_for({f"tags.`{name}`": value for name, value in tags.items()})
        return self._runs([experiment_id or self.experiment_id], query)

    def _runs(self, experiment_ids: list[str], query: str) -> Iterator[Any]:
        search = partial(self.client.search_runs, experiment_ids, query)
        return all_pages(lambda token: search(page_token=token))

    def supersede(self, run_id: str) -> None:
        """Tag a run's kind as SUPERSEDED, so that its key no longer finds it; end it as KILLED."""
        self.set_tags(run_id, {"kind": SUPERSEDED})
        self.end_run(run_id, "KILLED")

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        run_tags = [RunTag(name, plain(str(value))) for name, value in tags.items()]
        self.client.log_batch(run_id, tags=run_tags)

    def log_artifacts(self, run_id: str, files: Path | Mapping[str, bytes]) -> None:
        """Log the files of a folder, or contents by relative path; replace existing files."""
        if isinstance(files, Path):
            self.client.log_artifacts(run_id, str(files))
            return
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            self.client.log_artifacts(run_id, folder)

    def log_inputs(self, run_id: str, inputs: Iterable[DatasetInput]) -> None:
        """Log the datasets that a run read. MLflow keeps equal ones once."""
        from mlflow.entities import Dataset, InputTag
        from mlflow.entities import DatasetInput as Input

        entities = []
        for data in inputs:
            source, profile = plain(data.source), profile_of(data)
            dataset = Dataset(plain(data.name), data.digest, "local", source, profile=profile)
            entities.append(Input(dataset, [InputTag(CONTEXT, data.split)]))
        if entities:
            self.client.log_inputs(run_id, entities)

    def log_trace(self, trace: EpisodeTrace, run_id: str) -> None:
        """Log an episode as a trace of a run, with its success as feedback. Repeats add none."""
        from mlflow.entities import Feedback, Span, TraceInfo, TraceLocation, TraceState

        success = Feedback("success", trace.success, trace_id=trace.trace_id)
        success.create_time_ms = success.last_update_time_ms = trace.began_ms + trace.took_ms
        success.assessment_id = f"a-{trace.trace_id.removeprefix('tr-')}"
        client = self.client._tracing_client  # the client of MLflow's own exporter
        client.start_trace(
            TraceInfo(
                trace.trace_id,
                TraceLocation.from_experiment_id(self.experiment_id),
                trace.began_ms,
                TraceState.OK,
                trace.request,
                trace.response,
                execution_duration=trace.took_ms,
                trace_metadata={SOURCE_RUN: run_id},
                tags={**trace.tags, TRACE_NAME: trace.name},
                assessments=[success],
            )
        )
        client.log_spans(self.experiment_id, [Span.from_dict(span) for span in trace.spans])

    def checkpoint_model(
        self, name: str, run_id: str, tags: Mapping[str, str], params: Mapping[str, str]
    ) -> str:
        """Return the id of a checkpoint's logged model, by name and `tags["step_key"]`. If there is
        no complete one, delete the incomplete and create one, as an output of the run, with these
        tags and params.
        """
        if ready := self.ready_model(name, tags["step_key"]):
            return ready
        from mlflow.entities import LoggedModelOutput

        created = self.client.create_logged_model(
            self.experiment_id,
            name=name,
            source_run_id=run_id,
            tags={key: plain(value) for key, value in tags.items()},
            params={key: plain(value) for key, value in params.items()},
            model_type="checkpoint",
        )
        self.client.log_outputs(run_id, models=[LoggedModelOutput(created.model_id, step=0)])
        self.client.finalize_logged_model(created.model_id, "READY")
        return str(created.model_id)

    def ready_model(self, name: str, step_key: str) -> str | None:
        """Return the id of the oldest complete logged model with this name and tag `step_key`.
        If there is none, delete the incomplete ones and return None.
        """
        query = f"name = '{name}' and tags.step_key = '{step_key}'"
        models = self.client.search_logged_models([self.experiment_id], filter_string=query)
        if ready := [model for model in models if str(model.status) == "READY"]:
            return str(min(ready, key=lambda model: model.creation_timestamp).model_id)
        for incomplete in models:
            self.client.delete_logged_model(incomplete.model_id)
        return None

    def find_run(self, tags: Mapping[str, str]) -> str | None:
        """Return the id of the experiment's oldest run, not deleted, with these tags, or None."""
        run = self._find_run(tags)
        return None if run is None else str(run.info.run_id)

    def points(
        self, run_id: str, names: Iterable[str] | None = None
    ) -> list[tuple[str, int, int, float]]:
        """Return a run's points of these metrics, or of all, as sorted (name, step, ms, value)."""
        if names is None:
            names = self.client.get_run(run_id).data.metrics
        return sorted(
            (m.key, int(m.step), int(m.timestamp), float(m.value))
            for name in names
            for m in self.client.get_metric_history(run_id, name)
        )

    def find_or_create(
        self,
        name: str,
        identity: Mapping[str, str],
        params: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> str:
        """Return the id of the run with the tags `identity`; create it as `name` if missing.
        Set `tags`, and params that it lacks: an existing param keeps its value. A FAILED or KILLED
        run becomes RUNNING and loses its tag `ended`.
        """
        run = self._find_run(identity)
        wanted = {key: plain(str(value)) for key, value in tags.items()}
        if run is None:
            # create run and tags in one call, so that a kill leaves no run without tags
            known = {**source_tags(), **wanted, **identity}
            created = self.client.create_run(self.experiment_id, run_name=plain(name), tags=known)
            run = self._find_run(identity) or created
            if run.info.run_id != created.info.run_id:
                self.client.delete_run(created.info.run_id)  # another process created it first
        run_id = str(run.info.run_id)
        if run.info.status in ("FAILED", "KILLED"):
            self.client.update_run(run_id, status="RUNNING")
            if ENDED in run.data.tags:
                self.client.delete_tag(run_id, ENDED)
        changed = {key: value for key, value in wanted.items() if run.data.tags.get(key) != value}
        if changed:
            self.set_tags(run_id, changed)
        from mlflow.entities import Param

        # MLflow refuses to change a param
        missing = [Param(*p) for p in flat_params(params).items() if p[0] not in run.data.params]
        for start in range(0, len(missing), MAX_PARAMS):
            self.client.log_batch(run_id, params=missing[start : start + MAX_PARAMS])
        return run_id

    def _find_run(self, identity: Mapping[str, str]) -> Any:
        """Return the oldest run, not deleted, with these tags; None without one."""
        runs = self.runs_with(identity)
        return min(runs, key=lambda run: (run.info.start_time, run.info.run_id), default=None)


def filter_for(values: Mapping[str, str]) -> str:
    """Return the filter of an MLflow search that demands these values of these fields.
    A value may contain ' or ", but MLflow cannot be asked for one with both. Errors: LedgerError.
    """
    if both := [value for value in values.values() if "'" in value and '"' in value]:
        raise LedgerError(f"{both[0]}: MLflow finds no name with both ' and \"; leave one out")
    quoted = {name: f'"{v}"' if "'" in v else f"'{v}'" for name, v in values.items()}
    return " and ".join(f"{name} = {value}" for name, value in quoted.items())


def all_pages(search: Callable[[str | None], Any]) -> Iterator[Any]:
    """Yield the results of an MLflow search from all pages.
    search: token of a page (None: the first) -> the page.
    """
    token = None
    while True:
        page = search(token)
        yield from page
        token = page.token
        if not token:
            return


def profile_of(data: DatasetInput) -> str:
    """Return a dataset's profile for MLflow, JSON text with the key `num_items`."""
    return json.dumps({"num_items": data.num_items})


def pipeline_name(title: str, run_key: str) -> str:
    """Return the name of a pipeline's run: its title, and `r` with 12 digits of its key."""
    return f"{title} r{run_key[:12]}".strip()


def local_path(location: str) -> Path | None:
    """Return the path of an artifact location, a path or `file://` URI; None for a remote one."""
    if location.startswith("/"):
        return Path(location)
    parts = urlsplit(location)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def flat_params(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested parameters flat: `prefix` and dotted name -> text, cut at MAX_PARAM_CHARS."""
    flat: dict[str, str] = {}
    for key, value in params.items():
        name, text = f"{prefix}{key}", plain(str(value))[:MAX_PARAM_CHARS]
        flat |= flat_params(value, f"{name}.") if isinstance(value, Mapping) else {name: text}
    return flat
