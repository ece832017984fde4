"""Start and end of a group's servers: bring them up, wait for them, find the reason why one is not
ready, and take them down.

The bearer token of each fleet is derived from a key in the flow's environment, so that every
attempt at a run derives it again and reads no Secret. Servers know only their own fleet's token,
and the key is sent nowhere.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from agentgym.config import ConfigError, first_of
from agentgym.deploy.fleets.addresses import kind_of_addresses
from agentgym.deploy.fleets.fleet_lease import OWNED, Group, lease_name
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
BAD_INPUT = 2  # exit code of a server that refuses its options
CRASHES = 3  # restarts after which waiting does not help
NEVER = ("InvalidImageName", "ErrImageNeverPull")  # reasons that do not pass by themselves
PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")

Log = Callable[[str], str]  # pod -> the last lines of its previous container


class FleetNotReady(RuntimeError):
    """Servers did not get ready, or did not end, in time. The message gives pods and reasons."""


class FleetTripped(RuntimeError):
    """The run has more live pods than its Deployments may make."""


def kinds_of(kube: Kube) -> list[Kind]:
    """Return the kinds of a group's objects: Lease (owner of the others), Deployment, Service, and
    budget and autoscaler in the newest version that the cluster serves, if any. Errors: KubeError.
    """
    newest = [
        next((kind for kind in versions if kube.serves(kind)), None)
        for versions in (BUDGETS, AUTOSCALERS)
    ]
    return [LEASE, DEPLOYMENT, SERVICE, *(kind for kind in newest if kind)]


def no_key() -> list[str]:
    """Return one error line if KEY_VARIABLE, the key of all tokens, is not set; else none."""
    if os.environ.get(KEY_VARIABLE, "").strip():
        return []
    return [
        f"{KEY_VARIABLE} is not set; the token of each fleet is made of it:"
        f" export {KEY_VARIABLE}=$(openssl rand -hex 32), and keep it (k8s/README.md)"
    ]


def token_of_fleet(name: str) -> str:
    """Return a fleet's token, made of KEY_VARIABLE and `name`, that of the fleet's Service.
    Errors: ConfigError if the variable is not set.
    """
    if missing := no_key():
        raise ConfigError(missing[0])
    key = os.environ[KEY_VARIABLE].strip().encode()
    return hmac.new(key, f"fleet {name}".encode(), "sha256").hexdigest()


def give_token(kube: Kube, group: Group, name: str) -> None:
    """Create the Secret `name` with the fleet's token, which its pods read. The group owns it.

    A Secret that an earlier owner left is replaced unread: the flow's account may create and delete
    Secrets, and do nothing else with them.
    The Secret of a fleet that outlives runs is shared, and stays the same.
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
    owns them. Applying an object that is equal on the cluster changes nothing.
    Errors: ConfigError, KubeError.
    """
    for obj in objects:
        if obj["kind"] == DEPLOYMENT.kind:
            give_token(kube, group, obj["metadata"]["name"])
    for obj in objects:
        kube.apply(obj | {"metadata": obj["metadata"] | {"ownerReferences": [group.owner()]}})


def most_pods(objects: Sequence[Object]) -> int:
    """Return the most live pods that these Deployments may have: an autoscaler counts at its
    maximum, and a Deployment that changes has SURGE more.
    """
    bounds = {
        obj["spec"]["scaleTargetRef"]["name"]: int(obj["spec"]["maxReplicas"])
        for obj in objects
        if obj["kind"] == "HorizontalPodAutoscaler"
    }
    return sum(
        bounds.get(obj["metadata"]["name"], obj["spec"].get("replicas", 1)) + SURGE
        for obj in objects
        if obj["kind"] == "Deployment"
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
    """Number of the run's live pods, see `is_live`. Errors: KubeError."""
    return sum(is_live(pod) for pod in kube.list(POD, labels={RUN_LABEL: run}).items)


def wait_ready(kube: Kube, run: str, *, timeout_s: float, most: int) -> None:
    """Wait until every server of the group `run` is ready; log a line whenever their state changes.

    Errors: FleetNotReady past the deadline, or if waiting does not help; ConfigError if a server
    refuses its options; FleetTripped above `most` live pods; KubeError.
    """
    end, looked_at, last_state = time.monotonic() + timeout_s, 0.0, ""
    deployments: Sequence[Object] = ()
    reasons: list[Trouble] = []
    for deployments in kube.watch(DEPLOYMENT, labels={RUN_LABEL: run}, for_s=timeout_s, idle_s=1.0):
        whole = [num_ready(one) >= max(1, one["spec"].get("replicas", 1)) for one in deployments]
        if whole and all(whole):
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
    """Return the reasons why servers of the group `run` are not ready: those of Deployments, then
    those of pods, `is_final` ones first. Errors: KubeError.
    """
    pods = kube.list(POD, labels={RUN_LABEL: run}).items
    reasons = [found for deployment in deployments if (found := of_deployment(deployment))]
    try:
        events = kube.list(EVENT, fields="involvedObject.kind=Pod,type=Warning").items
    except Forbidden:
        events = []
    events.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return reasons + troubles(pods, events, lambda pod: _log(kube, pod))


def take_down(kube: Kube, run: str, *, timeout_s: float) -> None:
    """Delete the lease, with which Kubernetes deletes all that it owns, and then all other objects
    that have the run's label; return when none is left.

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
                continue  # replaced since it was listed: not ours
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
    """Return the run's objects that are left, as `Pod env-babyai-r1-x`. Errors: KubeError."""
    return _left(kube, run, [*kinds_of(kube), POD, kind_of_addresses(kube)])


def _left(kube: Kube, run: str, kinds: Sequence[Kind]) -> list[str]:
    return [
        f"{kind.kind} {obj['metadata']['name']}"
        for kind in kinds
        for obj in kube.list(kind, labels={RUN_LABEL: run}).items
    ]


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
    return first_of(list(dict.fromkeys(reason.text for reason in reasons)), 3, "; ")


def _log(kube: Kube, pod: str) -> str:
    try:
        return kube.log(pod, previous=True) or kube.log(pod)
    except KubeError as error:
        return f"(its log cannot be read: {error})"


class Trouble(NamedTuple):
    """Reason why something is not ready."""

    text: str  # one sentence, then perhaps lines of a log
    is_final: bool = False  # waiting does not help
    is_input: bool = False  # the server refuses its options


def is_ready(pod: Object) -> bool:
    """Return True if the pod has the condition Ready and is not being deleted."""
    return not pod["metadata"].get("deletionTimestamp") and (
        (_condition(pod, "Ready") or {}).get("status") == "True"
    )


def is_live(pod: Object) -> bool:
    """Return True if the pod uses resources: it has not ended and is not being deleted."""
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return not ended and not pod["metadata"].get("deletionTimestamp")


def troubles(
    pods: Sequence[Object], events: Iterable[Object] = (), log: Log | None = None
) -> list[Trouble]:
    """Return the reason for every pod neither ready nor being deleted, `is_final` ones first.
    events: of these pods. log: called with the name of a pod that crashes.
    """
    of_pod: defaultdict[str | None, list[Object]] = defaultdict(list)  # by uid
    for event in events:
        of_pod[event.get("involvedObject", {}).get("uid")].append(event)
    reasons = [
        trouble(pod, of_pod[pod["metadata"].get("uid")], log)
        for pod in pods
        if not is_ready(pod) and not pod["metadata"].get("deletionTimestamp")
    ]
    return sorted(reasons, key=lambda reason: not reason.is_final)


def trouble(pod: Object, events: Sequence[Object] = (), log: Log | None = None) -> Trouble:
    """Return why a pod is not ready. events: the pod's. log: called with its name if it crashes."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    scheduled = _condition(pod, "PodScheduled")
    if scheduled and scheduled.get("status") == "False":
        reason = _words(scheduled.get("message") or scheduled.get("reason"))
        return Trouble(f"{name} cannot be scheduled: {reason}")
    if status.get("phase") == "Failed":
        reason = _words(status.get("message") or status.get("reason"))
        return Trouble(f"{name} has failed: {reason}")
    kinds = ("initContainerStatuses", "containerStatuses")
    for container in [container for kind in kinds for container in status.get(kind, ())]:
        if container_trouble := _of_container(name, container, events, log):
            return container_trouble
    if not scheduled:
        return Trouble(f"{name} waits for the scheduler")
    if node := pod.get("spec", {}).get("nodeName"):
        return Trouble(f"{name} is being started on node {node}{_last(events)}")
    return Trouble(f"{name} waits{_last(events)}")


def of_deployment(deployment: Object) -> Trouble | None:
    """Return the reason why a Deployment cannot make its pods, or None if it reports none."""
    failure = _condition(deployment, "ReplicaFailure")
    if failure and failure.get("status") == "True":
        name = deployment["metadata"]["name"]
        return Trouble(f"{name} gets no pods: {_words(failure.get('message'))}")
    return None


def num_ready(deployment: Object) -> int:
    """Number of ready servers of the current manifest; 0 before the cluster has seen it."""
    status, wanted = deployment.get("status", {}), deployment["spec"].get("replicas", 1)
    if status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return 0
    counts = ("readyReplicas", "updatedReplicas", "availableReplicas")
    return min(int(wanted), *(int(status.get(name, 0)) for name in counts))


def _of_container(
    name: str, container: Object, events: Sequence[Object], log: Log | None
) -> Trouble | None:
    state, before = container.get("state", {}), container.get("lastState", {}).get("terminated")
    waiting, restarts = state.get("waiting", {}), container.get("restartCount", 0)
    reason, message = waiting.get("reason", ""), _words(waiting.get("message"))
    ended = state.get("terminated") or before
    if reason in PULL:
        text = f"{name} cannot pull its image {container.get('image', '')}: {reason} {message}"
        return Trouble(text.rstrip(), is_final=reason in NEVER)
    if ended and "running" not in state:
        return _crashed(name, ended, restarts, log)
    if reason == "CreateContainerConfigError":
        return Trouble(f"{name} cannot be started: {message}")
    if reason and reason not in ("ContainerCreating", "PodInitializing"):
        return Trouble(f"{name} waits: {reason} {message}".rstrip())
    if "running" in state and not container.get("ready"):
        probe = [event for event in events if event.get("reason") == "Unhealthy"]
        detail = _words(probe[-1].get("message")) if probe else "its readiness probe has not passed"
        again = f", {restarts} times restarted" if restarts else ""
        return Trouble(f"{name} runs and is not ready{again}: {detail}")
    return None


def _crashed(name: str, ended: Object, restarts: int, log: Log | None) -> Trouble:
    code = ended.get("exitCode")
    why = _words(ended.get("message") or ended.get("reason"))
    text = f"{name} crashes, {restarts} times restarted: exit code {code} ({why})"
    if ended.get("reason") == "OOMKilled":
        text += "; it needs more memory than its manifest gives, or fewer sessions"
    lines = log(name).strip() if log else ""
    if lines:
        text += f"; the last lines of its log:\n{lines}"
    is_input = code == BAD_INPUT
    return Trouble(text, is_final=is_input or restarts >= CRASHES, is_input=is_input)


def _condition(obj: Object, kind: str) -> Any:
    conditions = obj.get("status", {}).get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == kind), None)


def _last(events: Sequence[Object]) -> str:
    warnings = [event for event in events if event.get("type") == "Warning"]
    return f": {_words(warnings[-1].get('message'))}" if warnings else ""


def _words(text: object) -> str:
    return " ".join(str(text or "no reason given").split())
