"""MLflow's own server behind our gate, confined to one folder of artifacts.

MLflow lets a client choose where an experiment's artifacts lie: any file of the owner's. This
server refuses every location outside the folder, at creation and at each read or write.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

from starlette.responses import HTMLResponse
from starlette.types import ASGIApp

from agentgym.private import STATE
from agentgym.tracking.saved_view import link_to_newest
from services.proxy import Gate, serve

LOGIN = "AGENTGYM_MLFLOW_LOGIN"  # environment variable: user:password
# what MLflow's pages keep in the browser; they have no setting on the server
PREFERENCES = {
    "mlflow.workflowType_v1": "machine_learning",  # experiments open as model training
    "mlflow.settings.telemetry.enabled_v1": False,
    "mlflow.telemetry.info.alert.dismissed_v1": True,
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": True,
    "mlflow.detectIssues.guidanceShown_v1": True,
    "mlflow.flagForReview.guidanceShown_v1": True,
}
PROXIED = "mlflow-artifacts:/"  # the server's own folder, as clients name it
# these lead to other locations, each of which is checked again
_SCHEMES = ("runs", "models", "mlflow-artifacts")


def make_app(state: Path, login: str) -> ASGIApp:
    """Create database and artifact folder in `state`, confine MLflow to that folder, and return its
    app behind a gate. login: `user:password`. Call it before anything imports `mlflow.server`,
    which reads the environment variables that are set here.
    """
    database = f"sqlite:///{(state / 'mlflow.db').resolve()}"
    artifacts = (state / "mlflow-artifacts").resolve()
    artifacts.mkdir(parents=True, exist_ok=True)
    from mlflow.server.constants import (
        ARTIFACT_ROOT_ENV_VAR,
        ARTIFACTS_DESTINATION_ENV_VAR,
        BACKEND_STORE_URI_ENV_VAR,
        SERVE_ARTIFACTS_ENV_VAR,
    )

    os.environ |= {
        # would start eight unused processes that outlive the server
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "_MLFLOW_SGI_NAME": "uvicorn",
        BACKEND_STORE_URI_ENV_VAR: database,
        ARTIFACT_ROOT_ENV_VAR: PROXIED,
        ARTIFACTS_DESTINATION_ENV_VAR: str(artifacts),
        SERVE_ARTIFACTS_ENV_VAR: "true",
    }
    with warnings.catch_warnings(action="ignore"):  # of deprecated parts that MLflow uses
        from mlflow.server.fastapi_app import app
    from mlflow import MlflowClient
    from mlflow.server.handlers import initialize_backend_stores

    confine(artifacts)
    initialize_backend_stores(database, database, PROXIED)
    client = MlflowClient(database)

    def entered(host: str) -> HTMLResponse:
        return to_charts(f"http://{host}/{link_to_newest(client)}")

    return Gate(app, login, open_paths=("/health",), sockets=False, entered=entered)


def to_charts(url: str) -> HTMLResponse:
    """Return a page that leads to `url`, after it has set those PREFERENCES in the browser that the
    user has not set. url: without a login, as fetch() rejects URLs that have one.
    """
    return HTMLResponse(
        f"<!doctype html><title>MLflow</title><script>try {{ for (const [name, value] of"
        f" Object.entries({json.dumps(PREFERENCES)})) localStorage.getItem(name) ??"
        f" localStorage.setItem(name, JSON.stringify(value)) }}"
        f" finally {{ location.replace({json.dumps(url)}) }}</script>"
    )


def confine(root: Path) -> None:
    """Patch MLflow in this process so that it reads and writes artifacts below root only."""
    from mlflow.store.artifact import artifact_repository_registry
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    @functools.wraps(LocalArtifactRepository)
    def local(artifact_uri: str, *arguments: Any, **settings: Any) -> Any:
        check_location(artifact_uri, root)
        return LocalArtifactRepository(artifact_uri, *arguments, **settings)

    repositories = artifact_repository_registry.get_registered_artifact_repositories()
    for scheme in [scheme for scheme in repositories if scheme not in _SCHEMES]:
        del repositories[scheme]
    repositories |= {"": local, "file": local}
    create = SqlAlchemyStore.create_experiment

    @functools.wraps(create)
    def create_experiment(
        self: Any, name: str, artifact_location: str | None = None, tags: Any = None
    ) -> Any:
        if artifact_location:
            check_location(artifact_location, root)
        return create(self, name, artifact_location, tags)

    SqlAlchemyStore.create_experiment = create_experiment


def check_location(uri: str, root: Path) -> None:
    """Raise MlflowException unless `uri`, the location of artifacts, is below root or PROXIED."""
    from mlflow.exceptions import MlflowException
    from mlflow.utils.file_utils import local_file_uri_to_path
    from mlflow.utils.uri import is_local_uri

    if is_local_uri(uri):
        inside = Path(local_file_uri_to_path(uri)).resolve().is_relative_to(root)
    else:
        is_plain = "%" not in uri and ".." not in uri.split("/")
        inside = is_plain and uri.startswith(PROXIED) and not uri.startswith(f"{PROXIED}/")
    if not inside:
        raise MlflowException.invalid_parameter_value(
            f"artifact location {uri!r} must be below {PROXIED} or {root.as_uri()}; leave it out,"
            " and the server chooses"
        )


if __name__ == "__main__":
    serve(make_app(STATE, os.environ.pop(LOGIN)), socket.socket(fileno=int(sys.argv[1])))
