"""A resource of the run is missing or disappears: the run reports it in time, suggests a remedy,
and loses nothing.
"""

import json
import re
import time
import urllib.request

import psutil
import pytest
import yaml
from mlflow import MlflowClient

from tests.answering import closed_port
from tests.waiting import wait_until

FEW_DEMOS = (
    "--set",
    "warm_start.num_demos=8",
    "--set",
    "warm_start.steps=4",
    "--set",
    "warm_start.batch_size=4",
)


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def kill(process):
    """Kill a process and its children, as a machine failure would."""
    if process.poll() is None:
        for each in [
            *psutil.Process(process.pid).children(recursive=True),
            psutil.Process(process.pid),
        ]:
            each.kill()
    process.wait(30)
    process.stdout.close()


@pytest.fixture
def start(fresh):
    """Yield fresh.start; at the end, kill the processes that still run."""
    started = []

    def begin(*command):
        started.append(fresh.start(*command))
        return started[-1]

    yield begin
    for process in started:
        kill(process)


def commits(project, step):
    return sorted(path for path in project.manifests() if path.parts[-3].rpartition("-")[0] == step)


def warm_started(project, *overrides):
    """Run the steps before stage 1."""
    assert project.run("dvc", "pull").returncode == 0
    for name in ("prepare", "demonstrate", "initialize", "warm-start"):
        ended = project.run("agentgym", "step", name, *overrides)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "command", [("python", "-m", "flows.pipeline"), ("agentgym", "step", "prepare", "--set")]
)
def test_an_mlflow_server_out_of_reach_is_named_before_anything_starts(pulled, command):
    uri = f"http://127.0.0.1:{closed_port()}"
    began = time.monotonic()
    ended = pulled.run(*command, f"tracking.uri={uri}")
    assert time.monotonic() - began < 60
    assert ended.returncode == 1
    assert f"no MLflow server answers at tracking.uri {uri}" in ended.stderr
    assert "start it, or correct tracking.uri" in ended.stderr
    _, page = ended.stderr.splitlines()
    assert page.startswith("see ")
    assert not (pulled.folder / ".agentgym/store/steps").exists()


def test_an_environment_server_out_of_reach_is_named_before_anything_starts(fresh):
    endpoint = f"http://127.0.0.1:{closed_port()}"
    began = time.monotonic()
    ended = fresh.pipeline(f"env.endpoints=[{endpoint!r}]")
    assert time.monotonic() - began < 60
    assert ended.returncode == 1
    assert f"{endpoint}/info: unreachable" in ended.stderr
    assert (
        "expected a babyai server there: start it (python -m envs serve babyai --port PORT), or"
        " correct env.endpoints" in ended.stderr
    )
    _, page = ended.stderr.splitlines()
    assert page.startswith("see ")
    assert not (fresh.folder / ".agentgym/store").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)  # a dozen processes, most of which import torch
def test_an_environment_server_that_dies_in_a_stage_costs_the_unfinished_step_alone(fresh, start):
    stage = ("agentgym", "step", "stage-1", "--set", "horizon.stage_steps=[12,1,2]", *FEW_DEMOS)
    warm_started(fresh, *FEW_DEMOS)
    options = json.dumps(
        yaml.safe_load((fresh.folder / "params.yaml").read_text())["env"]["options"]
    )

    def serve():
        port = closed_port()
        server = start(
            "python", "-m", "envs", "serve", "babyai", "--options", options, "--port", str(port)
        )
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/readyz"), 300)
        return server, f"http://127.0.0.1:{port}"

    server, endpoint = serve()
    run = start(*stage, "--set", f"env.endpoints=[{endpoint!r}]")
    wait_until(lambda: commits(fresh, "stage-1") or run.poll() is not None, 300)
    kill(server)
    began = time.monotonic()
    said, _ = run.communicate(timeout=240)
    assert time.monotonic() - began < 180
    assert run.returncode == 1, said
    *_, last = said.splitlines()
    assert re.search(
        r"failed: RolloutError: 16 of 16 episodes failed after 3 attempts each \(limit 10%\); last,"
        r" babyai_\d+:",
        last,
    )
    assert f"{endpoint}/create: unreachable" in last
    assert (
        "see to the environment servers. Nothing committed is lost: the same command continues"
        in last
    )
    # one warning and one final error, for 16 episodes
    assert sum("attempt" in line for line in said.splitlines()) == 2, said
    kept = fresh.manifests()
    assert 1 <= len(commits(fresh, "stage-1")) < 12

    server, endpoint = serve()
    again = fresh.run(*stage, "--set", f"env.endpoints=[{endpoint!r}]")
    kill(server)
    assert again.returncode == 0, again.stderr
    assert re.match(r"stage-1: resumed at commit \d+", again.stdout)
    assert kept.items() <= fresh.manifests().items()
    assert len(commits(fresh, "stage-1")) == 12


@pytest.mark.slow
@pytest.mark.timeout(900)  # a dozen processes, most of which import torch
def test_an_mlflow_server_that_dies_in_a_stage_gets_everything_once_when_it_is_back(fresh, start):
    port = closed_port()
    uri, database = f"http://127.0.0.1:{port}", f"sqlite:///{fresh.folder}/ledger.db"
    overrides = ("--set", f"tracking.uri={uri}", "--set", "horizon.stage_steps=[8,1,2]", *FEW_DEMOS)

    def serve():
        server = start(
            "mlflow",
            "server",
            "--backend-store-uri",
            database,
            "--port",
            str(port),
            "--workers",
            "1",
        )
        wait_until(lambda: answers(f"{uri}/health"), 300)
        return server

    server = serve()
    warm_started(fresh, *overrides)
    run = start("agentgym", "step", "stage-1", *overrides)
    wait_until(lambda: commits(fresh, "stage-1") or run.poll() is not None, 300)
    kill(server)
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    assert "metrics wait in the store: no MLflow server answers" in said
    assert len(commits(fresh, "stage-1")) == 8
    before = fresh.manifests()

    away = fresh.run("agentgym", "step", "stage-1", *overrides)
    assert away.returncode == 1
    assert f"no MLflow server answers at tracking.uri {uri}" in away.stderr
    assert "the same command delivers what is missing" in away.stderr

    server = serve()
    back = fresh.run("agentgym", "step", "stage-1", *overrides)
    kill(server)
    assert back.returncode == 0, back.stderr
    assert back.stdout.startswith("stage-1: done")
    assert fresh.manifests() == before
    client = MlflowClient(database)
    runs = client.search_runs([client.get_experiment_by_name("agentgym-babyai").experiment_id])
    told = [
        run
        for run in runs
        if run.data.tags["kind"] == "pipeline" or run.data.tags.get("step") == "stage-1"
    ]
    assert len(told) == 2
    for each in told:
        history = client.get_metric_history(each.info.run_id, "rollout/success")
        assert sorted(point.step for point in history) == list(range(1, 9))
    (stage,) = (run for run in told if run.data.tags["kind"] == "step")
    data = sorted(each.tags[0].value for each in stage.inputs.dataset_inputs)
    assert data == ["train", "validation"]
    traces = client.search_traces(
        locations=[stage.info.experiment_id], run_id=stage.info.run_id, include_spans=False
    )
    assert len({each.info.trace_id for each in traces}) == len(traces) == 4
