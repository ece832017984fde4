"""The deployments as a user runs them: `make up`, the real `prefect` command, kills, cancel,
`make down`; on a fresh PREFECT_HOME.
"""

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from base64 import b64encode

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.answering import Handler, http_server
from tests.flows.deployed import RUN_PROCESSES, make, processes
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(900)


def test_up_says_where_everything_is_and_a_second_time_starts_nothing(deployed):
    before = processes(deployed.project)
    again = make(deployed.project, "up")
    assert again.returncode == 0
    assert again.stdout.splitlines()[0] == "already running"
    for line in ("prefect  http://127.0.0.1:", "worker   pool local", "mlflow   http://127.0.0.1:"):
        assert line in deployed.project.started
        assert line in again.stdout
    assert processes(deployed.project) == before


@pytest.mark.slow
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


def logged_in(services, name):
    scheme, _, address = services[name].partition("://")
    return f"{scheme}://{services['login']}@{address}/login"


@pytest.mark.slow
def test_the_printed_links_log_a_browser_in_and_its_pages_show_what_there_is(deployed, browser):
    services = deployed.services
    printed = make(deployed.project, "up").stdout
    for name, page_path, shown in (
        ("prefect", "/deployments", "pipeline"),
        ("mlflow", "/#/experiments", "agentgym-babyai"),
    ):
        assert f"open     {logged_in(services, name)}\n" in printed
        for host in ("127.0.0.1", "localhost"):  # the second host is as through a forwarded port
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
            failures.clear()  # a browser's first request has no login and gets a 401
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
    class Page(Handler):
        def do_GET(self):
            page = FOREIGN_PAGE % json.dumps(deployed.services["prefect"])
            self.send(page.encode(), Content_Type="text/html")

    with http_server(Page) as theirs:
        context = browser.new_context()
        context.new_page().goto(logged_in(deployed.services, "prefect"), timeout=60_000)
        for host in ("127.0.0.1", "localhost"):  # same-site and cross-site
            page, answered = context.new_page(), {}
            page.on(
                "response",
                lambda reply, answered=answered: answered.setdefault(reply.url, set()).add(
                    reply.status
                ),
            )
            page.goto(theirs.replace("127.0.0.1", host))
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

    class Elsewhere(Handler):
        def do_GET(self):
            heard.append(str(self.headers))
            self.send_error(404)

        do_POST = do_GET

    password = deployed.services["login"].partition(":")[2]
    with http_server(Elsewhere) as address:
        monkeypatch.setitem(deployed.project.environment, "PREFECT_API_URL", f"{address}/api")
        deployed.project.run("prefect", "--no-prompt", "work-pool", "ls")
    assert heard
    assert not any(
        password in said or b64encode(deployed.services["login"].encode()).decode() in said
        for said in heard
    )


@pytest.mark.slow
def test_a_killed_deployment_run_recovers_by_itself_and_shows_every_stage(deployed):
    run = deployed.submit("pipeline/local", "horizon.stage_steps=[6,1,1]")
    deployed.wait_for_commit("stage-1", deployed.commits("stage-1") + 2)
    for pid in deployed.pids("prefect.engine"):
        os.kill(pid, signal.SIGKILL)
    seen = deployed.wait(run, "Completed", "Failed")
    assert seen["state"] == "Completed", seen["message"]
    assert seen["attempts"] == 2
    assert seen["name"] == "params.yaml horizon.stage_steps=[6,1,1]"
    # the interrupted task run must not stay in state Running; the server stores task run states
    # with a short delay
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
    # progress during the run; afterwards a table and the link to the MLflow run
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
    # the flow run's logs contain the library's logs
    assert any(
        name == "agentgym.training.rl" and message.startswith("step 6: success")
        for name, message in seen["logs"]
    )
    audit = deployed.project.run(
        "agentgym", "audit", "--episodes", "2", "--set", "horizon.stage_steps=[6,1,1]"
    )
    assert audit.returncode == 0, audit.stdout


@pytest.mark.slow
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
