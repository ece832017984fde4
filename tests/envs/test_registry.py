"""Environments are found by name, built in or installed."""

from importlib.metadata import EntryPoint

import pytest

from envs import registry
from envs.registry import load_spec


def test_a_built_in_environment_gets_its_options():
    assert load_spec("babyai", {"reward": "minigrid"}).options["reward"] == "minigrid"
    assert load_spec("searchqa", {"topk": 5}).options["topk"] == 5


def test_an_installed_package_can_offer_an_environment(monkeypatch):
    entry = EntryPoint("mine", "envs.babyai:spec", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [entry] if group == "agentgym.envs" else []
    )
    assert load_spec("mine", {}).name == "babyai"
    with pytest.raises(ValueError, match=r"unknown environment 'mime'; did you mean 'mine'\?"):
        load_spec("mime", {})
    with pytest.raises(
        ValueError, match="known: babyai, mine, sciworld, searchqa, textcraft, webarena"
    ):
        load_spec("zzz", {})
