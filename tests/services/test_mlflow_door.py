"""The link that `make ui` prints, in a browser: it leads to the charts of the newest run."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.points import Point
from services import __main__ as services
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SEEN_MS = 120_000  # for MLflow to load on a busy machine


@pytest.fixture(scope="module")
def link(tmp_path_factory, empty_ledger):
    """Link printed by `python -m services ui` in a project with two experiments of one run each."""
    state = tmp_path_factory.mktemp("project") / ".agentgym"
    state.mkdir(mode=0o700)
    shutil.copy(empty_ledger, state)
    for experiment in ("older", "newer"):
        tracker = Tracker(
            f"sqlite:///{state / 'mlflow.db'}", experiment, state / "mlflow-artifacts"
        )
        run = tracker.parent_run("k" * 64, params={"a": 1}, tags={"seed": "0"}, title=experiment)
        points = [Point(step, step, {"validation/success": step / 4}) for step in (1, 2, 3)]
        tracker.deliver(run, points)
    output = state / "printed"
    with output.open("wb") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "services", "ui", "--port", "0"],
            cwd=state.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: "/login" in output.read_text(), 120, why=output.read_text)
        text = output.read_text()
        assert re.fullmatch(r"MLflow +http://127[\d.:]+\nopen +http://agentgym:.+/login\n", text)
        yield text.split()[-1]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.fixture
def page(browser):
    return browser.new_page(viewport={"width": 1280, "height": 800})


def test_one_click_on_the_printed_link_shows_the_first_curve_of_the_newest_run(link, page):
    page.goto(link, timeout=SEEN_MS)
    page.locator(".js-plotly-plot .scatterlayer path").first.wait_for(timeout=SEEN_MS)
    text = page.inner_text("body")
    assert "newer" in text
    assert "older" not in text
    assert "agentgym:" not in page.url  # fetch() rejects URLs with a login
    assert "Judges" not in text  # a page of GenAI: the experiment opened as model training
    # the assistant is closed, so only its button is there; open, it covers a quarter of the page
    widths = [part.bounding_box()["width"] for part in page.locator("[data-assistant-ui]").all()]
    assert max(widths, default=0) < 100


def test_the_home_page_is_of_model_training_and_has_no_notice(link, page):
    page.goto(link, timeout=SEEN_MS)
    page.wait_for_url("**/#/experiments/**", timeout=SEEN_MS)
    page.goto(f"{page.url.partition('#')[0]}#/", timeout=SEEN_MS)
    page.get_by_text("Recent Experiments").wait_for(timeout=SEEN_MS)
    assert "telemetry" not in page.inner_text("body")


def test_a_preference_that_the_user_changed_stays(link, page):
    page.goto(link, timeout=SEEN_MS)
    page.wait_for_url("**/#/experiments/**", timeout=SEEN_MS)
    page.evaluate("localStorage.setItem('mlflow.workflowType_v1', '\"genai\"')")
    page.goto(link, timeout=SEEN_MS)
    page.wait_for_url("**/#/experiments/**", timeout=SEEN_MS)
    assert page.evaluate("localStorage.getItem('mlflow.workflowType_v1')") == '"genai"'
    assert page.evaluate("localStorage.getItem('mlflow.settings.telemetry.enabled_v1')") == "false"


@pytest.mark.parametrize(
    ("variables", "terminal", "opens"),
    [({"DISPLAY": ":0"}, True, True), ({"DISPLAY": ":0"}, False, False), ({}, True, False)],
)
def test_the_link_is_opened_at_a_desktop_alone_and_its_login_is_on_no_command_line(
    link, page, tmp_path, monkeypatch, variables, terminal, opens
):
    opened = []
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(services.sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setattr(services.webbrowser, "open", opened.append)
    file = tmp_path / "mlflow.html"
    services._open(link, file)
    if not opens:
        assert opened == []
        return
    wait_until(lambda: opened, 10)
    assert opened == [file.as_uri()]
    assert file.stat().st_mode & 0o077 == 0
    page.goto(opened[0], timeout=SEEN_MS)
    page.wait_for_url("**/#/experiments/**", timeout=SEEN_MS)
