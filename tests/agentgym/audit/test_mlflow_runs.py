"""The audit names every change that someone with write access makes in MLflow."""

import json

import pytest

from agentgym.audit import findings
from agentgym.audit.ledger import check_ledger
from agentgym.audit.mlflow_runs import check_pages
from agentgym.audit.registered import check_registry
from agentgym.audit.stored_steps import read_steps
from agentgym.config import load_config
from agentgym.pipeline.table import open_store, run_key

RUN = "(select run_uuid from tags where key = 'step' and value = '{}')"
PARENT = "(select run_uuid from tags where key = 'kind' and value = 'pipeline')"
LAST, FIRST = RUN.format("evaluate-stage-2"), RUN.format("evaluate-initialize")
# edit -> its SQL, and the audit's error text
EDITS = {
    "a higher success in the runs table": (
        f"update latest_metrics set value = 1 where key = 'eval/greedy' and run_uuid = {LAST}",
        "run of evaluate-stage-2: latest eval/greedy: expected",
    ),
    "a higher success of the whole run": (
        "update latest_metrics set value = 1 where key = 'rollout/success' and run_uuid ="
        f" {PARENT}",
        "parent run: latest rollout/success: expected",
    ),
    "another recipe": (
        f"update params set value = 'ppo' where key = 'algorithm.recipe' and run_uuid = {PARENT}",
        "parent run: parameter algorithm.recipe: expected 'grpo', got 'ppo'",
    ),
    "a parameter that there is not": (
        f"insert into params select 'tuned', 'no', {LAST}",
        "run of evaluate-stage-2: parameter tuned: expected None, got 'no'",
    ),
    "another seed": (
        f"update tags set value = '7' where key = 'seed' and run_uuid = {PARENT}",
        "parent run: tag seed: expected '0', got '7'",
    ),
    "another name": (
        f"update runs set name = 'ours, better' where run_uuid = {PARENT}",
        "parent run: name: expected 'grpo 5>7 seed 0",
    ),
    "a step that failed": (
        f"update runs set status = 'FAILED' where run_uuid = {FIRST}",
        "run of evaluate-initialize: status: expected 'FINISHED', got 'FAILED'",
    ),
    "another description of the run": (
        f"update tags set value = 'all solved' where key = 'mlflow.note.content' and run_uuid ="
        f" {PARENT}",
        "parent run: tag mlflow.note.content: expected",
    ),
    "an alarm that is gone": (
        f"delete from tags where key = 'alarm.entropy' and run_uuid = {PARENT}",
        "parent run: tag alarm.entropy: expected 'alarm entropy",
    ),
    "more items than there were": (
        "update datasets set dataset_profile = '{\"num_items\": 9000}' where name = 'babyai test'",
        "run of evaluate-stage-2: data it read: expected",
    ),
    "a checkpoint of another step": (
        "update logged_model_params set param_value = '9000' where param_key = 'global_step' and"
        " model_id = (select model_id from logged_models where name = 'stage-2')",
        "checkpoint stage-2: parameters: expected",
    ),
    "one more number of a checkpoint": (
        "insert into logged_model_metrics select model_id, 'eval/better', metric_timestamp_ms,"
        " metric_step, 1, experiment_id, run_id, dataset_uuid, dataset_name, dataset_digest from"
        " logged_model_metrics where metric_name = 'eval/greedy'",
        "checkpoint stage-2: numbers that are missing or others: expected",
    ),
    "a failure that a trace's list shows as solved": (
        "update assessments set value = 'true' where value = 'false'",
        "assessments: expected [('success', False, 'default', None)]",
    ),
    "a trace's tag": (
        "update trace_tags set value = 'true' where key = 'success' and value = 'false'",
        "tag success: expected 'false', got 'true'",
    ),
    "a trace that ends otherwise in its preview": (
        "update trace_info set response_preview = '{\"success\": true}'",
        "preview of its end: expected",
    ),
    "an episode that took no time": (
        "update trace_info set execution_time_ms = 1",
        "milliseconds: expected",
    ),
    "another description of the version": (
        "update model_versions set description = 'state of the art'",
        "agentgym-babyai version 1: description: expected",
    ),
    "another reason of the gate": (
        "update model_version_tags set value = 'far better' where key = 'gate.why'",
        "agentgym-babyai version 1: tag gate.why: expected",
    ),
    "another question": (
        "update model_version_tags set value = '{}' where key = 'evaluation.question'",
        "agentgym-babyai version 1: tag evaluation.question: expected",
    ),
    "a version's stage": (
        "update model_versions set current_stage = 'Production'",
        "agentgym-babyai version 1: state: expected",
    ),
    "another description of the model": (
        "update registered_models set description = 'certified'",
        "agentgym-babyai: description: expected",
    ),
    "a run of another kind below it": (  # g: no MLflow id begins with it
        "insert into runs select 'g' || substr(run_uuid, 2), name, source_type, source_name,"
        " entry_point_name, user_id, status, start_time, end_time, source_version, lifecycle_stage,"
        f" artifact_uri, experiment_id, deleted_time from runs where run_uuid = {LAST};"
        "insert into tags select 'mlflow.parentRunId', t.value, 'g' || substr(t.run_uuid, 2) from"
        f" tags t where key = 'mlflow.parentRunId' and run_uuid = {LAST}",
        "belongs to no commit of this run",
    ),
}
LEFT_OUT = {
    "a tag of somebody's": (
        f"insert into tags select 'accuracy', '99 %', {LAST}",
        "tag accuracy of the run of evaluate-stage-2, nothing of this run writes it",
    ),
    "a version's tag of somebody's": (
        "insert into model_version_tags select 'certified', 'yes', name, version, workspace from"
        " model_versions",
        "tag certified of agentgym-babyai version 1, nothing of this run writes it",
    ),
    "another alias": (
        "insert into registered_model_aliases select 'production', 1, name, workspace from"
        " registered_models",
        "alias production of agentgym-babyai, this run decides on another one",
    ),
    "the experiment's description": (
        "update experiment_tags set value = 'best' where key = 'mlflow.note.content'",
        "tag mlflow.note.content of the experiment, a user changed it, as any user may",
    ),
}


def checked(forger):
    """Return the failures of the MLflow checks, and what they did not check."""
    cfg = forger.cfg
    store, checks = open_store(cfg), findings.Checks("MLflow")
    steps = read_steps(cfg, store, findings.Checks("content"), findings.Checks("lineage"))
    for check in (check_ledger, check_pages, check_registry):
        check(cfg, store, run_key(cfg), steps, checks)
    return checks.failures, checks.check().not_checked


@pytest.fixture(scope="module")
def honest(copy_run, tmp_path_factory, tiny_params, forger_of):
    path = copy_run(tmp_path_factory.mktemp("honest"))
    return forger_of(load_config(tiny_params(path, deterministic=True)))


@pytest.fixture(scope="module")
def edited(copy_run, tmp_path_factory, tiny_params, forger_of):
    """Apply all edits to one copy of a run; each changes something else."""
    path = copy_run(tmp_path_factory.mktemp("edited"))
    forger = forger_of(load_config(tiny_params(path, deterministic=True)))
    for statements, _ in (*EDITS.values(), *LEFT_OUT.values()):
        for statement in statements.split(";"):
            forger.sql(statement)
    (table,) = (path / "mlflow-artifacts").glob(
        f"{forger.sql(f'select {LAST}')[0][0]}/artifacts/outcomes_table.json"
    )
    tree = json.loads(table.read_text())
    tree["data"][0][1] = 1.0 - tree["data"][0][1]
    table.write_text(json.dumps(tree))
    (table.parent / "better.html").write_text("all solved")
    for report in (path / "mlflow-artifacts").rglob("report.html"):
        report.write_text("all solved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(findings, "MAX_FAILURES", 1000)
        return checked(forger)


def test_an_honest_run_fails_nothing_and_names_what_no_store_has(honest):
    failures, left_out = checked(honest)
    assert failures == []
    told = {each.partition(" (")[0].partition(", ")[0] for each in left_out}
    assert told <= {
        "packages.txt of the parent run",
        "previews of traces",
        "tag mlflow.source.git.commit of a run",
        "tag mlflow.user of a run",
        "tag source of a run",
        "tag store of a checkpoint",  # the run is a copy
        "when a run began and ended",
        "where data lies",  # the run is a copy
    }


def test_an_alarm_that_an_earlier_version_told_with_a_flat_name_of_its_limit_is_honest(honest):
    told = "select value from tags where key = 'alarm.entropy'"
    assert "below alarms.entropy.min 10;" in honest.sql(told)[0][0]
    honest.sql("update tags set value = replace(value, 'alarms.entropy.min', 'alarms.min_entropy')")
    assert "below alarms.min_entropy 10;" in honest.sql(told)[0][0]
    assert checked(honest)[0] == []


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_in_mlflow_is_found_and_named(edited, edit):
    assert [each for each in edited[0] if EDITS[edit][1] in each], edited[0]


@pytest.mark.parametrize("edit", LEFT_OUT)
def test_what_nobody_of_ours_wrote_into_mlflow_is_named_as_not_checked(edited, edit):
    assert LEFT_OUT[edit][1] in edited[1]


def test_a_table_of_outcomes_that_was_edited_is_found_and_a_file_beside_it_named(edited):
    failures, left_out = edited
    table = "run of evaluate-stage-2: outcomes_table.json, made again: expected True, got False"
    assert table in failures
    assert (
        "file better.html of the run of evaluate-stage-2, nothing of this run writes it" in left_out
    )


def test_a_report_that_was_edited_is_found(edited):
    assert "parent run: report.html, made again: expected True, got False" in edited[0]
