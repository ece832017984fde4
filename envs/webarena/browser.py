"""One Chromium for all sessions of a server, with an event loop in a thread of its own.

It is launched at first use and again after it died, replaced when it is old and idle, and removed
with all its files when the server ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from playwright._impl import _driver, transport
from playwright.async_api import Browser, BrowserContext, Error, Playwright, async_playwright

from envs.webarena.chromium import SANDBOX_VARIABLE, environment, use_sandbox

logger = logging.getLogger(__name__)
T = TypeVar("T")

RECYCLE_AFTER = 1000  # contexts; an idle browser that opened so many is replaced
LAUNCH_S = 30.0
CLOSE_S = 10.0
TURN_S = 1.0  # a step longer than this lets another one begin
PREFIX = "webarena-"  # a launch's folder name begins with it
MAX_TMPDIR = 45  # characters; the path of Chromium's sockets has at most 107

_playwrights_environment = _driver.get_driver_env
_given: ContextVar[dict[str, str] | None] = ContextVar("environment of the driver", default=None)


def _drivers_environment() -> dict[str, str]:
    """Return the environment of the driver: during a launch the variables of this launch and a few
    that Playwright needs, else Playwright's default.

    Playwright passes its driver all variables of this process and has no option against it.
    """
    default, variables = _playwrights_environment(), _given.get()
    if variables is None:
        return default
    needed = {name for name in default if name.startswith(("PW_LANG_", "PW_CLI_"))}
    return {**variables, **{name: default[name] for name in needed}}


# `transport` imported the function by name, so replace it there
transport.get_driver_env = _drivers_environment  # type: ignore[attr-defined]


class BrowserLost(RuntimeError):
    """The session's browser is lost: it cannot be started, it or a page died or does not answer in
    time, a page cannot be read or keeps leaving the sites, or a start page or a page of the
    evaluation cannot be opened.
    """


@dataclass(slots=True, eq=False)
class Running:
    """One launch: driver, browser, their folder for temporary files, and the keeper process that
    removes the folder.
    """

    playwright: Playwright
    browser: Browser
    folder: str
    keeper: subprocess.Popen[bytes]
    opened: int = 0  # contexts so far
    open: int = 0  # contexts now
    lost: bool = False  # the driver died; the browser object does not notice this

    @property
    def alive(self) -> bool:
        return self.browser.is_connected() and not self.lost


class Chromium:
    """A browser and its event loop, in a thread; both start when first needed.
    `run` (from any thread) and `run_async` (from any loop) run a coroutine on the browser's loop;
    the other coroutines here must run on it. concurrency: number of slots of `turn`.
    """

    def __init__(self, executable: str, switches: Sequence[str], concurrency: int) -> None:
        self._executable = executable
        self._switches = list(switches)
        self._concurrency = concurrency
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._running: Running | None = None

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine and return its result. Errors: its own; TimeoutError after timeout_s."""
        future = asyncio.run_coroutine_threadsafe(
            asyncio.wait_for(work, timeout_s), self._started()
        )
        try:
            return future.result(timeout_s + CLOSE_S)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(f"the browser gave no answer within {timeout_s:g} s") from None

    async def run_async(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine and await its result in the caller's loop. Errors: those of `run`."""
        future = asyncio.run_coroutine_threadsafe(
            asyncio.wait_for(work, timeout_s), self._started()
        )
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s + CLOSE_S)
        except TimeoutError:
            raise TimeoutError(f"the browser gave no answer within {timeout_s:g} s") from None

    def stop(self) -> None:
        """End browser, driver and loop, if they run; wait up to 30 s until their files are gone.
        A browser that fails to end is ignored. A later `run` starts a new loop and browser.
        """
        with self._starting:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        with contextlib.suppress(Exception):  # the keeper ends what does not end by itself
            asyncio.run_coroutine_threadsafe(self._retire(), loop).result(2 * CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_S)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Take one of the `concurrency` slots for the expensive part of a step.

        The slot is released after TURN_S at the latest: a page that does not answer uses no CPU.
        """
        await self._slots.acquire()
        holds = True

        def give_back() -> None:
            nonlocal holds
            if holds:
                holds = False
                self._slots.release()

        late = asyncio.get_running_loop().call_later(TURN_S, give_back)
        try:
            yield
        finally:
            late.cancel()
            give_back()

    async def context(self, **settings: Any) -> tuple[Running, BrowserContext]:
        """Open a context in a living browser; return (launch, context). Close it with `release`.
        settings: arguments of Playwright's `new_context`.
        Errors: BrowserLost if no browser can be launched or it opens no context.
        """
        for attempt in (1, 2):
            running = await self._current()
            running.opened += 1
            running.open += 1
            try:
                return running, await running.browser.new_context(**settings)
            except Error as error:
                running.open -= 1
                running.lost = running.lost or is_closed(error)
                if attempt == 2 or running.alive:
                    raise BrowserLost(f"no context: {error.message.splitlines()[0]}") from error
        raise AssertionError("unreachable")

    async def release(self, running: Running, context: BrowserContext) -> None:
        running.open -= 1
        with contextlib.suppress(Error, TimeoutError):
            await asyncio.wait_for(context.close(), CLOSE_S)

    async def pid(self) -> int:
        """Return the browser's process id, for tests and measurements; launch one if none runs."""
        return await _pid((await self._current()).browser)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._slots = asyncio.Semaphore(self._concurrency)
                self._launching = asyncio.Lock()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="browser", daemon=True
                )
                self._thread.start()
            return self._loop

    async def _current(self) -> Running:
        async with self._launching:
            running = self._running
            if running is not None and (
                not running.alive or (running.opened >= RECYCLE_AFTER and running.open == 0)
            ):
                why = "" if running.alive else ": it died"
                logger.warning("the browser is replaced after %d sessions%s", running.opened, why)
                await self._retire()
            if self._running is None:
                self._running = await self._launch()
            return self._running

    async def _launch(self) -> Running:
        if len(tempfile.gettempdir()) > MAX_TMPDIR:
            raise BrowserLost(
                f"TMPDIR {tempfile.gettempdir()!r} is too long for Chromium's sockets; at most"
                f" {MAX_TMPDIR} characters"
            )
        sandbox = use_sandbox()
        if not sandbox:
            logger.warning(
                "Chromium runs without its sandbox, as root or by %s=off; better start the server"
                " as another user",
                SANDBOX_VARIABLE,
            )
        folder = tempfile.mkdtemp(prefix=PREFIX)
        variables = environment(folder)
        keeper = subprocess.Popen(  # noqa: ASYNC220  (forks within a millisecond)
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=variables,
        )
        playwright: Playwright | None = None
        try:
            async with asyncio.timeout(LAUNCH_S):
                _given.set(variables)
                playwright = await async_playwright().start()
                browser = await playwright.chromium.launch(
                    executable_path=self._executable,
                    args=self._switches,
                    # Playwright's default lets one click open many windows, unlike real browsers
                    ignore_default_args=["--disable-popup-blocking"],
                    timeout=LAUNCH_S * 1000,
                    env={**variables},
                    chromium_sandbox=sandbox,
                )
                assert keeper.stdin is not None
                keeper.stdin.write(b"%d\n" % await _pid(browser))
                keeper.stdin.flush()
            return Running(playwright, browser, folder, keeper)
        except (Error, OSError, TimeoutError) as error:
            if playwright is not None:
                with contextlib.suppress(Exception):
                    await playwright.stop()
            await _ended(keeper)
            reason = str(error).strip().splitlines() or [type(error).__name__]
            # the second text comes if this user cannot use Debian's chromium-sandbox
            refusals = ("No usable sandbox", "SUID sandbox helper binary")
            if sandbox and any(words in str(error) for words in refusals):
                reason = [
                    "its sandbox needs user namespaces, which this machine or container does not"
                    " allow; allow them, or, if something else isolates this server, set"
                    f" {SANDBOX_VARIABLE}=off"
                ]
            raise BrowserLost(
                f"Chromium ({self._executable}) does not start: {reason[0]}"
            ) from error

    async def _retire(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        for ending in (running.browser.close, running.playwright.stop):
            with contextlib.suppress(Exception):  # it may be dead already
                await asyncio.wait_for(ending(), CLOSE_S)
        await _ended(running.keeper)


async def _pid(browser: Browser) -> int:
    session = await browser.new_browser_cdp_session()
    processes = (await session.send("SystemInfo.getProcessInfo"))["processInfo"]
    await session.detach()
    return next(int(process["id"]) for process in processes if process["type"] == "browser")


def is_closed(error: Error) -> bool:
    """Return True for the error of a closed page, context, browser or driver.
    Playwright does not export its class, so the name decides.
    """
    return type(error).__name__ == "TargetClosedError"


async def _ended(keeper: subprocess.Popen[bytes]) -> None:
    assert keeper.stdin is not None
    keeper.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(keeper.wait, 2 * CLOSE_S)
