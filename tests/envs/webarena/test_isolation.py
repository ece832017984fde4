"""The browser's processes get none of the trainer's secrets and run in their sandbox."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.completed import completed

from .conftest import opened

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("chromium")
# prints the restrictions of a session's renderers: a line of `switch` for the browser, then a
# "Seccomp" line for each
LOOK = """
import psutil
from pathlib import Path
from envs.registry import load_spec
spec = load_spec("webarena", {})
simulator = spec.make()
try:
    simulator.reset(0)
    chromium = simulator._sites.chromium
    browser = psutil.Process(chromium.run(chromium.pid(), 5))
    print("without" if "--no-sandbox" in browser.cmdline() else "with")
    for child in browser.children(recursive=True):
        if "--type=renderer" in child.cmdline():
            print(next(line for line in Path(f"/proc/{child.pid}/status").read_text().splitlines() \
if line.startswith("Seccomp:")))
finally:
    simulator.close()
    spec.close()
"""
# forbid new namespaces inside this one
NO_NAMESPACES = "echo 0 > /proc/sys/user/max_user_namespaces && "


def look_as_a_user(before="", **variables):
    """Return LOOK's output for a user that is not root, also if root runs the tests."""
    if os.geteuid():
        as_user = []
    else:
        as_user = [
            "unshare",
            "--user",
            "--map-user=54321",
            "--map-group=54321",
            *(["--keep-caps"] if before else []),
            "--",
        ]
        if subprocess.run(
            [*as_user, "unshare", "--user", "true"], capture_output=True, check=False
        ).returncode:
            pytest.skip("this machine allows no user namespaces")
    command = [*as_user, "sh", "-c", f'{before}exec "$0" -c "$1"', sys.executable, LOOK]
    return completed(*command, cwd=ROOT, env={**os.environ, **variables}, timeout=60)


def test_browser_driver_and_keeper_know_no_secret_of_this_process(make_spec, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-told")
    monkeypatch.setenv("NODE_OPTIONS", "--title=not-to-be-told")
    monkeypatch.setenv("LC_TIME", "C.UTF-8")
    with opened(make_spec()) as one:
        chromium = one.simulator._sites.chromium
        browser = psutil.Process(chromium.run(chromium.pid(), 5))
        driver, keeper = browser.parent(), psutil.Process(chromium._running.keeper.pid)
        told = {}
        for process in (browser, driver, keeper, *browser.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                told[process.pid] = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert {browser.pid, driver.pid, keeper.pid} < told.keys()
        assert not [
            pid for pid, text in told.items() if b"not-to-be-told" in text or b"PYTEST" in text
        ]
        assert "node" in driver.name()
        assert b"LC_TIME=C.UTF-8" in told[browser.pid]
        names = {line.partition(b"=")[0].decode() for line in told[driver.pid].split(b"\0")}
        assert names & os.environ.keys() <= {
            "PATH",
            "HOME",
            "TMPDIR",
            "LANG",
            "LANGUAGE",
            "TZ",
            "LC_TIME",
            "LC_ALL",
            "LC_CTYPE",
            "LD_LIBRARY_PATH",
        }


def test_a_user_that_is_not_root_gets_the_sandbox():
    done = look_as_a_user()
    switch, *renderers = done.stdout.splitlines()
    assert switch == "with", done.stderr
    assert renderers
    assert set(renderers) == {"Seccomp:\t2"}  # the renderers have a seccomp filter


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take namespaces away")
def test_a_machine_that_allows_no_sandbox_is_refused_unless_it_says_so():
    done = look_as_a_user(NO_NAMESPACES)
    assert done.returncode == 1
    assert "its sandbox needs user namespaces" in done.stderr
    assert "WEBARENA_SANDBOX=off" in done.stderr
    done = look_as_a_user(NO_NAMESPACES, WEBARENA_SANDBOX="off")
    assert done.stdout.startswith("without\n"), done.stderr
    assert "Chromium runs without its sandbox" in done.stderr


def test_the_switch_has_two_values(make_spec, monkeypatch):
    monkeypatch.setenv("WEBARENA_SANDBOX", "no")
    with pytest.raises(ValueError, match="WEBARENA_SANDBOX: expected on or off, got 'no'"):
        make_spec()
