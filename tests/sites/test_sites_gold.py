"""Every task's gold solution, played by a user's means in a real browser on the embedded sites, and
scored by a small version of the rules.

The player resolves `[role 'name']` with Playwright's accessible names and requires that its
targets lie in the viewport, because an agent only sees the viewport.
"""

import html
import json
import re
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from envs.webarena.chromium import find_browser
from envs.webarena.helpers import post_url
from sites import SITES, TENANT_HEADER, SiteServer, queries

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright drives the browser of these tests"
)
FOLDER = Path(queries.__file__).resolve().parents[1] / "envs/webarena"
TASKS = json.loads((FOLDER / "tasks.json").read_text())
GOLD = json.loads((FOLDER / "gold.json").read_text())
SHORT = (2, 35, 82, 89)  # in every run; test_webarena.py plays more of them through the environment
VIEWPORT = {"width": 1280, "height": 720}
pytestmark = pytest.mark.usefixtures("chromium")


def placed(text):
    """Fill in the placeholders for the sites' addresses."""
    for site, host in SITES.items():
        text = text.replace(f"__{site.upper()}__", f"http://{host}")
    return text


class OutOfView(AssertionError):
    """The target lies outside the viewport; `down` gives the direction."""

    def __init__(self, action, down):
        super().__init__(f"{action}: not in the viewport, scroll {'down' if down else 'up'} first")
        self.down = down


class Player:
    """One task's browser context, with one tab per start URL; acts like an agent."""

    def __init__(self, browser, server, task):
        self.server, self.token, self.answer = server, server.open_tenant(), None
        self.context = browser.new_context(
            viewport=VIEWPORT,
            extra_http_headers={TENANT_HEADER: self.token},
            service_workers="block",
        )
        self.context.set_default_timeout(10_000)
        for url in task["start_url"].split(" |AND| "):
            self.open_tab().goto(placed(url))
        self.page = self.context.pages[0]

    def open_tab(self):
        self.page = self.context.new_page()
        self.in_flight = 0
        self.page.on("request", lambda _: self.count(1))
        self.page.on("requestfinished", lambda _: self.count(-1))
        self.page.on("requestfailed", lambda _: self.count(-1))
        return self.page

    def count(self, step):
        self.in_flight = max(0, self.in_flight + step)

    def settle(self):
        """Wait until no request has been in flight for 60 ms, at most 5 s."""
        quiet = deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            self.page.wait_for_timeout(20)
            if self.in_flight:
                quiet = deadline
            elif quiet == deadline:
                quiet = time.monotonic() + 0.06
            elif time.monotonic() > quiet:
                break
        self.page.wait_for_load_state("load")

    def locate(self, action, role, name, number):
        found = self.page.get_by_role(role, name=name, exact=True)
        found.first.wait_for(state="attached")
        assert number or found.count() == 1, f"{action}: {found.count()} on {self.page.url}"
        target = found.nth(int(number or 1) - 1)
        shown = target.locator("xpath=ancestor::select") if role == "option" else target
        box = shown.bounding_box()
        middle = box["y"] + box["height"] / 2
        if not 0 <= middle < VIEWPORT["height"]:
            raise OutOfView(action, middle > 0)
        return target

    def act(self, action):
        word, _, rest = action.partition(" ")
        if match := re.fullmatch(r"\[(\w+) '(.*?)'(?: #(\d+))?\](?: \[(.*)\] \[([01])\])?", rest):
            target = self.locate(action, match[1], match[2], match[3])
            if word == "click" and match[1] == "option":
                target.locator("xpath=ancestor::select").select_option(label=target.inner_text())
            else:
                assert word in ("click", "type"), action
                target.click()
            if word == "type":
                self.page.keyboard.type(match[4] + "\n" * int(match[5]))
        elif word == "stop":
            self.answer = rest[1:-1]
            return
        else:
            self.move(word, rest[1:-1])
        self.settle()

    def move(self, word, value):
        if word == "press":
            self.page.keyboard.press(value)
        elif word == "scroll":
            self.page.evaluate(
                f"window.scrollBy(0, {'-' if value == 'up' else ''}window.innerHeight)"
            )
        elif word == "goto":
            self.page.goto(placed(value))
        elif word == "new_tab":
            self.open_tab()
        else:
            assert word == "tab_focus", word
            self.page = self.context.pages[int(value)]

    def close(self):
        self.context.close()
        self.server.close_tenant(self.token)


def clean(text):
    text = text.strip()
    return (
        text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    ).lower()


def answered(reference, answer):
    """Score an answer. Gold answers are verbatim, so a fuzzy reference is compared as text."""
    if reference.get("fuzzy_match") == "N/A":
        return clean(answer) == "n/a"
    needed = [
        *reference.get("must_include", ()),
        *(text.rstrip(".") for text in reference.get("fuzzy_match", ())),
    ]
    exact = reference.get("exact_match")
    return (exact is None or clean(exact) == clean(answer)) and all(
        clean(text) in clean(answer) for text in needed
    )


def at(url, reference):
    """Return True if the page at `url` is one of the references."""
    here, wanted = (
        urlsplit(url),
        [urlsplit(placed(one).rstrip("/")) for one in reference.split(" |OR| ")],
    )
    pooled = {}
    for one in wanted:
        for key, values in parse_qs(one.query).items():
            pooled.setdefault(key, set()).update(values)
    bases = [one.netloc + one.path for one in wanted]
    given = parse_qs(here.query)
    return any(base in here.netloc + here.path for base in bases) and all(
        pooled[key] & set(given.get(key, ())) for key in pooled
    )


def called(expression, player):
    """Return the result of a helper."""
    name, argument = re.fullmatch(r"func:(\w+)\((?:__page__, )?(?:'(.*)')?\)", expression).groups()
    if name == "reddit_get_post_url":
        return post_url(argument.replace("__last_url__", player.page.url))
    state, helper = player.server.state(player.token), getattr(queries, name)
    if name == "gitlab_get_project_memeber_role":
        return helper(state, player.page.url, argument)
    return helper(state, *filter(None, [argument]))


def read(target, player):
    """Return the content of a target of the html evaluator."""
    if target["url"] != "last":
        player.page.goto(
            called(target["url"], player)
            if target["url"].startswith("func:")
            else placed(target["url"])
        )
    locator = target["locator"]
    if locator.startswith("func:"):
        return called(locator, player)
    if not locator:
        return html.unescape(player.page.content())
    try:
        return html.unescape(str(player.page.evaluate(f"() => {locator}")))
    except playwright.Error:
        return ""


def met(required, found):
    if "exact_match" in required:
        return clean(required["exact_match"]) == clean(found)
    return all(
        any(clean(text) in clean(found) for text in entry.split(" |OR| "))
        for entry in required["must_include"]
    )


def parts(task, player, answer):
    """Yield the result of each evaluator of the task, in order."""
    rules = task["eval"]
    for kind in rules["eval_types"]:
        if kind == "string_match":
            yield answered(rules["reference_answers"], answer)
        elif kind == "url_match":
            yield at(player.page.url, rules["reference_url"])
        else:
            for target in rules["program_html"]:
                yield met(target["required_contents"], read(target, player))


@pytest.fixture(scope="module")
def play():
    """play(task) -> a context with a Player."""
    server = SiteServer()
    port = server.start()
    rules = ", ".join(f"MAP {host} 127.0.0.1:{port}" for host in SITES.values())
    with playwright.sync_playwright() as driver:
        arguments = [
            f"--host-resolver-rules={rules}, MAP * ~NOTFOUND",
            "--no-sandbox",
            "--disable-gpu",
        ]
        browser = driver.chromium.launch(executable_path=find_browser(), args=arguments)

        @contextmanager
        def played(task):
            player = Player(browser, server, task)
            try:
                yield player
            finally:
                player.close()

        yield played
        browser.close()
    server.stop()


def check_gold(task, play):
    with play(task) as player:
        for action in GOLD[str(task["task_id"])]:
            player.act(action)
        assert player.answer is not None, "a gold ends with stop"
        assert all(parts(task, player, player.answer)), (
            f"{task['intent']} ends at {player.page.url}"
        )


def check_untouched(task, play):
    with play(task) as player:
        assert not all(list(parts(task, player, ""))), (
            f"{task['intent']}: an untouched session passes"
        )


@pytest.mark.parametrize("number", SHORT)
def test_the_gold_of_a_task_passes(number, play):
    check_gold(TASKS[number], play)


@pytest.mark.parametrize("number", SHORT)
def test_an_untouched_session_does_not_pass(number, play):
    check_untouched(TASKS[number], play)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [task["task_id"] for task in TASKS if task["task_id"] not in SHORT]
)
def test_the_gold_of_every_other_task_passes(number, play):
    check_gold(TASKS[number], play)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [task["task_id"] for task in TASKS if task["task_id"] not in SHORT]
)
def test_an_untouched_session_passes_no_other_task(number, play):
    check_untouched(TASKS[number], play)
