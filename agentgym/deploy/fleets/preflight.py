"""Checks, before objects are sent, of what the cluster lacks for them: a line for each obstacle,
with its remedy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from agentgym.deploy.kube.calls import Forbidden, KubeError, NotFound
from agentgym.deploy.kube.client import NODE, RESOURCE_QUOTA, Kind, Kube, Object

GPU = "nvidia.com/gpu"
OWN = ("get", "list", "watch", "create", "patch", "delete")
SEE = ("get", "list", "watch")

# (verbs, group, plural) needed to bring a fleet up, watch it and take it down
RIGHTS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (OWN, "apps", "deployments"),
    (OWN, "", "services"),
    (OWN, "policy", "poddisruptionbudgets"),
    (OWN, "autoscaling", "horizontalpodautoscalers"),
    (OWN, "coordination.k8s.io", "leases"),
    (("create", "delete"), "", "secrets"),
    (SEE, "", "pods"),
    (("get",), "", "pods/log"),
    (("list",), "", "events"),
    (("list",), "", "resourcequotas"),
    (("list", "watch"), "discovery.k8s.io", "endpointslices"),
)


def lacks(kube: Kube, objects: Sequence[Object]) -> list[str]:
    """Return a line for each obstacle to these objects; empty if there is none.
    Unknown kinds, then missing rights, end the check early.
    Errors: KubeError, for example if the cluster does not answer.
    """
    if missing := unknown_kinds(kube, objects):
        return missing
    if refused := missing_rights(kube):
        return refused
    return [*refusals(kube, objects), *no_room(kube, objects), *no_nodes(kube, objects)]


def unknown_kinds(kube: Kube, objects: Iterable[Object]) -> list[str]:
    """Return one line with all kinds that the cluster lacks in these versions; empty if none."""
    kinds = sorted({Kind.of(obj) for obj in objects})
    unknown = [str(kind) for kind in kinds if not kube.serves(kind)]
    if not unknown:
        return []
    return [
        f"the cluster (Kubernetes {kube.version()}) does not know {', '.join(unknown)}; use"
        " Kubernetes 1.25 or newer, install what defines it (CRD), or another kubernetes.overlay"
    ]


def missing_rights(kube: Kube) -> list[str]:
    """Return a line for each resource on which this account lacks a needed right."""
    lines = []
    for verbs, group, name in RIGHTS:
        plural, _, subresource = name.partition("/")
        refused = [
            verb for verb in verbs if not kube.may(verb, group, plural, subresource=subresource)
        ]
        if refused:
            resource = f"{name}.{group}" if group else name
            lines.append(
                f"this account may not {', '.join(refused)} {resource} in namespace"
                f" {kube.namespace}; apply k8s/base, which gives those rights to agentgym-flow in"
                " agentgym-fleets, or correct kubernetes.namespace and kubernetes.context"
            )
    return lines


def refusals(kube: Kube, objects: Iterable[Object]) -> list[str]:
    """Return the API server's objections to the objects, from a dry run: for example that admission
    refuses one. If the namespace is missing, return that line alone.
    Errors: KubeError if no answer comes.
    """
    lines = []
    for obj in objects:
        try:
            kube.apply(obj, dry_run=True)
        except NotFound:
            return [
                f"namespace {kube.namespace} is missing; make it: kubectl apply --kustomize"
                " k8s/base"
            ]
        except KubeError as error:
            if error.status == 0:
                raise
            lines.append(str(error))
    return lines


def no_room(kube: Kube, objects: Sequence[Object]) -> list[str]:
    """Return a line for each resource of which a quota has too little left for the objects that do
    not exist yet. Errors: KubeError.
    """
    quotas = kube.list(RESOURCE_QUOTA).items
    if not quotas:
        return []
    new = [obj for obj in objects if kube.find(Kind.of(obj), obj["metadata"]["name"]) is None]
    return lacking(quotas, asked(new))


def asked(objects: Iterable[Object]) -> dict[str, float]:
    """Return the amounts that a ResourceQuota counts for these objects, by resource name: services,
    pods, requests.NAME, limits.NAME, cpu, memory (bytes). Only Services and Deployments count,
    without the extra pod of a Deployment that changes.
    """
    total: defaultdict[str, float] = defaultdict(float)
    for obj in objects:
        if obj["kind"] == "Service":
            total["services"] += 1
        if obj["kind"] != "Deployment":
            continue
        replicas = obj["spec"].get("replicas", 1)
        total["pods"] += replicas
        for kind in ("requests", "limits"):
            for container in obj["spec"]["template"]["spec"]["containers"]:
                for name, quantity in container.get("resources", {}).get(kind, {}).items():
                    total[f"{kind}.{name}"] += replicas * _amount(quantity)
    for name in ("cpu", "memory"):  # a quota may use either name
        total[name] = total[f"requests.{name}"]
    return total


def lacking(quotas: Sequence[Object], needed: Mapping[str, float]) -> list[str]:
    """Return a line for each resource of which a quota has less left than needed.
    needed: amount by resource name, as from `asked`.
    """
    lines = []
    for quota in quotas:
        status = quota.get("status", {})
        hard, used = status.get("hard", {}), status.get("used", {})
        for name in sorted(hard.keys() & needed.keys()):
            rest = _amount(hard[name]) - _amount(used.get(name, 0))
            if needed[name] > rest:
                lines.append(
                    f"quota {quota['metadata']['name']}: {name} {_shown(name, needed[name])} is"
                    f" needed, {_shown(name, max(0.0, rest))} of {hard[name]} is left; end what is"
                    " no longer needed (agentgym envs gc), lower env.replicas or"
                    " rollout.concurrency, or raise the quota"
                )
    return lines


def _amount(quantity: str | int | float) -> float:
    """Convert a quantity of Kubernetes, for example `500m` (0.5) or `2Gi`. Errors: ValueError."""
    from kubernetes.utils import parse_quantity

    return float(parse_quantity(quantity))


def _shown(name: str, number: float) -> str:
    return f"{number / 2**20:.0f}Mi" if "memory" in name else f"{number:g}"


def no_nodes(kube: Kube, objects: Sequence[Object]) -> list[str]:
    """Return a line for each Deployment that no node can run: no open node has the labels that its
    pods require, or none of those nodes has GPUs, which they request.
    If this account may not list nodes, return no lines: the scheduler will report it.
    """
    try:
        nodes = kube.list(NODE).items
    except Forbidden:
        return []
    lines = []
    for obj in objects:
        if obj["kind"] != "Deployment":
            continue
        pod = obj["spec"]["template"]["spec"]
        fitting = [node for node in nodes if takes(node, pod)]
        if not fitting:
            lines.append(
                f"{obj['metadata']['name']}: none of {len(nodes)} nodes has the labels it asks for"
                f" ({'; '.join(terms(pod)) or 'none'}); label nodes, or change the overlay"
            )
        elif _gpus(pod) and not any(
            float(node.get("status", {}).get("allocatable", {}).get(GPU, 0)) for node in fitting
        ):
            lines.append(
                f"{obj['metadata']['name']}: it asks for {GPU}, and no node has any; install the"
                " device plugin, or use an overlay without GPUs"
            )
    return lines


def takes(node: Object, pod: Object) -> bool:
    """Return True if a node is open to new pods and has the labels that a pod requires.
    Taints and the operators Gt and Lt are left to the scheduler.
    """
    labels = node["metadata"].get("labels", {})
    if node.get("spec", {}).get("unschedulable"):
        return False
    if not pod.get("nodeSelector", {}).items() <= labels.items():
        return False
    wanted = _terms(pod)
    return not wanted or any(
        all(_matches(labels, expression) for expression in term.get("matchExpressions", ()))
        for term in wanted
    )


def terms(pod: Object) -> list[str]:
    """Return a pod's requirements of a node's labels, for messages, for example `gpu=a100`."""
    texts = [f"{name}={value}" for name, value in pod.get("nodeSelector", {}).items()]
    for term in _terms(pod):
        for expression in term.get("matchExpressions", ()):
            values = f" {', '.join(expression['values'])}" if expression.get("values") else ""
            texts.append(f"{expression['key']} {expression['operator']}{values}")
    return texts


def _terms(pod: Object) -> list[Object]:
    affinity = pod.get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    selector_terms: list[Object] = required.get("nodeSelectorTerms", [])
    return selector_terms


def _matches(labels: Object, expression: Object) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or ()
    answers = {
        "Exists": value is not None,
        "DoesNotExist": value is None,
        "In": value in values,
        "NotIn": value not in values,
    }
    return answers.get(expression["operator"], True)  # Gt and Lt are left to the scheduler


def _gpus(pod: Object) -> bool:
    return any(
        GPU in container.get("resources", {}).get(kind, {})
        for container in pod["containers"]
        for kind in ("requests", "limits")
    )
