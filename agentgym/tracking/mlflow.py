"""MLflow as a ledger we write and never read to decide: it shows what the store has committed, and
nothing more.

MLflow is imported where it is first used, so that spooling metrics costs nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import logging
import os
import re
import sqlite3
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from agentgym.private import own_login, with_login, without_login
from agentgym.tracking.inputs import DatasetInput
from agentgym.tracking.points import LedgerError, Point
from agentgym.tracking.source import source_tags
from agentgym.tracking.traces import EpisodeTrace
from agentgym.tracking.views import tags_of_experiment
from envs.plain import plain

logger = logging.getLogger(__name__)

MAX_BATCH = 1000  # metrics of one log_batch; MLflow refuses more
MAX_PARAMS = 100  # params of one log_batch
MAX_PARAM_CHARS = 6000
GATEWAY = (429, 502, 503, 504)  # statuses of a server that is busy, or of what stands before it
REACH_TIMEOUT_S = 10.0  # for a server to say that it is there
SUPERSEDED = "superseded"  # value of the tag `kind`
CONTEXT = "mlflow.data.context"  # tag of a run's input: its split
SOURCE_RUN, TRACE_NAME = "mlflow.sourceRun", "mlflow.traceName"
ENDED = "ended"  # tag of a run that was not brought to its end: why


class LedgerUnavailable(RuntimeError):
    """MLflow takes nothing at the moment.
    Nothing is lost: the store keeps every point until it is delivered.
    """


class Tracker:
    """One experiment of an MLflow store.
    Runs are found by tag, so a process that comes back continues its run.
    """

    def __init__(self, uri: str, experiment: str, artifact_root: Path) -> None:
        """uri: `sqlite:////absolute/path.db` or a server's address; artifact_root: unused with
        a server, which has its own.
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
        """MLflow's client; importing it takes seconds."""
        _prepare_environment()
        from mlflow import MlflowClient

        _quieten()
        if self.uri.startswith("sqlite:"):
            _make_database(Path(self.uri.removeprefix("sqlite:///")), self.artifact_root)
        login = own_login(self.uri)
        # somebody else's server gets what the environment says
        uri = with_login(self.uri, login) if login else self.uri
        return MlflowClient(tracking_uri=uri, registry_uri=uri)

    @cached_property
    def experiment_id(self) -> str:
        """Created on first use. Errors: LedgerError where the experiment was deleted."""
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(self.experiment)
        if found is None:
            # without an explicit place MLflow freezes the working directory of whoever came first
            place = self.artifact_root.as_uri() if self.uri.startswith("sqlite:") else None
            try:
                # the UI opens on training runs and their charts, not on traces and judges
                kind = {"mlflow.experimentKind": "custom_model_development"}
                tags = {**kind, **tags_of_experiment({}, self.experiment)}
                return str(
                    self.client.create_experiment(
                        self.experiment, artifact_location=place, tags=tags
                    )
                )
            except MlflowException:
                # another process was first
                found = self.client.get_experiment_by_name(self.experiment)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise LedgerError(
                f"MLflow experiment {self.experiment!r} ({found.experiment_id}) is deleted; `mlflow"
                " experiments restore` it, or set tracking.experiment"
            )
        for name, value in tags_of_experiment(found.tags, self.experiment).items():
            self.client.set_experiment_tag(found.experiment_id, name, value)
        return str(found.experiment_id)

    def parent_run(
        self, run_key: str, *, params: Mapping[str, Any], tags: Mapping[str, str], title: str = ""
    ) -> str:
        """The run that gathers a whole pipeline; found by `run_key`, else created as `title` and
        the key's beginning.

        Nested params become dotted names.
        """
        identity = {"run_key": run_key, "kind": "pipeline"}
        return self._find_or_create(pipeline_name(title, run_key), identity, params, tags)

    def child_run(
        self,
        parent_id: str,
        name: str,
        step_key: str,
        *,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> str:
        """The run of one step below `parent_id`; found by `step_key`, else created."""
        identity = {"mlflow.parentRunId": parent_id, "step_key": step_key, "kind": "step"}
        return self._find_or_create(name, identity, params, tags)

    def comparison_run(
        self, comparison_key: str, title: str, *, params: Mapping[str, Any], tags: Mapping[str, str]
    ) -> str:
        """The run that holds a comparison's table and figures; found by `comparison_key`, else
        created as `title`.
        """
        identity = {"comparison_key": comparison_key, "kind": "comparison"}
        return self._find_or_create(f"{title} {comparison_key[:8]}", identity, params, tags)

    def evaluation_run(
        self, digest: str, title: str, *, params: Mapping[str, Any], tags: Mapping[str, str]
    ) -> str:
        """The run that holds an evaluation's numbers and files; found by `digest`, else created
        as `title`.
        """
        identity = {"evaluation_key": digest, "kind": "evaluation"}
        return self._find_or_create(f"{title} {digest[:8]}", identity, params, tags)

    def cell_run(
        self, comparison_id: str, title: str, *, params: Mapping[str, Any], tags: Mapping[str, str]
    ) -> str:
        """A comparison's own view of one of its runs; found by its title, else created.

        The run itself stays where it is: it may belong to several comparisons, and MLflow gives a
        run one parent.
        """
        identity = {"mlflow.parentRunId": comparison_id, "cell": title, "kind": "cell"}
        return self._find_or_create(title, identity, params, tags)

    def deliver(
        self,
        run_id: str,
        points: Iterable[Point],
        tags: Mapping[str, str] | None = None,
        *,
        model_id: str | None = None,
        dataset: tuple[str, str] = ("", ""),
    ) -> None:
        """Write points with their own timestamps, then the tags. model_id: a logged model that they
        are of, too, on the data of this name and digest.
        Delivering a point again changes nothing: MLflow's SQL store keeps one row for equal (run,
        name, timestamp, step, value).
        """
        from mlflow.entities import Metric, RunTag

        metrics = [
            Metric(
                name,
                value,
                point.time_ms,
                point.step,
                model_id,
                *(each or None for each in dataset),
            )
            for point in points
            for name, value in point.metrics.items()
        ]
        last = max(0, len(metrics) - 1) // MAX_BATCH * MAX_BATCH
        for start in range(0, last, MAX_BATCH):
            self.client.log_batch(run_id, metrics=metrics[start : start + MAX_BATCH])
        # MLflow writes the metrics of a batch before its tags
        self.client.log_batch(
            run_id,
            metrics=metrics[last:],
            tags=[RunTag(name, plain(value)) for name, value in (tags or {}).items()],
        )

    def end_run(self, run_id: str, status: str = "FINISHED") -> None:
        """status: FINISHED, FAILED or KILLED. A run that already ended so keeps its end time."""
        if status not in ("FINISHED", "FAILED", "KILLED"):
            raise ValueError(f"status {status!r} must be FINISHED, FAILED or KILLED")
        run = self.client.get_run(run_id)
        if run.info.status != status:
            self.client.set_terminated(run_id, status)
        if status == "FINISHED" and ENDED in run.data.tags:
            self.client.delete_tag(run_id, ENDED)

    def close_run(self, run_id: str, status: str, reason: str) -> None:
        """End a run that nobody is at work on; the tag `ended` says why. It goes on, without the
        tag, where its process comes back.
        """
        self.set_tags(run_id, {ENDED: reason})
        self.end_run(run_id, status)

    def running(self, kinds: Iterable[str]) -> list[Any]:
        """The runs of these kinds that MLflow shows as RUNNING, in every experiment of ours."""
        query = f"name = '{self.experiment}'"
        found = {each.experiment_id for each in self.client.search_experiments(filter_string=query)}
        query = "name LIKE 'agentgym-%'"
        found |= {
            each.experiment_id for each in self.client.search_experiments(filter_string=query)
        }
        runs: list[Any] = []
        for kind in kinds:
            token = None
            while found:
                page = self.client.search_runs(
                    sorted(found),
                    filter_string=f"attributes.status = 'RUNNING' and tags.kind = '{kind}'",
                    page_token=token,
                )
                runs += page
                token = page.token
                if not token:
                    break
        return runs

    def supersede(self, run_id: str) -> None:
        """Set a run aside: it keeps its numbers and is never found again by its key.
        Nothing is deleted in the ledger.
        """
        self.set_tags(run_id, {"kind": SUPERSEDED})
        self.end_run(run_id, "KILLED")

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(
            run_id, tags=[RunTag(name, plain(str(value))) for name, value in tags.items()]
        )

    def log_artifacts(self, run_id: str, files: Path | Mapping[str, bytes]) -> None:
        """A folder, or contents by name; a name that exists is replaced."""
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
        """The data a run read; the same data once."""
        from mlflow.entities import Dataset, InputTag
        from mlflow.entities import DatasetInput as Input

        found = [
            Input(
                Dataset(
                    name=plain(each.name),
                    digest=each.digest,
                    source_type="local",
                    source=plain(each.source),
                    profile=profile_of(each),
                ),
                [InputTag(CONTEXT, each.split)],
            )
            for each in inputs
        ]
        if found:
            self.client.log_inputs(run_id, found)

    def log_trace(self, trace: EpisodeTrace, run_id: str) -> None:
        """An episode, once however often it is delivered: its spans and its success, a column of
        MLflow's list of traces, have names of their own.
        """
        from mlflow.entities import Feedback, Span, TraceInfo, TraceLocation, TraceState

        success = Feedback("success", trace.success, trace_id=trace.trace_id)
        success.create_time_ms = success.last_update_time_ms = trace.began_ms + trace.took_ms
        success.assessment_id = f"a-{trace.trace_id.removeprefix('tr-')}"
        client = self.client._tracing_client  # what MLflow's own exporter calls
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
        """The logged model of a checkpoint, whose weights stay in the store; found by `step_key`,
        else created. Result: its id.
        """
        query = f"name = '{name}' and tags.step_key = '{tags['step_key']}'"
        found = self.client.search_logged_models([self.experiment_id], filter_string=query)
        ready = [each for each in found if str(each.status) == "READY"]
        if ready:
            return str(min(ready, key=lambda model: model.creation_timestamp).model_id)
        for half in found:  # of an attempt that was killed
            self.client.delete_logged_model(half.model_id)
        from mlflow.entities import LoggedModelOutput

        made = self.client.create_logged_model(
            self.experiment_id,
            name=name,
            source_run_id=run_id,
            tags={key: plain(value) for key, value in tags.items()},
            params={key: plain(value) for key, value in params.items()},
            model_type="checkpoint",
        )
        self.client.log_outputs(run_id, models=[LoggedModelOutput(made.model_id, step=0)])
        self.client.finalize_logged_model(made.model_id, "READY")
        return str(made.model_id)

    def find_run(self, tags: Mapping[str, str]) -> str | None:
        """Of the oldest live run with these tags."""
        run = self._find_run(dict(tags))
        return None if run is None else str(run.info.run_id)

    def points(
        self, run_id: str, names: Iterable[str] | None = None
    ) -> list[tuple[str, int, int, float]]:
        """Every point of a run as (name, step, timestamp in ms, value), sorted. names: of its
        metrics, where they are known.
        """
        if names is None:
            names = self.client.get_run(run_id).data.metrics
        return sorted(
            (m.key, int(m.step), int(m.timestamp), float(m.value))
            for name in names
            for m in self.client.get_metric_history(run_id, name)
        )

    def _find_or_create(
        self,
        name: str,
        identity: dict[str, str],
        params: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> str:
        run = self._find_run(identity)
        wanted = {key: plain(str(value)) for key, value in tags.items()}
        if run is None:
            # tags and run appear together, so a kill in between leaves no run that nobody finds
            # again
            created = self.client.create_run(
                self.experiment_id,
                run_name=plain(name),
                tags={**source_tags(), **wanted, **identity},
            )
            run = self._find_run(identity) or created
            if run.info.run_id != created.info.run_id:
                self.client.delete_run(created.info.run_id)  # another process was first
        run_id = str(run.info.run_id)
        if run.info.status in ("FAILED", "KILLED"):
            self.client.update_run(run_id, status="RUNNING")
            if ENDED in run.data.tags:
                self.client.delete_tag(run_id, ENDED)
        changed = {key: value for key, value in wanted.items() if run.data.tags.get(key) != value}
        if changed:
            self.set_tags(run_id, changed)
        self._log_missing_params(run_id, run.data.params, flat_params(params))
        return run_id

    def _find_run(self, identity: dict[str, str]) -> Any:
        """The oldest live run with these tags, or None."""
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in identity.items())
        runs = self.client.search_runs([self.experiment_id], filter_string=query)
        return min(runs, key=lambda run: (run.info.start_time, run.info.run_id), default=None)

    def _log_missing_params(
        self, run_id: str, present: Mapping[str, str], wanted: Mapping[str, str]
    ) -> None:
        """MLflow refuses to change a param: what the first attempt said stays."""
        from mlflow.entities import Param

        missing = [Param(key, value) for key, value in wanted.items() if key not in present]
        for start in range(0, len(missing), MAX_PARAMS):
            self.client.log_batch(run_id, params=missing[start : start + MAX_PARAMS])


def profile_of(data: DatasetInput) -> str:
    """What MLflow shows of a dataset's size."""
    return json.dumps({"num_items": data.num_items})


def pipeline_name(title: str, run_key: str) -> str:
    """Name of the run that gathers a whole pipeline."""
    return f"{title} r{run_key[:12]}".strip()


def local_path(location: str) -> Path | None:
    """The path of an artifact location on this machine; None for a remote one.

    location: a path, or a `file://` URI, where blanks and the like are percent-encoded.
    """
    if location.startswith("/"):
        return Path(location)
    parts = urlsplit(location)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def check_server(uri: str) -> None:
    """Errors: LedgerUnavailable where `uri` names an MLflow server and nothing answers there;
    spares MLflow's import.
    """
    if not uri.startswith(("http://", "https://")):
        return
    try:
        # http or https, see above
        health = f"{uri.rstrip('/')}/health"
        with urllib.request.urlopen(health, timeout=REACH_TIMEOUT_S):  # noqa: S310
            pass
    except urllib.error.HTTPError:
        pass  # it answers; what it allows shows when it is used
    except OSError as error:
        raise LedgerUnavailable(_unavailable(uri, error)) from None


@contextlib.contextmanager
def reaching(uri: str) -> Iterator[None]:
    """MLflow's several ways of saying that it cannot be reached, or is busy, become
    LedgerUnavailable.
    """
    try:
        yield
    except Exception as error:
        # by name: asking MLflow or SQLAlchemy for their classes would import them
        code, kind = getattr(error, "error_code", ""), type(error).__name__
        # no answer, or a gateway's
        cut_off = kind.endswith("Exception") and str(error).startswith("API request to ")
        if cut_off and _status(error) not in (None, *GATEWAY):
            raise LedgerUnavailable(_refused(uri, error)) from error
        # from the transfer of artifacts
        cut_off = cut_off or type(error).__module__.startswith("requests.")
        if nameless := "could not identify MLflow server version" in str(error):
            from mlflow.store.tracking.rest_store import RestStore

            RestStore._get_server_version.cache_clear()  # it would never be asked again
        if (
            cut_off
            or nameless
            or kind == "OperationalError"
            or code in ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")
        ):
            raise LedgerUnavailable(_unavailable(uri, error)) from error
        raise


def _status(error: Exception) -> int | None:
    """The HTTP status of a server's answer; None where there was no answer."""
    found = re.search(r"failed with error code (\d{3}) != \d{3}", str(error))
    return int(found[1]) if found else None


def _refused(uri: str, error: Exception) -> str:
    """The text of an error for an answer that is neither a gateway's nor MLflow's JSON."""
    return (
        f"the MLflow server at tracking.uri {uri} refuses: {_quoted(error)}; its log says why."
        " Nothing is lost: once it is mended, the same command delivers what is missing"
    )


def _quoted(error: Exception) -> str:
    return " ".join(plain(without_login(str(error))).split())[:300]


def _unavailable(uri: str, error: Exception) -> str:
    came = _quoted(error)
    if uri.startswith("sqlite:"):
        return (
            f"{uri} is busy or cannot be written: {came}; end what holds it. Nothing is lost: the"
            " same command delivers what is missing"
        )
    return (
        f"no MLflow server answers at tracking.uri {uri}: {came}; start it, or correct tracking.uri"
        " (empty: a local database). Nothing is lost: the same command delivers what is missing"
    )


def flat_params(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Parameters as MLflow has them: dotted names, texts."""
    flat: dict[str, str] = {}
    for key, value in params.items():
        flat.update(
            flat_params(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": plain(str(value))[:MAX_PARAM_CHARS]}
        )
    return flat


def import_client(uri: str) -> None:
    """Import the modules that a delivery needs: later, the import would slow rollouts down."""
    _prepare_environment()
    importlib.import_module("mlflow")
    if uri.startswith("sqlite:"):
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")


def _make_database(path: Path, artifact_root: Path) -> None:
    """MLflow's tables, where there is no database yet: made under another name and moved, so that
    it is there whole or not at all.

    SQLite does not undo changes of tables when their process is killed, and MLflow never gets past
    half of them.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with its holder
        if path.exists():
            return
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        partial = path.with_name(f".tmp-{path.name}")

        def clear() -> None:
            for suffix in ("", "-wal", "-shm", "-journal"):
                partial.with_name(partial.name + suffix).unlink(missing_ok=True)

        clear()  # what one that was killed left
        try:
            with _unsynced(partial):
                SqlAlchemyStore(f"sqlite:///{partial}", artifact_root.as_uri()).engine.dispose()
            with contextlib.closing(sqlite3.connect(partial)) as database:
                # what is beside the file does not move with it
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            clear()  # of a full disk


@contextlib.contextmanager
def _unsynced(path: Path) -> Iterator[None]:
    """SQLAlchemy's connections to that file do not wait for the disk: MLflow makes its tables in
    hundreds of transactions, and takes seconds where each is durable.
    """
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def relax(connection: sqlite3.Connection, _: object) -> None:
        if isinstance(connection, sqlite3.Connection) and connection.execute(
            "PRAGMA database_list"
        ).fetchone()[2] == str(path):
            connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", relax)
    try:
        yield
    finally:
        event.remove(Engine, "connect", relax)


def _prepare_environment() -> None:
    """Must run before MLflow is imported. What the user set wins."""
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # stdout is for what the command says
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # and stderr for what is wrong
        # MLflow's own 7 retries hold a caller up for four minutes at a time; what could not be
        # delivered is delivered later
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    }.items():
        os.environ.setdefault(name, value)


def _quieten() -> None:
    """Routine notes of MLflow and its migrations; warnings of ours and errors of theirs stay."""
    for name in ("alembic", "mlflow.store", "mlflow.tracking"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("mlflow.transformers", "mlflow.utils.git_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
