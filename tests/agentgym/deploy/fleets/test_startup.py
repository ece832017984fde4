"""Servers of a run on a real API server: created, awaited, explained, deleted.

The nodes are hollow: pods become ready without a container, and their addresses reach no server.
"""

import copy
import secrets

import pytest

from agentgym.deploy.fleets.fleet_lease import acquire
from agentgym.deploy.fleets.startup import (
    FleetNotReady,
    FleetTripped,
    check_breaker,
    kinds_of,
    most_pods,
    remaining,
    send,
    take_down,
    wait_ready,
)
from agentgym.deploy.kube.calls import FieldConflict
from agentgym.deploy.kube.client import DEPLOYMENT, LEASE, NODE, POD, Kind, connect
from agentgym.deploy.manifests import Fleet, rendered_fleet

pytestmark = pytest.mark.kubernetes

QUICK = {"timeout_s": 60.0, "most": 8}


@pytest.fixture(scope="module")
def planned(admin):
    """Return a function of (run, replicas) that plans the objects of a TextCraft fleet."""
    once = rendered_fleet(admin.overlay, Fleet("textcraft", "run", 1), namespace=admin.namespace)

    def make(run, replicas=1):
        objects = copy.deepcopy(once)
        for each in objects:
            for place in _mappings(each):
                for key, value in place.items():
                    if isinstance(value, str) and (value == "run" or value.endswith("-run")):
                        place[key] = value.removesuffix("run") + run
            if each["kind"] == "Deployment":
                each["spec"]["replicas"] = replicas
        return objects

    return make


def _mappings(tree):
    if isinstance(tree, dict):
        yield tree
        for value in tree.values():
            yield from _mappings(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _mappings(value)


@pytest.fixture
def run(admin):
    """The name of a run whose objects are deleted after the test."""
    name = f"r{secrets.token_hex(6)}"
    yield name
    if remaining(admin, name):
        for each in admin.list(DEPLOYMENT, labels={"agentgym.io/run": name}).items:
            admin.delete(DEPLOYMENT, each["metadata"]["name"])
        for pod in admin.list(POD, labels={"agentgym.io/run": name}).items:
            admin.delete(POD, pod["metadata"]["name"], grace_s=0)
        take_down(admin, name, timeout_s=60.0)


@pytest.fixture
def group(admin, run):
    return acquire(admin, run, ttl_s=60.0)


def deployment(admin, run):
    return admin.get(DEPLOYMENT, f"env-textcraft-{run}")


def pods_of(admin, run):
    return admin.list(POD, labels={"agentgym.io/run": run}).items


def template(objects):
    return next(each for each in objects if each["kind"] == "Deployment")["spec"]["template"]


def test_a_fleet_comes_up_changes_its_size_and_goes_without_a_trace(admin, run, group, planned):
    send(admin, group, planned(run))
    wait_ready(admin, run, **QUICK)
    before = deployment(admin, run)["metadata"]
    send(admin, group, planned(run))
    assert deployment(admin, run)["metadata"]["generation"] == before["generation"]
    assert deployment(admin, run)["metadata"]["managedFields"][0] == before["managedFields"][0]
    send(admin, group, planned(run, replicas=3))
    wait_ready(admin, run, **QUICK)
    assert len(pods_of(admin, run)) == 3
    check_breaker(admin, run, 3)
    with pytest.raises(FleetTripped, match=f"run {run} has 3 live pods, and at most 2 are its own"):
        check_breaker(admin, run, 2)
    take_down(admin, run, timeout_s=60.0)
    kinds = [*kinds_of(admin), POD, Kind("apps/v1", "ReplicaSet"), Kind("v1", "Endpoints")]
    left = {kind.kind: admin.list(kind, labels={"agentgym.io/run": run}).items for kind in kinds}
    assert left == {kind.kind: [] for kind in kinds}
    take_down(admin, run, timeout_s=60.0)  # idempotent


def test_one_delete_of_the_lease_takes_everything_away(admin, run, group, planned):
    send(admin, group, planned(run))
    admin.delete(LEASE, f"agentgym-{run}")
    for deployments in admin.watch(DEPLOYMENT, labels={"agentgym.io/run": run}, for_s=60.0):
        if not deployments:
            break
    else:
        pytest.fail("the Deployment outlived its lease")


def test_a_field_that_somebody_else_holds_is_told_before_anything_changes(
    admin, run, group, planned, kubeconfig
):
    send(admin, group, planned(run))
    other = connect(kubeconfig=kubeconfig, namespace=admin.namespace, manager="somebody")
    theirs = deployment(admin, run)
    scaled = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": theirs["metadata"]["name"]},
        "spec": {"replicas": 4},
    }
    other.apply(scaled, force=True)
    with pytest.raises(FieldConflict, match=r"spec\.replicas by somebody\. Let it give them up"):
        send(admin, group, planned(run, replicas=2))
    assert deployment(admin, run)["spec"]["replicas"] == 4
    other.close()


def test_what_no_node_takes_is_told_with_the_schedulers_words(admin, run, group, planned):
    objects = planned(run)
    template(objects)["spec"]["nodeSelector"] = {"agentgym.io/nowhere": "true"}
    send(admin, group, objects)
    with pytest.raises(FleetNotReady) as caught:
        wait_ready(admin, run, timeout_s=3.0, most=8)
    text = str(caught.value)
    assert text.startswith(f"the servers of {run} were not ready within 3 s (textcraft 0 of 1): ")
    assert "cannot be scheduled: 0/" in text
    assert "node" in text


def test_a_quota_that_is_used_up_is_told(admin, run, group, planned):
    objects = planned(run)
    container = template(objects)["spec"]["containers"][0]
    container["resources"] = {"requests": {"cpu": "1000", "memory": "1Gi"}}
    send(admin, group, objects)
    with pytest.raises(FleetNotReady, match=r"gets no pods: .*exceeded quota"):
        wait_ready(admin, run, timeout_s=3.0, most=8)


@pytest.fixture
def silent_node(admin):
    """A node without a kubelet: the test writes the status of its pods."""
    name = f"silent-{secrets.token_hex(4)}"
    admin.create(
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"silent": name}}}
    )
    admin.patch(
        NODE,
        name,
        {
            "status": {
                "conditions": [{"type": "Ready", "status": "True"}],
                "allocatable": {"cpu": "8", "memory": "16Gi", "pods": "99"},
                "capacity": {"cpu": "8", "memory": "16Gi", "pods": "99"},
            }
        },
        subresource="status",
    )
    yield name
    for pod in admin.list(POD, fields=f"spec.nodeName={name}").items:
        admin.delete(POD, pod["metadata"]["name"], grace_s=0)
    admin.delete(NODE, name)


def on_node(admin, run, group, objects, node):
    """Return the pod once it is bound to the node."""
    spec = template(objects)["spec"]
    spec["nodeSelector"] = {"silent": node}
    spec["tolerations"] = [{"operator": "Exists"}]
    send(admin, group, objects)
    for pods in admin.watch(POD, labels={"agentgym.io/run": run}, for_s=60.0):
        if bound := [each["metadata"]["name"] for each in pods if each["spec"].get("nodeName")]:
            return bound[0]
    pytest.fail("no pod was bound")


def report(admin, pod, **state):
    status = {"name": "server", "image": "x", "imageID": "", "ready": False, **state}
    admin.patch(POD, pod, {"status": {"containerStatuses": [status]}}, subresource="status")


def test_what_a_kubelet_reports_is_told_and_a_crash_loop_is_not_waited_for(
    admin, run, group, planned, silent_node
):
    pod = on_node(admin, run, group, planned(run), silent_node)
    pull = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    report(admin, pod, restartCount=0, state={"waiting": pull})
    with pytest.raises(FleetNotReady, match="cannot pull its image x: ImagePullBackOff Back-off"):
        wait_ready(admin, run, timeout_s=2.0, most=8)
    report(admin, pod, restartCount=0, state={"running": {}})
    probe = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{pod}.1"},
        "involvedObject": {
            "kind": "Pod",
            "namespace": admin.namespace,
            "name": pod,
            "uid": admin.get(POD, pod)["metadata"]["uid"],
        },
        "type": "Warning",
        "reason": "Unhealthy",
        "message": "Startup probe failed: HTTP probe failed with statuscode: 503",
    }
    admin.create(probe)
    with pytest.raises(FleetNotReady, match="runs and is not ready: Startup probe failed: HTTP"):
        wait_ready(admin, run, timeout_s=2.0, most=8)
    loop = {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}
    ended = {"terminated": {"exitCode": 1, "reason": "Error"}}
    report(admin, pod, restartCount=4, state={"waiting": loop}, lastState=ended)
    with pytest.raises(FleetNotReady, match=r"will not get ready: .* crashes, 4 times restarted:"):
        wait_ready(admin, run, timeout_s=60.0, most=8)


def test_most_pods_are_those_of_every_fleet_and_one_that_is_being_exchanged(planned):
    assert most_pods(planned("a", 3) + planned("b", 2)) == 3 + 1 + 2 + 1
    scaler = {
        "kind": "HorizontalPodAutoscaler",
        "spec": {"scaleTargetRef": {"name": "env-textcraft-a"}, "maxReplicas": 6},
    }
    assert most_pods([*planned("a", 3), scaler]) == 6 + 1
