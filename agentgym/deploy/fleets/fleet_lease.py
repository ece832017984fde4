"""Leases, which record the run that a fleet belongs to and show if that run lives.

Each group of servers has a Lease in the cluster: it names its holder and is renewed while that
process lives.
All objects of the group are owned by the Lease, so deleting it deletes them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from agentgym.deploy.kube.calls import AlreadyExists, Stale
from agentgym.deploy.kube.client import LEASE, Kube, Object
from agentgym.deploy.manifests import RUN_LABEL
from agentgym.store.lease import Holder, LeaseHeld

logger = logging.getLogger(__name__)

HOLDER = "agentgym.io/holder"  # annotation: the process, as JSON
KEPT = "agentgym.io/kept"  # label of a group that outlives runs
RENEWALS = 6  # of a lease per ttl_s; a holder that is silent for ttl_s counts as dead
OWNED = {"app.kubernetes.io/part-of": "agentgym"}
RACES = 5  # attempts to acquire a lease that other processes change meanwhile


def lease_name(run: str) -> str:
    return f"agentgym-{run}"


@dataclass(frozen=True)
class Group:
    """A group of servers, as its lease was last read."""

    run: str  # the value of RUN_LABEL on all of its objects
    uid: str
    holder: Holder | None  # None for a kept group, or if it cannot be read
    is_kept: bool
    renewed: str  # time of the last renewal, by the holder's clock
    ttl_s: float

    @classmethod
    def of(cls, lease: Object) -> Group:
        metadata, spec = lease["metadata"], lease.get("spec", {})
        labels = metadata.get("labels", {})
        try:
            holder = Holder.from_tree(json.loads(metadata.get("annotations", {}).get(HOLDER, "")))
        except (ValueError, TypeError, AttributeError):
            holder = None
        return cls(
            run=labels.get(RUN_LABEL, ""),
            uid=metadata["uid"],
            holder=holder,
            is_kept=KEPT in labels,
            renewed=spec.get("renewTime") or metadata.get("creationTimestamp", ""),
            ttl_s=float(spec.get("leaseDurationSeconds", 0)),
        )

    def silent_s(self, now: float) -> float:
        """Seconds from the last renewal until `now`; infinite if the renewal has no valid time."""
        try:
            return now - datetime.fromisoformat(self.renewed).timestamp()
        except ValueError:
            return float("inf")

    def is_alive(self, now: float | None = None) -> bool:
        """Return True if the holder's process lives, or, if that cannot be seen from here, if the
        last renewal is less than ttl_s old. now: seconds since 1970; None: read the clock.
        A renewal more than ttl_s in the future comes from a wrong clock and does not count.
        """
        silent_s = self.silent_s(time.time() if now is None else now)
        if silent_s < -self.ttl_s:
            silent_s = float("inf")
        if self.holder is None:
            return silent_s < self.ttl_s
        return self.holder.is_alive(silent_s, ttl_s=self.ttl_s)

    def owner(self) -> Object:
        """Owner reference, with which Kubernetes deletes an object when the lease is deleted."""
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "name": lease_name(self.run),
            "uid": self.uid,
        }

    def __str__(self) -> str:
        return f"{self.run} ({'kept' if self.is_kept else self.holder or 'holder unknown'})"


def acquire(kube: Kube, run: str, *, ttl_s: float, kept: bool = False) -> Group:
    """Create the lease of the group `run`, or take over the lease, and servers, of a dead holder.
    A group that outlives runs (`kept`) is shared: its lease may be taken at any time.
    ttl_s: life without a renewal.

    Result: the group. Errors: LeaseHeld while its holder lives or the lease is being deleted, or
    after RACES attempts in which other processes were faster; KubeError.
    """
    for _ in range(RACES):
        lease = kube.find(LEASE, lease_name(run))
        try:
            if lease is None:
                return Group.of(kube.create(_lease(run, ttl_s, kept)))
            group = Group.of(lease)
            if lease["metadata"].get("deletionTimestamp"):
                raise LeaseHeld(f"the servers of {run} are being taken down")
            if group.is_alive() and not group.is_kept:
                raise LeaseHeld(f"the servers of {run} are held by {group.holder}")
            changes = _lease(run, ttl_s, kept)
            changes["metadata"]["resourceVersion"] = lease["metadata"]["resourceVersion"]
            return Group.of(kube.patch(LEASE, lease_name(run), changes))
        except (AlreadyExists, Stale):
            continue  # another process was faster: read again
    raise LeaseHeld(f"others take the servers of {run} again and again")


def acquire_free(kube: Kube, run: str, *, ttl_s: float, max_groups: int = 9) -> Group:
    """Acquire and return the group `run`, or if that is in use `run-2`, `run-3`, ...
    Errors: LeaseHeld if max_groups of them are in use; KubeError.
    """
    for number in range(1, max_groups + 1):
        try:
            return acquire(kube, run if number == 1 else f"{run}-{number}", ttl_s=ttl_s)
        except LeaseHeld as error:
            logger.info("%s; taking the next name", error)
    raise LeaseHeld(f"{max_groups} processes have servers of {run}; end some, or agentgym envs gc")


def renew(kube: Kube, group: Group) -> bool:
    """Renew the group's lease. Return False if it was deleted or taken over or, unless `is_kept`,
    changed by another process during the call. Errors: KubeError.
    """
    lease = kube.find(LEASE, lease_name(group.run))
    if lease is None or lease["metadata"]["uid"] != group.uid:
        return False
    if not group.is_kept and Group.of(lease).holder != group.holder:
        return False
    version = {"resourceVersion": lease["metadata"]["resourceVersion"]}
    changes = {"metadata": version, "spec": {"renewTime": _now()}}
    try:
        kube.patch(LEASE, lease_name(group.run), changes)
    except Stale:
        return renew(kube, group) if group.is_kept else False
    return True


def groups(kube: Kube) -> list[Group]:
    """Return the groups that have a lease in the namespace, except leases being deleted."""
    leases = kube.list(LEASE, labels={**OWNED, RUN_LABEL: None}).items
    return [Group.of(lease) for lease in leases if not lease["metadata"].get("deletionTimestamp")]


def dead_groups(
    kube: Kube, *, observe_s: float, sleep: Callable[[float], None] = time.sleep
) -> list[Group]:
    """Return groups whose holder is dead or whose lease has expired. If the holder of one is not on
    this machine or unknown, wait observe_s seconds and leave out groups that were renewed, or
    deleted, meanwhile: the holder's clock may differ from ours.
    """
    suspects = [group for group in groups(kube) if not group.is_alive()]
    far = [group for group in suspects if group.holder is None or not group.holder.is_near()]
    if not far:
        return suspects
    logger.info("watching %d groups of servers for %.0f s", len(far), observe_s)
    sleep(observe_s)
    renewed = {group.uid: group.renewed for group in groups(kube)}
    return [group for group in suspects if renewed.get(group.uid) == group.renewed]


def _lease(run: str, ttl_s: float, kept: bool) -> Object:
    now = _now()
    me = None if kept else Holder.me(epoch=0)
    return {
        "apiVersion": LEASE.api_version,
        "kind": LEASE.kind,
        "metadata": {
            "name": lease_name(run),
            "labels": {**OWNED, RUN_LABEL: run, **({KEPT: "true"} if kept else {})},
            "annotations": {HOLDER: json.dumps(asdict(me) if me else None)},
        },
        "spec": {
            "holderIdentity": f"{me.host}-{me.pid}" if me else "kept",
            "leaseDurationSeconds": max(1, round(ttl_s)),
            "acquireTime": now,
            "renewTime": now,
        },
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
