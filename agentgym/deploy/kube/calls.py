"""Calls of an API server through the dynamic client of the package `kubernetes`: with renewed
credentials, bounded attempts, a deadline also for the end of an answer, and errors of one sentence.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import urllib3

from agentgym.deploy.kube.credentials import Session

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
PIECE = 1 << 16  # bytes
# errors of a connection that cannot be made, or breaks
LOST = (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError)
SILENT = (urllib3.exceptions.ReadTimeoutError, TimeoutError)
NO_EVENT = (LookupError, TypeError, ValueError)  # errors of the package for JSON that is no event

UNAUTHORIZED, FORBIDDEN, MISSING, CONFLICT, GONE = 401, 403, 404, 409, 410
RETRIED = frozenset({408, 429, 500, 502, 503, 504})  # statuses after which asking again may help


class KubeError(RuntimeError):
    """The API server refused, or did not answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status  # of HTTP; 0 without an answer
        self.retry_after_s = 0.0  # the time that the API server asks for


class ApiUnreachable(KubeError):
    """No answer came in time, or only errors that may pass, also after repeated attempts."""


class Forbidden(KubeError):
    """The account lacks the right or quota, or its credentials or the certificate are refused."""


class NotFound(KubeError):
    """There is no such object."""


class NotServed(KubeError):
    """The cluster knows no such kind."""


class AlreadyExists(KubeError):
    """An object of that name exists already."""


class FieldConflict(KubeError):
    """Another manager owns fields that server-side apply would change."""


class Stale(KubeError):
    """The object was changed or replaced since it was read."""


class Gone(KubeError):
    """The API server has forgotten the requested version: list again."""


@dataclass(frozen=True, slots=True)
class Retries:
    """Limits on the attempts of one call, in number and in time."""

    deadline_s: float = 120.0  # of all attempts together; an API server restarts faster
    request_s: float = 20.0  # of one attempt
    most: int = 24  # attempts
    first_s: float = 0.2  # before the second attempt; doubles
    longest_s: float = 10.0  # a server's Retry-After is honored up to three times this

    def wait_s(self, attempt: int, retry_after_s: float, draw: float) -> float:
        """Return the seconds to wait after attempt number `attempt` (from 0) with this Retry-After.
        draw: uniform in [0, 1), so that clients refused together do not return together.
        """
        backoff_s = min(self.first_s * 2.0 ** min(attempt, 20), self.longest_s) * (0.5 + 0.5 * draw)
        return max(backoff_s, min(retry_after_s, 3 * self.longest_s) * (1 + 0.25 * draw))

    def may_retry(self, error: KubeError) -> bool:
        """Return True if another attempt may help."""
        return isinstance(error, ApiUnreachable) or error.status in RETRIED


class RateLimiter:
    """Limit of `burst` calls at once and `per_s` in a second, over all threads."""

    def __init__(
        self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._lock = threading.Lock()
        self._free_at = clock()  # when all of the burst is free again

    def reserve_s(self) -> float:
        """Reserve the next call. Return the seconds that the caller has to wait before it."""
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + 1 / self._per_s
            return max(0.0, self._free_at - now - self._burst / self._per_s)


class Transport:
    """Sender of requests; threads may share it.

    Arguments of its methods: `verb` is a method of the package's dynamic client, `options` are that
    method's arguments, `doing` is a text for messages, as `apply of Deployment env-babyai`.
    """

    def __init__(
        self,
        session: Session,
        retries: Retries,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.calls: Counter[str] = Counter()  # verb -> requests sent, repeated ones too
        self.retries = retries
        self.session = session
        self.clock, self.sleep = clock, sleep

    def ask(self, verb: str, doing: str, **options: Any) -> dict[str, Any]:
        """Carry out a verb as `call` does, and return the answer's JSON object.
        Errors: those of `call`; KubeError for an answer that is no JSON object.
        """
        body = self.call(verb, doing, **options)
        if (answer := _object_in(body)) is None:
            text = f"{doing}: what answers at {self._host()} is no API server: {body[:100]!r}"
            raise KubeError(text, 200)
        return answer

    def call(
        self,
        verb: str,
        doing: str,
        *,
        limiter: RateLimiter | None = None,
        within_s: float | None = None,
        **options: Any,
    ) -> bytes:
        """Carry out a verb, repeatedly if that may help, and return the answer's body. If the
        credentials are refused, they are loaded again, once.
        limiter: delays the first attempt. within_s: for all attempts; None: retries.deadline_s.
        Errors: KubeError; ApiUnreachable once time or attempts are used up.
        """
        if limiter is not None:
            self.sleep(limiter.reserve_s())
        began, renewed, attempt = self.clock(), False, 0
        end = began + (within_s or self.retries.deadline_s)
        while True:
            client = self.session.client
            timeout_s = min(self.retries.request_s, end - self.clock())
            try:
                return self._attempt(client, verb, doing, timeout_s, options)
            except KubeError as error:
                if error.status == UNAUTHORIZED and not renewed and self.session.renew(client):
                    renewed = True
                    continue
                if not self.retries.may_retry(error):
                    raise
                wait_s = self.pause_s(attempt, error.retry_after_s)
                attempt += 1
                if self.clock() + wait_s >= end or attempt >= self.retries.most:
                    text = f"{error} (tried {attempt} times in {self.clock() - began:.0f} s)"
                    raise ApiUnreachable(text, error.status) from None
                logger.info("%s; again in %.1f s", error, wait_s)
            self.sleep(wait_s)

    def stream(
        self, doing: str, *, idle_s: float, **options: Any
    ) -> Iterator[Mapping[str, Any] | None]:
        """Yield events of one connection of a watch; yield None and stop if nothing came for
        idle_s. Also stop if the credentials are refused and `Session.renew` gets new ones.
        Errors: KubeError; ApiUnreachable if the connection is lost.
        """
        from kubernetes.watch import Watch

        client = self.session.client

        def opened(**parameters: Any) -> Any:
            with self._as_kube_error(doing):
                return self._send(client, "get", self.retries.request_s, idle_s, parameters)

        try:
            with self._as_kube_error(doing):
                try:
                    for event in Watch().stream(opened, **options):
                        if event is None:  # the package's result for a line that is no JSON
                            raise ValueError("no JSON")
                        yield event
                except SILENT:
                    yield None
        except Forbidden as error:
            if error.status != UNAUTHORIZED or not self.session.renew(client):
                raise  # else the next connection has the renewed credentials
        except NO_EVENT as error:
            raise KubeError(f"{doing}: what came is no event of a watch", 500) from error

    def pause_s(self, attempt: int, requested_s: float = 0.0) -> float:
        """Return a random wait in seconds after attempt number `attempt`, see `Retries.wait_s`."""
        return self.retries.wait_s(attempt, requested_s, random.random())  # noqa: S311

    def _attempt(
        self, client: Any, verb: str, doing: str, timeout_s: float, options: Mapping[str, Any]
    ) -> bytes:
        """Send one request; return the answer's body, whole within timeout_s. Errors: KubeError."""
        end = self.clock() + timeout_s
        pieces: list[bytes] = []
        with (
            self._as_kube_error(doing),
            contextlib.closing(self._send(client, verb, timeout_s, timeout_s, options)) as response,
        ):
            while piece := response.read1(PIECE):
                pieces.append(piece)
                if self.clock() > end:
                    raise TimeoutError(f"the answer did not end within {timeout_s:g} s")
        return b"".join(pieces)

    def _send(
        self, client: Any, verb: str, timeout_s: float, read_s: float, options: Mapping[str, Any]
    ) -> Any:
        """Count and send the request. Return urllib3's response, whose body is not read yet.
        timeout_s: limit on connecting; read_s: limit on each read.
        """
        self.calls["watch" if "watch" in options else verb] += 1
        limits = max(0.1, min(CONNECT_S, timeout_s)), max(0.1, read_s)
        return getattr(client, verb)(**options, serialize=False, _request_timeout=limits)

    @contextlib.contextmanager
    def _as_kube_error(self, doing: str) -> Iterator[None]:
        """Raise the block's errors of the package and of connections as KubeError."""
        from kubernetes.client.exceptions import ApiException
        from kubernetes.utils import retry_after_seconds

        host, source = self._host(), self.session.source
        try:
            yield
        except ApiException as error:
            if not error.status:  # an error of TLS, which another attempt does not mend
                raise Forbidden(
                    f"{host}: no trusted connection ({_line(error.reason)}); correct certificate"
                    f" and address in {source}"
                ) from None
            refusal = error_of(error.status, str(error.body or error.reason or ""), doing)
            refusal.retry_after_s = retry_after_seconds(error) or 0.0
            raise refusal from None
        except LOST as error:
            raise ApiUnreachable(
                f"{doing}: no answer from {host} ({type(error).__name__} {_line(error)}); is the"
                f" cluster up, and the address in {source} right?"
            ) from None

    def _host(self) -> str:
        return str(self.session.client.configuration.host)


def _line(text: object) -> str:
    return " ".join(str(text).split())[:300]


def error_of(status: int, body: str, doing: str) -> KubeError:
    """Return the KubeError, in class and text, for an answer of that HTTP status.
    body: a Status object in JSON if the API server itself answered. doing: see Transport.
    """
    answer = _object_in(body) or {}
    message = str(answer.get("message") or body[:200].strip() or "no reason")
    causes = (answer.get("details") or {}).get("causes") or []
    conflict: tuple[type[KubeError], str] = (Stale, f"it was changed meanwhile ({message})")
    if any(cause.get("reason") == "FieldManagerConflict" for cause in causes):
        conflict = FieldConflict, _held(causes)
    elif answer.get("reason") == "AlreadyExists":
        conflict = AlreadyExists, "one of that name is there already"
    renew = "renew them, as `kubectl get pods` with the same kubeconfig shows"
    invalid = KubeError, f"the cluster refuses it as invalid: {message}"
    refused = f"the cluster does not accept these credentials (401 {message}); {renew}"
    answers: dict[int, tuple[type[KubeError], str]] = {
        400: invalid,
        UNAUTHORIZED: (Forbidden, refused),
        FORBIDDEN: (Forbidden, f"{message}; {_allow(message)}"),
        MISSING: (NotFound, message),
        CONFLICT: conflict,
        GONE: (Gone, message),
        422: invalid,
    }
    error, text = answers.get(status, (KubeError, f"the API server answered {status}: {message}"))
    return error(f"{doing}: {text}", status)


def _object_in(body: bytes | str) -> dict[str, Any] | None:
    """Return an answer's JSON object; None if it is no JSON, or no object."""
    with contextlib.suppress(ValueError):
        if isinstance(answer := json.loads(body), dict):
            return answer
    return None


def _allow(message: str) -> str:
    if "exceeded quota" in message:
        return "end what is no longer needed (agentgym envs gc), ask for less, or raise the quota"
    if "being terminated" in message:
        return "wait until the namespace is gone, and make it again"
    return "give the account that right (k8s/base/fleets/flow.yaml has all that a flow needs)"


def _held(causes: list[dict[str, Any]]) -> str:
    """Return a message with the fields that other managers own, and the remedies."""
    fields_of: dict[str, list[str]] = {}  # manager -> fields
    for cause in causes:
        manager = str(cause.get("message", "")).removeprefix("conflict with ").split(" using")[0]
        field = str(cause.get("field", "?")).lstrip(".")
        fields_of.setdefault(manager.strip('"'), []).append(field)
    fields = "; ".join(f"{', '.join(names)} by {manager}" for manager, names in fields_of.items())
    return (
        f"fields are held by another manager: {fields}. Let it give them up (apply there without"
        " these fields), leave them out of the manifest, or take them over with force"
    )
