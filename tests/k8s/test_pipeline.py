"""The whole pipeline on a cluster, started by `prefect deployment run pipeline/kubernetes`: a real
Prefect server, its Kubernetes worker and MLflow in pods, a Job for each flow run, whose pod trains
and starts environment servers, and a store on S3.

If a run's pod is killed, the run restarts and completes; a canceled run leaves no objects.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import sys
import time
from pathlib import Path

import pytest

from services.overdue import ask

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.timeout(3600)]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    from chaos_deployed import MLFLOW, PREFECT, STATE, Deployed, forwarded
    from chaos_project import Project
    from harness import output_of, s3_bucket
finally:
    sys.path.remove(str(BENCHMARKS))

DEADLINE_S = 900.0  # for a very busy machine
BUCKET = "pipeline"
LEFT = "deployments,services,poddisruptionbudgets,endpoints,endpointslices,leases,replicasets,pods"
SMALL = {
    "env": {"options": {"levels": ["GoToRedBallNoDists"], "view": "compact", "actions": "low"}},
    "model": {
        "context_tokens": 512,
        "hidden_size": 32,
        "mlp_size": 64,
        "num_heads": 1,
        "num_kv_heads": 1,
    },
    "warm_start": {"num_demos": 8, "steps": 2, "batch_size": 4},
    "rollout": {"items_per_step": 2, "group_size": 4, "concurrency": 8, "max_new_tokens": 16},
    "horizon": {"max_turns": [4, 5], "stage_steps": [2, 4]},
    "validation": {"every": 0, "max_turns": 5},
    "evaluation": {"num_items": 4, "num_samples": 1, "k": [1]},
}
SMALL["evaluation"]["max_turns"] = 5


class Cluster:
    """Operator's tools: kubectl, Prefect's commands, and the bucket."""

    def __init__(self, project, deployed, bucket, folder):
        self.project, self.deployed, self.bucket = project, deployed, bucket
        self.home, self.times = folder / "home", {}
        self.api = f"http://{deployed.address('prefect')}/api"

    def prefect(self, *words):
        """Run `prefect WORDS` as an operator would."""
        variables = {
            "PREFECT_API_URL": self.api,
            "PREFECT_API_AUTH_STRING": self.deployed.login,
            "PREFECT_HOME": str(self.home),
            "COLUMNS": "200",
        }
        command = ["-m", "prefect", "--no-prompt", *words]
        return output_of(command, env={**os.environ, **variables}, timeout_s=180.0)

    def run(self, prefix, **more):
        """Run `prefect deployment run`. Return (flow run, its overrides)."""
        overrides = [
            f"store.uri=s3://{BUCKET}/{prefix}",
            f"kubernetes.namespace={self.deployed.fleets}",
            f"tracking.uri=http://mlflow.{self.deployed.namespace}.svc:5000",
            *("kubernetes.overlay=test", "kubernetes.ready_timeout_s=600", "env.replicas=1"),
            "kubernetes.lease_s=20",  # servers of a killed attempt count as left over after that
            *(f"{name}={value}" for name, value in more.items()),
        ]
        asked = json.dumps({"params": "k8s/params.yaml", "overrides": overrides})
        told = self.prefect("deployment", "run", "pipeline/kubernetes", "--param", f"run={asked}")
        return re.search(r"UUID: (\S+)", told)[1], overrides

    def state(self, run):
        (found,) = ask(
            f"{self.api}/flow_runs/filter",
            self.deployed.login,
            {"flow_runs": {"id": {"any_": [run]}}},
        )
        return found

    def jobs(self, run):
        label = f"prefect.io/flow-run-id={run}"
        return self.deployed.get("jobs", label, namespace=self.deployed.flows)

    def commits(self, prefix, step):
        found = self.bucket.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/steps/{step}-")
        return [row["Key"] for row in found.get("Contents", ()) if "/manifests/" in row["Key"]]

    def of_runs(self):
        """Return the names of all objects with a run's label."""
        words = ("get", LEFT, "-n", self.deployed.fleets, "-lagentgym.io/run", "--output=name")
        return self.deployed.kubectl(*words).split()

    def until(self, what, run="", seconds=DEADLINE_S):
        """Wait until what() is true and return it. Fail if the run fails."""
        deadline = time.monotonic() + seconds
        while not (found := what()):
            state = self.state(run)["state"] if run else {"type": ""}
            assert state["type"] != "FAILED", state["message"]
            assert time.monotonic() < deadline, (state, self.deployed.logs("prefect-worker"))
            time.sleep(0.5)
        return found

    def flow_pod(self, run):
        """Return the run's running pod that is not being deleted, or ""."""
        label = f"agentgym.io/role=flow,prefect.io/flow-run-id={run}"
        for pod in self.deployed.get("pods", label, namespace=self.deployed.flows):
            running = pod["status"].get("phase") == "Running"
            if running and "deletionTimestamp" not in pod["metadata"]:
                return pod["metadata"]["name"]
        return ""


def first_process(pod):
    """Return the host's pid of process 1 of a pod's container."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            hosts = (path / "root/etc/hosts").read_text().splitlines()
            spaces = (path / "status").read_text().partition("NSpid:")[2].splitlines()[0].split()
            if len(spaces) > 1 and spaces[-1] == "1" and hosts[1].split()[1] == pod:
                return int(path.name)
    raise RuntimeError(f"no process of pod {pod} is here")


@pytest.fixture(scope="module")
def cluster(real_nodes, kubectl, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployed")
    project = Project(folder, SMALL)
    volumes = {claim: folder / claim for claim in (STATE, PREFECT, MLFLOW)}
    began = time.monotonic()
    with (
        real_nodes("agent-1", app=project.folder, backoff=2) as nodes,
        s3_bucket(folder, BUCKET, nodes["gateway"]) as (bucket, variables),
    ):
        namespace = f"agentgym-{secrets.token_hex(4)}"
        deployed = Deployed(kubectl, namespace, volumes, variables)
        try:
            deployed.bring_up()
            made = Cluster(project, deployed, bucket, folder)
            made.times["deployed"] = time.monotonic() - began
            yield made
            print(json.dumps({name: round(value, 1) for name, value in made.times.items()}))
        finally:
            namespaces = (namespace, deployed.flows, deployed.fleets)
            for each in namespaces:
                for kind in ("deployments", "jobs", "pods"):
                    kubectl("delete", kind, "--all", "-n", each, "--wait=false", "--force")
            for claim in volumes:
                kubectl("delete", "persistentvolume", f"{namespace}-{claim}", "--wait=false")
            kubectl("delete", "clusterrole,clusterrolebinding", "agentgym-preflight")
            kubectl("delete", "namespace", *namespaces, "--timeout=100s")
            project.end()


def test_a_run_whose_pod_is_killed_is_brought_back_and_ends(cluster, kubeconfig):
    began = time.monotonic()
    run, overrides = cluster.run("killed")
    cluster.until(lambda: cluster.commits("killed", "stage-1"), run)
    cluster.times["first optimizer step"] = time.monotonic() - began
    pod = cluster.flow_pod(run)
    os.kill(first_process(pod), signal.SIGKILL)  # this ends the whole container
    struck = time.monotonic()
    cluster.until(lambda: cluster.flow_pod(run) not in ("", pod), run)
    cluster.times["killed, and a pod again"] = time.monotonic() - struck
    cluster.until(lambda: cluster.state(run)["state_type"] == "COMPLETED", run)
    cluster.times["killed, and done"] = time.monotonic() - struck
    assert cluster.state(run)["run_count"] == 2
    assert len(cluster.jobs(run)) == 2
    cluster.until(lambda: not cluster.of_runs(), seconds=120)
    cluster.project.environment |= {
        **cluster.deployed.credentials,
        **cluster.deployed.mlflow_login,
        "KUBECONFIG": str(kubeconfig),
        "AGENTGYM_FLEET_KEY": cluster.deployed.token,
    }
    with forwarded(cluster.deployed, "mlflow") as mlflow:
        settings = (*overrides, f"tracking.uri=http://{mlflow}")
        said = [word for each in settings for word in ("--set", each)]
        words = ("audit", "--json", "--episodes", "8", "--params", "k8s/params.yaml", *said)
        report = json.loads(cluster.project.must("-m", "agentgym", *words))
    assert [each for each in report["checks"] if not each["ok"]] == []


def test_of_a_run_that_is_cancelled_while_it_plays_nothing_is_left(cluster):
    run, _ = cluster.run("cancelled", seed=2)
    cluster.until(lambda: cluster.commits("cancelled", "initialize"), run)  # evaluates it now
    assert cluster.of_runs()
    began = time.monotonic()
    cluster.prefect("flow-run", "cancel", run)
    cluster.until(lambda: cluster.state(run)["state_type"] == "CANCELLED")
    cluster.times["cancelled, and over"] = time.monotonic() - began
    cluster.until(lambda: not (cluster.jobs(run) or cluster.of_runs()))
    cluster.until(lambda: not cluster.flow_pod(run))
    cluster.times["cancelled, and nothing is left"] = time.monotonic() - began


def test_of_a_run_that_is_cancelled_before_its_pod_starts_nothing_is_left(cluster, kubectl):
    kubectl("cordon", "agent-1")
    try:
        run, _ = cluster.run("pending", seed=3)
        cluster.until(lambda: cluster.jobs(run), run)
        began = time.monotonic()
        cluster.prefect("flow-run", "cancel", run)
        cluster.until(lambda: cluster.state(run)["state_type"] == "CANCELLED")
        cluster.until(lambda: not cluster.jobs(run))
        cluster.times["cancelled before its pod started"] = time.monotonic() - began
    finally:
        kubectl("uncordon", "agent-1")
