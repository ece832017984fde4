"""The deployment for flow runs that k8s/README.md describes, on the tests' nodes: Prefect's server,
its worker and MLflow as pods, with their own accounts, probes and logins.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import POLL_S, ROOT, output_of

from agentgym.deploy.manifests import ENVIRONMENT_LABEL, rendered

USER = "agentgym"
STATE, PREFECT, MLFLOW = (f"agentgym-{name}" for name in ("state", "prefect", "mlflow"))  # claims
PORTS = {"prefect": 4200, "mlflow": 5000}
BEGIN_S = 900.0  # until all three are ready on a very busy machine


@dataclass
class Deployed:
    """An installation. Its namespaces are `namespace`, `namespace`-flows and `namespace`-fleets."""

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
        """All objects of the overlay `test` except environments, with volumes and Secrets."""
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
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{self.namespace}-{claim}"},
            "spec": {
                "capacity": {"storage": "100Gi"},
                "accessModes": ["ReadWriteOnce"],
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(folder)},
                "claimRef": {
                    "namespace": self.flows if claim == STATE else self.namespace,
                    "name": claim,
                },
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
        """Names of the services' Deployments that are not ready."""
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
        items: list[Any] = json.loads(output)["items"]
        return items

    def pods(self, role: str, namespace: str = "") -> dict[str, str]:
        """Pods that run and are not being deleted: name -> address."""
        return {
            pod["metadata"]["name"]: pod["status"].get("podIP", "")
            for pod in self.get("pods", f"agentgym.io/role={role}", namespace=namespace)
            if pod["status"].get("phase") == "Running"
            and "deletionTimestamp" not in pod["metadata"]
        }

    def address(self, service: str) -> str:
        """Return `host:port` of the ready pod behind the service. Errors: RuntimeError."""
        for endpoints in self.get("endpoints"):
            if endpoints["metadata"]["name"] == service:
                for subset in endpoints.get("subsets") or ():
                    for address in subset.get("addresses") or ():
                        return f"{address['ip']}:{PORTS[service]}"
        raise RuntimeError(f"no pod is ready behind service {service}")

    def remove(self) -> None:
        """Remove the objects without a namespace; the rest goes with the control plane."""
        for claim in self.volumes:
            self.kubectl("delete", "persistentvolume", f"{self.namespace}-{claim}", "--wait=false")


def secret_of(name: str, values: Mapping[str, str], namespace: str = "") -> Any:
    """Return a Secret. namespace: empty for that of the client that creates it."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    meta = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data}


def first_process(pod: str) -> int:
    """Return the host's pid of process 1 of a pod's container. Errors: RuntimeError."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            hosts = (path / "root/etc/hosts").read_text(encoding="utf-8").splitlines()
            status = (path / "status").read_text(encoding="utf-8")
            spaces = status.partition("NSpid:")[2].splitlines()[0].split()
            if len(spaces) > 1 and spaces[-1] == "1" and hosts[1].split()[1] == pod:
                return int(path.name)
    raise RuntimeError(f"no process of pod {pod} is here")


def kill_container(pod: str) -> None:
    """Kill the whole container, as the kernel does on an out-of-memory error."""
    os.kill(first_process(pod), signal.SIGKILL)


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

    def serve(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, RuntimeError), reach() as pod:
            pod.settimeout(None)
            back = threading.Thread(target=pump, args=(pod, client), daemon=True)
            back.start()
            pump(client, pod)
            back.join()

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    # the Service's own port: MLflow checks it in the Host header
    host = ".".join(["127", *(str(1 + secrets.randbelow(250)) for _ in range(3))])
    with socket.create_server((host, PORTS[service])) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield f"{host}:{PORTS[service]}"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def prefect_command(
    words: Sequence[str], api: str, login: str, home: Path, timeout_s: float = 180.0
) -> str:
    """Run `prefect WORDS` as an operator does; return its output. Errors: RuntimeError."""
    variables = {"PREFECT_API_URL": api, "PREFECT_API_AUTH_STRING": login, "COLUMNS": "200"}
    return output_of(
        ["-m", "prefect", "--no-prompt", *words],
        env={**os.environ, **variables, "PREFECT_HOME": str(home)},
        timeout_s=timeout_s,
    )
