"""A whole run on a cluster: the flow starts servers of two environments, and the scheduler spreads
them over two nodes that run them for real. The run succeeds although one pod is killed and one
node is drained during it.

The flow has only the permissions of its account.
"""

import contextlib
import importlib
import json
import os
import re
import secrets
import signal
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml

from agentgym.deploy.manifests import rendered

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.timeout(3600)]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEADLINE_S = 900.0  # for a very busy machine
TOKEN = secrets.token_hex(16)
STAGES = [4, 40]  # optimizer steps; the second stage is long enough for all disturbances
KINDS = "deployments,services,poddisruptionbudgets,endpoints,endpointslices,leases,replicasets,pods"
# for every committed optimizer step: how each episode ended and how often it was started; for those
# started more than once, the sum of the rewards, recorded and after replaying the actions
EPISODES = """
import json
from agentgym.config import load_config
from agentgym.deploy.environment import environment_servers
from agentgym.pipeline.table import finished, open_store
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.rollouts.engine import open_pool
cfg = load_config("params.yaml", [])
store, done = open_store(cfg), finished(cfg, open_store(cfg))
episodes = [
    each
    for name, final in done.items() if name.startswith("stage-")
    for commit in store.history(final.step, final.key)
    for each in decode_trajectories(store.read(commit, TRAJECTORIES))
]
async def again(pool, number, episode):
    async with pool.session(episode.item, f"again-{number}") as session:
        rewards = [(await session.step(turn.action)).reward for turn in episode.turns]
    return episode.reward, sum(rewards)
lost = [each for each in episodes if each.num_attempts > 1]
with environment_servers(cfg, False) as urls:
    with open_pool(cfg, urls, allow_expert=False) as (pool, loop, _):
        rewards = [loop.run(again(pool, *each)) for each in enumerate(lost)]
print(json.dumps([[[each.status.name, each.num_attempts] for each in episodes], rewards]))
"""


def sections(namespace):
    """Settings of a tiny run on both environments, with four servers and long stages."""
    babyai = {"levels": ["GoToRedBallNoDists"], "view": "compact", "actions": "low"}
    textcraft = {"goals": ["paper", "melon seeds"], "distractors": 0}
    on_cluster = {"deploy": "kubernetes", "replicas": 2, "max_sessions": 64}
    return {
        "env": {"options": babyai, **on_cluster},
        "model": {
            "context_tokens": 1024,
            "hidden_size": 32,
            "mlp_size": 64,
            "num_heads": 1,
            "num_kv_heads": 1,
        },
        "warm_start": {"num_demos": 8, "steps": 4, "batch_size": 4},
        "rollout": {
            "items_per_step": 4,
            "group_size": 4,
            "concurrency": 16,
            "max_new_tokens": 24,
            "observation_tokens": 64,
        },
        "horizon": {"max_turns": [5, 6], "stage_steps": STAGES},
        "validation": {"every": 0, "max_turns": 6},
        "evaluation": {"num_items": 4, "num_samples": 1, "k": [1], "max_turns": 6},
    }, {
        "mix": [{"name": "textcraft", "options": textcraft, **on_cluster}],
        "kubernetes": {"namespace": namespace, "overlay": "test", "down_timeout_s": 240.0},
    }


@pytest.fixture(scope="module")
def nodes(real_nodes):
    with real_nodes("agent-1", "agent-2", backoff=1) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def installation(nodes, kubectl):
    """Yield the name of an installation with the namespaces of k8s/base."""
    name = f"agentgym-run-{secrets.token_hex(4)}"
    fleets = f"{name}-fleets"
    objects = [
        each
        for each in rendered("test", installation=name)
        if "agentgym.io/environment" not in each["metadata"].get("labels", {})
        and each["kind"] != "Deployment"  # Prefect and MLflow: this flow needs neither
        and not each["kind"].startswith("ClusterRole")
    ]
    try:
        kubectl("apply", "--server-side", "--filename=-", objects=objects)
        yield name
    finally:
        kubectl("delete", "leases", "--all", "-n", fleets)
        for kind in ("deployments", "replicasets"):  # they would make new pods
            kubectl("delete", kind, "--all", "--cascade=orphan", "-n", fleets)
        kubectl("delete", "pods", "--all", "--force", "-n", fleets)
        kubectl("delete", "namespace", name, f"{name}-flows", fleets, "--timeout=100s")


@pytest.fixture(scope="module")
def namespace(installation):
    """Return the namespace of the fleets."""
    return f"{installation}-fleets"


@pytest.fixture(scope="module")
def account(installation, kubectl, kubeconfig, tmp_path_factory):
    """Return a kubeconfig with the permissions of the flow's account."""
    config = yaml.safe_load(Path(kubeconfig).read_text())
    token = kubectl("create", "token", "agentgym-flow", "-n", f"{installation}-flows").strip()
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    path = tmp_path_factory.mktemp("account") / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    return path


class Fleet:
    """The run's servers from an operator's view."""

    def __init__(self, kubectl, namespace):
        self.kubectl, self.namespace = kubectl, namespace

    def get(self, kinds, *selectors):
        labels = ",".join(("agentgym.io/run", *selectors))
        told = self.kubectl("get", kinds, "-n", self.namespace, f"-l{labels}", "--output=json")
        return json.loads(told)["items"]

    def ready(self, env):
        """Return {name: address} of an environment's ready pods."""
        return {
            each["metadata"]["name"]: each["status"]["podIP"]
            for each in self.get("pods", f"agentgym.io/environment={env}")
            if any(
                (c["type"], c["status"]) == ("Ready", "True")
                for c in each["status"].get("conditions", ())
            )
            and "deletionTimestamp" not in each["metadata"]
        }

    def kill_one_that_plays(self, env):
        """Kill a server with open sessions, then delete its pod. Return the pod."""
        pods = self.ready(env)
        processes = {name: server_of(address) for name, address in pods.items()}
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for name, address in pods.items():
                if metric(address, "env_sessions_active") > 0:
                    os.kill(processes[name], signal.SIGKILL)
                    self.kubectl("delete", "pod", name, "-n", self.namespace, "--force")
                    return name
            assert time.monotonic() < deadline, "nobody plays"

    def drain(self, node):
        """Drain a node like `kubectl drain`, which uses an eviction API that older servers lack:
        cordon it, and evict each pod when its budget allows. Return the pods.
        """
        self.kubectl("cordon", node)
        evicted, deadline = set(), time.monotonic() + DEADLINE_S
        while pods := [
            each["metadata"]["name"]
            for each in self.get("pods")
            if each["spec"].get("nodeName") == node
        ]:
            assert time.monotonic() < deadline, pods
            for name in set(pods) - evicted:
                meta = {"name": name, "namespace": self.namespace}
                path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
                body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": meta}
                try:
                    self.kubectl("create", f"--raw={path}", "--filename=-", raw=body)
                    evicted.add(name)
                except AssertionError as refused:
                    if "disruption budget" not in str(refused):  # 429: retry later
                        raise
            time.sleep(0.5)
        return evicted


def server_of(address):
    """Return the local process that serves in the pod with that address."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            serves = b"\0serve\0" in (path / "cmdline").read_bytes()
            if serves and f"{address} " in (path / "root/etc/hosts").read_text():
                return int(path.name)
    raise AssertionError(f"nobody serves at {address}")


def metric(address, name):
    """Return a metric's value, or 0 if the server does not respond."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(OSError):
        text = opener.open(f"http://{address}:8000/metrics", timeout=5).read().decode()
        return float(re.search(rf"^{name} (\S+)$", text, re.M)[1])
    return 0.0


def until(what, running, log):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := what()):
        assert running.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def disturbed(namespace, account, kubectl, tmp_path_factory):
    """Run with disturbances. Return (project, list of disturbances) after the run."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        Project = importlib.import_module("chaos_project").Project
    finally:
        sys.path.remove(str(BENCHMARKS))
    some, others = sections(namespace)
    project = Project(tmp_path_factory.mktemp("run"), some)
    params = project.folder / "params.yaml"
    params.write_text(yaml.safe_dump(yaml.safe_load(params.read_text()) | others))
    project.environment |= {"KUBECONFIG": str(account), "AGENTGYM_FLEET_KEY": TOKEN}
    fleet, log = Fleet(kubectl, namespace), project.scratch / "flow.log"
    running = project.start(("-m", "flows.pipeline"), log)
    did = {}
    try:

        def commits(stage):
            return list(project.state.glob(f"store/steps/{stage}-*/manifests/*.json"))

        until(lambda: commits("stage-1"), running, log)
        did["nodes"] = {each["spec"]["nodeName"] for each in fleet.get("pods")}
        before = fleet.ready("textcraft")
        for each in fleet.get("deployments", "agentgym.io/environment=textcraft"):
            name = each["metadata"]["name"]
            kubectl("scale", f"deployment/{name}", "--replicas=3", "-n", namespace)
        did["killed"] = fleet.kill_one_that_plays("babyai")

        def more_play():
            new = fleet.ready("textcraft").items() - before.items()
            return [ip for _, ip in new if metric(ip, "env_sessions_created_total") > 0]

        did["scaled"] = until(more_play, running, log)
        did["drained"] = fleet.drain("agent-2")
        did["playing"] = running.poll() is None
        did["code"] = running.wait(DEADLINE_S)
    finally:
        project.end()
    did["log"] = log.read_text()
    did["left"] = fleet.get(KINDS)
    return project, did


def test_the_run_ends_well_with_a_pod_killed_and_a_node_drained_under_it(disturbed):
    _, did = disturbed
    assert did["code"] == 0, did["log"][-3000:]
    assert did["nodes"] == {"agent-1", "agent-2"}
    assert did["playing"], "the run was over before the node was drained"
    assert did["drained"]
    assert did["scaled"]


def test_no_episode_of_a_lost_pod_was_trained_as_a_failure(disturbed):
    """Lost episodes were played again elsewhere. Replayed on local servers, each has the reward it
    was trained with, and the audit of all of them passes.
    """
    project, _ = disturbed
    params = project.folder / "params.yaml"
    here = params.read_text().replace("deploy: kubernetes", "deploy: local")
    params.write_text(here.replace("replicas: 2", "replicas: auto"))
    episodes, rewards = json.loads(project.must("-c", EPISODES).splitlines()[-1])
    assert len(episodes) == sum(STAGES) * 16
    assert {status for status, _ in episodes} <= {"TERMINATED", "MAX_TURNS", "ENV_LIMIT"}
    assert len(rewards) == sum(attempts > 1 for _, attempts in episodes) > 0
    assert [trained for trained, _ in rewards] == [played for _, played in rewards]
    report = json.loads(project.must("-m", "agentgym", "audit", "--json", "--episodes", "24"))
    assert [each for each in report["checks"] if not each["ok"]] == []


def test_of_its_servers_nothing_is_left(disturbed):
    _, did = disturbed
    assert did["left"] == []
