"""Tests for keys of steps, checks before the first step, and refilling a lost MLflow database."""

import json
import shutil
from contextlib import contextmanager

import pytest
from mlflow import MlflowClient

from agentgym.audit import audit
from agentgym.config import load_config
from agentgym.evaluation.history import History
from agentgym.evaluation.record import attempts_of
from agentgym.pipeline.dvc import pointer
from agentgym.pipeline.run import _with_servers, run_step, run_with_parents
from agentgym.pipeline.table import finished, key_of, open_store, semantic_of, steps_of
from agentgym.pipeline.versions import standing
from agentgym.steps.context import METRICS
from agentgym.steps.step import Kind
from agentgym.tracking.deliver import committed_points, tracker_of
from agentgym.tracking.points import LedgerError, decode_points
from agentgym.types import Endpoint


@pytest.fixture
def run(copy_run, tmp_path, tiny_params, tiny_endpoint):
    """A finished run that this test may change."""
    return load_config(tiny_params(copy_run(tmp_path), endpoint=tiny_endpoint, deterministic=True))


def confirm_all(cfg):
    assert {str(run_step(name, cfg)) for name in steps_of(cfg)} == {"done"}


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ([], ["rollout.action_format=react"]),
        (["rollout.instructions=true"], ["rollout.examples=1"]),
    ],
)
def test_demonstrations_in_another_conversation_are_another_step(
    tmp_path, tiny_params, settings, changed
):
    plain = load_config(tiny_params(tmp_path), settings)
    other = load_config(tiny_params(tmp_path), [*settings, *changed])
    step = steps_of(plain)["demonstrate"]
    assert semantic_of(step, plain) != semantic_of(step, other)


@pytest.mark.parametrize(
    ("override", "first"),
    [
        ("warm_start.steps=7", "warm-start"),
        ("warm_start.batch_size=8", "warm-start"),
        ("warm_start.optimizer.lr=0.001", "warm-start"),
        ("model.mlp_size=128", "initialize"),
        ("warm_start.num_demos=59", "demonstrate"),
    ],
)
def test_demonstrations_and_the_first_model_are_made_once_for_what_does_not_change_them(
    run, tmp_path, override, first
):
    other = load_config(tmp_path / "params.yaml", [override])
    before = list(steps_of(other))[: list(steps_of(other)).index(first)]
    done = finished(other, open_store(other))
    assert [name for name in done if not name.startswith("evaluate-")] == [
        name for name in before if not name.startswith("evaluate-")
    ]


@pytest.mark.parametrize("override", ["seed=7", "warm_start.num_demos=59", "env.name=textcraft"])
def test_a_published_model_is_the_same_first_model_for_every_seed_and_environment(
    tmp_path, tiny_params, override
):
    hub = ["model.source=hub", "model.name=owner/model", "model.context_tokens=4096"]
    plain = load_config(tiny_params(tmp_path), hub)
    other = load_config(tiny_params(tmp_path), [*hub, override])
    keys = {key_of(steps_of(cfg)["initialize"], cfg, {}) for cfg in (plain, other)}
    assert len(keys) == 1


@pytest.mark.parametrize("opened_before", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_ledger_that_was_deleted_gets_everything_again(run, opened_before):
    (run.state_dir / "mlflow.db").unlink()
    if opened_before:  # by `make ui`
        MlflowClient(run.tracking_uri).search_experiments()
    confirm_all(run)
    report = audit(run, num_episodes=1)
    assert report.ok, [check for check in report.checks if not check.ok]
    client = MlflowClient(run.tracking_uri)
    version = client.get_model_version_by_alias(run.registered_model, run.registry.alias)
    assert str(version.version) == finished(run, open_store(run))["register"].results["version"]
    parent = next(r for r in client.search_runs(["1"]) if r.data.tags["kind"] == "pipeline")
    assert {"report.html", "learning_curve.png"} <= {
        artifact.path for artifact in client.list_artifacts(parent.info.run_id)
    }


@pytest.mark.slow
def test_a_champion_of_another_store_plays_again_and_the_audit_agrees(run, tmp_path):
    """Evaluate both models if the champion's evaluation is not in this store.
    The protocol has too few items to decide.
    """
    client, name = MlflowClient(run.tracking_uri), run.registered_model
    ours = client.get_model_version(name, "1")
    tags = {**ours.tags, "run_key": "another", "step_key": "0" * 64, "evaluation": "0" * 64}
    best = str(client.create_model_version(name, ours.source, tags=tags).version)
    client.set_registered_model_alias(name, run.registry.alias, best)
    for step in ("register", "promotions"):
        for folder in (run.store.path / "steps").glob(f"{step}-*"):
            shutil.rmtree(folder)
    judged = load_config(tmp_path / "params.yaml", ["gate.min_items=10"])
    found = run_step("register", judged).manifest.results["champion"]
    assert (found["verdict"], found["moved"], found["over"]) == ("HOLD", False, best)
    assert found["needed_items"] > 12
    assert str(client.get_model_version_by_alias(name, run.registry.alias).version) == best
    run_step("report", judged)
    confirm_all(judged)
    report = audit(judged, num_episodes=1)
    assert report.ok, [check for check in report.checks if not check.ok]
    entries = History(open_store(run), name, run.registry.alias).entries()
    assert [each.kind for each in entries] == ["found", "judged"]
    client.set_registered_model_alias(name, run.registry.alias, "1")
    (failed,) = (check for check in audit(judged, num_episodes=1).checks if not check.ok)
    assert failed.name == "decisions"
    assert "moved by hand" in failed.failures[0]


@pytest.mark.slow
def test_a_step_that_was_deleted_and_run_again_is_in_the_ledger_once(run):
    for folder in (run.store.path / "steps").glob("evaluate-stage-1-*"):
        shutil.rmtree(folder)
    assert str(run_step("evaluate-stage-1", run)) == "ran"
    confirm_all(run)
    report = audit(run, num_episodes=1)
    assert report.ok, [check for check in report.checks if not check.ok]


@pytest.mark.slow
def test_a_run_deleted_in_the_ledger_is_written_again(run):
    client = MlflowClient(run.tracking_uri)
    for each in client.search_runs(["1"]):
        client.delete_run(each.info.run_id)
    confirm_all(run)
    report = audit(run, num_episodes=1)
    assert report.ok, [check for check in report.checks if not check.ok]


def test_an_evaluation_on_validation_items_is_another_one_and_passes_its_audit(run, tmp_path):
    held_out = load_config(
        tmp_path / "params.yaml", ["evaluation.split=validation", "evaluation.num_items=6"]
    )
    outcomes = {
        outcome.step.name: str(outcome)
        for outcome in run_with_parents("evaluate-stage-2", held_out)
    }
    assert {name for name, how in outcomes.items() if how == "ran"} == {
        "evaluate-warm-start",
        "evaluate-stage-2",
    }
    store = open_store(held_out)
    manifest = finished(held_out, store)["evaluate-warm-start"]
    played = attempts_of(store, store.history(manifest.step, manifest.key))
    assert {trajectory.item.split for trajectory in played} == {"validation"}
    report = audit(held_out, num_episodes=1)
    assert report.ok, [check for check in report.checks if not check.ok]


def test_every_training_step_says_what_it_cost(run):
    store = open_store(run)
    costs = [
        point.metrics["time/cpu_s"]
        for name in ("stage-1", "stage-2")
        for commit in store.history(name, finished(run, store)[name].key)
        for point in decode_points(store.read(commit, METRICS))
    ]
    assert len(costs) == 4
    assert all(cost > 0 for cost in costs)


def test_every_step_that_trains_has_system_metrics_in_mlflow(run):
    """Deliver them from the records, like all points."""
    store, tracker = open_store(run), tracker_of(run)
    for name, manifest in finished(run, store).items():
        points = committed_points(store, name, manifest.key)
        wanted = [
            (metric, point.step, point.time_ms, value)
            for point in points
            for metric, value in point.metrics.items()
            if metric.startswith("system/")
        ]
        assert bool(wanted) == (steps_of(run)[name].kind is Kind.TRAIN)
        if wanted:
            told = tracker.points(tracker.find_run({"step_key": manifest.key}))
            assert [each for each in told if each[0].startswith("system/")] == sorted(wanted)


@pytest.mark.slow
def test_a_model_evaluated_anew_is_no_new_version_but_has_the_new_numbers(run, tmp_path):
    again = load_config(tmp_path / "params.yaml", ["evaluation.num_items=6"])
    for name in steps_of(again):
        run_step(name, again)
    client = MlflowClient(run.tracking_uri)
    version = client.get_model_version_by_alias(run.registered_model, run.registry.alias)
    last = finished(again, open_store(again))["evaluate-stage-2"]
    assert (str(version.version), version.tags["evaluation"]) == ("1", last.digest)
    for cfg in (run, again):
        report = audit(cfg, num_episodes=1)
        assert report.ok, [check for check in report.checks if not check.ok]


@pytest.mark.slow
def test_another_ledger_gets_everything_too(run, tmp_path):
    other = run.model_copy(
        update={
            "tracking": run.tracking.model_copy(
                update={"uri": f"sqlite:///{tmp_path / 'other.db'}"}
            )
        }
    )
    confirm_all(other)
    report = audit(other, num_episodes=1)
    assert report.ok, [check for check in report.checks if not check.ok]


def test_a_registered_model_that_was_deleted_in_mlflow_is_registered_again(run):
    client, name = MlflowClient(run.tracking_uri), run.registered_model
    client.delete_registered_model(name)
    confirm_all(run)
    assert str(client.get_model_version_by_alias(name, run.registry.alias).version) == "1"
    entries, now = standing(run)
    assert ([each.verdict for each in entries], now.held, now.drift) == (["PROMOTE"], "1", "")
    report = audit(run, num_episodes=1)
    assert report.ok, [check for check in report.checks if not check.ok]


def test_an_experiment_that_was_deleted_in_mlflow_is_said_and_goes_on_once_restored(run):
    client = MlflowClient(run.tracking_uri)
    number = client.get_experiment_by_name(run.experiment).experiment_id
    client.delete_experiment(number)
    for name in ("prepare", "register"):
        with pytest.raises(LedgerError, match=r"is deleted; `mlflow experiments restore` it, or"):
            run_step(name, run)
    client.restore_experiment(number)
    confirm_all(run)


@pytest.mark.slow
def test_a_model_under_another_number_is_said(run):
    (run.state_dir / "mlflow.db").unlink()
    client = MlflowClient(run.tracking_uri)
    client.create_registered_model(run.registered_model)
    client.create_model_version(run.registered_model, "somewhere")
    with pytest.raises(
        ValueError,
        match=(
            r"MLflow has this checkpoint as version 2, the store as version 1; delete"
            r" .*/steps/register-"
        ),
    ):
        confirm_all(run)


def test_a_pointer_carries_the_course_of_training_and_of_clocks_a_digest_alone(run):
    shown = json.loads(pointer(run, run_step("stage-1", run)))
    final = finished(run, open_store(run))["stage-1"]
    assert shown["manifest"][0]["digest"] == final.digest
    assert shown["manifest"][0]["records_digest"] == final.records_digest
    assert [row["step"] for row in shown["curve"]] == [1, 2]
    assert [row["rollout_max_turns"] for row in shown["curve"]] == [5, 5]
    # validation.every is 2
    assert [row["validation_success"] is None for row in shown["curve"]] == [True, False]
    assert not any("time" in key for row in shown["curve"] for key in row)
    evaluated = json.loads(pointer(run, run_step("evaluate-stage-1", run)))
    assert [row["step"] for row in evaluated["curve"]] == [2]
    assert evaluated["curve"][0]["eval_greedy"] == pytest.approx(
        evaluated["results"]["summary"]["greedy"]["mean"], rel=1e-3
    )


def test_a_job_elsewhere_gets_the_names_of_a_fleet_that_came_up_here():
    cfg = load_config(
        overrides=[
            "env.deploy=kubernetes",
            "env.keep=true",
            "mix=[{name: textcraft, endpoints: ['http://t.example:1']}]",
        ]
    )
    up = []

    @contextmanager
    def environment(expert):
        up.append(expert)
        yield {"babyai": [Endpoint("http://env-babyai-r1.agentgym.svc:8000", "secret", "/a/file")]}
        up.append("down")

    with _with_servers(cfg, environment) as sent:
        tree = json.loads(sent.model_dump_json())
        again = type(cfg).model_validate(tree)  # as the job reads it
        assert again.env.endpoints == ("http://env-babyai-r1.agentgym.svc:8000",)
        assert (again.env.deploy, again.env.keep) == ("local", False)
        assert again.mix == cfg.mix
        assert "secret" not in json.dumps(tree)
        assert again.semantic() == cfg.semantic()
    assert up == [False, "down"]
