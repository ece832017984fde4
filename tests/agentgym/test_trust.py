"""A parameter file alone sends neither secrets nor code to another machine."""

import importlib

import pytest

from agentgym.trust import outward, unowned, untrusted_address
from envs import textcraft
from envs.registry import BUILT_IN

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
    assert untrusted_address("", uri, {}) is None  # no secret to send
    assert untrusted_address("", uri, {"MLFLOW_TRACKING_TOKEN": ""}) is None
    assert untrusted_address("", "http://127.0.0.1:5000", secret) is None
    assert untrusted_address("", "sqlite:///mlflow.db", secret) is None
    trusted = {**secret, "MLFLOW_TRACKING_URI": "https://mlflow.example"}
    assert untrusted_address("", uri, trusted) is None


JUDGE = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key_env": "AGENTGYM_SECRET_X"}
FOREIGN = [
    ("webarena", {"judge": JUDGE, "viewport": [640, 480]}, {"judge": JUDGE}),
    ("webarena", {"sites": {"shopping": "http://127.0.0.1:9"}}, None),
    ("webarena", {"tasks": "/etc"}, None),
    ("webarena", {"storage_state": "cookies"}, None),
    ("searchqa", {"retriever": "http://127.0.0.1:9/retrieve"}, None),
    ("searchqa", {"questions": "bm25"}, None),
    ("textcraft", {"recipes": "invented:8/../../x"}, None),
    ("somebodys-own", {"level": 3}, None),
]


@pytest.mark.parametrize(("env", "options", "refused"), FOREIGN)
def test_no_option_of_a_store_names_an_address_a_path_or_a_variable(env, options, refused):
    refused = refused or options
    assert unowned(env, options, []) == refused
    assert unowned(env, options, [{}, {**options, next(iter(refused)): "another"}]) == refused
    assert unowned(env, options, [{"seed": 1, **refused}]) == {}  # the owner set the same


def test_options_that_choose_among_what_an_environment_has_are_taken_from_a_store():
    for env, options in [
        ("webarena", {"tasks": "embedded", "judge": None, "storage_state": "none", "names": {}}),
        ("searchqa", {"retriever": "bm25", "questions": "embedded", "topk": 5}),
        ("textcraft", {"recipes": "invented:8000", "goals": ["stick"], "distractors": 1}),
        ("babyai", {"levels": ["GoToObj"], "view": "compact"}),
    ]:
        assert unowned(env, options, []) == {}


# words of closed lists, numbers, and the name of an installed browser
CHOICES = {
    "babyai": {"levels", "view", "actions", "reward"},
    "sciworld": {"tasks", "max_moves", "reward", "protocol"},
    "searchqa": {"mode", "protocol", "topk", "max_doc_chars", "retriever_timeout_s"},
    "textcraft": {"digest", "goals", "protocol", *textcraft.LEAST},
    "webarena": {
        *("missing_sites", "browser", "concurrency", "viewport", "max_observation_chars"),
        *("max_tabs", "quiet_s", "settle_s", "goto_s", "seed"),
    },
}


@pytest.mark.parametrize("env", sorted(BUILT_IN))
def test_of_each_option_it_is_known_whether_it_reaches_out_of_the_environment(env):
    defaults = importlib.import_module(f"envs.{env}").DEFAULTS
    assert outward(env, dict.fromkeys(defaults, "x")).keys() == defaults.keys() - CHOICES[env]
    assert outward(env, defaults) == {}
