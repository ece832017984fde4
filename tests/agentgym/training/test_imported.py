"""A run that learns from imported trajectories of two environments, in AgentGym's layout.
There are gold trajectories and losing ones.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from agentgym.audit import audit
from agentgym.config import load_config
from agentgym.data.items import load_splits
from agentgym.data.trajectories import RECORDED, decode
from agentgym.models.checkpoint import load_checkpoint
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store, steps_of
from agentgym.records import DEMOS, decode_trajectories, encode_trajectories
from agentgym.steps.context import METRICS
from agentgym.steps.step import stages
from agentgym.store.manifest import Blob, Manifest, encode_commit
from agentgym.tracking.points import decode_points
from agentgym.training.demonstrations import tokenized_demonstrations
from agentgym.training.offline import dataset_of
from agentgym.types import Status
from envs.env import ExpertFailed
from envs.registry import load_spec
from tests.first_steps import BEFORE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

OPTIONS = {
    "babyai": {
        "levels": ["GoToRedBallNoDists"],
        "view": "compact",
        "actions": "low",
        "reward": "binary",
    },
    "textcraft": {"max_depth": 1, "distractors": 1},
}
SMALL = {
    "dpo": ["algorithm.num_items=8", "algorithm.pairs_per_step=4"],
    "agent_evol": ["algorithm.num_items=8"],
}
LOSING = {"babyai": ["turn left", "turn left"], "textcraft": ["inventory", "inventory"]}
ITEMS = {"babyai": range(60), "textcraft": range(40)}
INSTRUCTIONS = [
    ("human", None, "What you can do here: ..."),
    ("gpt", False, "OK. I'll follow your instructions and try my best to solve the task."),
]


def play(env, task, actions=None):
    """Return a published row of a played episode; without actions the expert plays.
    Return None if the expert gives up.
    """
    spec = load_spec(env, OPTIONS[env])
    simulator = spec.make()
    messages = [*INSTRUCTIONS, ("human", None, simulator.reset(task))]
    expert = simulator.expert() if actions is None else None
    try:
        for action in actions if expert is None else iter(expert.next_action, None):
            result = simulator.step(action)
            messages += [
                ("gpt", True, f"Thought:\nNow {action}.\n\nAction:\n{action}"),
                ("human", None, result.observation),
            ]
            if result.terminated or result.truncated:
                break
    except ExpertFailed:
        return None
    finally:
        simulator.close()
    keys = ("from", "loss", "value")
    return {
        "item_id": f"{env}_{task}",
        "conversations": [dict(zip(keys, message, strict=True)) for message in messages],
    }


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A dataset of two environments, with a gold trajectory of each item.
    Every other item has a losing one too.
    """
    folder = tmp_path_factory.mktemp("published")
    for env, tasks in ITEMS.items():
        for name, ids in (
            (f"train/{env}_train.json", tasks),
            (f"eval/{env}_test.json", range(100, 108)),
        ):
            (folder / "lists" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "lists" / name).write_text(
                json.dumps([{"item_id": f"{env}_{task}"} for task in ids])
            )
        rows = [play(env, task) for task in tasks] + [
            play(env, task, LOSING[env]) for task in tasks[::2]
        ]
        (folder / "trajectories").mkdir(exist_ok=True)
        (folder / "trajectories" / f"{env}_trajectories.json").write_text(
            json.dumps([row for row in rows if row])
        )
    return folder


@pytest.fixture(scope="module")
def begun(published, tmp_path_factory):
    """The params file's folder of a run, finished up to its warm start."""
    folder = tmp_path_factory.mktemp("run")
    tree = {
        "extends": str(Path(__file__).parents[3] / "params.yaml"),
        "deterministic": True,
        "data": {"path": str(published / "lists"), "trajectories": str(published / "trajectories")},
        "env": {"name": "babyai", "options": OPTIONS["babyai"]},
        "mix": [{"name": "textcraft", "options": OPTIONS["textcraft"]}],
        "model": {
            "context_tokens": 1024,
            "hidden_size": 32,
            "num_heads": 1,
            "num_kv_heads": 1,
            "mlp_size": 64,
        },
        "warm_start": {
            "source": "trajectories",
            "num_demos": 60,
            "steps": 100,
            "batch_size": 16,
            "optimizer": {"lr": 0.005},
        },
        "rollout": {
            "items_per_step": 4,
            "group_size": 2,
            "max_new_tokens": 24,
            "concurrency": 8,
            "action_format": "react",
        },
        "horizon": {"kind": "fixed", "max_turns": [6], "stage_steps": [2]},
        "validation": {"every": 0},
        "evaluation": {"num_items": 4, "num_samples": 1, "k": [1], "max_turns": 6},
        "store": {"path": str(folder / "store")},
    }
    (folder / "params.yaml").write_text(yaml.safe_dump(tree))
    cfg = load_config(folder / "params.yaml")
    for name in BEFORE:
        assert str(run_step(name, cfg)) == "ran"
    return folder


def of_recipe(begun, recipe, folder):
    shutil.copytree(begun, folder, dirs_exist_ok=True)
    tree = yaml.safe_load((folder / "params.yaml").read_text())
    tree["store"]["path"] = str(folder / "store")
    (folder / "params.yaml").write_text(yaml.safe_dump(tree))
    cfg = load_config(
        folder / "params.yaml", [f"algorithm.recipe={recipe}", *SMALL.get(recipe, [])]
    )
    assert {str(run_step(name, cfg)) for name in BEFORE} == {"done"}
    return cfg


@pytest.mark.slow
def test_gold_trajectories_are_demonstrations_and_losing_ones_are_kept_for_comparison(
    begun, published
):
    cfg = load_config(begun / "params.yaml")
    store = open_store(cfg)
    done = finished(cfg, store)
    recorded = decode(store.read(done["prepare"], RECORDED))
    trained = {
        item.item_id
        for env in OPTIONS
        for item in load_splits(
            published / "lists",
            env,
            validation_fraction=cfg.data.validation_fraction,
            seed=cfg.seed,
        ).train
    }
    assert {each.item.item_id for each in recorded} == trained
    played = decode_trajectories(store.read(done["demonstrate"], DEMOS))
    results = done["demonstrate"].results
    assert results["num_played"] == len(played) == 60
    assert results["num_demos"] == sum(demo.success for demo in played)
    assert not any(demo.input_ids for demo in played)
    renderer = load_checkpoint(store, done["initialize"]).renderer
    demos = tokenized_demonstrations(cfg, store, done["demonstrate"], renderer)
    assert done["warm-start"].results["num_too_long"] == 60 - len(demos)
    assert [demo.sample for demo in demos] == sorted({demo.sample for demo in demos})
    assert max(len(demo.input_ids) for demo in demos) <= cfg.model.context_tokens
    for env in OPTIONS:
        assert {demo.success for demo in demos if demo.item.env == env} == {True, False}
        assert {demo.status for demo in demos if demo.item.env == env and not demo.success} == {
            Status.MAX_TURNS
        }
    spans = [demo.input_ids[turn.start : turn.end] for demo in demos for turn in demo.turns]
    assert sum(sum(demo.action_mask) for demo in demos) == sum(map(len, spans))


def test_trajectories_that_do_not_fit_the_context_are_left_out_and_named_where_none_is_left(begun):
    cfg = load_config(begun / "params.yaml")
    store = open_store(cfg)
    done = finished(cfg, store)
    renderer = load_checkpoint(store, done["initialize"]).renderer
    lengths = sorted(
        len(demo.input_ids)
        for demo in tokenized_demonstrations(cfg, store, done["demonstrate"], renderer)
    )

    def fitting(most):
        model = cfg.model.model_copy(update={"context_tokens": most})
        short = cfg.model_copy(update={"model": model})
        return tokenized_demonstrations(short, store, done["demonstrate"], renderer)

    assert len(fitting(lengths[-1] - 1)) == sum(each < lengths[-1] for each in lengths)
    with pytest.raises(
        ValueError,
        match=r"^of trajectories that fit model\.context_tokens, babyai's solve none of 0 tasks",
    ):
        fitting(lengths[0] - 1)


@pytest.mark.parametrize(
    "recipe", ["sft", "dpo", pytest.param("agent_evol", marks=pytest.mark.slow)]
)
def test_a_run_trains_from_them_and_passes_its_audit(begun, recipe, tmp_path):
    cfg = of_recipe(begun, recipe, tmp_path)
    assert "demonstrate" in steps_of(cfg)["stage-1"].parents
    outcome = run_step("stage-1", cfg)
    store = open_store(cfg)
    if recipe == "dpo":
        done = finished(cfg, store)
        renderer = load_checkpoint(store, done["initialize"]).renderer
        demos = tokenized_demonstrations(cfg, store, done["demonstrate"], renderer)
        pairs = dataset_of(cfg, stages(cfg.horizon)[0], [], demos)
        assert {pair[0].item.env for pair in pairs} == set(OPTIONS)
        assert all(
            pair[0].success and not pair[1].success and pair[0].item == pair[1].item
            for pair in pairs
        )
        commits = store.history("stage-1", outcome.manifest.key)
        points = [
            point
            for commit in commits
            if METRICS in commit.records
            for point in decode_points(store.read(commit, METRICS))
        ]
        assert points[0].metrics["rollout/num_kept"] >= len(pairs) > 0
    report = audit(cfg, num_episodes=None)
    assert report.ok, [check.failures for check in report.checks if not check.ok]


def test_a_run_whose_trajectories_solve_nothing_of_an_environment_says_so(begun, tmp_path):
    """Change the options: the same ids are other tasks than those recorded."""
    other = [*OPTIONS["babyai"].items(), ("levels", ["OpenRedDoor"])]
    tree = {
        "extends": str(begun / "params.yaml"),
        "env": {"options": dict(other)},
        "store": {"path": str(tmp_path / "store")},
    }
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(tree))
    cfg = load_config(tmp_path / "params.yaml", ["warm_start.num_demos=8"])
    run_step("prepare", cfg)
    with pytest.raises(ValueError, match=r"^the trajectories of babyai solve none of \d tasks"):
        run_step("demonstrate", cfg)


def test_the_audit_finds_an_action_that_was_not_imported(begun, tmp_path):
    cfg = of_recipe(begun, "sft", tmp_path)
    store = open_store(cfg)
    final = finished(cfg, store)["demonstrate"]
    demos = decode_trajectories(store.read(final, DEMOS))
    index = next(
        index for index, demo in enumerate(demos) if not demo.success and demo.item.env == "babyai"
    )
    turns = (*demos[index].turns[:-1], replace(demos[index].turns[-1], action="turn right"))
    demos[index] = replace(demos[index], turns=turns)
    data, folder = (
        encode_trajectories(demos),
        next((cfg.store.path / "steps").glob("demonstrate-*")),
    )
    (folder / "blobs" / Blob.of(data).digest).write_bytes(data)
    forged = Manifest.model_copy(final, update={"blobs": {**final.blobs, DEMOS: Blob.of(data)}})
    (folder / "manifests" / "000000.json").write_bytes(encode_commit([forged]))
    said = {
        check.name: " | ".join(check.failures)
        for check in audit(cfg, num_episodes=1).checks
        if not check.ok
    }
    assert f"sample {demos[index].sample}: actions as imported" in said["numbers"]
