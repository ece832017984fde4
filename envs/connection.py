"""Limits for connections to a server of this project: their number, and the bytes, header lines
and time of each. Environment servers, the viewer, and the gates in front of Prefect and MLflow use
them.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

import httptools
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from envs.compat import MAX_BODY_BYTES
from envs.wire import ErrorKind, ErrorReply

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 64
# per request: its head, and the bytes that chunks and trailers add to its body
MAX_FRAME_BYTES = 2 * MAX_HEAD_BYTES
MAX_PIPELINED = 8  # requests sent before the answer to the first
ARRIVAL_S = 20.0  # for a whole request to arrive, and for the first one to begin
# above the client's own value, so that the server never drops a connection in use
KEEP_ALIVE_S = 75
SPARE_CONNECTIONS = 256  # for probes, scrapers and clients that get no session
MAX_CONNECTIONS = 512  # of a server without sessions
# open files, if the system allows so many: connections and the pipes of simulators
DESCRIPTORS = 65_536
TELL_EVERY_S = 60.0
PING_S = 20.0  # between two pings to a WebSocket client
PONG_S = 60.0  # for the client's answer; it may be busy with a model
MAX_FRAGMENTS = 64  # of one message
MAX_UNREAD_BYTES = 4 * 1024 * 1024  # sent to a client and not yet read by it
MAX_DISCARDED_BYTES = 4 * 1024 * 1024  # from a client that keeps sending after a refused message
LINGER_S = 2.0  # for such a client to read the reason


def server_config(app: FastAPI, max_sessions: int) -> uvicorn.Config:
    """Return uvicorn's settings for an environment server. Raise the process's limit of open files.

    max_sessions: each session may have two connections.
    """
    return bounded(
        app,
        SPARE_CONNECTIONS + 2 * max_sessions,
        loop="uvloop",
        ws=Socket,
        ws_max_size=MAX_BODY_BYTES,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PONG_S,
        ws_per_message_deflate=False,  # a small message could decompress to a large one
        log_config=None,
        timeout_graceful_shutdown=5,
    )


def bounded(
    app: ASGIApp, max_connections: int | None = None, *, any_body: bool = False, **settings: Any
) -> uvicorn.Config:
    """Return uvicorn's settings with this module's limits. Raise the process's limit of open files.

    max_connections: None means MAX_CONNECTIONS.
    any_body: a body may have any length and take any time, as long as bytes keep arriving.
    settings: further settings of uvicorn.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, DESCRIPTORS)), hard))
    return uvicorn.Config(
        app,
        http=Passing if any_body else Connection,
        access_log=False,
        proxy_headers=False,  # no code here uses the client's address
        log_level="error",  # uvicorn warns once per malformed request, and anyone can send these
        limit_concurrency=max_connections or MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        **settings,
    )


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP connection, closed if there are too many, or a request is too large or slow:
    uvicorn alone waits forever for the end of a request and buffers a head of any size.
    """

    told_at = float("-inf")  # time of the last warning about too many connections
    max_body_bytes = 2.0 * MAX_BODY_BYTES  # above MAX_BODY_BYTES the route has already refused

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # above its limit uvicorn refuses all requests; here only the new connection is closed
        self._max_connections, self.limit_concurrency = self.limit_concurrency, None
        self._in_head = self._arriving = True
        # of the arriving request: bytes outside its body, bytes of its body
        self._num_bytes = self._num_body_bytes = 0
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(ARRIVAL_S, self._too_slow)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            if self.loop.time() - Connection.told_at > TELL_EVERY_S:
                Connection.told_at = self.loop.time()
                logger.warning(
                    "more than %d connections: new ones are closed", self._max_connections
                )
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._arriving = True
        self._num_bytes += len(data)
        super().data_received(data)
        if self._refused or not self._arriving:
            return
        limit = MAX_HEAD_BYTES if self._in_head else self._most_frame_bytes
        if self._num_bytes > limit or self._num_body_bytes > self.max_body_bytes:
            self._too_large()
        elif self._timer is None:
            self._timer = self.loop.call_later(ARRIVAL_S, self._too_slow)

    @property
    def _most_frame_bytes(self) -> int:
        return MAX_FRAME_BYTES

    def on_message_begin(self) -> None:
        self._arriving = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        # _num_bytes may include a part of the body, so the head is measured by itself
        large = self._num_bytes > MAX_HEAD_BYTES and self._head_bytes() > MAX_HEAD_BYTES
        if large or len(self.headers) > MAX_HEADERS or len(self.pipeline) >= MAX_PIPELINED:
            self._too_large()
            raise httptools.HttpParserError("refused")
        super().on_headers_complete()
        self._in_head = False

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def on_body(self, body: bytes) -> None:
        self._num_bytes -= len(body)
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._arriving = True, False
        self._num_bytes = self._num_body_bytes = 0
        self._stop_timer()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Open a WebSocket, or close a connection that uvicorn would keep forever: the upgrade
        request is no handshake, or was sent before the answer to an earlier request.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        super().handle_websocket_upgrade()
        socket = self.transport.get_protocol()
        if isinstance(socket, Socket) and not socket.handshake_initiated:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Close the connection after a malformed request; do nothing if it is being closed already.
        Status 400 is sent before only under the conditions of `_refuse`.
        """
        self._refuse(400, msg)

    def _too_large(self) -> None:
        self._refuse(
            431, f"the head of a request may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
        )

    def _too_slow(self) -> None:
        self._timer = None
        self._refuse(408, f"a request must arrive within {ARRIVAL_S:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection; do nothing if called again. If the request's head is incomplete and
        earlier requests are answered, answer first: the application answers complete requests.
        """
        if self._refused:
            return
        self._refused = True
        self._stop_timer()
        answered = self.cycle is None or self.cycle.response_complete
        if self._in_head and self._num_bytes and answered:
            body = (
                ErrorReply(kind=ErrorKind.BAD_REQUEST, message=message).model_dump_json().encode()
            )
            head = (
                b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
                % len(body)
            )
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Passing(Connection):
    """A connection to a server that takes files: a body has no limit but must keep arriving."""

    max_body_bytes = float("inf")

    def data_received(self, data: bytes) -> None:
        if not self._in_head:
            self._stop_timer()  # the next call starts a new one
        super().data_received(data)

    @property
    def _most_frame_bytes(self) -> int:
        return MAX_FRAME_BYTES + self._num_body_bytes

    def _too_slow(self) -> None:
        if self.flow.read_paused:  # the server has not yet consumed the received bytes
            self._timer = self.loop.call_later(ARRIVAL_S, self._too_slow)
        else:
            super()._too_slow()


class Socket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket connection, closed beyond some limits: uvicorn alone stores all
    fragments, all messages received at once, and all pongs that the client does not read.
    """

    num_discarded = 0  # bytes

    def data_received(self, data: bytes) -> None:
        if self.conn.parser_exc is not None:
            self.num_discarded += len(data)
            if self.num_discarded > MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        super().data_received(data)
        if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.transport.abort()

    def handle_parser_exception(self) -> None:
        """Send the reason and keep reading for LINGER_S. uvicorn would close at once: with unread
        bytes the system then resets the connection, and the client may never get the reason.
        """
        close = self.conn.close_sent
        assert close is not None
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": close.code, "reason": close.reason}
        )
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.write_eof()
        self.close_sent = True
        self.close_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        else:
            self._abort()

    def send_receive_event_to_app(self) -> None:
        if self.queue.qsize() >= MAX_PIPELINED:
            self._abort()
        elif self.curr_msg_data_type == "text" and not _is_utf8(b"".join(self.frames)):
            self.frames = []  # uvicorn would log a traceback
            self.conn.fail(CloseCode.INVALID_DATA, "a text message must be UTF-8")
            self.handle_parser_exception()
        else:
            super().send_receive_event_to_app()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.close_sent:  # also set by a refusal, which uvicorn would log as a missing handshake
            self.handshake_complete = True

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()  # close() would wait for the client to read the buffered bytes

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self.loop.call_later(ARRIVAL_S, self.transport.abort)

    def _abort(self) -> None:
        self.frames = []
        self.transport.abort()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
