"""One task in a browser behind the `Simulator` protocol, from its start page to the score."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from playwright.async_api import Error

from envs.env import Expert, StepResult
from envs.webarena.acting import act
from envs.webarena.actions import Action, NoAction, parse
from envs.webarena.browser import BrowserLost
from envs.webarena.evaluators import Helpers, Judge, ScriptFailed, Verdict, evaluate
from envs.webarena.gold import Gold
from envs.webarena.helpers import HelperFailed
from envs.webarena.judge import JudgeFailed
from envs.webarena.observation import Element, cut_lines, read_layout, read_page
from envs.webarena.places import Place
from envs.webarena.tabs import Limits, Refusal, Tab, Tabs, reason
from envs.webarena.tasks import Task, find_task
from envs.wire import FAMILY, INVALID, PARTS

logger = logging.getLogger(__name__)
T = TypeVar("T")
# failures of the environment, which give no verdict
NO_VERDICT = (BrowserLost, TimeoutError, Error, JudgeFailed, HelperFailed)
START_S = 100.0  # for a session's first observation
STEP_S = 90.0  # for one action
JUDGE_S = 120.0  # for the verdict
CLOSE_S = 20.0
READ_S = 45.0  # for the two trees of a page
MAX_ELEMENTS = 50_000  # a larger page is not shown
MAX_PAGE_CHARS = 4_000_000
_JUDGING = ThreadPoolExecutor(16, "judge")  # evaluators and judges block on pages and endpoints
OVER = "The episode is over."
_SIZE = (
    "() => [document.getElementsByTagName('*').length, (document.documentElement || {textContent:"
    " ''}).textContent.length]"
)


@dataclass(frozen=True)
class Setting:
    """Values that all episodes of a server share."""

    tasks: Mapping[int, Task]
    sites: Callable[[], Place]  # started by the first session
    names: tuple[tuple[str, str], ...]  # (real URL, the URL the policy sees), longest first
    limits: Limits
    max_chars: int  # of one observation
    judge: Judge
    gold: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    storage: Path | None = None  # folder of the files with cookies


class Episode:
    """One session: a task, its browser tabs, and the elements of the last observation."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._tabs: Tabs | None = None
        self._sites: Place | None = None
        self._headers: Mapping[str, str] | None = None
        self.task: Task
        self.elements: dict[int, Element] = {}  # of the last observation
        self.shown: list[Element] = []  # the same, in page order
        # (tab, document, backend id) -> printed id
        self._numbers: dict[tuple[Tab, int, int], int] = {}
        self._last_number = 0
        self.previous = "None"
        self.actions: list[str] = []  # the policy's raw replies, one for each turn
        self._gold: Gold | None = None
        self.ended = False

    def reset(self, task_id: int) -> str:
        """End the current task, begin this one and return its first observation.

        Errors: UnknownTask; BrowserLost; TimeoutError; OSError, ValueError for a bad storage file.
        """
        self.close()
        self.task = find_task(self._setting.tasks, task_id)
        self.previous, self.actions, self._gold, self.ended = "None", [], None, False
        self._numbers, self._last_number = {}, 0
        self._sites = self._setting.sites()
        self._headers = self._sites.open()
        return self._run(self._start(self._sites), START_S)

    def step(self, action: str) -> StepResult:
        """Execute the action in the policy's reply; `stop` judges the outcome and ends the task.

        A reply without a valid action gets the reason as observation; after the end, do nothing.
        Errors: BrowserLost and TimeoutError if the session is lost; JudgeFailed, HelperFailed and
        playwright's Error if there is no verdict.
        """
        read = self._read_action(action)
        if isinstance(read, StepResult):
            return read
        return self._stop(read.text) if read.kind == "stop" else self._run(self._act(read), STEP_S)

    async def step_async(self, action: str) -> StepResult:
        """Execute one action as `step`, but block a thread only while the outcome is judged."""
        read = self._read_action(action)
        if isinstance(read, StepResult):
            return read
        if read.kind == "stop":
            judging = asyncio.get_running_loop().run_in_executor(_JUDGING, self._stop, read.text)
            return await asyncio.wait_for(judging, JUDGE_S)
        assert self._sites is not None
        return await self._sites.chromium.run_async(self._act(read), STEP_S)

    def _read_action(self, action: str) -> Action | StepResult:
        """Record and parse the reply. Return its action or, for a reply without a valid one or
        after the episode's end, the step's result.
        """
        if self.ended:
            return StepResult(OVER, 0.0, terminated=True, info=self._info())
        action = utf8(action)
        self.actions.append(action)
        try:
            parsed = parse(action)
            if parsed.kind in ("click", "hover", "type") and parsed.number not in self.elements:
                raise NoAction(f"There is no element {parsed.number} in the current page.")
        except NoAction as refused:
            info = self._info(error="action")
            return StepResult(str(refused), 0.0, terminated=False, info=info)
        return parsed

    def render(self) -> tuple[str, bytes]:
        """Return the media type, and a screenshot of the current tab as PNG."""
        tabs = self._living()
        return "image/png", self._run(tabs.ask(tabs.current.page.screenshot()), STEP_S)

    def expert(self) -> Expert:
        """Return the episode's expert, the same one at each call."""
        if self._gold is None:
            self._gold = Gold(self, self._setting.gold.get(self.task.id, ()))
        return self._gold

    def hints(self) -> list[str]:
        """Return possible actions: a click on each shown element, scrolls, back, and a stop."""
        clicks = [f"click [{element}]" for element in sorted(self.elements)]
        return [*clicks, "scroll [down]", "scroll [up]", "go_back", "stop [N/A]"]

    def close(self) -> None:
        tabs, self._tabs = self._tabs, None
        sites, headers, self._headers = self._sites, self._headers, None
        try:
            if tabs is not None and sites is not None:
                sites.chromium.run(tabs.close(), CLOSE_S)
        finally:
            if sites is not None and headers is not None:
                sites.close(headers)

    @property
    def about(self) -> dict[str, Any]:
        """The task's description in AgentGym's format, part of the answer to a reset."""
        return {"sites": list(self.task.sites), "object": self.task.intent}

    def public(self, text: str) -> str:
        """Return the text with the sites' real addresses replaced by those that the policy sees."""
        for real, name in self._setting.names:
            text = text.replace(real, name)
        return text

    def real(self, url: str) -> str:
        """Return a URL with a site's shown address replaced by the real one, or unchanged."""
        address = _bare(url)
        for real, name in self._setting.names:
            bare = _bare(name)
            if address == bare or address.startswith((f"{bare}/", f"{bare}?", f"{bare}#")):
                return real + address[len(bare) :]
        return url

    def _living(self) -> Tabs:
        assert self._tabs is not None, "reset comes first"
        return self._tabs

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        assert self._sites is not None
        return self._sites.chromium.run(work, timeout_s)

    async def _start(self, sites: Place) -> str:
        assert self._headers is not None
        settings: dict[str, Any] = {}
        if self._headers:
            settings["extra_http_headers"] = dict(self._headers)
        if self._setting.storage is not None and self.task.storage_state:
            file = self._setting.storage / self.task.storage_state
            settings["storage_state"] = json.loads(await asyncio.to_thread(file.read_text))
        if self.task.geolocation:
            settings |= {"geolocation": self.task.geolocation, "permissions": ["geolocation"]}
        self._tabs = tabs = Tabs(sites.chromium, self._setting.limits, sites.allowed)
        async with sites.chromium.turn():
            await tabs.start(**settings)
            for url in self.task.start_urls:
                await tabs.new_tab()
                await tabs.goto(url)
                if tabs.notes:
                    raise BrowserLost(f"start page: {tabs.notes[0]}")
            tabs.current = tabs.open[0]
            if len(tabs.open) > 1:
                await tabs.ask(tabs.current.page.bring_to_front())
            await tabs.settle()
            return await self._observe()

    async def _act(self, action: Action) -> StepResult:
        tabs, element = self._living(), None
        if action.kind in ("click", "hover", "type"):
            element = self.elements.get(action.number)
        async with tabs.chromium.turn():
            tabs.begin_step()
            error = ""
            try:
                if element is not None and element.document != tabs.current.document:
                    raise Refusal(f"there is no element {element.id} in the current page any more")
                goes = action.kind == "goto"
                opened = Action("goto", text=self.real(action.text)) if goes else action
                await act(tabs, opened, element)
            except Refusal as refused:
                error = "refused"
                tabs.notes.append(f"{str(refused)[:1].upper()}{str(refused)[1:]}.")
            await tabs.settle()
            where = "" if element is None else f" where [{element.id}] is {element}"
            self.previous = f"{action}{where}"
            info = self._info(error=error)
            return StepResult(await self._observe(), 0.0, terminated=False, info=info)

    def _info(self, error: str = "") -> dict[str, Any]:
        """Return a step's `info`: the sites and, if no action was executed, the kind of `error`."""
        family = {FAMILY: "+".join(self.task.sites)}
        return family | ({INVALID: True, "error": error} if error else {})

    async def _observe(self) -> str:
        """Return the observation in WebArena's format.

        A page that changes while it is read, or that left the sites, is read again.
        Errors: BrowserLost after three attempts.
        """
        tabs = self._living()
        lines: list[str] = []
        for attempt in (1, 2, 3):
            trouble = "the page keeps leaving the sites"
            try:
                lines = await self._read(tabs)
                if not tabs.astray():
                    break
            except Error as error:  # a navigation took the page away
                tabs.check_alive()
                trouble = f"the page cannot be read: {reason(error)}"
            if attempt == 3:
                raise BrowserLost(trouble)
            await tabs.settle()
        titles = []
        for index, tab in enumerate(tabs.living()):
            title = " ".join((await self._title(tabs, tab)).split())[:200]
            titles.append(f"Tab {index}{' (current)' if tab is tabs.current else ''}: {title}")
        text = cut_lines([" | ".join(titles), "", *lines], self._setting.max_chars)
        notes = "".join(f"{note}\n" for note in dict.fromkeys(tabs.notes))
        url = self.public(tabs.current.page.url)
        return utf8(
            f"{notes}OBSERVATION:\n{text}\nURL: {url}\nOBJECTIVE: {self.task.intent}\nPREVIOUS"
            f" ACTION: {self.previous}"
        )

    async def _title(self, tabs: Tabs, tab: Tab) -> str:
        try:
            return await tabs.ask(tab.page.title(), 5.0)
        except (Error, BrowserLost):
            tabs.check_alive()
            return "(no answer)"

    async def _read(self, tabs: Tabs) -> list[str]:
        """Return the page's lines, or one line if it is too large; set `elements` and `shown`.
        Errors: playwright's Error; BrowserLost.
        """
        tab = tabs.current
        elements, characters = await tabs.ask(tab.page.evaluate(_SIZE))
        if elements > MAX_ELEMENTS or characters > MAX_PAGE_CHARS:
            self.elements, self.shown = {}, []
            size = f"{elements} elements, {characters} characters of text"
            return [f"This page is too large to be shown: {size}."]
        document = tab.document
        both = asyncio.gather(
            tab.send("Accessibility.getFullAXTree"),
            tab.send("DOMSnapshot.captureSnapshot", computedStyles=[]),
        )
        tree, snapshot = await tabs.ask(both, READ_S)
        layout = read_layout(snapshot, tabs.limits.width, tabs.limits.height)
        trees = {"": tree["nodes"]}
        for frame in layout.frames.values():
            with contextlib.suppress(Error):  # the frame is gone, or belongs to another process
                inner = await tabs.ask(tab.send("Accessibility.getFullAXTree", frameId=frame))
                trees[frame] = inner["nodes"]
        if tab.document != document:  # a navigation came in between: the trees may be of two pages
            return await self._read(tabs)
        lines, printed = read_page(trees, layout, partial(self._number, tab, document))
        self.shown = [Element(e.id, e.role, e.name, e.backend_id, document) for e in printed]
        self.elements = {element.id: element for element in self.shown}
        return lines

    def _number(self, tab: Tab, document: int, backend_id: int) -> int:
        """Return an element's printed id: small, fixed for a document, unique in an episode."""
        key = (tab, document, backend_id)
        if key not in self._numbers:
            self._last_number += 1
            self._numbers[key] = self._last_number
        return self._numbers[key]

    def _stop(self, answer: str) -> StepResult:
        assert self._sites is not None
        assert self._headers is not None
        tabs = self._living()
        tabs.check_alive()
        verdict = self._judged(answer, self._sites.helpers(self._headers))
        self.ended = True
        success = verdict.score == 1.0
        info = self._info() | {"score": verdict.score, PARTS: verdict.parts}
        info |= {"judge": verdict.judge, "answer": answer[:1000]}
        return StepResult(OVER, float(success), terminated=True, success=success, info=info)

    def _judged(self, answer: str, helpers: Helpers) -> Verdict:
        """Judge the outcome. Errors of NO_VERDICT are raised; others are logged and score 0."""
        try:
            return evaluate(self.task, answer, FinalPage(self), helpers, self._setting.judge)
        except NO_VERDICT:
            raise
        except Exception as error:
            message = "task %d: judging broke on the answer %.200r; it scores 0"
            logger.exception(message, self.task.id, answer)
            return Verdict(0.0, {"failed": f"{type(error).__name__} {error}"[:200]})


class FinalPage:
    """The browser page that is open when an episode ends. Evaluators read its URL and content, run
    scripts in it, and open other URLs.

    Errors of these requests: BrowserLost if the browser or page died or gives no answer within
    PAGE_S seconds (an opened URL: within `Limits.goto_s` and a second); TimeoutError after STEP_S
    seconds in all; playwright's Error.
    """

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self._tabs = episode._living()

    @property
    def url(self) -> str:
        return self._tabs.current.page.url

    def content(self) -> str:
        return self._ask(self._tabs.current.page.content())

    def open(self, url: str) -> None:
        """Open a URL that the evaluation names. Errors: BrowserLost if it cannot be opened."""

        async def go() -> None:
            self._tabs.begin_step()
            try:
                await self._tabs.goto(url)
            except Refusal as refused:
                raise BrowserLost(f"evaluation: {refused}") from None
            if self._tabs.notes:
                raise BrowserLost(f"evaluation: {self._tabs.notes[0]}")
            await self._tabs.settle()

        self._episode._run(go(), STEP_S)

    def evaluate(self, script: str) -> Any:
        """Return the script's value. Errors: ScriptFailed if the script throws."""
        try:
            return self._ask(self._tabs.current.page.evaluate(script))
        except Error as error:
            self._tabs.check_alive()
            raise ScriptFailed(error.message) from error

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        return self._episode._run(self._tabs.ask(question), STEP_S)


def utf8(text: str) -> str:
    """Return the text with `?` for unpaired surrogates: scripts can create them, UTF-8 has none."""
    return text.encode("utf-8", "replace").decode()


def _bare(url: str) -> str:
    """Return the address, stripped, without scheme and `www.`."""
    return re.sub(r"^(https?://)?(www\.)?", "", url.strip())
