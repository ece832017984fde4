"""Resources that a page or an action must not reach, tried in a real browser."""

import contextlib
import time

import pytest

from envs.webarena.browser import BrowserLost
from envs.webarena.tabs import MAX_DIALOGS, Allowed, Refusal
from envs.webarena.world import MAX_ELEMENTS
from tests.answering import Handler, http_server


@pytest.fixture(scope="module")
def foreign():
    """Yield a host outside the sites that records its requests."""
    reached = []

    class Foreign(Handler):
        def do_GET(self):
            reached.append(self.path)
            self.send(b"<title>Foreign</title>secret")

    with http_server(Foreign) as address:
        yield int(address.rpartition(":")[2]), reached


def body(text, title="Trap"):
    return f"<!doctype html><title>{title}</title><body>{text}</body>"


@pytest.mark.parametrize(
    "url",
    [
        "http://evil.test/",
        "http://127.0.0.1:1/",
        "http://localhost:{port}/",
        "http://[::1]:{port}/",
        "http://0.0.0.0:{port}/",
        "http://user@127.0.0.1:{port}/",
        "http://evil.test\\@127.0.0.1:{port}/",
        "https://127.0.0.1:{port}/",
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "chrome://version",
        "chrome://crash",
        "data:text/html,hello",
        "javascript:document.title='x'",
        "view-source:http://127.0.0.1:{port}/",
        "devtools://devtools/bundled/inspector.html",
        "blob:http://127.0.0.1:{port}/x",
        "about:version",
        "ftp://127.0.0.1/",
        "ws://127.0.0.1:{port}/",
        "onestopmarket.com.evil.test",
    ],
)
def test_an_address_off_the_list_is_not_opened(shared, site, url):
    # https to the site's port is allowed; it fails because the server does not speak it
    shared.step("goto [onestopmarket.com]")
    asked = len(site.asked)
    shown = shared.step(f"goto [{url.format(port=site.port)}]")
    assert "is not among the sites that can be visited" in shown or "could not be opened" in shown
    assert "URL: http://onestopmarket.com/\n" in shown or url.startswith("https")
    assert [path for _, path in site.asked[asked:] if path != "/favicon.ico"] == []


def test_a_list_of_addresses_admits_nothing_else():
    allowed = Allowed(["http://shop.test", "https://code.test:8443/base"])
    assert allowed.check(" shop.test/a?b ") == "http://shop.test/a?b"
    assert allowed.check("https://CODE.test:8443/x") == "https://CODE.test:8443/x"
    assert allowed.check("about:blank") == "about:blank"
    for url in (
        "http://code.test:8443.evil.test/",
        "http://shop.test:81/",
        "http://shop.test@evil.test",
        "http://a b",
        "http://[x",
        "//shop.test",
    ):
        with pytest.raises(Refusal):
            allowed.check(url)


@pytest.mark.parametrize("how", ["link", "script", "form", "redirect", "refresh", "frame"])
def test_a_page_cannot_lead_to_a_foreign_host(episode, site, foreign, how):
    port, reached = foreign
    url = f"http://127.0.0.1:{port}/taken"
    site.pages["/away"] = (302, {"Location": url}, "")
    pages = {
        "link": f"<a href='{url}'>go</a>",
        "script": f"<button onclick=\"location='{url}'\">go</button>",
        "form": f"<form action='{url}'><button>go</button></form>",
        "redirect": "<a href='/away'>go</a>",
        "refresh": (
            "<button onclick=\"document.head.innerHTML='<meta http-equiv=refresh"
            f" content=0;url={url}>'\">go</button>"
        ),
        "frame": (
            f"<button onclick=\"document.body.innerHTML='<iframe src={url}></iframe><img"
            f" src={url}>stay'\">go</button>"
        ),
    }
    site.pages["/trap"] = body(pages[how])
    episode.step("goto [onestopmarket.com/trap]")
    shown = episode.click("button" if "button" in pages[how] else "link", "go")
    assert reached == []
    assert "Foreign" not in shown
    assert "secret" not in shown
    assert "URL: http://onestopmarket.com/" in shown  # the trap itself, or the previous page
    if how not in ("refresh", "frame"):
        assert "cannot be visited; the tab is back where it was." in shown


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "chrome://version",
        "data:text/html,<title>Data</title>",
        "view-source:http://127.0.0.1/",
    ],
)
@pytest.mark.parametrize("how", ["link", "script", "window"])
def test_a_page_cannot_lead_to_another_scheme(shared, site, url, how):
    buttons = {
        "link": f"<a href='{url}' role=button>go</a>",
        "script": f"<button onclick=\"location='{url}'\">go</button>",
        "window": f"<button onclick=\"window.open('{url}')\">go</button>",
    }
    site.pages["/trap"] = body(buttons[how])
    shared.step("goto [onestopmarket.com/trap]")
    shown = shared.click("button", "go")
    assert "root:" not in shown
    assert "Data" not in shown
    tabs = shared.simulator._tabs
    assert all(
        tab.page.url == "about:blank" or tab.page.url.startswith(site.url) for tab in tabs.living()
    )
    for _ in tabs.living()[1:]:
        shared.step("tab_focus [1]")
        shared.step("close_tab")


def test_a_page_made_by_a_script_is_left_again(episode, site):
    site.pages["/trap"] = body(
        '<button onclick="location=window.URL.createObjectURL(new'
        " Blob(['<title>Blob</title>'],{type:'text/html'}))\">go</button>"
    )
    episode.step("goto [onestopmarket.com/trap]")
    shown = episode.click("button", "go")
    assert "cannot be visited" in shown
    assert "Tab 0 (current): Trap" in shown


def test_scripts_reach_no_foreign_host(episode, site, foreign):
    port, reached = foreign
    site.pages["/trap"] = body(f"""<button onclick="go()">go</button><p id=o></p><script>
    async function go() {{
      const tries = [fetch('http://127.0.0.1:{port}/fetch', {{mode: 'no-cors'}}),
        fetch('http://localhost:{port}/name', {{mode: 'no-cors'}}),
        new Promise((ok, no) => {{ const w = new WebSocket('ws://127.0.0.1:{port}/socket'); \
w.onopen = ok; w.onerror = no; }}),
        navigator.serviceWorker.register('/worker.js')];
      const ends = await Promise.allSettled(tries);
      navigator.sendBeacon('http://127.0.0.1:{port}/beacon', 'x');
      document.getElementById('o').textContent = ends.map(e => e.status).join(' ');
    }}</script>""")
    site.pages["/worker.js"] = (200, {"Content-Type": "text/javascript"}, "")
    episode.step("goto [onestopmarket.com/trap]")
    assert "rejected rejected rejected" in episode.click("button", "go")
    time.sleep(0.2)
    assert reached == []
    assert episode.simulator._tabs.chromium.run(workers(episode), 5) == 0


async def workers(episode):
    return len(episode.simulator._tabs._context.service_workers)


@pytest.mark.slow
def test_tabs_that_a_page_opens_have_a_cap(episode, site):
    site.pages["/trap"] = body(
        "<button onclick=\"for (let i = 0; i < 40; i++) window.open('/second?' + i)\">go</button>"
    )
    episode.step("goto [onestopmarket.com/trap]")
    for _ in range(3):
        shown = episode.click("button", "go")
    assert len(episode.simulator._tabs.living()) <= 8
    assert "Tab 0 (current): Trap" in shown
    if len(episode.simulator._tabs.living()) == 8:
        assert "At most 8 tabs can be open" in episode.step("new_tab")


def test_a_download_leaves_no_file(episode, site):
    site.pages["/file"] = (
        200,
        {
            "Content-Disposition": "attachment; filename=x.bin",
            "Content-Type": "application/octet-stream",
        },
        "x" * 1000,
    )
    site.pages["/trap"] = body("<a href='/file' download>go</a>")
    episode.step("goto [onestopmarket.com/trap]")
    shown = episode.click("link", "go")
    assert "Downloads are switched off." in shown
    assert "Tab 0 (current): Trap" in shown


def test_dialogs_are_dismissed_and_a_flood_of_them_closes_the_tab(episode, site):
    site.pages["/trap"] = body(
        "<button onclick=\"this.textContent = [alert('a'), confirm('b'),"
        " prompt('c')].join()\">ask</button><button onclick=\"for (;;)"
        " alert('again')\">flood</button>"
    )
    episode.step("goto [onestopmarket.com/trap]")
    shown = episode.click("button", "ask")
    assert "The page opened 3 dialogs, dismissed." in shown
    assert "button ',false,'" in shown
    began = time.monotonic()
    shown = episode.click("button", "flood")
    assert time.monotonic() - began < 30
    assert f"The page opened {MAX_DIALOGS + 1} dialogs, dismissed. The tab was closed." in shown
    assert "URL: about:blank" in shown
    assert "Mug shop" in episode.step("goto [onestopmarket.com]")


def test_a_page_that_never_settles_is_shown_after_the_cap(episode, site):
    site.pages["/trap"] = body(
        "<p>words</p><script>setInterval(() => { fetch('/second'); document.title += '.' },"
        " 50)</script>"
    )
    began = time.monotonic()
    shown = episode.step("goto [onestopmarket.com/trap]")
    assert time.monotonic() - began < 15
    assert "words" in shown


def test_a_page_that_keeps_sending_itself_elsewhere_is_bounded(episode, site):
    site.pages["/trap"] = body(
        "<p>words</p><script>setTimeout(() => location.reload(), 10)</script>"
    )
    began = time.monotonic()
    with contextlib.suppress(BrowserLost):  # the browser may also be lost between two loads
        episode.step("goto [onestopmarket.com/trap]")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("words", "times"),
    [
        ("<p>words</p>", MAX_ELEMENTS),
        pytest.param(f"<p>words{' and words' * 4}</p>", 200_000, marks=pytest.mark.slow),
        pytest.param("word ", 2_000_000, marks=pytest.mark.slow),
    ],
    ids=["elements", "elements of ten megabytes", "text of ten megabytes"],
)
def test_a_page_that_is_too_large_is_not_read(episode, site, words, times):
    site.pages["/huge"] = body(words * times)
    began = time.monotonic()
    shown = episode.step("goto [onestopmarket.com/huge]")
    assert time.monotonic() - began < 60
    assert "This page is too large to be shown" in shown
    assert len(shown) < 1000
    assert "heading 'Mugs'" in episode.step("goto [onestopmarket.com]")
    del site.pages["/huge"]


def test_text_of_a_page_stays_text(episode, site):
    site.pages["/trap"] = body(
        "<p>&lt;script&gt;alert(1)&lt;/script&gt; ``` {{7*7}} \u202e \x1b[31m</p><img src=x"
        " alt='&quot;&gt;&lt;b&gt;'>",
        "T|Tab 9: x",
    )
    shown = episode.step("goto [onestopmarket.com/trap]")
    # unescaped here; the viewer escapes it
    assert "<script>alert(1)</script> ``` {{7*7}}" in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown  # escaped as Python prints it
    media_type, picture = episode.simulator.render()
    # a picture: the viewer gets no markup from the page
    assert (media_type, picture[:8]) == ("image/png", b"\x89PNG\r\n\x1a\n")
