"""MLflow as a ledger we write and never read to decide: it shows what the store has committed, and
nothing more.

MLflow is imported where it is first used, so that spooling metrics costs nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import sqlite3
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from agentgym.private import own_login, with_login, without_login
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore

logger = logging.getLogger(__name__)

SPOOL = "metrics.jsonl"  # of a manifest's records
METRIC_NAME = re.compile(r"[A-Za-z0-9_\-.: /]{1,250}")  # what MLflow accepts
MAX_BATCH = 1000  # metrics of one log_batch; MLflow refuses more
MAX_PARAMS = 100  # params of one log_batch
MAX_PARAM_CHARS = 6000
REACH_TIMEOUT_S = 10.0  # for a server to say that it is there
SUPERSEDED = "superseded"  # value of the tag `kind`


class LedgerError(ValueError):
    """The ledger cannot take what it was given."""


class LedgerUnavailable(RuntimeError):
    """MLflow takes nothing at the moment.
    Nothing is lost: the store keeps every point until it is delivered.
    """


class StaleRun(LedgerError):
    """An MLflow run tells of commits that are gone: someone deleted them, or the store."""


@dataclass(frozen=True, slots=True)
class Point:
    """Metrics of one step, with the time they were measured: a point delivered twice is the
    same point.
    """

    step: int
    time_ms: int  # milliseconds since 1970
    metrics: dict[str, float]


def encode_points(points: Iterable[Point]) -> bytes:
    """JSON lines for `manifest.records["metrics.jsonl"]`.
    Errors: LedgerError for a bad name, NaN or infinity.
    """
    return b"".join(_encode(point) for point in points)


def decode_points(data: bytes) -> list[Point]:
    """Errors: LedgerError for a line that is not a point."""
    points = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            points.append(Point(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise LedgerError(
                f"line {number} of {SPOOL} is not a point ({error}): {line[:80]!r}; the spool is"
                " damaged, verify the store"
            ) from None
    return points


def _encode(point: Point) -> bytes:
    metrics = {}
    for name, value in point.metrics.items():
        if not METRIC_NAME.fullmatch(name):
            raise LedgerError(
                f"metric name {name!r} at step {point.step} may hold letters, digits, _ - . : space"
                " and /; write pass_at_1 for pass@1"
            )
        metrics[name] = float(value)
        if not math.isfinite(metrics[name]):
            raise LedgerError(
                f"metric {name} is {value} at step {point.step}; leave out what is undefined, and"
                " stop a run that diverged"
            )
    return (
        json.dumps(
            {"step": point.step, "time_ms": point.time_ms, "metrics": metrics}, allow_nan=False
        ).encode()
        + b"\n"
    )


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
                tags = {"mlflow.experimentKind": "custom_model_development"}
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
        return str(found.experiment_id)

    def parent_run(
        self, run_key: str, *, params: Mapping[str, Any], tags: Mapping[str, str], title: str = ""
    ) -> str:
        """The run that gathers a whole pipeline; found by `run_key`, else created as `title` and
        the key's beginning.

        Nested params become dotted names.
        """
        identity = {"run_key": run_key, "kind": "pipeline"}
        return self._find_or_create(f"{title} r{run_key[:12]}".strip(), identity, params, tags)

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
        self, run_id: str, points: Iterable[Point], tags: Mapping[str, str] | None = None
    ) -> None:
        """Write points with their own timestamps, then the tags.
        Delivering a point again changes nothing: MLflow's SQL store keeps one row for equal (run,
        name, timestamp, step, value).
        """
        from mlflow.entities import Metric, RunTag

        metrics = [
            Metric(name, value, point.time_ms, point.step)
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
            tags=[RunTag(name, value) for name, value in (tags or {}).items()],
        )

    def end_run(self, run_id: str, status: str = "FINISHED") -> None:
        """status: FINISHED, FAILED or KILLED. A run that already ended so keeps its end time."""
        if status not in ("FINISHED", "FAILED", "KILLED"):
            raise ValueError(f"status {status!r} must be FINISHED, FAILED or KILLED")
        if self.client.get_run(run_id).info.status != status:
            self.client.set_terminated(run_id, status)

    def supersede(self, run_id: str) -> None:
        """Set a run aside: it keeps its numbers and is never found again by its key.
        Nothing is deleted in the ledger.
        """
        self.set_tags(run_id, {"kind": SUPERSEDED})
        self.end_run(run_id, "KILLED")

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(
            run_id, tags=[RunTag(name, str(value)) for name, value in tags.items()]
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

    def points(self, run_id: str) -> list[tuple[str, int, int, float]]:
        """Every point of a run as (name, step, timestamp in ms, value), sorted."""
        names = self.client.get_run(run_id).data.metrics
        return sorted(
            (m.key, int(m.step), int(m.timestamp), float(m.value))
            for name in names
            for m in self.client.get_metric_history(run_id, name)
        )

    def register_model(
        self,
        run_id: str,
        model_dir: Path,
        *,
        name: str,
        alias: str | None,
        tags: Mapping[str, str],
        step: int,
        task: str = "llm/v1/chat",
    ) -> str:
        """Log a transformers model with its tokenizer and chat template, register it, move `alias`
        to it (None: leave it).

        Result: the version.
        `tags` must hold `step_key`: a model is registered once per key, a kill at any point
        included.
        task: one of MLflow's for transformers.
        Errors: ValueError without `step_key` or where the folder holds no model.
        """
        if "step_key" not in tags:
            raise ValueError(
                f"tags {sorted(tags)} must hold step_key; without it a retry would register {name}"
                " twice"
            )
        plain = {key: str(value) for key, value in tags.items()}
        version = self.find_version(name, plain["step_key"])
        if version is None:
            model_id = self._find_logged_model(name, plain["step_key"]) or self._log_model(
                run_id, model_dir, name, plain, step, task
            )
            self._create_registered(name)
            source = self.client.get_logged_model(model_id).artifact_location
            self.client.create_model_version(
                name, source, run_id=run_id, tags=plain, model_id=model_id
            )
            version = self._oldest_version(name, plain["step_key"])
        else:
            # the same weights, evaluated anew: the latest numbers count
            for key, value in plain.items():
                self.client.set_model_version_tag(name, version, key, value)
        if alias is not None:
            self.client.set_registered_model_alias(name, alias, version)
        return version

    def _find_or_create(
        self,
        name: str,
        identity: dict[str, str],
        params: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> str:
        run = self._find_run(identity)
        wanted = {key: str(value) for key, value in tags.items()}
        if run is None:
            # tags and run appear together, so a kill in between leaves no run that nobody finds
            # again
            created = self.client.create_run(
                self.experiment_id, run_name=name, tags={**wanted, **identity}
            )
            run = self._find_run(identity) or created
            if run.info.run_id != created.info.run_id:
                self.client.delete_run(created.info.run_id)  # another process was first
        run_id = str(run.info.run_id)
        if run.info.status in ("FAILED", "KILLED"):
            self.client.update_run(run_id, status="RUNNING")
        changed = {key: value for key, value in wanted.items() if run.data.tags.get(key) != value}
        if changed:
            self.set_tags(run_id, changed)
        self._log_missing_params(run_id, run.data.params, _flatten(params))
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

    def find_version(self, name: str, step_key: str) -> str | None:
        """The registered version made under this key, if any."""
        return min(self._versions(name, step_key), key=int, default=None)

    def version_tags(self, name: str, version: str) -> dict[str, str]:
        return dict(self.client.get_model_version(name, version).tags)

    def alias_version(self, name: str, alias: str) -> str | None:
        """The version that holds the alias, if any."""
        held = self.client.get_registered_model(name).aliases
        return str(held[alias]) if alias in held else None

    def _oldest_version(self, name: str, step_key: str) -> str:
        """A request whose reply was lost with the server is sent again by MLflow's client: a
        second version of the same model goes.
        """
        version, *repeated = sorted(self._versions(name, step_key), key=int)
        for other in repeated:
            self.client.delete_model_version(name, other)
        return version

    def _versions(self, name: str, step_key: str) -> list[str]:
        return [
            str(found.version)
            for found in self.client.search_model_versions(
                f"name = '{name}' and tags.step_key = '{step_key}'"
            )
        ]

    def _find_logged_model(self, name: str, step_key: str) -> str | None:
        """A whole model left by an attempt that was killed before it registered; half ones are
        removed.
        """
        ready = None
        found = self.client.search_logged_models(
            [self.experiment_id], filter_string=f"name = '{name}' and tags.step_key = '{step_key}'"
        )
        for model in found:
            if str(model.status) == "READY":
                ready = str(model.model_id)
            else:
                self.client.delete_logged_model(model.model_id)
        return ready

    def _log_model(
        self, run_id: str, model_dir: Path, name: str, tags: dict[str, str], step: int, task: str
    ) -> str:
        """What `mlflow.transformers.log_model` does, by the client: no active run or tracking URI
        of the process is touched, and the run's metrics are not copied onto the model.
        """
        if not (model_dir / "config.json").is_file():
            raise ValueError(
                f"{model_dir} holds no config.json; pass the folder of save_pretrained"
            )
        from mlflow.entities import LoggedModelOutput
        from mlflow.models import Model

        logged = self.client.create_logged_model(
            self.experiment_id, name=name, source_run_id=run_id, tags=tags
        )
        with tempfile.TemporaryDirectory() as folder:
            record = Model(
                model_uuid=logged.model_id,
                run_id=run_id,
                model_id=logged.model_id,
                artifact_path=logged.artifact_location,
            )
            _save_flavor(model_dir, Path(folder, "model"), record, name=name, tags=tags, task=task)
            self.client.log_model_artifacts(logged.model_id, str(Path(folder, "model")))
        self.client.log_outputs(run_id, models=[LoggedModelOutput(logged.model_id, step=step)])
        self.client.finalize_logged_model(logged.model_id, "READY")
        return str(logged.model_id)

    def _create_registered(self, name: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise


def deliver_committed(
    tracker: Tracker, store: RunStore, step: str, key: str, run_ids: Sequence[str]
) -> int:
    """Bring `run_ids` up to the head of this step; the only way metrics reach the ledger.

    Result: how many commits were delivered.
    A tag on each run remembers the last one, which saves work and no more: it is written after the
    points, it goes when the ledger goes, and delivering again changes nothing.
    Errors: StaleRun where a run knows of commits that the store does not.
    """
    delivered = 0
    for run_id in run_ids:
        tag = f"delivered.{step}-{key[:16]}"
        last = _parse_mark(tracker.client.get_run(run_id).data.tags.get(tag, ""))
        pending = store.history(step, key, after=last[0] - 1)
        if last[0] >= 0:
            known = pending[0] if pending and pending[0].seq == last[0] else None
            if known is not None and _mark(known) == last:
                pending = pending[1:]
            else:
                raise StaleRun(
                    f"MLflow run {run_id} holds points of commits of {step} that the store no"
                    " longer has"
                )
        if not pending:
            continue
        points = [point for manifest in pending for point in _points(store, manifest)]
        tracker.deliver(run_id, points, {tag: f"{_mark(pending[-1])[0]} {_mark(pending[-1])[1]}"})
        delivered = max(delivered, len(pending))
    return delivered


def check_server(uri: str) -> None:
    """Errors: LedgerUnavailable where `uri` names an MLflow server and nothing answers there;
    spares MLflow's import.
    """
    if not uri.startswith(("http://", "https://")):
        return
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=REACH_TIMEOUT_S):  # noqa: S310 - http or https, see above
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
        # from the transfer of artifacts
        cut_off = cut_off or type(error).__module__.startswith("requests.")
        if (
            cut_off
            or kind == "OperationalError"
            or code in ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")
        ):
            raise LedgerUnavailable(_unavailable(uri, error)) from error
        raise


def _unavailable(uri: str, error: Exception) -> str:
    came = " ".join(without_login(str(error)).split())[:300]
    if uri.startswith("sqlite:"):
        return (
            f"{uri} is busy or cannot be written: {came}; end what holds it. Nothing is lost: the"
            " same command delivers what is missing"
        )
    return (
        f"no MLflow server answers at tracking.uri {uri}: {came}; start it, or correct tracking.uri"
        " (empty: a local database). Nothing is lost: the same command delivers what is missing"
    )


def _save_flavor(
    model_dir: Path, path: Path, record: Any, *, name: str, tags: Mapping[str, str], task: str
) -> None:
    """A folder that MLflow's transformers flavour loads, made without asking the hub for
    anything.
    """
    import mlflow.transformers
    from huggingface_hub import ModelCard
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_dir,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="sdpa",
        )
        # no repository's name: MLflow would look for a licence there
        model.name_or_path = f"models:/{name}"
        card = [
            "---",
            "library_name: transformers",
            "---",
            "",
            f"# {name}",
            "",
            *(f"- {key}: {value}" for key, value in sorted(tags.items())),
            "",
        ]
        mlflow.transformers.save_model(
            {"model": model, "tokenizer": _load_tokenizer(model_dir)},
            path=str(path),
            task=task,
            mlflow_model=record,
            pip_requirements=[
                f"{package}=={installed_version(package).partition('+')[0]}"
                for package in ("torch", "transformers")
            ],
            model_card=ModelCard("\n".join(card)),
        )
        # MLflow's guess, a link to a page that does not exist
        (path / "LICENSE.txt").unlink(missing_ok=True)
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


def _load_tokenizer(model_dir: Path) -> Any:
    """As it was trained.
    AutoTokenizer prefers the model family's class over the one the folder declares, and a family's
    class rebuilds its own splitting of text: a tokenizer of our own would come back with other ids.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = model_dir / "tokenizer_config.json"
    declared = json.loads(path.read_bytes()).get("tokenizer_class") if path.is_file() else None
    generic = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(
        model_dir, local_files_only=True, trust_remote_code=False
    )


def _points(store: RunStore, manifest: Manifest) -> list[Point]:
    return decode_points(store.read(manifest, SPOOL)) if SPOOL in manifest.records else []


def _mark(manifest: Manifest) -> tuple[int, str]:
    """Names a commit; its time tells it from a later one that took the same number after the
    folder was deleted.
    """
    return manifest.seq, repr(manifest.created_at)


def _parse_mark(text: str) -> tuple[int, str]:
    seq, _, created_at = text.partition(" ")
    return (int(seq), created_at) if seq.isdigit() else (-1, "")


def _flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in params.items():
        flat.update(
            _flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": str(value)[:MAX_PARAM_CHARS]}
        )
    return flat


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
            SqlAlchemyStore(f"sqlite:///{partial}", artifact_root.as_uri()).engine.dispose()
            with contextlib.closing(sqlite3.connect(partial)) as database:
                # what is beside the file does not move with it
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            partial.replace(path)
        finally:
            clear()  # of a full disk


def _prepare_environment() -> None:
    """Must run before MLflow is imported. What the user set wins."""
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # stdout is for what the command says
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
