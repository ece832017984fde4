"""A test cluster, and the deployment for flow runs that k8s/README.md describes on it: Prefect's
server, its worker and MLflow as pods, with their own accounts, probes and logins.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from chaos_project import START_TIMEOUT_S
from harness import POLL_S, ROOT, output_of, read, wait_for

from agentgym.deploy.manifests import ENVIRONMENT_LABEL, FLEETS, RUN_LABEL, find_kubectl, rendered
from agentgym.deploy.owned import owned_process

USER = "agentgym"
STATE, PREFECT, MLFLOW = (f"agentgym-{name}" for name in ("state", "prefect", "mlflow"))  # claims
PORTS = {"prefect": 4200, "mlflow": 5000}
BEGIN_S = 900.0  # until all three are ready on a very busy machine

CONTROL_PLANE = "AGENTGYM_TEST_CONTROL_PLANE"  # path of the program that starts one
LEFT = "deployments,services,poddisruptionbudgets,endpoints,endpointslices,leases,replicasets,pods"


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
        return output_of(
            [find_kubectl(), *words],
            stdin=objects and json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}),
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            timeout_s=START_TIMEOUT_S,
        )

    def add_nodes(self, *names: str, app: Path = ROOT) -> None:
        """Start nodes and wait until they are ready. app: mounted at /app in containers."""
        node_folder = self.folder / f"nodes-{len(self.programs)}"
        command = [sys.executable, str(ROOT / "tests/k8s/node"), *names, "--app", str(app)]
        command += ["--kubeconfig", str(self.kubeconfig), "--folder", str(node_folder)]
        command += ["--backoff", "2"]
        log = self.folder / f"{node_folder.name}.log"
        self.stack.enter_context(owned_process(command, log_path=log, env={}))
        self.programs.append(node_folder)

        def ready() -> bool:
            return not (set(names) - self.nodes().keys() or self.not_ready(names))

        wait_for(ready, START_TIMEOUT_S, f"nodes {names} do not come up", log=log)

    def not_ready(self, names: tuple[str, ...]) -> list[str]:
        ready = {
            node["metadata"]["name"]
            for node in json.loads(self.kubectl("get", "nodes", "--output=json"))["items"]
            for condition in node["status"].get("conditions", ())
            if (condition["type"], condition["status"]) == ("Ready", "True")
        }
        return [name for name in names if name not in ready]

    def nodes(self) -> dict[str, psutil.Process]:
        """Live nodes: name -> process."""
        alive = {}
        for program in self.programs:
            with contextlib.suppress(OSError, ValueError):
                for name, pid in read(program / "nodes.json")["nodes"].items():
                    with contextlib.suppress(psutil.Error):
                        process = psutil.Process(pid)
                        if process.status() != psutil.STATUS_ZOMBIE:
                            alive[name] = process
        return alive

    def containers(self, *command: str) -> list[psutil.Process]:
        """Return the first processes of pods' containers whose command begins with these words."""
        matches = []
        for node in self.nodes().values():
            with contextlib.suppress(psutil.Error):
                for child in node.children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if child.cmdline()[: len(command)] == list(command):
                            matches.append(child)
        return matches

    def servers(self) -> list[psutil.Process]:
        return self.containers("python", "-m", "envs", "serve")

    def check_nothing_left(self) -> None:
        left = self.kubectl("get", LEFT, "-n", FLEETS, f"-l{RUN_LABEL}", "--output=name").split()
        if left:
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
        output_of([script, "up", plane], timeout_s=START_TIMEOUT_S)
        kube_cluster = Cluster(folder, stack)
        hollow = kube_cluster.kubectl("get", "nodes", "--output=name").split()
        kube_cluster.kubectl("cordon", *hollow)  # no container runs there
        yield kube_cluster


@dataclass
class Deployed:
    """Installation whose namespaces are `namespace`, `namespace`-flows and `namespace`-fleets."""

    kubectl: Callable[..., str]
    namespace: str
    volumes: Mapping[str, Path]  # claim -> folder of this machine
    # of flow runs, in addition to MLflow's
    credentials: Mapping[str, str] = field(default_factory=dict)
    password: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    @property
    def flows(self) -> str:
        return f"{self.namespace}-flows"

    @property
    def fleets(self) -> str:
        return f"{self.namespace}-fleets"

    @property
    def login(self) -> str:
        return f"{USER}:{self.password}"

    @property
    def mlflow_login(self) -> dict[str, str]:
        names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
        return dict(zip(names, (USER, self.password), strict=True))

    def objects(self) -> list[Any]:
        """Return the overlay `test` without environments, with volumes and Secrets."""
        manifests = [
            manifest
            for manifest in rendered("test", installation=self.namespace, manifests=ROOT / "k8s")
            if ENVIRONMENT_LABEL not in manifest["metadata"].get("labels", {})
        ]
        uri = f"http://mlflow.{self.namespace}.svc:5000"
        credentials = {"MLFLOW_TRACKING_URI": uri, **self.mlflow_login, **self.credentials}
        logins = {
            "agentgym-prefect": {"PREFECT_API_AUTH_STRING": self.login},
            "agentgym-credentials": credentials,
        }
        return [
            *manifests,
            *(self._volume(claim, folder) for claim, folder in self.volumes.items()),
            secret_of("agentgym-fleet-key", {"AGENTGYM_FLEET_KEY": self.token}, self.flows),
            *(
                secret_of(name, values, namespace)
                for namespace in (self.namespace, self.flows)
                for name, values in logins.items()
            ),
        ]

    def _volume(self, claim: str, folder: Path) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        namespace = self.flows if claim == STATE else self.namespace
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{self.namespace}-{claim}"},
            "spec": {
                "capacity": {"storage": "100Gi"},
                "accessModes": ["ReadWriteOnce"],
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(folder)},
                "claimRef": {"namespace": namespace, "name": claim},
            },
        }

    def bring_up(self) -> None:
        """Apply all objects; wait until all are ready. Errors: RuntimeError with the first log."""
        self.kubectl("apply", "--server-side", "--filename=-", objects=self.objects())
        deadline = time.monotonic() + BEGIN_S
        while waiting := self.not_ready():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not ready: {waiting}\n{self.logs(waiting[0])[-3000:]}")
            time.sleep(POLL_S)

    def not_ready(self) -> list[str]:
        """Return the names of the services' Deployments that are not ready."""
        return [
            deployment["metadata"]["name"]
            for deployment in self.get("deployments", "app.kubernetes.io/component=services")
            if deployment.get("status", {}).get("readyReplicas", 0) < deployment["spec"]["replicas"]
        ]

    def logs(self, deployment: str) -> str:
        words = ("--all-containers", "--tail=30", "--prefix")
        return self.kubectl("logs", f"deployment/{deployment}", "-n", self.namespace, *words)

    def get(self, kinds: str, *labels: str, namespace: str = "") -> list[Any]:
        words = ("get", kinds, "-n", namespace or self.namespace, "--output=json")
        output = self.kubectl(*words, *(f"--selector={','.join(labels)}" for _ in labels[:1]))
        return json.loads(output)["items"]

    def address(self, service: str) -> str:
        """Return `host:port` of the ready pod behind the service. Errors: RuntimeError."""
        found = [one for one in self.get("endpoints") if one["metadata"]["name"] == service]
        for subset in [subset for endpoints in found for subset in endpoints.get("subsets") or ()]:
            for address in subset.get("addresses") or ():
                return f"{address['ip']}:{PORTS[service]}"
        raise RuntimeError(f"no pod is ready behind service {service}")


def secret_of(name: str, values: Mapping[str, str], namespace: str = "") -> Any:
    """Return a Secret. namespace: "" for the namespace of the client that creates it."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    meta = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data}


@contextlib.contextmanager
def forwarded(deployed: Deployed, service: str) -> Iterator[str]:
    """Yield a local `host:port` that leads to the pod behind a Service, also after its replacement.
    `kubectl port-forward` does the same, but needs features that the tests' nodes lack.
    """
    known: list[str] = []

    def reach() -> socket.socket:
        for _ in range(2):
            if not known:
                known.append(deployed.address(service))
            host, port = known[0].split(":")
            try:
                return socket.create_connection((host, int(port)), timeout=5)
            except OSError:
                known.clear()
        raise OSError("no pod answers")

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError, RuntimeError), reach() as pod:
                pod.settimeout(None)
                back = threading.Thread(target=pump, args=(pod, self.request), daemon=True)
                back.start()
                pump(self.request, pod)
                back.join()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    # the Service's own port: MLflow checks it in the Host header
    host = ".".join(["127", *(str(1 + secrets.randbelow(250)) for _ in range(3))])
    with Server((host, PORTS[service]), Connection) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"{host}:{PORTS[service]}"
        server.shutdown()
