"""Each fleet has its own token, which is derived again without reading a Secret."""

import pytest

from agentgym.config import ConfigError
from agentgym.deploy.fleets.startup import token_of_fleet


def test_a_fleets_token_is_its_own_and_the_same_at_each_attempt(monkeypatch):
    monkeypatch.setenv("AGENTGYM_FLEET_KEY", "of-the-flow\n")
    token = token_of_fleet("env-babyai-r1")
    assert token == token_of_fleet("env-babyai-r1")
    assert len({token, token_of_fleet("env-babyai-r2"), token_of_fleet("env-textcraft-r1")}) == 3
    assert len(token) == 64
    assert "of-the-flow" not in token
    monkeypatch.setenv("AGENTGYM_FLEET_KEY", "of-another")
    assert token_of_fleet("env-babyai-r1") != token


def test_without_what_tokens_are_made_of_it_says_how_to_make_it(monkeypatch):
    monkeypatch.setenv("AGENTGYM_FLEET_KEY", " ")
    with pytest.raises(ConfigError, match=r"export AGENTGYM_FLEET_KEY=.*openssl rand -hex 32"):
        token_of_fleet("env-babyai-r1")
