"""Requests that a server refuses: the reply, its status, and the memory of closed sessions, whose
requests are refused as gone.
"""

from __future__ import annotations

import hashlib

from envs.wire import ErrorKind, ErrorReply

RETRY_AFTER_S = 1.0
REMEMBERED = 10_000  # closed sessions and their request keys that still get a 410

STATUS = {
    ErrorKind.UNAUTHORIZED: 401,
    ErrorKind.FORBIDDEN: 403,
    ErrorKind.UNKNOWN_SESSION: 404,
    ErrorKind.TURN_MISMATCH: 409,
    ErrorKind.SESSION_GONE: 410,
    ErrorKind.BAD_REQUEST: 422,
    ErrorKind.ENV_CRASHED: 500,
    ErrorKind.GRADER_FAILED: 500,
    ErrorKind.EXPERT_FAILED: 500,
    ErrorKind.FULL: 503,
    ErrorKind.DRAINING: 503,
    ErrorKind.NOT_READY: 503,
}


class Refused(Exception):
    """A request that the server refuses: `reply` is the body of its answer, `status` the code."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        status: int | None = None,
        expected_turn: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status or STATUS[kind]
        retry_after_s = RETRY_AFTER_S if self.status == 503 else None
        self.reply = ErrorReply(
            kind=kind, message=message, expected_turn=expected_turn, retry_after_s=retry_after_s
        )


def retry_header(reply: ErrorReply) -> dict[str, str]:
    wait_s = reply.retry_after_s
    return {} if wait_s is None else {"Retry-After": str(max(1, round(wait_s)))}


class Memory:
    """Set of the REMEMBERED names added last, as digests in one block: an object per name would be
    allocated between the objects of sessions and keep their memory from being freed.
    """

    _WIDTH = 16  # bytes of a digest

    def __init__(self) -> None:
        self._digests = bytearray(self._WIDTH * REMEMBERED)
        self._next = 0

    def add(self, name: str) -> None:
        self._digests[self._next : self._next + self._WIDTH] = self._digest(name)
        self._next = (self._next + self._WIDTH) % len(self._digests)

    def __contains__(self, name: str) -> bool:
        return self._digest(name) in self._digests

    def _digest(self, name: str) -> bytes:
        return hashlib.blake2b(name.encode(), digest_size=self._WIDTH).digest()
