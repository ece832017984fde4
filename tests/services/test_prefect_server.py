"""A command's Prefect server runs exactly as long as the command."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest
from prefect import flow, get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from agentgym.deploy.owned import tail
from services.prefect_server import prefect_api


def servers():
    return [
        child
        for child in psutil.Process().children()
        if "services.prefect_server" in " ".join(child.cmdline())
    ]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_killed_server_is_brought_back_at_its_address_with_what_it_knew(
    tmp_path, monkeypatch, caplog
):
    @flow(name="watched")
    def watched():
        pass

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    # read by the server's process
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        prefect_api(tmp_path / "state") as api,
        get_client(sync_client=True) as client,
    ):
        run = client.create_flow_run(watched)
        (server,) = servers()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(
                urllib.request.Request(
                    f"{api}/flows/", b'{"name": "theirs"}', {"Content-Type": "application/json"}
                ),
                timeout=30,
            )
        login = PREFECT_API_AUTH_STRING.value()
        assert login not in " ".join(server.cmdline())
        assert not [
            path
            for path in tmp_path.rglob("*")
            if path.is_file() and login.encode() in path.read_bytes()
        ]
        os.kill(server.pid, signal.SIGKILL)
        found = client.read_flow_run(run.id)  # the client's retries suffice
        assert found.name == run.name
        (again,) = servers()
        assert again.pid != server.pid
    deadline = time.monotonic() + 30
    while again.is_running() and again.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server outlived its command"
        time.sleep(0.1)
    assert servers() == []
    assert PREFECT_API_AUTH_STRING.value() is None
    assert "the Prefect server ended with code -9; it is started again" in caplog.text


def test_an_automation_that_is_made_while_the_others_are_read_is_loaded_after_them(tmp_path):
    """Prefect reads them every five seconds, under a lock; it waited for that lock for ever."""
    done = subprocess.run(
        [sys.executable, "-c", CHANGED],
        env={**os.environ, "PREFECT_HOME": str(tmp_path), "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "made\nloaded\n", done.stderr[-2000:]


CHANGED = """
import asyncio
import services
from prefect.server.database import provide_database_interface
from prefect.server.events import triggers
from prefect.server.events.models.automations import create_automation
from prefect.server.events.schemas.automations import Automation
from services.prefect_server import adapt_to_sqlite
from services.recovery import automations

async def change():
    db = provide_database_interface()
    await db.create_db()
    (first, *_) = automations()
    made = Automation.model_validate(first.model_dump(mode="json", exclude={"id"}))
    async with triggers._automations_lock():
        async with db.session_context(begin_transaction=True) as session:
            await create_automation(session, made)
        print("made")
    while made.id not in triggers.automations_by_id:
        await asyncio.sleep(0.05)
    print("loaded")

adapt_to_sqlite()
asyncio.run(change())
"""


def test_a_server_that_said_nothing_has_no_last_lines(tmp_path):
    (tmp_path / "server.log").touch()
    assert tail(tmp_path / "server.log") == f"{tmp_path}/server.log is empty"
    (tmp_path / "server.log").write_text("port taken\n")
    assert tail(tmp_path / "server.log") == f"the last lines of {tmp_path}/server.log:\nport taken"
