"""The objects of each overlay are valid for the API, and this project can run them."""

import copy
import json
import re
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from agentgym.config import EnvConfig
from agentgym.deploy.manifests import CAPACITIES, MIN_REPLICAS, find_kubectl
from envs.__main__ import _parser
from envs.doors import OPEN_PATHS, is_own
from envs.env import EnvSpec
from envs.server import ServerSettings, make_app
from envs.sessions import CALL_TIMEOUT_S
from envs.wire import TOKEN_VARIABLE

pytestmark = pytest.mark.integration  # kubectl renders the manifests

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
VERSIONS = ("1.36", "1.37")
OPTIONAL = (*("admission", "autoscale"), *("network/https", "network/retriever", "network/sites"))
NAMESPACES = ("agentgym", "agentgym-flows", "agentgym-fleets")
OF_NONE = (
    *("Namespace", "ClusterRole", "ClusterRoleBinding"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
)
ENVS = sorted(path.parent.name for path in (ROOT / "envs").glob("*/README.md"))


def of_kind(objects, kind):
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def fleets(objects):
    """Return the environments' Deployments by name."""
    found = of_kind(objects, "Deployment")
    return {name: each for name, each in found.items() if name.startswith("env-")}


def server(deployment):
    """Return (pod, container, the options that its command parses)."""
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "envs", "serve"]
    return pod, container, _parser().parse_args(["serve", *container["args"]])


def mib(quantity):
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()
    return int(number) * {"Mi": 1, "Gi": 1024}[unit]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_what_the_api_accepts(objects, version):
    kind = objects("kind", *OPTIONAL)
    for each in [*kind, *(each for each in objects("gpu") if each not in kind)]:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("overlay", ["kind", "gpu"])
def test_every_object_is_of_one_of_our_namespaces_unless_it_can_be_of_none(objects, overlay):
    for each in objects(overlay, *OPTIONAL):
        possible = (None,) if each["kind"] in OF_NONE else NAMESPACES
        assert each["metadata"].get("namespace") in possible
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "agentgym"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_misspelt_field_would_be_found_in_every_kind(objects, version):
    for each in {each["kind"]: each for each in objects("kind", *OPTIONAL)}.values():
        each["metadata"]["labelz"] = {}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(each, version, strict=True)


def test_every_file_is_rendered_by_somebody():
    named = set()
    for path in K8S.rglob("kustomization.yaml"):
        found = yaml.safe_load(path.read_text())
        named |= {
            (path.parent / each).resolve()
            for each in (*found.get("resources", ()), *found.get("components", ()))
        }
    offered = {K8S / f"overlays/{name}" for name in ("kind", "gpu", "test")}
    offered |= {K8S / f"components/{name}" for name in OPTIONAL}
    others = ("kustomization.yaml", "params.yaml")
    files = {path for path in K8S.rglob("*.yaml") if path.name not in others}
    folders = {path.parent for path in K8S.rglob("kustomization.yaml")}
    assert files | folders - offered == named - {K8S / "overlays/kind"}


def test_the_overlay_test_steps_down_to_kubernetes_1_20_and_changes_nothing_else(objects):
    expected = objects("kind")
    for each in expected:
        if each["kind"] == "PodDisruptionBudget":
            each["apiVersion"] = "policy/v1beta1"
            del each["spec"]["unhealthyPodEvictionPolicy"]
        if each["kind"] == "Deployment" and each["metadata"]["name"] != "prefect-worker":
            (container,) = each["spec"]["template"]["spec"]["containers"]
            port = container["ports"][0]["containerPort"]
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                path = container[name].pop("httpGet")["path"]
                ask = (
                    "import urllib.request as r;"
                    f' r.urlopen("http://127.0.0.1:{port}{path}", timeout=4)'
                )
                container[name]["exec"] = {"command": ["python", "-c", ask]}
    assert objects("test") == expected
    assert not of_kind(expected, "HorizontalPodAutoscaler")


@pytest.mark.parametrize("overlay", ["kind", "gpu"])
def test_each_environment_has_a_fleet_that_survives_a_lost_server(objects, overlay):
    found = objects(overlay)
    for kind in ("Deployment", "Service", "PodDisruptionBudget"):
        named = [name for name in of_kind(found, kind) if name.startswith("env-")]
        assert sorted(named) == [f"env-{env}" for env in ENVS]
    for name, deployment in fleets(found).items():
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        selector = deployment["spec"]["selector"]["matchLabels"]
        service = of_kind(found, "Service")[name]["spec"]
        budget = of_kind(found, "PodDisruptionBudget")[name]["spec"]
        spread = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert selector.items() <= labels.items()
        assert selector["agentgym.io/environment"] == name.removeprefix("env-")
        assert service["selector"] == budget["selector"]["matchLabels"] == selector
        assert [each["labelSelector"]["matchLabels"] for each in spread] == 2 * [selector]
        assert {each["topologyKey"] for each in spread} == {
            "kubernetes.io/hostname",
            "topology.kubernetes.io/zone",
        }
        assert service["clusterIP"] == "None"
        assert budget["maxUnavailable"] == 1
        assert deployment["spec"]["replicas"] >= MIN_REPLICAS
        assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


@pytest.mark.parametrize("env", ENVS)
def test_a_server_starts_with_options_it_knows_and_asks_for_the_token_of_a_secret(objects, env):
    pod, container, options = server(of_kind(objects("kind"), "Deployment")[f"env-{env}"])
    assert options.name == env
    assert options.port == container["ports"][0]["containerPort"]
    assert not options.no_token
    assert not options.expert  # training refuses servers with an expert
    assert container["env"] == [
        {
            "name": TOKEN_VARIABLE,
            "valueFrom": {"secretKeyRef": {"name": "agentgym-env-token", "key": TOKEN_VARIABLE}},
        }
    ]
    assert pod["automountServiceAccountToken"] is False
    hosts = (f"env-{env}", f"env-{env}.any.svc", f"env-{env}.any.svc.cluster.local", "10.1.2.3")
    for host in hosts:
        assert is_own(f"{host}:8000", "10.1.2.3", options.allow_host), host
    assert not is_own("pages.example:8000", "10.1.2.3", options.allow_host)


@pytest.mark.parametrize("env", ENVS)
def test_a_drain_is_longer_than_a_turn_and_a_pod_lives_longer_than_its_drain(objects, env):
    pod, _, options = server(of_kind(objects("kind"), "Deployment")[f"env-{env}"])
    assert options.drain_timeout > max(CALL_TIMEOUT_S, EnvConfig().request_timeout_s)
    assert pod["terminationGracePeriodSeconds"] >= options.drain_timeout + 30


def test_probes_ask_what_bears_no_token_and_only_readiness_ends_with_a_drain(objects):
    spec = EnvSpec(name="x", instructions="", make=lambda: None, options={}, probe_actions=())
    routes = {route.path for route in make_app(spec, ServerSettings()).routes}
    for deployment in fleets(objects("kind")).values():
        _, container, _ = server(deployment)
        asked = {
            name: container[name]["httpGet"]["path"]
            for name in ("startupProbe", "readinessProbe", "livenessProbe")
        }
        assert set(asked.values()) <= routes & set(OPEN_PATHS)
        assert asked["startupProbe"] == asked["readinessProbe"] == "/readyz"
        assert asked["livenessProbe"] == "/healthz"
        started = container["startupProbe"]
        assert started["periodSeconds"] * started["failureThreshold"] >= EnvConfig().start_timeout_s


def measured_mib(env):
    """Return (sessions, memory measured for a server with that many) in each measurement."""
    if env == "webarena":
        rows = json.loads((ROOT / "docs/results/webarena.json").read_text())
        rows = [
            (row["sessions"], row["pss_mib"]) for row in rows["steps_on_a_page_of_260_elements"]
        ]
    else:
        found = json.loads((ROOT / "docs/results/capacity.json").read_text())["rows"]
        rows = [(row["sessions"], row["rss_mib"]) for row in found if row["env"] == env]
    return rows


@pytest.mark.parametrize("env", ENVS)
def test_a_server_has_twice_the_memory_it_was_measured_with_and_may_hold_what_it_can(objects, env):
    _, container, options = server(of_kind(objects("gpu"), "Deployment")[f"env-{env}"])
    resources = container["resources"]
    measured = measured_mib(env)
    sessions, used = max(row for row in measured if row[0] <= options.max_sessions)
    assert options.max_sessions <= 2 * sessions
    assert mib(resources["limits"]["memory"]) >= 2 * used
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert CAPACITIES[env].sessions <= options.max_sessions
    assert int(resources["requests"]["cpu"]) >= 1


def test_images_are_named_by_the_tag_of_this_version_in_kind_and_by_digest_in_gpu(objects):
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    for name, deployment in of_kind(objects("kind"), "Deployment").items():
        for image in images(deployment):
            wanted = f"agentgym-{name}" if name.startswith("env-") else "agentgym"
            assert image == f"{wanted}:{version}"
    for deployment in of_kind(objects("gpu"), "Deployment").values():
        for image in images(deployment):
            assert re.fullmatch(r"registry:5000/.+@sha256:[0-9a-f]{64}", image)
    assert list(of_kind(objects("gpu"), "ConfigMap")) == ["agentgym-images", "agentgym-mlflow"]


def images(deployment):
    """Return the images of all containers, and those that a worker assigns to flow runs."""
    pod = deployment["spec"]["template"]["spec"]
    found = [*pod["containers"], *pod.get("initContainers", ())]
    given = [each.get("value") for row in found for each in row.get("env", ())]
    return [*(each["image"] for each in found), *(e for e in given if e and "agentgym:" in e)]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "images.env"),
        ({"babyai": "registry/agentgym-env-babyai:latest"}, "agentgym-env-babyai:latest"),
        ({"sciworld": None}, "data.sciworld"),
    ],
)
def test_gpu_without_every_digest_is_refused_in_one_line_by_kubectl_itself(
    manifests, tmp_path, lines, said
):
    digests = manifests / "overlays/gpu/images.env"
    text = dict(line.split("=") for line in digests.read_text().splitlines())
    kept = digests.read_text()
    try:
        if lines is None:
            digests.unlink()
        else:
            left = {name: value for name, value in {**text, **lines}.items() if value}
            digests.write_text("\n".join(f"{name}={value}" for name, value in left.items()))
        done = subprocess.run(
            [find_kubectl(), "kustomize", str(digests.parent)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        digests.write_text(kept)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.strip().splitlines()
    assert said in line


@pytest.mark.parametrize("overlay", ["kind", "gpu"])
def test_admission_lets_the_images_of_the_overlay_run(objects, overlay):
    found = objects(overlay, "admission")
    allowed = of_kind(found, "ConfigMap")["agentgym-images"]
    used = {each for one in of_kind(found, "Deployment").values() for each in images(one)}
    assert set(allowed["data"].values()) == used
    binding = of_kind(found, "ValidatingAdmissionPolicyBinding")["agentgym-pods"]["spec"]
    parameters = binding["paramRef"]
    assert parameters.pop("parameterNotFoundAction") == "Deny"
    assert parameters == {each: allowed["metadata"][each] for each in ("name", "namespace")}
    assert binding["validationActions"] == ["Deny"]
    assert binding["policyName"] in of_kind(found, "ValidatingAdmissionPolicy")


def test_no_digest_is_invented():
    tracked = subprocess.run(
        ["git", "ls-files", "k8s"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert "k8s/overlays/gpu/kustomization.yaml" in tracked
    assert "k8s/overlays/gpu/images.env" not in tracked
    assert not any(re.search("sha256:[0-9a-f]{64}", (ROOT / each).read_text()) for each in tracked)


def may(rules, verb, resource):
    group, _, name = resource.partition("/")
    return any(
        group in rule["apiGroups"] and name in rule["resources"] and verb in rule["verbs"]
        for rule in rules
    )


def test_the_flow_may_do_what_it_needs_and_nothing_else(objects, rights):
    needed, refused = rights
    found = objects("gpu")
    role = of_kind(found, "Role")["agentgym-flow"]
    rules = role["rules"]
    assert role["metadata"]["namespace"] == "agentgym-fleets"
    assert [each for each in needed if not may(rules, *each)] == []
    assert [each for each in refused if may(rules, *each)] == []
    for role in (*of_kind(found, "Role").values(), *of_kind(found, "ClusterRole").values()):
        assert "*" not in str(role["rules"])
    cluster = of_kind(found, "ClusterRole")["agentgym-preflight"]["rules"]
    assert {verb for rule in cluster for verb in rule["verbs"]} == {"get", "list"}
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        for binding in of_kind(found, kind).values():
            account = binding["subjects"][0]["name"]
            assert account == binding["roleRef"]["name"] or kind == "ClusterRoleBinding"
            assert account in ("agentgym-flow", "agentgym-worker")
            home = {"agentgym-flow": "agentgym-flows", "agentgym-worker": "agentgym"}[account]
            assert binding["subjects"] == [
                {"kind": "ServiceAccount", "name": account, "namespace": home}
            ]
            assert binding["metadata"].get("namespace") != home  # no permissions at home


def test_the_worker_may_make_and_watch_jobs_and_nothing_else(objects):
    role = of_kind(objects("gpu"), "Role")["agentgym-worker"]
    assert role["metadata"]["namespace"] == "agentgym-flows"
    rights = {
        (verb, resource)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
        if verb not in ("get", "list", "watch")
    }
    assert rights == {("create", "jobs"), ("patch", "jobs"), ("delete", "jobs")}
    assert not [rule for rule in role["rules"] if "secrets" in rule["resources"]]


def test_nobody_reads_a_login_but_by_reference(objects):
    for each in of_kind(objects("gpu"), "Deployment").values():
        pod = each["spec"]["template"]["spec"]
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            for variable in container.get("env", ()):
                if re.search("AUTH_STRING$|PASSWORD|TOKEN|_KEY_ID|SECRET_ACCESS", variable["name"]):
                    assert "secretKeyRef" in variable["valueFrom"], variable


@pytest.mark.parametrize("overlay", ["kind", "gpu"])
def test_the_fleets_of_an_overlay_fit_its_quota(objects, overlay):
    found = objects(overlay)
    (quota,) = of_kind(found, "ResourceQuota").values()
    all_of_them = of_kind(found, "Deployment").values()
    hard = copy.deepcopy(quota["spec"]["hard"])
    pods = sum(each["spec"]["replicas"] + 1 for each in all_of_them)  # rolling updates add one
    memory = sum(
        (each["spec"]["replicas"] + 1) * mib(container["resources"]["requests"]["memory"])
        for each in all_of_them
        for container in each["spec"]["template"]["spec"]["containers"]
    )
    assert len(of_kind(found, "PersistentVolumeClaim")) <= int(hard["persistentvolumeclaims"])
    assert pods <= int(hard["pods"])
    assert memory <= mib(hard["requests.memory"].replace("1Ti", "1024Gi"))
    assert int(hard["services.loadbalancers"]) == 0


def test_what_the_manifests_name_the_readme_tells(objects):
    said = (K8S / "README.md").read_text()
    named = re.findall(
        r'"secret(?:Key)?Ref": {[^}]*"name": "([\w-]+)"', json.dumps(objects("kind"))
    )
    assert {"agentgym-env-token", "agentgym-prefect", "agentgym-credentials"} <= set(named)
    assert [each for each in set(named) if f"secret generic {each}" not in said] == []
    assert "images.env" in said
    found = objects("kind", *OPTIONAL)
    roles = set(re.findall(r'"agentgym.io/role": ?"(\w+)"', json.dumps(found)))
    roles |= {
        value
        for values in re.findall(
            r'"key": "agentgym.io/role", "operator": "In", "values": \[(.+?)\]', json.dumps(found)
        )
        for value in json.loads(f"[{values}]")
    }
    assert roles == set(re.findall(r"^\| `(\w+)` \|", said, re.M)) - set(NAMESPACES)
    assert all(re.search(f"[`/]{each}`", said) for each in OPTIONAL)
