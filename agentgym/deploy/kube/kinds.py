"""Which objects are meant: a kind, and the labels that choose among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Object = dict[str, Any]  # as JSON has it


class Kind(NamedTuple):
    """A kind of object as a manifest names it, for example Kind("apps/v1", "Deployment")."""

    api_version: str
    kind: str

    @classmethod
    def of(cls, each: Object) -> Kind:
        return cls(each["apiVersion"], each["kind"])

    @property
    def root(self) -> str:
        """Where its version is served."""
        return f"/{'apis' if '/' in self.api_version else 'api'}/{self.api_version}"

    @property
    def group(self) -> str:
        """Empty for the core's."""
        return self.api_version.rpartition("/")[0]

    def __str__(self) -> str:
        return f"{self.kind} ({self.api_version})"


class Place(NamedTuple):
    """How the API server calls a kind."""

    plural: str
    is_namespaced: bool


DEPLOYMENT = Kind("apps/v1", "Deployment")
REPLICA_SET = Kind("apps/v1", "ReplicaSet")
POD = Kind("v1", "Pod")
SECRET = Kind("v1", "Secret")
SERVICE = Kind("v1", "Service")
EVENT = Kind("v1", "Event")
NODE = Kind("v1", "Node")
ENDPOINTS = Kind("v1", "Endpoints")
RESOURCE_QUOTA = Kind("v1", "ResourceQuota")
LEASE = Kind("coordination.k8s.io/v1", "Lease")


def selector(labels: Mapping[str, str | None]) -> str:
    """As the query of a list; None asks for a label whatever its value."""
    return ",".join(
        name if value is None else f"{name}={value}" for name, value in sorted(labels.items())
    )


def name_of(each: Object) -> str:
    """For messages: `Deployment env-babyai`."""
    return f"{each.get('kind', 'object')} {each['metadata'].get('name', '?')}"
