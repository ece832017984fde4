"""Addresses of a fleet's servers: read from the cluster during a run, and written to a file for
every process of this machine that plays on them.

A client outside the cluster may not reach a pod at its own address; the pod's annotation
`agentgym.io/address` (host:port) then gives another.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from agentgym.deploy.kube.calls import NotFound
from agentgym.deploy.kube.client import POD, Kind, Kube, Object
from agentgym.store.posix import write_whole

logger = logging.getLogger(__name__)

ADDRESS = "agentgym.io/address"  # annotation of a pod
SERVICE_LABEL = "kubernetes.io/service-name"
SLICES = (
    Kind("discovery.k8s.io/v1", "EndpointSlice"),
    Kind("discovery.k8s.io/v1beta1", "EndpointSlice"),
)


class Server(NamedTuple):
    """A ready pod behind a Service."""

    pod: str
    address: str  # host:port inside the cluster


def kind_of_addresses(kube: Kube) -> Kind:
    """Return EndpointSlice in the version that the cluster knows, else v1. Errors: KubeError."""
    return next((kind for kind in SLICES if kube.serves(kind)), SLICES[0])


def service_of(obj: Object) -> str:
    """Return the name of the Service that an EndpointSlice belongs to; empty without one."""
    return str(obj["metadata"].get("labels", {}).get(SERVICE_LABEL, ""))


def servers_of(slices: Iterable[Object]) -> list[Server]:
    """Return the ready servers in EndpointSlices, one per address, sorted by it."""
    servers: dict[str, Server] = {}
    for obj in slices:
        ports = [port["port"] for port in obj.get("ports") or [] if port.get("port")]
        for endpoint in obj.get("endpoints") or []:
            conditions = endpoint.get("conditions") or {}
            # None means true; a terminating server takes no sessions
            if conditions.get("ready") is False or conditions.get("terminating"):
                continue
            pod, host = (endpoint.get("targetRef") or {}).get("name", ""), endpoint["addresses"][0]
            for port in ports[:1]:
                address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                servers[address] = Server(pod, address)
    return [servers[address] for address in sorted(servers)]


class Outside:
    """URLs for clients outside the cluster, from pods' annotations; these are cached by pod."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._said: dict[str, str] = {}  # pod -> its annotation; empty: none

    def addresses(self, servers: Sequence[Server]) -> list[str]:
        """Return the servers' URLs, sorted; a pod's annotation replaces its own address.
        Errors: KubeError.
        """
        self._said = {server.pod: self._of(server.pod) for server in servers}
        return sorted(f"http://{self._said[server.pod] or server.address}" for server in servers)

    def _of(self, pod: str) -> str:
        if not pod or pod in self._said:
            return self._said.get(pod, "")
        try:
            obj = self._kube.get(POD, pod)
        except NotFound:
            return ""
        return str(obj["metadata"].get("annotations", {}).get(ADDRESS, ""))


class Listing:
    """A JSON file with the addresses of the servers of one Service. One process writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._said: bytes | None = None

    def say(self, addresses: Sequence[str], trouble: str = "") -> None:
        """Write addresses and trouble to the file if either changed.
        trouble: the reason why clients must stop using these servers; empty: none.
        """
        content = json.dumps({"addresses": list(addresses), "trouble": trouble}).encode()
        if content != self._said:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, content)
            self._said = content

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def listed(path: str) -> tuple[list[str], str] | None:
    """Return (addresses, trouble) from the listing at `path`; None if it is missing or invalid."""
    try:
        listing = json.loads(Path(path).read_bytes())
        return [str(address) for address in listing["addresses"]], str(listing["trouble"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
