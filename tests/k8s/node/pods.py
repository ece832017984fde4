"""A pod on a test node: its containers from the first start to the final status."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from api import MERGE, Object, Refused
from containers import Container, entering, open_network
from volumes import Unresolved, environment, expanded, mounts_of

if TYPE_CHECKING:
    from agent import Node

RETRY_S = 1.0  # retry while an object that a container needs is missing
MAX_BACKOFF_S = 300.0
DOMAINS = (".svc", ".svc.cluster.local")
PROBES = {"initialDelaySeconds": 0, "periodSeconds": 10, "timeoutSeconds": 1} | {
    "successThreshold": 1,
    "failureThreshold": 3,
}


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class State:
    """State of a container, as in its pod's status."""

    spec: Object
    state: Object
    last: Object = field(default_factory=dict)
    ready: bool = False
    started: bool = False
    restarts: int = 0
    container: Container | None = None
    env: dict[str, str] = field(default_factory=dict)  # environment of its latest start

    def wait(self, reason: str, message: str = "") -> None:
        self.state = {"waiting": {"reason": reason, "message": message}}

    @property
    def code(self) -> int | None:
        """Return the exit code of an ended container."""
        return self.state["terminated"]["exitCode"] if "terminated" in self.state else None

    def status(self) -> Object:
        return {
            "name": self.spec["name"],
            "image": self.spec["image"],
            "imageID": "",
            "state": self.state,
            "lastState": self.last,
            "ready": self.ready,
            "started": self.started,
            "restartCount": max(0, self.restarts),
        }


class Pod:
    """Pod that runs until its containers have ended for good, or until it is deleted."""

    def __init__(self, node: Node, told: Object) -> None:
        self.node, self.told, self.spec = node, told, told["spec"]
        meta = told["metadata"]
        self.uid, self.namespace, self.name = meta["uid"], meta["namespace"], meta["name"]
        self.folder = node.folder / f"{self.namespace}_{self.name}_{self.uid}"
        self.address = ""
        self.vanished = False  # its object has been deleted
        self.grace_s = 0.0
        self.logs: dict[str, list[Path]] = {}
        self.writing: set[Path] = set()
        self._network: asyncio.subprocess.Process | None = None
        self._leaving = asyncio.Event()
        self._changed = asyncio.Event()
        self._since: dict[str, tuple[str, str]] = {}  # condition -> (status, since when)
        self._sent: Object | None = None
        self._start_time = told["status"].get("startTime", now())
        before = {
            each["name"]: each["restartCount"]
            for each in told["status"].get("containerStatuses", ())
        }

        def states(key: str, reason: str) -> list[State]:
            return [
                State(each, {"waiting": {"reason": reason}}, restarts=before.get(each["name"], -1))
                for each in self.spec.get(key, ())
            ]

        self._first = states("initContainers", "PodInitializing")
        self._apps = states("containers", "ContainerCreating")
        self.update(told)

    @property
    def deleted(self) -> bool:
        return "deletionTimestamp" in self.told["metadata"]

    def update(self, told: Object) -> None:
        self.told = told
        if self.deleted:
            self.grace_s = float(told["metadata"].get("deletionGracePeriodSeconds", 0))
            self._leaving.set()
        ready = [c for c in told["status"].get("conditions", ()) if c["type"] == "Ready"]
        if self._sent and ready and ready[0]["status"] != self._since["Ready"][0]:
            self._sent = None  # the node controller overwrote the status while the node seemed lost
            self._changed.set()

    def vanish(self) -> None:
        """End the pod at once, without a grace period."""
        self.vanished, self.grace_s = True, 0.0
        self._leaving.set()

    async def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.spec.get("hostNetwork"):
            self.address = self.node.bridge.gateway
        else:
            self.address = self.node.free_address()
            self._network = await open_network(f"v{self.uid[:8]}", self.address, self.node.bridge)
        reporter = asyncio.create_task(self._report())
        play = asyncio.create_task(self._play())
        leave = asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait([play, leave], return_when=asyncio.FIRST_COMPLETED)
            if leave.done():
                running = [each for each in (*self._first, *self._apps) if each.container]
                await asyncio.gather(*(self._stop(each, lambda: self.grace_s) for each in running))
            await play
        finally:
            for task in (reporter, play, leave):
                task.cancel()
        await self._send()

    @property
    def hosts(self) -> Path:
        return self.folder / "hosts"

    def write_hosts(self) -> None:
        """Write the hosts file in place, because it is mounted. The pod's address is on line 2."""
        if not self.address:
            return
        gateway = f"{self.node.bridge.gateway} kubernetes.default.svc"
        lines = ["127.0.0.1 localhost", f"{self.address} {self.name}", gateway]
        for (namespace, name), address in self.node.services.items():
            names = [f"{name}.{namespace}{end}" for end in ("", *DOMAINS)]
            if namespace == self.namespace:
                names.insert(0, name)
            lines.append(f"{address} {' '.join(names)}")
        self.hosts.write_text("\n".join([*lines, ""]))

    async def end(self) -> None:
        """Kill the remaining containers, and free the address."""
        for each in (*self._first, *self._apps):
            if each.container:
                each.container.signal(signal.SIGKILL)
                await each.container.process.wait()
        if self._network:
            self._network.kill()
            await self._network.wait()

    # --- containers ------------------------------------------------------------------------------

    async def _play(self) -> None:
        for each in self._first:
            if await self._keep_running(each, once=True) != 0:
                return  # a failed container with restartPolicy Never, or the pod is ending
        async with asyncio.TaskGroup() as group:
            for each in self._apps:
                group.create_task(self._keep_running(each, once=False))

    async def _keep_running(self, state: State, *, once: bool) -> int | None:
        """Run and restart a container. once: an init container, which must succeed once."""
        policy, crashes = self.spec.get("restartPolicy", "Always"), 0
        while not self._leaving.is_set():
            state.restarts += 1
            try:
                code = await self._run(state)
            except (Unresolved, Refused, TimeoutError) as error:
                reason = error.reason if isinstance(error, Unresolved) else "CreateContainerError"
                state.restarts -= 1
                state.wait(reason, str(error))
                self._changed.set()
                await self._pause(RETRY_S)
                continue
            if policy == "Never" or (code == 0 and (once or policy == "OnFailure")):
                return code
            if self._leaving.is_set():
                break
            crashes += 1
            state.last = state.state
            if crashes > 1:
                pause = min(self.node.settings.backoff_s * 2 ** (crashes - 2), MAX_BACKOFF_S)
                who = f"container={state.spec['name']} pod={self.name}_{self.namespace}({self.uid})"
                state.wait("CrashLoopBackOff", f"back-off {pause:g}s restarting failed {who}")
                self._changed.set()
                await self._pause(pause)
        return state.code

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), seconds)

    async def _run(self, state: State) -> int:
        """Run a container once. Return its exit code."""
        spec = state.spec
        if re.search(self.node.settings.absent_images, spec["image"]):
            raise Unresolved("ImagePullBackOff", f'Back-off pulling image "{spec["image"]}"')
        state.env = env = await environment(self, spec)
        command = [expanded(each, env) for key in ("command", "args") for each in spec.get(key, ())]
        if not command:  # `args` alone are a whole command if the image has no entry point
            raise Unresolved("CreateContainerError", "an image's own command is not known here")
        name = spec["name"]
        root = self.folder / f"{name}.root"
        root.mkdir(exist_ok=True)
        script = entering(root, self.name, await mounts_of(self, spec))
        log = self.folder / f"{name}.{state.restarts}.log"
        workdir = spec.get("workingDir", "/app")
        network = self._network and self._network.pid
        container = await Container.start(command, env, script, log, network, workdir)
        began = now()
        state.container, state.state = container, {"running": {"startedAt": began}}
        state.started = "startupProbe" not in spec
        self.logs.setdefault(name, []).append(log)
        self.writing.add(log)
        self._changed.set()
        probes = asyncio.create_task(self._probe_all(state))
        code = await container.process.wait()
        probes.cancel()
        self.writing.discard(log)
        code = 128 - code if code < 0 else code
        state.container, state.ready, state.started = None, False, False
        told = {"exitCode": code, "reason": "Error" if code else "Completed"}
        state.state = {"terminated": {**told, "startedAt": began, "finishedAt": now()}}
        self._changed.set()
        return code

    async def _stop(self, state: State, grace_s: Callable[[], float]) -> None:
        """Run preStop, send SIGTERM, and send SIGKILL after the grace period (may shrink)."""
        container, loop = state.container, asyncio.get_running_loop()
        began, ended = loop.time(), asyncio.create_task(container.process.wait())
        hook = state.spec.get("lifecycle", {}).get("preStop")
        if hook and grace_s() > 0:
            await self._ask(state, hook, grace_s())
        container.signal(signal.SIGTERM)
        while not ended.done():
            if loop.time() - began >= grace_s():
                container.signal(signal.SIGKILL)
            await asyncio.wait([ended], timeout=0.1)

    # --- probes ----------------------------------------------------------------------------------

    async def _probe_all(self, state: State) -> None:
        """Probe startup first, then readiness and liveness until the container ends."""
        spec = state.spec

        def fate(kind: str) -> Coroutine[Any, Any, None]:
            return self._probe(state, kind, PROBES | spec[f"{kind}Probe"])

        if "startupProbe" in spec:
            await fate("startup")
        state.started = True
        if "readinessProbe" not in spec:
            state.ready = True
        self._changed.set()
        kinds = [each for each in ("readiness", "liveness") if f"{each}Probe" in spec]
        await asyncio.gather(*map(fate, kinds))

    async def _probe(self, state: State, kind: str, probe: Object) -> None:
        await asyncio.sleep(probe["initialDelaySeconds"])
        good = bad = 0
        while True:
            if await self._ask(state, probe, probe["timeoutSeconds"]):
                good, bad = good + 1, 0
            else:
                good, bad = 0, bad + 1
            if kind == "startup" and good:
                return
            if kind == "readiness" and (
                good >= probe["successThreshold"] or bad >= probe["failureThreshold"]
            ):
                ready = good > 0
                if ready != state.ready:
                    state.ready = ready
                    self._changed.set()
            elif kind != "readiness" and bad >= probe["failureThreshold"]:
                # shielded: the end of the container cancels its probes
                await asyncio.shield(asyncio.ensure_future(self._stop(state, self._whole_grace_s)))
                return
            await asyncio.sleep(probe["periodSeconds"])

    def _whole_grace_s(self) -> float:
        return float(self.spec.get("terminationGracePeriodSeconds", 30))

    async def _ask(self, state: State, probe: Object, timeout_s: float) -> bool:
        """Execute a probe or a hook: exec, httpGet or tcpSocket. Return True on success."""
        if "exec" in probe:
            command = [expanded(each, state.env) for each in probe["exec"]["command"]]
            return await state.container.execute(command, timeout_s)
        asked = probe.get("httpGet") or probe["tcpSocket"]
        port = asked["port"]
        if isinstance(port, str):
            named = {p.get("name"): p["containerPort"] for p in state.spec.get("ports", ())}
            port = named[port]
        host = asked.get("host") or self.address
        with contextlib.suppress(OSError, TimeoutError, aiohttp.ClientError):
            if "tcpSocket" in probe:
                async with asyncio.timeout(timeout_s):
                    (await asyncio.open_connection(host, port))[1].close()
                return True
            url = f"{asked.get('scheme', 'HTTP').lower()}://{host}:{port}{asked.get('path', '/')}"
            headers = {each["name"]: each["value"] for each in asked.get("httpHeaders", ())}
            timeout = aiohttp.ClientTimeout(timeout_s)
            async with (
                aiohttp.ClientSession(timeout=timeout) as http,
                http.get(url, headers=headers, ssl=False, allow_redirects=False) as answer,
            ):
                return 200 <= answer.status < 400
        return False

    # --- status ----------------------------------------------------------------------------------

    async def _report(self) -> None:
        self._changed.set()
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._send()
            except (TimeoutError, Refused):
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    async def _send(self) -> None:
        status = self._status()
        if status == self._sent or self.vanished:
            return
        path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}/status"
        body = {"metadata": {"uid": self.uid}, "status": status}
        try:
            await self.node.api.call("PATCH", path, body, kind=MERGE)
        except Refused as refused:
            if refused.status not in (404, 409):  # already deleted, or another pod has its name
                raise
        self._sent = status

    def _phase(self) -> str:
        codes = [each.code for each in self._apps]
        policy = self.spec.get("restartPolicy", "Always")
        if policy == "Never" and any(each.code for each in self._first):
            return "Failed"
        ended = policy != "Always" or self._leaving.is_set()
        if None not in codes and ended and not (policy == "OnFailure" and any(codes)):
            return "Failed" if any(codes) else "Succeeded"
        began = all(each.restarts >= 0 for each in self._apps)
        return "Running" if began else "Pending"

    def _status(self) -> Object:
        phase = self._phase()
        first = all(each.code == 0 for each in self._first)
        ready = first and all(each.ready for each in self._apps) and phase == "Running"
        conditions = [
            each
            for each in self.told["status"].get("conditions", ())
            if each["type"] == "PodScheduled"
        ]
        for name, holds in (("Initialized", first), ("Ready", ready), ("ContainersReady", ready)):
            if self._since.get(name, ("",))[0] != str(holds):
                self._since[name] = str(holds), now()
            status, since = self._since[name]
            condition = {"type": name, "status": status, "lastTransitionTime": since}
            if not holds and name != "Initialized":
                condition["reason"] = "ContainersNotReady"
                waited = [each.spec["name"] for each in self._apps if not each.ready]
                condition["message"] = f"containers with unready status: [{' '.join(waited)}]"
            conditions.append(condition)
        return {
            "phase": phase,
            "conditions": conditions,
            "hostIP": self.node.bridge.gateway,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self._start_time,
            "initContainerStatuses": [each.status() for each in self._first],
            "containerStatuses": [each.status() for each in self._apps],
        }
