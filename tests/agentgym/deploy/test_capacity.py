"""Numbers of servers for a number of episodes, from the measured capacity of one server."""

import heapq
import json
import math
import random
from pathlib import Path

import pytest

from agentgym.config import ConfigError
from agentgym.deploy.manifests import CAPACITIES, replicas_for

RESULT = Path(__file__).parents[3] / "docs/results/capacity.json"


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
    fullest = -(-episodes // replicas)  # spread evenly
    assert fullest <= holds
    assert replicas == 2 or (replicas - 1) * holds < episodes


def test_an_environment_that_nobody_measured_is_refused():
    with pytest.raises(ConfigError, match=r"server of hanoi is not known.*babyai.*say how many"):
        replicas_for("hanoi", 10)


def measured(env):
    """Return {number of sessions: (steps per second, p50 and p99 of a step in ms, errors)}."""
    rows = json.loads(RESULT.read_text())["rows"]
    found = [row for row in rows if row["env"] == env and row["held"] == row["sessions"]]
    names = ("steps_per_s", "p50_ms", "p99_ms", "errors")
    return {row["sessions"]: tuple(row[name] for name in names) for row in found}


@pytest.mark.parametrize("env", sorted(CAPACITIES))
def test_the_table_says_what_was_measured(env):
    """Check double the capacity too, as after losing every second pod: no errors."""
    capacity, rows = CAPACITIES[env], measured(env)
    _, _, p99_ms, errors = rows[capacity.sessions]
    assert p99_ms <= capacity.p99_ms
    assert errors == 0
    assert rows[2 * capacity.sessions][3] == 0


def waits_of(env, episodes, replicas, rounds=40):
    """Simulate a fleet. Return the waiting time of each action in s, and the most sessions per
    server.

    Discrete events: an episode takes 1 to 20 actions on one server; the next one begins on the
    server with the fewest sessions, without thinking time. A server answers in order, two at a
    time if it can use two cores. Service times are lognormal, with the spread measured for one
    session and the rate measured at the capacity.
    """
    rows, draw = measured(env), random.Random(0)
    steps_per_s = rows[CAPACITIES[env].sessions][0]
    at_a_time = 2 if env in ("sciworld", "webarena") else 1
    sigma = math.log(rows[1][2] / rows[1][1]) / 2.326  # p99 over p50
    mu = math.log(at_a_time / steps_per_s) - sigma**2 / 2
    free = [[0.0] * at_a_time for _ in range(replicas)]  # times at which workers become free
    sessions, most = [0] * replicas, 0
    emptiest = [(0, draw.random(), server) for server in range(replicas)]
    heapq.heapify(emptiest)

    def place():
        nonlocal most
        while True:  # skip outdated entries
            count, _, server = heapq.heappop(emptiest)
            if count == sessions[server]:
                break
        sessions[server] += 1
        most = max(most, sessions[server])
        heapq.heappush(emptiest, (sessions[server], draw.random(), server))
        return server, draw.randint(1, 20)

    asks = [(0.0, draw.random(), *place()) for _ in range(episodes)]  # time, tie-breaker, server
    heapq.heapify(asks)
    waits = []
    while len(waits) < rounds * episodes:
        asked, _, server, left = heapq.heappop(asks)
        worker = min(range(at_a_time), key=free[server].__getitem__)
        answered = max(asked, free[server][worker]) + draw.lognormvariate(mu, sigma)
        free[server][worker] = answered
        waits.append(answered - asked)
        if left == 1:
            sessions[server] -= 1
            heapq.heappush(emptiest, (sessions[server], draw.random(), server))
            server, left = place()
            left += 1
        heapq.heappush(asks, (answered, draw.random(), server, left - 1))
    return waits, most


@pytest.mark.parametrize("env", sorted(CAPACITIES))
@pytest.mark.parametrize("episodes", [100, 1_000, 10_000])
def test_a_fleet_of_so_many_servers_answers_in_time(env, episodes):
    replicas = replicas_for(env, episodes)
    waits, most = waits_of(env, episodes, replicas, rounds=40 if episodes < 10_000 else 4)
    assert 1000 * sorted(waits)[int(0.99 * len(waits))] <= CAPACITIES[env].p99_ms
    assert most <= 2 * CAPACITIES[env].sessions  # no session is refused


def test_the_simulation_keeps_littles_law_and_tells_a_fleet_that_is_too_small():
    """Check the simulation: sessions of a server = its rate times the time in the server."""
    rate = measured("babyai")[CAPACITIES["babyai"].sessions][0]
    waits, most = waits_of("babyai", 500, 1)
    assert most == 500
    assert sum(waits) / len(waits) == pytest.approx(500 / rate, rel=0.05)
    assert 1000 * sorted(waits)[int(0.99 * len(waits))] > CAPACITIES["babyai"].p99_ms
