"""Faults of a flow run that Prefect's worker started on a cluster, and of a step whose Ray cluster
belongs to a RayJob. Prefect, MLflow and the run are pods with their claims; a stand-in replaces
KubeRay's operator.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from chaos_cluster import (
    KINDS as OTHERS,
)
from chaos_cluster import (
    control_plane,
    known_to,
    no_cluster,
)
from chaos_deployed import AWS, MLFLOW, PREFECT, STATE, Deployed, forwarded
from chaos_kinds import (
    BROKEN,
    STAGE,
    Kind,
    MlflowServer,
    Scene,
    Setting,
    fill_disk,
    free_port,
    no_mount,
    s3_server,
    send,
    small_disk,
    the_command,
)
from chaos_project import POLL_S, ROOT, START_TIMEOUT_S, Project

from agentgym.deploy.kube.client import Kind as Resource
from agentgym.deploy.kube.client import connect
from agentgym.deploy.kuberay import RAY_CLUSTER
from agentgym.deploy.manifests import FLEETS, SERVICES
from agentgym.deploy.owned import owned_process, tail

# like `prefect deployment run pipeline/kubernetes --watch`, but survives a server outage
RUN = """
import os, sys, time
from services.overdue import ask
api, login = os.environ["PREFECT_API_URL"], os.environ["PREFECT_API_AUTH_STRING"]
def patiently(path, body):
    while True:
        try:
            return ask(api + path, login, body)
        except (OSError, ValueError) as error:
            time.sleep(1)
named = {"name": {"any_": ["kubernetes"]}}, {"name": {"any_": ["pipeline"]}}
(deployment,) = patiently("/deployments/filter", dict(zip(("deployments", "flows"), named)))
asked = {"idempotency_key": str(os.getpid()) + str(time.time())}
run = patiently(f"/deployments/{deployment['id']}/create_flow_run", asked)["id"]
while True:
    (found,) = patiently("/flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    if found["state_type"] in ("COMPLETED", "FAILED", "CANCELLED"):
        break
    time.sleep(1)
print(found["run_count"], "attempts,", found["state_type"], found["state"]["message"])
sys.exit(found["state_type"] != "COMPLETED")
"""
TINY = {  # changes to the tiny run of the other kinds
    "env": {"deploy": "kubernetes", "replicas": 1, "max_sessions": 256},
    "warm_start": {"num_demos": 16, "steps": 20},
    "evaluation": {"num_items": 4},
    "kubernetes": {"overlay": "test", "lease_s": 30.0, "ready_timeout_s": 300.0},
    "tracking": {"uri": "http://mlflow.agentgym.svc:5000"},
}
AWAY_S = (5.0, 40.0)
ON_KUBERAY = ("compute=kuberay", "kuberay.mode=HTTPMode", "deterministic=true")


@contextlib.contextmanager
def differing(project: Project) -> Iterator[None]:
    """Replace the project's parameter file by one for pods, with TINY over it."""
    path = project.folder / "params.yaml"
    before = path.read_text(encoding="utf-8")
    params = yaml.safe_load(before)
    for section, values in TINY.items():
        params[section] = {**params.get(section, {}), **values}
    path.write_text(yaml.safe_dump(params), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(before, encoding="utf-8")


@contextlib.contextmanager
def deployed(project: Project) -> Iterator[tuple[str, ...]]:
    """Run Prefect, its worker and MLflow in pods; the run's claim is a small disk.
    Errors: RuntimeError if an object of a run is left in the end.
    """
    with (
        small_disk(project),
        differing(project),
        control_plane() as kube_cluster,
        contextlib.ExitStack() as stack,
    ):
        kube_cluster.add_nodes("node-1", app=project.folder)
        folders = {claim: kube_cluster.folder / claim for claim in (PREFECT, MLFLOW)}
        volumes = {STATE: project.state, **folders}
        installation = Deployed(kube_cluster.kubectl, SERVICES, volumes)
        installation.bring_up()
        (project.state / "mlflow.db").symlink_to(folders[MLFLOW] / "mlflow.db")
        prefect, mlflow = (
            stack.enter_context(forwarded(installation, name)) for name in ("prefect", "mlflow")
        )
        variables = {
            "AGENTGYM_FLEET_KEY": installation.token,
            "PREFECT_API_URL": f"http://{prefect}/api",
            "PREFECT_API_AUTH_STRING": installation.login,
            **installation.mlflow_login,
        }
        with known_to(project, kube_cluster, **variables):
            yield (f"tracking.uri=http://{mlflow}",)
            kube_cluster.check_nothing_left()


def of_service(name: str) -> Any:
    """Return a rule for victims: the process of that service's pod, while the command runs."""

    def victims(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
        if process.poll() is not None:
            return []
        pod_processes: list[psutil.Process] = project.server.containers(
            "python", "-m", "services.cluster", name
        )
        return pod_processes

    return victims


def send_mlflow_away(scene: Scene, _: list[psutil.Process]) -> None:
    """Scale MLflow down to no pod for some seconds."""
    scale = ("scale", "deployment/mlflow", "--namespace", SERVICES)
    scene.project.server.kubectl(*scale, "--replicas=0")
    away_s = scene.chance.uniform(*AWAY_S)
    time.sleep(away_s)
    scene.project.server.kubectl(*scale, "--replicas=1")
    scene.trial.notes.append(f"away for {away_s:.0f} s and its start")


# --- steps as RayJobs
# ---------------------------------------------------------------------------------------------

RAY = """
import json, os, sys
os.environ["RAY_TMPDIR"] = sys.argv[1]
os.mkdir(sys.argv[1] + "/ray")
from ray.cluster_utils import Cluster
free = {"dashboard_port": 0, "dashboard_agent_listen_port": 0}
cluster = Cluster(True, head_node_args={"num_cpus": 4, "include_dashboard": True, \
"object_store_memory": 150_000_000, **free})
with open(sys.argv[2] + ".new", "w") as file:
    file.write("http://" + cluster.webui_url)
os.rename(sys.argv[2] + ".new", sys.argv[2])
sys.stdin.read()
"""


@contextlib.contextmanager
def local_ray(token: str) -> Iterator[str]:
    """Start a Ray cluster of one node; yield its dashboard's address."""
    with tempfile.TemporaryDirectory(prefix="agr-", dir="/tmp") as folder:
        address_file, log = Path(folder, "dashboard"), Path(folder, "log")
        variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        command = [sys.executable, "-c", RAY, folder, str(address_file)]
        with owned_process(command, log_path=log, env={**variables, "PYTHONPATH": ""}) as process:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not address_file.exists():
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError(f"no Ray cluster\n{tail(log)}")
                time.sleep(POLL_S)
            yield address_file.read_text(encoding="utf-8")


def stand_in() -> Any:
    path = ROOT / "tests/agentgym/deploy/kuberay_stand_in.py"
    spec = importlib.util.spec_from_file_location("kuberay_stand_in", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class OfKubeRay:
    """The parts around a step that runs as RayJobs."""

    operator: Any
    commits: Callable[[], list[str]]  # of stage 1


@contextlib.contextmanager
def kuberay(project: Project) -> Iterator[tuple[str, ...]]:
    """Start an API server, a stand-in for KubeRay's operator with a local Ray cluster, a store on
    S3, and MLflow.
    """
    port, token = free_port(), secrets.token_hex(32)
    # 127.1 counts as another machine for the rules, and resolves to this one
    server = MlflowServer(project, port, hosts=f"127.1:{port},127.0.0.1:{port}")
    with (
        s3_server(project) as store,
        control_plane() as kube_cluster,
        local_ray(token) as dashboard,
        contextlib.closing(connect(kubeconfig=kube_cluster.kubeconfig, namespace=FLEETS)) as kube,
        contextlib.ExitStack() as stack,
    ):
        server.start()
        stack.callback(server.kill)
        bucket = project.server
        credentials = {name: project.environment[name] for name in (*AWS, "AWS_ENDPOINT_URL")}
        kube_cluster.kubectl("create", "namespace", FLEETS)
        secret: dict[str, Any] = {"apiVersion": "v1", "kind": "Secret"}
        secret["metadata"] = {"name": "agentgym-rollout"}
        secret["data"] = {
            name_of_key: base64.b64encode(value.encode()).decode()
            for name_of_key, value in credentials.items()
        }
        kube.create(secret)
        jobs = kube_cluster.folder / "jobs"
        jobs.mkdir()
        client = jobs_client(dashboard, token)
        operator = stack.enter_context(stand_in().StandIn(kube, client, jobs))
        stack.enter_context(known_to(project, kube_cluster, AGENTGYM_IMAGE="registry/agentgym:1"))
        project.server = OfKubeRay(operator, bucket.commits)
        tracking = f"tracking.uri=http://127.1:{port}"
        yield (*store, *ON_KUBERAY, tracking, "store.lease_ttl_s=5")
        if left := kube.list(RAY_CLUSTER).items + kube.list(Resource("ray.io/v1", "RayJob")).items:
            raise RuntimeError(f"left: {[resource['metadata']['name'] for resource in left]}")
        if operator.errors:
            raise RuntimeError(f"the stand-in failed: {operator.errors[:3]}")


def jobs_client(dashboard: str, token: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(dashboard, headers={"Authorization": f"Bearer {token}"})


def on_a_cluster(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the started process once the stage's own RayJob runs and has a commit."""
    runs = any(name.endswith("-s1-a1") for name in project.server.operator.ran)
    return the_command(project, process) if runs and project.server.commits() else []


def lose_ray_cluster(scene: Scene, _: list[psutil.Process]) -> None:
    """Delete the Ray cluster with its processes."""
    operator = scene.project.server.operator
    scene.trial.hit = operator.lose_cluster(operator.ran[-1])
    scene.trial.notes.append(operator.ran[-1])


ON_CLUSTER = Setting(
    ("-c", RUN),
    around=deployed,
    missing=lambda: no_cluster() or no_mount(),
    takes_overrides=False,
)
AS_RAY_JOB = Setting(
    (*STAGE, "--with-parents"),
    around=kuberay,
    missing=no_cluster,
    is_ray=True,
    stays=r"mlflow.*server|s3_server",
)
KINDS = OTHERS | {
    kind.name: kind
    for kind in (
        Kind(
            "kube-worker",
            "Prefect's worker on a cluster, SIGKILL",
            ON_CLUSTER,
            of_service("worker"),
            send(signal.SIGKILL),
            BROKEN,
        ),
        Kind(
            "kube-prefect",
            "Prefect's server on a cluster, SIGKILL",
            ON_CLUSTER,
            of_service("prefect"),
            send(signal.SIGKILL),
            BROKEN,
        ),
        Kind(
            "kube-mlflow",
            "MLflow on a cluster, without a pod for a while",
            ON_CLUSTER,
            the_command,
            send_mlflow_away,
            BROKEN,
        ),
        Kind("claim", "claim of a flow run full", ON_CLUSTER, the_command, fill_disk, BROKEN),
        Kind(
            "ray-cluster",
            "RayCluster of a RayJob, deleted",
            AS_RAY_JOB,
            on_a_cluster,
            lose_ray_cluster,
            BROKEN,
        ),
    )
}
