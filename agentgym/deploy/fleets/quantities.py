"""Resources that pods request from a cluster, and whether a quota has room for them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from agentgym.deploy.kube.client import Object

_UNITS = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "E": 1e18, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
    "Ei": 2.0**60,
}  # fmt: skip


def amount(quantity: str | int | float) -> float:
    """Convert Kubernetes' `500m`, `2Gi` or `1e3` to a number. Errors: ValueError."""
    match = re.fullmatch(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]{0,2})", str(quantity))
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{quantity!r} is no quantity of Kubernetes, for example 500m or 2Gi")
    return float(match[1]) * _UNITS[match[2]]


def asked(objects: Iterable[Object]) -> dict[str, float]:
    """Return the amounts that a ResourceQuota counts for these objects, by resource name.
    The extra pod of a Deployment that changes is not counted.
    """
    total: defaultdict[str, float] = defaultdict(float)
    for obj in objects:
        if obj["kind"] == "Service":
            total["services"] += 1
        if obj["kind"] != "Deployment":
            continue
        replicas = obj["spec"].get("replicas", 1)
        total["pods"] += replicas
        for kind in ("requests", "limits"):
            for container in obj["spec"]["template"]["spec"]["containers"]:
                for name, quantity in container.get("resources", {}).get(kind, {}).items():
                    total[f"{kind}.{name}"] += replicas * amount(quantity)
    for name in ("cpu", "memory"):  # a quota may use either name
        total[name] = total[f"requests.{name}"]
    return total


def lacking(quotas: Sequence[Object], needed: Mapping[str, float]) -> list[str]:
    """Return a sentence for each resource of which a quota has less left than needed."""
    lines = []
    for quota in quotas:
        status = quota.get("status", {})
        hard, used = status.get("hard", {}), status.get("used", {})
        for name in sorted(hard.keys() & needed.keys()):
            rest = amount(hard[name]) - amount(used.get(name, 0))
            if needed[name] > rest:
                lines.append(
                    f"quota {quota['metadata']['name']}: {name} {_shown(name, needed[name])} is"
                    f" needed, {_shown(name, max(0.0, rest))} of {hard[name]} is left; end what is"
                    " no longer needed (agentgym envs gc), lower env.replicas or"
                    " rollout.concurrency, or raise the quota"
                )
    return lines


def _shown(name: str, number: float) -> str:
    return f"{number / 2**20:.0f}Mi" if "memory" in name else f"{number:g}"
