"""Faults of a run whose environment servers are pods of a cluster: a real API server, scheduler and
controllers, and two nodes that run the pods' real commands (tests/k8s/node).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from chaos_kinds import BROKEN, FLOW, KILLED, Kind, Scene, Setting, send, the_command
from chaos_kinds import KINDS as OTHERS
from chaos_project import POLL_S, ROOT, START_TIMEOUT_S, Project

from agentgym.deploy.manifests import FLEETS, RUN_LABEL, find_kubectl, rendered
from agentgym.deploy.owned import owned_process

CONTROL_PLANE = "AGENTGYM_TEST_CONTROL_PLANE"  # path of the program that starts one
AWAY_S = 60.0
LEFT = "deployments,services,poddisruptionbudgets,endpoints,endpointslices,leases,replicasets,pods"
OVERRIDES = (  # small: pods and their probes use CPU time
    *("warm_start.num_demos=16", "warm_start.steps=20", "evaluation.num_items=4"),
    *("env.deploy=kubernetes", "env.replicas=2", "env.max_sessions=256"),
    *("kubernetes.overlay=test", "kubernetes.lease_s=30", "kubernetes.ready_timeout_s=300"),
)
BEFORE = ("before the first step", "after")  # phases in which no step is running


@dataclass
class Cluster:
    """A test cluster, operated as usual: a lost node is replaced."""

    folder: Path
    stack: contextlib.ExitStack
    programs: list[Path] = field(default_factory=list)  # folders of the programs that own nodes

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "control-plane/kubeconfig"

    def kubectl(self, *words: str, objects: list[Any] | None = None) -> str:
        """Run kubectl; return its output. Errors: RuntimeError with kubectl's message."""
        completed = subprocess.run(
            [find_kubectl(), *words],
            input=objects and json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}),
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
            encoding="utf-8",
        )
        if completed.returncode:
            raise RuntimeError(f"kubectl {' '.join(words)}: {completed.stderr[-500:]}")
        return completed.stdout

    def add_nodes(self, *names: str, app: Path = ROOT) -> None:
        """Start nodes and wait until they are ready. app: what their containers have at /app."""
        node_folder = self.folder / f"nodes-{len(self.programs)}"
        command = [sys.executable, str(ROOT / "tests/k8s/node"), *names]
        command += [
            "--kubeconfig",
            str(self.kubeconfig),
            "--folder",
            str(node_folder),
            "--backoff",
            "2",
        ]
        command += ["--app", str(app)]
        self.stack.enter_context(
            owned_process(command, log_path=self.folder / f"{node_folder.name}.log", env={})
        )
        self.programs.append(node_folder)
        deadline = time.monotonic() + START_TIMEOUT_S
        while set(names) - self.nodes().keys() or self.not_ready(names):
            if time.monotonic() > deadline:
                log = (self.folder / f"{node_folder.name}.log").read_text(encoding="utf-8")
                raise RuntimeError(f"nodes {names} do not come up\n{log[-2000:]}")
            time.sleep(POLL_S)

    def not_ready(self, names: tuple[str, ...]) -> list[str]:
        listed = json.loads(self.kubectl("get", "nodes", "--output=json"))["items"]
        ready = {
            node["metadata"]["name"]
            for node in listed
            for condition in node["status"].get("conditions", ())
            if (condition["type"], condition["status"]) == ("Ready", "True")
        }
        return [name for name in names if name not in ready]

    def nodes(self) -> dict[str, psutil.Process]:
        """Live nodes: name -> process."""
        alive = {}
        for program in self.programs:
            with contextlib.suppress(OSError, ValueError):
                pids = json.loads((program / "nodes.json").read_text(encoding="utf-8"))["nodes"]
                for name, pid in pids.items():
                    with contextlib.suppress(psutil.Error):
                        process = psutil.Process(pid)
                        if process.status() != psutil.STATUS_ZOMBIE:
                            alive[name] = process
        return alive

    def containers(self, *command: str) -> list[psutil.Process]:
        """First processes of pods' containers whose command begins with these words."""
        matches = []
        for node in self.nodes().values():
            with contextlib.suppress(psutil.Error):
                for child in node.children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if child.cmdline()[: len(command)] == list(command):
                            matches.append(child)
        return matches

    def servers(self) -> list[psutil.Process]:
        """The environment servers in pods."""
        return self.containers("python", "-m", "envs", "serve")

    def left(self) -> list[str]:
        """Names of all objects that have a run's label."""
        names = self.kubectl("get", LEFT, "-n", FLEETS, f"-l{RUN_LABEL}", "--output=name")
        return names.split()

    def check_nothing_left(self) -> None:
        """Raise RuntimeError if an object of a run is left."""
        if left := self.left():
            raise RuntimeError(f"left in the cluster: {', '.join(left)}")


@contextlib.contextmanager
def control_plane() -> Iterator[Cluster]:
    """Start an API server, scheduler and controllers, without a node that accepts pods."""
    folder = Path(tempfile.mkdtemp(prefix="agentgym-cluster-"))
    script = os.environ[CONTROL_PLANE]
    plane = folder / "control-plane"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(subprocess.run, [script, "down", str(plane)], check=False, timeout=60)
        subprocess.run(
            [script, "up", str(plane)], check=True, timeout=START_TIMEOUT_S, capture_output=True
        )
        kube_cluster = Cluster(folder, stack)
        hollow = kube_cluster.kubectl("get", "nodes", "--output=name").split()
        kube_cluster.kubectl("cordon", *hollow)  # no container runs there
        yield kube_cluster


@contextlib.contextmanager
def known_to(project: Project, kube_cluster: Cluster, **variables: str) -> Iterator[None]:
    """Make the cluster known to the project, and set the variables of its commands."""
    settings = {"KUBECONFIG": str(kube_cluster.kubeconfig), **variables}
    project.server = kube_cluster
    project.environment |= settings
    try:
        yield
    finally:
        project.server = None
        for name in settings:
            del project.environment[name]


@contextlib.contextmanager
def cluster(project: Project) -> Iterator[tuple[str, ...]]:
    """Start two nodes and create the namespaces of k8s/base.
    Errors: RuntimeError if an object of a run is left in the end.
    """
    token = secrets.token_hex(16)
    with control_plane() as kube_cluster, known_to(project, kube_cluster, AGENTGYM_FLEET_KEY=token):
        kube_cluster.add_nodes("node-1", "node-2")
        kube_cluster.kubectl("apply", "--server-side", "--filename=-", objects=_base())
        yield OVERRIDES
        kube_cluster.check_nothing_left()


def _base() -> list[Any]:
    return [
        manifest
        for manifest in rendered("test", manifests=ROOT / "k8s")
        if "agentgym.io/environment" not in manifest["metadata"].get("labels", {})
        # the flow runs outside the cluster: no claim, no Prefect, no MLflow
        and manifest["kind"] not in ("PersistentVolumeClaim", "Deployment")
    ]


def no_cluster() -> str:
    if CONTROL_PLANE not in os.environ:
        return f"{CONTROL_PLANE} names no program that starts an API server"
    return "" if os.geteuid() == 0 else "pods get networks of their own from root alone"


# --- victims and faults
# ---------------------------------------------------------------------------------------------


def servers(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Environment servers of the pods, once a step uses them."""
    if process.poll() is not None or project.phase().startswith(BEFORE):
        return []
    pod_servers: list[psutil.Process] = project.server.servers()
    return pod_servers


def nodes_that_serve(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return list(project.server.nodes().values()) if servers(project, process) else []


def while_it_plays(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return the_command(project, process) if servers(project, process) else []


def while_it_comes_up(project: Project, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The flow, from its first pod until a step begins."""
    if project.phase() != BEFORE[0] or not project.server.servers():
        return []
    return the_command(project, process)


def kill_pod(scene: Scene, victims: list[psutil.Process]) -> None:
    """Kill a pod's server, then delete the pod: another pod replaces it."""
    victim = scene.chance.choice(victims)
    with contextlib.suppress(psutil.Error, OSError):
        pod = (
            Path(f"/proc/{victim.pid}/root/etc/hosts")
            .read_text(encoding="utf-8")
            .splitlines()[1]
            .split()[1]
        )
        send(signal.SIGKILL)(scene, [victim])
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
    send(signal.SIGKILL)(scene, [victim])
    time.sleep(scene.chance.uniform(0.0, 10.0))
    kube_cluster.kubectl("delete", "node", name)
    kube_cluster.add_nodes("node-3")
    scene.trial.notes.append(f"{name} was lost")


def be_away(scene: Scene, _: list[psutil.Process]) -> None:
    """Stop the API server for a minute: neither the flow nor nodes and controllers get answers."""
    pid = int(
        (scene.project.server.folder / "control-plane/apiserver.pid").read_text(encoding="utf-8")
    )
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(AWAY_S)
    finally:
        os.kill(pid, signal.SIGCONT)


ON_CLUSTER = Setting(FLOW, around=cluster, missing=no_cluster)
KINDS = OTHERS | {
    kind.name: kind
    for kind in (
        Kind("pod", "pod of a fleet, killed", ON_CLUSTER, servers, kill_pod, BROKEN),
        Kind("node", "node of a cluster, lost", ON_CLUSTER, nodes_that_serve, lose_node, BROKEN),
        Kind(
            "api-server",
            f"API server of a cluster, away for {AWAY_S:g} s",
            ON_CLUSTER,
            while_it_plays,
            be_away,
            BROKEN,
        ),
        Kind(
            "fleet",
            "flow process while its fleet comes up, SIGKILL",
            ON_CLUSTER,
            while_it_comes_up,
            send(signal.SIGKILL),
            KILLED,
        ),
    )
}
