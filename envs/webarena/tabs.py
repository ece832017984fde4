"""The tabs of one session: allowed addresses, waiting for a page to settle, limits of its pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from playwright.async_api import (
    BrowserContext,
    CDPSession,
    Dialog,
    Download,
    Error,
    Frame,
    Page,
    Request,
)

from envs.webarena.browser import BrowserLost, Chromium, Running, is_closed

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_DIALOGS = 20  # per step; a tab that opens more is closed
PAGE_S = 15.0  # for a page to answer one question
# seconds to wait until keys or a click are confirmed: at first, and while the page still answers
TAKEN_S, INPUT_S = 0.3, 15.0
QUESTIONS = 100  # limit of these questions; ten keys are about twenty messages
BLANK = "about:blank"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(?!\d)")
_ODD = re.compile(r"[\x00-\x20\x7f\\]")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one session."""

    width: int = 1280
    height: int = 720
    tabs: int = 8
    quiet_s: float = 0.1  # a page has settled when it had no request in flight for so long
    settle_s: float = 2.0  # longest wait for a page to settle
    goto_s: float = 30.0


class NoAnswer(BrowserLost):
    """The page did not answer in time."""


class Refusal(ValueError):
    """An action that is not executed; the text, which the policy sees, gives the reason."""


class Allowed:
    """Addresses that pages may have: about:blank, and http(s) URLs of the sites' host:port."""

    def __init__(self, origins: Sequence[str]) -> None:
        """Take the URLs of the sites. Errors: ValueError if one is no http(s) URL."""
        self._origins = {self._origin(url) for url in origins}
        if None in self._origins:
            given = ", ".join(map(repr, origins))
            raise ValueError(f"sites: expected http:// or https:// addresses, got {given}")

    def check(self, url: str) -> str:
        """Return the URL, with http:// if it has no scheme. Errors: Refusal if not allowed."""
        text = url.strip()
        if not _SCHEME.match(text):
            text = f"http://{text}"
        if text.lower() == BLANK:
            return BLANK
        if _ODD.search(text) or not self.admits(text):
            raise Refusal(f"{url.strip()[:200]!r} is not among the sites that can be visited")
        return text

    def admits(self, url: str) -> bool:
        return url in (BLANK, "") or self._origin(url) in self._origins

    @staticmethod
    def _origin(url: str) -> tuple[str, int] | None:
        try:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
                return None
            return parts.hostname.lower(), parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            return None


class Tab:
    """One page, its CDP session and its requests in flight; it dismisses the page's dialogs."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.document = 0  # counts the documents of the main frame
        self.dialogs = 0  # of this step
        self.downloads = 0  # of this step
        self.crashed = False
        self._cdp: CDPSession | None = None
        self._in_flight: dict[Request, None] = {}
        self._changed = asyncio.Event()
        self._last = 0.0  # when a request began or ended
        page.on("request", self._began)
        page.on("requestfinished", self._ended)
        page.on("requestfailed", self._ended)
        page.on("framenavigated", self._navigated)
        page.on("crash", self._crash)
        page.on("dialog", self._dialog)
        page.on("download", self._download)

    async def cdp(self) -> CDPSession:
        if self._cdp is None:
            self._cdp = await self.page.context.new_cdp_session(self.page)
            self._cdp.on("Page.frameNavigated", self._committed)
            await self._cdp.send("Page.enable")
        return self._cdp

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a CDP command and return its result. Errors: playwright's Error.

        It uses the session's inner object: the outer one looks for handles in every value of the
        result, which costs more than the rest of a step.
        """
        session: Any = await self.cdp()
        result: dict[str, Any] = await session._impl_obj.send(method, params, None)
        return result

    async def settle(self, limits: Limits) -> None:
        """Wait until no request has been in flight for quiet_s and the document is loaded; at most
        settle_s.
        """
        clock = asyncio.get_running_loop().time
        began = self._last = clock()
        while (left := began + limits.settle_s - clock()) > 0:
            quiet_for = clock() - self._last
            is_quiet = not self._in_flight and quiet_for >= limits.quiet_s
            if is_quiet or self.page.is_closed() or self.crashed:
                break
            self._changed.clear()
            wait_s = left if self._in_flight else min(left, limits.quiet_s - quiet_for)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
        left = max(0.05, began + limits.settle_s - clock())
        with contextlib.suppress(Error):  # a page that never finishes loading is read as it is
            await self.page.wait_for_load_state("load", timeout=1000 * left)

    def _touch(self) -> None:
        self._last = asyncio.get_running_loop().time()
        self._changed.set()

    def _began(self, request: Request) -> None:
        if request.url.startswith("http"):
            self._in_flight[request] = None
            self._touch()

    def _ended(self, request: Request) -> None:
        if self._in_flight.pop(request, request) is None:
            self._touch()

    def _navigated(self, frame: Frame) -> None:
        """If the main frame navigated, forget its old requests: their end may go unreported."""
        if frame.parent_frame is not None:
            return
        waiting = list(self._in_flight)
        opened = [
            i
            for i, request in enumerate(waiting)
            if request.is_navigation_request() and request.frame == frame
        ]
        for request in waiting[: opened[-1] if opened else 0]:
            self._in_flight.pop(request, None)
        self._touch()

    def _committed(self, event: dict[str, Any]) -> None:
        if "parentId" not in event["frame"]:
            self.document += 1

    def _crash(self, _: Page) -> None:
        self.crashed = True
        self._changed.set()

    async def _dialog(self, dialog: Dialog) -> None:
        self.dialogs += 1
        with contextlib.suppress(Error):
            if self.dialogs > MAX_DIALOGS:
                await self.page.close()
            else:
                await dialog.dismiss()

    def _download(self, _: Download) -> None:
        self.downloads += 1


class Tabs:
    """One session's browser context and its tabs. All methods run on the browser's loop."""

    def __init__(self, chromium: Chromium, limits: Limits, allowed: Allowed) -> None:
        self.chromium = chromium
        self.limits = limits
        self.allowed = allowed
        self.open: list[Tab] = []
        self.current: Tab
        self.notes: list[str] = []  # events of this step for the policy's next observation
        self._running: Running | None = None
        self._context: BrowserContext | None = None

    async def start(self, **settings: Any) -> None:
        """Open the browser context, without a tab. settings: see `Chromium.context`.
        Errors: BrowserLost.
        """
        self._running, self._context = await self.chromium.context(
            viewport={"width": self.limits.width, "height": self.limits.height},
            accept_downloads=False,
            service_workers="block",
            reduced_motion="reduce",
            locale="en-US",
            timezone_id="UTC",
            **settings,
        )
        self._context.set_default_timeout(1000 * PAGE_S)
        self._context.on("page", self._opened)

    async def close(self) -> None:
        if self._context is not None and self._running is not None:
            context, self._context = self._context, None
            await self.chromium.release(self._running, context)

    async def new_tab(self) -> Tab:
        """Open and return a blank tab, which becomes current.
        Errors: Refusal at the limit of tabs; those of `ask`.
        """
        assert self._context is not None
        if len(self.living()) >= self.limits.tabs:
            raise Refusal(f"at most {self.limits.tabs} tabs can be open; close one first")
        page = await self.ask(self._context.new_page())
        self.current = self._tab(page)
        return self.current

    def living(self) -> list[Tab]:
        self.open = [tab for tab in self.open if not tab.page.is_closed()]
        return self.open

    async def ask(self, question: Awaitable[T], timeout_s: float = PAGE_S) -> T:
        """Return the result of a request to the page.
        Errors: BrowserLost if the page or the browser died or does not answer; playwright's Error
        otherwise.
        """
        try:
            return await asyncio.wait_for(question, timeout_s)
        except TimeoutError:
            raise NoAnswer(f"the page does not answer within {timeout_s:g} s") from None
        except Error as error:
            self.check_alive()
            if is_closed(error) and not self.current.page.is_closed():
                raise BrowserLost("the browser died") from error
            raise

    async def input(self, sent: Awaitable[None]) -> None:
        """Send a few keys or a click, the request `sent`.

        A page that navigates away meanwhile never confirms them: that is no failure of the browser.
        Errors: those of `ask`; Refusal if the page answers but does not confirm them.
        """
        taken, clock = asyncio.ensure_future(sent), asyncio.get_running_loop().time
        try:
            await asyncio.wait((taken,), timeout=TAKEN_S)
            # a busy machine is slow: wait as long as the page answers questions in the meantime
            num_questions, until = 0, clock() + INPUT_S
            while not taken.done() and num_questions < QUESTIONS and clock() < until:
                num_questions += 1
                with contextlib.suppress(Error):  # a navigation has just replaced the page
                    await self.ask(self.current.page.evaluate("0"), INPUT_S)
            await asyncio.wait((taken,), timeout=TAKEN_S)
            if not taken.done():
                self.check_alive()
                raise Refusal("the page was changing and may not have taken it")
            await self.ask(taken)
        finally:
            taken.cancel()

    def check_alive(self) -> None:
        """Raise BrowserLost if the browser or a page has died."""
        if self._running is None or not self._running.alive:
            raise BrowserLost("the browser died")
        if any(tab.crashed for tab in self.open):
            raise BrowserLost("the page crashed")

    def astray(self) -> list[Tab]:
        """Return the tabs that show an address outside the sites. A tab may get there after
        `settle` if its navigation took longer.
        """
        return [tab for tab in self.living() if not self.allowed.admits(tab.page.url)]

    def begin_step(self) -> None:
        self.check_alive()
        self.notes = []
        for tab in self.living():
            tab.dialogs = tab.downloads = 0

    async def goto(self, url: str) -> None:
        """Open an allowed URL in the current tab; a failure becomes a note.
        Errors: Refusal, BrowserLost.
        """
        checked, limit_s = self.allowed.check(url), self.limits.goto_s
        page = self.current.page
        try:
            opened = page.goto(checked, wait_until="domcontentloaded", timeout=1000 * limit_s)
            await self.ask(opened, limit_s + 1)
        except Error as error:
            self.notes.append(f"{url.strip()[:200]} could not be opened: {reason(error)}")

    async def settle(self) -> None:
        """Wait for the current page to settle, note dialogs and downloads, bring back tabs that
        left the sites, and replace a closed current tab. Errors: BrowserLost.
        """
        await self.current.settle(self.limits)
        self.check_alive()
        for tab in list(self.open):
            if tab.dialogs:
                closed = " The tab was closed." if tab.dialogs > MAX_DIALOGS else ""
                dialogs = f"{tab.dialogs} dialog{'' if tab.dialogs == 1 else 's'}"
                self.notes.append(f"The page opened {dialogs}, dismissed.{closed}")
            if tab.downloads:
                self.notes.append("Downloads are switched off.")
        for tab in self.astray():
            await self._bring_back(tab)
        if self.current.page.is_closed():
            living = self.living()
            self.current = living[-1] if living else await self.new_tab()

    async def _bring_back(self, tab: Tab) -> None:
        """Move a tab back to an allowed page, or to a blank one; else close it. Add a note.

        It checks the address after each step, because the previous page may navigate away again.
        """
        url = tab.page.url
        left = "The address" if url.startswith("chrome-error:") else url[:100]
        self.notes.append(f"{left} cannot be visited; the tab is back where it was.")
        with contextlib.suppress(Error, TimeoutError):
            await asyncio.wait_for(tab.page.go_back(wait_until="commit", timeout=5000), 6)
            await tab.settle(self.limits)
        if not self.allowed.admits(tab.page.url):
            try:
                await asyncio.wait_for(tab.page.goto(BLANK, timeout=5000), 6)
            except (Error, TimeoutError):
                self.check_alive()
        if not self.allowed.admits(tab.page.url):
            await self.ask(tab.page.close())

    def _tab(self, page: Page) -> Tab:
        """Return the page's tab; add the tab if it is not in `open` yet."""
        for tab in self.open:
            if tab.page is page or tab.page == page:
                return tab
        self.open.append(Tab(page))
        return self.open[-1]

    async def _opened(self, page: Page) -> None:
        if len(self.living()) >= self.limits.tabs:
            self.notes.append(f"A new tab was closed: at most {self.limits.tabs} can be open.")
            with contextlib.suppress(Error):
                await page.close()
            return
        self._tab(page)


def reason(error: Error) -> str:
    """Return the error's first line, without the method's name, at most 200 characters."""
    line = (error.message.splitlines() or ["no reason given"])[0]
    return re.sub(r"^[A-Za-z]+\.[a-z_]+: ", "", line)[:200]
