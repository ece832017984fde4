"""What a cluster lacks for what is about to be sent there: looked at before anything is, a line for
each thing, with what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentgym.deploy.fleets.quantities import asked, lacking
from agentgym.deploy.kube import Forbidden, Kind, Kube, KubeError, NotFound
from agentgym.deploy.kube.kinds import NODE, RESOURCE_QUOTA, Object

GPU = "nvidia.com/gpu"
OWN = ("get", "list", "watch", "create", "patch", "delete")
SEE = ("get", "list", "watch")

# (verbs, group, plural) of all that bringing a fleet up, watching it and taking it down does
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
)
SLICE_RIGHTS = (("list", "watch"), "discovery.k8s.io", "endpointslices")
ENDPOINT_RIGHTS = (("list", "watch"), "", "endpoints")


def lacks(kube: Kube, objects: Sequence[Object], addresses: Kind) -> list[str]:
    """What is in the way of sending these objects; empty: nothing.
    addresses: the kind that tells where servers are.

    Errors: ApiUnreachable, Forbidden where the cluster cannot be asked at all.
    """
    if missing := unknown_kinds(kube, objects):
        return missing
    rights = [*RIGHTS, SLICE_RIGHTS if addresses.group else ENDPOINT_RIGHTS]
    if refused := missing_rights(kube, rights):
        return refused
    return [
        *refusals(kube, objects),
        *no_room(kube, objects),
        *no_nodes(kube, objects),
    ]


def unknown_kinds(kube: Kube, objects: Iterable[Object]) -> list[str]:
    """Kinds of which the cluster does not know the version."""
    kinds = sorted({Kind.of(each) for each in objects})
    unknown = [str(each) for each in kinds if not kube.serves(each)]
    if not unknown:
        return []
    major, minor = kube.version()
    return [
        f"the cluster (Kubernetes {f'{major}.{minor}' if major else 'of unknown version'}) does not"
        f" know {', '.join(unknown)}; use Kubernetes 1.25 or newer, install what defines it (CRD),"
        " or another kubernetes.overlay"
    ]


def missing_rights(kube: Kube, rights: Iterable[tuple[tuple[str, ...], str, str]]) -> list[str]:
    """A line for each resource of which this account may not do all that is needed."""
    lines = []
    for verbs, group, name in rights:
        plural, _, subresource = name.partition("/")
        refused = [
            verb for verb in verbs if not kube.may(verb, group, plural, subresource=subresource)
        ]
        if refused:
            what = f"{name}.{group}" if group else name
            lines.append(
                f"this account may not {', '.join(refused)} {what} in namespace {kube.namespace};"
                " apply k8s/base, which gives those rights to agentgym-flow in agentgym-fleets, or"
                " correct kubernetes.namespace and kubernetes.context"
            )
    return lines


def refusals(kube: Kube, objects: Iterable[Object]) -> list[str]:
    """What the API server says of each object without keeping it: admission, fields that another
    manager holds, a namespace that is missing.
    """
    lines = []
    for each in objects:
        try:
            kube.apply(each, dry_run=True)
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
    """Quotas without enough left for servers that are not there yet."""
    quotas = kube.list(RESOURCE_QUOTA).items
    if not quotas:
        return []
    new = [each for each in objects if _is_new(kube, each)]
    return lacking(quotas, asked(new))


def _is_new(kube: Kube, each: Object) -> bool:
    return kube.find(Kind.of(each), each["metadata"]["name"]) is None


def no_nodes(kube: Kube, objects: Sequence[Object]) -> list[str]:
    """Servers that no node may take, by its labels, or for want of GPUs. Where this account sees no
    nodes, the scheduler will tell.
    """
    try:
        nodes = kube.list(NODE).items
    except Forbidden:
        return []
    lines = []
    for each in objects:
        if each["kind"] != "Deployment":
            continue
        pod = each["spec"]["template"]["spec"]
        fitting = [node for node in nodes if takes(node, pod)]
        if not fitting:
            lines.append(
                f"{each['metadata']['name']}: none of {len(nodes)} nodes has the labels it asks for"
                f" ({'; '.join(terms(pod)) or 'none'}); label nodes, or change the overlay"
            )
        elif _gpus(pod) and not any(
            float(node.get("status", {}).get("allocatable", {}).get(GPU, 0)) for node in fitting
        ):
            lines.append(
                f"{each['metadata']['name']}: it asks for {GPU}, and no node has any; install the"
                " device plugin, or use an overlay without GPUs"
            )
    return lines


def takes(node: Object, pod: Object) -> bool:
    """Whether a node's labels are what a pod asks for, and it is open to new pods."""
    labels = node["metadata"].get("labels", {})
    if node.get("spec", {}).get("unschedulable"):
        return False
    if not pod.get("nodeSelector", {}).items() <= labels.items():
        return False
    wanted = _terms(pod)
    return not wanted or any(
        all(_matches(labels, each) for each in term.get("matchExpressions", ())) for term in wanted
    )


def terms(pod: Object) -> list[str]:
    """What a pod asks of a node's labels, for people."""
    said = [f"{name}={value}" for name, value in pod.get("nodeSelector", {}).items()]
    for term in _terms(pod):
        for each in term.get("matchExpressions", ()):
            values = f" {', '.join(each['values'])}" if each.get("values") else ""
            said.append(f"{each['key']} {each['operator']}{values}")
    return said


def _terms(pod: Object) -> list[Object]:
    affinity = pod.get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    found: list[Object] = required.get("nodeSelectorTerms", [])
    return found


def _matches(labels: Object, each: Object) -> bool:
    value, values, operator = labels.get(each["key"]), each.get("values", ()), each["operator"]
    if operator == "Exists":
        return value is not None
    if operator == "DoesNotExist":
        return value is None
    if operator == "In":
        return value in values
    if operator == "NotIn":
        return value not in values
    return True  # Gt and Lt: the scheduler's business


def _gpus(pod: Object) -> bool:
    return any(
        GPU in container.get("resources", {}).get(kind, {})
        for container in pod["containers"]
        for kind in ("requests", "limits")
    )
