"""Tests for explaining from the cluster's objects why a pod is not ready."""

import pytest

from agentgym.deploy.fleets.startup import (
    Trouble,
    is_live,
    is_ready,
    num_ready,
    of_deployment,
    trouble,
    troubles,
)


def pod(*containers, conditions=(), phase="Pending", **metadata):
    return {
        "metadata": {"name": "env-a-1", "uid": "u", **metadata},
        "spec": {"nodeName": "node-1"},
        "status": {
            "phase": phase,
            "conditions": [
                {"type": kind, "status": status, "message": message}
                for kind, status, message in conditions
            ],
            "containerStatuses": [
                {"name": "server", "image": "i:1", **each} for each in containers
            ],
        },
    }


SCHEDULED = ("PodScheduled", "True", "")
BEFORE = {"terminated": {"exitCode": 1, "reason": "Error"}}


def waiting(reason, message="m", **more):
    return {"state": {"waiting": {"reason": reason, "message": message}}, **more}


@pytest.mark.parametrize(
    ("given", "text", "is_final"),
    [
        (
            pod(conditions=[("PodScheduled", "False", "0/3 nodes: 3 Insufficient\n cpu.")]),
            "env-a-1 cannot be scheduled: 0/3 nodes: 3 Insufficient cpu.",
            False,
        ),
        (pod(), "env-a-1 waits for the scheduler", False),
        (pod(conditions=[SCHEDULED]), "env-a-1 is being started on node node-1", False),
        (
            pod(waiting("ImagePullBackOff", "Back-off pulling"), conditions=[SCHEDULED]),
            "env-a-1 cannot pull its image i:1: ImagePullBackOff Back-off pulling",
            False,
        ),
        (
            pod(waiting("InvalidImageName", "no"), conditions=[SCHEDULED]),
            "env-a-1 cannot pull its image i:1: InvalidImageName no",
            True,
        ),
        (
            pod(waiting("CreateContainerConfigError", 'secret "t" not found')),
            'env-a-1 cannot be started: secret "t" not found',
            False,
        ),
        (
            pod(waiting("CrashLoopBackOff", lastState=BEFORE, restartCount=1)),
            "env-a-1 crashes, 1 times restarted: exit code 1 (Error); the last lines of its log:\n"
            "line of env-a-1",
            False,
        ),
        (
            pod({"state": {"running": {}}, "ready": False}, phase="Running"),
            "env-a-1 runs and is not ready: Startup probe failed: HTTP 503",
            False,
        ),
        (pod(phase="Failed"), "env-a-1 has failed: no reason given", False),
    ],
)
def test_each_state_is_one_sentence(given, text, is_final):
    given["status"]["conditions"] = given["status"]["conditions"] or (
        [{"type": SCHEDULED[0], "status": "True"}] if given["status"]["containerStatuses"] else []
    )
    probe = {"reason": "Unhealthy", "message": "Startup probe failed: HTTP 503"}
    found = trouble(given, [probe], log=lambda name: f"line of {name}\n")
    assert found == Trouble(text, is_final, False)


def test_a_third_crash_and_refused_options_are_not_waited_for():
    scheduled = [SCHEDULED]
    again = pod(waiting("CrashLoopBackOff", lastState=BEFORE, restartCount=3), conditions=scheduled)
    assert trouble(again).is_final
    refused = pod({"state": {"terminated": {"exitCode": 2}}}, conditions=scheduled)
    assert trouble(refused) == Trouble(
        "env-a-1 crashes, 0 times restarted: exit code 2 (no reason given)", True, True
    )
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    hungry = pod(waiting("CrashLoopBackOff", lastState=killed), conditions=scheduled)
    assert "needs more memory than its manifest gives" in trouble(hungry).text


def test_the_last_warning_of_a_pod_that_is_being_started_is_told():
    event = {"type": "Warning", "message": "MountVolume failed", "involvedObject": {"uid": "u"}}
    other = {**event, "message": "of another", "involvedObject": {"uid": "v"}}
    (found,) = troubles([pod(conditions=[SCHEDULED])], [event, other])
    assert found.text == "env-a-1 is being started on node node-1: MountVolume failed"


def test_the_worst_comes_first_and_what_is_ready_or_ends_is_no_trouble():
    ready = pod(conditions=[("Ready", "True", "")])
    ending = pod(deletionTimestamp="2026-01-01T00:00:00Z")
    final = pod(waiting("InvalidImageName"), conditions=[SCHEDULED])
    found = troubles([ready, ending, pod(), final])
    assert [each.is_final for each in found] == [True, False]
    assert is_ready(ready)
    assert not is_ready(ready | {"metadata": {"deletionTimestamp": "x"}})
    assert [is_live(each) for each in (ready, ending, pod(phase="Failed"))] == [True, False, False]


def test_servers_of_an_earlier_manifest_do_not_count():
    status = {"readyReplicas": 3, "updatedReplicas": 3, "availableReplicas": 3}
    deployment = {
        "metadata": {"name": "d", "generation": 2},
        "spec": {"replicas": 3},
        "status": {**status, "observedGeneration": 1},
    }
    assert num_ready(deployment) == 0
    deployment["status"]["observedGeneration"] = 2
    assert num_ready(deployment) == 3
    deployment["status"]["updatedReplicas"] = 1
    assert num_ready(deployment) == 1


def test_a_deployment_that_gets_no_pods_says_why():
    deployment = {"metadata": {"name": "d"}, "status": {"conditions": []}}
    assert of_deployment(deployment) is None
    deployment["status"]["conditions"] = [
        {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: agentgym"}
    ]
    assert of_deployment(deployment).text == "d gets no pods: exceeded quota: agentgym"
