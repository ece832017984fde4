"""The deployments as a user runs them: `make up`, the real `prefect` command, kills, cancel,
`make down`; on a fresh PREFECT_HOME.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(900)


class Deployed:
    """A project with its services up, and the `prefect` command in it."""

    def __init__(self, project):
        self.project = project

    def prefect(self, *words):
        ended = self.project.run("prefect", "--no-prompt", *words)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def submit(self, deployment, *overrides):
        """`prefect deployment run`. Result: the flow run's id."""
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
        """As `submit`, by the interface. Result: the flow run's id."""
        found = self.api(f"deployments/name/{deployment}")
        asked = {"run": {"overrides": overrides}} if overrides else {}
        made = self.api(f"deployments/{found['id']}/create_flow_run", {"parameters": asked})
        return made["id"]

    @property
    def services(self):
        return json.loads((self.project.folder / ".agentgym/services.json").read_text())

    def api(self, path, body=None, method=None):
        """Prefect's own interface; its client would take seconds to import for every look."""
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
        """A flow run with its task runs, artifacts and logs."""
        flow_run, mine = self.api(f"flow_runs/{run}"), {"id": {"any_": [run]}}
        tasks = self.api("task_runs/filter", {"flow_runs": mine})
        artifacts = self.api("artifacts/filter", {"flow_runs": mine, "sort": "CREATED_DESC"})
        logs = self.api("logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}})
        return {
            "name": flow_run["name"],
            "state": flow_run["state"]["name"],
            "message": flow_run["state"]["message"],
            "attempts": flow_run["run_count"],
            # a task run that was just created may have no state yet
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
            assert time.monotonic() < deadline, (
                state,
                self.log("prefect"),
                self.log("supervisor"),
            )
            time.sleep(0.7)  # each look costs the server 20 ms
        return self.look(run)

    def log(self, name):
        """The end of a service's log, for a failure's message."""
        return "\n".join(
            (self.project.folder / f".agentgym/logs/{name}.log").read_text().splitlines()[-20:]
        )

    def commits(self, step):
        """How many of a step are in the store, by any run."""
        return len([path for path in self.project.manifests() if f"/{step}-" in str(path)])

    def wait_for_commit(self, step, count):
        """Until there are so many."""
        wait_until(lambda: self.commits(step) >= count, 240, why=lambda: f"{step} never committed")

    def pids(self, *words):
        return [
            pid
            for pid, command in processes(self.project).items()
            if any(word in command for word in words)
        ]


def processes(project):
    """{pid: command line} of everything that runs in this project, but for the supervisor's child
    that looks for dead runs now and then.
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
    """`make up` in a copy of a finished project: a few steps of another seed are quick, and its
    data is pulled.
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


def test_up_says_where_everything_is_and_a_second_time_starts_nothing(deployed):
    before = processes(deployed.project)
    again = make(deployed.project, "up")
    assert again.returncode == 0
    assert again.stdout.splitlines()[0] == "already running"
    for line in ("prefect  http://127.0.0.1:", "worker   pool local", "mlflow   http://127.0.0.1:"):
        assert line in deployed.project.started
        assert line in again.stdout
    assert processes(deployed.project) == before


def test_make_up_after_the_schedule_was_switched_on_switches_it_on_and_says_so(deployed):
    file = deployed.project.folder / "prefect.yaml"
    as_it_was = file.read_text()
    try:
        for active, said in (("true", "on"), ("false", "off")):
            file.write_text(as_it_was.replace("active: false", f"active: {active}"))
            again = make(deployed.project, "up")
            assert again.returncode == 0, again.stdout + again.stderr
            told = [line for line in again.stdout.splitlines() if line.startswith("applied ")]
            assert told == [
                f"applied  prefect.yaml: schedule nightly of pipeline/{pool}: switched {said}"
                for pool in ("kubernetes", "local")
            ]
            found = deployed.api("deployments/name/pipeline/local")["schedules"]
            assert [each["active"] for each in found] == [active == "true"]
    finally:
        file.write_text(as_it_was)
    assert (
        "applied  prefect.yaml: nothing in it has changed\n" in make(deployed.project, "up").stdout
    )


def test_every_flow_is_deployed_on_a_process_pool_and_a_kubernetes_pool(deployed):
    listed = deployed.prefect("deployment", "ls")
    for flow in ("pipeline", "prepare", "train", "evaluate", "compare"):
        for pool in ("local", "kubernetes"):
            assert f"{flow}/{pool}" in listed
    known = deployed.prefect("deployment", "inspect", "pipeline/kubernetes")
    assert "agentgym:latest" in known
    assert str(deployed.project.folder) not in known


def status_of(url, body=None, **headers):
    request = urllib.request.Request(
        url, None if body is None else json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


NEW_WORK = [
    ("POST", "flows/", {"name": "theirs"}),
    ("POST", "deployments/filter", {}),
    ("POST", "work_queues/", {"name": "theirs"}),
]


@pytest.mark.parametrize(
    ("path", "body"),
    [(path, body) for _, path, body in NEW_WORK] + [("admin/version", None), ("ready", None)],
)
def test_who_does_not_know_the_login_gets_nothing_from_prefect(deployed, path, body):
    url = f"{deployed.services['prefect']}/api/{path}"
    wrong = f"Basic {b64encode(b'agentgym:wrong').decode()}"
    assert status_of(url, body, **{"Content-Type": "application/json"}) == 401
    assert status_of(url, body, **{"Content-Type": "text/plain"}) == 401
    assert (
        status_of(url, body, **{"Content-Type": "application/json", "Authorization": wrong}) == 401
    )
    known = f"Basic {b64encode(deployed.services['login'].encode()).decode()}"
    assert status_of(url, body, Authorization=known, Host="rebound.example:4200") == 403
    assert status_of(url, body, Authorization=known, Origin="http://elsewhere.example") == 403
    assert status_of(url, body, Authorization=known, Origin="http://127.0.0.1:9") == 403


@pytest.mark.parametrize(
    "path",
    [
        "ajax-api/2.0/mlflow/experiments/search?max_results=5",
        "",
        "version",
        "static-files/index.html",
    ],
)
def test_who_does_not_know_the_login_gets_nothing_from_mlflow(deployed, path):
    url = f"{deployed.services['mlflow']}/{path}"
    assert status_of(url) == 401
    known = f"Basic {b64encode(deployed.services['login'].encode()).decode()}"
    assert status_of(url, Authorization=known, Host="rebound.example") == 403
    assert status_of(url, Authorization=known, Origin="http://elsewhere.example") == 403
    assert status_of(f"{deployed.services['mlflow']}/health") == 200


@pytest.mark.parametrize(
    "path", ["events/in", "events/out", "logs/out", "task_runs/subscriptions/scheduled"]
)
def test_a_websocket_needs_the_login_and_is_not_for_pages(deployed, path):
    url, login = (
        f"{deployed.services['prefect'].replace('http', 'ws')}/api/{path}",
        deployed.services["login"],
    )

    def said(token, **more):
        with connect(url, subprotocols=["prefect"], **more) as socket:
            socket.send(json.dumps({"type": "auth", "token": token}))
            try:
                return json.loads(socket.recv(timeout=20))["type"]
            except Exception as error:
                return str(error)

    assert said(login) == "auth_success"
    assert "Auth required" in said(None)
    assert "Invalid token" in said("agentgym:wrong")
    for more in (
        {"origin": "http://elsewhere.example"},
        {"additional_headers": {"Host": "rebound.example"}},
    ):
        with pytest.raises(InvalidStatus, match="403"):
            said(login, **more)


@pytest.fixture
def browser(chromium):
    from playwright.sync_api import sync_playwright

    from envs.webarena.chromium import find_browser

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        yield opened
        opened.close()


def logged_in(services, name):
    scheme, _, address = services[name].partition("://")
    return f"{scheme}://{services['login']}@{address}/login"


def test_the_printed_links_log_a_browser_in_and_its_pages_show_what_there_is(deployed, browser):
    services = deployed.services
    printed = make(deployed.project, "up").stdout
    for name, page_path, shown in (
        ("prefect", "/deployments", "pipeline"),
        ("mlflow", "/#/experiments", "agentgym-babyai"),
    ):
        assert f"open     {logged_in(services, name)}\n" in printed
        for host in ("127.0.0.1", "localhost"):  # the second as through a forwarded port
            page, failures = browser.new_context().new_page(), []
            page.on(
                "response",
                lambda reply, failures=failures: (
                    reply.status in (401, 403) and failures.append(reply.url)
                ),
            )
            page.goto(logged_in(services, name).replace("127.0.0.1", host), timeout=60_000)
            own = services[name].replace("127.0.0.1", host)
            assert page.url.startswith(f"{own}/")
            assert "login" not in page.url
            failures.clear()  # a browser's first request is without the login, and is asked for it
            page.goto(f"{own}{page_path}", timeout=60_000)
            page.get_by_text(shown).first.wait_for(timeout=60_000)
            assert failures == []


FOREIGN_PAGE = """<!doctype html><title>theirs</title><script>
const api = %s, results = [];
const attempt = (name, made) => made.then(r => r.text().then(t => results.push([name, r.type, \
r.status, t])),
                                          e => results.push([name, "refused", 0, String(e)]));
const socket = new Promise(done => { const s = new WebSocket(api.replace("http", "ws") + \
"/api/events/in", ["prefect"]);
  s.onopen = () => done("open"); s.onerror = () => done("refused"); });
const body = JSON.stringify({name: "theirs"}), headers = {"Content-Type": "application/json"};
Promise.all([
  attempt("json", fetch(api + "/api/flows/", {method: "POST", headers, body, credentials: \
"include"})),
  attempt("plain", fetch(api + "/api/flows/", {method: "POST", mode: "no-cors", body, credentials: \
"include"})),
  attempt("read", fetch(api + "/api/admin/settings", {credentials: "include"})),
  attempt("blind", fetch(api + "/api/admin/version", {mode: "no-cors", credentials: "include"})),
]).then(() => socket).then(s => { results.push(["socket", s, 0, ""]); window.results = results; });
</script>"""


def test_a_page_of_another_origin_does_and_reads_nothing_even_in_the_owners_browser(
    deployed, browser
):
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write((FOREIGN_PAGE % json.dumps(deployed.services["prefect"])).encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as theirs:
        Thread(target=theirs.serve_forever, daemon=True).start()
        context = browser.new_context()
        context.new_page().goto(logged_in(deployed.services, "prefect"), timeout=60_000)
        for host in ("127.0.0.1", "localhost"):  # of the same site, and of another
            page, answered = context.new_page(), {}
            page.on(
                "response",
                lambda reply, answered=answered: answered.setdefault(reply.url, set()).add(
                    reply.status
                ),
            )
            page.goto(f"http://{host}:{theirs.server_port}/")
            page.wait_for_function("window.results", timeout=60_000)
            results = page.evaluate("window.results")
            assert len(results) == 5
            assert all(
                kind in ("refused", "opaque") and text in ("", "TypeError: Failed to fetch")
                for _, kind, _, text in results
            ), results
            assert {
                status
                for url, statuses in answered.items()
                if "/api/" in url
                for status in statuses
            } <= {403}
        theirs.shutdown()
    assert "theirs" not in [flow["name"] for flow in deployed.api("flows/filter", {})]


def test_nobody_else_can_read_the_login(deployed):
    folder, password = deployed.project.folder, deployed.services["login"].partition(":")[2]
    assert len(password) >= 32
    holding = []
    for path in folder.rglob("*"):
        if (
            path.is_file()
            and not path.is_symlink()
            and ".venv" not in path.parts
            and password.encode() in path.read_bytes()
        ):
            holding.append(str(path.relative_to(folder)))
            assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(holding) == [".agentgym/services.json", "prefect.toml"]
    assert deployed.project.run("git", "check-ignore", *holding).stdout.split() == holding
    assert (folder / ".agentgym").stat().st_mode & 0o777 == 0o700
    assert not any(password in command for command in processes(deployed.project).values())


def test_the_login_goes_to_no_other_server(deployed, monkeypatch):
    heard = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self):
            heard.append(str(self.headers))
            self.send_error(404)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    password = deployed.services["login"].partition(":")[2]
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setitem(
            deployed.project.environment,
            "PREFECT_API_URL",
            f"http://127.0.0.1:{server.server_port}/api",
        )
        deployed.project.run("prefect", "--no-prompt", "work-pool", "ls")
        server.shutdown()
    assert heard
    assert not any(
        password in said or b64encode(deployed.services["login"].encode()).decode() in said
        for said in heard
    )


def test_a_killed_deployment_run_recovers_by_itself_and_shows_every_stage(deployed):
    run = deployed.submit("pipeline/local", "horizon.stage_steps=[6,1,1]")
    deployed.wait_for_commit("stage-1", deployed.commits("stage-1") + 2)
    for pid in deployed.pids("prefect.engine"):
        os.kill(pid, signal.SIGKILL)
    seen = deployed.wait(run, "Completed", "Failed")
    assert seen["state"] == "Completed", seen["message"]
    assert seen["attempts"] == 2
    assert seen["name"] == "params.yaml horizon.stage_steps=[6,1,1]"
    # the interrupted task run is not left as running for ever; the server books states of task runs
    # a moment after they came
    deadline = time.monotonic() + 60
    while any(state in (None, "Pending", "Running") for _, state, _ in seen["tasks"]):
        assert time.monotonic() < deadline, seen["tasks"]
        time.sleep(0.7)
        seen = deployed.look(run)
    states = {}
    for name, state, message in seen["tasks"]:
        states.setdefault(name, []).append((state, message))
    assert {state for runs in states.values() for state, _ in runs} == {"Completed", "Crashed"}
    crashed = [
        name for name, runs in states.items() if any(state == "Crashed" for state, _ in runs)
    ]
    assert crashed == ["stage 1/3 · max_turns 6"]
    assert any(
        (message or "").startswith("interrupted with attempt 1")
        for _, message in states[crashed[0]]
    )
    assert {
        "stage 2/3 · max_turns 9",
        "stage 3/3 · max_turns 12",
        "environments up",
        "report",
    } <= states.keys()
    # progress while it runs, a table and the MLflow run after it
    artifacts = {
        key: (kind, description, data)
        for key, kind, description, data in reversed(seen["artifacts"])
    }
    assert artifacts["progress-stage-3"][0] == "progress"
    kind, description, data = artifacts["step-stage-1"]
    assert kind == "table"
    assert "resumed at commit" in description
    assert re.search(
        r"\[MLflow run"
        rf" \w+\]\({deployed.services['mlflow']}/#/experiments/\d+/runs/[0-9a-f]{{32}}\)",
        description,
    )
    rows = json.loads(data) if isinstance(data, str) else data
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {"rollout_max_turns", "rollout_success", "validation_success"} <= rows[0].keys()
    # the library's logs are the run's logs
    assert any(
        name == "agentgym.training.rl" and message.startswith("step 6: success")
        for name, message in seen["logs"]
    )
    audit = deployed.project.run(
        "agentgym",
        "audit",
        "--episodes",
        "2",
        "--set",
        "horizon.stage_steps=[6,1,1]",
    )
    assert audit.returncode == 0, audit.stdout


def test_cancel_ends_everything_the_run_owns(deployed):
    run = deployed.request("pipeline/local", "horizon.stage_steps=[300,1,2]")
    deployed.wait_for_commit("stage-1", deployed.commits("stage-1") + 1)
    assert len(deployed.pids(*RUN_PROCESSES)) >= 2
    deployed.prefect("flow-run", "cancel", run)
    wait_until(
        lambda: not deployed.pids(*RUN_PROCESSES), 30, why=lambda: processes(deployed.project)
    )
    seen = deployed.wait(run, "Cancelled")
    assert not {state for _, state, _ in seen["tasks"]} & {"Running", "Pending"}


@pytest.mark.slow
def test_a_wrong_parameter_fails_at_once_with_one_line_and_is_not_tried_again(deployed):
    refused = deployed.project.run(
        "prefect",
        "--no-prompt",
        "deployment",
        "run",
        "train/local",
        "--param",
        'run={"overrides": ["seed"]}',
    )
    assert refused.returncode == 1  # by the form's own rules, before there is a run
    misspelled = deployed.request("train/local", "rollout.gruop_size=4")
    seen = deployed.wait(misspelled, "Failed", "Completed")
    assert "unknown key rollout.gruop_size; did you mean rollout.group_size?" in seen["message"]
    assert seen["tasks"] == []
    misplaced = deployed.request("train/local", "data.path=nowhere")
    seen = deployed.wait(misplaced, "Failed", "Completed")
    assert "data.path nowhere does not exist" in seen["message"]
    assert [(name, state) for name, state, _ in seen["tasks"]] == [("pull data", "Failed")]
    assert seen["attempts"] == 1


@pytest.fixture
def switched_on(deployed):
    """switched_on(deployment, switch): its switch in prefect.yaml is on, until the test ends."""
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


def test_a_nightly_run_is_off_until_it_is_switched_on(deployed, switched_on):
    def schedules(state=None):
        found = deployed.api("deployments/name/pipeline/local")
        planned = deployed.api(
            "flow_runs/filter",
            {
                "deployments": {"id": {"any_": [found["id"]]}},
                "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
            },
        )
        return found["schedules"], [run["expected_start_time"] for run in planned]

    ((off,), planned) = schedules()
    assert (off["active"], off["schedule"]["cron"], planned) == (False, "0 2 * * *", [])
    switched_on("pipeline", "active")
    wait_until(lambda: schedules()[1], 120, why=lambda: deployed.log("prefect"))
    ((on,), planned) = schedules()
    assert on["active"]
    assert {time_of_day[11:16] for time_of_day in planned} == {"02:00"}


class _Inbox(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append(json.loads(body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_): ...


@pytest.fixture
def inbox():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Inbox)
    server.received = []
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


MAKE_BLOCK = """
import sys
from prefect.blocks.notifications import CustomWebhookNotificationBlock as Webhook
Webhook(name="failures", url=sys.argv[1], json_data={"subject": "{{subject}}", "text": "{{body}}"}
).save("agentgym-failures", overwrite=True)
"""


@pytest.mark.slow
def test_people_are_told_of_a_failed_run_once_that_is_switched_on(deployed, switched_on, inbox):
    (rule,) = (
        each
        for each in deployed.api("automations/filter", {})
        if each["name"] == "agentgym: people are told of a failed run"
    )
    assert rule["enabled"] is False
    address = f"http://127.0.0.1:{inbox.server_port}/"
    made = deployed.project.run("python", "-c", MAKE_BLOCK, address)
    assert made.returncode == 0, made.stderr
    switched_on("notify", "enabled")
    nobody = deployed.request("train/local", "data.path=elsewhere")  # the block it names is none
    deployed.wait(nobody, "Failed")
    wait_until(
        lambda: any(
            "'slack-webhook/agentgym-failures', which cannot be used"
            in str(each["state"]["message"])
            for each in deployed.api("flow_runs/filter", {"flows": {"name": {"any_": ["notify"]}}})
        ),
        120,
        why=lambda: deployed.log("prefect"),
    )

    file = deployed.project.folder / "prefect.yaml"
    file.write_text(file.read_text().replace("slack-webhook/", "custom-webhook/"))
    deployed.prefect("deploy", "--name", "notify/local")
    run = deployed.request("train/local", "data.path=nowhere")
    deployed.wait(run, "Failed")
    wait_until(lambda: inbox.received, 120, why=lambda: deployed.log("prefect"))
    ((subject, text),) = (each.values() for each in inbox.received)
    assert subject == "agentgym: params.yaml data.path=nowhere failed"
    assert "failed: pull data: " in text
    assert "data.path nowhere does not exist" in text
    assert f"{deployed.services['prefect']}/runs/flow-run/{run}" in text
    assert f"prefect flow-run retry {run}" in text


@pytest.mark.slow
def test_environments_that_are_up_serve_the_next_run_and_go_down_on_request(deployed):
    up = deployed.request("envs-up/local")
    seen = deployed.wait(up, "Completed", "Failed")
    assert seen["state"] == "Completed", seen["message"]
    ((key, kind, _, table),) = seen["artifacts"]
    assert (key, kind) == ("environments", "table")
    (server,) = json.loads(table)
    file = next((deployed.project.folder / ".agentgym/environments").iterdir())
    assert json.loads(file.read_bytes())["token"] not in str(deployed.look(up))
    log = deployed.project.folder / ".agentgym/logs/babyai.log"
    before = log.read_bytes()
    run = deployed.request("evaluate/local", "evaluation.num_items=2")
    seen = deployed.wait(run, "Completed", "Failed")
    assert seen["state"] == "Completed", seen["message"]
    assert log.read_bytes() == before  # no server of its own
    assert int(server["held by"].removeprefix("process ")) in deployed.pids("agentgym.deploy.kept")
    down = deployed.request("envs-down/local")
    assert deployed.wait(down, "Completed", "Failed")["state"] == "Completed"
    wait_until(
        lambda: not deployed.pids("agentgym.deploy.kept", "envs serve"),
        30,
        why=lambda: processes(deployed.project),
    )


@pytest.mark.slow
def test_a_flow_typed_in_a_terminal_uses_the_running_server(deployed):
    refused = deployed.project.run("python", "-m", "flows.train", "seed=7")
    assert refused.returncode == 2
    assert (
        refused.stderr
        == "error: step stage-1 needs prepare, warm-start first; run `python -m flows.prepare` with"
        " the same parameters\n"
    )
    prepared = deployed.project.run("python", "-m", "flows.prepare", "seed=7")
    assert prepared.returncode == 0, prepared.stdout + prepared.stderr
    assert "warm start (SFT)" in prepared.stdout
    assert "params.yaml seed=7" in deployed.prefect("flow-run", "ls", "--flow-name", "prepare")


@pytest.mark.slow
def test_a_run_that_lost_its_worker_too_is_found_by_its_silence(deployed):
    run = deployed.request("pipeline/local", "seed=8", "horizon.stage_steps=[6,1,2]")
    deployed.wait_for_commit("stage-1", deployed.commits("stage-1") + 2)
    for pid in deployed.pids("services.supervisor worker", "prefect.engine"):
        os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: not deployed.pids("envs serve"),
        30,
        why=lambda: "an environment server outlived its run",
    )
    seen = deployed.wait(run, "Completed", "Failed", timeout_s=600)
    assert (seen["state"], seen["attempts"]) == ("Completed", 2)
    assert {state for _, state, _ in seen["tasks"]} == {"Completed", "Crashed"}


@pytest.mark.slow
def test_a_crashed_run_that_no_automation_answers_is_found_by_the_supervisor(deployed):
    (answer,) = [
        each
        for each in deployed.api("automations/filter", {})
        if each["name"] == "agentgym: a crashed run goes on"
    ]
    deployed.api(f"automations/{answer['id']}", {"enabled": False}, method="PATCH")
    run = deployed.request("pipeline/local", "seed=9", "horizon.stage_steps=[6,1,2]")
    deployed.wait_for_commit("stage-1", deployed.commits("stage-1") + 2)
    for pid in deployed.pids("prefect.engine"):
        os.kill(pid, signal.SIGKILL)
    seen = deployed.wait(run, "Completed", "Failed")
    deployed.api(f"automations/{answer['id']}", {"enabled": True}, method="PATCH")
    assert (seen["state"], seen["attempts"]) == ("Completed", 2)
    assert "no automation answered" in deployed.log("supervisor")


@pytest.mark.slow
def test_services_end_with_a_killed_supervisor_and_come_back_with_up(deployed):
    (supervisor,) = deployed.pids("services.supervisor supervise")
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not processes(deployed.project), 30, why=lambda: processes(deployed.project))
    again = make(deployed.project, "up")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "http://127.0.0.1:" in again.stdout
    assert "pipeline/local" in deployed.prefect("deployment", "ls")
