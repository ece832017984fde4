"""Runs with real alarms: one stops itself and resumes, and MLflow and the audit report them."""

import time
from dataclasses import replace
from statistics import median

import pytest

from agentgym.audit.findings import Checks
from agentgym.audit.reported import check_alarms
from agentgym.audit.stored_steps import StepRecord
from agentgym.cli import main
from agentgym.config import load_config
from agentgym.learner.learner import LocalLearner
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, key_of, open_store, run_key, steps_of
from agentgym.tracking.deliver import committed_points, parent_run, tracker_of
from agentgym.tracking.mlflow import ENDED
from agentgym.tracking.points import AlarmStop, begun
from flows.shell import alarm_lines

pytestmark = pytest.mark.integration

STAGE = "stage-1"


@pytest.fixture(scope="module")
def begin(tmp_path_factory, copy_run, tiny_params, tiny_endpoint):
    """Return a function of overrides: (params file, config) of a run after its warm start."""

    def make(*overrides, folder=None, deterministic=True):
        folder = folder or tmp_path_factory.mktemp("alarmed")
        if not (folder / "store").exists():
            copy_run(folder, half=True)
        params = tiny_params(folder, endpoint=tiny_endpoint, deterministic=deterministic)
        usual = ("horizon.kind=fixed", "horizon.max_turns=[5]", "validation.every=0")
        return params, load_config(params, [*usual, *overrides])

    return make


def points_of(cfg, name=STAGE):
    store = open_store(cfg)
    step = steps_of(cfg)[name]
    return committed_points(store, name, key_of(step, cfg, finished(cfg, store)))


@pytest.mark.slow
def test_an_update_that_ruins_the_policy_raises_alarms_that_the_audit_measures_again(begin):
    _, cfg = begin(
        "horizon.stage_steps=[21]",
        "optimizer.lr=0.05",
        "optimizer.warmup_steps=20",
        "rollout.token_numbers_frac=1",
        "alarms.zero_variance.max_frac=0.5",
        "alarms.success.max_drop=0.05",
        "alarms.entropy.min=10",  # above any entropy
    )
    run_step(STAGE, cfg)
    points = points_of(cfg)
    assert {alarm.name for alarm in begun(points)} == {
        "entropy",
        "update_kl",
        "zero_variance",
        "success",
    }
    said = " ".join(alarm_lines(cfg, finished(cfg, open_store(cfg))))
    assert "alarm zero_variance at optimizer step 20" in " ".join(said.split())

    store, step = open_store(cfg), steps_of(cfg)[STAGE]
    final = finished(cfg, store)[STAGE]
    commits = store.history(STAGE, final.key)
    logged = {step: [point] for step, point in enumerate(points)}
    record = StepRecord(cfg, store, step, final.key, {}, commits, logged)

    def checked(record):
        checks = Checks("numbers")
        check_alarms(record, [record], checks)
        return checks

    assert checked(record).num_failures == 0
    assert checked(record).counted > 3 * 21
    last = points[-1]
    for name, value in {
        "alarm/zero_variance": 0.51,  # contradicts its points
        "alarm/zero_variance_limit": 1.0,  # a limit it did not exceed
        "alarm/gradient": 40.0,  # its limit is missing
        "alarm/boredom": 1.0,  # no such alarm
    }.items():
        forged = replace(last, metrics={**last.metrics, name: value})
        assert checked(replace(record, points={**record.points, 20: [forged]})).num_failures


@pytest.mark.slow
def test_rollouts_that_fall_behind_an_update_raise_the_mismatch_alarm(begin):
    _, cfg = begin(
        "horizon.stage_steps=[5]",
        "optimizer.lr=0.3",
        "rollout.max_staleness=1",
        "algorithm.max_mismatch_kl=1000",
        deterministic=False,
    )
    for name in ("prepare", "demonstrate", "initialize", "warm-start", STAGE):
        run_step(name, cfg)
    assert "mismatch" in {alarm.name for alarm in begun(points_of(cfg))}


def test_steps_that_get_slower_raise_the_throughput_alarm_and_gradients_above_their_limit_theirs(
    begin, monkeypatch
):
    step_of, took = LocalLearner.sft_step, []

    def slower(learner, batch, *, step):
        began = time.monotonic()
        told = step_of(learner, batch, step=step)
        if step > 21:  # like another program's load
            time.sleep(12 * median(took))
        took.append(time.monotonic() - began)
        return told

    monkeypatch.setattr(LocalLearner, "sft_step", slower)
    _, cfg = begin(
        "horizon.stage_steps=[5]",
        "warm_start.steps=41",
        "warm_start.batch_size=2",
        "store.commit_every=1000",
        "alarms.gradient.max_factor=0.001",  # below any
    )
    for name in ("prepare", "demonstrate", "initialize", "warm-start"):
        run_step(name, cfg)
    assert {alarm.name for alarm in begun(points_of(cfg, "warm-start"))} == {
        "gradient",
        "throughput",
    }


def test_a_run_that_stopped_itself_goes_on_once_the_limit_is_another_to_the_same_bytes(
    begin, capsys, tmp_path
):
    sensitive = ("alarms.update_kl.action=stop", "alarms.update_kl.max=1e-9")
    usual = ("horizon.stage_steps=[5]", "rollout.token_numbers_frac=1", "store.commit_every=1000")
    params, cfg = begin(*usual, *sensitive, folder=tmp_path)
    sets = [
        word
        for each in (
            *("horizon.kind=fixed", "horizon.max_turns=[5]", "validation.every=0"),
            *(*usual, *sensitive),
        )
        for word in ("--set", each)
    ]
    assert main(["step", STAGE, "--params", str(params), *sets]) == 1
    said = capsys.readouterr().err
    assert "failed: AlarmStop: alarm update_kl at optimizer step 3: actor/update_kl" in said
    assert "the same command continues from there" in said
    # committed despite store.commit_every, and delivered to MLflow
    marked = points_of(cfg)
    assert [point.step for point in marked] == [1, 2, 3]
    tracker = tracker_of(cfg)
    key = key_of(steps_of(cfg)[STAGE], cfg, finished(cfg, open_store(cfg)))
    for tags in ({"run_key": run_key(cfg), "kind": "pipeline"}, {"step_key": key}):
        # the run has stopped and is not shown as running
        shown = tracker.client.get_run(tracker.find_run(tags))
        assert shown.info.status == "FAILED"
        assert "AlarmStop: alarm update_kl at optimizer step 3" in shown.data.tags[ENDED]
    run = parent_run(cfg, run_key(cfg))
    assert "alarm update_kl" in tracker.client.get_run(run).data.tags["alarm.update_kl"]
    assert ("alarm/update_kl", 3) in {(name, step) for name, step, _, _ in tracker.points(run)}
    with pytest.raises(AlarmStop):  # unchanged limits stop it again
        run_step(STAGE, cfg)
    assert points_of(cfg) == marked
    _, warned = begin(*usual, "alarms.update_kl.max=1e-9", folder=tmp_path)
    assert str(run_step(STAGE, warned)) == "resumed at commit 3"
    assert begun(points_of(warned)) == begun(marked)
    _, never = begin(*usual, "alarms.update_kl.action=off")
    run_step(STAGE, never)
    assert begun(points_of(never)) == []
    assert finished(never, open_store(never))[STAGE].digest == (
        finished(warned, open_store(warned))[STAGE].digest
    )


def test_a_stage_that_no_success_goes_before_stops_before_its_first_update(begin, caplog):
    hopeless = [
        "warm_start.steps=1",
        "horizon.max_turns=[1]",
        "horizon.stage_steps=[1]",
        "evaluation.max_turns=1",
        "evaluation.num_samples=20",
        "validation.max_turns=1",
    ]
    _, cfg = begin(*hopeless)
    for name in ("prepare", "initialize", "warm-start", "evaluate-warm-start"):
        run_step(name, cfg)
    with pytest.raises(AlarmStop, match=r"^stage stage-1 cannot learn: .*; raise warm_start"):
        run_step(STAGE, cfg)
    store, step = open_store(cfg), steps_of(cfg)[STAGE]
    assert store.head(STAGE, key_of(step, cfg, finished(cfg, store))) is None
    _, cfg = begin(*hopeless, "alarms.no_success=warn", folder=cfg.state_dir)
    assert str(run_step(STAGE, cfg)) == "ran"
    assert "stage stage-1 cannot learn" in caplog.text
