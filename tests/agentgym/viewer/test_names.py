"""Names of runs, checkpoints and evaluations for people."""

import json

from tests.agentgym.viewer.conftest import TRAINING, episode


def deliver(made, key, *steps):
    """Mark steps, as (name, key), as delivered to an MLflow run."""
    folder = made.folder / "delivered" / (key * 64)
    folder.mkdir(parents=True)
    for name, step_key in steps:
        (folder / f"{name}-{step_key * 16}").touch()


def plan(text, **identity):
    tree = {"about": {"policy": text}, "identity": identity, "slots": []}
    return {"plan.json": json.dumps(tree).encode()}


def names(viewer):
    every = viewer.names
    return {row["folder"]: every.step(row) for row in viewer.bodies.steps().values()}, every


def test_a_checkpoint_is_named_by_its_run_recipe_and_seed(made, view):
    start = made.add([episode(0)], config={"seed": 7}, step="warm-start", key="a", done=True)
    built = {"warm-start": start.digest}
    made.add([episode(1)], step="stage-1", key="b", parents=built, done=True)
    other = {**TRAINING, "algorithm": {"recipe": "sft"}}
    made.add([episode(1)], step="stage-1", key="c", parents=built, config=other, done=True)
    deliver(made, "1", ("warm-start", "a"), ("stage-1", "b"))
    deliver(made, "2", ("warm-start", "a"), ("stage-1", "c"))
    by_folder, all_names = names(view())
    assert by_folder == {
        f"stage-1-{'b' * 16}": "stage-1 of r111111111111, grpo, seed 7",
        f"stage-1-{'c' * 16}": "stage-1 of r222222222222, sft, seed 7",
        # the recipes of its two runs differ
        f"warm-start-{'a' * 16}": "warm-start of r111111111111 and 1 more, seed 7",
    }
    assert all_names.checkpoints[start.digest] == "warm-start of r111111111111 and 1 more, seed 7"
    assert all_names.run("r222222222222") == "r222222222222, sft, seed 7"
    assert all_names.about["r222222222222"] == "sft, max_turns 4, seed 7"
    assert all_names.run("unknown") == "unknown"


def test_an_evaluation_is_named_by_the_checkpoint_whose_weights_it_plays(made, view):
    stage = made.add([episode(0)], step="stage-1", key="b", done=True)
    weights = {"kind": "weights", "weights": "f" * 64}
    made.add(
        [episode(0)],
        step="evaluate-stage-1",
        key="c",
        parents={"stage-1": stage.digest},
        config={"evaluation": {}},
        records=plan("stage-1 commit 0, engine torch", policy=weights),
        results={"checkpoint": "stage-1"},
        done=True,
    )
    alone = {"f": weights, "e": {"kind": "weights", "weights": "e" * 64}, "d": {"kind": "expert"}}
    for key, policy in alone.items():
        config = {"policy": policy, "protocol": {}}
        records = plan(f"policy {key}")
        made.add([episode(0)], step="evaluation", key=key, config=config, records=records)
    deliver(made, "1", ("stage-1", "b"), ("evaluate-stage-1", "c"))
    viewer = view()
    by_folder, all_names = names(viewer)
    results = {row["key"][0]: all_names.result(row) for row in viewer.bodies.steps().values()}
    assert results == {
        "b": "stage-1",  # no evaluation
        "c": "stage-1 of r111111111111, grpo, seed 7",
        "f": "stage-1 of r111111111111, grpo, seed 7",
        "e": "policy e",
        "d": "policy d",
    }
    assert by_folder[f"evaluate-stage-1-{'c' * 16}"] == (
        "evaluate-stage-1 of r111111111111, grpo, seed 7"
    )
    assert by_folder[f"evaluation-{'d' * 16}"].startswith("policy d, 20")  # and its date
    assert all_names.run(f"evaluation-{'d' * 12}") == by_folder[f"evaluation-{'d' * 16}"]
