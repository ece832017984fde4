"""What would be local to another machine is refused by name, before anything starts."""

import pytest

from agentgym.config import ConfigError, is_elsewhere, load_config

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
