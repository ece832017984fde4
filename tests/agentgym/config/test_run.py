"""A run's configuration as a whole: whom it trusts, what is in its keys, and that it stays."""

import pytest
from pydantic import ValidationError

from agentgym.config import (
    ConfigError,
    config_digest,
    load_config,
)


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "overrides",
    [
        ("compute=ray", "ray.address=203.0.113.5:6379"),
        ("compute=ray", "ray.address='[2001:db8::5]:6379'"),
        ("compute=ray", "ray.address=cluster.example:6379"),
        ("compute=ray-job", "ray.address=http://cluster.example:8265/", "ray.shared_paths=true"),
    ],
)
def test_a_cluster_elsewhere_must_be_named_by_the_machine_too(write, monkeypatch, overrides):
    path, address = write("seed: 1"), overrides[1].partition("=")[2].strip("'/")
    assert f"ray.address {address} is on another machine" in refusal(path, *overrides)
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    assert f"if you trust it, export RAY_ADDRESS={address}" in refusal(path, *overrides)
    monkeypatch.setenv("RAY_ADDRESS", address)
    load_config(path, overrides)


def test_a_worker_has_a_gpu_for_each_process_of_its_engine(write):
    on_gpus = ("compute=ray", "compute_device=cuda", "ray.rank_gpus=1", "rollout.engine=vllm")
    path, several = write("seed: 1"), "vllm.tensor_parallel_size=4"
    assert "ray.worker_gpus 1: an engine's processes run in its worker" in refusal(
        path, *on_gpus, several, "ray.worker_gpus=1"
    )
    load_config(path, [*on_gpus, several, "ray.worker_gpus=4"])
    load_config(path, [*on_gpus, "ray.worker_gpus=0.5"])  # one process, a share of a GPU


@pytest.mark.parametrize(
    "address", ["127.0.0.1:6379", "localhost:6379", "auto", "'[::1]:6379'", "''"]
)
def test_a_cluster_of_this_machine_is_not_asked_for_twice(write, address):
    load_config(write("compute: ray"), [f"ray.address={address}"])


def test_credentials_go_to_no_mlflow_server_of_a_files_choice(write, monkeypatch):
    path = write("tracking: {uri: 'https://mlflow.example'}")
    load_config(path)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t")
    assert (
        "tracking.uri https://mlflow.example is on another machine and would get the credentials"
        in refusal(path)
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example/")
    load_config(path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    load_config(path, ["tracking.uri=http://127.0.0.1:5000"])


def test_what_changes_only_where_or_how_fast_stays_out_of_the_keys(write):
    path = write("seed: 1")
    reference = config_digest(load_config(path).semantic())
    for override in (
        "store.path=/elsewhere",
        "rollout.concurrency=3",
        "env.endpoints=[x]",
        "env.deploy=kubernetes",
        "env.keep=true",
        "kubernetes.context=other",
        "kubernetes.overlay=gpu",
        "tracking.uri=x",
        "data.path=x",
        "evaluation.chunk_items=1",
    ):
        assert config_digest(load_config(path, [override]).semantic()) == reference, override
    for override in (
        "seed=2",
        "optimizer.lr=1",
        "env.options={a: 1}",
        "rollout.group_size=3",
        "deterministic=true",
        "horizon.max_turns=[1,2,3]",
        "rollout.episode_timeout_s=5",
        "rollout.max_attempts=1",
        "rollout.max_env_error_frac=0.5",
        "evaluation.min_coverage=0.5",
    ):
        assert config_digest(load_config(path, [override]).semantic()) != reference, override
    semantic = load_config(path).semantic()
    assert "path" not in semantic["data"]
    assert "concurrency" not in semantic["rollout"]


def test_a_loaded_configuration_cannot_change(write):
    with pytest.raises(ValidationError, match="frozen"):
        load_config(write("seed: 1")).seed = 2


def test_experiment_and_registered_model_follow_the_environments_by_one_rule(write):
    path = write("env: {name: babyai}\nmix: [{name: textcraft}]")
    for overrides, name in (
        ([], "agentgym-babyai-textcraft"),
        (["mix=[]"], "agentgym-babyai"),
        (["env.name=counting", "mix=[]"], "agentgym-counting"),
    ):
        cfg = load_config(path, overrides)
        assert (cfg.experiment, cfg.registered_model) == (name, name)
    by_hand = load_config(path, ["registry.model_name=ours", "tracking.experiment=theirs"])
    assert (by_hand.experiment, by_hand.registered_model) == ("theirs", "ours")


def test_a_name_that_follows_and_the_same_name_by_hand_are_one_run(write):
    """So the runs that were finished while the name was a constant keep their keys."""
    path = write("seed: 1")
    by_hand = load_config(path, ["registry.model_name=agentgym-babyai"])
    assert load_config(path).semantic() == by_hand.semantic()
    assert load_config(path).semantic()["registry"]["model_name"] == "agentgym-babyai"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("registry.model_name=agentgym-qwen2.5-7b", "registry.model_name: string should match"),
        ("registry.model_name=' '", "registry.model_name: string should match"),
        ("registry.alias=best.one", "registry.alias: string should match"),
        ("registry.alias=latest", "registry.alias 'latest' has a meaning of its own in MLflow"),
        ("registry.alias=v2", "registry.alias 'v2' has a meaning of its own in MLflow"),
    ],
)
def test_a_name_that_mlflow_forbids_is_refused_before_anything_runs(write, override, said):
    assert said in refusal(write("seed: 1"), override)


def test_turns_of_a_validation_that_is_off_need_no_room(write):
    short = ["model.context_tokens=216", "evaluation.max_turns=4", "horizon.max_turns=[4]"]
    short += ["horizon.stage_steps=[1]"]
    path = write("validation: {every: 0}")
    assert load_config(path, short).validation.max_turns == 12
    assert "is too small for 12 turns" in refusal(path, *short, "validation.every=1")
