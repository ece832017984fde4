"""The objects of `k8s/`, as kustomize renders them: a whole overlay for an administrator, or the
servers of one environment for one run.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentgym.config import ConfigError

Object = dict[str, Any]

SERVICES = "agentgym"  # namespace of Prefect and MLflow
FLOWS, FLEETS = f"{SERVICES}-flows", f"{SERVICES}-fleets"  # of flows' pods, and of their servers
MANIFESTS = Path("k8s")  # of the project in whose root the command was typed
ENVIRONMENT_LABEL = "agentgym.io/environment"
RUN_LABEL = "agentgym.io/run"
INSTANCE_LABEL = "app.kubernetes.io/instance"  # keeps fleets of one environment apart
NAMESPACES = re.compile(  # in JSON: as a whole value, or in the name of a service
    r'(?<="namespace": ")agentgym(?=")|(?<="kubernetes.io/metadata.name": ")agentgym(?=")'
    r'|(?<=")agentgym(?=-(?:flows|fleets)")|\bagentgym(?=(?:-flows|-fleets)?\.svc\b)'
)
FOLDERS = ("overlays", "components")
IMAGES = Path("/run/agentgym/images")  # in a flow run's pod: the images that overlay gpu was given
IMAGES_FILE = Path("overlays/gpu/images.env")
AUTOSCALE = "autoscale"  # the component that leaves the number of servers to an autoscaler
TIMEOUT_S = 60.0  # rendering asks no cluster and takes less than a second
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
DIGEST = re.compile(r"[^@]+@sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Fleet:
    """The servers of one environment for one run."""

    env: str
    run: str  # in the objects' names and in the label RUN_LABEL
    replicas: int  # with the component autoscale: the fewest
    arguments: tuple[str, ...] = ()  # of `python -m envs serve`; they win over the manifest's


def rendered(
    overlay: str,
    *,
    components: Sequence[str] = (),
    installation: str = SERVICES,
    manifests: Path = MANIFESTS,
) -> list[Object]:
    """All objects of an overlay. components: optional ones beside it, as `network/https`.
    installation: what its three namespaces are called: NAME, NAME-flows and NAME-fleets.

    Errors: ConfigError without a kubectl, where there is no such overlay or component, and
    where the overlay lacks what it must be given.
    """
    objects = _render(_kustomization(overlay, components), manifests)
    return [_renamed(each, installation) for each in objects]


def _renamed(each: Object, installation: str) -> Object:
    """The object with other names of our namespaces, wherever it has them."""
    result: Object = json.loads(NAMESPACES.sub(installation, json.dumps(each)))
    if each["kind"] == "Namespace" and each["metadata"]["name"] == SERVICES:
        result["metadata"]["name"] = installation
    return result


def rendered_fleet(
    overlay: str,
    fleet: Fleet,
    *,
    components: Sequence[str] = (),
    namespace: str = FLEETS,
    manifests: Path = MANIFESTS,
) -> list[Object]:
    """The objects of one fleet alone: Deployment, Service, PodDisruptionBudget and, with the
    component autoscale, HorizontalPodAutoscaler.

    What a namespace holds once (policies, roles, quota) is not among them.
    Errors: ConfigError as `rendered`, for a name that Kubernetes would refuse, and for an
    environment that k8s/components does not have.
    """
    if not NAME.fullmatch(fleet.run):
        raise ConfigError(
            f"fleet {fleet.run!r}: expected at most 40 of a-z, 0-9 and -, neither first nor last -"
        )
    labels = {RUN_LABEL: fleet.run, INSTANCE_LABEL: f"env-{fleet.env}-{fleet.run}"}
    kustomization = _kustomization(overlay, components) | {
        "nameSuffix": f"-{fleet.run}",
        "labels": [{"pairs": labels, "includeSelectors": True}],
        "patches": _patches(fleet, autoscaled=AUTOSCALE in components),
    }
    objects = [
        each | {"metadata": each["metadata"] | {"namespace": namespace}}
        for each in _render(kustomization, manifests)
        if each["metadata"].get("labels", {}).get(ENVIRONMENT_LABEL) == fleet.env
    ]
    if not objects:
        raise ConfigError(
            f"environment {fleet.env}: {manifests / 'overlays' / overlay} has no servers of it;"
            f" add it to {manifests / 'components'} and there"
        )
    return objects


def _kustomization(overlay: str, components: Sequence[str]) -> dict[str, Any]:
    """What is built on an overlay; paths are relative to the folder of the manifests."""
    return {
        "resources": [f"overlays/{overlay}"],
        "components": [f"components/{each}" for each in components],
    }


def _patches(fleet: Fleet, *, autoscaled: bool) -> list[dict[str, Any]]:
    """Of the fleet's own objects; an overlay has others of their kinds."""
    patch = functools.partial(_patch_of, fleet.env)
    if autoscaled:
        bounds = {"minReplicas": fleet.replicas, "maxReplicas": 2 * fleet.replicas}
        patches = [
            patch("HorizontalPodAutoscaler", f"/spec/{name}", value)
            for name, value in bounds.items()
        ]
    else:
        patches = [patch("Deployment", "/spec/replicas", fleet.replicas)]
    token = "/spec/template/spec/containers/0/env/0/valueFrom/secretKeyRef/name"  # noqa: S105
    patches.append(patch("Deployment", token, f"env-{fleet.env}-{fleet.run}"))
    return patches + [
        # Kubernetes reads $(NAME) as a variable and $$ as $
        patch("Deployment", "/spec/template/spec/containers/0/args/-", each.replace("$", "$$"))
        for each in fleet.arguments
    ]


def _patch_of(env: str, kind: str, path: str, value: str | int) -> dict[str, Any]:
    operation = {"op": "add", "path": path, "value": value}
    target = {"kind": kind, "labelSelector": f"{ENVIRONMENT_LABEL}={env}"}
    return {"target": target, "patch": yaml.safe_dump([operation])}


def _render(kustomization: Mapping[str, Any], manifests: Path) -> list[Object]:
    """What `kubectl kustomize` makes of it. Errors: ConfigError."""
    kubectl = find_kubectl()
    for part in (*kustomization["resources"], *kustomization["components"]):
        if not (manifests / part / "kustomization.yaml").is_file():
            raise ConfigError(
                f"{manifests / part}: no kustomization there; name a folder of"
                f" {manifests / Path(part).parent}, and type the command in the project's root"
            )
    with tempfile.TemporaryDirectory(prefix="agentgym-k8s-") as folder:
        place = Path(folder)
        _lay_out(manifests.resolve(), place)
        (place / "kustomization.yaml").write_text(
            yaml.safe_dump(dict(kustomization)), encoding="utf-8"
        )
        try:
            done = subprocess.run(
                [kubectl, "kustomize", str(place)],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
                encoding="utf-8",
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{kubectl} kustomize did not end within {TIMEOUT_S:g} s") from None
    what = manifests / kustomization["resources"][0]
    if done.returncode:
        # each folder that was entered adds its own `in FOLDER': `
        reason = done.stderr.strip().rpartition("\n")[2].rpartition("': ")[2].rstrip('"')
        raise ConfigError(
            f"{what} cannot be rendered: {reason}; it needs kubectl 1.32 or newer ({kubectl}) and"
            f" what {manifests / 'README.md'} says of this overlay"
        )
    objects: list[Object] = list(yaml.safe_load_all(done.stdout))
    _check_digests(objects, what)
    return objects


def _lay_out(manifests: Path, place: Path) -> None:
    """The folders of the manifests there; kustomize takes relative paths alone. An image has no
    digests in it, its own is made later: a pod has them beside it.
    """
    beside = sorted(each for each in IMAGES.glob("[a-z]*") if each.is_file())
    if not beside or (manifests / IMAGES_FILE).exists():
        for name in FOLDERS:
            (place / name).symlink_to(manifests / name)
        return
    shutil.copytree(manifests, place, dirs_exist_ok=True)
    lines = [f"{each.name}={each.read_text(encoding='utf-8').strip()}\n" for each in beside]
    (place / IMAGES_FILE).write_text("".join(lines), encoding="utf-8")


def _check_digests(objects: Sequence[Object], what: Path) -> None:
    """Errors: ConfigError for an image whose digest is none."""
    for each in objects:
        if each["kind"] == "Deployment":
            for container in each["spec"]["template"]["spec"]["containers"]:
                image = container["image"]
                if "@" in image and not DIGEST.fullmatch(image):
                    raise ConfigError(
                        f"{what}: image {image} of {each['metadata']['name']}: expected"
                        " registry/name@sha256: and 64 hex digits, as the registry tells them"
                    )


def find_kubectl() -> str:
    """Path of `kubectl`: the one installed beside this Python, else of PATH.
    Errors: ConfigError with the command that installs one.
    """
    beside = str(Path(sys.executable).parent)
    kubectl = shutil.which("kubectl", path=beside) or shutil.which("kubectl")
    if kubectl is None:
        raise ConfigError(
            "manifests are rendered by kubectl, and there is none on PATH; install it from"
            " the checkout: pip install -e '.[cluster]'"
        )
    return kubectl
