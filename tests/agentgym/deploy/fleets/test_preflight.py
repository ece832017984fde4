"""Tests for the preflight check: it lists all that a cluster lacks before it creates anything.
The resources that pods request are summed up as a quota counts them.
"""

import copy
import secrets

import pytest

from agentgym.deploy.fleets import preflight
from agentgym.deploy.fleets.preflight import asked, lacking, lacks, takes, terms
from agentgym.deploy.kube.calls import Forbidden, KubeError
from agentgym.deploy.kube.client import NODE, RESOURCE_QUOTA, SERVICE, connect
from agentgym.deploy.manifests import Fleet, rendered_fleet


def node(**labels):
    return {"metadata": {"labels": {k.replace("_", "."): v for k, v in labels.items()}}}


def wanting(*expressions, **selector):
    terms = [{"matchExpressions": list(expressions)}]
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    pod = {"containers": [{}], "nodeSelector": selector}
    return pod | ({"affinity": {"nodeAffinity": affinity}} if expressions else {})


@pytest.mark.parametrize(
    ("labels", "pod", "fits"),
    [
        ({}, wanting(), True),
        ({"a": "1"}, wanting(a="1"), True),
        ({"a": "2"}, wanting(a="1"), False),
        ({}, wanting({"key": "gpu", "operator": "DoesNotExist"}), True),
        ({"gpu": "x"}, wanting({"key": "gpu", "operator": "DoesNotExist"}), False),
        ({"gpu": "x"}, wanting({"key": "gpu", "operator": "Exists"}), True),
        ({"z": "b"}, wanting({"key": "z", "operator": "In", "values": ["a", "b"]}), True),
        ({"z": "c"}, wanting({"key": "z", "operator": "In", "values": ["a", "b"]}), False),
        ({"z": "c"}, wanting({"key": "z", "operator": "NotIn", "values": ["c"]}), False),
    ],
)
def test_a_node_takes_a_pod_by_its_labels(labels, pod, fits):
    assert takes(node(**labels), pod) is fits


def test_a_node_that_is_drained_takes_nothing_and_what_is_asked_for_is_told():
    assert not takes({"metadata": {}, "spec": {"unschedulable": True}}, wanting())
    pod = wanting({"key": "gpu", "operator": "In", "values": ["a", "b"]}, disk="fast")
    assert terms(pod) == ["disk=fast", "gpu In a, b"]


class Cluster:
    """Objects of a cluster, listed by kind."""

    namespace = "n"

    def __init__(self, **listed):
        self.listed = listed

    def list(self, kind, **_):
        found = self.listed[kind.kind]
        if isinstance(found, KubeError):
            raise found
        return type("Listing", (), {"items": found})


def deployment(pod):
    return {"kind": "Deployment", "metadata": {"name": "d"}, "spec": {"template": {"spec": pod}}}


def test_servers_that_ask_for_labels_or_gpus_that_no_node_has_are_named():
    plain, gpu = node(), {**node(), "status": {"allocatable": {"nvidia.com/gpu": "1"}}}
    wants_gpu = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]}
    wants_label = deployment(wanting(disk="fast"))
    (line,) = preflight.no_nodes(Cluster(Node=[plain, plain]), [wants_label])
    assert line == (
        "d: none of 2 nodes has the labels it asks for (disk=fast); label nodes, or change the"
        " overlay"
    )
    (line,) = preflight.no_nodes(Cluster(Node=[plain]), [deployment(wants_gpu)])
    assert line.startswith("d: it asks for nvidia.com/gpu, and no node has any; install the device")
    assert preflight.no_nodes(Cluster(Node=[plain, gpu]), [deployment(wants_gpu)]) == []
    assert preflight.no_nodes(Cluster(Node=Forbidden("no")), [wants_label]) == []


@pytest.fixture(scope="module")
def objects(admin):
    return rendered_fleet(
        admin.overlay, Fleet("textcraft", "preflight", 2), namespace=admin.namespace
    )


@pytest.fixture
def flow(admin, flow_kubeconfig):
    kube = connect(kubeconfig=flow_kubeconfig, namespace=admin.namespace)
    yield kube
    kube.close()


@pytest.mark.kubernetes
def test_nothing_is_in_the_way_of_the_flows_account_and_nothing_is_left_there(flow, objects, admin):
    assert lacks(flow, objects) == []
    assert admin.find(SERVICE, "env-textcraft-preflight") is None


@pytest.mark.kubernetes
def test_an_account_without_rights_hears_which_ones(admin, flow_kubeconfig, objects):
    elsewhere = connect(kubeconfig=flow_kubeconfig, namespace="default")
    lines = lacks(elsewhere, objects)
    assert lines[0] == (
        "this account may not get, list, watch, create, patch, delete deployments.apps in"
        " namespace default; apply k8s/base, which gives those rights to agentgym-flow in"
        " agentgym-fleets, or correct kubernetes.namespace and kubernetes.context"
    )
    assert len(lines) == len(preflight.RIGHTS)
    elsewhere.close()


@pytest.mark.kubernetes
def test_a_kind_the_cluster_does_not_know_is_named(flow, objects):
    unknown = {"apiVersion": "policy/v7", "kind": "PodDisruptionBudget"}
    (line,) = lacks(flow, [*objects, unknown])
    assert "does not know PodDisruptionBudget (policy/v7); use Kubernetes 1.25 or newer" in line


@pytest.mark.kubernetes
def test_a_quota_without_room_and_what_admission_refuses_are_lines(flow, objects, admin):
    changed = copy.deepcopy(objects)
    for each in changed:
        if each["kind"] == "Deployment":
            each["spec"]["replicas"] = 500
        if each["kind"] == "Service":
            each["spec"]["type"] = "Nonsense"
    refusal, *quotas = lacks(flow, changed)
    assert refusal.startswith("apply of Service env-textcraft-preflight: the cluster refuses it")
    assert any("quota agentgym: pods 500 is needed," in each for each in quotas)
    assert admin.list(RESOURCE_QUOTA).items


@pytest.mark.kubernetes
def test_a_namespace_that_is_missing_is_one_line(kubeconfig, admin):
    name = f"agentgym-nowhere-{secrets.token_hex(4)}"
    kube = connect(kubeconfig=kubeconfig, namespace=name)
    there = rendered_fleet(admin.overlay, Fleet("textcraft", "preflight", 2), namespace=name)
    assert lacks(kube, there) == [
        f"namespace {name} is missing; make it: kubectl apply --kustomize k8s/base"
    ]
    assert kube.list(NODE).items
    kube.close()


def sized(replicas, **requests):
    container = {"resources": {"requests": requests, "limits": {"memory": "1Gi"}}}
    return {
        "kind": "Deployment",
        "spec": {"replicas": replicas, "template": {"spec": {"containers": [container]}}},
    }


def test_a_quota_is_asked_for_all_servers_together():
    objects = [
        sized(3, cpu="500m", memory="512Mi"),
        sized(2, cpu="1", memory="1Gi"),
        {"kind": "Service"},
    ]
    needed = asked(objects)
    assert needed["pods"] == 5
    assert needed["requests.cpu"] == needed["cpu"] == 3.5
    assert needed["requests.memory"] == 3.5 * 2**30
    assert needed["limits.memory"] == 5 * 2**30
    assert needed["services"] == 1
    quota = {
        "metadata": {"name": "q"},
        "status": {
            "hard": {"pods": "8", "requests.cpu": "4", "requests.memory": "64Gi"},
            "used": {"pods": "4", "requests.cpu": "500m"},
        },
    }
    (line,) = lacking([quota], needed)
    assert line.startswith("quota q: pods 5 is needed, 4 of 8 is left; end what is no longer")
    assert lacking([], needed) == []
