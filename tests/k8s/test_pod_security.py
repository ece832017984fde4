"""Every pod of this project is admitted by the Pod Security level `restricted`."""

import copy
import json
from pathlib import Path

import pytest

from agentgym.config import load_config
from agentgym.deploy.attempts import Job
from agentgym.deploy.rayjob import rayjob

pytestmark = pytest.mark.integration  # kubectl renders the manifests

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "k8s/prefect/base-job-template.json"
BASELINE_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
    *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
SAFE_SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies"),
    *("net.ipv4.ping_group_range", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_keepalive_time"),
    *("net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes"),
}
VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}
SELINUX = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def containers(spec):
    return [
        each
        for kind in ("containers", "initContainers", "ephemeralContainers")
        for each in spec.get(kind, ())
    ]


def contexts(spec):
    """Return the security contexts of the pod and of each container."""
    return [each.get("securityContext", {}) for each in (spec, *containers(spec))]


def everywhere(spec, name, allowed):
    """Check that the pod's value, if any, and each container's effective value are allowed."""
    pod, *own = [each.get(name) for each in contexts(spec)]
    return (pod is None or pod in allowed) and all(
        (pod if each is None else each) in allowed for each in own
    )


def nowhere(spec, name, forbidden):
    return not any(each.get(name) in forbidden for each in contexts(spec))


def kinds(spec, name):
    return [each[name].get("type", "") for each in contexts(spec) if name in each]


def seccomp(spec):
    pod, *own = [each.get("seccompProfile", {}).get("type") for each in contexts(spec)]
    good = ("RuntimeDefault", "Localhost")
    return pod in (None, *good) and all((each or pod) in good for each in own)


def capabilities(spec, name):
    return [
        set(each.get("securityContext", {}).get("capabilities", {}).get(name, ()))
        for each in containers(spec)
    ]


def hosts_asked(spec):
    """Return the hosts of probes and hooks that differ from the pod."""
    handlers = [
        handler
        for each in containers(spec)
        for handler in (
            *(each.get(f"{kind}Probe", {}) for kind in ("startup", "readiness", "liveness")),
            *each.get("lifecycle", {}).values(),
        )
    ]
    return [
        handler[kind]["host"]
        for handler in handlers
        for kind in ("httpGet", "tcpSocket")
        if handler.get(kind, {}).get("host")
    ]


# rule -> check of a pod; the names are those of the levels, `baseline` first
RULES = {
    "HostProcess": lambda spec: (
        not any(each.get("windowsOptions", {}).get("hostProcess") for each in contexts(spec))
    ),
    "Host Namespaces": lambda spec: (
        not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
    ),
    "Privileged Containers": lambda spec: nowhere(spec, "privileged", (True,)),
    "Capabilities (baseline)": lambda spec: all(
        each <= BASELINE_CAPABILITIES for each in capabilities(spec, "add")
    ),
    "HostPath Volumes": lambda spec: (
        not any("hostPath" in each for each in spec.get("volumes", ()))
    ),
    "Host Ports": lambda spec: (
        not any(port.get("hostPort") for each in containers(spec) for port in each.get("ports", ()))
    ),
    "Host Probes / Lifecycle Hooks": lambda spec: not hosts_asked(spec),
    "AppArmor": lambda spec: set(kinds(spec, "appArmorProfile")) <= {"RuntimeDefault", "Localhost"},
    "SELinux": lambda spec: (
        set(kinds(spec, "seLinuxOptions")) <= SELINUX
        and not any(
            each.get("seLinuxOptions", {}).get(name)
            for each in contexts(spec)
            for name in ("user", "role")
        )
    ),
    "/proc Mount Type": lambda spec: (
        not any(each.get("procMount", "Default") != "Default" for each in contexts(spec))
    ),
    "Seccomp (baseline)": lambda spec: "Unconfined" not in kinds(spec, "seccompProfile"),
    "Sysctls": lambda spec: (
        {each["name"] for each in spec.get("securityContext", {}).get("sysctls", ())}
        <= SAFE_SYSCTLS
    ),
    "Volume Types": lambda spec: all(
        len(set(each) & VOLUMES) == 1 for each in spec.get("volumes", ())
    ),
    "Privilege Escalation": lambda spec: all(
        each.get("securityContext", {}).get("allowPrivilegeEscalation") is False
        for each in containers(spec)
    ),
    "Running as Non-root": lambda spec: everywhere(spec, "runAsNonRoot", (True,)),
    "Running as Non-root user": lambda spec: nowhere(spec, "runAsUser", (0,)),
    "Seccomp": seccomp,
    "Capabilities": lambda spec: (
        all("ALL" in each for each in capabilities(spec, "drop"))
        and all(each <= {"NET_BIND_SERVICE"} for each in capabilities(spec, "add"))
    ),
}


def changed(spec, place, change):
    """Return a pod with one changed value; None removes the value."""
    result = copy.deepcopy(spec)
    container = result["containers"][0]
    if place == "init":
        result["initContainers"] = [{"name": "init", "image": "x"}]
        container = result["initContainers"][0]
    targets = {
        "pod": result,
        "pod context": result["securityContext"],
        "context": container.get("securityContext"),
    }
    target = targets.get(place, container)
    target.update(change)
    for name in [name for name, value in change.items() if value is None]:
        del target[name]
    return result


# (violated rule, location, new value)
CHANGES = [
    ("HostProcess", "pod context", {"windowsOptions": {"hostProcess": True}}),
    ("Host Namespaces", "pod", {"hostNetwork": True}),
    ("Host Namespaces", "pod", {"hostPID": True}),
    ("Host Namespaces", "pod", {"hostIPC": True}),
    ("Privileged Containers", "context", {"privileged": True}),
    (
        "Capabilities (baseline)",
        "context",
        {"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}},
    ),
    ("HostPath Volumes", "pod", {"volumes": [{"name": "tmp", "hostPath": {"path": "/"}}]}),
    ("Host Ports", "container", {"ports": [{"containerPort": 8000, "hostPort": 80}]}),
    (
        "Host Probes / Lifecycle Hooks",
        "container",
        {"readinessProbe": {"httpGet": {"host": "10.0.0.1", "port": 80}}},
    ),
    ("AppArmor", "context", {"appArmorProfile": {"type": "Unconfined"}}),
    ("SELinux", "context", {"seLinuxOptions": {"type": "spc_t"}}),
    ("SELinux", "context", {"seLinuxOptions": {"user": "root"}}),
    ("/proc Mount Type", "context", {"procMount": "Unmasked"}),
    ("Seccomp (baseline)", "context", {"seccompProfile": {"type": "Unconfined"}}),
    ("Sysctls", "pod context", {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}),
    ("Volume Types", "pod", {"volumes": [{"name": "tmp", "nfs": {"server": "x", "path": "/"}}]}),
    ("Privilege Escalation", "context", {"allowPrivilegeEscalation": None}),
    ("Privilege Escalation", "init", {"securityContext": {"capabilities": {"drop": ["ALL"]}}}),
    ("Running as Non-root", "pod context", {"runAsNonRoot": None}),
    ("Running as Non-root", "context", {"runAsNonRoot": False}),
    ("Running as Non-root user", "pod context", {"runAsUser": 0}),
    ("Running as Non-root user", "context", {"runAsUser": 0}),
    ("Seccomp", "pod context", {"seccompProfile": None}),
    ("Capabilities", "context", {"capabilities": None}),
    ("Capabilities", "context", {"capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}}),
    ("Capabilities", "init", {"securityContext": {"allowPrivilegeEscalation": False}}),
]


@pytest.fixture(scope="module")
def pods(objects):
    """Return {name: pod spec} of every pod that this project starts."""
    job = json.loads(TEMPLATE.read_text())["job_configuration"]["job_manifest"]
    specs = {"flow": job["spec"]["template"]["spec"]}
    for overlay in ("kind", "gpu", "test"):
        for each in objects(overlay):
            if "template" in each.get("spec", {}):
                specs[f"{overlay} {each['metadata']['name']}"] = each["spec"]["template"]["spec"]
    return specs | of_ray()


def of_ray():
    """Return the three pods of a RayJob."""
    uris = ["store.uri=s3://bucket/runs", "tracking.uri=http://mlflow:5000", "compute=kuberay"]
    job = Job("stage-1", "0" * 64, "0" * 64, load_config(ROOT / "params.yaml", uris))
    spec = rayjob(job, job.name(1), "agentgym:1")["spec"]
    cluster = spec["rayClusterSpec"]
    groups = {"head": cluster["headGroupSpec"], "worker": cluster["workerGroupSpecs"][0]}
    found = {f"ray {name}": group["template"]["spec"] for name, group in groups.items()}
    return found | {"ray submitter": spec["submitterPodTemplate"]["spec"]}


def test_every_pod_keeps_every_rule(pods):
    assert len(pods) == 28
    kept = {(pod, rule): check(spec) for pod, spec in pods.items() for rule, check in RULES.items()}
    assert [each for each, keeps in kept.items() if not keeps] == []


def test_every_rule_can_be_broken_and_says_so(pods):
    assert {rule for rule, _, _ in CHANGES} == set(RULES)
    for rule, place, change in CHANGES:
        spec = changed(pods["kind env-babyai"], place, change)
        assert not RULES[rule](spec), (rule, place, change)


def test_no_server_writes_but_to_its_own_tmp(pods):
    for name, spec in pods.items():
        if " env-" in name:
            (container,) = spec["containers"]
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert [each["mountPath"] for each in container["volumeMounts"]] == ["/tmp"]
            (volume,) = spec["volumes"]
            assert volume["emptyDir"]["sizeLimit"]


def test_what_serves_on_a_cluster_writes_to_its_claim_and_tmp_alone(pods):
    for name in ("prefect", "prefect-worker", "mlflow"):
        spec = pods[f"kind {name}"]
        for container in containers(spec):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert {each["mountPath"] for each in container["volumeMounts"]} <= {"/state", "/tmp"}


def test_every_namespace_enforces_it(objects):
    namespaces = [each["metadata"] for each in objects("gpu") if each["kind"] == "Namespace"]
    assert {each["name"] for each in namespaces} == {
        *("agentgym", "agentgym-flows", "agentgym-fleets")
    }
    for each in namespaces:
        assert each["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
