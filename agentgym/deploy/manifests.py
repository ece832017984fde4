"""The objects of `k8s/`, as kustomize renders them: a whole overlay for an administrator, or the
servers of one environment for one run.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from agentgym.config import ConfigError
from agentgym.deploy.owned import finished_process

Object = dict[str, Any]

SERVICES = "agentgym"  # namespace of Prefect and MLflow
# namespaces of flows' pods and of their servers
FLOWS, FLEETS = f"{SERVICES}-flows", f"{SERVICES}-fleets"
MANIFESTS = Path("k8s")  # relative: commands run in the project's root
ENVIRONMENT_LABEL = "agentgym.io/environment"
RUN_LABEL = "agentgym.io/run"
INSTANCE_LABEL = "app.kubernetes.io/instance"  # distinguishes fleets of one environment
NAMESPACES = re.compile(  # in JSON: as a whole value, or in the name of a service
    r'(?<="namespace": ")agentgym(?=")|(?<="kubernetes.io/metadata.name": ")agentgym(?=")'
    r'|(?<=")agentgym(?=-(?:flows|fleets)")|\bagentgym(?=(?:-flows|-fleets)?\.svc\b)'
)
FOLDERS = ("overlays", "components")
IMAGES = Path("/run/agentgym/images")  # in a flow run's pod: a file per image of overlay gpu
IMAGES_FILE = Path("overlays/gpu/images.env")
AUTOSCALE = "autoscale"  # the component that leaves the number of servers to an autoscaler
TIMEOUT_S = 60.0  # rendering asks no cluster and takes less than a second
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
MIN_REPLICAS = 2  # one may be lost or moved while the other keeps serving
DIGEST = re.compile(r"[^@]+@sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Fleet:
    """The servers of one environment for one run."""

    env: str
    run: str  # in the objects' names and in the label RUN_LABEL
    replicas: int  # with the component autoscale: the minimum
    arguments: tuple[str, ...] = ()  # of `python -m envs serve`; they override the manifest's


@dataclass(frozen=True, slots=True)
class Capacity:
    """Measured capacity of one server, if every session acts as soon as it is answered.
    `sessions` is half of what the pod admits (k8s/components), so that the sessions of a lost
    server find room.
    """

    sessions: int
    p99_ms: float  # upper bound for a step with so many on two cores; docs/results/capacity.md


CAPACITIES: Mapping[str, Capacity] = MappingProxyType(
    {
        "babyai": Capacity(sessions=128, p99_ms=125.0),
        "textcraft": Capacity(sessions=128, p99_ms=50.0),
        "searchqa": Capacity(sessions=128, p99_ms=50.0),
        "sciworld": Capacity(sessions=8, p99_ms=1000.0),
        "webarena": Capacity(sessions=8, p99_ms=1500.0),
    }
)


def replicas_for(env: str, episodes: int) -> int:
    """Return the number of servers for that many episodes in flight, at least MIN_REPLICAS.

    Errors: ConfigError for an environment whose capacity was not measured.
    """
    if env not in CAPACITIES:
        raise ConfigError(
            f"env.replicas auto: the capacity of a server of {env} is not known (known:"
            f" {', '.join(sorted(CAPACITIES))}); say how many servers"
        )
    return max(MIN_REPLICAS, math.ceil(episodes / CAPACITIES[env].sessions))


def rendered(
    overlay: str,
    *,
    components: Sequence[str] = (),
    installation: str = SERVICES,
    manifests: Path = MANIFESTS,
) -> list[Object]:
    """Return all objects of an overlay. manifests: the folder `k8s`. overlay: a folder in its
    `overlays`. components: folders in its `components` to add, for example `network/https`.
    installation: name of its three namespaces: NAME, NAME-flows and NAME-fleets.

    Errors: ConfigError without a kubectl, if there is no such overlay or component, or if the
    overlay lacks required input.
    """
    objects = _render(_kustomization(overlay, components), manifests)
    return [_renamed(obj, installation) for obj in objects]


def _renamed(obj: Object, installation: str) -> Object:
    """Return a copy of the object with `installation` for `agentgym` in our namespaces' names."""
    result: Object = json.loads(NAMESPACES.sub(installation, json.dumps(obj)))
    if obj["kind"] == "Namespace" and obj["metadata"]["name"] == SERVICES:
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
    """Return the objects of one fleet alone: Deployment, Service, PodDisruptionBudget and, with the
    component autoscale, HorizontalPodAutoscaler. overlay, components, manifests: see `rendered`.

    Objects that a namespace has once (policies, roles, quota) are not included.
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
        obj | {"metadata": obj["metadata"] | {"namespace": namespace}}
        for obj in _render(kustomization, manifests)
        if obj["metadata"].get("labels", {}).get(ENVIRONMENT_LABEL) == fleet.env
    ]
    if not objects:
        raise ConfigError(
            f"environment {fleet.env}: {manifests / 'overlays' / overlay} has no servers of it;"
            f" add it to {manifests / 'components'} and there"
        )
    return objects


def _kustomization(overlay: str, components: Sequence[str]) -> dict[str, Any]:
    """Return a kustomization of an overlay with components; its paths are relative to `k8s/`."""
    return {
        "resources": [f"overlays/{overlay}"],
        "components": [f"components/{component}" for component in components],
    }


def _patches(fleet: Fleet, *, autoscaled: bool) -> list[dict[str, Any]]:
    """Return patches that set the fleet's size, Secret and arguments, in its own objects alone."""
    target = f"{ENVIRONMENT_LABEL}={fleet.env}"

    def patch(kind: str, path: str, value: str | int) -> dict[str, Any]:
        text = yaml.safe_dump([{"op": "add", "path": path, "value": value}])
        return {"target": {"kind": kind, "labelSelector": target}, "patch": text}

    num, kind = fleet.replicas, "HorizontalPodAutoscaler" if autoscaled else "Deployment"
    sizes = {"minReplicas": num, "maxReplicas": 2 * num} if autoscaled else {"replicas": num}
    patches = [patch(kind, f"/spec/{name}", size) for name, size in sizes.items()]
    token = "/spec/template/spec/containers/0/env/0/valueFrom/secretKeyRef/name"  # noqa: S105
    patches.append(patch("Deployment", token, f"env-{fleet.env}-{fleet.run}"))
    return patches + [
        # Kubernetes reads $(NAME) as a variable and $$ as $
        patch("Deployment", "/spec/template/spec/containers/0/args/-", argument.replace("$", "$$"))
        for argument in fleet.arguments
    ]


def _render(kustomization: Mapping[str, Any], manifests: Path) -> list[Object]:
    """Return the objects that `kubectl kustomize` renders. manifests: the folder `k8s`.
    Errors: ConfigError without kubectl, for a missing folder, a failed or slow rendering, and an
    image whose digest is malformed.
    """
    kubectl = find_kubectl()
    for part in (*kustomization["resources"], *kustomization["components"]):
        if not (manifests / part / "kustomization.yaml").is_file():
            raise ConfigError(
                f"{manifests / part}: no kustomization there; name a folder of"
                f" {manifests / Path(part).parent}, and type the command in the project's root"
            )
    with tempfile.TemporaryDirectory(prefix="agentgym-k8s-") as folder:
        workdir = Path(folder)
        _lay_out(manifests.resolve(), workdir)
        (workdir / "kustomization.yaml").write_text(
            yaml.safe_dump(dict(kustomization)), encoding="utf-8"
        )
        try:
            result = finished_process([kubectl, "kustomize", folder], timeout_s=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{kubectl} kustomize did not end within {TIMEOUT_S:g} s") from None
    overlay = manifests / kustomization["resources"][0]
    if result.returncode:
        # kustomize adds `in FOLDER': ` for each folder that it entered
        reason = result.stderr.strip().rpartition("\n")[2].rpartition("': ")[2].rstrip('"')
        raise ConfigError(
            f"{overlay} cannot be rendered: {reason}; it needs kubectl 1.32 or newer ({kubectl})"
            f" and what {manifests / 'README.md'} requires for this overlay"
        )
    objects: list[Object] = list(yaml.safe_load_all(result.stdout))
    _check_digests(objects, overlay)
    return objects


def _lay_out(manifests: Path, workdir: Path) -> None:
    """Link the manifests' folders into workdir, because kustomize takes only relative paths.
    If the manifests lack IMAGES_FILE and this pod has files with image names in IMAGES, copy the
    manifests to workdir instead and write IMAGES_FILE there: a line `<file name>=<image>` each.
    """
    image_files = sorted(file for file in IMAGES.glob("[a-z]*") if file.is_file())
    if not image_files or (manifests / IMAGES_FILE).exists():
        for name in FOLDERS:
            (workdir / name).symlink_to(manifests / name)
        return
    shutil.copytree(manifests, workdir, dirs_exist_ok=True)
    lines = [f"{file.name}={file.read_text(encoding='utf-8').strip()}\n" for file in image_files]
    (workdir / IMAGES_FILE).write_text("".join(lines), encoding="utf-8")


def _check_digests(objects: Sequence[Object], overlay: Path) -> None:
    """Raise ConfigError if a Deployment names an image by a malformed digest."""
    for obj in objects:
        if obj["kind"] == "Deployment":
            for container in obj["spec"]["template"]["spec"]["containers"]:
                image = container["image"]
                if "@" in image and not DIGEST.fullmatch(image):
                    raise ConfigError(
                        f"{overlay}: image {image} of {obj['metadata']['name']}: expected"
                        " registry/name@sha256: and 64 hex digits, as the registry prints them"
                    )


def find_kubectl() -> str:
    """Return the path of `kubectl`: the one installed next to this Python, else the one on PATH.
    Errors: ConfigError with the command that installs one.
    """
    bin_folder = str(Path(sys.executable).parent)
    kubectl = shutil.which("kubectl", path=bin_folder) or shutil.which("kubectl")
    if kubectl is None:
        raise ConfigError(
            "manifests are rendered by kubectl, and there is none on PATH; install it from"
            " the checkout: pip install -e '.[cluster]'"
        )
    return kubectl
