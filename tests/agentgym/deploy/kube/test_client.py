"""The client against a real API server, in a namespace of its own."""

import secrets

import pytest

from agentgym.deploy.kube.calls import (
    AlreadyExists,
    FieldConflict,
    KubeError,
    NotFound,
    NotServed,
    Stale,
)
from agentgym.deploy.kube.client import DEPLOYMENT, LEASE, NODE, POD, SERVICE, Kind, connect

pytestmark = pytest.mark.kubernetes


@pytest.fixture(scope="module")
def kube(kubeconfig):
    name = f"agentgym-client-{secrets.token_hex(4)}"
    kube = connect(kubeconfig=kubeconfig, namespace=name)
    kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield kube
    kube.delete(Kind("v1", "Namespace"), name)
    kube.close()


def service(name, **spec):
    ports = [{"name": "http", "port": 8000, "protocol": "TCP"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {"of": name}},
        "spec": {"clusterIP": "None", "ports": ports, **spec},
    }


def test_what_is_applied_again_changes_nothing(kube):
    first = kube.apply(service("same"))
    assert kube.apply(service("same")) == first
    assert kube.apply(service("same", publishNotReadyAddresses=True)) != first


def test_a_field_of_another_manager_is_a_conflict_until_it_is_forced(kube, kubeconfig):
    kube.apply(service("held", publishNotReadyAddresses=True))
    other = connect(kubeconfig=kubeconfig, namespace=kube.namespace, manager="somebody")
    with pytest.raises(FieldConflict, match=r"spec\.publishNotReadyAddresses by agentgym\. Let it"):
        other.apply(service("held", publishNotReadyAddresses=False))
    other.apply(service("held", publishNotReadyAddresses=False), force=True)
    with pytest.raises(FieldConflict, match=r"by somebody"):
        kube.apply(service("held", publishNotReadyAddresses=True))
    other.close()


def test_a_dry_run_makes_nothing(kube):
    assert kube.apply(service("dry"), dry_run=True)["metadata"]["name"] == "dry"
    assert kube.find(SERVICE, "dry") is None


def test_a_change_of_what_was_changed_since_is_refused(kube):
    lease = {"apiVersion": LEASE.api_version, "kind": "Lease", "metadata": {"name": "one"}}
    made = kube.create(lease)
    with pytest.raises(AlreadyExists):
        kube.create(lease)
    version = {"resourceVersion": made["metadata"]["resourceVersion"]}
    kube.patch(LEASE, "one", {"metadata": version, "spec": {"holderIdentity": "a"}})
    with pytest.raises(Stale):
        kube.patch(LEASE, "one", {"metadata": version, "spec": {"holderIdentity": "b"}})
    assert kube.get(LEASE, "one")["spec"]["holderIdentity"] == "a"


def test_only_the_object_that_was_meant_is_deleted(kube):
    made = kube.apply(service("meant"))
    with pytest.raises(Stale):
        kube.delete(SERVICE, "meant", uid="00000000-0000-0000-0000-000000000000")
    assert kube.delete(SERVICE, "meant", uid=made["metadata"]["uid"])
    assert not kube.delete(SERVICE, "meant")
    with pytest.raises(NotFound, match="look at Service meant"):
        kube.get(SERVICE, "meant")


def test_a_list_goes_by_labels_and_names_kind_and_version_in_each(kube):
    for name in ("a", "b"):
        kube.apply(service(name))
    (found,) = kube.list(SERVICE, labels={"of": "a"}).items
    assert (found["apiVersion"], found["kind"], found["metadata"]["name"]) == ("v1", "Service", "a")
    assert len(kube.list(SERVICE, labels={"of": None}).items) >= 2
    assert kube.list(NODE).items  # nodes have no namespace


def test_a_watch_tells_what_is_there_and_what_comes(kube):
    kube.apply(service("w"))
    told = []
    for services in kube.watch(SERVICE, labels={"of": "w"}, for_s=30.0, idle_s=1.0):
        now = [each["spec"].get("publishNotReadyAddresses", False) for each in services]
        if now in told:
            continue
        told.append(now)
        if now == [False]:
            kube.apply(service("w", publishNotReadyAddresses=True))
        elif now == [True]:
            kube.delete(SERVICE, "w")
        else:
            break
    assert told == [[False], [True], []]


def test_what_the_cluster_cannot_do_is_one_sentence(kube):
    with pytest.raises(NotServed, match=r"does not know Bar \(foo/v1\)"):
        kube.get(Kind("foo/v1", "Bar"), "x")
    assert not kube.serves(Kind("apps/v1", "Bar"))
    assert kube.serves(DEPLOYMENT)
    with pytest.raises(KubeError, match="apply of Service x: the cluster refuses it as invalid"):
        kube.apply(service("x", type="Nonsense"))
    assert kube.log("nobody") == ""
    assert kube.may("create", "apps", "deployments")
    assert kube.list(POD).items == []
