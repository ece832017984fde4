"""A real API server accepts the manifests, also repeatedly, and gives the flow its permissions.

Kubernetes 1.20 gets the overlay `test`, newer versions get `kind`. The test cleans up: its objects
are in new namespaces, and objects without a namespace are not sent.
"""

import base64
import copy
import json
import os
import re
import secrets
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import pytest

from agentgym.deploy.manifests import Fleet, find_kubectl, rendered, rendered_fleet

pytestmark = pytest.mark.kubernetes

ENVS = ("babyai", "textcraft")
K8S = Path(__file__).parents[2] / "k8s"
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def overlay(kubectl):
    return "kind" if "policy/v1\n" in kubectl("api-versions") else "test"


@pytest.fixture(scope="module")
def installation(kubectl, overlay, manifests):
    name = f"agentgym-test-{secrets.token_hex(4)}"
    namespaces = (name, f"{name}-flows", f"{name}-fleets")
    objects = [
        each
        for each in rendered(overlay, installation=name, manifests=manifests)
        if not each["kind"].startswith("Cluster")
        and each["metadata"]["labels"].get("agentgym.io/environment", ENVS[0]) in ENVS
    ]
    try:
        kubectl("apply", "--server-side", "--filename=-", objects=objects)
        yield name, objects
    finally:
        for each in namespaces:
            for kind in ("deployments", "replicasets"):  # they would make new pods
                kubectl("delete", kind, "--all", "--cascade=orphan", f"--namespace={each}")
            # no episode runs: skip the drain of three minutes
            kubectl("delete", "pods", "--all", "--force", f"--namespace={each}")
        kubectl("delete", "namespace", *namespaces, "--ignore-not-found", "--timeout=100s")


def test_what_is_sent_again_changes_nothing(kubectl, installation):
    name, objects = installation

    def versions():
        kinds = "deployments,services,poddisruptionbudgets,networkpolicies,roles,rolebindings"
        found = json.loads(kubectl("get", kinds, "--all-namespaces", "--output=json"))
        return {
            (meta["namespace"], each["kind"], meta["name"]): meta.get("generation")
            for each in found["items"]
            if (meta := each["metadata"])["namespace"].startswith(name)
        }

    before = versions()
    assert {(f"{name}-fleets", "Deployment", f"env-{env}") for env in ENVS} <= before.keys()
    assert {(name, "Deployment", each) for each in ("mlflow", "prefect")} <= before.keys()
    assert (f"{name}-fleets", "Role", "agentgym-flow") in before
    kubectl("apply", "--server-side", "--filename=-", objects=objects)
    assert versions() == before


def test_every_pod_is_admitted(kubectl, installation):
    name = f"{installation[0]}-fleets"
    deadline = time.monotonic() + DEADLINE_S
    while True:
        pods = json.loads(
            kubectl("get", "pods", f"--namespace={name}", "--output=json", "-lagentgym.io/role=env")
        )["items"]
        if len(pods) == 2 * len(ENVS):
            break
        assert time.monotonic() < deadline, kubectl("get", "events", f"--namespace={name}")
        time.sleep(0.5)
    assert all(each["spec"].get("automountServiceAccountToken") is False for each in pods)


def test_a_fleet_of_a_run_lies_beside_the_others_and_goes_by_its_label(
    kubectl, installation, overlay, manifests
):
    name = f"{installation[0]}-fleets"
    fleet = Fleet(env="textcraft", run="r1", replicas=3, arguments=("--max-sessions=8",))
    objects = rendered_fleet(overlay, fleet, namespace=name, manifests=manifests)
    kubectl("apply", "--server-side", "--filename=-", objects=objects)
    kinds = "deployments,services,poddisruptionbudgets"
    mine = ("--namespace", name, "--selector", "agentgym.io/run=r1")
    found = kubectl("get", kinds, *mine, "--output=name").split()
    assert sorted(each.partition("/")[2] for each in found) == 3 * ["env-textcraft-r1"]
    kubectl("delete", kinds, *mine)
    assert kubectl("get", kinds, *mine, "--output=name") == ""
    assert "env-textcraft" in kubectl("get", "deployments", f"--namespace={name}")


def rights_of(kubectl, account, home, namespace):
    """{(resource, verb)} by `kubectl auth can-i --list`, for an account of namespace home."""
    words = ("--list", f"--as=system:serviceaccount:{home}:{account}", f"--namespace={namespace}")
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{home}", "system:authenticated")
    told = kubectl("auth", "can-i", *words, *(f"--as-group={each}" for each in groups))
    rows = (
        re.fullmatch(r"(\S*) +\[(.*?)\] +\[(.*?)\] +\[(.*?)\]", row) for row in told.splitlines()
    )
    return {(found[1], verb) for found in rows if found and found[1] for verb in found[4].split()}


def told_rights():
    """Parse the table in k8s/README.md: {(account, home, namespace): {(resource, verb)}}."""
    rows = re.findall(
        r"^\| `(agentgym-\w+)` of `([\w-]+)` \| `([\w-]+)` \| (.+?) \| ([\w, ]+) \|$",
        (K8S / "README.md").read_text(),
        re.MULTILINE,
    )
    told = defaultdict(set)
    for account, home, namespace, resources, verbs in rows:
        told[account, home, namespace] |= {
            (resource, verb)
            for resource in re.findall("`(.+?)`", resources)
            for verb in verbs.split(", ")
        }
    return told


def test_each_account_may_do_what_the_readmes_table_tells_and_nothing_else(kubectl, installation):
    """By permissions alone: this API server has none of our admission policies."""
    name, _ = installation
    told = told_rights()
    assert len(told) == 2
    homes = ("agentgym", "agentgym-flows", "agentgym-fleets")
    accounts = {("agentgym-flow", "agentgym-flows"), ("agentgym-worker", "agentgym")}
    accounts |= {("default", home) for home in homes}
    here = {each: each.replace("agentgym", name, 1) for each in homes}
    anybody = rights_of(kubectl, "nobody", "default", "default")
    found = {
        (account, home, namespace): rights_of(kubectl, account, here[home], here[namespace])
        - anybody
        for account, home in accounts
        for namespace in homes
    }
    assert {each: rights for each, rights in found.items() if rights} == told


def test_code_in_a_flows_pod_starts_no_pod_beside_logins_and_replaces_no_service(
    kubectl, installation, tmp_path
):
    """The attack: a Deployment whose pod has the worker's account and Prefect's login."""
    name, objects = installation
    fleets, flows = f"{name}-fleets", f"{name}-flows"
    flow = f"--as=system:serviceaccount:{flows}:agentgym-flow"
    (server,) = [
        each
        for each in objects
        if (each["kind"], each["metadata"]["name"]) == ("Deployment", "env-textcraft")
    ]
    evil = copy.deepcopy(server)
    pod = evil["spec"]["template"]["spec"]
    pod["serviceAccountName"] = "agentgym-worker"
    pod["containers"][0]["envFrom"] = [{"secretRef": {"name": "agentgym-prefect"}}]

    def create(namespace):
        evil["metadata"] = {"name": "evil", "namespace": namespace}
        path = tmp_path / "evil.json"
        path.write_text(json.dumps(evil))
        kubectl("create", f"--filename={path}", flow)

    def refused(*words):
        with pytest.raises(AssertionError, match="forbidden"):
            kubectl(*words, flow)

    for namespace in (name, flows):
        with pytest.raises(AssertionError, match="forbidden"):
            create(namespace)
        refused("get", "secrets", f"--namespace={namespace}")
    refused("delete", "deployment", "mlflow", f"--namespace={name}")
    patch = json.dumps({"spec": {"template": {"spec": {"serviceAccountName": "agentgym-worker"}}}})
    refused("patch", "deployment", "prefect-worker", f"--patch={patch}", f"--namespace={name}")
    # in the namespace where it may make Deployments, that account and that login do not exist
    create(fleets)
    try:
        words = ("get", "deployment", "evil", f"--namespace={fleets}", "--output=json")
        deadline = time.monotonic() + DEADLINE_S
        while "agentgym-worker" not in (said := replica_failure(json.loads(kubectl(*words)))):
            assert time.monotonic() < deadline, said
            time.sleep(0.5)
        assert "not found" in said
    finally:
        kubectl("delete", "deployment", "evil", f"--namespace={fleets}")
    there = kubectl("get", "secrets", f"--namespace={fleets}", "--output=name").split()
    assert {each.partition("-token-")[0] for each in there} <= {"secret/default"}


def moved(block, name):
    """Adapt commands of the README to an installation's namespaces, where k8s/base is applied."""
    block = re.sub(
        r"(--namespace |namespace: )agentgym(?=(-flows|-fleets)?\b)", rf"\g<1>{name}", block
    )
    return "set -e\n" + block.replace("kubectl apply --kustomize k8s/base\n", "")


def test_the_commands_that_move_an_installation_leave_no_old_right(
    kubectl, kubeconfig, installation
):
    name, _ = installation
    here = {"namespace": name}

    def old(kind, named, version="v1", **more):
        return {"apiVersion": version, "kind": kind, "metadata": {"name": named, **here}, **more}

    rbac, account = "rbac.authorization.k8s.io/v1", "agentgym-flow"
    rule = {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["create", "patch"]}
    objects = [old("ServiceAccount", account)]
    for each in (account, "agentgym-worker"):
        role = {"apiGroup": rbac.partition("/")[0], "kind": "Role", "name": each}
        subjects = [{"kind": "ServiceAccount", "name": each, **here}]
        objects += [
            old("Role", each, rbac, rules=[rule]),
            old("RoleBinding", each, rbac, roleRef=role, subjects=subjects),
        ]
    for each in ("env", "players", "flow", "prefect-clients", "rollout"):
        objects.append(old("NetworkPolicy", each, "networking.k8s.io/v1", spec={"podSelector": {}}))
    for each in ("agentgym-prefect", "agentgym-credentials", "agentgym-env-token"):
        objects.append(old("Secret", each, stringData={"KEY": each}))
    kubectl("apply", "--filename=-", objects=objects)
    anybody = rights_of(kubectl, "nobody", "default", "default")
    assert ("deployments.apps", "create") in rights_of(kubectl, account, name, name) - anybody
    said = (K8S / "README.md").read_text().partition("### Upgrade an older installation")[2]
    block = re.search(r"```\n(.*?)```", said, re.DOTALL)[1]
    paths = f"{Path(find_kubectl()).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", moved(block, name)],
        env={**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for each in (account, "agentgym-worker"):
        assert rights_of(kubectl, each, name, name) == anybody
    words = ("get", "secrets", f"--namespace={name}-flows", "--output=json")
    found = {
        each["metadata"]["name"]: base64.b64decode(each["data"].get("KEY", "")).decode()
        for each in json.loads(kubectl(*words))["items"]
    }
    for each in ("agentgym-prefect", "agentgym-credentials"):
        assert found[each] == each
    assert "agentgym-fleet-key" in found


def replica_failure(deployment):
    """Return the reason why a Deployment's pods are not created."""
    conditions = deployment.get("status", {}).get("conditions", ())
    return " ".join(each["message"] for each in conditions if each["type"] == "ReplicaFailure")
