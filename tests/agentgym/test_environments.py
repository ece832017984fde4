"""Every environment, and several at once, can be trained, resumed and audited like BabyAI."""

import contextlib
import json
from pathlib import Path

import pytest

from agentgym.audit import audit
from agentgym.config import load_config
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.steps.context import METRICS
from agentgym.tracking.points import decode_points
from agentgym.types import Status
from tests.first_steps import BEFORE

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SMALL = {
    "model": {
        "context_tokens": 1024,
        "hidden_size": 32,
        "num_heads": 1,
        "num_kv_heads": 1,
        "mlp_size": 64,
    },
    "warm_start": {"num_demos": 48, "steps": 100, "batch_size": 8, "optimizer": {"lr": 0.005}},
    "horizon": {"kind": "stepwise", "max_turns": [5, 6], "stage_steps": [2, 1]},
    "validation": {"every": 2, "num_items": 6, "max_turns": 6},
    "evaluation": {"num_items": 6, "num_samples": 2, "k": [1, 2], "max_turns": 6},
}
SHORT = {**SMALL["warm_start"], "steps": 20}  # for tests that need no success
ROLLOUT = {"items_per_step": 6, "group_size": 4, "concurrency": 24, "temperature": 0.7}
BABYAI = {"name": "babyai", "options": {"levels": ["GoToRedBallNoDists"]}}
TEXTCRAFT = {
    "name": "textcraft",
    "options": {"goals": ["emerald block", "gold ingot", "melon seeds", "paper"], "distractors": 0},
}
SEARCHQA = {"name": "searchqa", "options": {"topk": 1, "max_doc_chars": 240}}
SCIWORLD = {"name": "sciworld", "options": {"tasks": ["find-non-living-thing"]}}
WEBARENA = {"name": "webarena", "options": {"max_observation_chars": 100}}


@pytest.fixture
def params(tiny_params, tmp_path):
    """Return a function of (environments, **changes) that configures a small run with own items."""

    def make(*envs, **changes):
        data = tmp_path / "data"
        for env in envs:
            if list(data.glob(f"*/{env['name']}_*.json")):
                continue  # the test wrote its own lists
            for name, ids in (("train", range(100)), ("eval", range(200, 230))):
                place = data / name / f"{env['name']}_{'train' if name == 'train' else 'test'}.json"
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(json.dumps([{"item_id": f"{env['name']}_{task}"} for task in ids]))
        tree = {
            "env": envs[0],
            "mix": list(envs[1:]),
            "data": {"path": str(data)},
            **SMALL,
            **changes,
        }
        return load_config(tiny_params(tmp_path / "run", **tree))

    return make


def train(cfg):
    """Run all steps up to the registered model, then audit.
    Return the metrics of the three optimizer steps.
    """
    for name in BEFORE:
        run_step(name, cfg)
    return train_on(cfg)


def train_on(cfg):
    """Run `train` from a finished warm start on."""
    for name in ("stage-1", "stage-2", "evaluate-warm-start", "evaluate-stage-2", "register"):
        run_step(name, cfg)
    report = audit(cfg, num_episodes=4)
    assert report.ok, [check.failures for check in report.checks if not check.ok]
    store = open_store(cfg)
    done = finished(cfg, store)
    assert done["register"].results["version"] == "1"
    commits = [
        commit for name in ("stage-1", "stage-2") for commit in store.history(name, done[name].key)
    ]
    return [
        point.metrics for commit in commits for point in decode_points(store.read(commit, METRICS))
    ], done


@pytest.mark.slow  # a run on all of them, below, is in every test run
@pytest.mark.parametrize(
    ("env", "max_new_tokens", "observation_tokens", "entropy_coef"),
    # this model is too small to answer SearchQA
    [
        pytest.param(TEXTCRAFT, 40, 64, 0.0, id="textcraft"),
        pytest.param(SEARCHQA, 60, 110, 0.01, id="searchqa"),
    ],
)
def test_three_updates_on_each_environment_pass_the_audit(
    params, serving, env, max_new_tokens, observation_tokens, entropy_coef
):
    rollout = {
        **ROLLOUT,
        "max_new_tokens": max_new_tokens,
        "observation_tokens": observation_tokens,
    }
    with serving(env["name"], env["options"]) as (endpoint, _):
        cfg = params(
            {**env, "endpoints": [endpoint]},
            rollout=rollout,
            algorithm={"entropy_coef": entropy_coef},
            warm_start=SHORT if entropy_coef else SMALL["warm_start"],
        )
        metrics, done = train(cfg)
    assert len(metrics) == 3
    # one short document does not always contain the answer
    assert done["demonstrate"].results["expert_success"] > 0.7
    assert all(row["rollout/env_error_frac"] == 0 for row in metrics)
    assert any(row.get("actor/grad_norm", 0.0) > 0 for row in metrics)  # the weights moved


def test_an_episode_the_simulator_cuts_is_learned_from_as_cut_and_audited_as_such(params):
    """Stop TextCraft after two steps, before the horizon: the critic evaluates the final state."""
    textcraft = {
        **TEXTCRAFT,
        "options": {**TEXTCRAFT["options"], "max_steps": 2, "goals": ["paper", "melon seeds"]},
    }
    cfg = params(
        textcraft,
        rollout={**ROLLOUT, "items_per_step": 2, "max_new_tokens": 24, "observation_tokens": 64},
        algorithm={"recipe": "ppo", "truncated": "bootstrap"},
        warm_start={**SMALL["warm_start"], "num_demos": 16, "steps": 10},
        horizon={"kind": "fixed", "max_turns": [6], "stage_steps": [1]},
        validation={"every": 0, "max_turns": 6},
    )
    for name in (*BEFORE, "stage-1"):
        run_step(name, cfg)
    store = open_store(cfg)
    (commit,) = store.history("stage-1", finished(cfg, store)["stage-1"].key)
    episodes = decode_trajectories(store.read(commit, TRAJECTORIES))
    cut = [episode for episode in episodes if episode.status is Status.ENV_LIMIT]
    assert cut
    assert {len(episode.turns) for episode in cut} == {2}
    # the final state was read
    assert all(len(episode.input_ids) > episode.turns[-1].end for episode in cut)
    (point,) = decode_points(store.read(commit, METRICS))
    assert point.metrics["rollout/env_limit_frac"] == len(cut) / len(episodes)
    report = audit(cfg, num_episodes=len(episodes))
    assert report.ok, [check.failures for check in report.checks if not check.ok]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("chromium")
def test_three_updates_in_a_browser_pass_the_audit(params, serving, tmp_path):
    """Use a real browser, with few lines per page, short tasks and few episodes.
    The audit replays on a server that it starts.
    """
    webarena = ROOT / "envs/webarena"
    short = [
        int(task)
        for task, actions in json.loads((webarena / "gold.json").read_text()).items()
        if len(actions) <= 4
    ]
    for name, ids in (("train", short[:-6]), ("eval", short[-6:])):
        place = tmp_path / "data" / name / f"webarena_{'train' if name == 'train' else 'test'}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps([{"item_id": f"webarena_{task}"} for task in ids]))
    with serving("webarena", WEBARENA["options"]) as (endpoint, _):
        cfg = params(
            {**WEBARENA, "endpoints": [endpoint]},
            rollout={
                **ROLLOUT,
                "items_per_step": 2,
                "group_size": 3,
                "concurrency": 6,
                "max_new_tokens": 40,
                "observation_tokens": 240,
            },
            algorithm={"entropy_coef": 0.01},
            model={**SMALL["model"], "context_tokens": 2048},
            warm_start={**SMALL["warm_start"], "num_demos": 12, "steps": 5},
            validation={"every": 2, "num_items": 2, "max_turns": 5},
            evaluation={"num_items": 2, "num_samples": 1, "k": [1], "max_turns": 5},
        )
        metrics, done = train(cfg)
    assert len(metrics) == 3
    # some tasks need scrolling and exceed the turns
    assert done["demonstrate"].results["expert_success"] > 0.7
    assert all(row["rollout/env_error_frac"] == 0 for row in metrics)
    assert any(row.get("actor/grad_norm", 0.0) > 0 for row in metrics)


def test_a_run_on_several_environments_mixes_them_by_weight_and_reports_each(params, serving):
    mixed = BABYAI, {**TEXTCRAFT, "weight": 2.0}, SEARCHQA
    changes = {
        "rollout": {
            **ROLLOUT,
            "items_per_step": 8,
            "max_new_tokens": 60,
            "observation_tokens": 110,
        },
        "algorithm": {"recipe": "reinforce++"},
        "warm_start": SHORT,
    }
    alone = params(*mixed, **changes)  # each step starts its own servers
    for name in BEFORE:
        run_step(name, alone)
    with contextlib.ExitStack() as stack:
        served = [
            {**env, "endpoints": [stack.enter_context(serving(env["name"], env["options"]))[0]]}
            for env in mixed
        ]
        cfg = params(*served, **changes)
        metrics, done = train_on(cfg)
    for row in metrics:
        assert row["rollout/babyai/num_episodes"] == 2 * 4
        assert row["rollout/textcraft/num_episodes"] == 4 * 4
        assert row["rollout/searchqa/num_episodes"] == 2 * 4
    consumed = [
        item
        for name in ("stage-1", "stage-2")
        for c in open_store(cfg).history(name, done[name].key)
        for item in c.state["consumed"]
    ]
    assert [item.partition("_")[0] for item in consumed[:8]] == [
        "textcraft",
        "babyai",
        "searchqa",
        "textcraft",
    ] * 2
    results = done["evaluate-stage-2"].results
    assert {env: own["num_items"] for env, own in results["by_env"].items()} == {
        "babyai": 2,
        "searchqa": 1,
        "textcraft": 3,
    }
    assert 0 <= results["by_env"]["babyai"]["summary"]["greedy"]["mean"] <= 1
    assert "validation/babyai/success" in metrics[1]


@pytest.mark.slow
@pytest.mark.usefixtures("java")
def test_science_and_a_grid_world_are_learned_in_one_run(params, serving):
    longer = {
        "horizon": {"kind": "stepwise", "max_turns": [7, 9], "stage_steps": [2, 1]},
        "warm_start": {**SMALL["warm_start"], "num_demos": 24, "steps": 60},
        "validation": {**SMALL["validation"], "num_items": 4},
        "evaluation": {
            **SMALL["evaluation"],
            "num_items": 4,
            "num_samples": 1,
            "k": [1],
            "max_turns": 9,
        },
    }
    served = {"max_sessions": 4}  # also the number of games to prepare
    with (
        serving("babyai", BABYAI["options"], **served) as (grid, _),
        serving("sciworld", SCIWORLD["options"], **served) as (science, _),
    ):
        cfg = params(
            {**BABYAI, "endpoints": [grid]},
            {**SCIWORLD, "endpoints": [science], **served},
            rollout={
                **ROLLOUT,
                "items_per_step": 4,
                "concurrency": 4,
                "max_new_tokens": 40,
                "observation_tokens": 64,
            },
            **longer,
        )
        metrics, done = train(cfg)
    assert len(metrics) == 3
    assert done["demonstrate"].results["expert_success"] > 0.7  # nine turns are sometimes too few
    for row in metrics:
        assert row["rollout/babyai/num_episodes"] == row["rollout/sciworld/num_episodes"] == 2 * 4
        assert row["rollout/env_error_frac"] == 0
    assert any(row.get("actor/grad_norm", 0.0) > 0 for row in metrics)


def test_environments_of_one_run_need_names_of_their_own(params):
    with pytest.raises(ValueError, match="must have different names, got babyai, babyai"):
        params(BABYAI, BABYAI)
