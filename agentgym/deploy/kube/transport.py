"""Requests to an API server: with renewed credentials, bounded attempts, and a deadline also for
the end of an answer.

The package `kubernetes` provides credentials, TLS and connections.
"""

from __future__ import annotations

import http.client
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import urllib3

from agentgym.deploy.kube.credentials import Session, authorized
from agentgym.deploy.kube.errors import (
    UNAUTHORIZED,
    ApiUnreachable,
    Forbidden,
    KubeError,
    error_of,
)
from agentgym.deploy.kube.kinds import Object
from agentgym.deploy.kube.pace import RateLimiter, Retries, retry_after_s
from agentgym.deploy.kube.watching import events

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
PIECE = 1 << 16  # bytes
JSON = "application/json"
# errors of a connection that cannot be made, or breaks
LOST = (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError)
SILENT = (urllib3.exceptions.ReadTimeoutError, TimeoutError)


class Request(NamedTuple):
    method: str
    path: str
    doing: str  # for messages, for example `apply of Deployment env-babyai`
    query: Sequence[tuple[str, str]] = ()
    body: Object | None = None
    content_type: str = JSON

    @property
    def verb(self) -> str:
        return "watch" if ("watch", "true") in self.query else self.method.lower()


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class Transport:
    """Sender of requests; threads may share it."""

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
        self.clock, self._sleep = clock, sleep

    def ask(
        self, request: Request, *, limiter: RateLimiter | None = None, within_s: float | None = None
    ) -> Object:
        """Send a request, as `call`; return the answer's JSON object. Errors: KubeError."""
        reply = self.call(request, limiter=limiter, within_s=within_s)
        try:
            answer = json.loads(reply.body)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise KubeError(
                f"{request.doing}: what answers at {self._host()} is no API server:"
                f" {reply.body[:100]!r}",
                reply.status,
            )
        return answer

    def call(
        self, request: Request, *, limiter: RateLimiter | None = None, within_s: float | None = None
    ) -> Reply:
        """Send a request, repeatedly if that may help, and return the answer.
        within_s: time for all attempts; None: the retries' deadline_s.
        Errors: KubeError; ApiUnreachable once time or attempts are used up.
        """
        if limiter is not None and (turn_s := limiter.reserve_s()) > 0:
            self._sleep(turn_s)
        began, renewed, attempt = self.clock(), False, 0
        end = began + (within_s or self.retries.deadline_s)
        while True:
            api = self.session.api()
            timeout_s = min(self.retries.request_s, end - self.clock())
            reply, reason = self._attempt(api, request, timeout_s)
            if reply is not None and reply.status < 300:
                return reply
            status = reply.status if reply else 0
            if status == UNAUTHORIZED and not renewed:
                renewed = True
                if self.session.renew(api):
                    continue
            error = (
                error_of(status, reply.body, request.doing)
                if reply
                else self._silent(request, reason)
            )
            if not self.retries.may_retry(status):
                raise error
            requested_s = retry_after_s(reply.headers.get("Retry-After")) if reply else 0.0
            wait_s = self.pause_s(attempt, requested_s)
            attempt += 1
            if self.clock() + wait_s >= end or attempt >= self.retries.most:
                text = f"{error} (tried {attempt} times in {self.clock() - began:.0f} s)"
                raise ApiUnreachable(text, status)
            logger.info("%s; again in %.1f s", error, wait_s)
            self._sleep(wait_s)

    def stream(self, request: Request, *, idle_s: float, end: float) -> Iterator[Object | None]:
        """Yield events of one connection until `end`; yield None and stop if nothing came for
        idle_s.
        Errors: KubeError, with status 0 if the connection is lost.
        """
        api = self.session.api()
        try:
            response = self._open(api, request, self.retries.request_s, idle_s)
        except OSError as error:
            raise self._silent(request, str(error)) from None
        try:
            if response.status >= 300:
                if response.status == UNAUTHORIZED and self.session.renew(api):
                    return  # the next connection has the renewed credentials
                raise error_of(response.status, response.read(), request.doing)
            yield from events(self._pieces(response, end))
        except SILENT:
            yield None
        except (*LOST, ValueError) as error:
            raise self._silent(request, f"{type(error).__name__} {_line(error)}") from None
        finally:
            response.close()

    def pause_s(self, attempt: int, requested_s: float = 0.0) -> float:
        """Return the seconds to wait after attempt number `attempt`, from 0."""
        return self.retries.wait_s(attempt, requested_s, random.random())  # noqa: S311

    def pause(self, attempt: int) -> None:
        self._sleep(self.pause_s(attempt))

    def _attempt(self, api: Any, request: Request, timeout_s: float) -> tuple[Reply | None, str]:
        """Send one request. Result: (the answer, "") or (None, the reason why there is none)."""
        end = self.clock() + timeout_s
        try:
            response = self._open(api, request, timeout_s, timeout_s)
        except OSError as error:
            return None, str(error)
        pieces = []
        try:
            for piece in self._pieces(response, end):
                pieces.append(piece)
            if self.clock() > end:
                response.close()
                return None, f"the answer did not end within {timeout_s:g} s"
            response.release_conn()
            return Reply(response.status, response.headers, b"".join(pieces)), ""
        except LOST as error:
            response.close()
            return None, f"{type(error).__name__} {_line(error)}"

    def _open(self, api: Any, request: Request, timeout_s: float, read_s: float) -> Any:
        """Send the request and return urllib3's response, its body not read yet.
        Errors: OSError with a reason; Forbidden if TLS fails, which another attempt does not mend.
        """
        from kubernetes.client.exceptions import ApiException

        method, url, headers = authorized(api, request.method, request.path, list(request.query))
        headers |= {"Accept": JSON, "Content-Type": request.content_type}
        self.calls[request.verb] += 1
        connect_s = max(0.1, min(CONNECT_S, timeout_s))
        try:
            return api.rest_client.request(
                method,
                url,
                headers=headers,
                body=request.body,
                _request_timeout=(connect_s, max(0.1, read_s)),
            ).response
        except ApiException as error:  # an error of TLS
            raise Forbidden(
                f"{self._host()}: no trusted connection ({_line(error.reason)}); correct"
                f" certificate and address in {self.session.source}"
            ) from None
        except LOST as error:
            raise OSError(f"{type(error).__name__} {_line(error)}") from None

    def _pieces(self, response: Any, end: float) -> Iterator[bytes]:
        while self.clock() < end and (piece := response.read1(PIECE)):
            yield piece

    def _silent(self, request: Request, reason: str) -> ApiUnreachable:
        return ApiUnreachable(
            f"{request.doing}: no answer from {self._host()} ({reason}); is the cluster up, and the"
            f" address in {self.session.source} right?"
        )

    def _host(self) -> str:
        return str(self.session.api().configuration.host)


def _line(text: object) -> str:
    return " ".join(str(text).split())[:300]
