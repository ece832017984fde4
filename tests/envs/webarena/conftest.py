"""A small web site of unusual pages, and an episode on it in a real browser."""

import contextlib
import json
import threading
from types import SimpleNamespace

import pytest

from envs.registry import load_spec
from tests.answering import Handler, http_server

HOME = """<!doctype html><title>Mug shop</title><body style="margin:8px;font:16px/20px 'DejaVu \
Sans', sans-serif">
<h1>Mugs</h1>
<a href="/second">Second page</a> <a href="/popup-target" target="_blank">New window</a>
<form action="/found"><label>Search <input name="q" aria-label="Search"></label>
<select name="size" aria-label="Size"><option>Small</option><option>Large</option></select>
<button>Go</button></form>
<button onclick="fetch('/slow').then(r => r.text()).then(t => \
document.getElementById('out').textContent = t)">Load</button>
<p id="out"></p><p style="display:none">hidden words</p>
<iframe src="/inner" title="Inner" width="300" height="80"></iframe>
<div style="height:2000px"></div><a href="/second">Far below</a></body>"""

PAGES = {
    "/": HOME,
    "/second": (
        "<!doctype html><title>Second</title><h1>Second page</h1><p>The red mug costs"
        " <b>12</b>.</p><a href='/'>Back</a>"
    ),
    "/popup-target": (
        '<!doctype html><title>Popup</title><body><button onclick="window.close()">Close'
        " me</button></body>"
    ),
    "/inner": (
        "<!doctype html><title>Inside</title><body><button"
        " onclick=\"this.textContent='pressed'\">Inner button</button></body>"
    ),
}


class Site:
    """Pages by path: text, or (status, headers, text). `asked` lists the paths of all requests."""

    def __init__(self):
        self.pages = dict(PAGES)
        self.asked = []
        self.release = threading.Event()  # ends the wait of /hang
        outer = self

        class Pages(Handler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                path, _, query = self.path.partition("?")
                outer.asked.append((self.headers.get("Host"), self.path))
                status, headers, text = 200, {}, outer.pages.get(path)
                if path == "/slow":
                    outer.release.wait(0.2)
                    text = "arrived"
                elif path == "/hang":
                    outer.release.wait(20)
                    text = ""
                elif path == "/found":
                    text = f"<title>Found</title><p>You looked for {query}</p>"
                if isinstance(text, tuple):
                    status, headers, text = text
                if text is None:
                    status, text = 404, "<title>Not found</title>nothing here"
                with contextlib.suppress(OSError):
                    named = {"Content-Type": "text/html; charset=utf-8", **headers}
                    self.send(text.encode(), status, **named)

        self.served = http_server(Pages)
        self.url = self.served.__enter__()
        self.port = int(self.url.rpartition(":")[2])

    def close(self):
        self.release.set()
        self.served.__exit__(None, None, None)


@pytest.fixture(scope="module")
def site(chromium):
    served = Site()
    yield served
    served.close()


def task(task_id=0, start="__SHOPPING__/", intent="Find the price of the red mug.", **evaluation):
    rules = {
        "eval_types": ["string_match"],
        "reference_answers": {"exact_match": "12"},
        "reference_url": "",
        "program_html": [],
        **evaluation,
    }
    return {
        "sites": ["shopping"],
        "task_id": task_id,
        "require_login": False,
        "storage_state": None,
        "start_url": start,
        "geolocation": None,
        "intent": intent,
        "require_reset": False,
        "eval": rules,
    }


@pytest.fixture(scope="module")
def make_spec(site, tmp_path_factory):
    """make_spec(tasks, **options) -> an environment on the small site, stopped at the end."""
    made = []

    def make(*tasks, **options):
        file = tmp_path_factory.mktemp("tasks") / "tasks.json"
        file.write_text(json.dumps(list(tasks) or [task()]))
        made.append(
            load_spec(
                "webarena",
                {"tasks": str(file), "sites": {"shopping": site.url}, "goto_s": 5.0, **options},
            )
        )
        return made[-1]

    yield make
    for spec in made:
        spec.close()


@pytest.fixture(scope="module")
def spec(make_spec):
    return make_spec()


@contextlib.contextmanager
def opened(spec):
    """Yield an open episode on task 0.
    `click(role, name)` clicks the element with this role and name.
    """
    simulator = spec.make()
    first = simulator.reset(0)

    def number(role, name):
        found = [
            element.id
            for element in simulator.shown
            if (element.role, element.name) == (role, name)
        ]
        assert found, (role, name, [str(element) for element in simulator.shown])
        return found[0]

    try:
        yield SimpleNamespace(
            simulator=simulator,
            first=first,
            number=number,
            step=lambda action: simulator.step(action).observation,
            click=lambda role, name: simulator.step(f"click [{number(role, name)}]").observation,
        )
    finally:
        simulator.close()


@pytest.fixture
def episode(spec):
    with opened(spec) as one:
        yield one


@pytest.fixture(scope="module")
def shared(spec):
    """Yield one episode for tests that do not change it."""
    with opened(spec) as one:
        yield one
