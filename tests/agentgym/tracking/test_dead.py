"""Runs whose process is gone are closed in MLflow, with the reason."""

import shutil
import signal
import subprocess
import sys
import time

import pytest

from agentgym.config import load_config
from agentgym.pipeline.table import open_store
from agentgym.tracking.deliver import close_dead, tracker_of
from agentgym.tracking.mlflow import ENDED
from agentgym.tracking.step_page import MANIFEST

pytestmark = pytest.mark.integration

KEY, OTHER = "ab" * 32, "cd" * 32
KILLED = """
import sys, time
from pathlib import Path
from agentgym.store.runstore import store_at

with store_at(Path(sys.argv[1]), lease_ttl_s=30.0).open("stage-1", "ab" * 32):
    print("held", flush=True)
    time.sleep(300)
"""


class Ledger:
    """Store and MLflow runs of a pipeline with one step, `stage-1`."""

    def __init__(self, folder, *overrides):
        self.cfg = load_config("params.yaml", [f"store.path={folder / 'store'}", *overrides])
        self.store, self.tracker = open_store(self.cfg), tracker_of(self.cfg)
        self.parent = self.tracker.parent_run("ef" * 32, params={}, tags={})
        self.step = self.begin("stage-1", KEY)

    def begin(self, step, key, **tags):
        """Begin the step's run, as its first delivery does."""
        return self.tracker.child_run(
            self.parent, step, key, params={}, tags={"step": step, **tags}
        )

    def shown(self, run_id):
        """Return (status, reason for its end) in MLflow."""
        run = self.tracker.client.get_run(run_id)
        return run.info.status, run.data.tags.get(ENDED)

    def commit(self, writer, done=False):
        return writer.commit(
            done=done, state={}, parents={}, config={}, blobs={}, records={}, results={}, timings={}
        )


@pytest.fixture
def ledger(tmp_path, empty_ledger):
    def make(*overrides):
        if not (tmp_path / "mlflow.db").exists():
            shutil.copy(empty_ledger, tmp_path)
        return Ledger(tmp_path, *overrides)

    return make


def test_a_step_that_failed_is_shown_as_failed_with_its_reason_and_so_is_its_run(ledger):
    made = ledger()
    with pytest.raises(ValueError, match="no ball"), made.store.open("stage-1", KEY):
        raise ValueError("no ball\nin http://me:secret@host/room")
    closed = close_dead(made.cfg, made.store)
    assert closed.keys() == {made.step, made.parent}
    reason = "ValueError: no ball in http://host/room"
    assert made.shown(made.step) == ("FAILED", reason)
    assert made.shown(made.parent) == ("FAILED", f"stage-1: {reason}")
    assert close_dead(made.cfg, made.store) == {}


def test_one_that_was_stopped_by_hand_is_shown_as_killed_and_goes_on_without_the_mark(ledger):
    made = ledger()
    with pytest.raises(KeyboardInterrupt), made.store.open("stage-1", KEY):
        raise KeyboardInterrupt
    close_dead(made.cfg, made.store)
    assert made.shown(made.step) == ("KILLED", "interrupted (KeyboardInterrupt)")
    assert made.begin("stage-1", KEY) == made.step  # its process is restarted
    assert made.shown(made.step) == ("RUNNING", None)
    made.tracker.close_run(made.step, "KILLED", "too early")
    made.tracker.end_run(made.step)
    assert made.shown(made.step) == ("FINISHED", None)


def test_one_that_was_killed_is_closed_as_lost_and_not_while_it_lives(ledger):
    made = ledger()
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(made.cfg.store.path)], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"held\n"
        assert close_dead(made.cfg, made.store) == {}
        assert made.shown(made.step) == made.shown(made.parent) == ("RUNNING", None)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    close_dead(made.cfg, made.store)
    status, reason = made.shown(made.step)
    assert status == "KILLED"
    assert reason.startswith(f"lost: process {process.pid} on ")
    assert made.shown(made.parent) == ("KILLED", f"stage-1: {reason}")


def test_runs_of_another_store_and_of_other_people_are_left_alone(ledger):
    made = ledger()  # stage-1 was never held in this store
    theirs = made.tracker.client.create_run(made.tracker.experiment_id)
    assert close_dead(made.cfg, made.store) == {}
    for run in (made.step, made.parent, theirs.info.run_id):
        assert made.shown(run) == ("RUNNING", None)


def test_a_run_between_two_steps_is_closed_after_a_leases_length_and_not_before(ledger):
    made = ledger()
    with made.store.open("stage-1", KEY) as writer:
        head = made.commit(writer, done=True)
    made.tracker.set_tags(made.step, {MANIFEST: head.digest})
    made.tracker.end_run(made.step)
    assert close_dead(made.cfg, made.store) == {}
    short = ledger("store.lease_ttl_s=0.05")
    with made.store.open("evaluate-stage-1", OTHER, [head.digest]):  # not in MLflow yet
        time.sleep(0.1)
        assert close_dead(short.cfg, short.store) == {}
    assert close_dead(short.cfg, short.store) == {
        made.parent: "no step of it runs; the same command goes on"
    }
    assert made.shown(made.parent)[0] == "KILLED"


def test_what_was_cut_off_while_it_was_written_is_closed_and_ends_well_when_written_again(ledger):
    """Interrupt a pipeline before its first step, and an evaluation after its last episode."""
    made = ledger()
    late = made.tracker.parent_run("01" * 32, params={}, tags={})
    record = made.tracker.evaluation_run("23" * 32, "chance", params={}, tags={})
    assert close_dead(made.cfg, made.store) == {}
    time.sleep(0.1)
    short = ledger("store.lease_ttl_s=0.05")
    reasons = close_dead(short.cfg, short.store)
    assert reasons.keys() == {late, record}
    assert made.shown(late) == ("KILLED", "no step of it runs; the same command goes on")
    assert made.shown(record) == ("KILLED", reasons[record])
    assert "the same command writes the rest" in reasons[record]
    assert made.tracker.evaluation_run("23" * 32, "chance", params={}, tags={}) == record
    made.tracker.end_run(record)
    assert made.shown(record) == ("FINISHED", None)


def test_a_ledger_that_is_away_is_left_for_the_next_time(ledger, caplog):
    made = ledger()
    away = load_config(
        "params.yaml", [f"store.path={made.cfg.store.path}", "tracking.uri=http://127.0.0.1:9"]
    )
    assert close_dead(away, made.store) == {}
    assert "MLflow may show runs as RUNNING that are not" in caplog.text
