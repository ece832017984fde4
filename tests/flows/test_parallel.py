"""Evaluations in parallel with the next stage: Prefect's graph, equal results, kills."""

import json
import os
import signal
from pathlib import Path

import pytest

from agentgym.config import load_config
from agentgym.pipeline.table import steps_of
from agentgym.steps.step import Kind
from flows.common import is_training
from tests.waiting import wait_until

SHORT = ("deterministic=true", "horizon.max_turns=[6,12]", "horizon.stage_steps=[1,4]")
BESIDE = "pipeline.parallel=2"


def content(project):
    """(step, commit) -> its key, digests of weights and outcomes, results."""
    manifests = [json.loads(path.read_bytes()) for path in project.manifests()]
    return {
        (each["step"], each["seq"]): (each["key"], each["blobs"], each["results"])
        for each in manifests
    }


@pytest.mark.slow
def test_an_evaluation_beside_a_stage_changes_no_result_and_prefect_shows_the_order(
    make_clone, tmp_path
):
    serial, beside = (make_clone(tmp_path / name) for name in ("serial", "beside"))
    for project, more in ((serial, ()), (beside, (BESIDE,))):
        ended = project.pipeline(*SHORT, *more)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert content(serial) == content(beside)
    assert ("stage-2", 3) in content(beside)

    steps = steps_of(load_config(beside.folder / "params.yaml", SHORT)).values()
    ran = beside.task_runs()
    assert {step.title: ran[step.title].waited_for for step in steps} == {
        step.title: {each.title for each in steps if each.name in step.parents} for step in steps
    }
    evaluations, stages = (
        [ran[step.title] for step in steps if wanted(step)] for wanted in (is_scored, is_training)
    )
    assert any(
        one.began < other.ended and other.began < one.ended
        for one in evaluations
        for other in stages
    )


def is_scored(step):
    return step.kind is Kind.EVALUATE


def children(project):
    """Processes of evaluations that run in parallel with the run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and (entry / "cwd").resolve() == project.folder.resolve()
                and b"step\0evaluate-" in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_an_ended_run_leaves_no_evaluation_behind_and_the_same_command_goes_on(fresh):
    running = fresh.start("python", "-m", "flows.pipeline", BESIDE, "evaluation.chunk_items=1")
    wait_until(lambda: children(fresh), 200)
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) != 0
    wait_until(lambda: fresh.processes() == [], 200)
    again = fresh.pipeline(BESIDE, "evaluation.chunk_items=1")
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.slow
def test_a_killed_evaluation_is_tried_once_more_and_named_if_it_dies_again(fresh):
    for kills, code in ((2, 1), (1, 0)):
        running = fresh.start("python", "-m", "flows.pipeline", BESIDE)
        killed = set()
        for _ in range(kills):
            (pid, *_) = wait_until(lambda: set(children(fresh)) - killed, 200)  # noqa: B023
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        said, _ = running.communicate(timeout=240)
        assert running.returncode == code, said
        if code:
            assert "failed: RuntimeError: evaluate-" in said
        wait_until(lambda: fresh.processes() == [], 200)
