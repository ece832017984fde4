"""What k8s/README.md deploys for flow runs, on nodes of the tests: Prefect's server, its worker and
MLflow as pods, with their own accounts, probes and logins.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_project import POLL_S, ROOT, START_TIMEOUT_S

from agentgym.deploy.manifests import ENVIRONMENT_LABEL, rendered
from agentgym.deploy.owned import owned_process, tail

USER = "agentgym"
STATE, PREFECT, MLFLOW = (f"agentgym-{each}" for each in ("state", "prefect", "mlflow"))  # claims
PORTS = {"prefect": 4200, "mlflow": 5000}
BEGIN_S = 900.0  # of all three, on a machine that is very busy
AWS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@dataclass
class Deployed:
    """An installation: its namespaces are `namespace`, and with -flows and -fleets after it."""

    kubectl: Callable[..., str]
    namespace: str
    volumes: Mapping[str, Path]  # claim -> folder of this machine
    credentials: Mapping[str, str] = field(default_factory=dict)  # of flow runs, beside MLflow's
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
        """Of the overlay `test` all but environments, with volumes and Secrets."""
        own = [
            each
            for each in rendered("test", installation=self.namespace, manifests=ROOT / "k8s")
            if ENVIRONMENT_LABEL not in each["metadata"].get("labels", {})
        ]
        uri = f"http://mlflow.{self.namespace}.svc:5000"
        told = {"MLFLOW_TRACKING_URI": uri, **self.mlflow_login, **self.credentials}
        logins = {
            "agentgym-prefect": {"PREFECT_API_AUTH_STRING": self.login},
            "agentgym-credentials": told,
        }
        return [
            *own,
            *(self._volume(claim, folder) for claim, folder in self.volumes.items()),
            self._secret(self.flows, "agentgym-fleet-key", {"AGENTGYM_FLEET_KEY": self.token}),
            *(
                self._secret(namespace, name, values)
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

    def _secret(self, namespace: str, name: str, values: Mapping[str, str]) -> Any:
        data = {key: base64.b64encode(each.encode()).decode() for key, each in values.items()}
        meta = {"name": name, "namespace": namespace}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data}

    def bring_up(self) -> None:
        """Errors: RuntimeError with what is not ready, and what it said."""
        self.kubectl("apply", "--server-side", "--filename=-", objects=self.objects())
        deadline = time.monotonic() + BEGIN_S
        while waiting := self.not_ready():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not ready: {waiting}\n{self.logs(waiting[0])[-3000:]}")
            time.sleep(POLL_S)

    def not_ready(self) -> list[str]:
        """Names of Deployments of services."""
        return [
            each["metadata"]["name"]
            for each in self.get("deployments", "app.kubernetes.io/component=services")
            if each.get("status", {}).get("readyReplicas", 0) < each["spec"]["replicas"]
        ]

    def logs(self, deployment: str) -> str:
        words = ("--all-containers", "--tail=30", "--prefix")
        return self.kubectl("logs", f"deployment/{deployment}", "-n", self.namespace, *words)

    def get(self, kinds: str, *labels: str, namespace: str = "") -> list[Any]:
        words = ("get", kinds, "-n", namespace or self.namespace, "--output=json")
        told = self.kubectl(*words, *(f"--selector={','.join(labels)}" for _ in labels[:1]))
        found: list[Any] = json.loads(told)["items"]
        return found

    def pods(self, role: str, namespace: str = "") -> dict[str, str]:
        """Name -> address, of those that run and are to stay."""
        return {
            each["metadata"]["name"]: each["status"].get("podIP", "")
            for each in self.get("pods", f"agentgym.io/role={role}", namespace=namespace)
            if each["status"].get("phase") == "Running"
            and "deletionTimestamp" not in each["metadata"]
        }

    def address(self, service: str) -> str:
        """`host:port` of the ready pod behind it. Errors: RuntimeError."""
        for each in self.get("endpoints"):
            if each["metadata"]["name"] == service:
                for subset in each.get("subsets") or ():
                    for address in subset.get("addresses") or ():
                        return f"{address['ip']}:{PORTS[service]}"
        raise RuntimeError(f"no pod is ready behind service {service}")

    def remove(self) -> None:
        """Of the cluster what has no namespace; the rest goes with the control plane."""
        for claim in self.volumes:
            self.kubectl("delete", "persistentvolume", f"{self.namespace}-{claim}", "--wait=false")


def first_process(pod: str) -> int:
    """Process 1 of a pod's container, as this machine counts it. Errors: RuntimeError."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            hosts = (path / "root/etc/hosts").read_text(encoding="utf-8").splitlines()
            spaces = (
                (path / "status")
                .read_text(encoding="utf-8")
                .partition("NSpid:")[2]
                .splitlines()[0]
                .split()
            )
            if len(spaces) > 1 and spaces[-1] == "1" and hosts[1].split()[1] == pod:
                return int(path.name)
    raise RuntimeError(f"no process of pod {pod} is here")


def kill_container(pod: str) -> None:
    """All of it, as the kernel ends what takes too much memory."""
    os.kill(first_process(pod), signal.SIGKILL)


@contextlib.contextmanager
def forwarded(deployed: Deployed, service: str) -> Iterator[str]:
    """`host:port` here that leads to the pod behind a Service, and to the next one after it; as
    `kubectl port-forward`, which asks more of a node than those of the tests know.
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
        raise OSError("nobody answers")

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

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

    # the Service's own port, which MLflow asks for in the name it is called by
    host = ".".join(["127", *(str(1 + secrets.randbelow(250)) for _ in range(3))])
    with socket.create_server((host, PORTS[service])) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield f"{host}:{PORTS[service]}"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def s3_for_pods(host: str, folder: Path, bucket: str) -> Iterator[tuple[Any, dict[str, str]]]:
    """(a client, the variables of pods) of an S3 server (moto) that pods reach at that address."""
    import boto3

    port, log = folder / "s3-port", folder / "s3.log"
    command = [sys.executable, "-P", str(ROOT / "tests/s3_server.py"), str(port), host]
    with owned_process(command, log_path=log, env={}) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not port.exists():
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"no S3 server\n{tail(log)}")
            time.sleep(POLL_S)
        variables = {**AWS, "AWS_ENDPOINT_URL": f"http://{host}:{port.read_text(encoding='utf-8')}"}
        client = boto3.client(
            "s3",
            endpoint_url=variables["AWS_ENDPOINT_URL"],
            aws_access_key_id=AWS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=AWS["AWS_SECRET_ACCESS_KEY"],
            region_name=AWS["AWS_DEFAULT_REGION"],
        )
        client.create_bucket(Bucket=bucket)
        yield client, variables


def prefect_command(
    words: Sequence[str], api: str, login: str, home: Path, timeout_s: float = 180.0
) -> str:
    """What `prefect WORDS` prints, as an operator types it. Errors: RuntimeError."""
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *words],
        env={
            **os.environ,
            "PREFECT_API_URL": api,
            "PREFECT_API_AUTH_STRING": login,
            "PREFECT_HOME": str(home),
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        encoding="utf-8",
    )
    if done.returncode:
        raise RuntimeError(f"prefect {' '.join(words)}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout
