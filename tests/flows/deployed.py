"""A project whose services run, as after `make up`, and its flow runs."""

import json
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from pathlib import Path

import pytest
import yaml

from tests.waiting import wait_until


class Deployed:
    """Project whose services run, with methods for its `prefect` command."""

    def __init__(self, project):
        self.project = project

    def prefect(self, *words):
        ended = self.project.run("prefect", "--no-prompt", *words)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def submit(self, deployment, *overrides):
        """Run `prefect deployment run`. Return the flow run's id."""
        said = self.prefect(
            "deployment",
            "run",
            deployment,
            "--param",
            f"run={json.dumps({'overrides': overrides})}",
        )
        return re.search(
            r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", said.replace("\n", "")
        ).group()

    def request(self, deployment, *overrides):
        """Create a flow run through Prefect's API. Return its id."""
        found = self.api(f"deployments/name/{deployment}")
        asked = {"run": {"overrides": overrides}} if overrides else {}
        made = self.api(f"deployments/{found['id']}/create_flow_run", {"parameters": asked})
        return made["id"]

    @property
    def services(self):
        return json.loads((self.project.folder / ".agentgym/services.json").read_text())

    def api(self, path, body=None, method=None):
        """Call Prefect's HTTP API; importing its client would take seconds per call."""
        services = self.services
        data = None if body is None else json.dumps(body).encode()
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Basic {b64encode(services['login'].encode()).decode()}",
        }
        request = urllib.request.Request(
            f"{services['prefect']}/api/{path}", data, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read() or "null")

    def look(self, run):
        """Return a flow run with its task runs, artifacts and logs."""
        flow_run, mine = self.api(f"flow_runs/{run}"), {"id": {"any_": [run]}}
        tasks = self.api("task_runs/filter", {"flow_runs": mine})
        artifacts = self.api("artifacts/filter", {"flow_runs": mine, "sort": "CREATED_DESC"})
        logs = self.api("logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}})
        return {
            "name": flow_run["name"],
            "state": flow_run["state"]["name"],
            "message": flow_run["state"]["message"],
            "attempts": flow_run["run_count"],
            # a new task run may have no state yet
            "tasks": [
                (
                    task["name"],
                    (task["state"] or {}).get("name"),
                    (task["state"] or {}).get("message"),
                )
                for task in tasks
            ],
            "artifacts": [
                (artifact["key"], artifact["type"], artifact["description"], artifact["data"])
                for artifact in artifacts
            ],
            "logs": [(log["name"], log["message"]) for log in logs],
        }

    def wait(self, run, *states, timeout_s=240):
        deadline = time.monotonic() + timeout_s
        while (state := self.api(f"flow_runs/{run}")["state"])["name"] not in states:
            assert time.monotonic() < deadline, (state, self.log("prefect"), self.log("supervisor"))
            time.sleep(0.7)  # a request costs the server 20 ms
        return self.look(run)

    def log(self, name):
        """Return the last lines of a service's log, for a failure's message."""
        return "\n".join(
            (self.project.folder / f".agentgym/logs/{name}.log").read_text().splitlines()[-20:]
        )

    def commits(self, step):
        """Return the number of a step's commits in the store, over all runs."""
        return len([path for path in self.project.manifests() if f"/{step}-" in str(path)])

    def wait_for_commit(self, step, count):
        """Wait until the step has `count` commits."""
        wait_until(lambda: self.commits(step) >= count, 240, why=lambda: f"{step} never committed")

    def pids(self, *words):
        return [
            pid
            for pid, command in processes(self.project).items()
            if any(word in command for word in words)
        ]


def processes(project):
    """{pid: command line} of all processes in this project, without the supervisor's periodic
    child that looks for dead runs.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").resolve() == project.folder.resolve():
                    found[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    )
            except OSError:
                continue
    return {pid: command for pid, command in found.items() if "close-dead" not in command}


RUN_PROCESSES = ("prefect.engine", "envs serve")


def make(project, target, *words):
    return project.run("make", "--old-file=.venv/.installed", target, *words, timeout=400)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory, finished, made_databases):
    """Run `make up` in a copy of a finished project; a few steps with another seed are fast, and
    its data is pulled.
    """
    project = type(finished)(tmp_path_factory.mktemp("deployed") / "project", finished.home)
    shutil.copytree(
        finished.folder, project.folder, symlinks=True, ignore=shutil.ignore_patterns(".venv")
    )
    shutil.rmtree(project.folder / ".agentgym/prefect")
    made_databases(project)
    (project.folder / ".venv").symlink_to(sys.prefix)
    for name in ("PREFECT_PORT", "MLFLOW_PORT"):
        project.environment.pop(name, None)
    started = make(project, "up")
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        project.started = started.stdout
        yield Deployed(project)
    finally:
        ended = make(project, "down")
    assert "database is locked" not in (project.folder / ".agentgym/logs/prefect.log").read_text()
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("stopped")
    assert processes(project) == {}
    assert make(project, "down").stdout == "nothing is running\n"
    assert not (project.folder / "prefect.toml").exists()
    assert list(project.home.iterdir()) == []


@pytest.fixture
def switched_on(deployed):
    """switched_on(deployment, switch): set the switch in prefect.yaml until the test ends."""
    file = deployed.project.folder / "prefect.yaml"
    before, changed = file.read_text(), set()

    def switch_on(deployment, switch):
        tree = yaml.safe_load(before)
        for each in tree["deployments"]:
            if each["entrypoint"].endswith(f":{deployment}") and each["name"] == "local":
                for entry in (*each.get("schedules", ()), *each.get("triggers", ())):
                    assert entry[switch] is False
                    entry[switch] = True
        file.write_text(yaml.safe_dump(tree, sort_keys=False))
        changed.add(deployment)
        deployed.prefect("deploy", "--name", f"{deployment}/local")

    yield switch_on
    file.write_text(before)
    for deployment in changed:
        deployed.prefect("deploy", "--name", f"{deployment}/local")
