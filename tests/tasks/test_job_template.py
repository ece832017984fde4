"""The Job that a Kubernetes worker sends for a flow run is valid for the API, and our namespace
admits it.
"""

import json
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from prefect.utilities.templating import apply_values

ROOT = Path(__file__).parents[2]
TEMPLATE = json.loads((ROOT / "k8s/prefect/base-job-template.json").read_text())


def job(deployment="pipeline"):
    """Return the Job as the worker makes it: defaults of the work pool, variables of the
    deployment, command and names.
    """
    (found,) = [
        d
        for d in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
        if (d["name"], d["entrypoint"]) == ("kubernetes", f"flows/{deployment}.py:{deployment}")
    ]
    defaults = {
        name: field["default"]
        for name, field in TEMPLATE["variables"]["properties"].items()
        if "default" in field
    }
    variables = found["work_pool"]["job_variables"] | {"image": "registry/agentgym:1"}
    assert variables.keys() <= TEMPLATE["variables"]["properties"].keys()
    env = [{"name": name, "value": value} for name, value in variables.pop("env").items()]
    values = (
        defaults
        | variables
        | {
            "env": env,
            "labels": {"a": "b"},
            "name": "run",
            "command": ["prefect", "flow-run", "execute"],
        }
    )
    return apply_values(TEMPLATE["job_configuration"]["job_manifest"], values)


@pytest.mark.parametrize("version", ["1.29", "1.35"])
def test_the_job_is_what_the_api_accepts(version):
    kubernetes_validate.validate(job(), version, strict=True)


def test_the_job_is_admitted_where_pods_are_restricted_and_is_not_retried_by_kubernetes():
    spec = job()["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    # no retries by Kubernetes: automations decide, because they know the run's state
    assert (spec["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["image"] == "registry/agentgym:1"
    assert {"name": "PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "value": "30"} in container["env"]


def test_attempts_of_one_run_share_their_store():
    pod = job()["spec"]["template"]["spec"]
    (mount,) = [
        each
        for each in pod["containers"][0]["volumeMounts"]
        if each["mountPath"] == "/app/.agentgym"
    ]
    (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
    assert volume["persistentVolumeClaim"] == {"claimName": "agentgym-state"}
