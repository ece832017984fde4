"""One Java process that runs several games, each with its own pair of pipes; `java/Slots.java` is
the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from io import FileIO
from pathlib import Path

logger = logging.getLogger(__name__)

WRAPPER = Path(__file__).with_name("slots.jar")
INSTALL_JAVA = "apt-get install default-jre-headless"
EXIT_TIMEOUT_S = 5.0
READ_BYTES = 65536  # capacity of a pipe
_REQUEST = struct.Struct(">ci")  # operation, number of texts
# number of bytes after this field, failed, CPU nanoseconds of the engine, number of texts
_REPLY = struct.Struct(">i?qi")
_INT = struct.Struct(">i")


class JvmLost(RuntimeError):
    """The process is gone, and all its games with it."""


class GameFailed(RuntimeError):
    """The engine raised an exception; do not use this game again. Other games are not affected."""


def find_java() -> str:
    """Return the path of `java`, from JAVA_HOME if that is set, else from PATH.
    Errors: ValueError with the command that installs Java.
    """
    home = os.environ.get("JAVA_HOME", "")
    java = shutil.which("java", path=os.path.join(home, "bin")) if home else shutil.which("java")
    if java is None:
        raise ValueError(
            f"sciworld needs a Java runtime and found no `java` in {home or 'PATH'}; install one:"
            f" {INSTALL_JAVA}"
        )
    return java


def find_engine() -> Path:
    """Return the path of the engine's archive in the package scienceworld, without importing it.
    Errors: ValueError if the package is not installed.
    """
    spec = find_spec("scienceworld")
    if spec is None or spec.origin is None:
        raise ValueError(
            "sciworld needs the package scienceworld; install it from the checkout:"
            " pip install -e '.[sciworld]'"
        )
    return Path(spec.origin).with_name("scienceworld.jar")


def java_options(heap_mib: int) -> list[str]:
    """Return options for a reproducible and small process that exits when memory runs out.
    Reproducible: all identity hashes are equal, because the engine iterates over hash sets.
    """
    return [
        "-XX:+UnlockExperimentalVMOptions",
        "-XX:hashCode=2",
        "-XX:+UseSerialGC",
        f"-Xmx{heap_mib}m",
        "-XX:MaxMetaspaceSize=512m",
        "-XX:+ExitOnOutOfMemoryError",
        "-XX:-UsePerfData",
        "-Djava.awt.headless=true",
    ]


class Line:
    """The two pipes of one slot, for requests and answers.
    Calls and `close` take a lock, so no descriptor is closed during a call.
    """

    def __init__(self) -> None:
        their_requests, self._requests = _pipe()
        self._answers, their_answers = _pipe()
        self.theirs = (their_requests, their_answers)  # closed here once the process inherited them
        os.set_blocking(self._requests.fileno(), False)
        self._lock = threading.Lock()
        self.engine_s = 0.0  # CPU seconds of the slot's games so far

    def ask(self, request: bytes, timeout_s: float) -> bytes:
        """Send a request and return its answer, an encoded reply (`_REPLY`, then the texts).
        Errors: TimeoutError; EOFError, OSError or ValueError if one end is closed.
        """
        deadline, answer = time.monotonic() + timeout_s, bytearray()
        with self._lock:
            for pipe, event in self._exchange(request, answer):
                poll = select.poll()  # unlike select(), it accepts descriptors above 1023
                poll.register(pipe, event)
                if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
                    raise TimeoutError
        return bytes(answer)

    async def ask_async(self, request: bytes, timeout_s: float) -> bytes:
        """Send a request and await its answer, see `ask`."""
        answer = bytearray()
        async with asyncio.timeout(timeout_s):
            # rarely contended: only the thread of an abandoned call may have the lock
            while not self._lock.acquire(blocking=False):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            try:
                for pipe, event in self._exchange(request, answer):
                    await _ready(pipe, event)
            finally:
                self._lock.release()
        return bytes(answer)

    def _exchange(self, request: bytes, answer: bytearray) -> Iterator[tuple[FileIO, int]]:
        """Write the request, read into `answer`; yield (pipe, poll event) to wait for.
        Errors: EOFError if the process closes its end.
        """
        while request:
            request = request[self._requests.write(request) or 0 :]
            if request:
                yield self._requests, select.POLLOUT
        while len(answer) < _INT.size or len(answer) < _INT.size + _INT.unpack_from(answer)[0]:
            yield self._answers, select.POLLIN
            part = self._answers.read(READ_BYTES)
            if not part:
                raise EOFError
            answer += part

    def close(self) -> None:
        """Close the pipes, unless a call is running: that call fails because the process is gone,
        and its handler in `Jvm` calls `close` again.
        """
        if self._lock.acquire(blocking=False):
            self._requests.close()
            self._answers.close()
            self._lock.release()


def _pipe() -> tuple[FileIO, FileIO]:
    """Open a pipe and return (read end, write end)."""
    read, write = os.pipe()
    return open(read, "rb", buffering=0), open(write, "wb", buffering=0)


async def _ready(pipe: FileIO, event: int) -> None:
    loop = asyncio.get_running_loop()
    add, remove = loop.add_writer, loop.remove_writer
    if event == select.POLLIN:
        add, remove = loop.add_reader, loop.remove_reader
    ready = asyncio.Event()
    add(pipe, ready.set)
    try:
        await ready.wait()
    finally:
        remove(pipe)


def _request(operation: str, texts: Sequence[str]) -> bytes:
    parts = [_REQUEST.pack(operation.encode(), len(texts))]
    for text in texts:
        encoded = text.encode("utf-8", "replace")
        parts += [_INT.pack(len(encoded)), encoded]
    return b"".join(parts)


class Jvm:
    """One Java process with num_slots games; the constructor starts it. Thread-safe, but calls to
    one slot, 0 <= slot < num_slots, must not overlap.
    """

    def __init__(self, heap_mib: int, num_slots: int) -> None:
        engine = find_engine()
        command = [find_java(), *java_options(heap_mib), "-cp", f"{engine}{os.pathsep}{WRAPPER}"]
        command += ["Slots", str(WRAPPER), str(engine)]
        self._lines = [Line() for _ in range(num_slots)]
        pipes = [pipe for line in self._lines for pipe in line.theirs]
        descriptors = [pipe.fileno() for pipe in pipes]
        try:
            # it exits when its stdin closes, which happens even if this process is killed
            self._process = subprocess.Popen(
                [*command, *map(str, descriptors)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                # the engine reads a table in this folder, and would write one into another folder
                cwd=engine.parent,
                start_new_session=True,
                pass_fds=descriptors,
            )
        finally:
            for pipe in pipes:
                pipe.close()
        self.pid = self._process.pid
        self._gate = threading.Lock()
        self._lost = ""

    @property
    def alive(self) -> bool:
        code = self._process.poll()
        if code is not None:
            self._ended(code)
        return not self._lost

    @property
    def engine_s(self) -> float:
        """CPU seconds that the engine used for all games so far."""
        return sum(line.engine_s for line in self._lines)

    def call(
        self, operation: str, slot: int, texts: Sequence[str] = (), *, timeout_s: float
    ) -> list[str]:
        """Carry out an operation (a letter, see `java/Slots.java`) in a slot and return its texts.
        Errors: GameFailed if the engine raised; JvmLost if the process is gone.
        A timeout ends the process (JvmLost): nothing else stops a game that loops.
        """
        try:
            answer = self._lines[slot].ask(_request(operation, texts), timeout_s)
        except (EOFError, OSError, ValueError) as error:
            self._give_up(error, timeout_s)
            raise JvmLost(self._lost) from None
        return self._told(slot, answer)

    async def call_async(
        self, operation: str, slot: int, texts: Sequence[str] = (), *, timeout_s: float
    ) -> list[str]:
        """Carry out an operation, see `call`.
        Cancelling ends the process too: the next call would read this call's answer.
        """
        try:
            answer = await self._lines[slot].ask_async(_request(operation, texts), timeout_s)
        except (EOFError, OSError, ValueError) as error:
            await asyncio.to_thread(self._give_up, error, timeout_s)
            raise JvmLost(self._lost) from None
        except asyncio.CancelledError:
            self._lose("a call to it was cancelled")
            self._process.kill()
            raise
        return self._told(slot, answer)

    def _told(self, slot: int, answer: bytes) -> list[str]:
        _, failed, nanoseconds, count = _REPLY.unpack_from(answer)
        self._lines[slot].engine_s += nanoseconds / 1e9
        texts, at = [], _REPLY.size
        for _ in range(count):
            (length,) = _INT.unpack_from(answer, at)
            at += _INT.size + length
            texts.append(answer[at - length : at].decode())
        if failed:
            raise GameFailed(texts[0])
        return texts

    def _give_up(self, error: Exception, timeout_s: float) -> None:
        if isinstance(error, TimeoutError):
            self.close(f"a game gave no answer within {timeout_s:g} s")
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._ended(self._process.wait(EXIT_TIMEOUT_S))
        self.close("the Java process no longer answers")

    def rss_mib(self) -> float:
        """Return the process's resident memory in MiB; 0 if it is gone."""
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8").splitlines()
            return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) / 1024
        return 0.0

    def close(self, reason: str = "closed") -> None:
        """End the process. May be called again, from any thread. reason: text of later errors."""
        self._lose(reason)
        self._process.kill()
        self._process.wait(EXIT_TIMEOUT_S)
        for line in self._lines:
            line.close()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _lose(self, reason: str) -> bool:
        """Mark the process as lost; the first `reason` is kept. Return True the first time."""
        with self._gate:
            first = not self._lost
            self._lost = self._lost or reason
        return first

    def _ended(self, code: int) -> None:
        if self._lose(f"the Java process ended with code {code}"):
            message = "the Java process %d ended by itself with code %s; its games are lost"
            logger.error(message, self.pid, code)
