"""Kinds of objects, and the labels that select among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Object = dict[str, Any]  # as JSON has it


class Kind(NamedTuple):
    """A kind of object as a manifest names it, for example Kind("apps/v1", "Deployment")."""

    api_version: str
    kind: str

    @classmethod
    def of(cls, obj: Object) -> Kind:
        return cls(obj["apiVersion"], obj["kind"])

    @property
    def root(self) -> str:
        """Path at which the API server has this version."""
        return f"/{'apis' if '/' in self.api_version else 'api'}/{self.api_version}"

    @property
    def group(self) -> str:
        """API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    def __str__(self) -> str:
        return f"{self.kind} ({self.api_version})"


class Place(NamedTuple):
    """Name of a kind in the API server's paths, and whether its objects have a namespace."""

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
    """Return the label selector of a query; None matches a label with any value."""
    return ",".join(
        name if value is None else f"{name}={value}" for name, value in sorted(labels.items())
    )


def name_of(obj: Object) -> str:
    """Return kind and name for a message: `Deployment env-babyai`."""
    return f"{obj.get('kind', 'object')} {obj['metadata'].get('name', '?')}"
