"""Faults on a cluster: a real API server, scheduler and controllers, and nodes that run the pods'
real commands (tests/k8s/node).

First, runs whose environment servers are pods. Then, a flow run that Prefect's worker started
there, with Prefect, MLflow and the run as pods with their claims; and a step whose Ray cluster
belongs to a RayJob, for which a stand-in replaces KubeRay's operator.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import yaml
from chaos_deployed import (
    CONTROL_PLANE,
    MLFLOW,
    PREFECT,
    STATE,
    Cluster,
    Deployed,
    control_plane,
    forwarded,
    secret_of,
)
from chaos_kinds import (
    FLOW,
    KILL,
    KILLED,
    STAGE,
    Kind,
    Scene,
    Setting,
    fill_disk,
    named,
    the_command,
)
from chaos_project import START_TIMEOUT_S, Project
from chaos_servers import MlflowServer, no_mount, ray_variables, s3_store, small_disk
from harness import ROOT, free_port, read, wait_for

from agentgym.deploy.kube.client import Kind as Resource
from agentgym.deploy.kube.client import connect
from agentgym.deploy.kuberay import RAY_CLUSTER
from agentgym.deploy.manifests import FLEETS, SERVICES, rendered
from agentgym.deploy.owned import owned_process

API_AWAY_S = 60.0
OVERRIDES = (  # small: pods and their probes use CPU time
    *("warm_start.num_demos=16", "warm_start.steps=20", "evaluation.num_items=4"),
    *("env.deploy=kubernetes", "env.replicas=2", "env.max_sessions=256"),
    *("kubernetes.overlay=test", "kubernetes.lease_s=30", "kubernetes.ready_timeout_s=300"),
)
BEFORE = ("before the first step", "after")  # phases in which no step is running


def known_to(project: Project, kube_cluster: Cluster, **variables: str) -> Any:
    settings = {"KUBECONFIG": str(kube_cluster.kubeconfig), **variables}
    return project.knows(kube_cluster, settings)


@contextlib.contextmanager
def cluster(project: Project) -> Iterator[tuple[str, ...]]:
    """Start two nodes and create the namespaces of k8s/base.
    Errors: RuntimeError if an object of a run is left in the end.
    """
    token = secrets.token_hex(16)
    with control_plane() as kube_cluster, known_to(project, kube_cluster, AGENTGYM_FLEET_KEY=token):
        kube_cluster.add_nodes("node-1", "node-2")
        base = [
            manifest
            for manifest in rendered("test", manifests=ROOT / "k8s")
            if "agentgym.io/environment" not in manifest["metadata"].get("labels", {})
            # the flow runs outside the cluster: no claim, no Prefect, no MLflow
            and manifest["kind"] not in ("PersistentVolumeClaim", "Deployment")
        ]
        kube_cluster.kubectl("apply", "--server-side", "--filename=-", objects=base)
        yield OVERRIDES
        kube_cluster.check_nothing_left()


def no_cluster() -> str:
    if CONTROL_PLANE not in os.environ:
        return f"{CONTROL_PLANE} names no program that starts an API server"
    return "" if os.geteuid() == 0 else "pods get networks of their own from root alone"


# --- victims and faults


def servers(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the pods' environment servers once a step uses them."""
    if process.poll() is not None or project.phase().startswith(BEFORE):
        return []
    return list(project.server.servers())


def nodes_that_serve(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return list(project.server.nodes().values()) if servers(project, process) else []


def while_it_plays(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return the_command(project, process) if servers(project, process) else []


def while_it_comes_up(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the flow's process from its first pod until a step starts."""
    if project.phase() != BEFORE[0] or not project.server.servers():
        return []
    return the_command(project, process)


def kill_pod(scene: Scene, victims: list[psutil.Process]) -> None:
    """Kill a pod's server, then delete the pod: another pod replaces it."""
    victim = scene.chance.choice(victims)
    with contextlib.suppress(psutil.Error, OSError):
        hosts = Path(f"/proc/{victim.pid}/root/etc/hosts").read_text(encoding="utf-8")
        pod = hosts.splitlines()[1].split()[1]
        KILL(scene, [victim])
        kube_cluster = scene.project.server
        kube_cluster.kubectl("delete", "pod", pod, "-n", FLEETS, "--force", "--ignore-not-found")
        scene.trial.notes.append(pod)
        return
    scene.trial.hit = False


def lose_node(scene: Scene, victims: list[psutil.Process]) -> None:
    """Kill a node with its pods and remove its object; another node joins instead."""
    kube_cluster = scene.project.server
    victim = scene.chance.choice(victims)
    (name,) = (name for name, process in kube_cluster.nodes().items() if process == victim)
    KILL(scene, [victim])
    time.sleep(scene.chance.uniform(0.0, 10.0))
    kube_cluster.kubectl("delete", "node", name)
    kube_cluster.add_nodes("node-3")
    scene.trial.notes.append(f"{name} was lost")


def be_away(scene: Scene, _: list[psutil.Process]) -> None:
    """Stop the API server for a minute, also for the nodes and controllers."""
    pid = read(scene.project.server.folder / "control-plane/apiserver.pid")
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(API_AWAY_S)
    finally:
        os.kill(pid, signal.SIGCONT)


# --- flow runs on the cluster

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
MLFLOW_AWAY_S = (5.0, 40.0)
ON_KUBERAY = ("compute=kuberay", "kuberay.mode=HTTPMode", "deterministic=true")


@contextlib.contextmanager
def differing(project: Project) -> Iterator[None]:
    """Replace the project's parameter file by one for pods, combined with TINY."""
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
        return list(project.server.containers("python", "-m", "services.pods", name))

    return victims


def send_mlflow_away(scene: Scene, _: list[psutil.Process]) -> None:
    scale = ("scale", "deployment/mlflow", "--namespace", SERVICES)
    scene.project.server.kubectl(*scale, "--replicas=0")
    away_s = scene.chance.uniform(*MLFLOW_AWAY_S)
    time.sleep(away_s)
    scene.project.server.kubectl(*scale, "--replicas=1")
    scene.trial.notes.append(f"away for {away_s:.0f} s and its start")


# --- steps as RayJobs

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
        variables = {**ray_variables(token), "PYTHONPATH": ""}
        command = [sys.executable, "-c", RAY, folder, str(address_file)]
        with owned_process(command, log_path=log, env=variables) as process:
            wait_for(address_file.exists, START_TIMEOUT_S, "no Ray cluster", process, log)
            yield address_file.read_text(encoding="utf-8")


@contextlib.contextmanager
def kuberay(project: Project) -> Iterator[tuple[str, ...]]:
    """Start an API server, a stand-in for KubeRay's operator with a Ray cluster, S3 and MLflow."""
    from ray.job_submission import JobSubmissionClient

    port, token = free_port(), secrets.token_hex(32)
    # 127.1 counts as another machine for the rules, and resolves to this one
    server = MlflowServer(project, port, hosts=f"127.1:{port},127.0.0.1:{port}")
    with (
        s3_store(project) as store,
        control_plane() as kube_cluster,
        local_ray(token) as dashboard,
        contextlib.closing(connect(kubeconfig=kube_cluster.kubeconfig, namespace=FLEETS)) as kube,
        contextlib.ExitStack() as stack,
    ):
        server.start()
        stack.callback(server.kill)
        bucket = project.server
        names = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION", "ENDPOINT_URL")
        credentials = {f"AWS_{name}": project.environment[f"AWS_{name}"] for name in names}
        kube_cluster.kubectl("create", "namespace", FLEETS)
        kube.create(secret_of("agentgym-rollout", credentials))
        jobs = kube_cluster.folder / "jobs"
        jobs.mkdir()
        client = JobSubmissionClient(dashboard, headers={"Authorization": f"Bearer {token}"})
        tests = runpy.run_path(str(ROOT / "tests/agentgym/deploy/kuberay_stand_in.py"))
        operator = stack.enter_context(tests["StandIn"](kube, client, jobs))
        stack.enter_context(known_to(project, kube_cluster, AGENTGYM_IMAGE="registry/agentgym:1"))
        project.server = SimpleNamespace(operator=operator, commits=bucket.commits)
        tracking = f"tracking.uri=http://127.1:{port}"
        yield (*store, *ON_KUBERAY, tracking, "store.lease_ttl_s=5")
        if left := kube.list(RAY_CLUSTER).items + kube.list(Resource("ray.io/v1", "RayJob")).items:
            raise RuntimeError(f"left: {[resource['metadata']['name'] for resource in left]}")
        if operator.errors:
            raise RuntimeError(f"the stand-in failed: {operator.errors[:3]}")


def on_a_cluster(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the started process once the stage's own RayJob runs and has a commit."""
    runs = any(name.endswith("-s1-a1") for name in project.server.operator.ran)
    return the_command(project, process) if runs and project.server.commits() else []


def lose_ray_cluster(scene: Scene, _: list[psutil.Process]) -> None:
    operator = scene.project.server.operator
    scene.trial.hit = operator.lose_cluster(operator.ran[-1])
    scene.trial.notes.append(operator.ran[-1])


ON_CLUSTER = Setting(FLOW, around=cluster, missing=no_cluster)
DEPLOYED = Setting(
    ("-c", RUN), around=deployed, missing=lambda: no_cluster() or no_mount(), takes_overrides=False
)
AS_RAY_JOB = Setting(
    (*STAGE, "--with-parents"),
    around=kuberay,
    missing=no_cluster,
    is_ray=True,
    stays=r"mlflow.*server|s3_server",
)
AWAY = f"API server of a cluster, away for {API_AWAY_S:g} s"
COMES_UP = "flow process while its fleet comes up, SIGKILL"
KINDS = named(
    Kind("pod", "pod of a fleet, killed", ON_CLUSTER, servers, kill_pod),
    Kind("node", "node of a cluster, lost", ON_CLUSTER, nodes_that_serve, lose_node),
    Kind("api-server", AWAY, ON_CLUSTER, while_it_plays, be_away),
    Kind("fleet", COMES_UP, ON_CLUSTER, while_it_comes_up, codes=KILLED),
    Kind("kube-worker", "Prefect's worker on a cluster, SIGKILL", DEPLOYED, of_service("worker")),
    Kind("kube-prefect", "Prefect's server on a cluster, SIGKILL", DEPLOYED, of_service("prefect")),
    Kind(
        "kube-mlflow",
        "MLflow on a cluster, without a pod for a while",
        DEPLOYED,
        the_command,
        send_mlflow_away,
    ),
    Kind("claim", "claim of a flow run full", DEPLOYED, the_command, fill_disk),
    Kind(
        "ray-cluster", "RayCluster of a RayJob, deleted", AS_RAY_JOB, on_a_cluster, lose_ray_cluster
    ),
)
