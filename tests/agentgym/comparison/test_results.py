"""Numbers of a comparison compared with hand-computed values."""

import json

import numpy as np
import pytest

from agentgym.comparison.figures import AXES
from agentgym.comparison.matrix import Cell
from agentgym.comparison.results import CellResult, Row, training_curve
from agentgym.config import RunConfig
from agentgym.tracking.points import Point


def point(step, episodes=64.0, failed=0.0, turns=5.0, tokens=50.0, cpu=2.0, **more):
    metrics = {
        "rollout/num_episodes": episodes,
        "rollout/env_error_frac": failed,
        "rollout/turns_mean": turns,
        "rollout/tokens_mean": tokens,
        "rollout/action_tokens_mean": tokens / 5,
        "time/cpu_s": cpu,
        "time/step_s": 10.0 * cpu,
        "time/validate_s": cpu,
        "perf/accelerators": 4.0,
    }
    return Point(step, 1000 + step, {**metrics, **more})


def test_costs_add_up_over_steps_and_failed_episodes_cost_no_turns():
    validated = {"validation/success": 0.5}
    curve, cost = training_curve(
        [
            point(1),
            point(2, failed=0.5, turns=4.0, **validated),
            point(3, cpu=1.5, **{"validation/success": 0.75}),
        ]
    )
    # 64 * 5, then 32 * 4 more, then 64 * 5 more
    names = ("step", "turns", "tokens", "sampled_tokens", "cpu_s", "wall_s")
    assert [(*(each.cost[name] for name in names), each.success) for each in curve] == [
        (2, 448.0, 4800.0, 960.0, 4.0, 36.0, 0.5),
        (3, 768.0, 8000.0, 1600.0, 5.5, 49.5, 0.75),
    ]
    # four devices for 49.5 seconds; validation is not a training cost
    assert cost == curve[-1].cost
    assert cost["accelerator_h"] == pytest.approx(4 * 49.5 / 3600)


def test_what_never_sampled_costs_time_alone_and_what_never_trained_costs_nothing():
    curve, cost = training_curve([Point(1, 0, {"sft/loss": 1.0, "time/cpu_s": 3.0})])
    assert (curve, cost["turns"], cost["cpu_s"]) == ((), 0.0, 3.0)
    assert training_curve([]) == ((), dict.fromkeys(AXES, 0.0))


def row(name, after, start=None, seeds=(0, 1)):
    """Return a row from greedy values per seed and item, after and before training."""
    results = []
    for index, seed in enumerate(seeds):
        cfg = RunConfig.model_validate({"seed": seed})
        cell = Cell(name, name, "long", "", seed, "evaluate-stage-3", cfg)
        tables = [
            {"greedy": np.array(values[index], dtype=float)} if values else None
            for values in (after, start)
        ]
        results.append(CellResult(cell, tables[0], tables[1], (), {}, (), ()))
    return Row(name, tuple(results))


def test_a_gain_is_paired_item_by_item_and_seed_by_seed():
    found = row("a", [[1, 1, 0, 1], [1, 1, 1, 1]], [[0, 1, 0, 0], [1, 0, 0, 1]]).gain("greedy")
    # differences 1 0 0 1 and 0 1 1 0
    assert found.per_seed == (0.5, 0.5)
    assert found.interval.mean == 0.5
    assert found.to_json()["sd"] == 0.0
    assert row("a", [[1, 0], [1, 1]]).gain("greedy") is None


def test_rows_are_compared_over_the_seeds_they_share():
    ours = row("a", [[1, 1], [1, 0], [0, 0]], seeds=(0, 1, 2))
    theirs = row("b", [[0, 0], [1, 1]], seeds=(2, 1))
    found = ours.minus(theirs, "greedy")
    # seed 1: 1 0 - 1 1, seed 2: 0 0 - 0 0
    assert found.per_seed == (-0.5, 0.0)
    with pytest.raises(ValueError, match="a and c have no finished seed in common"):
        ours.minus(row("c", [[1, 1]], seeds=(5,)), "greedy")


def test_an_estimate_is_plain_json_with_the_sample_deviation():
    found = row("a", [[1, 1, 1, 0], [1, 0, 0, 0]]).success("greedy").to_json()
    # 0.75 and 0.25: mean 0.5, sample standard deviation sqrt(2 * 0.0625)
    assert (found["mean"], found["per_seed"], found["sd"]) == (0.5, [0.75, 0.25], 0.3536)
    assert json.loads(json.dumps(found)) == found
    assert row("a", [[1, 0]], seeds=(4,)).success("greedy").to_json()["sd"] is None


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([[1] * 96 + [0] * 4] * 2, [[1] * 97 + [0] * 3] * 2, "ceiling"),
        ([[1] * 96 + [0] * 4] * 2, [[1] * 94 + [0] * 6] * 2, ""),
        ([[0] * 96 + [1] * 4] * 2, [[0] * 97 + [1] * 3] * 2, "floor"),
    ],
)
def test_a_contrast_says_where_it_has_no_room(ours, theirs, said):
    assert row("a", ours).limit(row("b", theirs), "greedy") == said
