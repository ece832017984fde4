"""Environment variables and files of a container on the test nodes, as its pod's specification
defines them.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api import Object, Refused
from containers import Mount

if TYPE_CHECKING:
    from pods import Pod

REFERENCE = re.compile(r"\$(?:\$|\(([-._a-zA-Z0-9]+)\))")
KEYED = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")
UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class Unresolved(Exception):
    """The container cannot be made yet; `reason` is the one in the pod's status."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def expanded(text: str, env: dict[str, str]) -> str:
    """Replace $(NAME) by the variable's value, if there is one, and $$ by $."""

    def value(found: re.Match[str]) -> str:
        return env.get(found[1], found[0]) if found[1] else "$"

    return REFERENCE.sub(value, text)


async def environment(pod: Pod, spec: Object) -> dict[str, str]:
    """Return the container's variables. Errors: Unresolved if a secret, map or key is missing."""
    env = {
        "KUBERNETES_SERVICE_HOST": "kubernetes.default.svc",
        "KUBERNETES_SERVICE_PORT": str(pod.node.api.port),
    }
    for source in spec.get("envFrom", ()):
        kind = "secret" if "secretRef" in source else "configMap"
        reference = source[f"{kind}Ref"]
        data = await _data(pod, kind, reference["name"], reference.get("optional", False))
        env |= {source.get("prefix", "") + key: each.decode() for key, each in data.items()}
    for each in spec.get("env", ()):
        if "valueFrom" in each:
            if (found := await _value(pod, spec, each["valueFrom"])) is not None:
                env[each["name"]] = found
        else:
            env[each["name"]] = expanded(each.get("value", ""), env)
    return env


async def _value(pod: Pod, spec: Object, source: Object) -> str | None:
    if "fieldRef" in source:
        return _field(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return _resource(pod, spec, source["resourceFieldRef"])
    kind = "secret" if "secretKeyRef" in source else "configMap"
    reference = source[f"{kind}KeyRef"]
    optional = reference.get("optional", False)
    data = await _data(pod, kind, reference["name"], optional)
    if reference["key"] not in data and not optional:
        raise Unresolved(
            "CreateContainerConfigError",
            f"couldn't find key {reference['key']} in {kind} {pod.namespace}/{reference['name']}",
        )
    return data[reference["key"]].decode() if reference["key"] in data else None


def _field(pod: Pod, path: str) -> str:
    meta = pod.told["metadata"]
    if keyed := KEYED.fullmatch(path):
        return meta.get(keyed[1], {}).get(keyed[2], "")
    return str(
        {
            "metadata.name": pod.name,
            "metadata.namespace": pod.namespace,
            "metadata.uid": pod.uid,
            "spec.nodeName": pod.node.name,
            "spec.serviceAccountName": pod.spec.get("serviceAccountName", "default"),
            "status.podIP": pod.address,
            "status.podIPs": pod.address,
            "status.hostIP": pod.node.bridge.gateway,
        }[path]
    )


def _resource(pod: Pod, spec: Object, reference: Object) -> str:
    """Return a limit, by default the node's capacity, in units of the divisor, rounded up."""
    which, _, name = reference["resource"].partition(".")
    found = spec.get("resources", {}).get(which, {}).get(name, pod.node.room[name])
    divisor = reference.get("divisor", "1")
    return str(-int(-_quantity(found) // _quantity("1" if divisor == "0" else divisor)))


def _quantity(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)([a-zA-Z]*)", text).groups()
    return float(number) * (UNITS[unit] if unit else 1)


async def _data(pod: Pod, kind: str, name: str, optional: bool) -> dict[str, bytes]:
    """Return the data of a secret or a config map."""
    path = f"/api/v1/namespaces/{pod.namespace}/{kind.lower()}s/{name}"
    try:
        told = await pod.node.api.call("GET", path)
    except Refused as refused:
        if refused.status != 404:
            raise
        if optional:
            return {}
        raise Unresolved(
            "CreateContainerConfigError", f'{kind.lower()} "{name}" not found'
        ) from None
    if kind == "configMap":
        return {key: each.encode() for key, each in told.get("data", {}).items()}
    data = {key: base64.b64decode(each) for key, each in told.get("data", {}).items()}
    if told.get("type") == "kubernetes.io/service-account-token":
        data.setdefault("ca.crt", pod.node.authority.encode())
    return data


async def mounts_of(pod: Pod, spec: Object) -> list[Mount]:
    """Return the container's mounts. Errors: Unresolved if a volume's object is missing."""
    pod.write_hosts()
    mounts = [Mount(pod.node.settings.app, "/app"), Mount(pod.hosts, "/etc/hosts")]
    volumes = {each["name"]: each for each in pod.spec.get("volumes", ())}
    for mount in spec.get("volumeMounts", ()):
        source = await _volume(pod, volumes[mount["name"]]) / mount.get("subPath", "")
        if not source.exists():
            source.mkdir(parents=True)
        path = mount["mountPath"].replace("/var/run/", "/run/")  # leaves the container
        mounts.append(Mount(source, path, mount.get("readOnly", False)))
    return mounts


async def _volume(pod: Pod, volume: Object) -> Path:
    folder: Path = pod.folder / "volumes" / volume["name"]
    if "hostPath" in volume:
        return Path(volume["hostPath"]["path"])
    if "persistentVolumeClaim" in volume:
        return await _claimed(pod, volume["persistentVolumeClaim"]["claimName"])
    folder.mkdir(parents=True, exist_ok=True)
    if "emptyDir" in volume:
        folder.chmod(0o777)
        return folder
    for source in volume["projected"]["sources"] if "projected" in volume else [volume]:
        for name, content in (await _files(pod, source)).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return folder


async def _files(pod: Pod, source: Object) -> dict[str, bytes]:
    if "downwardAPI" in source:
        items = source["downwardAPI"]["items"]
        return {i["path"]: _field(pod, i["fieldRef"]["fieldPath"]).encode() for i in items}
    if "serviceAccountToken" in source:
        asked = source["serviceAccountToken"]
        account = pod.spec.get("serviceAccountName", "default")
        path = f"/api/v1/namespaces/{pod.namespace}/serviceaccounts/{account}/token"
        spec = {"expirationSeconds": asked.get("expirationSeconds", 3600)}
        made = await pod.node.api.call("POST", path, {"spec": spec})
        return {asked["path"]: made["status"]["token"].encode()}
    kind = "secret" if "secret" in source else "configMap"
    reference: dict[str, Any] = source[kind]
    name = reference.get("secretName") or reference["name"]
    data = await _data(pod, kind, name, reference.get("optional", False))
    if "items" not in reference:
        return data
    return {item["path"]: data[item["key"]] for item in reference["items"]}


async def _claimed(pod: Pod, name: str) -> Path:
    """Return the folder of a claim whose volume has hostPath or local."""
    claims = f"/api/v1/namespaces/{pod.namespace}/persistentvolumeclaims"
    claim = await pod.node.api.call("GET", f"{claims}/{name}")
    if not (bound := claim["spec"].get("volumeName")):
        raise Unresolved("ContainerCreating", f'claim "{name}" has no volume yet')
    volume = (await pod.node.api.call("GET", f"/api/v1/persistentvolumes/{bound}"))["spec"]
    return Path((volume.get("hostPath") or volume["local"])["path"])
