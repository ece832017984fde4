"""Tests for a whole configuration: trust, keys, and stability across releases."""

import pytest
from pydantic import ValidationError

from agentgym.config import ConfigError, config_digest, is_elsewhere, load_config


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
    load_config(path, [*on_gpus, "ray.worker_gpus=0.5"])  # one process with a share of a GPU


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
    """Keep the keys of runs that finished while the name was a constant."""
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


S3, MLFLOW = "store.uri=s3://bucket/runs", "tracking.uri=http://mlflow:5000"


@pytest.fixture
def load(tmp_path):
    def read(*overrides):
        path = tmp_path / "params.yaml"
        path.write_text("seed: 1")
        return load_config(path, overrides)

    return read


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([MLFLOW], ["store.uri ''"]),
        ([S3], ["tracking.uri ''"]),
        ([], ["store.uri ''", "tracking.uri ''"]),
        ([S3, "tracking.uri=sqlite:////a/b.db"], ["tracking.uri 'sqlite:////a/b.db'"]),
        ([S3, "tracking.uri=http://localhost:5000"], ["tracking.uri 'http://localhost:5000'"]),
        ([S3, "tracking.uri=http://u:p@mlflow:5000"], ["a password: it belongs into a secret"]),
        ([S3, MLFLOW, 'env.endpoints=["http://127.0.0.1:8000"]'], ["http://127.0.0.1:8000"]),
        ([S3, MLFLOW, "model.source=hub", "model.name=/models/qwen"], ["model.name /models/qwen"]),
    ],
)
def test_it_is_refused_by_name(load, overrides, named):
    with pytest.raises(ConfigError) as raised:
        load("compute=kuberay", *overrides)
    assert str(raised.value).startswith("compute kuberay sends steps to other machines")
    assert [each for each in named if each not in str(raised.value)] == []
    assert ("store.uri" in str(raised.value)) == ("store.uri ''" in named)


def test_what_every_machine_reaches_is_taken(load):
    there = 'env.endpoints=["http://env-babyai:8000"]'
    assert is_elsewhere(load("compute=kuberay", S3, MLFLOW, there))


def test_a_ray_cluster_elsewhere_needs_addresses_or_says_that_it_shares_paths(load, monkeypatch):
    address = "http://cluster.example:8265"
    monkeypatch.setenv("RAY_ADDRESS", address)
    job = ("compute=ray-job", f"ray.address={address}")
    with pytest.raises(ConfigError, match=r"store\.uri ''.*set ray\.shared_paths$"):
        load(*job)
    assert not is_elsewhere(load(*job, "ray.shared_paths=true"))
    assert is_elsewhere(load(*job, S3, MLFLOW))


def test_a_ray_cluster_of_this_machine_has_its_paths(load):
    assert not is_elsewhere(load("compute=ray-job", "ray.address=http://127.0.0.1:8265"))
