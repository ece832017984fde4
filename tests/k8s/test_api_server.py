"""A real API server takes the manifests, as often as they are sent, and gives the flow its rights.

Of Kubernetes 1.20 it gets the overlay `test`, of a newer one `kind`. Nothing is left behind: all is
in a namespace of its own, and what has no namespace is not sent.
"""

import json
import secrets
import time

import pytest

from agentgym.deploy.manifests import Fleet, rendered, rendered_fleet

pytestmark = pytest.mark.kubernetes

ENVS = ("babyai", "textcraft")
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def overlay(kubectl):
    return "kind" if "policy/v1\n" in kubectl("api-versions") else "test"


@pytest.fixture(scope="module")
def namespace(kubectl, overlay, manifests):
    name = f"agentgym-test-{secrets.token_hex(4)}"
    objects = [
        each
        for each in rendered(overlay, namespace=name, manifests=manifests)
        if not each["kind"].startswith("Cluster")
        and each["metadata"]["labels"].get("agentgym.io/environment", ENVS[0]) in ENVS
    ]
    try:
        kubectl("apply", "--server-side", "--filename=-", objects=objects)
        yield name, objects
    finally:
        for kind in ("deployments", "replicasets"):  # then nothing makes their pods anew
            kubectl("delete", kind, "--all", "--cascade=orphan", f"--namespace={name}")
        # a drain of three minutes is not waited for: nothing plays there
        kubectl("delete", "pods", "--all", "--force", f"--namespace={name}")
        kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=100s")


def test_what_is_sent_again_changes_nothing(kubectl, namespace):
    name, objects = namespace

    def versions():
        kinds = "deployments,services,poddisruptionbudgets,networkpolicies,roles,rolebindings"
        found = json.loads(kubectl("get", kinds, f"--namespace={name}", "--output=json"))
        return {
            (each["kind"], each["metadata"]["name"]): each["metadata"].get("generation")
            for each in found["items"]
        }

    before = versions()
    assert {("Deployment", f"env-{env}") for env in ENVS} <= before.keys()
    kubectl("apply", "--server-side", "--filename=-", objects=objects)
    assert versions() == before


def test_every_pod_is_admitted(kubectl, namespace):
    name, _ = namespace
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
    kubectl, namespace, overlay, manifests
):
    name, _ = namespace
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


def test_the_flow_may_do_what_it_needs_and_is_refused_the_rest(kubeconfig, namespace, rights):
    from kubernetes import client, config

    name, _ = namespace
    config.load_kube_config(str(kubeconfig))
    reviews = client.AuthorizationV1Api()

    def may(verb, resource):
        group, _, kind = resource.partition("/")
        kind, _, subresource = kind.partition("/")
        attributes = client.V1ResourceAttributes(
            namespace=name, verb=verb, group=group, resource=kind, subresource=subresource
        )
        spec = client.V1SubjectAccessReviewSpec(
            user=f"system:serviceaccount:{name}:agentgym-flow", resource_attributes=attributes
        )
        review = client.V1SubjectAccessReview(spec=spec)
        return reviews.create_subject_access_review(review, _request_timeout=30).status.allowed

    needed, refused = rights
    assert [each for each in needed if not may(*each)] == []
    assert [each for each in refused if may(*each)] == []
