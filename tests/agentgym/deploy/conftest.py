"""Fixtures for an installation on a real API server, prepared as an administrator would."""

import contextlib
import secrets
import threading

import pytest
import yaml

from agentgym.config import load_config
from agentgym.deploy.kube.calls import KubeError
from agentgym.deploy.kube.client import POD, Kind, connect
from agentgym.deploy.manifests import ENVIRONMENT_LABEL, rendered

NAMESPACE = Kind("v1", "Namespace")
ACCOUNT = "agentgym-flow"


def end_pods(admin):
    """Delete terminating pods at once, as kubelets do for idle servers; hollow nodes take 10 s."""
    kube = connect(kubeconfig=admin.kubeconfig, namespace=admin.namespace)
    with contextlib.suppress(KubeError):  # the API server has stopped after the tests
        for pods in kube.watch(POD, for_s=3600.0):
            for pod in pods:
                if pod["metadata"].get("deletionTimestamp"):
                    kube.delete(POD, pod["metadata"]["name"], grace_s=0)


@pytest.fixture(scope="session")
def admin(kubeconfig):
    """A client with all rights, in the fleet namespace of a new installation."""
    name = f"agentgym-{secrets.token_hex(4)}"
    fleets = f"{name}-fleets"
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.closing(connect(kubeconfig=kubeconfig, namespace=fleets)) as kube,
    ):
        patch.setenv("AGENTGYM_FLEET_KEY", "of-the-tests")  # fleet tokens derive from it
        kube.installation = name
        newer = kube.serves(Kind("policy/v1", "PodDisruptionBudget"))
        kube.overlay = "kind" if newer else "test"
        kube.kubeconfig = kubeconfig
        try:
            for each in rendered(kube.overlay, installation=name):
                # skip cluster-wide objects and servers: these tests make their own
                labels = each["metadata"]["labels"]
                if not each["kind"].startswith("Cluster") and ENVIRONMENT_LABEL not in labels:
                    kube.apply(each)
            threading.Thread(target=end_pods, args=(kube,), daemon=True).start()
            yield kube
        finally:
            for pod in kube.list(POD).items:  # no episodes run: skip the drain period
                kube.delete(POD, pod["metadata"]["name"], grace_s=0)
            for each in (name, f"{name}-flows", fleets):
                kube.delete(NAMESPACE, each)


@pytest.fixture(scope="session")
def flow_kubeconfig(admin, tmp_path_factory):
    """A kubeconfig of the flow's account, with a token like the one its pod would get."""
    import kubernetes

    api = kubernetes.config.new_client_from_config(str(admin.kubeconfig))
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    answer = kubernetes.client.CoreV1Api(api).create_namespaced_service_account_token(
        ACCOUNT, f"{admin.installation}-flows", request
    )
    content = yaml.safe_load(admin.kubeconfig.read_text())
    context = next(
        each["context"]
        for each in content["contexts"]
        if each["name"] == content["current-context"]
    )
    content["users"] = [{"name": context["user"], "user": {"token": answer.status.token}}]
    path = tmp_path_factory.mktemp("flow") / "kubeconfig"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def cfg(admin, flow_kubeconfig, tmp_path, monkeypatch):
    """A run whose two environments have servers on the cluster, using the flow's account."""
    monkeypatch.setenv("KUBECONFIG", str(flow_kubeconfig))
    monkeypatch.setenv("AGENTGYM_FLEET_KEY", "of-the-tests")
    return load_config(
        overrides=[
            f"store.path={tmp_path}/store",
            "env.deploy=kubernetes",
            "mix=[{name: textcraft, deploy: kubernetes, replicas: 1}]",
            f"kubernetes.namespace={admin.namespace}",
            f"kubernetes.overlay={admin.overlay}",
            "kubernetes.ready_timeout_s=60",
            "kubernetes.down_timeout_s=60",
        ]
    )
