"""Where the servers of a fleet are now: read from the cluster while a run goes on, and left in a
file for every process of this machine that plays on them.

A client outside of the cluster may not reach a pod at its own address: the pod's annotation
`agentgym.io/address` (host:port) then says where else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from agentgym.deploy.kube import Kind, Kube, NotFound
from agentgym.deploy.kube.kinds import ENDPOINTS, POD, Object
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
    address: str  # host:port, as the cluster has it


def kind_of_addresses(kube: Kube) -> Kind:
    """EndpointSlices, or where the cluster is too old for them, Endpoints."""
    return next((each for each in SLICES if kube.serves(each)), ENDPOINTS)


def service_of(each: Object) -> str:
    """Whose addresses an EndpointSlice or Endpoints holds."""
    metadata = each["metadata"]
    return str(metadata.get("labels", {}).get(SERVICE_LABEL) or metadata["name"])


def servers_of(objects: Iterable[Object]) -> list[Server]:
    """The ready servers in EndpointSlices, or in Endpoints; one that is in two of them once."""
    found: dict[str, Server] = {}
    for each in objects:
        rows = _of_slice(each) if each["kind"] == "EndpointSlice" else _of_endpoints(each)
        found |= {row.address: row for row in rows}
    return [found[address] for address in sorted(found)]


def _of_slice(each: Object) -> Iterable[Server]:
    ports = [port["port"] for port in each.get("ports") or [] if port.get("port")]
    for endpoint in each.get("endpoints") or []:
        conditions = endpoint.get("conditions") or {}
        # None means true, and a server that ends takes no sessions
        if conditions.get("ready") is False or conditions.get("terminating"):
            continue
        pod = (endpoint.get("targetRef") or {}).get("name", "")
        for port in ports[:1]:
            yield Server(pod, _joined(endpoint["addresses"][0], port))


def _of_endpoints(each: Object) -> Iterable[Server]:
    for subset in each.get("subsets") or []:
        for port in (subset.get("ports") or [])[:1]:
            for address in subset.get("addresses") or []:  # those that are ready
                pod = (address.get("targetRef") or {}).get("name", "")
                yield Server(pod, _joined(address["ip"], port["port"]))


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Outside:
    """Addresses that clients use, of pods that say so; each pod is asked for once."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._said: dict[str, str] = {}  # pod -> its annotation; empty: none

    def addresses(self, servers: Sequence[Server]) -> list[str]:
        """URLs. Errors: KubeError."""
        self._said = {each.pod: self._of(each.pod) for each in servers}
        return sorted(f"http://{self._said[each.pod] or each.address}" for each in servers)

    def _of(self, pod: str) -> str:
        if not pod or pod in self._said:
            return self._said.get(pod, "")
        try:
            found = self._kube.get(POD, pod)
        except NotFound:
            return ""
        return str(found["metadata"].get("annotations", {}).get(ADDRESS, ""))


class Listing:
    """The file that says where the servers behind one URL are. One process writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._said: bytes | None = None

    def say(self, addresses: Sequence[str], trouble: str = "") -> None:
        """trouble: why nobody shall play there any more."""
        said = json.dumps({"addresses": list(addresses), "trouble": trouble}).encode()
        if said != self._said:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, said)
            self._said = said

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def listed(path: str) -> tuple[list[str], str] | None:
    """(addresses, trouble) as a listing says; None where there is none on this machine."""
    try:
        said = json.loads(Path(path).read_bytes())
        return [str(each) for each in said["addresses"]], str(said["trouble"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
