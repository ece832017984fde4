"""The test node handles a pod as a kubelet does: it runs, probes, restarts, drains and ends it, and
reports its status.
"""

import json
import os
import secrets
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.kubernetes

NAMESPACE = f"node-{secrets.token_hex(4)}"
DEADLINE_S = 150.0


@pytest.fixture(scope="module")
def nodes(real_nodes, kubectl):
    with real_nodes("agent-1", "agent-2", backoff=1, absent_images="^absent") as nodes:
        kubectl("create", "namespace", NAMESPACE)
        try:
            yield nodes
        finally:
            kubectl("delete", "pods", "--all", "--force", "-n", NAMESPACE)  # pods of the lost node
            kubectl("delete", "namespace", NAMESPACE, "--timeout=100s")


@pytest.fixture
def pod(nodes, kubectl):
    """pod(name, command, **container's spec) -> its status, once `when` is true of it."""

    def make(name, *command, when, pod=(), image="here", **container):
        spec = {
            "terminationGracePeriodSeconds": 2,
            "containers": [{"name": "c", "image": image, "command": command, **container}],
            **dict(pod),
        }
        meta = {"name": name, "namespace": NAMESPACE, "labels": {"app": name}}
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
        kubectl("apply", "--filename=-", objects=[made])
        return until(kubectl, name, when)

    return make


def until(kubectl, name, when):
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found = json.loads(kubectl("get", "pods", "-n", NAMESPACE, "-lapp=" + name, "-ojson"))
        status = found["items"][0]["status"] if found["items"] else None
        if when(status):
            return status
        assert time.monotonic() < deadline, (status, kubectl("get", "events", "-n", NAMESPACE))
        time.sleep(0.1)


def wait_for(what):
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ready(status):
    return any(
        (each["type"], each["status"]) == ("Ready", "True") for each in status.get("conditions", ())
    )


def waits(reason):
    def when(status):
        return any(
            each["state"].get("waiting", {}).get("reason") == reason
            for each in status.get("containerStatuses", ())
        )

    return when


def commands(text):
    """Return the local processes whose command line contains the text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_container_gets_its_variables_files_and_address(pod, kubectl):
    kubectl("create", "secret", "generic", "told", "--from-literal=key=open", "-n", NAMESPACE)
    told = {"secretKeyRef": {"name": "told", "key": "key"}}
    status = pod(
        "told",
        *("sh", "-c", 'echo "$@"; hostname; cat /run/told/key; sleep 99', "sh"),
        *("$(KEY)", "$(NAME)", "$$(KEY)", "$(NONE)"),
        when=ready,
        env=[
            {"name": "KEY", "valueFrom": told},
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        volumeMounts=[{"name": "told", "mountPath": "/run/told"}],
        pod={"volumes": [{"name": "told", "secret": {"secretName": "told"}}]},
    )
    written = "open told $(KEY) $(NONE)\ntold\nopen"
    wait_for(lambda: kubectl("logs", "told", "-n", NAMESPACE) == written)
    assert status["podIP"].startswith("10.")


def test_a_service_leads_to_the_pods_whose_probe_passes(pod, kubectl):
    serve = ("python", "-m", "http.server", "8000")
    kubectl("create", "service", "clusterip", "served", "--tcp=8000:8000", "-n", NAMESPACE)
    probe = {"httpGet": {"path": "/state/ready", "port": "http"}, "periodSeconds": 1}
    status = pod(
        "served",
        *(
            "sh",
            "-c",
            f"mkdir -p /tmp/state; cd /tmp; sleep 2; touch state/ready; {' '.join(serve)}",
        ),
        when=ready,
        readinessProbe={**probe, "failureThreshold": 1},
        ports=[{"name": "http", "containerPort": 8000}],
    )
    assert status["containerStatuses"][0]["restartCount"] == 0
    told = (
        "get",
        "endpoints",
        "served",
        "-n",
        NAMESPACE,
        "-ojsonpath={.subsets[*].addresses[*].ip}",
    )
    wait_for(lambda: kubectl(*told) == status["podIP"])
    asked = ["curl", "--silent", "--noproxy", "*", "--max-time", "5"]
    answer = [*asked, "--write-out", "%{http_code}", f"http://{status['podIP']}:8000/state/ready"]
    assert subprocess.run(answer, capture_output=True, check=True).stdout == b"200"


def test_a_container_that_crashes_is_started_again_later_and_later(pod, kubectl):
    status = pod("crash", "sh", "-c", "echo last words; exit 3", when=waits("CrashLoopBackOff"))
    container = status["containerStatuses"][0]
    assert container["restartCount"] >= 1
    assert container["lastState"]["terminated"]["exitCode"] == 3
    assert "back-off" in container["state"]["waiting"]["message"]
    assert kubectl("logs", "crash", "-n", NAMESPACE, "--previous", "--tail=1") == "last words\n"


def test_a_liveness_probe_that_fails_restarts_its_container(pod):
    probe = {"exec": {"command": ["test", "-e", "/tmp/alive"]}, "periodSeconds": 1}
    status = pod(
        "dead",
        *("sh", "-c", "touch /tmp/alive; sleep 3; rm /tmp/alive; sleep 99"),
        when=lambda status: status.get("containerStatuses", [{}])[0].get("restartCount"),
        livenessProbe={**probe, "failureThreshold": 1, "initialDelaySeconds": 1},
    )
    assert status["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] != 0


@pytest.mark.parametrize(
    ("name", "reason", "more"),
    [
        ("no-image", "ImagePullBackOff", {"image": "absent:1"}),
        (
            "no-secret",
            "CreateContainerConfigError",
            {"envFrom": [{"secretRef": {"name": "nowhere"}}]},
        ),
    ],
)
def test_what_a_container_lacks_is_told(pod, name, reason, more):
    pod(name, "sleep", "99", when=waits(reason), **more)


def test_a_pod_that_is_deleted_drains_and_then_is_gone(pod, kubectl):
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('draining', flush=True), time.sleep(1),"
        " sys.exit()))\nprint('up', flush=True); signal.pause()"
    )
    pod("drains", "python", "-c", script, when=ready, pod={"terminationGracePeriodSeconds": 30})
    wait_for(lambda: kubectl("logs", "drains", "-n", NAMESPACE) == "up\n")
    began = time.monotonic()
    kubectl("delete", "pod", "drains", "-n", NAMESPACE, "--timeout=100s")
    assert 1.0 <= time.monotonic() - began < 90.0
    assert not commands("signal.pause()")


def test_who_does_not_drain_is_killed_when_the_time_is_over(pod, kubectl):
    pod("stubborn", "sh", "-c", "trap '' TERM; sleep 98765", when=ready)
    wait_for(lambda: commands("98765"))
    kubectl("delete", "pod", "stubborn", "-n", NAMESPACE, "--timeout=90s")
    assert not commands("98765")


def test_a_job_runs_its_init_container_and_reaches_the_api_server(nodes, kubectl):
    script = (
        "from kubernetes import client, config; print(open('/scratch/first').read().strip());"
        "config.load_incluster_config(); print(client.VersionApi().get_code().platform)"
    )
    mounts = [{"name": "work", "mountPath": "/scratch"}]
    first = {"name": "i", "command": ["sh", "-c", "echo first > /scratch/first"]}
    then = {"name": "c", "command": ["python", "-c", script]}
    template = {
        "restartPolicy": "Never",
        "initContainers": [{"image": "here", "volumeMounts": mounts, **first}],
        "containers": [{"image": "here", "volumeMounts": mounts, **then}],
        "volumes": [{"name": "work", "emptyDir": {}}],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "job", "namespace": NAMESPACE},
        "spec": {"backoffLimit": 0, "template": {"spec": template}},
    }
    kubectl("apply", "--filename=-", objects=[job])
    kubectl("wait", "--for=condition=complete", "job/job", "-n", NAMESPACE, "--timeout=100s")
    assert kubectl("logs", "job/job", "-n", NAMESPACE, "--container=c").split() == [
        "first",
        "linux/amd64",
    ]


def test_a_node_that_is_killed_takes_its_containers_along(pod, nodes):
    node = {"nodeName": "agent-2"}  # no later test needs this node
    pod("lost", "sh", "-c", "sleep 87654", when=ready, pod=node)
    wait_for(lambda: commands("87654"))
    os.kill(nodes["nodes"]["agent-2"], signal.SIGKILL)
    wait_for(lambda: not commands("87654"))


def test_nodes_end_with_the_program_that_started_them_and_take_their_containers_along(pod, nodes):
    """The program is killed, as a test run may be; no later test needs nodes."""
    pod("owned", "sh", "-c", "sleep 76543", when=ready, pod={"nodeName": "agent-1"})
    wait_for(lambda: commands("76543"))
    node = psutil.Process(nodes["nodes"]["agent-1"])
    node.parent().kill()
    wait_for(lambda: not commands("76543"))
    wait_for(lambda: not node.is_running() or node.status() == psutil.STATUS_ZOMBIE)
