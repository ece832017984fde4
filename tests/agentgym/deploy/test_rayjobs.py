"""A step as a Ray job: one job per attempt, however many processes follow it."""

import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from agentgym.config import ConfigError, load_config
from agentgym.deploy import rayjobs
from agentgym.deploy.attempts import RayUnreachable, sent_config
from agentgym.deploy.jobs import run_as_job
from agentgym.deploy.rayjobs import auth_headers
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store, run_key

ray = pytest.mark.ray


def test_a_cluster_that_does_not_answer_is_named_at_once(tmp_path, tiny_params):
    pytest.importorskip("ray")
    cfg = load_config(tiny_params(tmp_path), ["compute=ray-job", "ray.address=http://127.0.0.1:9"])
    began = time.monotonic()
    with pytest.raises(
        RayUnreachable,
        match=(
            r"^no Ray cluster answers at http://127\.0\.0\.1:9 .*start the cluster, or correct"
            r" ray\.address"
        ),
    ):
        run_as_job("stage-1", cfg, open_store(cfg), run_key="0" * 64, key="0" * 64)
    assert time.monotonic() - began < 30


def test_another_server_at_the_address_is_not_taken_for_a_cluster(tmp_path, tiny_params):
    pytest.importorskip("ray")

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        cfg = load_config(tiny_params(tmp_path), ["compute=ray-job", f"ray.address={address}"])
        with pytest.raises(
            RayUnreachable, match=rf"^what answers at {address} is no Ray dashboard"
        ):
            run_as_job("stage-1", cfg, open_store(cfg), run_key="0" * 64, key="0" * 64)
        server.shutdown()


def test_the_token_comes_from_where_ray_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert auth_headers({}) == {}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("home\n")
    (tmp_path / "other").write_text("file\n")
    assert auth_headers({}) == {"Authorization": "Bearer home"}
    assert auth_headers({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "other")}) == {
        "Authorization": "Bearer file"
    }
    assert auth_headers({"RAY_AUTH_TOKEN": "direct", "RAY_AUTH_TOKEN_PATH": "nowhere"}) == {
        "Authorization": "Bearer direct"
    }
    assert auth_headers({"RAY_AUTH_TOKEN": "direct", "RAY_AUTH_MODE": "disabled"}) == {}


@pytest.mark.parametrize(("deterministic", "inside"), [(True, "inline"), (False, "ray")])
def test_a_job_computes_under_the_same_keys(
    tmp_path, tiny_params, monkeypatch, deterministic, inside
):
    monkeypatch.chdir(tmp_path)
    cfg = load_config(
        tiny_params(tmp_path, deterministic=deterministic),
        ["compute=ray-job", "ray.address=http://127.0.0.1:8265", "store.path=here"],
    )
    inner = sent_config(cfg)
    assert (inner.compute, inner.ray.address) == (inside, "auto")
    assert inner.store.path == tmp_path / "here"
    assert run_key(inner) == run_key(cfg)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["compute=ray-job"],
            (
                r"^ray\.address '' must be a cluster's dashboard for compute ray-job, e\.g\."
                r" http://127\.0\.0\.1:8265$"
            ),
        ),
        (
            ["compute=ray", "ray.address=http://host:8265"],
            r"^ray\.address http://host:8265 is a dashboard; compute ray joins host:port",
        ),
        (
            ["compute=ray", "deterministic=true"],
            r"^compute ray plays episodes in several processes, which no run repeats to the bit",
        ),
    ],
)
def test_an_address_of_the_wrong_kind_is_bad_input(tmp_path, tiny_params, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(tiny_params(tmp_path), overrides)


ORCHESTRATOR = (
    "import sys; from agentgym.cli import main; sys.exit(main(['step', 'warm-start', '--verbose',"
    " '--params', sys.argv[1]]))"
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tiny_params, ray_cluster):
    """A run whose next step is a long warm start that runs as a job on the cluster."""
    folder = tmp_path_factory.mktemp("jobs")
    warm_start = {"num_demos": 60, "steps": 500, "batch_size": 16, "optimizer": {"lr": 0.005}}
    ray = {"address": ray_cluster.dashboard}
    params = tiny_params(
        folder, deterministic=True, compute="ray-job", ray=ray, warm_start=warm_start
    )
    cfg = load_config(params)
    for name in ("prepare", "demonstrate", "initialize"):
        assert str(run_step(name, cfg)) == "ran"
    return params


@pytest.fixture
def client(ray_cluster, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", ray_cluster.token)
    return rayjobs._connect(ray_cluster.dashboard)


def orchestrate(params, log):
    return subprocess.Popen(
        [sys.executable, "-c", ORCHESTRATOR, str(params)],
        stdout=log.open("ab"),
        stderr=subprocess.STDOUT,
    )


def wait_for(what, seconds=120):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def jobs(client, base):
    return {
        job.submission_id: str(job.status)
        for job in client.list_jobs()
        if job.submission_id and job.submission_id.startswith(base)
    }


@ray
@pytest.mark.slow
def test_a_cancelled_job_is_stopped_and_a_lost_orchestrator_finds_its_job_again(
    prepared, client, tmp_path
):
    cfg, log = load_config(prepared), tmp_path / "log"
    store = open_store(cfg)
    base = f"r{run_key(cfg)[:12]}-ws-a"

    with orchestrate(prepared, log) as process:  # cancelled while it trains
        wait_for(lambda: list(cfg.store.path.glob("steps/warm-start-*/manifests/000000.json")))
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 130, log.read_text()
    assert jobs(client, base) == {f"{base}1": "STOPPED"}
    # the job had time to end cleanly
    assert list(cfg.store.path.glob("steps/warm-start-*/leases/000001.released"))

    with orchestrate(prepared, log) as process:  # killed while it trains
        wait_for(lambda: jobs(client, base).get(f"{base}2") == "RUNNING")
        process.kill()
    outcome = run_step("warm-start", cfg)
    assert jobs(client, base) == {f"{base}1": "STOPPED", f"{base}2": "SUCCEEDED"}, log.read_text()
    assert outcome.how == "resumed"
    commits = store.history("warm-start", outcome.manifest.key)
    assert [commit.state["sft_step"] for commit in commits] == list(range(20, 501, 20))
    assert [commit.epoch for commit in commits] == sorted(commit.epoch for commit in commits)
    assert len({commit.epoch for commit in commits}) == 2  # from the two jobs only
    assert finished(cfg, store)["warm-start"].digest == outcome.manifest.digest
    assert str(run_step("warm-start", cfg)) == "done"


@ray
def test_a_job_that_says_its_input_is_bad_is_not_tried_again(prepared, client):
    cfg = load_config(prepared)
    with pytest.raises(
        ConfigError,
        match=(
            r"(?s)^job r0{12}-s9-a1 ended as FAILED with exit code 2.*error: unknown step 'stage-9'"
        ),
    ):
        run_as_job("stage-9", cfg, open_store(cfg), run_key="0" * 64, key="0" * 64)
    assert jobs(client, "r000000000000-s9") == {"r000000000000-s9-a1": "FAILED"}


@ray
@pytest.mark.parametrize("token", ["", "wrong"])
def test_a_client_without_the_token_is_told_where_it_belongs(
    prepared, monkeypatch, token, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    if token:
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    cfg = load_config(prepared)
    with pytest.raises(
        RayUnreachable, match=r"refuses this client: .*its token must be in ~/\.ray/auth_token"
    ):
        run_as_job("stage-1", cfg, open_store(cfg), run_key="0" * 64, key="0" * 64)
