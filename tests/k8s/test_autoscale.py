"""The autoscaler reads the servers' metrics, and adds servers if there are many sessions."""

import asyncio
import math

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from agentgym.deploy.manifests import CAPACITIES, replicas_for
from envs.registry import load_spec
from envs.sessions import ServerSettings, Sessions
from envs.wire import CreateRequest

pytestmark = pytest.mark.integration  # kubectl renders the manifests

TOLERANCE = 0.1  # the controller's default


@pytest.fixture(scope="module")
def autoscalers(objects):
    found = objects("kind", "autoscale")
    return {
        each["metadata"]["name"].removeprefix("env-"): each["spec"]
        for each in found
        if each["kind"] == "HorizontalPodAutoscaler"
    }


def desired(spec, replicas, average):
    """Apply Kubernetes' formula for a pods metric, within the autoscaler's bounds and behavior."""
    (metric,) = spec["metrics"]
    target = metric["pods"]["target"]
    assert target["type"] == "AverageValue"
    ratio = average / int(target["averageValue"])
    wanted = replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(replicas * ratio)
    wanted = min(max(wanted, spec["minReplicas"]), spec["maxReplicas"])
    if spec["behavior"]["scaleDown"]["selectPolicy"] == "Disabled":
        return max(wanted, replicas)
    return wanted


def exported(num_sessions):
    """Return a real server's /metrics while `num_sessions` sessions are open."""

    async def scrape():
        sessions = Sessions(load_spec("textcraft", {}), ServerSettings(max_sessions=1000))
        for task in range(num_sessions):
            await sessions.create(CreateRequest(request_key=f"key-{task:08d}", task_id=task))
        text = generate_latest(sessions.metrics.registry).decode()
        sessions.abandon()
        await sessions.stop()
        return text

    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(asyncio.run(scrape()))
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("open_sessions", "replicas", "wanted"),
    [
        (0, 2, 2),
        (100, 2, 2),
        (140, 4, 4),  # within the tolerance: 128 * 1.1 = 140.8
        (200, 2, 4),  # 2 * 200 / 128 = 3.1
        (320, 4, 10),
        (10, 6, 6),  # fewer sessions, but never scale down while they are open
        (999, 8, 16),  # the maximum
    ],
)
def test_the_formula_fed_with_the_exported_metric(autoscalers, open_sessions, replicas, wanted):
    spec = autoscalers["textcraft"]
    metrics = exported(open_sessions)
    average = metrics[spec["metrics"][0]["pods"]["metric"]["name"]]
    assert average == open_sessions
    assert desired(spec, replicas, average) == wanted


@pytest.mark.parametrize("env", sorted(CAPACITIES))
def test_it_holds_as_many_servers_as_were_computed_from_demand(autoscalers, env):
    spec = autoscalers[env]
    for episodes in (1, 100, 500):
        replicas = replicas_for(env, episodes)
        if replicas <= spec["maxReplicas"]:
            assert desired(spec, replicas, episodes / replicas) == replicas


def test_it_scales_up_only_and_owns_the_number_of_servers(objects, autoscalers):
    assert set(autoscalers) == set(CAPACITIES)
    for spec in autoscalers.values():
        assert spec["behavior"] == {
            "scaleUp": {"stabilizationWindowSeconds": 0},
            "scaleDown": {"selectPolicy": "Disabled"},
        }
    names = set()
    for each in objects("kind", "autoscale"):
        if each["kind"] == "Deployment" and each["metadata"]["name"].startswith("env-"):
            assert "replicas" not in each["spec"]
            names.add(each["metadata"]["name"])
    assert names == {spec["scaleTargetRef"]["name"] for spec in autoscalers.values()}
