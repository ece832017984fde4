"""A failure to display a step must not stop the step."""

import asyncio
import logging

from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from agentgym.steps.context import NoProgress
from flows.common import plain_logs
from tasks import artifacts
from tasks.artifacts import _Watched, progress_artifact
from tests.waiting import wait_until


def test_percent_and_text_follow_the_part_that_is_under_way():
    watched = _Watched(NoProgress())
    assert watched.shown() is None
    watched.start("episodes", 8)
    watched.advance(2, "success 0.25")
    assert watched.shown() == (25.0, "episodes: 2/8 success 0.25")
    watched.advance(9)
    assert watched.shown() == (100.0, "episodes: 11/8 success 0.25")
    watched.start("nothing to do", 0)
    assert watched.shown() == (100.0, "nothing to do: 0/0")


def test_what_prefect_keeps_of_a_run_holds_nothing_that_postgres_refuses(monkeypatch):
    watched = _Watched(NoProgress())
    watched.start("episodes", 8)
    watched.advance(2, "said \x00")
    assert watched.shown() == (25.0, r"episodes: 2/8 said \x00")
    handler = APILogHandler()
    monkeypatch.setattr(logging.getLogger("agentgym"), "handlers", [handler])
    plain_logs()
    record = logging.LogRecord("agentgym", logging.INFO, "", 0, "a server said \x00", (), None)
    assert handler.format(record) == r"a server said \x00"
    plain_logs()
    assert handler.format(record) == r"a server said \x00"


def test_a_server_that_does_not_answer_costs_a_warning_and_no_step(monkeypatch, caplog):
    monkeypatch.setattr(artifacts, "EVERY_S", 0.05)
    unreachable = {PREFECT_API_URL: "http://127.0.0.1:1/api", PREFECT_CLIENT_MAX_RETRIES: 0}

    async def work(progress):  # rollouts also call it from a coroutine
        progress.advance(1)

    with (
        temporary_settings(unreachable),
        caplog.at_level(logging.WARNING, "tasks"),
        progress_artifact("stage-1", NoProgress()) as progress,
    ):
        progress.start("stage 1", 2)
        asyncio.run(work(progress))
        wait_until(lambda: "is not shown in Prefect" in caplog.text, 30)
    assert "progress of stage-1 is not shown in Prefect: " in caplog.text
