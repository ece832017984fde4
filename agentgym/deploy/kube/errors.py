"""Errors between this process and an API server, each as one sentence that names the remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

FORBIDDEN, UNAUTHORIZED, MISSING, CONFLICT, GONE, INVALID = 403, 401, 404, 409, 410, 422


class KubeError(RuntimeError):
    """The API server refused, or did not answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message, status)
        self.message = message
        self.status = status  # of HTTP; 0 without an answer

    def __str__(self) -> str:
        return self.message


class ApiUnreachable(KubeError):
    """No answer in time, in spite of repeated calls."""


class Forbidden(KubeError):
    """The account lacks the right or quota, or its credentials or the certificate are refused."""


class NotFound(KubeError):
    """There is no such object."""


class NotServed(KubeError):
    """The cluster knows no such kind."""


class AlreadyExists(KubeError):
    """An object of that name exists, which another client made."""


class FieldConflict(KubeError):
    """Another manager owns fields that server-side apply would change."""


class Stale(KubeError):
    """The object was changed or replaced since it was read."""


class Gone(KubeError):
    """The API server has forgotten the requested version: list again."""


def error_of(status: int, body: bytes, doing: str) -> KubeError:
    """Return the error that an answer of that status means.

    body: a Status object if the API server itself answered. doing: for example `apply of Deployment
    env-babyai`.
    """
    answer = status_of(body)
    message = str(
        answer.get("message") or body[:200].decode(errors="replace").strip() or "no reason"
    )
    reason, causes = answer.get("reason", ""), (answer.get("details") or {}).get("causes") or []
    if status == CONFLICT and any(
        cause.get("reason") == "FieldManagerConflict" for cause in causes
    ):
        return FieldConflict(_conflict(doing, causes), status)
    if status == CONFLICT and reason == "AlreadyExists":
        return AlreadyExists(f"{doing}: one of that name is there already", status)
    if status == CONFLICT:
        return Stale(f"{doing}: it was changed meanwhile ({message})", status)
    if status == UNAUTHORIZED:
        return Forbidden(
            f"{doing}: the cluster does not accept these credentials (401 {message}); renew them,"
            " as `kubectl get pods` with the same kubeconfig shows",
            status,
        )
    if status == FORBIDDEN:
        return Forbidden(f"{doing}: {message}; {_allow(message)}", status)
    if status == MISSING:
        return NotFound(f"{doing}: {message}", status)
    if status == GONE or answer.get("code") == GONE:
        return Gone(f"{doing}: {message}", GONE)
    if status == INVALID or status == 400:
        return KubeError(f"{doing}: the cluster refuses it as invalid: {message}", status)
    return KubeError(f"{doing}: the API server answered {status}: {message}", status)


def status_of(body: bytes) -> Mapping[str, Any]:
    """Return the Status object in an answer; empty if there is none."""
    try:
        answer = json.loads(body)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _allow(message: str) -> str:
    if "exceeded quota" in message:
        return "end what is no longer needed (agentgym envs gc), ask for less, or raise the quota"
    if "being terminated" in message:
        return "wait until the namespace is gone, and make it again"
    return "give the account that right (k8s/base/fleets/flow.yaml has all that a flow needs)"


def _conflict(doing: str, causes: list[dict[str, Any]]) -> str:
    fields_of: dict[str, list[str]] = {}  # manager -> fields
    for cause in causes:
        manager = (
            str(cause.get("message", "")).removeprefix("conflict with ").partition(" using")[0]
        )
        fields_of.setdefault(manager.strip('"'), []).append(
            str(cause.get("field", "?")).lstrip(".")
        )
    fields = "; ".join(f"{', '.join(names)} by {manager}" for manager, names in fields_of.items())
    return (
        f"{doing}: fields are held by another manager: {fields}. Let it give them up (apply"
        " there without these fields), leave them out of the manifest, or take them over with force"
    )
