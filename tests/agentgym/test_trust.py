"""A parameter file alone sends neither secrets nor code to another machine."""

import pytest

from agentgym.trust import untrusted_address

HERE = ("", "auto", "http://127.0.0.1:8265", "ray://localhost:10001", "http://[::1]:8265")
ELSEWHERE = ("ray://192.0.2.1:10001", "http://ray.example:8265", "192.0.2.1:6379", "http://[x")


@pytest.mark.parametrize("address", HERE)
def test_a_cluster_on_this_machine_is_ones_own(address):
    assert untrusted_address(address, "", {}) is None


@pytest.mark.parametrize("address", ELSEWHERE)
def test_a_cluster_elsewhere_must_be_named_by_the_machine_too(address):
    told = untrusted_address(address, "", {})
    assert told.startswith(f"ray.address {address} is on another machine")
    assert told.endswith(f"export RAY_ADDRESS={address}")
    assert untrusted_address(address, "", {"RAY_ADDRESS": f"{address}/"}) is None
    assert untrusted_address(address, "", {"RAY_API_SERVER_ADDRESS": address}) is None
    assert untrusted_address(address, "", {"RAY_ADDRESS": "ray://192.0.2.9:10001"}) is not None


def test_credentials_go_to_no_tracking_server_that_the_file_alone_names():
    uri, secret = "https://mlflow.example/", {"MLFLOW_TRACKING_TOKEN": "secret"}
    told = untrusted_address("", uri, secret)
    assert told.startswith("tracking.uri https://mlflow.example is on another machine")
    assert "secret" not in told
    assert untrusted_address("", uri, {}) is None  # there is nothing to send
    assert untrusted_address("", uri, {"MLFLOW_TRACKING_TOKEN": ""}) is None
    assert untrusted_address("", "http://127.0.0.1:5000", secret) is None
    assert untrusted_address("", "sqlite:///mlflow.db", secret) is None
    trusted = {**secret, "MLFLOW_TRACKING_URI": "https://mlflow.example"}
    assert untrusted_address("", uri, trusted) is None
