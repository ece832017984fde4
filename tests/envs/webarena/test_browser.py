"""Failures of a page, the browser, its driver or the server, and recovery.
No process is left afterwards.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from envs.webarena import browser as browsers
from envs.webarena.browser import BrowserLost
from envs.webarena.tabs import Refusal
from tests.waiting import wait_until

from .conftest import opened, task

pytestmark = pytest.mark.usefixtures("chromium")


def chromium_of(spec):
    simulator = spec.make()
    simulator.reset(0)
    chromium = simulator._sites.chromium
    simulator.close()
    return chromium


def left_of(folder):
    """Return the processes whose command line or environment names the folder, and their
    descendants.
    """
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and (
                folder in " ".join(process.cmdline())
                or folder in process.environ().get("TMPDIR", "")
            ):
                found |= {process, *process.children(recursive=True)}
    return found


def gone(folder, seconds=20):
    wait_until(
        lambda: not (Path(folder).exists() or left_of(folder)),
        seconds,
        why=lambda: (Path(folder).exists(), left_of(folder)),
    )
    return True


def test_stop_leaves_no_process_and_no_folder_and_a_later_session_starts_again(make_spec):
    spec = make_spec()
    chromium = chromium_of(spec)
    folder = chromium._running.folder
    assert left_of(folder)
    spec.close()
    assert gone(folder, seconds=1)
    again = chromium_of(spec)
    second = again._running.folder
    spec.close()
    assert gone(second, seconds=1)


def test_a_crashed_page_ends_its_session_and_no_other(spec):
    with opened(spec) as one, opened(spec) as other:
        tabs = one.simulator._tabs

        async def crash():
            with contextlib.suppress(Exception):
                await tabs.current.page.goto("chrome://crash", timeout=3000)

        tabs.chromium.run(crash(), 10)
        with pytest.raises(BrowserLost, match="crash"):
            one.step("scroll [down]")
        assert "Second page" in other.click("link", "Second page")
    with opened(spec) as later:
        assert "Mug shop" in later.first


def test_a_page_that_loops_for_ever_ends_its_session_in_time_and_no_other(spec, site, monkeypatch):
    monkeypatch.setattr("envs.webarena.tabs.INPUT_S", 2.0)
    monkeypatch.setattr("envs.webarena.tabs.Tabs.ask.__defaults__", (2.0,))
    site.pages["/loop"] = "<title>Loop</title><button onclick='for (;;);'>go</button>"
    with opened(spec) as other:
        with opened(spec) as one:
            one.step("goto [onestopmarket.com/loop]")
            began = time.monotonic()
            with pytest.raises(BrowserLost, match="does not answer"):
                one.click("button", "go")
            assert time.monotonic() - began < 20
        assert "Second page" in other.click("link", "Second page")
        # the context of the hung page is closed
        assert len(other.simulator._sites.chromium._running.browser.contexts) == 1


def test_pages_that_never_answer_do_not_hold_up_another_session(make_spec, site, monkeypatch):
    """Three steps wait for a hanging site or page, although concurrency is 1."""
    monkeypatch.setattr("envs.webarena.tabs.INPUT_S", 6.0)
    site.pages["/loop"] = "<title>Loop</title><button onclick='for (;;);'>go</button>"
    spec, ended = make_spec(concurrency=1, goto_s=20.0), []

    async def play():
        async def hang(one, action):
            with contextlib.suppress(BrowserLost):
                await one.simulator.step_async(action)
            ended.append(action)

        with contextlib.ExitStack() as stack:
            other, *hung = [stack.enter_context(opened(spec)) for _ in range(4)]
            actions = ["goto [onestopmarket.com/hang]", "goto [onestopmarket.com/hang]"]
            hung[2].step("goto [onestopmarket.com/loop]")
            actions.append(f"click [{hung[2].number('button', 'go')}]")
            waiting = [
                asyncio.create_task(hang(one, action))
                for one, action in zip(hung, actions, strict=True)
            ]
            await asyncio.sleep(0.2)
            await other.simulator.step_async("scroll [down]")
            assert not ended
            site.release.set()
            site.release = threading.Event()
            await asyncio.gather(*waiting)

    asyncio.run(play())


def test_keys_that_never_arrive_are_refused_where_the_page_lives(spec, site, monkeypatch):
    monkeypatch.setattr("envs.webarena.tabs.INPUT_S", 2.0)
    site.pages["/loop"] = "<title>Loop</title><button onclick='for (;;);'>go</button>"
    with opened(spec) as one:
        tabs = one.simulator._tabs
        with pytest.raises(Refusal, match="may not have taken it"):
            tabs.chromium.run(tabs.input(asyncio.sleep(60)), 10)
        one.step("goto [onestopmarket.com/loop]")
        with pytest.raises(BrowserLost, match="does not answer within 2 s"):
            one.click("button", "go")


def test_typing_into_a_link_is_refused_as_soon_as_the_page_is_left(spec):
    """The click opens the link; the old page never acknowledges the keys that follow."""
    with opened(spec) as one:
        for text in ("x" * 150, "y" * 500) * 4:
            began = time.monotonic()
            one.step(f"type [{one.number('link', 'Second page')}] [{text}] [1]")
            assert time.monotonic() - began < 5
            one.step("goto [onestopmarket.com]")


@pytest.mark.parametrize("victim", ["browser", "driver"])
def test_a_killed_browser_costs_the_open_sessions_and_the_next_one_gets_another(make_spec, victim):
    spec = make_spec()
    with opened(spec) as one, opened(spec) as two:
        chromium = one.simulator._sites.chromium
        folder = chromium._running.folder
        pid = chromium.run(chromium.pid(), 5)
        os.kill(pid if victim == "browser" else psutil.Process(pid).ppid(), signal.SIGKILL)
        for lost in (one, two):
            with pytest.raises(BrowserLost):
                lost.step("scroll [down]")
    with opened(spec) as three:
        assert "Second page" in three.click("link", "Second page")
        assert chromium._running.folder != folder
    assert gone(folder)


def test_an_old_browser_is_replaced_when_nobody_uses_it(make_spec, monkeypatch):
    monkeypatch.setattr(browsers, "RECYCLE_AFTER", 2)
    spec = make_spec()
    chromium = chromium_of(spec)
    first = chromium._running.folder
    with opened(spec) as second:
        assert chromium._running.folder == first
        with opened(spec) as third:  # the browser is old, but in use
            assert chromium._running.folder == first
            third.step("scroll [down]")
        second.step("scroll [down]")
    assert chromium_of(spec)._running.folder != first
    assert gone(first)


def test_a_path_too_long_for_a_socket_is_said(make_spec, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp/" + "x" * 60)
    simulator = make_spec().make()
    with pytest.raises(BrowserLost, match="too long for Chromium's sockets"):
        simulator.reset(0)
    simulator.close()


def test_a_browser_that_does_not_start_is_said_clearly(make_spec, monkeypatch):
    monkeypatch.setenv("AGENTGYM_BROWSER", "/bin/false")
    simulator = make_spec().make()
    with pytest.raises(BrowserLost, match="/bin/false\\) does not start"):
        simulator.reset(0)
    simulator.close()


@contextlib.contextmanager
def served(tmp_path, site, *, tasks, **popen):
    file, port_file = tmp_path / "tasks.json", tmp_path / "port"
    file.write_text(json.dumps(tasks))
    options = json.dumps({"tasks": str(file), "sites": {"shopping": site.url}})
    command = [
        sys.executable,
        "-m",
        "envs",
        "serve",
        "webarena",
        "--options",
        options,
        "--port-file",
        str(port_file),
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [*command, "--drain-timeout", "0.1"],
        stderr=(tmp_path / "log").open("wb"),
        env=environment,
        **popen,
    )
    try:
        deadline = time.monotonic() + 40
        while True:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            with contextlib.suppress(OSError):
                url = f"http://127.0.0.1:{port_file.read_text().strip()}"
                with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                    break
            time.sleep(0.05)
        yield process, url
    finally:
        process.kill()
        process.wait()


def call(url, body):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read())


@pytest.fixture
def short_path():
    """Yield a folder with a short path, because Chromium's sockets cannot have a long one."""
    with tempfile.TemporaryDirectory(prefix="wa") as folder:
        yield Path(folder)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_server_takes_its_browser_along_however_it_ends(short_path, site, end):
    tmp_path = short_path
    with served(tmp_path, site, tasks=[task(5)]) as (process, url):
        session = call(f"{url}/create", {"request_key": "k", "task_id": 5})["session_id"]
        assert (
            call(f"{url}/step", {"session_id": session, "turn": 1, "action": "scroll [down]"})[
                "turn"
            ]
            == 1
        )
        (folder,) = [
            str(path) for path in tmp_path.iterdir() if path.name.startswith(browsers.PREFIX)
        ]
        processes = left_of(folder)
        assert len(processes) >= 5
        with pytest.raises(urllib.error.HTTPError, match="422") as missing:
            call(f"{url}/create", {"request_key": "none", "task_id": 4})
        assert "there is no task 4; 1 tasks have ids from 5 to 5" in missing.value.read().decode()
        process.send_signal(end)
        process.wait(30)
        assert gone(folder)
        assert not psutil.wait_procs(processes, timeout=5)[1]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "port") == [
        "log",
        "tasks.json",
    ]


def test_what_a_killed_browser_leaves_behind_is_ended_with_its_server(
    short_path, site, stand_still
):
    """Stopped processes do not notice that their browser has ended."""
    with served(short_path, site, tasks=[task(5)]) as (process, url):
        call(f"{url}/create", {"request_key": "k", "task_id": 5})
        (folder,) = [
            str(path) for path in short_path.iterdir() if path.name.startswith(browsers.PREFIX)
        ]
        (browser,) = [
            found
            for found in left_of(folder)
            if "chrom" in found.name() and os.getsid(found.pid) == found.pid
        ]
        children = browser.children(recursive=True)
        for child in children:
            stand_still(child.pid)
        browser.kill()
        process.kill()
        process.wait(30)
        assert not psutil.wait_procs(children, timeout=20)[1]
        assert gone(folder)
