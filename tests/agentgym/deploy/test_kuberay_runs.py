"""A whole staged run as RayJobs: data by digest, store on S3, MLflow by address, no shared path.

A stand-in for KubeRay's operator (kuberay_stand_in.py) runs the jobs: the test covers our
client and not KubeRay.
"""

import base64
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentgym.audit import audit
from agentgym.config import load_config
from agentgym.deploy import rayjobs
from agentgym.deploy.kube.client import Kind, connect
from agentgym.deploy.kuberay import RAY_CLUSTER, RAY_JOB
from agentgym.pipeline.run import STAYS_HERE, run_step
from agentgym.pipeline.table import finished, open_store, run_label, steps_of
from tests.agentgym.deploy.kuberay_stand_in import StandIn

pytestmark = [pytest.mark.kubernetes, pytest.mark.ray, pytest.mark.slow]

STEP = "import sys; from agentgym.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def kube(kubeconfig):
    name = f"agentgym-runs-{secrets.token_hex(4)}"
    kube = connect(kubeconfig=kubeconfig, namespace=name)
    kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield kube
    kube.delete(Kind("v1", "Namespace"), name)
    kube.close()


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory, mlflow_server):
    """Address of an MLflow server, by a name of loopback that the trust rules take for remote."""
    folder = tmp_path_factory.mktemp("mlflow")
    words = (f"--artifacts-destination={folder}/artifacts", "--allowed-hosts=127.1:PORT")
    with mlflow_server(folder, *words, host="127.1") as address:
        yield address


def variables(s3_endpoint, folder):
    (folder / "aws").touch()
    return {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(folder / "aws"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "aws"),
    }


@pytest.fixture
def operator(kube, ray_cluster, s3_endpoint, tmp_path, monkeypatch):
    """The stand-in and the Secret with the jobs' credentials."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", ray_cluster.token)
    credentials = {
        name: base64.b64encode(value.encode()).decode()
        for name, value in variables(s3_endpoint, tmp_path).items()
    }
    metadata = {"name": "agentgym-rollout"}
    kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": credentials})
    (tmp_path / "jobs").mkdir()
    client = rayjobs._connect(ray_cluster.dashboard)
    with StandIn(kube, client, tmp_path / "jobs") as operator:
        yield operator


def until(what, operator, seconds=600):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, operator.errors
        time.sleep(0.05)
    return found


@pytest.mark.timeout(3000)
def test_a_staged_run_loses_a_cluster_and_its_follower_and_ends_as_if_nothing_had_been(
    kube, kubeconfig, operator, mlflow, s3_uri, tiny_params, whole_run, tmp_path, monkeypatch
):
    monkeypatch.setenv("AGENTGYM_IMAGE", "registry/agentgym:1")
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    params = tiny_params(
        tmp_path / "run",
        deterministic=True,
        alarms={"entropy": {"min": 10.0}},
        compute="kuberay",
        kuberay={"mode": "HTTPMode"},
        kubernetes={"namespace": kube.namespace},
        tracking={"uri": mlflow},
        store={"path": str(tmp_path / "run" / "store"), "uri": s3_uri, "lease_ttl_s": 3.0},
    )
    cfg = load_config(params)
    store, run = open_store(cfg), run_label(cfg)
    began, seconds = time.monotonic(), {}
    for name in steps_of(cfg):
        since = time.monotonic()
        if name == "stage-1":  # its cluster is deleted in the middle
            with step_process(params, name, tmp_path) as process:
                until(lambda: commits(store, "stage-1"), operator)
                assert operator.lose_cluster(f"{run}-s1-a1")
                assert process.wait(900) == 0, (tmp_path / "log").read_text()
            assert operator.ran[-2:] == [f"{run}-s1-a1", f"{run}-s1-a2"]
        elif name == "stage-2":  # the following process is killed and restarted
            with step_process(params, name, tmp_path) as process:
                until(lambda: operator.ran[-1] == f"{run}-s2-a1", operator)
                process.kill()
            assert str(run_step(name, cfg)) == "ran"
            assert operator.ran[-1] == f"{run}-s2-a1"  # no second job
        else:
            assert str(run_step(name, cfg)) == "ran", name
        seconds[name] = round(time.monotonic() - since, 1)
    print(f"{time.monotonic() - began:.0f} s, {len(operator.ran)} RayJobs: {seconds}")
    assert operator.errors == []
    assert kube.list(RAY_JOB).items == []
    until(lambda: kube.list(RAY_CLUSTER).items == [], operator)  # no GPU is held
    jobs = [name for name, step in steps_of(cfg).items() if step.kind not in STAYS_HERE]
    assert len(operator.ran) == len(jobs) + 1  # plus one for the lost cluster
    found = {name: manifest.digest for name, manifest in finished(cfg, store).items()}
    alone = load_config(whole_run / "params.yaml")
    assert found == {
        name: manifest.digest for name, manifest in finished(alone, open_store(alone)).items()
    }
    report = audit(cfg, num_episodes=2)
    assert report.ok, [(check.name, check.failures) for check in report.checks if not check.ok]


def commits(store, step):
    return [each for each in store.heads() if each.step == step]


def step_process(params, name, folder):
    return subprocess.Popen(
        [sys.executable, "-c", STEP, "step", name, "--verbose", "--params", str(params)],
        stdout=(folder / "log").open("ab"),
        stderr=subprocess.STDOUT,
    )
