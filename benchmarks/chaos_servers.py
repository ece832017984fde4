"""Servers around a command whose run is struck by faults: MLflow, Prefect, a small or slow disk, S3
and Ray clusters. Each is a context manager of a project that yields the command's overrides.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from chaos_project import GONE_WITHIN_S, START_TIMEOUT_S, Project
from harness import completed, free_port, read, s3_bucket, wait_for, wait_for_url


@dataclass
class MlflowServer:
    """An MLflow server, operated as usual: it restarts on the same port."""

    project: Project
    port: int
    process: subprocess.Popen[bytes] | None = None
    hosts: str = ""  # allowed Host names, in addition to the default ones

    def start(self) -> None:
        state = self.project.state
        command = ["-m", "mlflow", "server", f"--backend-store-uri=sqlite:///{state / 'mlflow.db'}"]
        command += [f"--artifacts-destination={state / 'mlflow-artifacts'}", "--workers=1"]
        command += ["--host=127.0.0.1", f"--port={self.port}"]
        if self.hosts:
            command += ["--allowed-hosts", self.hosts]
        log = self.project.scratch / "mlflow-server.log"
        self.process = self.project.start(command, log)
        wait_for_url(f"http://127.0.0.1:{self.port}/health", self.process, log)

    def kill(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def mlflow_server(project: Project) -> Iterator[tuple[str, ...]]:
    server = MlflowServer(project, free_port())
    server.start()
    project.server = server
    try:
        yield (f"tracking.uri=http://127.0.0.1:{server.port}",)
    finally:
        server.kill()


@contextlib.contextmanager
def small_disk(project: Project) -> Iterator[tuple[str, ...]]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs"]
    subprocess.run([*mount, str(project.state)], check=True)
    try:
        yield ()
    finally:
        for process in project.processes():  # open files would block the unmount
            process.kill()
        subprocess.run(["umount", "--lazy", str(project.state)], check=True)


@contextlib.contextmanager
def services(project: Project) -> Iterator[tuple[str, ...]]:
    """Run `make up`: a Prefect server, a worker and MLflow under a supervisor."""
    # the default ports may be in use
    ports = ("--prefect-port", str(free_port()), "--mlflow-port", str(free_port()))
    project.must("-m", "services", "up", *ports)
    try:
        yield ()
    finally:
        project.must("-m", "services", "down")


SLOW_DISK = """
import os, time
fsync = os.fsync
def slowly(handle):
    time.sleep(0.5)
    fsync(handle)
os.fsync = slowly
"""


@contextlib.contextmanager
def slow_disk(project: Project) -> Iterator[tuple[str, ...]]:
    folder = project.scratch / "slow"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SLOW_DISK, encoding="utf-8")
    before = project.environment["PYTHONPATH"]
    project.environment["PYTHONPATH"] = f"{folder}{os.pathsep}{before}"
    try:
        yield ()
    finally:
        project.environment["PYTHONPATH"] = before


@dataclass
class S3Server:
    bucket: str
    client: Any

    def commits(self) -> list[str]:
        """Return the keys of stage 1's commits, in order."""
        listed = self.client.list_objects_v2(Bucket=self.bucket, Prefix="run/steps/stage-1-")
        keys = [row["Key"] for row in listed.get("Contents", ())]
        return sorted(key for key in keys if "/manifests/" in key)

    def newest(self) -> tuple[str, bytes]:
        """Return the key and content of the newest commit's file."""
        key = self.commits()[-1]
        return key, self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()


@contextlib.contextmanager
def s3_store(project: Project) -> Iterator[tuple[str, ...]]:
    """Run an S3 server with a bucket for the project's store."""
    with s3_bucket(project.scratch, "chaos") as (client, variables):
        (project.home / "aws").touch()  # an empty file instead of the user's settings
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            variables[name] = str(project.home / "aws")
        with project.knows(S3Server("chaos", client), variables):
            yield ("store.uri=s3://chaos/run",)


RAY_CLUSTER = """
import itertools, json, os, sys
from ray.cluster_utils import Cluster
numbers = itertools.count(2)
address = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": 0, "object_store_memory": \
150_000_000, "temp_dir": sys.argv[1]}
cluster = Cluster(initialize_head=True, head_node_args=address)
def add():
    place = os.path.join(sys.argv[1], str(next(numbers)))  # in one folder a node would unpack a \
job's files over its neighbour's
    return cluster.add_node(num_cpus=2, object_store_memory=150_000_000, \
temp_dir=place).all_processes["raylet"][0].process.pid
def tell(pid):
    with open(sys.argv[2] + ".new", "w") as file:
        json.dump({"address": cluster.address, "dashboard": "http://" + cluster.webui_url, \
"raylet": pid}, file)
    os.rename(sys.argv[2] + ".new", sys.argv[2])
tell(add())
for line in sys.stdin:
    tell(add())
cluster.shutdown()
"""


@dataclass
class RayCluster:
    """Two Ray nodes on this machine, operated as usual: a lost node is replaced."""

    project: Project
    folder: Path
    process: subprocess.Popen[bytes]

    def facts(self) -> dict[str, Any]:
        """Return the cluster's address, dashboard, and the process of the second node."""
        path, log = self.folder / "facts.json", self.project.scratch / "ray.log"
        wait_for(path.exists, START_TIMEOUT_S, "no Ray cluster", self.process, log)
        return read(path)

    def second_node(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            raylet = psutil.Process(self.facts()["raylet"])
            return [raylet, *raylet.children(recursive=True)]
        return []

    def replace_node(self) -> None:
        (self.folder / "facts.json").unlink()
        assert self.process.stdin is not None
        self.process.stdin.write(b"add\n")
        self.process.stdin.flush()
        self.facts()


@contextlib.contextmanager
def ray_cluster(project: Project, fact: str) -> Iterator[tuple[str, ...]]:
    """Start a Ray cluster of two nodes with two CPUs each, and an environment server for both.
    Yield overrides; `fact` chooses the cluster's address or its dashboard.
    """
    folder = Path(tempfile.mkdtemp(prefix="agc-", dir="/tmp"))  # a socket's path has 107 bytes
    project.environment |= ray_variables(secrets.token_hex(32))
    command = [sys.executable, "-c", RAY_CLUSTER, str(folder), str(folder / "facts.json")]
    (folder / "ray").mkdir()  # Ray writes the address here
    with (project.scratch / "ray.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=project.folder,
            env={**project.environment, "TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    project.server = RayCluster(project, folder, process)
    params = yaml.safe_load((project.folder / "params.yaml").read_text(encoding="utf-8"))
    # a loopback address that counts as another host: the nodes may use it
    host, port = "127.0.0.2", free_port()
    serve = ["-m", "envs", "serve", "babyai", "--options", json.dumps(params["env"]["options"])]
    serve += ["--host", host, "--port", str(port)]
    url, log_path = f"http://{host}:{port}", project.scratch / "environment.log"
    environment = project.start(serve, log_path)
    try:
        wait_for_url(f"{url}/readyz", environment, log_path)
        yield f"ray.address={project.server.facts()[fact]}", f"env.endpoints=['{url}']"
    finally:
        environment.kill()
        environment.wait()
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
        for name in ray_variables(""):
            del project.environment[name]


def ray_variables(token: str) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}


def no_ray() -> str:
    return "" if importlib.util.find_spec("ray") else "Ray is not installed"


def no_mount() -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = completed(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder])
        except FileNotFoundError:
            return "this system has no mount"
        if result.returncode:
            why = result.stderr.strip()
            return f"a disk of its own cannot be mounted here ({why}); run as root"
        subprocess.run(["umount", folder], check=True)
    return ""
