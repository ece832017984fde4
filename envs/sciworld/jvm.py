"""One Java process with several games in it, spoken to over its standard input and output; `java/Slots.java` is the other side."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import struct
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger(__name__)

WRAPPER = Path(__file__).with_name("slots.jar")
INSTALL_JAVA = "apt-get install default-jre-headless"
EXIT_TIMEOUT_S = 5.0
_REQUEST = struct.Struct(">icii")  # call, operation, slot, number of texts
_REPLY = struct.Struct(">i?qi")  # call, failed, CPU nanoseconds of the engine, number of texts
_INT = struct.Struct(">i")


class JvmLost(RuntimeError):
    """The process is gone, and every game in it."""


class GameFailed(RuntimeError):
    """The engine raised; the game must not be used again. The process and its other games go on."""


@dataclass(frozen=True, slots=True)
class Answer:
    texts: tuple[str, ...]
    engine_s: float  # CPU seconds the engine took


def find_java() -> str:
    """Path of `java`: of JAVA_HOME, else of PATH. Errors: ValueError with the command that installs one."""
    home = os.environ.get("JAVA_HOME", "")
    java = shutil.which("java", path=os.path.join(home, "bin")) if home else shutil.which("java")
    if java is None:
        raise ValueError(f"sciworld needs a Java runtime and found no `java` in {home or 'PATH'}; install one: {INSTALL_JAVA}")
    return java


def find_engine() -> Path:
    """The engine's archive in the package scienceworld, which is not imported. Errors: ValueError."""
    spec = find_spec("scienceworld")
    if spec is None or spec.origin is None:
        raise ValueError("sciworld needs the package scienceworld; install it: pip install 'agentgym-flow[sciworld]'")
    return Path(spec.origin).with_name("scienceworld.jar")


def java_options(heap_mib: int) -> list[str]:
    """Repeatable (equal identity hashes: the engine walks through hash sets of objects), small, and gone when memory runs out."""
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


class Jvm:
    """Thread-safe. Calls to one slot must not overlap."""

    def __init__(self, heap_mib: int) -> None:
        engine = find_engine()
        command = [find_java(), *java_options(heap_mib), "-cp", f"{engine}{os.pathsep}{WRAPPER}", "Slots", str(WRAPPER), str(engine)]
        # its standard input closes when this process ends, however it ends; it then halts
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=engine.parent,  # the engine reads a table that lies there, and would write it where it is missing
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.engine_s = 0.0  # CPU seconds of all games so far
        self._calls = itertools.count(1)
        self._waiting: dict[int, Future[Answer]] = {}
        self._gate = threading.Lock()
        self._lost = ""
        self._reader = threading.Thread(target=self._read, name=f"jvm-{self.pid}", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return not self._lost

    def call(self, operation: str, slot: int, texts: Sequence[str] = (), *, timeout_s: float) -> Answer:
        """Errors: GameFailed; JvmLost. No answer in time ends the process: nothing else stops a game that loops."""
        number = next(self._calls)
        payload = [_REQUEST.pack(number, operation.encode(), slot, len(texts))]
        for text in texts:
            encoded = text.encode("utf-8", "replace")
            payload += [_INT.pack(len(encoded)), encoded]
        frame = b"".join(payload)
        answer: Future[Answer] = Future()
        with self._gate:
            if self._lost:
                raise JvmLost(self._lost)
            self._waiting[number] = answer
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # the reader finds out and says so
                self._process.stdin.write(_INT.pack(len(frame)) + frame)
                self._process.stdin.flush()
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            self.close(f"a game gave no answer within {timeout_s:g} s")
            raise JvmLost(self._lost) from None

    def rss_mib(self) -> float:
        """Resident memory; 0 where the process is gone."""
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) / 1024
        return 0.0

    def close(self, reason: str = "closed") -> None:
        """End the process. May be called more than once, from any thread."""
        self._lose(reason)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait(EXIT_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and threading.current_thread() is not self._reader:
                self._reader.join(EXIT_TIMEOUT_S)
                with contextlib.suppress(OSError):
                    pipe.close()

    def _lose(self, reason: str) -> None:
        with self._gate:
            self._lost = self._lost or reason
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(JvmLost(reason))

    def _read(self) -> None:
        assert self._process.stdout is not None
        read = self._process.stdout.read
        with contextlib.suppress(OSError, ValueError, struct.error):
            while True:
                (length,) = _INT.unpack(read(_INT.size))
                self._deliver(read(length))
        code = self._process.wait()
        if self.alive:
            logger.error("the Java process %d ended by itself with code %s; its games are lost", self.pid, code)
        self._lose(f"the Java process ended with code {code}")

    def _deliver(self, frame: bytes) -> None:
        number, failed, nanoseconds, count = _REPLY.unpack_from(frame)
        texts, at = [], _REPLY.size
        for _ in range(count):
            (length,) = _INT.unpack_from(frame, at)
            at += _INT.size + length
            texts.append(frame[at - length : at].decode())
        with self._gate:
            answer = self._waiting.pop(number, None)
            self.engine_s += nanoseconds / 1e9
        if answer is None:
            return
        if failed:
            answer.set_exception(GameFailed(texts[0]))
        else:
            answer.set_result(Answer(tuple(texts), nanoseconds / 1e9))
