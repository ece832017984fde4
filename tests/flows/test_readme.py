"""Every command in the README and in the pages with its commands is run, here or by CI."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from pathlib import Path

import pytest

from tests.answering import closed_port
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/how-to/run-step-by-step.md",
    "docs/reference/chat-templates.md",
    "docs/reference/compute.md",
    "docs/reference/environments.md",
    "docs/reference/protocols.md",
)
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
]
COMMANDS = list(
    dict.fromkeys(
        " ".join(line.partition("  #")[0].split())
        for block in BLOCKS
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip()
    )
)
BY_CI = ("make pipeline", "make test")
BY_HAND = ("make real",)  # most of an hour; `make real-test` is its small version
SERVERS = ("make ui", "python -m envs serve")
# run by test_deployments.py, test_dvc_commands.py
DEPLOYED = ("make up", "make down", "prefect ", "dvc exp ", "dvc plots ", "dvc params ")

# other tests cover these, and they take a minute each: make slow
LONG = (
    "agentgym data validate",
    "dvc repro",
    "python -m flows.pipeline --params profiles/small/",
    "agentgym evaluate random ",
)
SHOWN = [
    c for c in COMMANDS if not c.startswith((*BY_CI, *BY_HAND, *SERVERS, *DEPLOYED, "git clone"))
]


def test_ci_runs_the_two_commands():
    script = (ROOT / ".ci/run").read_text()
    assert all(re.search(rf"^within \d+ {command}", script, re.MULTILINE) for command in BY_CI)


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=pytest.mark.slow) if c.startswith(LONG) else c for c in SHOWN]
)
def test_commands_of_the_readme_work(finished, command):
    if "path/to/model" in command:
        command = command.replace("path/to/model", str(finished.exported_model()))
        command += " alarms.no_success=off"  # it has learned another environment
    ended = finished.run(*shlex.split(command))
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(SERVERS)])
def test_servers_of_the_readme_come_up_and_end(finished, tmp_path, command):
    port = str(closed_port())
    if command == "make ui":
        (finished.folder / ".venv").unlink(missing_ok=True)
        (finished.folder / ".venv").symlink_to(sys.prefix)
        words, path = ["make", "--old-file=.venv/.installed", "ui", f"PORT={port}"], "/health"
    else:
        words, path = re.sub(r" --port \d+", "", command), "/readyz"
        words = [*shlex.split(words), "--port", port]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            words,
            cwd=finished.folder,
            env=finished.environment,
            start_new_session=True,
            stdout=said,
        )
    try:
        assert answers(f"http://127.0.0.1:{port}{path}", process)
        assert list(finished.home.iterdir()) == []
        if command == "make ui":
            login, address = re.search(
                r"^open +http://(.+)@(127\.0\.0\.1:\d+)/login$",
                (tmp_path / "said").read_text(),
                re.MULTILINE,
            ).groups()
            assert address == f"127.0.0.1:{port}"
            assert not answers(f"http://{address}/", process, within_s=2)
            assert answers(
                f"http://{address}/",
                process,
                Authorization=f"Basic {b64encode(login.encode()).decode()}",
            )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)  # like Ctrl-C
        process.wait(30)
    wait_until(lambda: not finished.processes(), 30, why=lambda: finished.processes())


def answers(url, process, within_s=120, **headers):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, headers=headers), timeout=5
            ) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    return False
