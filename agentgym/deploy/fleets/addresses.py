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

from agentgym.deploy.kube.client import ENDPOINTS, POD, Kind, Kube, Object
from agentgym.deploy.kube.transport import NotFound
from agentgym.store.files import write_whole

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
    """Return EndpointSlice, or Endpoints if the cluster is too old for slices."""
    return next((kind for kind in SLICES if kube.serves(kind)), ENDPOINTS)


def service_of(obj: Object) -> str:
    """Return the name of the Service that an EndpointSlice or Endpoints object belongs to."""
    metadata = obj["metadata"]
    return str(metadata.get("labels", {}).get(SERVICE_LABEL) or metadata["name"])


def servers_of(objects: Iterable[Object]) -> list[Server]:
    """Return the ready servers in EndpointSlices or Endpoints, one per address, sorted by it."""
    servers: dict[str, Server] = {}
    for obj in objects:
        rows = _of_slice(obj) if obj["kind"] == "EndpointSlice" else _of_endpoints(obj)
        servers |= {row.address: row for row in rows}
    return [servers[address] for address in sorted(servers)]


def _of_slice(obj: Object) -> Iterable[Server]:
    ports = [port["port"] for port in obj.get("ports") or [] if port.get("port")]
    for endpoint in obj.get("endpoints") or []:
        conditions = endpoint.get("conditions") or {}
        # None means true; a terminating server takes no sessions
        if conditions.get("ready") is False or conditions.get("terminating"):
            continue
        pod = (endpoint.get("targetRef") or {}).get("name", "")
        for port in ports[:1]:
            yield Server(pod, _joined(endpoint["addresses"][0], port))


def _of_endpoints(obj: Object) -> Iterable[Server]:
    for subset in obj.get("subsets") or []:
        for port in (subset.get("ports") or [])[:1]:
            for address in subset.get("addresses") or []:  # ready ones only
                pod = (address.get("targetRef") or {}).get("name", "")
                yield Server(pod, _joined(address["ip"], port["port"]))


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Outside:
    """Addresses for clients outside the cluster, from pods' annotations; each pod is read once."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._said: dict[str, str] = {}  # pod -> its annotation; empty: none

    def addresses(self, servers: Sequence[Server]) -> list[str]:
        """Return sorted URLs; annotated addresses replace the pods' own. Errors: KubeError."""
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
    """A file with the addresses of the servers behind one URL. One process writes it."""

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
