"""Bringing the servers of a group up, waiting for them, and taking them down."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from agentgym.config import ConfigError
from agentgym.deploy.fleets.addresses import kind_of_addresses
from agentgym.deploy.fleets.lease import Group, lease_name
from agentgym.deploy.fleets.readiness import (
    Trouble,
    is_live,
    num_ready,
    of_deployment,
    troubles,
)
from agentgym.deploy.fleets.tokens import give_token
from agentgym.deploy.kube import Forbidden, Kind, Kube, KubeError
from agentgym.deploy.kube.errors import Stale
from agentgym.deploy.kube.kinds import DEPLOYMENT, EVENT, LEASE, POD, SECRET, SERVICE, Object
from agentgym.deploy.manifests import ENVIRONMENT_LABEL, RUN_LABEL

logger = logging.getLogger(__name__)

BUDGETS = tuple(Kind(f"policy/{each}", "PodDisruptionBudget") for each in ("v1", "v1beta1"))
AUTOSCALERS = tuple(
    Kind(f"autoscaling/{each}", "HorizontalPodAutoscaler") for each in ("v2", "v2beta2")
)
LOOK_S = 5.0  # how often pods are looked at while they are waited for
POLL_S, LONGEST_POLL_S = 0.5, 3.0  # while what is deleted is waited for
SURGE = 1  # pods that a Deployment makes beyond its servers while it changes


class FleetNotReady(RuntimeError):
    """Servers did not get ready; the text says which pod, and why."""


class FleetTripped(RuntimeError):
    """There are more live objects than this run can have made."""


def kinds_of(kube: Kube) -> list[Kind]:
    """The kinds a group is made of, in the versions that the cluster knows; the lease first, which
    the others go with.
    """
    newest = [
        next((each for each in versions if kube.serves(each)), None)
        for versions in (BUDGETS, AUTOSCALERS)
    ]
    return [LEASE, DEPLOYMENT, SERVICE, *(each for each in newest if each)]


def send(kube: Kube, group: Group, objects: Sequence[Object]) -> None:
    """Apply all, owned by the group's lease; what is there already and the same stays untouched.
    Fleets get their tokens first. Errors: ConfigError, KubeError.
    """
    for each in objects:
        if each["kind"] == DEPLOYMENT.kind:
            give_token(kube, group, each["metadata"]["name"])
    for each in objects:
        owned = each["metadata"] | {"ownerReferences": [group.owner()]}
        kube.apply(each | {"metadata": owned})


def most_pods(objects: Sequence[Object]) -> int:
    """Live pods that these objects can mean; an autoscaler's, at its most."""
    bounds = {
        each["spec"]["scaleTargetRef"]["name"]: int(each["spec"]["maxReplicas"])
        for each in objects
        if each["kind"] == "HorizontalPodAutoscaler"
    }
    deployments = [each for each in objects if each["kind"] == "Deployment"]
    return sum(
        bounds.get(each["metadata"]["name"], each["spec"].get("replicas", 1)) + SURGE
        for each in deployments
    )


def check_breaker(kube: Kube, run: str, most: int) -> None:
    """Errors: FleetTripped where the run has more live pods than `most`; KubeError."""
    live = [each for each in kube.list(POD, labels={RUN_LABEL: run}).items if is_live(each)]
    if len(live) > most:
        names = ", ".join(sorted(each["metadata"]["name"] for each in live)[:5])
        raise FleetTripped(
            f"run {run} has {len(live)} live pods, and at most {most} are its own: {names}, ...;"
            f" see who makes them: kubectl get pods -n {kube.namespace} -l {RUN_LABEL}={run}"
        )


def num_live(kube: Kube, run: str) -> int:
    """Pods of the run that hold room. Errors: KubeError."""
    return sum(is_live(each) for each in kube.list(POD, labels={RUN_LABEL: run}).items)


def wait_ready(kube: Kube, run: str, *, timeout_s: float, most: int) -> None:
    """Until every server is ready, with a line in the log whenever that changes.

    Errors: FleetNotReady past the deadline, or where waiting on does not help; ConfigError where
    a server refuses its options; FleetTripped above `most` live pods; KubeError.
    """
    labels: dict[str, str | None] = {RUN_LABEL: run}
    end, looked_at, told = time.monotonic() + timeout_s, 0.0, ""
    deployments: dict[str, Object] = {}
    reasons: list[Trouble] = []
    for change in kube.watch(DEPLOYMENT, labels=labels, for_s=timeout_s, idle_s=1.0):
        if change.what == "deleted":
            deployments.pop(change.object["metadata"]["name"], None)
        elif change.what != "idle":
            deployments[change.object["metadata"]["name"]] = change.object
        if deployments and all(_is_whole(each) for each in deployments.values()):
            if change.what == "idle" or told:  # not before the first list is complete
                logger.info("servers of %s are ready: %s", run, _progress(deployments))
                return
            continue
        if change.what == "idle" and time.monotonic() - looked_at >= min(LOOK_S, timeout_s / 4):
            looked_at = time.monotonic()
            check_breaker(kube, run, most)
            reasons = reasons_of(kube, run, deployments)
            _raise_final(run, reasons)
        now = "; ".join([_progress(deployments), *(each.text for each in reasons[:2])])
        if now != told:
            told = now
            logger.info("waiting for servers of %s: %s", run, now)
        if time.monotonic() >= end:
            break
    reasons = reasons_of(kube, run, deployments) or [Trouble("no pod is there yet")]
    raise FleetNotReady(
        f"the servers of {run} were not ready within {timeout_s:g} s ({_progress(deployments)}):"
        f" {_all(reasons)}"
    )


def reasons_of(kube: Kube, run: str, deployments: Mapping[str, Object]) -> list[Trouble]:
    """Why servers are not ready, the worst first. Errors: KubeError."""
    pods = kube.list(POD, labels={RUN_LABEL: run}).items
    reasons = [found for each in deployments.values() if (found := of_deployment(each))]
    try:
        events = kube.list(EVENT, fields="involvedObject.kind=Pod,type=Warning").items
    except Forbidden:
        events = []
    events.sort(key=lambda each: str(each.get("lastTimestamp") or each.get("eventTime") or ""))
    return reasons + troubles(pods, events, lambda pod: _log(kube, pod))


def take_down(kube: Kube, run: str, *, timeout_s: float) -> None:
    """Delete the lease, which everything of the run goes with, and then whatever bears the run's
    label; return when nothing of it is left.

    Errors: FleetNotReady past the deadline, naming what is left; KubeError.
    """
    end = time.monotonic() + timeout_s
    kube.delete(LEASE, lease_name(run))
    for kind in kinds_of(kube):
        for each in kube.list(kind, labels={RUN_LABEL: run}).items:
            if kind == SERVICE:
                kube.delete(SECRET, each["metadata"]["name"])
            try:
                kube.delete(kind, each["metadata"]["name"], uid=each["metadata"]["uid"])
            except Stale:
                continue  # a newer one, which is not ours
    pause_s = POLL_S
    # pods take longest: while there are some, nothing else is looked for
    while left := _left(kube, run, [POD]) or remaining(kube, run):
        if time.monotonic() > end:
            raise FleetNotReady(
                f"{run} was not taken down within {timeout_s:g} s: {', '.join(left[:5])} are left;"
                " the cluster goes on with it, agentgym envs gc looks again"
            )
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_POLL_S)
    logger.info("servers of %s are gone", run)


def remaining(kube: Kube, run: str) -> list[str]:
    """What bears the run's label, as `Pod env-babyai-r1-x`. Errors: KubeError."""
    return _left(kube, run, [*kinds_of(kube), POD, kind_of_addresses(kube)])


def _left(kube: Kube, run: str, kinds: Sequence[Kind]) -> list[str]:
    return [
        f"{kind.kind} {each['metadata']['name']}"
        for kind in kinds
        for each in kube.list(kind, labels={RUN_LABEL: run}).items
    ]


def _is_whole(deployment: Object) -> bool:
    return num_ready(deployment) >= max(1, int(deployment["spec"].get("replicas", 1)))


def _progress(deployments: Mapping[str, Object]) -> str:
    """`babyai 1 of 2, textcraft 2 of 2`."""
    rows = [
        f"{each['metadata'].get('labels', {}).get(ENVIRONMENT_LABEL, name)} {num_ready(each)} of"
        f" {each['spec'].get('replicas', 1)}"
        for name, each in sorted(deployments.items())
    ]
    return ", ".join(rows) or "nothing yet"


def _raise_final(run: str, reasons: Sequence[Trouble]) -> None:
    final = [each for each in reasons if each.is_final]
    if any(each.is_input for each in final):
        raise ConfigError(f"the servers of {run} refuse their options: {_all(final)}")
    if final:
        raise FleetNotReady(f"the servers of {run} will not get ready: {_all(final)}")


def _all(reasons: Sequence[Trouble]) -> str:
    texts = list(dict.fromkeys(each.text for each in reasons))
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def _log(kube: Kube, pod: str) -> str:
    try:
        return kube.log(pod, previous=True) or kube.log(pod)
    except KubeError as error:
        return f"(its log cannot be read: {error})"
