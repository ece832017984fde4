"""What `kubectl apply -k k8s/base` would send is what the API accepts and what this project can
run.
"""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from envs.__main__ import _parser
from envs.doors import is_own
from envs.wire import TOKEN_VARIABLE

BASE = Path(__file__).parents[2] / "k8s/base"
RESOURCES = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
DOCUMENTS = [
    document for name in RESOURCES for document in yaml.safe_load_all((BASE / name).read_text())
]


def test_every_file_is_in_the_kustomization():
    assert {path.name for path in BASE.glob("*.yaml")} == {*RESOURCES, "kustomization.yaml"}


@pytest.mark.parametrize("version", ["1.29", "1.35"])
@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda document: f"{document['kind']}-{document['metadata']['name']}"
)
def test_manifests_are_what_the_api_accepts(document, version):
    kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelt_field_would_be_found():
    broken = yaml.safe_load(yaml.safe_dump(DOCUMENTS[1]))
    broken["spec"]["replicaz"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.35", strict=True)


def test_containers_start_our_own_entry_points_with_options_they_know():
    (container,) = [
        c
        for d in DOCUMENTS
        if d["kind"] == "Deployment"
        for c in d["spec"]["template"]["spec"]["containers"]
    ]
    assert container["command"][:3] == ["python", "-m", "envs"]
    arguments = _parser().parse_args([*container["command"][3:], *container["args"]])
    assert arguments.port == container["ports"][0]["containerPort"]


def test_servers_ask_for_the_token_of_a_secret_and_know_the_names_of_their_service():
    (deployment,), (service,) = (
        [d for d in DOCUMENTS if d["kind"] == kind] for kind in ("Deployment", "Service")
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (token,) = [row for row in container["env"] if row["name"] == TOKEN_VARIABLE]
    assert token == {
        "name": TOKEN_VARIABLE,
        "valueFrom": {"secretKeyRef": {"name": "agentgym-env-token", "key": "token"}},
    }
    arguments = _parser().parse_args([*container["command"][3:], *container["args"]])
    assert not arguments.no_token
    assert "create secret generic agentgym-env-token" in (BASE.parent / "README.md").read_text()
    name, namespace = (
        service["metadata"]["name"],
        yaml.safe_load((BASE / "kustomization.yaml").read_text())["namespace"],
    )
    for host in (
        name,
        f"{name}.{namespace}",
        f"{name}.{namespace}.svc",
        f"{name}.{namespace}.svc.cluster.local",
        "10.1.2.3",
    ):
        assert is_own(f"{host}:8000", "10.1.2.3", arguments.allow_host), host


def test_a_pod_lives_longer_than_its_drain():
    (pod,) = [d["spec"]["template"]["spec"] for d in DOCUMENTS if d["kind"] == "Deployment"]
    arguments = _parser().parse_args(
        [*pod["containers"][0]["command"][3:], *pod["containers"][0]["args"]]
    )
    assert pod["terminationGracePeriodSeconds"] > arguments.drain_timeout
