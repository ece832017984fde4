"""What `kubectl apply -k k8s/base` would send is what the API accepts and what this project can run."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from envs.__main__ import _parser

BASE = Path(__file__).parents[2] / "k8s/base"
RESOURCES = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
DOCUMENTS = [document for name in RESOURCES for document in yaml.safe_load_all((BASE / name).read_text())]


def test_every_file_is_in_the_kustomization():
    assert {path.name for path in BASE.glob("*.yaml")} == {*RESOURCES, "kustomization.yaml"}


@pytest.mark.parametrize("version", ["1.29", "1.35"])
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: f"{document['kind']}-{document['metadata']['name']}")
def test_manifests_are_what_the_api_accepts(document, version):
    kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelt_field_would_be_found():
    broken = yaml.safe_load(yaml.safe_dump(DOCUMENTS[1]))
    broken["spec"]["replicaz"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.35", strict=True)


def test_containers_start_our_own_entry_points_with_options_they_know():
    (container,) = [c for d in DOCUMENTS if d["kind"] == "Deployment" for c in d["spec"]["template"]["spec"]["containers"]]
    assert container["command"][:3] == ["python", "-m", "envs"]
    arguments = _parser().parse_args([*container["command"][3:], *container["args"]])
    assert arguments.port == container["ports"][0]["containerPort"]


def test_a_pod_lives_longer_than_its_drain():
    (pod,) = [d["spec"]["template"]["spec"] for d in DOCUMENTS if d["kind"] == "Deployment"]
    arguments = _parser().parse_args([*pod["containers"][0]["command"][3:], *pod["containers"][0]["args"]])
    assert pod["terminationGracePeriodSeconds"] > arguments.drain_timeout
