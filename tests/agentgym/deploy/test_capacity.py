"""Servers for a number of episodes, from what one was measured to hold."""

import json
from pathlib import Path

import pytest

from agentgym.config import ConfigError
from agentgym.deploy.capacity import CAPACITIES, replicas_for

RESULTS = Path(__file__).parents[3] / "docs/results"


@pytest.mark.parametrize(
    ("env", "episodes", "replicas"),
    [
        ("babyai", 0, 2),
        ("babyai", 256, 2),
        ("babyai", 257, 3),
        ("textcraft", 1000, 8),
        ("searchqa", 10_000, 79),
        ("sciworld", 100, 13),
        ("webarena", 16, 2),
        ("webarena", 17, 3),
    ],
)
def test_servers_for_the_episodes_in_flight(env, episodes, replicas):
    assert replicas_for(env, episodes) == replicas


@pytest.mark.parametrize("env", sorted(CAPACITIES))
@pytest.mark.parametrize("episodes", [100, 1_000, 10_000])
def test_no_server_gets_more_than_it_holds_and_none_is_superfluous(env, episodes):
    replicas, holds = replicas_for(env, episodes), CAPACITIES[env].sessions
    fullest = -(-episodes // replicas)  # as they are spread evenly
    assert fullest <= holds
    assert replicas == 2 or (replicas - 1) * holds < episodes


def test_an_environment_that_nobody_measured_is_refused():
    with pytest.raises(ConfigError, match=r"server of hanoi is not known.*babyai.*say how many"):
        replicas_for("hanoi", 10)


def rows(env):
    """(sessions, p99 of a step in ms, errors) as measured on the native protocol."""
    if env == "webarena":
        found = json.loads((RESULTS / "webarena.json").read_text())
        found = found["expert_episodes_on_the_embedded_sites"]
        return [(row["sessions"], row["p99_ms"], row["errors"]) for row in found]
    name = "sciworld" if env == "sciworld" else "envs"
    return [
        (row["sessions"], row["p99_ms"], row["errors"])
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        if (row["label"], row["env"], row["dialect"]) == ("ours", env, "native")
    ]


@pytest.mark.parametrize("env", sorted(CAPACITIES))
def test_the_table_says_what_was_measured(env):
    held = [
        sessions
        for sessions, p99_ms, errors in rows(env)
        if p99_ms <= CAPACITIES[env].p99_ms and not errors
    ]
    assert CAPACITIES[env].sessions == max(held)
