"""Servers of a fleet that are not ready, and why, from the cluster's objects.
Nothing here sends a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from agentgym.deploy.kube.client import Object

BAD_INPUT = 2  # exit code of a server that refuses its options
CRASHES = 3  # restarts after which waiting does not help
NEVER = ("InvalidImageName", "ErrImageNeverPull")  # reasons that do not pass by themselves
PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")

Log = Callable[[str], str]  # pod -> the last lines of its previous container


class Trouble(NamedTuple):
    """Reason why something is not ready."""

    text: str  # one sentence, then perhaps lines of a log
    is_final: bool = False  # waiting does not help
    is_input: bool = False  # the server refuses its options


def is_ready(pod: Object) -> bool:
    """Return True if the pod serves and is not being deleted."""
    return not pod["metadata"].get("deletionTimestamp") and (
        (_condition(pod, "Ready") or {}).get("status") == "True"
    )


def is_live(pod: Object) -> bool:
    """Return True if the pod uses room: it has neither ended nor is it ending."""
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return not ended and not pod["metadata"].get("deletionTimestamp")


def troubles(
    pods: Sequence[Object],
    events: Iterable[Object] = (),
    log: Log | None = None,
) -> list[Trouble]:
    """Return the reason for every pod that is neither ready nor being deleted, final ones first.
    events: of these pods; log: called for pods that crash.
    """
    warnings = list(events)
    reasons = [
        trouble(pod, [event for event in warnings if _is_of(event, pod)], log)
        for pod in pods
        if not is_ready(pod) and not pod["metadata"].get("deletionTimestamp")
    ]
    return sorted(reasons, key=lambda reason: not reason.is_final)


def trouble(pod: Object, events: Sequence[Object] = (), log: Log | None = None) -> Trouble:
    """Return the reason why a pod is not ready. log: called if it crashes."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    scheduled = _condition(pod, "PodScheduled")
    if scheduled and scheduled.get("status") == "False":
        reason = _words(scheduled.get("message") or scheduled.get("reason"))
        return Trouble(f"{name} cannot be scheduled: {reason}")
    if status.get("phase") == "Failed":
        reason = _words(status.get("message") or status.get("reason"))
        return Trouble(f"{name} has failed: {reason}")
    for container in [
        *status.get("initContainerStatuses", ()),
        *status.get("containerStatuses", ()),
    ]:
        if container_trouble := _of_container(name, container, events, log):
            return container_trouble
    if not scheduled:
        return Trouble(f"{name} waits for the scheduler")
    if node := pod.get("spec", {}).get("nodeName"):
        return Trouble(f"{name} is being started on node {node}{_last(events)}")
    return Trouble(f"{name} waits{_last(events)}")


def of_deployment(deployment: Object) -> Trouble | None:
    """Return the reason why a Deployment makes no pods, or None."""
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
    ready: int = min(
        status.get("readyReplicas", 0),
        status.get("updatedReplicas", 0),
        status.get("availableReplicas", 0),
        wanted,
    )
    return ready


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
    return next(
        (
            condition
            for condition in obj.get("status", {}).get("conditions", ())
            if condition["type"] == kind
        ),
        None,
    )


def _is_of(event: Object, pod: Object) -> bool:
    return bool(event.get("involvedObject", {}).get("uid") == pod["metadata"].get("uid"))


def _last(events: Sequence[Object]) -> str:
    warnings = [event for event in events if event.get("type") == "Warning"]
    return f": {_words(warnings[-1].get('message'))}" if warnings else ""


def _words(text: object) -> str:
    return " ".join(str(text or "no reason given").split())
