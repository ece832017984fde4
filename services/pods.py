"""The servers of a cluster, each as the process of a pod: `python -m services.pods NAME`.

Prefect's and MLflow's do not start without a login. The worker makes Jobs of flow runs and deletes
those of cancelled ones; `set-up` installs this image's pool, deployments and rules.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import json
import logging
import os
import secrets
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from agentgym.config import ConfigError
from agentgym.console.ending import guarded
from agentgym.deploy.kube.calls import KubeError
from agentgym.deploy.kube.client import Kind, Kube, connect
from agentgym.deploy.manifests import FLOWS
from services.applied import FILE, run_module
from services.overdue import PAGE, ask, bring_back, seconds_in_state
from services.state import START_TIMEOUT_S
from services.supervisor import JOB_TEMPLATE, KUBERNETES_POOL, OVERDUE_CHECK_S, healthy

logger = logging.getLogger(__name__)

JOB = Kind("batch/v1", "Job")
RUN = "prefect.io/flow-run-id"  # label of a Job
STARTING_S = 15.0  # for a pod that is about to start, which then ends its run by itself
ENDING_S = 900.0  # more than a run needs to take its servers down
ENDED = "cancelled; its Job was deleted"


def end_cancelled(api: str, login: str, kube: Kube) -> None:
    """Delete the Jobs of cancelled runs and of those that have been cancelling for too long; mark
    the latter as cancelled.

    A run's own process ends the run, but nothing then deletes its Job. A run whose pod never
    started has no process to end it, and Prefect's worker leaves it alone.
    api: `http://host:port/api`. login: `user:password`.
    Errors: OSError (urllib's among them), ValueError, KubeError.
    """
    jobs: dict[str, list[str]] = defaultdict(list)
    for job in kube.list(JOB, labels={RUN: None}).items:
        if not job["metadata"].get("deletionTimestamp"):
            jobs[job["metadata"]["labels"][RUN]].append(job["metadata"]["name"])
    ids, over = sorted(jobs), []
    ending = {"type": {"any_": ["CANCELLING", "CANCELLED"]}}
    for first in range(0, len(ids), PAGE):
        wanted = {"id": {"any_": ids[first : first + PAGE]}, "state": ending}
        request = {"flow_runs": wanted, "limit": PAGE}
        runs = ask(f"{api}/flow_runs/filter", login, request)
        over += [run for run in runs if _is_over(run)]
    for run in over:
        for name in jobs[run["id"]]:
            kube.delete(JOB, name)
        if run["state"]["type"] == "CANCELLING":
            state = {"type": "CANCELLED", "message": ENDED}
            ask(f"{api}/flow_runs/{run['id']}/set_state", login, {"state": state})
        logger.info("flow run %s was cancelled; its Job is deleted", run["name"])


def _is_over(run: dict[str, Any]) -> bool:
    """Return True if the run is cancelled, or has been cancelling for longer than it may."""
    limit_s = ENDING_S if run.get("start_time") else STARTING_S
    return run["state"]["type"] == "CANCELLED" or seconds_in_state(run) > limit_s


PREFECT_LOGIN = "PREFECT_SERVER_API_AUTH_STRING"  # user:password
CLIENT_LOGIN = "PREFECT_API_AUTH_STRING"
API = "PREFECT_API_URL"
IMAGE = "AGENTGYM_IMAGE"
NAMESPACE = "AGENTGYM_NAMESPACE"  # of flow runs
MLFLOW_USER, MLFLOW_PASSWORD = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
ROLLOUT_USER, ROLLOUT_PASSWORD = "MLFLOW_ROLLOUT_USERNAME", "MLFLOW_ROLLOUT_PASSWORD"
MIN_PASSWORD = 16  # characters
SIGNING = "MLFLOW_FLASK_SERVER_SECRET_KEY"  # key that signs the tokens of MLflow's forms
POLL_S = 1.0


def prefect(host: str, port: int) -> int:
    """Run Prefect's server until SIGTERM. Errors: ConfigError without a login."""
    _login(PREFECT_LOGIN, os.environ)
    import uvicorn
    from prefect.server.api.server import create_app

    from envs.connection import bounded
    from services.prefect_server import adapt_to_sqlite

    adapt_to_sqlite()  # matters if that is its database
    config = bounded(create_app(), any_body=True, host=host, port=port, server_header=False)
    uvicorn.Server(config).run()
    return 0


def mlflow(host: str, port: int) -> NoReturn:
    """Write the administrator's login to a new temporary folder, create or update the rollout user
    if one is set, then replace this process with MLflow's server. Errors: ConfigError for a login.
    """
    folder = Path(tempfile.mkdtemp(prefix="mlflow-"))
    variables = mlflow_environment(folder, os.environ)
    rollout = rollout_login(os.environ)
    os.environ.update(variables)
    if rollout:
        from mlflow.server.auth.sqlalchemy_store import SqlAlchemyStore

        # no administrator, with the default permission alone
        store = SqlAlchemyStore()
        store.init_db(_logins(os.environ))
        user, password = rollout
        if store.has_user(user):
            store.update_user(user, password=password, is_admin=False)
        else:
            store.create_user(user, password)
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth"]
    command += ["--host", host, "--port", str(port), "--workers", "1"]
    # clients use the Service's name, or loopback through a forwarded port
    hosts = os.environ.get("MLFLOW_SERVER_ALLOWED_HOSTS", f"mlflow,mlflow.*,*:{port}")
    command += ["--allowed-hosts", hosts]
    os.execv(sys.executable, command)  # noqa: S606 (it gets SIGTERM)


def mlflow_environment(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Write the login of MLflow's administrator to a file in `folder`, because MLflow takes no
    password from a variable. Result: the variables for its server, which name the file.

    environment: has the login. Errors: ConfigError if it has none, or a short password.
    """
    user = environment.get(MLFLOW_USER, "")
    password = environment.get(MLFLOW_PASSWORD, "")
    if not user or len(password) < MIN_PASSWORD:
        raise ConfigError(
            f"{MLFLOW_USER} and {MLFLOW_PASSWORD}, of at least {MIN_PASSWORD} characters, are not"
            " both set; without a login everybody could write into MLflow (k8s/README.md)"
        )
    ini = configparser.ConfigParser(interpolation=None)
    ini["mlflow"] = {
        "default_permission": "EDIT",
        # the logins' database; see `_logins`
        "database_uri": _logins(environment),
        "admin_username": user,
        "admin_password": password,
        "authorization_function": "mlflow.server.auth:authenticate_request_basic_auth",
        # a password check takes 0.1 s of CPU, and a run sends thousands of requests
        "auth_cache_ttl_seconds": "60",
    }
    path = folder / "logins.ini"
    with path.open("w", encoding="utf-8") as file:
        path.chmod(0o600)
        ini.write(file)
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(path),
        SIGNING: environment.get(SIGNING) or secrets.token_hex(32),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def rollout_login(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (name, password) with which KubeRay's jobs log in to MLflow, from `environment`; None
    if neither is set.
    Errors: ConfigError if one is missing, the password is short, or the name is that of MLflow's
    administrator.
    """
    user, password = environment.get(ROLLOUT_USER, ""), environment.get(ROLLOUT_PASSWORD, "")
    if not user and not password:
        return None
    if not user or len(password) < MIN_PASSWORD or user == environment.get(MLFLOW_USER):
        raise ConfigError(
            f"{ROLLOUT_USER} and {ROLLOUT_PASSWORD} must be another user than {MLFLOW_USER}, with"
            f" a password of at least {MIN_PASSWORD} characters; correct the Secret"
            " agentgym-rollout (k8s/README.md)"
        )
    return user, password


def _logins(environment: Mapping[str, str]) -> str:
    """Return the URI of the database of MLflow's logins: AGENTGYM_MLFLOW_LOGINS_URI, else logins.db
    next to MLflow's SQLite file, else MLflow's own database.
    """
    if named := environment.get("AGENTGYM_MLFLOW_LOGINS_URI", ""):
        return named
    backend = environment.get("MLFLOW_BACKEND_STORE_URI", "")
    if backend.startswith("sqlite:"):
        return f"{backend.rpartition('/')[0]}/logins.db"
    return backend


def set_up() -> int:
    """Wait for Prefect's server, then install pool, rules and deployments there; return 0.
    Errors: ConfigError without a login or an image; RuntimeError if no server answers within
    START_TIMEOUT_S or the installation fails.
    """
    _login(CLIENT_LOGIN, os.environ)
    image = os.environ.get(IMAGE, "")
    if not image:
        raise ConfigError(f"{IMAGE} names no image; deployments would run none")
    api, deadline = os.environ[API], time.monotonic() + START_TIMEOUT_S
    while not healthy(f"{api}/health"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no Prefect server answers at {api} within {START_TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    from prefect.client.schemas.actions import WorkPoolCreate

    from services.recovery import install

    template = job_template(os.environ.get(NAMESPACE, ""))
    install(WorkPoolCreate(name=KUBERNETES_POOL, type="kubernetes", base_job_template=template))
    names = deployments()
    # once for all names: its import takes seconds
    chosen = [word for name in names for word in ("--name", name)]
    run_module("prefect", "--no-prompt", "deploy", *chosen, env={"PWD": str(Path.cwd())})
    logger.info("%d deployments run %s", len(names), image)
    return 0


def job_template(namespace: str) -> dict[str, Any]:
    """Return the template of Jobs. namespace: of the Jobs; empty: the file's default."""
    template: dict[str, Any] = json.loads(JOB_TEMPLATE.read_bytes())
    if namespace:
        template["variables"]["properties"]["namespace"]["default"] = namespace
    return template


def deployments() -> list[str]:
    """Return `flow/kubernetes` for every deployment that prefect.yaml has for the cluster."""
    rows = yaml.safe_load(FILE.read_text(encoding="utf-8"))["deployments"]
    entrypoints = [row["entrypoint"] for row in rows if row["name"] == KUBERNETES_POOL]
    return [f"{entry.rpartition(':')[2]}/{KUBERNETES_POOL}" for entry in entrypoints]


def worker() -> int:
    """Run a worker of the pool, and `_look_after` in a thread. Errors: ConfigError (no login)."""
    login = _login(CLIENT_LOGIN, os.environ)
    threading.Thread(target=_look_after, args=(login,), name="overdue", daemon=True).start()
    sys.argv = ["prefect", "worker", "start", "--pool", KUBERNETES_POOL, "--type", "kubernetes"]
    from prefect.cli import app

    app()
    return 0


def _look_after(login: str) -> NoReturn:
    """Reschedule crashed runs and delete Jobs of cancelled ones until killed; errors are logged."""
    while True:
        time.sleep(OVERDUE_CHECK_S)
        try:
            bring_back(os.environ[API], login)
            namespace = os.environ.get(NAMESPACE, "") or FLOWS
            with contextlib.closing(connect(namespace=namespace)) as kube:
                end_cancelled(os.environ[API], login, kube)
        except (OSError, ValueError, KubeError) as error:
            logger.warning("could not look after flow runs: %s", error)


def _login(variable: str, environment: Mapping[str, str]) -> str:
    """Return the login in a variable. Errors: ConfigError if it has no password or a short one."""
    login = environment.get(variable, "")
    if len(login.partition(":")[2]) < MIN_PASSWORD:
        raise ConfigError(
            f"{variable} must be user:password, the password of at least {MIN_PASSWORD} characters;"
            " everybody could start runs without (k8s/README.md)"
        )
    return login


def main(argv: list[str] | None = None) -> int:
    """Run a command; exit codes as in `agentgym.cli.main`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="python -m services.pods", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="prefect | mlflow | set-up | worker")
    for name, serve in (("Prefect", prefect), ("MLflow", mlflow)):
        command = commands.add_parser(name.lower(), help=f"{name}'s server")
        command.add_argument("--host", default="127.0.0.1")
        command.add_argument("--port", type=int, required=True)
        command.set_defaults(run=lambda chosen, serve=serve: serve(chosen.host, chosen.port))
    installs = commands.add_parser("set-up", help="pool, deployments, rules")
    installs.set_defaults(run=lambda _: set_up())
    works = commands.add_parser("worker", help="a worker of the pool `kubernetes`")
    works.set_defaults(run=lambda _: worker())
    # they log every request and every check of Prefect's own services
    for name in ("httpx", "docket"):
        logging.getLogger(name).setLevel(logging.WARNING)
    chosen = parser.parse_args(argv)
    return guarded(lambda: int(chosen.run(chosen)))


if __name__ == "__main__":
    sys.exit(main())
