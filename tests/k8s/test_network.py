"""The network policies allow the connections that the pipeline needs, and no others."""

import ipaddress
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration  # kubectl renders the manifests

TEMPLATE = Path(__file__).parents[2] / "k8s/prefect/base-job-template.json"
SERVICES, FLOWS, FLEETS = "agentgym", "agentgym-flows", "agentgym-fleets"
OURS = (SERVICES, FLOWS, FLEETS)


@dataclass(frozen=True)
class Pod:
    labels: dict = field(hash=False)
    namespace: str = SERVICES
    address: str = "10.244.0.7"


def role(name, namespace=SERVICES, **others):
    return Pod({"agentgym.io/role": name, **others}, namespace)


def env(name):
    return role("env", FLEETS, **{"agentgym.io/environment": name})


def outside(address):
    return Pod({}, namespace="", address=address)


FLOW, WORKER = role("flow", FLOWS), role("rollout", FLEETS)
MLFLOW, STORE, PREFECT = map(role, ("mlflow", "store", "prefect"))
STARTER, DATABASE = role("worker"), role("database")
OPERATOR = Pod({"app.kubernetes.io/name": "kuberay-operator"}, namespace="kuberay")
BABYAI, TEXTCRAFT, SEARCHQA, WEBARENA = map(env, ("babyai", "textcraft", "searchqa", "webarena"))
SITES, RETRIEVER = role("sites", FLEETS), role("retriever", FLEETS)
STRANGERS = [Pod({"app": "x"}, each) for each in OURS]
# pods that code in a flow's pod may start, with any labels
PRETENDERS = [role(each, FLEETS) for each in ("flow", "worker", "mlflow", "prefect")]
DNS = Pod({"k8s-app": "kube-dns"}, namespace="kube-system")
PROMETHEUS = Pod({"app.kubernetes.io/name": "prometheus"}, namespace="monitoring")
ELSEWHERE = Pod(FLOW.labels, namespace="default")
API_SERVER, API_NODE = outside("10.96.0.1"), outside("172.18.0.2")
INTERNET, METADATA = outside("93.184.216.34"), outside("169.254.169.254")


def selects(selector, labels):
    """Match labels as Kubernetes does; an empty selector matches all."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def is_peer(peer, pod, home):
    """Return True if a policy's peer matches the pod. home: the policy's namespace."""
    if "ipBlock" in peer:  # does not match pods: their addresses change on the way
        address = ipaddress.ip_address(pod.address)
        inside = [ipaddress.ip_network(each) for each in peer["ipBlock"].get("except", ())]
        return (
            not pod.namespace
            and address in ipaddress.ip_network(peer["ipBlock"]["cidr"])
            and not any(address in each for each in inside)
        )
    if not pod.namespace:
        return False
    namespace = {"kubernetes.io/metadata.name": pod.namespace}
    there = (
        selects(peer["namespaceSelector"], namespace)
        if "namespaceSelector" in peer
        else pod.namespace == home
    )
    return there and selects(peer.get("podSelector", {}), pod.labels)


def passes(policies, direction, pod, other, port, protocol):
    """Return True if no policy selects this pod, or one of those that do allows the connection."""
    if pod.namespace not in OURS:
        return True
    about = [
        each["spec"]
        for each in policies
        if each["metadata"]["namespace"] == pod.namespace
        and direction.capitalize() in each["spec"]["policyTypes"]
        and selects(each["spec"]["podSelector"], pod.labels)
    ]
    end = {"ingress": "from", "egress": "to"}[direction]
    return not about or any(
        (end not in rule or any(is_peer(peer, other, pod.namespace) for peer in rule[end]))
        and (
            "ports" not in rule
            or any((p["port"], p.get("protocol", "TCP")) == (port, protocol) for p in rule["ports"])
        )
        for spec in about
        for rule in spec.get(direction, ())
    )


def reaches(policies, source, target, port, protocol="TCP"):
    return passes(policies, "egress", source, target, port, protocol) and passes(
        policies, "ingress", target, source, port, protocol
    )


@pytest.fixture(scope="module")
def policies(objects):
    def of(*components):
        return [each for each in objects("gpu", *components) if each["kind"] == "NetworkPolicy"]

    return of


NEEDED = [
    *((player, server, 8000) for player in (FLOW, WORKER) for server in (BABYAI, TEXTCRAFT)),
    *((player, server, 8000) for player in (FLOW, WORKER) for server in (SEARCHQA, WEBARENA)),
    *((player, MLFLOW, 5000) for player in (FLOW, WORKER)),
    *((each, STORE, 9000) for each in (FLOW, WORKER, MLFLOW)),
    *((each, DNS, 53, protocol) for each in (FLOW, WORKER, MLFLOW) for protocol in ("UDP", "TCP")),
    *((each, DNS, 53, "UDP") for each in (STARTER, PREFECT)),
    *((each, PREFECT, 4200) for each in (FLOW, STARTER)),
    *((each, DATABASE, 5432) for each in (PREFECT, MLFLOW)),
    (OPERATOR, WORKER, 8265),
    (STARTER, API_SERVER, 443),
    (STARTER, API_NODE, 6443),
    (FLOW, API_SERVER, 443),
    (FLOW, API_NODE, 6443),
    (FLOW, WORKER, 8265),
    (WORKER, WORKER, 6379),
]
NOT_NEEDED = [
    *((BABYAI, each, 443) for each in (INTERNET, API_SERVER, METADATA)),
    *((WEBARENA, each, port) for each, port in ((INTERNET, 443), (API_NODE, 6443), (SITES, 7770))),
    (SEARCHQA, RETRIEVER, 8000),
    (BABYAI, DNS, 53, "UDP"),
    (BABYAI, TEXTCRAFT, 8000),
    (BABYAI, FLOW, 8000),
    (BABYAI, MLFLOW, 5000),
    (BABYAI, STORE, 9000),
    (FLOW, BABYAI, 22),
    (FLOW, INTERNET, 443),
    (FLOW, METADATA, 80),
    (WORKER, API_SERVER, 443),
    (WORKER, PREFECT, 4200),
    (WORKER, INTERNET, 443),
    (MLFLOW, BABYAI, 8000),
    (MLFLOW, INTERNET, 443),
    (STORE, MLFLOW, 5000),
    (STORE, INTERNET, 443),
    (PREFECT, FLOW, 8080),
    *((PREFECT, each, 443) for each in (INTERNET, API_SERVER)),
    *((STARTER, each, port) for each, port in ((INTERNET, 443), (MLFLOW, 5000), (STORE, 9000))),
    *((STARTER, each, port) for each, port in ((BABYAI, 8000), (WORKER, 8265), (DATABASE, 5432))),
    *((each, DATABASE, 5432) for each in (FLOW, WORKER, BABYAI)),
    (DATABASE, INTERNET, 443),
    (OPERATOR, WORKER, 6379),
    (OPERATOR, FLOW, 4200),
    *((each, DATABASE, 5432) for each in STRANGERS),
    *((each, WORKER, 8265) for each in STRANGERS),
    *((each, PREFECT, 4200) for each in (*STRANGERS, *PRETENDERS, WORKER)),
    *((each, MLFLOW, 5000) for each in (*STRANGERS, *PRETENDERS)),
    *((each, DATABASE, 5432) for each in PRETENDERS),
    *((each, target, 443) for each in PRETENDERS for target in (API_SERVER, INTERNET)),
    *((each, BABYAI, 8000) for each in (*STRANGERS, *PRETENDERS)),
    *((each, STORE, 9000) for each in (*STRANGERS, *PRETENDERS)),
    *((each, INTERNET, 443) for each in STRANGERS),
    (ELSEWHERE, BABYAI, 8000),
    (ELSEWHERE, MLFLOW, 5000),
    (PROMETHEUS, BABYAI, 8000),
    (INTERNET, BABYAI, 8000),
]
SERVICES = {"prefect": PREFECT, "prefect-worker": STARTER, "mlflow": MLFLOW}
WITH = {
    "autoscale": [(PROMETHEUS, BABYAI, 8000)],
    "network/https": [(FLOW, INTERNET, 443), (WORKER, INTERNET, 443), (MLFLOW, INTERNET, 443)],
    "network/retriever": [(SEARCHQA, RETRIEVER, 8000), (SEARCHQA, DNS, 53, "UDP")],
    "network/sites": [
        (WEBARENA, DNS, 53, "UDP"),
        *((WEBARENA, SITES, port) for port in (7770, 7780, 8023, 9999)),
    ],
}


def test_every_arrow_that_the_pipeline_needs_is_allowed(policies):
    assert [arrow for arrow in NEEDED if not reaches(policies(), *arrow)] == []


def test_what_it_does_not_need_is_refused(policies):
    assert len(NOT_NEEDED) >= 10
    assert [arrow for arrow in NOT_NEEDED if reaches(policies(), *arrow)] == []


@pytest.mark.parametrize("component", WITH)
def test_a_component_allows_its_own_arrows_and_no_other(policies, component):
    plain, more = policies(), policies(component)
    assert [arrow for arrow in WITH[component] if not reaches(more, *arrow)] == []
    assert [arrow for arrow in WITH[component] if reaches(plain, *arrow)] == []
    others = [arrow for arrow in NOT_NEEDED if arrow not in WITH[component]]
    assert [arrow for arrow in others if reaches(more, *arrow)] == []


@pytest.mark.parametrize("lost", range(16))
def test_no_policy_could_be_left_out(policies, lost):
    """Without any one policy, a needed connection fails or a forbidden one succeeds."""
    left = policies()
    assert len(left) == 16
    left.pop(lost)
    needed = all(reaches(left, *arrow) for arrow in NEEDED)
    refused = not any(reaches(left, *arrow) for arrow in NOT_NEEDED)
    assert not (needed and refused)


def test_pods_bear_the_labels_that_the_policies_ask_for(objects):
    job = json.loads(TEMPLATE.read_text())["job_configuration"]["job_manifest"]
    assert selects({"matchLabels": FLOW.labels}, job["spec"]["template"]["metadata"]["labels"])
    for each in objects("gpu"):
        if each["kind"] == "Deployment":
            labels = each["spec"]["template"]["metadata"]["labels"]
            if each["metadata"]["name"] in SERVICES:
                role = SERVICES[each["metadata"]["name"]]
                assert labels["agentgym.io/role"] == role.labels["agentgym.io/role"]
                continue
            assert labels["agentgym.io/role"] == "env"
            assert each["metadata"]["name"] == f"env-{labels['agentgym.io/environment']}"
