"""Costs of training add up over its points."""

from agentgym.tracking.points import Point
from agentgym.tracking.progress import TOKENS, TURNS, progressed


def played(episodes, turns, tokens, failed=0.0, **more):
    metrics = {
        "rollout/num_episodes": episodes,
        "rollout/env_error_frac": failed,
        "rollout/turns_mean": turns,
        "rollout/tokens_mean": tokens,
    }
    return Point(1, 0, metrics | more)


def test_turns_and_tokens_of_the_episodes_that_count_add_up():
    first = played(128.0, 5.5, 100.0)
    told = progressed([], first)
    assert told == {TURNS: 704.0, TOKENS: 12800.0}
    before = [Point(1, 0, first.metrics | told), Point(2, 0, {"sft/loss": 1.0})]
    assert progressed(before, played(100.0, 4.0, 50.0, failed=0.1)) == {
        TURNS: 704.0 + 360.0,
        TOKENS: 12800.0 + 4500.0,
    }


def test_a_point_without_episodes_has_none():
    assert progressed([], Point(1, 0, {"sft/loss": 1.0})) == {}
