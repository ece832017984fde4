"""Data, traces, models and decisions reach an MLflow server once, although it fails for each."""

import http.client
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentgym.config import load_config
from agentgym.evaluation.history import artifact
from agentgym.evaluation.publish import promotions_of
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store
from agentgym.tracking.deliver import committed_points, tracker_of
from agentgym.tracking.reaching import LedgerUnavailable
from agentgym.tracking.step_data import inputs_of
from agentgym.tracking.step_page import traces_of

pytestmark = pytest.mark.integration
STEPS = ("prepare", "stage-2", "evaluate-stage-2", "register")  # cover all kinds of data
ROUTES = {
    "inputs": "POST /api/2.0/mlflow/runs/log-inputs",
    "trace": "POST /api/3.0/mlflow/traces",
    "version": "GET /version",
    "spans": "POST /v1/traces",
    "model": "POST /api/2.0/mlflow/logged-models",
    "decision": "/0001.json",
    "verdict": "POST /api/2.0/mlflow/model-versions/set-tag",
    "alias": "POST /api/2.0/mlflow/registered-models/alias",
}
# faults in place of a response, in order; "lost" and "late" follow a completed request
FAULTS = {route: ["closed" if len(route) % 2 else "busy", "lost"] for route in ROUTES}
FAULTS["spans"].append("late")
TIMEOUT_S = 2


class Proxy(ThreadingHTTPServer):
    """Proxy in front of a server; each of these routes fails once in each way."""

    def __init__(self, address):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind = address.removeprefix("http://")
        self.left = {route: list(faults) for route, faults in FAULTS.items()}
        self.address = f"http://127.0.0.1:{self.server_port}"

    def fault(self, request):
        for route, faults in self.left.items():
            if ROUTES[route] in request and faults:
                return faults.pop(0)
        return ""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Log nothing: a failing test reports the reason."""

    def handle_one_request(self):
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        self.close_connection = True
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault(f"{self.command} {self.path}")
        if fault == "busy":
            self.send_error(503)
        elif fault != "closed":
            answer, content = self.passed_on(body)
            if fault == "late":
                time.sleep(TIMEOUT_S + 1)
            if fault not in ("late", "lost"):
                self.send_response(answer.status)
                for name in ("Content-Type", "Content-Disposition"):
                    if answer.headers[name]:
                        self.send_header(name, answer.headers[name])
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

    def passed_on(self, body):
        connection = http.client.HTTPConnection(self.server.behind, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer, content


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def proxy(request, empty_ledger, tmp_path, mlflow_server, monkeypatch):
    from mlflow.store.tracking.rest_store import RestStore

    # only our code retries
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", str(TIMEOUT_S))
    folder = tmp_path / "server"
    folder.mkdir()
    words = [f"--artifacts-destination={folder / 'artifacts'}"]
    if request.param == "sqlite":
        (folder / "mlflow.db").write_bytes(empty_ledger.read_bytes())
    else:
        postgres = request.getfixturevalue("postgres")
        words.append(f"--backend-store-uri={postgres.made('outages')}")
    with mlflow_server(folder, *words) as address, Proxy(address) as proxy:
        RestStore._get_server_version.cache_clear()
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy
        proxy.shutdown()


@pytest.mark.slow
def test_what_a_server_failed_to_take_or_to_confirm_is_there_once_in_the_end(
    copy_run, tmp_path, tiny_params, proxy
):
    cfg = load_config(tiny_params(copy_run(tmp_path / "run"), deterministic=True))
    told = cfg.tracking.model_copy(update={"uri": proxy.address})
    cfg = cfg.model_copy(update={"tracking": told})
    store, done = open_store(cfg), finished(cfg, open_store(cfg))
    failed = 0
    for name in STEPS:
        while True:
            try:
                assert str(run_step(name, cfg)) == "done"
                break
            except LedgerUnavailable:
                failed += 1
                assert failed <= 6 * len(ROUTES), proxy.left
            tracker = tracker_of(cfg)
            run = tracker.find_run({"step_key": done[name].key})
            if name != "register":  # registration comes last
                assert tracker.client.get_run(run).info.status == "RUNNING"
    assert not any(proxy.left.values()), proxy.left

    tracker = tracker_of(cfg)
    wanted = {}
    for name in STEPS:
        manifest = done[name]
        run_id = tracker.find_run({"step_key": manifest.key})
        run = tracker.client.get_run(run_id)
        assert run.info.status == "FINISHED"
        assert sorted(
            (each.dataset.name, each.dataset.digest) for each in run.inputs.dataset_inputs
        ) == sorted((each.name, each.digest) for each in inputs_of(cfg, store, manifest))
        assert tracker.points(run_id) == sorted(
            (metric, point.step, point.time_ms, value)
            for point in committed_points(store, name, manifest.key)
            for metric, value in point.metrics.items()
        )
        wanted |= {each.trace_id: each for each in traces_of(store, manifest, told.traces)}
    traces = tracker.client.search_traces(locations=[tracker.experiment_id])
    assert sorted(each.info.trace_id for each in traces) == sorted(wanted)
    assert len(wanted) == 2 * told.traces
    for each in traces:
        spans = wanted[each.info.trace_id].spans
        assert [span.name for span in each.data.spans] == [span["name"] for span in spans]
    models = tracker.client.search_logged_models([tracker.experiment_id])
    assert sorted((each.name, str(each.status)) for each in models) == [
        (cfg.registered_model, "READY"),
        ("stage-2", "READY"),
    ]

    promotions = promotions_of(cfg, store)
    (entry,) = promotions.history.entries()
    (version,) = tracker.client.search_model_versions(f"name = '{cfg.registered_model}'")
    held = tracker.client.get_registered_model(cfg.registered_model).aliases
    assert {alias: str(number) for alias, number in held.items()} == {"champion": "1"}
    assert version.tags["gate.verdict"] == entry.verdict
    path = tracker.client.download_artifacts(
        version.run_id, artifact(promotions.history, entry), str(tmp_path / "run")
    )
    assert json.loads(Path(path).read_bytes()) == json.loads(entry.to_bytes())
