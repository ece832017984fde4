"""A node for tests that acts as the kubelet, one process per node.

It registers the node, renews its lease, takes the pods that the scheduler binds to it, and runs
their containers' real commands in separate namespaces (`containers.py`). It probes, restarts,
drains and ends them as their specification requires, reports their status, and serves their logs.
On SIGTERM it ends its pods and removes the node; if it is killed, its pods die with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
import ssl
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from aiohttp import web
from api import MERGE, Api, Object, Refused
from containers import Bridge
from pods import Pod, now

logger = logging.getLogger("node")

STOP_TIMEOUT_S = 15.0
HEARTBEAT_S = 5.0  # the node controller declares a node lost after 40 s
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
ROOM = {"cpu": "16", "memory": "64Gi", "pods": "110", "ephemeral-storage": "100Gi"}


@dataclass(frozen=True)
class Settings:
    """Settings of a node."""

    name: str
    number: int  # from 1 to 250, part of its pods' addresses
    bridge: Bridge
    kubeconfig: Path
    folder: Path  # for logs and volumes
    app: Path  # mounted at /app in every container
    labels: Object
    capacity: Object
    backoff_s: float  # after the second crash; doubles with every further crash
    absent_images: str  # regular expression; matching images cannot be pulled


class Node:
    """Node and its pods."""

    def __init__(self, api: Api, settings: Settings) -> None:
        self.api, self.settings, self.name = api, settings, settings.name
        self.bridge, self.folder = settings.bridge, settings.folder
        self.room = ROOM | settings.capacity
        self.pods: dict[str, Pod] = {}  # by uid
        self.authority = ""
        self.services: dict[tuple[str, str], str] = {}  # (namespace, name) -> address
        self._taken: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def free_address(self) -> str:
        """Return one of 250 addresses. A pod's address is not reused while the pod lives."""
        used = {pod.address for pod in self.pods.values()}
        for last in [*(each for each in range(2, 252) if each not in self._taken), *range(2, 252)]:
            address = f"10.{self.bridge.block}.{self.settings.number}.{last}"
            if address not in used:
                self._taken.add(last)
                return address
        raise RuntimeError(f"node {self.name} has no address left")

    async def register(self, log_port: int) -> None:
        body = {
            "kind": "Node",
            "apiVersion": "v1",
            "metadata": {
                "name": self.name,
                "labels": {
                    "kubernetes.io/hostname": self.name,
                    "kubernetes.io/os": "linux",
                    "kubernetes.io/arch": "amd64",
                    **self.settings.labels,
                },
            },
        }
        try:
            await self.api.call("POST", "/api/v1/nodes", body)
        except Refused as refused:
            if refused.status != 409:  # the node exists already
                raise
        self._status = {
            "capacity": self.room,
            "allocatable": self.room,
            # the API server requests logs here; it would have to resolve a name
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": log_port}},
            "nodeInfo": dict.fromkeys(
                (
                    *("machineID", "systemUUID", "bootID", "kernelVersion", "osImage"),
                    *("containerRuntimeVersion", "kubeProxyVersion", "operatingSystem"),
                    "architecture",
                ),
                "test",
            )
            | {"kubeletVersion": "v1.20.2-test"},
        }
        self._since = now()

    async def _beat(self) -> None:
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "NodeAgentReady",
            "message": "the node agent of the tests",
            "lastHeartbeatTime": now(),
            "lastTransitionTime": self._since,
        }
        status = {"status": self._status | {"conditions": [ready]}}
        await self.api.call("PATCH", f"/api/v1/nodes/{self.name}/status", status, kind=MERGE)
        renewed = {"spec": {"renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")}}
        try:
            await self.api.call("PATCH", f"{LEASES}/{self.name}", renewed, kind=MERGE)
        except Refused as refused:
            if refused.status != 404:
                raise
            spec = {"holderIdentity": self.name, "leaseDurationSeconds": 40, **renewed["spec"]}
            lease = {"metadata": {"name": self.name}, "spec": spec}
            await self.api.call("POST", LEASES, lease)

    async def keep_alive(self) -> None:
        while True:
            try:
                await self._beat()
            except (Refused, TimeoutError) as error:
                logger.warning("no heartbeat: %s", error)
            await asyncio.sleep(HEARTBEAT_S)

    async def take_pods(self) -> None:
        """Run the pods that the scheduler binds to this node."""
        async for what, told in self.api.follow("/api/v1/pods", f"spec.nodeName={self.name}"):
            if what == "LISTED":
                present = {each["metadata"]["uid"] for each in told}
                for uid in self.pods.keys() - present:
                    self.pods[uid].vanish()
            for each in told if what == "LISTED" else [told]:
                pod = self.pods.get(each["metadata"]["uid"])
                if what == "DELETED":
                    if pod:
                        pod.vanish()
                elif pod:
                    pod.update(each)
                elif each["status"].get("phase") not in ("Succeeded", "Failed"):
                    self._begin(Pod(self, each))
                elif "deletionTimestamp" in each["metadata"]:
                    self._keep(self._remove(each))

    async def name_services(self) -> None:
        """Write Services into the pods' hosts files, in place of the cluster's DNS."""
        async for what, told in self.api.follow("/api/v1/endpoints", "metadata.name!=kubernetes"):
            if what == "LISTED":
                self.services.clear()
            for each in told if what == "LISTED" else [told]:
                meta = each["metadata"]
                addresses = [
                    a["ip"] for s in each.get("subsets") or () for a in s.get("addresses") or ()
                ]
                if addresses and what != "DELETED":
                    self.services[meta["namespace"], meta["name"]] = addresses[0]
                else:
                    self.services.pop((meta["namespace"], meta["name"]), None)
            for pod in self.pods.values():
                pod.write_hosts()

    def _begin(self, pod: Pod) -> None:
        self.pods[pod.uid] = pod
        self._keep(self._run(pod))

    def _keep(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, pod: Pod) -> None:
        try:
            await pod.run()
        except Exception:
            logger.exception("pod %s/%s", pod.namespace, pod.name)
        finally:
            await pod.end()
            del self.pods[pod.uid]
        if pod.deleted and not pod.vanished:
            await self._remove(pod.told)

    async def _remove(self, told: Object) -> None:
        """Delete the object of a pod that has ended here."""
        meta = told["metadata"]
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        with contextlib.suppress(Refused):  # already deleted, or another pod has its name
            await self.api.call("DELETE", path, body)

    async def leave(self) -> None:
        for pod in self.pods.values():
            pod.vanish()
        while self._tasks:
            await asyncio.wait(self._tasks)
        for path in (f"/api/v1/nodes/{self.name}", f"{LEASES}/{self.name}"):
            with contextlib.suppress(Refused, TimeoutError):
                await self.api.call("DELETE", path)

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """Serve `kubectl logs` as the kubelet does: tailLines, previous, limitBytes, follow."""
        names = request.match_info
        found = [
            pod.logs[names["container"]]
            for pod in self.pods.values()
            if (pod.namespace, pod.name) == (names["namespace"], names["pod"])
            and names["container"] in pod.logs
        ]
        if not found and (kept := self._kept(names)) is None:
            raise web.HTTPNotFound(text=f"no log of {names['pod']}")
        written = found[-1] if found else kept
        if request.query.get("previous") == "true":
            written = written[:-1]
            if not written:
                raise web.HTTPBadRequest(text="previous terminated container not found")
        answer = web.StreamResponse()
        await answer.prepare(request)
        data = written[-1].read_bytes() if written else b""
        size = len(data)
        if (lines := request.query.get("tailLines")) is not None:
            data = b"".join(data.splitlines(keepends=True)[-int(lines) :] if int(lines) else [])
        await answer.write(data[: int(request.query.get("limitBytes", len(data)))])
        while request.query.get("follow") == "true" and written:
            ended = not any(written[-1] in pod.writing for pod in self.pods.values())
            with written[-1].open("rb") as log:
                log.seek(size)
                more = log.read()
            size += len(more)
            await answer.write(more)
            if ended and not more:
                break
            await asyncio.sleep(0.2)
        return answer

    def _kept(self, names) -> list[Path] | None:
        """Return log files of an ended pod, whose object may still exist."""
        place = f"{names['namespace']}_{names['pod']}_*/{names['container']}.*.log"
        return sorted(self.folder.glob(place), key=lambda path: path.stat().st_mtime) or None


async def forward(node: Node) -> None:
    """Forward pods' connections to the API server, at the bridge's address of this machine."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs = await asyncio.open_connection(node.api.host, node.api.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, theirs[1]), pump(theirs[0], writer))

    # every node listens; the kernel chooses one of them
    await asyncio.start_server(connect, node.bridge.gateway, node.api.port, reuse_port=True)


async def serve_logs(node: Node) -> int:
    """Serve logs. Return the port for the API server."""
    key, certificate = node.folder / "key.pem", node.folder / "certificate.pem"
    subject = ("-subj", "/CN=node", "-keyout", str(key), "-out", str(certificate))
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject)
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, timeout=60)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    app = web.Application()
    app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", node.logs)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    return runner.addresses[0][1]


async def main(settings: Settings) -> None:
    settings.folder.mkdir(parents=True, exist_ok=True)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Api(settings.kubeconfig) as api:
        node = Node(api, settings)
        node.authority = await api.authority()
        await forward(node)
        await node.register(await serve_logs(node))
        work = [
            asyncio.create_task(each)
            for each in (node.keep_alive(), node.take_pods(), node.name_services())
        ]
        told = asyncio.create_task(stop.wait())
        await asyncio.wait([*work, told], return_when=asyncio.FIRST_COMPLETED)
        for task in work:
            if task.done():
                logger.error("the node ends: %r", task.exception())
            task.cancel()
        await node.leave()


def in_process(settings: Settings) -> None:
    """Run one node in this process."""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {settings.name} %(message)s", stream=sys.stderr
    )
    threading.Thread(target=watch_owner, daemon=True).start()
    asyncio.run(main(settings))


def watch_owner() -> None:
    """End this process if its parent process ends, also by a kill."""
    multiprocessing.parent_process().join()
    signal.raise_signal(signal.SIGTERM)
    time.sleep(STOP_TIMEOUT_S)
    signal.raise_signal(signal.SIGKILL)
