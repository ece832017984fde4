"""Flows end the environment servers, fleets and jobs of a canceled run."""

from types import SimpleNamespace

import pytest

from agentgym.config import load_config
from agentgym.deploy.kube.calls import ApiUnreachable
from flows import common as flow_run
from flows.common import fleets_down
from flows.evaluate import evaluate
from flows.pipeline import pipeline
from flows.prepare import prepare
from flows.train import train


@pytest.mark.parametrize("flow", [pipeline, prepare, train, evaluate])
def test_a_cancelled_flow_run_takes_its_fleets_down(flow):
    assert fleets_down in flow.on_cancellation_hooks


def test_only_a_run_with_fleets_asks_a_cluster(monkeypatch):
    asked = []
    monkeypatch.setattr(flow_run, "end_run", lambda cfg, run: asked.append((cfg.env.deploy, run)))
    monkeypatch.setattr(flow_run, "run_label", lambda cfg: "r0123456789ab")
    for overrides in ([], ["env.deploy=kubernetes"]):
        parameters = {"run": {"overrides": overrides}}
        fleets_down(None, SimpleNamespace(parameters=parameters), None)
    assert asked == [("kubernetes", "r0123456789ab")]


def test_a_cancelled_run_of_kuberay_ends_its_jobs_and_then_its_fleets_whatever_fails(monkeypatch):
    asked = []

    def away(cfg, run):
        asked.append(("jobs", run))
        raise ApiUnreachable("no API server answers")

    monkeypatch.setattr(flow_run, "end_jobs", away)
    monkeypatch.setattr(flow_run, "end_run", lambda cfg, run: asked.append(("fleets", run)))
    monkeypatch.setattr(flow_run, "run_label", lambda cfg: "r0123456789ab")
    uris = ["store.uri=s3://bucket/runs", "tracking.uri=http://mlflow:5000"]
    overrides = ["compute=kuberay", "env.deploy=kubernetes", *uris]
    with pytest.raises(ApiUnreachable):
        fleets_down(None, SimpleNamespace(parameters={"run": {"overrides": overrides}}), None)
    assert asked == [("jobs", "r0123456789ab"), ("fleets", "r0123456789ab")]


def test_servers_are_ended_also_where_no_task_begins_any_more(monkeypatch, tmp_path):
    cfg = load_config(overrides=[f"store.path={tmp_path}/store"])
    ended = []

    class Servers:
        def __exit__(self, *_):
            ended.append("servers")

    def refused(servers):
        raise RuntimeError("the flow run is cancelling")

    monkeypatch.setattr(flow_run, "begin_attempt", lambda: None)
    monkeypatch.setattr(flow_run, "pull_data", lambda folder: None)
    monkeypatch.setattr(flow_run, "check_parents", lambda *_: None)
    monkeypatch.setattr(flow_run, "finished", lambda *_: {})
    monkeypatch.setattr(flow_run, "environments_up", lambda cfg: (Servers(), {}))
    monkeypatch.setattr(flow_run, "environments_down", refused)
    monkeypatch.setattr(flow_run, "steps_of", lambda cfg: {})
    monkeypatch.setattr(flow_run.RunRequest, "config", lambda self: cfg)
    with pytest.raises(RuntimeError, match="cancelling"):
        flow_run.run_steps(flow_run.RunRequest(), flow_run.is_any)
    assert ended == ["servers"]
