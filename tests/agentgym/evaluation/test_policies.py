"""A policy's name is taken apart without asking anybody, and what is none is refused."""

import pytest

from agentgym.config import ConfigError
from agentgym.evaluation.policies import (
    PolicyKind,
    PolicyName,
    endpoint_contender,
    plain_contender,
    prompts_digest,
    recorded_contender,
)
from agentgym.rollouts.policies.hosted import Endpoint
from agentgym.types import Item


def parsed(text):
    found = PolicyName.parse(text)
    return found.who, found.name, found.of


def test_each_kind_of_policy_is_known_by_its_name(tmp_path):
    assert parsed("expert") == (PolicyKind.EXPERT, "", "")
    assert parsed("random") == (PolicyKind.RANDOM, "", "")
    assert parsed("echo:go to: the door") == (PolicyKind.ECHO, "go to: the door", "")
    assert parsed("echo:") == (PolicyKind.ECHO, "", "")
    assert parsed("r3d1c27a5b9e0:stage-3") == (PolicyKind.RUN, "stage-3", "r3d1c27a5b9e0")
    assert parsed(":stage-3") == (PolicyKind.RUN, "stage-3", "")
    assert parsed("models:/agentgym-babyai@champion") == (
        PolicyKind.REGISTRY,
        "agentgym-babyai",
        "@champion",
    )
    assert parsed("models:/agentgym-babyai/12") == (PolicyKind.REGISTRY, "agentgym-babyai", "12")
    assert parsed("https://host/v1") == (PolicyKind.ENDPOINT, "https://host/v1", "")
    assert parsed("Qwen/Qwen2.5-7B-Instruct") == (PolicyKind.MODEL, "Qwen/Qwen2.5-7B-Instruct", "")
    assert parsed("Qwen/Qwen3-4B@main") == (PolicyKind.MODEL, "Qwen/Qwen3-4B", "main")
    assert parsed(str(tmp_path)) == (PolicyKind.MODEL, str(tmp_path), "")


@pytest.mark.parametrize(
    "text", ["", "nobody", "models:/x", "models:champion", "stage-3", "../x/y/z", "run:Stage"]
)
def test_what_is_no_policy_is_refused_with_what_could_be_meant(text):
    with pytest.raises(ConfigError, match="expected"):
        PolicyName.parse(text)


def test_an_endpoint_is_its_address_and_model_and_never_its_key_price_or_patience(monkeypatch):
    monkeypatch.setenv("AGENTGYM_SECRET_X", "hush")
    plain = endpoint_contender(Endpoint("http://127.0.0.1:1/v1/", "m"))
    other = endpoint_contender(
        Endpoint("http://127.0.0.1:1/v1", "m", "AGENTGYM_SECRET_X", timeout_s=1.0, max_retries=9)
    )
    assert plain.identity == other.identity
    assert plain.identity["url"] == "http://127.0.0.1:1/v1"
    assert "hush" not in repr(other)


def test_policies_that_are_no_models_have_their_names_as_identity():
    one, two = (plain_contender(PolicyName.parse(f"echo:{action}")) for action in "ab")
    assert one.identity != two.identity
    assert plain_contender(PolicyName.parse("expert")).needs_expert
    assert not plain_contender(PolicyName.parse("random")).needs_expert
    assert prompts_digest("") == ""
    assert prompts_digest("a") != prompts_digest("b")
    again = recorded_contender("ab", "cd", {("babyai_1", 0): ("left",)}, "chance")
    assert again.identity == {"kind": "recorded", "of": "ab", "records": "cd"}
    assert again.player_of(Item("babyai", 1), 0) is not again.player_of(Item("babyai", 1), 0)
