"""A retriever over HTTP: the client of the Search-R1 retrieval API, which `retrieval_server.py` and
many other servers offer.

`POST {"queries": [..], "topk": k, "return_scores": true}` -> `{"result": [[{"document":
{"contents": ".."}, "score": ..}, ..], ..]}`, one list per query.
`contents` is the title in quotes, a line break and the text.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from envs.searchqa.retrievers import Document, RetrieverError

logger = logging.getLogger(__name__)

WINDOW_S = 0.002  # the first query of a batch waits so long for others
MAX_BATCH = 256  # queries of one request
ATTEMPTS = 3  # of one batch, within the deadline
BACKOFF_S = 0.1  # before the second attempt; doubles
REFUSALS = (400, 413, 422)  # statuses with which a server may refuse a query
CONTROL = "river"  # a query that every server can answer
MAX_REPLY_BYTES = 64 * 1024 * 1024


class _Contents(BaseModel):
    contents: str


class _Hit(BaseModel):
    document: _Contents


class _Reply(BaseModel):
    result: list[list[_Hit]]


class _Refused(RetrieverError):
    """The server refused at least one of the queries sent."""


class _Again(Exception):
    """A failed attempt; the same request may be sent again."""


@dataclass(slots=True, eq=False)
class _Asked:
    query: str
    topk: int
    answer: list[Document] | None = None
    error: str = "the request was given up"
    done: bool = False


class SearchR1:
    """The client of one retrieval server, shared by all threads.

    Queries are batched: one request runs at a time, and the thread that sends the next one includes
    all waiting queries.
    """

    def __init__(self, url: str, timeout_s: float = 20.0) -> None:
        """Check the URL; nothing is sent before the first search.
        timeout_s: of a request, including retries; a query may wait as long again for its turn.
        Errors: ValueError for an invalid URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"retriever: {url!r} is no URL such as http://127.0.0.1:8000/retrieve")
        self.url = url
        self._timeout_s = timeout_s
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._path = (parts.path or "/retrieve") + (f"?{parts.query}" if parts.query else "")
        self._waiting: deque[_Asked] = deque()
        self._turn = threading.Lock()

    def search(self, query: str, topk: int) -> list[Document]:
        """Return at most `topk` documents, best first; none if the server refuses this query.
        Errors: RetrieverError naming the URL.
        """
        deadline = time.monotonic() + self._timeout_s
        request = _Asked(query, topk)
        self._waiting.append(request)
        while not request.done:
            if not self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
                with contextlib.suppress(ValueError):  # it may be in the batch being sent
                    self._waiting.remove(request)
                raise RetrieverError(
                    f"retriever {self.url}: no turn within {self._timeout_s:g} s, it is too slow"
                    " for its load"
                )
            try:
                if not request.done:
                    self._serve_waiting()
            finally:
                self._turn.release()
        if request.answer is None:
            raise RetrieverError(request.error)
        return request.answer

    def _serve_waiting(self) -> None:
        """Send up to MAX_BATCH waiting queries, normally the caller's too, and store the documents
        or the error in each of them. The caller must hold `_turn`.
        """
        time.sleep(WINDOW_S)
        batch: list[_Asked] = []
        # popleft until IndexError: a query that timed out may be removed at any moment
        with contextlib.suppress(IndexError):
            while len(batch) < MAX_BATCH:
                batch.append(self._waiting.popleft())
        try:
            topk = max(request.topk for request in batch)
            results = self._ask([request.query for request in batch], topk)
            for request, documents in zip(batch, results, strict=True):
                request.answer = documents[: request.topk]
        except RetrieverError as error:
            for request in batch:
                request.error = str(error)
            if isinstance(error, _Refused):
                self._serve_alone(batch)
        finally:
            for request in batch:
                request.done = True

    def _serve_alone(self, batch: Sequence[_Asked]) -> None:
        """Send the queries one by one, so that a refused query does not fail the others.
        A refused query gets no documents, provided that the server answers a control query.
        """
        try:
            self._ask([CONTROL], 1)
            for request in batch:
                try:
                    request.answer = self._ask([request.query], request.topk)[0]
                except _Refused as error:
                    logger.warning("%s; its query finds nothing: %.200r", error, request.query)
                    request.answer = []
        except RetrieverError as error:  # the rest of the batch keeps its previous error
            logger.warning("after a refused query: %s", error)

    def _ask(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        deadline = time.monotonic() + self._timeout_s
        body = json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()
        for attempt in range(1, ATTEMPTS + 1):
            left_s = deadline - time.monotonic()
            try:
                return self._read(self._post(body, left_s / (ATTEMPTS - attempt + 1)), len(queries))
            except _Again as error:
                pause_s = BACKOFF_S * 2 ** (attempt - 1)
                if attempt == ATTEMPTS or time.monotonic() + pause_s >= deadline:
                    problem = f"{error} ({attempt} attempts)"
                    raise RetrieverError(f"retriever {self.url}: {problem}") from error
                logger.warning("retriever %s: %s; trying again in %.1f s", self.url, error, pause_s)
                time.sleep(pause_s)
        raise AssertionError("unreachable")

    def _post(self, body: bytes, timeout_s: float) -> bytes:
        """Return the body of a reply with status 200. Errors: _Again, RetrieverError.
        A timer closes the connection after timeout_s, even if bytes still arrive slowly.
        """
        if timeout_s <= 0:
            raise _Again("no time left")
        late = threading.Event()
        make = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = make(self._host, self._port, timeout=timeout_s)
        timer = threading.Timer(timeout_s, lambda: _cut(connected, late))
        timer.daemon = True
        try:
            connection.connect()
            connected = connection.sock  # kept, because the connection drops it at the reply
            timer.start()
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request("POST", self._path, body, headers)
            reply = connection.getresponse()
            content = reply.read(MAX_REPLY_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise _Again(f"no answer within {timeout_s:.3g} s") from error
            raise _Again(f"{type(error).__name__} {error}".strip()) from error
        finally:
            timer.cancel()
            connection.close()
        if late.is_set():
            raise _Again(f"no answer within {timeout_s:.3g} s")
        if reply.status >= 500 or reply.status == 429:
            raise _Again(f"status {reply.status}")
        if reply.status != 200:
            kind = _Refused if reply.status in REFUSALS else RetrieverError
            text = content[:200].decode(errors="replace")
            raise kind(f"retriever {self.url}: status {reply.status}: {text}")
        if len(content) > MAX_REPLY_BYTES:
            problem = f"the reply is longer than {MAX_REPLY_BYTES} bytes"
            raise RetrieverError(f"retriever {self.url}: {problem}")
        if reply.length:  # read(n) raises no error if the body ends early
            raise _Again(f"the connection was cut {reply.length} bytes before the end")
        return content

    def _read(self, content: bytes, num_queries: int) -> list[list[Document]]:
        try:
            result = _Reply.model_validate_json(content).result
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            location = ".".join(str(part) for part in problem["loc"]) or "body"
            raise RetrieverError(
                f"retriever {self.url}: not a reply of the Search-R1 API: {location}:"
                f" {problem['msg']}"
            ) from None
        if len(result) != num_queries:
            lists = f"{len(result)} lists of documents for {num_queries} queries"
            raise RetrieverError(f"retriever {self.url}: {lists}")
        return [[_document(hit.document.contents) for hit in hits] for hits in result]


def _cut(connected: socket.socket, late: threading.Event) -> None:
    late.set()
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _document(contents: str) -> Document:
    """Return the document: its first line, without quotes, is the title."""
    title, _, text = contents.partition("\n")
    title = title.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return Document(title, text.strip())
