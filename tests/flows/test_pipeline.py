"""The whole job as a user runs it: real Prefect, real DVC, real servers, real MLflow."""

import json
import re
import signal

import pytest
from markupsafe import escape
from mlflow import MlflowClient

from agentgym.config import load_config
from agentgym.pipeline.table import steps_of
from tests.waiting import wait_until

STEPS = 14


def test_one_command_runs_every_step_and_says_what_came_out(finished):
    out = finished.first.stdout
    assert f"0 of {STEPS} steps are done" in out
    for line in (
        "untrained",
        "warm start",
        "stage 3",
        "avg@2 gain",
        "agentgym-babyai version 1",
        "champion moves to version 1",
    ):
        assert line in out, out
    report = finished.folder / re.search(r"^report\s+(\S+)", out, re.MULTILINE).group(1)
    page = report.read_text()
    assert "<script" not in page
    assert "://" not in re.sub(r"data:image/png;base64,[^\"]*", "", page).replace(
        "http://www.w3.org", ""
    )


def test_prefect_shows_each_step_after_the_steps_it_builds_on(finished):
    steps = steps_of(load_config(finished.folder / "params.yaml"))
    ran = finished.task_runs()
    assert {name: ran[step.title].waited_for for name, step in steps.items()} == {
        name: {steps[parent].title for parent in step.parents} for name, step in steps.items()
    }
    ends = [ran[step.title].ended for step in steps.values()]
    assert ends == sorted(ends)  # sequential


@pytest.mark.slow
def test_a_second_run_finds_everything_done_and_starts_nothing(finished):
    before = finished.manifests()
    again = finished.pipeline()
    assert again.returncode == 0
    assert f"all {STEPS} steps are done and verified" in again.stdout
    assert f"of {STEPS} steps" not in again.stdout
    assert finished.manifests() == before


def test_nothing_is_left_running_and_nothing_is_written_to_the_home_directory(finished):
    assert finished.processes() == []
    assert list(finished.home.iterdir()) == []


def test_mlflow_holds_one_parent_with_a_child_per_step_on_one_continuous_axis(finished):
    client = MlflowClient(f"sqlite:///{finished.folder / '.agentgym/mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("agentgym-babyai").experiment_id])
    parents = [run for run in runs if run.data.tags["kind"] == "pipeline"]
    children = {run.data.tags["step"]: run for run in runs if run.data.tags["kind"] == "step"}
    assert len(parents) == 1
    assert {
        "warm-start",
        "stage-1",
        "stage-2",
        "stage-3",
        "evaluate-stage-3",
        "report",
    } <= children.keys()
    assert all(run.info.status == "FINISHED" for run in runs)
    history = client.get_metric_history(parents[0].info.run_id, "rollout/success")
    assert [point.step for point in sorted(history, key=lambda point: point.step)] == [1, 2, 3, 4]
    evaluated = client.get_metric_history(parents[0].info.run_id, "eval/avg_at_2")
    assert sorted(point.step for point in evaluated) == [0, 1, 2, 4]
    names = {artifact.path for artifact in client.list_artifacts(parents[0].info.run_id)}
    assert {"report.html", "learning_curve.png", "evaluation.png"} <= names
    assert client.get_model_version_by_alias("agentgym-babyai", "champion").version == 1


def test_an_alarm_is_told_wherever_a_run_is_looked_at(finished):
    begins = "alarm entropy at optimizer step 3"
    (alarm,) = {
        text for text in finished.told_in_prefect("log", "message") if text.startswith(begins)
    }  # logged once, at its first step
    assert alarm.endswith(
        "raise algorithm.clip_high or algorithm.entropy_coef, or lower optimizer.lr"
    )
    described = finished.told_in_prefect("artifact", "description")
    assert any(text and alarm in text and "stage 3" in text for text in described)
    summary = finished.first.stdout.partition("success, %")[2]
    assert alarm in " ".join(summary.split())
    (page,) = finished.folder.glob(".agentgym/reports/*/report.html")
    assert escape(alarm) in page.read_text()
    client = MlflowClient(f"sqlite:///{finished.folder / '.agentgym/mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("agentgym-babyai").experiment_id])
    (parent,) = (run for run in runs if run.data.tags["kind"] == "pipeline")
    assert parent.data.tags["alarm.entropy"].startswith("alarm entropy at optimizer step 4")
    measured = client.get_metric_history(parent.info.run_id, "alarm/entropy")
    limits = client.get_metric_history(parent.info.run_id, "alarm/entropy_limit")
    assert sorted(point.step for point in measured) == [3, 4]
    assert [point.value for point in limits] == [10.0, 10.0]


@pytest.mark.slow
def test_another_evaluation_parameter_runs_evaluations_alone(finished):
    plan = json.loads(
        finished.run("agentgym", "plan", "--json", "--set", "evaluation.num_items=4").stdout
    )["steps"]
    actions = {step["name"]: step["action"] for step in plan}
    assert {name for name, action in actions.items() if action == "run"} == {
        name for name in actions if name.startswith("evaluate-") or name in ("register", "report")
    }
    why = {step["name"]: step["why"] for step in plan}
    assert why["evaluate-warm-start"] == "changed: evaluation.num_items 8 -> 4"
    before = finished.manifests()
    ran = finished.pipeline("evaluation.num_items=4")
    assert ran.returncode == 0, ran.stderr
    added = {
        path.parts[-3].rpartition("-")[0] for path in finished.manifests().keys() - before.keys()
    }
    assert added == {name for name, action in actions.items() if action == "run"}
    assert before.items() <= finished.manifests().items()
    # equal weights are not registered twice
    assert "version 1" in ran.stdout


def test_another_learning_rate_never_touches_the_old_checkpoint(finished):
    plan = json.loads(
        finished.run("agentgym", "plan", "--json", "--set", "optimizer.lr=0.0002").stdout
    )["steps"]
    assert (
        next(step for step in plan if step["name"] == "stage-1")["why"]
        == "changed: optimizer.lr 0.0005 -> 0.0002"
    )
    old = {
        path: path.read_bytes()
        for path in (finished.folder / ".agentgym/store").rglob("*")
        if path.is_file()
    }
    ran = finished.run("agentgym", "step", "stage-1", "--set", "optimizer.lr=0.0002")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("stage-1: ran")
    assert all(path.read_bytes() == content for path, content in old.items())


def test_the_run_passes_its_audit_from_the_command_line(finished):
    name = re.search(r"agentgym audit (r[0-9a-f]{12})", finished.first.stdout).group(1)
    audit = finished.run("agentgym", "audit", name, "--episodes", "4")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert re.search(r"audit passed; to repeat it: --seed \d+\n$", audit.stdout)
    other = finished.run("agentgym", "audit", "r000000000000")
    assert other.returncode == 2
    assert name in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_pipeline_leaves_nothing_running_and_the_same_command_goes_on(
    fresh, made_databases, number
):
    made_databases(fresh)
    short = (
        *("horizon.kind=fixed", "horizon.max_turns=[4]", "horizon.stage_steps=[2]"),
        *("evaluation.num_items=2", "evaluation.num_samples=1", "evaluation.k=[1]"),
    )
    set_short = [word for value in short for word in ("--set", value)]
    process = fresh.start("python", "-m", "flows.pipeline", *short)
    wait_until(
        lambda: list(
            (fresh.folder / ".agentgym/store").glob("steps/warm-start-*/manifests/*.json")
        ),
        300,
        process=process,
        why=lambda: "the warm start never committed",
    )
    assert any("envs serve" in command for command in fresh.processes())
    process.send_signal(number)
    code = process.wait(30)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 130), process.stdout.read()
    process.stdout.close()
    wait_until(lambda: not fresh.processes(), 30, why=lambda: fresh.processes())
    before = fresh.manifests()
    plan = {
        step["name"]: step
        for step in json.loads(fresh.run("agentgym", "plan", "--json", *set_short).stdout)["steps"]
    }
    assert plan["initialize"]["action"] == "skip"
    if plan["warm-start"]["action"] != "skip":  # the signal arrived before its last commit
        assert (plan["warm-start"]["action"], plan["warm-start"]["why"]) == (
            "resume",
            "at 20 (commit 0)",
        )
    again = fresh.pipeline(*short)
    assert again.returncode == 0, again.stdout + again.stderr
    assert before.items() <= fresh.manifests().items()
    audit = fresh.run("agentgym", "audit", "--episodes", "2", *set_short)
    assert audit.returncode == 0, audit.stdout
    assert fresh.processes() == []
