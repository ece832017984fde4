"""MLflow holds exactly what was committed: a forged point, metric or model is found."""

import pytest

from agentgym.audit import audit
from agentgym.config import load_config
from agentgym.steps.context import METRICS
from agentgym.tracking.points import decode_points


def test_a_forged_metric_contradicts_the_ledger(forger):
    forger.metric("stage-2", 0, ledger=False, **{"actor/loss": 0.987})
    assert "actor/loss at step 3: 0.987" in forger.caught("ledger")["ledger"]


@pytest.mark.parametrize(
    "how",
    [
        "delivered twice",
        "removed",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("altered", "added")),
    ],
)
def test_a_forged_point_in_the_ledger_is_not_of_any_commit(forger, how):
    row = forger.sql(
        "select run_uuid, timestamp, value from metrics where key = 'rollout/success' and step = 3"
    )[0]
    where = "where key = 'rollout/success' and step = 3 and run_uuid = ?"
    if how == "altered":
        forger.sql(f"update metrics set value = 0.987 {where}", row[0])
    elif how == "delivered twice":
        forger.sql(
            "insert into metrics select key, value, timestamp + 1, run_uuid, step, is_nan from"
            f" metrics {where}",
            row[0],
        )
    elif how == "removed":
        forger.sql(f"delete from metrics {where}", row[0])
    else:
        forger.sql(
            "insert into metrics select key, value, timestamp, run_uuid, 99, is_nan from metrics"
            f" {where}",
            row[0],
        )
    said = forger.caught("ledger")["ledger"]
    assert f"rollout/success at step {99 if how == 'added' else 3}" in said
    assert ("is missing" in said) is (how in ("altered", "removed"))
    assert ("not of any commit, or more than once" in said) is (how != "removed")


@pytest.fixture
def unfinished(copy_run, tmp_path, tiny_params, forger_of):
    """A run after its first stage."""
    return forger_of(load_config(tiny_params(copy_run(tmp_path, half=True), deterministic=True)))


@pytest.mark.parametrize("waiting", [2, 1])
def test_only_the_newest_commits_of_an_unfinished_step_may_wait_for_their_delivery(
    unfinished, waiting
):
    forger = unfinished
    forger.save(forger.commits("stage-1")[1].model_copy(update={"done": False}))
    for point in decode_points(forger.blob("stage-1", waiting - 1, METRICS).read_bytes()):
        forger.undeliver(point.time_ms)
    ledger = next(
        check for check in audit(forger.cfg, num_episodes=1).checks if check.name == "ledger"
    )
    assert ledger.ok is (waiting == 2), ledger.failures


@pytest.mark.parametrize("known", [0, 1])
def test_a_delivery_that_a_kill_cut_short_is_no_loss(unfinished, known):
    forger = unfinished
    forger.save(forger.commits("stage-1")[1].model_copy(update={"done": False}))
    mark = f"{known} {forger.commits('stage-1')[known].created_at!r}"
    forger.sql("update tags set value = ? where key like '%.delivered.stage-1%'", mark)
    (point,) = decode_points(forger.blob("stage-1", 1, METRICS).read_bytes())
    forger.undeliver(point.time_ms, "rollout/success")
    ledger = next(
        check for check in audit(forger.cfg, num_episodes=1).checks if check.name == "ledger"
    )
    assert ledger.ok is (known == 0), ledger.failures


def test_a_run_of_a_step_that_is_gone_from_an_unfinished_run_is_missed(unfinished):
    forger = unfinished
    key = forger.commits("stage-1")[0].key
    forger.sql("delete from tags where key = 'step_key' and value = ?", key)
    checks = audit(forger.cfg, num_episodes=1).checks
    ledger = next(check for check in checks if check.name == "ledger")
    assert not ledger.ok
    assert any("MLflow run of stage-1" in failure for failure in ledger.failures)


def test_a_ledger_that_is_not_there_fails_and_is_not_created(forger):
    path = forger.cfg.state_dir / "mlflow.db"
    path.unlink()
    report = audit(forger.cfg)
    assert [check.name for check in report.checks if not check.ok] == ["ledger"]
    assert not path.exists()
