"""Shared types: AgentGym's item ids, and a token whose text stays hidden."""

import json
import pickle

import pytest

from agentgym.types import Endpoint, Item, Status, Trajectory, Turn


@pytest.mark.parametrize("status", Status)
def test_an_episode_counts_unless_its_environment_failed(status):
    failed = ("env_error", "grader_error", "timeout", "interrupted")
    assert status.is_valid is (status not in failed)


def test_an_item_has_agentgyms_textual_id():
    assert Item("babyai", 17).item_id == "babyai_17"
    assert Item("a", 2) < Item("a", 10) < Item("b", 1)


def test_an_endpoint_carries_its_token_and_shows_it_nowhere():
    endpoint = Endpoint("http://127.0.0.1:1", "secret")
    assert endpoint == "http://127.0.0.1:1"
    assert pickle.loads(pickle.dumps(endpoint)).token == "secret"
    for shown in (str(endpoint), repr(endpoint), f"{endpoint}", json.dumps({"at": endpoint})):
        assert "secret" not in shown


def test_the_versions_of_an_episode_are_those_of_its_turns():
    turns = tuple(Turn("go", "you see", 0.0, version=version) for version in (3, 2, 3))
    episode = Trajectory(
        *(Item("babyai", 1), 0, 1, 6, Status.MAX_TURNS, 0.0, False, "task", turns), *((), (), ())
    )
    assert episode.versions == (2, 3)
