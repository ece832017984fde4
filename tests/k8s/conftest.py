"""The manifests as kustomize renders them, cached for the session."""

import copy
import functools
import shutil
from pathlib import Path

import pytest

from agentgym.deploy.manifests import rendered

K8S = Path(__file__).parents[2] / "k8s"
ENVS = ("babyai", "sciworld", "searchqa", "textcraft", "webarena")


@pytest.fixture(scope="session")
def manifests(tmp_path_factory):
    """Return a copy of k8s/ with the digests that the overlay gpu requires."""
    folder = tmp_path_factory.mktemp("manifests") / "k8s"
    shutil.copytree(K8S, folder)
    lines = [
        f"{env}=registry:5000/agentgym-env-{env}@sha256:{i:064x}" for i, env in enumerate(ENVS)
    ]
    lines.append(f"agentgym=registry:5000/agentgym@sha256:{9:064x}")
    (folder / "overlays/gpu/images.env").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def objects(manifests):
    """objects(overlay, *components) -> rendered objects; the caller may change them."""
    render = functools.cache(
        lambda overlay, components: rendered(overlay, components=components, manifests=manifests)
    )
    return lambda overlay, *components: copy.deepcopy(render(overlay, components))


# (verb, group/resource) of the flow's account
NEEDED = [
    (verb, resource)
    for resource in (
        "apps/deployments",
        "/services",
        "policy/poddisruptionbudgets",
        "autoscaling/horizontalpodautoscalers",
        "coordination.k8s.io/leases",
    )
    for verb in ("get", "list", "watch", "create", "patch", "delete")
]
NEEDED += [
    (verb, resource)
    for resource in ("/pods", "/events", "discovery.k8s.io/endpointslices")
    for verb in ("get", "list", "watch")
]
NEEDED += [("get", "/pods/log"), ("get", "/resourcequotas")]
NEEDED += [("create", "/secrets"), ("delete", "/secrets")]
NEEDED += [(verb, "ray.io/rayjobs") for verb in ("get", "list", "watch", "create", "delete")]
NEEDED += [(verb, "ray.io/rayclusters") for verb in ("get", "list", "watch")]
REFUSED = [
    ("create", "ray.io/rayclusters"),
    ("patch", "ray.io/rayjobs"),
    *((verb, "/secrets") for verb in ("get", "list", "watch", "update", "patch")),
    *(("create", each) for each in ("/pods", "/pods/exec", "/pods/eviction", "/configmaps")),
    *(("create", f"rbac.authorization.k8s.io/{each}") for each in ("roles", "rolebindings")),
    *((verb, "networking.k8s.io/networkpolicies") for verb in ("create", "patch", "delete")),
    *((verb, "/resourcequotas") for verb in ("create", "patch", "delete")),
    *(("create", each) for each in ("apps/daemonsets", "apps/statefulsets", "batch/jobs")),
    ("deletecollection", "apps/deployments"),
    ("delete", "/pods"),
    ("delete", "/persistentvolumeclaims"),
    ("create", "/serviceaccounts/token"),
]


@pytest.fixture(scope="session")
def rights():
    """Return the permissions that the flow needs, and those it must not have."""
    return NEEDED, REFUSED
