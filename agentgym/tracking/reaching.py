"""The server or database behind MLflow: create it, check it, report it as unavailable."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import os
import re
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentgym.config import RunConfig
from agentgym.private import without_login
from envs.plain import plain

GATEWAY = (429, 502, 503, 504)  # statuses of a busy server, or of a proxy in front of it
LAYOUT = 2  # raise it if deliveries write something else: finished work is then delivered again
SUPERSEDED = "superseded"  # value of a run's tag `kind`
REACH_TIMEOUT_S = 10.0  # for the answer to a health check


class LedgerUnavailable(RuntimeError):
    """Error if MLflow is unreachable, busy or refuses. The store has all points to deliver."""


def check_server(uri: str) -> None:
    """Raise LedgerUnavailable if server `uri` does not answer. HTTP errors and databases pass."""
    if not uri.startswith(("http://", "https://")):
        return
    try:
        # S310: the scheme is http or https, see above
        health = f"{uri.rstrip('/')}/health"
        with urllib.request.urlopen(health, timeout=REACH_TIMEOUT_S):  # noqa: S310
            pass
    except urllib.error.HTTPError:
        pass  # it answers; a later request reports a refused login
    except OSError as error:
        raise LedgerUnavailable(_unavailable(uri, error)) from None


def ledger_identity(cfg: RunConfig) -> str:
    """Return a text that identifies the ledger and LAYOUT; for a server, its address and the
    experiment alone.

    For a local database the text changes if another file takes its place, if a run or the
    experiment is deleted, or if a run is superseded. It is empty if the database cannot be read or
    does not have the experiment.
    """
    address = f"{LAYOUT} {cfg.tracking_uri} {cfg.experiment}"
    query = """
        select experiment_id, creation_time, lifecycle_stage,
            (select count(*) from runs where lifecycle_stage = 'deleted'),
            (select count(*) from tags where key = 'kind' and value = ?)
        from experiments where name = ?"""
    return _seen(cfg, address, query, (SUPERSEDED, cfg.experiment))


def registry_identity(cfg: RunConfig) -> str:
    """Return a text that identifies the registered model; for a server, the text never changes.
    For a local database it changes if the model, not a version, is deleted and created again.
    Empty if the database has no such model, or cannot be read.
    """
    query = "select creation_time from registered_models where name = ?"
    name = cfg.registered_model
    return _seen(cfg, f"{cfg.tracking_uri} {name}", query, (name,))


def has_file(cfg: RunConfig) -> bool:
    """Return True if the ledger is a database file, which can be read without MLflow."""
    return cfg.tracking_uri.startswith("sqlite:")


def _seen(cfg: RunConfig, address: str, query: str, values: Sequence[str]) -> str:
    """Return `address`, with the query's row if the ledger is a file; empty if there is no row."""
    if not has_file(cfg):
        return address
    row = first_row(cfg, query, values)
    return f"{address} {row}" if row else ""


def first_row(cfg: RunConfig, query: str, values: Sequence[str] = ()) -> tuple[object, ...] | None:
    """Return a query's first row in the ledger's file; None without one, or if it is unreadable."""
    path = Path(cfg.tracking_uri.removeprefix("sqlite:///"))
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            row: tuple[object, ...] | None = database.execute(query, values).fetchone()
            return row
    except sqlite3.Error:  # missing or busy: the caller asks MLflow itself, or looks again
        return None


@contextlib.contextmanager
def reaching(uri: str) -> Iterator[None]:
    """Turn errors of the block into LedgerUnavailable if the server or database is unreachable or
    busy, or if the server answers with an HTTP error that is not MLflow's JSON. Other errors pass.
    uri: the ledger's, named in the message.
    """
    try:
        yield
    except Exception as error:
        # compare names: the classes would need an import of MLflow or SQLAlchemy
        code, kind = getattr(error, "error_code", ""), type(error).__name__
        # MLflow's client reports no answer, or an answer that is not JSON
        cut_off = kind.endswith("Exception") and str(error).startswith("API request to ")
        if cut_off and _status(error) not in (None, *GATEWAY):
            # neither a gateway's answer nor MLflow's JSON
            raise LedgerUnavailable(
                f"the MLflow server at tracking.uri {uri} refuses: {_quoted(error)}; its log gives"
                " the reason. Nothing is lost: once it is mended, the same command delivers what is"
                " missing"
            ) from error
        # artifact transfers raise the errors of `requests`
        cut_off = cut_off or type(error).__module__.startswith("requests.")
        if nameless := "could not identify MLflow server version" in str(error):
            from mlflow.store.tracking.rest_store import RestStore

            RestStore._get_server_version.cache_clear()  # else the failure stays cached
        if (
            cut_off
            or nameless
            or kind == "OperationalError"
            or code in ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")
        ):
            raise LedgerUnavailable(_unavailable(uri, error)) from error
        raise


def _status(error: Exception) -> int | None:
    """Return the HTTP status that an error of MLflow's client names; None if it names none."""
    match = re.search(r"failed with error code (\d{3}) != \d{3}", str(error))
    return int(match[1]) if match else None


def _quoted(error: Exception) -> str:
    return " ".join(plain(without_login(str(error))).split())[:300]


def _unavailable(uri: str, error: Exception) -> str:
    quoted = _quoted(error)
    if uri.startswith("sqlite:"):
        return (
            f"{uri} is busy or cannot be written: {quoted}; end what holds it. Nothing is lost: the"
            " same command delivers what is missing"
        )
    return (
        f"no MLflow server answers at tracking.uri {uri}: {quoted}; start it, or correct"
        " tracking.uri (empty: a local database). Nothing is lost: the same command delivers"
        " what is missing"
    )


def import_client(uri: str) -> None:
    """Set MLflow's environment variables and import it; for SQLite its database modules, too.
    Call it before rollouts begin: a later import would slow them down.
    """
    prepare_environment()
    importlib.import_module("mlflow")
    if uri.startswith("sqlite:"):
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")


def make_database(path: Path, artifact_root: Path) -> None:
    """Create MLflow's database at `path` if it is missing. artifact_root: artifacts' folder.

    It is created under another name and moved, so that it is there whole or not at all: SQLite
    does not undo table changes when their process is killed, and MLflow cannot repair half of them.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it if this process dies
        if path.exists():
            return
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        partial = path.with_name(f".tmp-{path.name}")

        def clear() -> None:
            for suffix in ("", "-wal", "-shm", "-journal"):
                partial.with_name(partial.name + suffix).unlink(missing_ok=True)

        clear()  # files left by a killed process
        try:
            with _unsynced(partial):
                SqlAlchemyStore(f"sqlite:///{partial}", artifact_root.as_uri()).engine.dispose()
            with contextlib.closing(sqlite3.connect(partial)) as database:
                # the write-ahead log is not moved with the file
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            clear()  # for example after a full disk


@contextlib.contextmanager
def _unsynced(path: Path) -> Iterator[None]:
    """Switch off SQLite's disk syncs of this file in the block, where MLflow commits often."""
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


def prepare_environment() -> None:
    """Set MLflow's environment variables, before its import; the user's own values win."""
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # stdout is for the command's output
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # stderr is for errors
        # MLflow's default of 7 retries blocks for minutes; a later delivery repeats them
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    }.items():
        os.environ.setdefault(name, value)


def quieten() -> None:
    """Hide routine notes of MLflow and its migrations, and the warnings of two of its modules."""
    for name in ("alembic", "mlflow.store", "mlflow.tracking"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("mlflow.transformers", "mlflow.utils.git_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
