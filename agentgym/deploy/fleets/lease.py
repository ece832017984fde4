"""Which run a fleet belongs to, and whether that run lives.

Each group of servers has a Lease in the cluster: it says who holds it and is renewed while that
process lives. All objects of the group are owned by it, so deleting it deletes them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from agentgym.deploy.kube import AlreadyExists, Kube
from agentgym.deploy.kube.errors import Stale
from agentgym.deploy.kube.kinds import LEASE, Object
from agentgym.deploy.manifests import RUN_LABEL
from agentgym.store.lease import Holder, LeaseHeld

logger = logging.getLogger(__name__)

HOLDER = "agentgym.io/holder"  # annotation: the process, as JSON
KEPT = "agentgym.io/kept"  # label of a group that outlives runs
RENEWALS = 6  # in the time after which a holder counts as dead
OWNED = {"app.kubernetes.io/part-of": "agentgym"}
RACES = 5  # how often somebody else may be faster


def lease_name(run: str) -> str:
    return f"agentgym-{run}"


@dataclass(frozen=True)
class Group:
    """A lease as it was last seen."""

    run: str  # the value of RUN_LABEL on all of its objects
    uid: str
    holder: Holder | None  # None of a kept group, or where it cannot be read
    is_kept: bool
    renewed: str  # when, by the clock of whoever did
    ttl_s: float

    @classmethod
    def of(cls, lease: Object) -> Group:
        metadata, spec = lease["metadata"], lease.get("spec", {})
        labels = metadata.get("labels", {})
        try:
            said = json.loads(metadata.get("annotations", {}).get(HOLDER, ""))
            holder = Holder.from_tree(said)
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
        """Seconds since it was renewed, as this machine's clock has it."""
        try:
            return now - datetime.fromisoformat(self.renewed).timestamp()
        except ValueError:
            return float("inf")

    def is_alive(self, now: float) -> bool:
        """By its holder's process where that can be seen from here, else by its last renewal.
        One of the future is of a clock that is wrong: it says nothing.
        """
        silent_s = self.silent_s(now)
        if silent_s < -self.ttl_s:
            silent_s = float("inf")
        if self.holder is None:
            return silent_s < self.ttl_s
        return self.holder.is_alive(silent_s, ttl_s=self.ttl_s)

    def is_alive_now(self) -> bool:
        return self.is_alive(time.time())

    def owner(self) -> Object:
        """What makes an object go with the lease."""
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "name": lease_name(self.run),
            "uid": self.uid,
        }

    def __str__(self) -> str:
        return f"{self.run} ({'kept' if self.is_kept else self.holder or 'of nobody known'})"


def acquire(kube: Kube, run: str, *, ttl_s: float, kept: bool = False) -> Group:
    """The group of that name: a new one, or that of a holder that is gone, whose servers are then
    ours. A kept one is shared.

    Errors: LeaseHeld while its holder lives; KubeError.
    """
    for _ in range(RACES):
        found = kube.find(LEASE, lease_name(run))
        try:
            if found is None:
                return Group.of(kube.create(_lease(run, ttl_s, kept)))
            group = Group.of(found)
            if found["metadata"].get("deletionTimestamp"):
                raise LeaseHeld(f"the servers of {run} are being taken down")
            if group.is_alive(time.time()) and not group.is_kept:
                raise LeaseHeld(f"the servers of {run} are held by {group.holder}")
            version = {"resourceVersion": found["metadata"]["resourceVersion"]}
            changes = _lease(run, ttl_s, kept)
            changes["metadata"] |= version
            return Group.of(kube.patch(LEASE, lease_name(run), changes))
        except (AlreadyExists, Stale):
            continue  # somebody was faster: look again
    raise LeaseHeld(f"others take the servers of {run} again and again")


def acquire_free(kube: Kube, run: str, *, ttl_s: float, most: int = 9) -> Group:
    """The group `run`, or where that is held `run-2`, `run-3`, ...
    Errors: LeaseHeld where all are; KubeError.
    """
    for number in range(1, most + 1):
        try:
            return acquire(kube, run if number == 1 else f"{run}-{number}", ttl_s=ttl_s)
        except LeaseHeld as error:
            logger.info("%s; taking the next name", error)
    raise LeaseHeld(f"{most} processes have servers of {run}; end some, or agentgym envs gc")


def renew(kube: Kube, group: Group) -> bool:
    """A sign of life. False where the group is no longer ours: deleted, or taken over."""
    found = kube.find(LEASE, lease_name(group.run))
    if found is None or found["metadata"]["uid"] != group.uid:
        return False
    now = Group.of(found)
    if not group.is_kept and now.holder != group.holder:
        return False
    version = {"resourceVersion": found["metadata"]["resourceVersion"]}
    try:
        kube.patch(
            LEASE, lease_name(group.run), {"metadata": version, "spec": {"renewTime": _now()}}
        )
    except Stale:
        return renew(kube, group) if group.is_kept else False
    return True


def groups(kube: Kube) -> list[Group]:
    """All that hold servers in the namespace."""
    found = kube.list(LEASE, labels={**OWNED, RUN_LABEL: None}).items
    return [Group.of(each) for each in found if not each["metadata"].get("deletionTimestamp")]


def dead_groups(
    kube: Kube, *, observe_s: float, sleep: Callable[[float], None] = time.sleep
) -> list[Group]:
    """Groups of runs that are dead: silent by this machine's clock, and for observe_s more while
    they are watched, so that a clock that is wrong kills nobody.
    """
    suspects = [each for each in groups(kube) if not each.is_alive(time.time())]
    far = [each for each in suspects if each.holder is None or not each.holder.is_near()]
    if not far:
        return suspects
    logger.info("watching %d groups of servers for %.0f s", len(far), observe_s)
    sleep(observe_s)
    now = {each.uid: each for each in groups(kube)}
    return [each for each in suspects if each.uid in now and now[each.uid].renewed == each.renewed]


def _lease(run: str, ttl_s: float, kept: bool) -> Object:
    now = _now()
    labels: Mapping[str, str] = {**OWNED, RUN_LABEL: run, **({KEPT: "true"} if kept else {})}
    me = None if kept else Holder.me(epoch=0)
    return {
        "apiVersion": LEASE.api_version,
        "kind": LEASE.kind,
        "metadata": {
            "name": lease_name(run),
            "labels": dict(labels),
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
