"""Tests for evaluations with failed episodes: what they report, and when they report nothing."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from agentgym.config import load_config
from agentgym.evaluation.intervals import FAILED
from agentgym.evaluation.numbers import headline
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import open_store, semantic_of, steps_of
from agentgym.rollouts.collect import RolloutError
from agentgym.steps.context import METRICS
from agentgym.tracking.points import decode_points
from envs.registry import load_spec
from flows.shell import left_out
from tasks.artifacts import step_table
from tests.agentgym.evaluation.outcomes import NAN, result_of


class Failing:
    """BabyAI environment that fails for task 1001."""

    def __init__(self, world):
        self.world = world

    def __getattr__(self, name):
        return getattr(self.world, name)

    def reset(self, task_id):
        if task_id == 1001:
            raise RuntimeError("the simulator broke")
        return self.world.reset(task_id)


@pytest.mark.parametrize("floor", [0.95, 0.8])
def test_an_item_whose_environment_fails_counts_in_one_convention_or_ends_the_evaluation(
    floor, copy_run, tmp_path, tiny_params, serving
):
    overrides = [
        "rollout.max_env_error_frac=1",
        "rollout.max_attempts=1",
        f"evaluation.min_coverage={floor}",
    ]
    cfg = load_config(tiny_params(copy_run(tmp_path), deterministic=True), overrides)
    spec = load_spec("babyai", dict(cfg.env.options))
    with serving(replace(spec, make=lambda: Failing(spec.make()))) as (endpoint, _):

        def evaluate():
            return run_step(
                "evaluate-initialize",
                cfg,
                environment=lambda expert: contextlib.nullcontext({"babyai": [endpoint]}),
            )

        if floor == 0.95:
            with pytest.raises(
                RolloutError,
                match=(
                    r"^3 of 36 episodes .* at most 91\.7% count, and evaluation\.min_coverage is"
                    r" 95\.0%.* Last: babyai_1001 sample \d: .*the simulator broke"
                ),
            ):
                evaluate()
            return
        manifest = evaluate().manifest
    found = manifest.results
    assert (found["num_env_errors"], found["coverage"]) == (3, 33 / 36)
    assert (found["summary"]["greedy"]["num_items"], found[FAILED]["greedy"]["num_items"]) == (
        11,
        12,
    )
    (point,) = decode_points(open_store(cfg).read(manifest, METRICS))
    assert point.metrics["eval/coverage"] == 33 / 36


@pytest.mark.parametrize(
    "key",
    ["rollout.episode_timeout_s=5", "rollout.max_attempts=1", "rollout.max_env_error_frac=0.5"],
)
def test_what_decides_which_episodes_count_is_in_the_keys(tmp_path, tiny_params, key):
    path = tiny_params(tmp_path)
    plain, other = load_config(path), load_config(path, [key])
    differ = {
        name
        for name, step in steps_of(plain).items()
        if semantic_of(step, plain) != semantic_of(step, other)
    }
    demonstrations = {"demonstrate"} if "episode_timeout_s" in key else set()
    assert (
        differ
        == {name for name in steps_of(plain) if name.startswith(("stage-", "evaluate-"))}
        | demonstrations
    )


def manifest(greedy):
    greedy = np.array(greedy)
    found = headline(result_of(greedy, greedy[:, None]), (1,), 0.95)
    return SimpleNamespace(results={**found, "checkpoint": "stage-2"})


def test_the_summary_says_it_in_80_columns_and_only_where_it_matters():
    assert left_out({"evaluate-stage-2": manifest([1.0, 0.0])}) == []
    lines = left_out({"evaluate-stage-2": manifest([1.0] * 50 + [0.0] * 41 + [NAN] * 9)})
    assert max(map(len, lines)) <= 80
    text = " ".join(line.strip() for line in lines)
    assert (
        text
        == "stage 2: 91.0 % of its episodes count; with the failed ones as failures: greedy 50.0,"
        " avg@1 50.0"
    )


def test_the_artifact_of_an_evaluation_says_it_too():
    rows = {row["metric"]: row for row in step_table(None, manifest([1.0, 0.0, 1.0, NAN]))}
    assert rows["coverage"]["mean"] == 0.75
    assert rows["greedy, failed as failures"]["mean"] == 0.5
