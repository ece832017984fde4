"""Common parts of the flows: their parameters, and the steps of each flow."""

from pathlib import Path

import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from pydantic import ValidationError

from agentgym.config import ConfigError, load_config
from agentgym.pipeline.table import steps_of
from flows.common import (
    RunRequest,
    check_parents,
    is_any,
    is_evaluation,
    is_preparation,
    is_training,
)
from flows.evaluate import evaluate
from flows.pipeline import pipeline
from flows.prepare import prepare
from flows.train import train

ROOT = Path(__file__).parents[2]
PARAMS = str(ROOT / "params.yaml")
FLOWS = {"pipeline": pipeline, "prepare": prepare, "train": train, "evaluate": evaluate}


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_every_flow_offers_a_form_with_a_file_and_checked_overrides(flow):
    form = parameter_schema(flow).model_dump()
    fields = form["definitions"]["RunRequest"]["properties"]
    assert form["required"] == []
    assert fields["params"]["title"] == "Parameter file"
    assert fields["overrides"]["items"]["pattern"] == r"^[\w.-]+="
    assert flow.description


@pytest.mark.parametrize(
    "wrong",
    [
        {"overrides": ["seed"]},
        {"overrides": ["=3"]},
        {"params": ""},
        {"param": "x"},
        {"overrides": "seed=1"},
    ],
)
def test_a_request_that_cannot_be_meant_is_refused(wrong):
    with pytest.raises(ValidationError):
        RunRequest.model_validate(wrong)


def test_a_request_is_the_configuration_the_command_line_would_load():
    request = RunRequest.model_validate(
        {"params": PARAMS, "overrides": ["seed=3", "optimizer.lr=3e-4"]}
    )
    assert request.config() == load_config(PARAMS, ("seed=3", "optimizer.lr=3e-4"))
    with pytest.raises(ConfigError, match=r"did you mean rollout\.group_size"):
        RunRequest(params=PARAMS, overrides=("rollout.gruop_size=2",)).config()


@pytest.mark.parametrize("warm_start", ["true", "false"])
def test_prepare_train_and_evaluate_are_the_pipeline_and_can_run_in_that_order(warm_start):
    steps = steps_of(
        load_config(
            PARAMS, (f"warm_start.enabled={warm_start}", "model.source=hub", "model.name=x")
        )
    )
    parts = [
        [name for name, step in steps.items() if wanted(step)]
        for wanted in (is_preparation, is_training, is_evaluation)
    ]
    order = [name for part in parts for name in part]
    assert sorted(order) == sorted(name for name, step in steps.items() if is_any(step))
    done = set()
    for name in order:
        assert set(steps[name].parents) <= done | {name}
        done.add(name)


def test_a_flow_whose_start_is_missing_names_the_flow_that_makes_it():
    cfg = load_config(PARAMS)
    with pytest.raises(
        ConfigError,
        match=r"step stage-1 needs prepare, warm-start first; run `python -m flows.prepare`",
    ):
        check_parents(cfg, is_training, {})
    prepared = dict.fromkeys(("prepare", "demonstrate", "initialize", "warm-start"))
    check_parents(cfg, is_training, prepared)
    with pytest.raises(
        ConfigError, match=r"step evaluate-stage-1 needs stage-1 first; run `python -m flows.train`"
    ):
        check_parents(cfg, is_evaluation, prepared)
    check_parents(cfg, is_any, {})


def test_every_flow_is_deployed_on_both_pools_with_a_description_tags_and_a_limit():
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    found = {(deployment["entrypoint"], deployment["name"]) for deployment in deployments}
    assert found >= {
        (f"flows/{name}.py:{name}", pool)
        for name in (*FLOWS, "compare")
        for pool in ("local", "kubernetes")
    }
    for deployment in deployments:
        name = deployment["entrypoint"].partition(":")[2]
        assert deployment["tags"] == ["agentgym", deployment["name"], name]
        assert deployment["work_pool"]["name"] == deployment["name"]
        assert deployment["concurrency_limit"]["collision_strategy"] == "ENQUEUE"
        assert (
            deployment["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]
            == "30"
        )
        assert len(deployment["description"]) > 60
        assert str(ROOT) not in str(deployment)
