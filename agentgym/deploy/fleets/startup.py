"""Bringing the servers of a group up, waiting for them, and taking them down.

The bearer token of each fleet is derived from a key in the flow's environment, so that every
attempt at a run derives it again and reads no Secret. Servers know only their own fleet's token,
and the key is sent nowhere.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Sequence

from agentgym.config import ConfigError
from agentgym.deploy.fleets.addresses import kind_of_addresses
from agentgym.deploy.fleets.fleet_lease import OWNED, Group, lease_name
from agentgym.deploy.fleets.readiness import (
    Trouble,
    is_live,
    num_ready,
    of_deployment,
    troubles,
)
from agentgym.deploy.kube.calls import AlreadyExists, Forbidden, KubeError, Stale
from agentgym.deploy.kube.client import (
    DEPLOYMENT,
    EVENT,
    LEASE,
    POD,
    SECRET,
    SERVICE,
    Kind,
    Kube,
    Object,
)
from agentgym.deploy.manifests import ENVIRONMENT_LABEL, RUN_LABEL
from envs.wire import TOKEN_VARIABLE

logger = logging.getLogger(__name__)

KEY_VARIABLE = "AGENTGYM_FLEET_KEY"
BUDGETS = tuple(Kind(f"policy/{version}", "PodDisruptionBudget") for version in ("v1", "v1beta1"))
AUTOSCALERS = tuple(
    Kind(f"autoscaling/{version}", "HorizontalPodAutoscaler") for version in ("v2", "v2beta2")
)
LOOK_S = 5.0  # between looks at pods while waiting for them
POLL_S, LONGEST_POLL_S = 0.5, 3.0  # while waiting for deletions
SURGE = 1  # extra pods of a Deployment while it changes


class FleetNotReady(RuntimeError):
    """Servers did not get ready, or did not go, in time; the message gives pods and reasons."""


class FleetTripped(RuntimeError):
    """The run has more live pods than it can have made."""


def kinds_of(kube: Kube) -> list[Kind]:
    """Return the kinds of a group's objects, in the versions that the cluster knows; the lease
    first, because it owns the others.
    """
    newest = [
        next((kind for kind in versions if kube.serves(kind)), None)
        for versions in (BUDGETS, AUTOSCALERS)
    ]
    return [LEASE, DEPLOYMENT, SERVICE, *(kind for kind in newest if kind)]


def no_key() -> list[str]:
    """Return one line if this environment lacks the key that tokens are derived from, else none."""
    if os.environ.get(KEY_VARIABLE, "").strip():
        return []
    return [
        f"{KEY_VARIABLE} is not set; the token of each fleet is made of it:"
        f" export {KEY_VARIABLE}=$(openssl rand -hex 32), and keep it (k8s/README.md)"
    ]


def token_of_fleet(name: str) -> str:
    """Return a fleet's token. name: of the fleet's Service. Errors: ConfigError without a key."""
    if missing := no_key():
        raise ConfigError(missing[0])
    key = os.environ[KEY_VARIABLE].strip().encode()
    return hmac.new(key, f"fleet {name}".encode(), "sha256").hexdigest()


def give_token(kube: Kube, group: Group, name: str) -> None:
    """Create the Secret with the fleet's token, which its pods read; the group owns it.

    A Secret that an earlier owner left is replaced unread: the flow's account may create and delete
    Secrets, and do nothing else with them.
    The Secret of a kept fleet is shared, and stays the same.
    Errors: ConfigError, KubeError.
    """
    secret = {
        "apiVersion": SECRET.api_version,
        "kind": SECRET.kind,
        "metadata": {
            "name": name,
            "labels": {**OWNED, RUN_LABEL: group.run},
            "ownerReferences": [group.owner()],
        },
        "stringData": {TOKEN_VARIABLE: token_of_fleet(name)},
    }
    try:
        kube.create(secret)
    except AlreadyExists:
        if not group.is_kept:
            kube.delete(SECRET, name)
            kube.create(secret)


def send(kube: Kube, group: Group, objects: Sequence[Object]) -> None:
    """Create a Secret with a token for every Deployment, then apply all objects. The group's lease
    owns them; equal ones stay unchanged.
    Errors: ConfigError, KubeError.
    """
    for obj in objects:
        if obj["kind"] == DEPLOYMENT.kind:
            give_token(kube, group, obj["metadata"]["name"])
    for obj in objects:
        owned = obj["metadata"] | {"ownerReferences": [group.owner()]}
        kube.apply(obj | {"metadata": owned})


def most_pods(objects: Sequence[Object]) -> int:
    """Return the most live pods that these Deployments may have: an autoscaler counts at its
    maximum, and a Deployment that changes has SURGE more.
    """
    bounds = {
        obj["spec"]["scaleTargetRef"]["name"]: int(obj["spec"]["maxReplicas"])
        for obj in objects
        if obj["kind"] == "HorizontalPodAutoscaler"
    }
    deployments = [obj for obj in objects if obj["kind"] == "Deployment"]
    return sum(
        bounds.get(obj["metadata"]["name"], obj["spec"].get("replicas", 1)) + SURGE
        for obj in deployments
    )


def check_breaker(kube: Kube, run: str, limit: int) -> None:
    """Raise FleetTripped if the run has more than `limit` live pods. Errors: also KubeError."""
    live = [pod for pod in kube.list(POD, labels={RUN_LABEL: run}).items if is_live(pod)]
    if len(live) > limit:
        names = ", ".join(sorted(pod["metadata"]["name"] for pod in live)[:5])
        raise FleetTripped(
            f"run {run} has {len(live)} live pods, and at most {limit} are its own: {names}, ...;"
            f" see who makes them: kubectl get pods -n {kube.namespace} -l {RUN_LABEL}={run}"
        )


def num_live(kube: Kube, run: str) -> int:
    """Number of the run's pods that use room. Errors: KubeError."""
    return sum(is_live(pod) for pod in kube.list(POD, labels={RUN_LABEL: run}).items)


def wait_ready(kube: Kube, run: str, *, timeout_s: float, most: int) -> None:
    """Wait until every server is ready, and log a line whenever that changes.

    Errors: FleetNotReady past the deadline, or if waiting does not help; ConfigError if a server
    refuses its options; FleetTripped above `most` live pods; KubeError.
    """
    end, looked_at, last_state = time.monotonic() + timeout_s, 0.0, ""
    deployments: Sequence[Object] = ()
    reasons: list[Trouble] = []
    for deployments in kube.watch(DEPLOYMENT, labels={RUN_LABEL: run}, for_s=timeout_s, idle_s=1.0):
        if deployments and all(_is_whole(deployment) for deployment in deployments):
            logger.info("servers of %s are ready: %s", run, _progress(deployments))
            return
        if time.monotonic() - looked_at >= min(LOOK_S, timeout_s / 4):
            looked_at = time.monotonic()
            check_breaker(kube, run, most)
            reasons = reasons_of(kube, run, deployments)
            _raise_final(run, reasons)
        state = "; ".join([_progress(deployments), *(reason.text for reason in reasons[:2])])
        if state != last_state:
            last_state = state
            logger.info("waiting for servers of %s: %s", run, state)
        if time.monotonic() >= end:
            break
    reasons = reasons_of(kube, run, deployments) or [Trouble("no pod is there yet")]
    raise FleetNotReady(
        f"the servers of {run} were not ready within {timeout_s:g} s ({_progress(deployments)}):"
        f" {_all(reasons)}"
    )


def reasons_of(kube: Kube, run: str, deployments: Sequence[Object]) -> list[Trouble]:
    """Return the reasons why servers are not ready, the worst first. Errors: KubeError."""
    pods = kube.list(POD, labels={RUN_LABEL: run}).items
    reasons = [found for deployment in deployments if (found := of_deployment(deployment))]
    try:
        events = kube.list(EVENT, fields="involvedObject.kind=Pod,type=Warning").items
    except Forbidden:
        events = []
    events.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return reasons + troubles(pods, events, lambda pod: _log(kube, pod))


def take_down(kube: Kube, run: str, *, timeout_s: float) -> None:
    """Delete the lease, which deletes everything it owns, and then whatever else has the run's
    label; return when nothing of it is left.

    Errors: FleetNotReady past the deadline, naming what is left; KubeError.
    """
    end = time.monotonic() + timeout_s
    kube.delete(LEASE, lease_name(run))
    for kind in kinds_of(kube):
        for obj in kube.list(kind, labels={RUN_LABEL: run}).items:
            if kind == SERVICE:
                kube.delete(SECRET, obj["metadata"]["name"])
            try:
                kube.delete(kind, obj["metadata"]["name"], uid=obj["metadata"]["uid"])
            except Stale:
                continue  # a newer one, which is not ours
    pause_s = POLL_S
    # pods take longest: look for other objects only when no pod is left
    while names := _left(kube, run, [POD]) or remaining(kube, run):
        if time.monotonic() > end:
            raise FleetNotReady(
                f"{run} was not taken down within {timeout_s:g} s: {', '.join(names[:5])} are left;"
                " the cluster continues with it, agentgym envs gc looks again"
            )
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_POLL_S)
    logger.info("servers of %s are gone", run)


def remaining(kube: Kube, run: str) -> list[str]:
    """Return objects with the run's label, for example `Pod env-babyai-r1-x`. Errors: KubeError."""
    return _left(kube, run, [*kinds_of(kube), POD, kind_of_addresses(kube)])


def _left(kube: Kube, run: str, kinds: Sequence[Kind]) -> list[str]:
    return [
        f"{kind.kind} {obj['metadata']['name']}"
        for kind in kinds
        for obj in kube.list(kind, labels={RUN_LABEL: run}).items
    ]


def _is_whole(deployment: Object) -> bool:
    return num_ready(deployment) >= max(1, int(deployment["spec"].get("replicas", 1)))


def _progress(deployments: Sequence[Object]) -> str:
    """Return the number of ready servers, for example `babyai 1 of 2, textcraft 2 of 2`."""
    rows = []
    for deployment in sorted(deployments, key=lambda deployment: deployment["metadata"]["name"]):
        metadata, num = deployment["metadata"], deployment["spec"].get("replicas", 1)
        name = metadata.get("labels", {}).get(ENVIRONMENT_LABEL, metadata["name"])
        rows.append(f"{name} {num_ready(deployment)} of {num}")
    return ", ".join(rows) or "nothing yet"


def _raise_final(run: str, reasons: Sequence[Trouble]) -> None:
    final = [reason for reason in reasons if reason.is_final]
    if any(reason.is_input for reason in final):
        raise ConfigError(f"the servers of {run} refuse their options: {_all(final)}")
    if final:
        raise FleetNotReady(f"the servers of {run} will not get ready: {_all(final)}")


def _all(reasons: Sequence[Trouble]) -> str:
    texts = list(dict.fromkeys(reason.text for reason in reasons))
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def _log(kube: Kube, pod: str) -> str:
    try:
        return kube.log(pod, previous=True) or kube.log(pod)
    except KubeError as error:
        return f"(its log cannot be read: {error})"
