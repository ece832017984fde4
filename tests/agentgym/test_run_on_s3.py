"""A whole run with its store on S3 equals the same run on disk."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from agentgym.audit import audit
from agentgym.cli import main
from agentgym.config import load_config
from agentgym.pipeline.dvc import pointer
from agentgym.pipeline.plan import plan
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, key_of, open_store, steps_of
from agentgym.steps.step import Outcome
from agentgym.store.lease import LeaseHeld
from tests.completed import completed

HOLD = """
import sys
from agentgym.store.runstore import store_at
with store_at(sys.argv[1], lease_ttl_s=30).open("stage-1", sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""
KILLED = """
import os, signal, sys
from agentgym.pipeline import run as steps
from agentgym.config import load_config
steps.deliver = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # after the first commit, before \
MLflow hears of it
steps.run_step("stage-1", load_config(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_run_on_s3_survives_a_kill_keeps_a_second_learner_out_and_ends_as_on_disk(
    s3_uri, tiny_params, tmp_path, whole_run, empty_ledger
):
    params = tiny_params(
        tmp_path / "run",
        deterministic=True,
        store={"path": str(tmp_path / "run" / "store"), "uri": s3_uri},
    )
    cfg = load_config(params)
    for name, step in steps_of(cfg).items():
        if name != "stage-1":
            assert str(run_step(name, cfg)) == "ran"
            continue
        key = key_of(step, cfg, finished(cfg, open_store(cfg)))
        with subprocess.Popen(
            [sys.executable, "-c", HOLD, s3_uri, key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as holder:
            assert holder.stdout.readline() == "held\n"
            held = (
                rf"step stage-1 \({s3_uri}/steps/.*\) is held by process {holder.pid} on .*, since"
                r" \d{4}-.*; wait for it or stop"
            )
            with pytest.raises(LeaseHeld, match=held):
                run_step(name, cfg)
            command = [sys.executable, "-m", "agentgym", "step", name, "--params", str(params)]
            second = completed(*command, timeout=240)
            assert second.returncode == 1
            assert f"is held by process {holder.pid} on" in second.stderr
            holder.stdin.close()
        killed = completed(sys.executable, "-c", KILLED, params, timeout=240)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert {step.name: step.action for step in plan(cfg)}[name] == "resume"
        assert str(run_step(name, cfg)).startswith("resumed at ")
    on_s3 = {name: manifest.digest for name, manifest in finished(cfg, open_store(cfg)).items()}
    disk = load_config(whole_run / "params.yaml")
    assert on_s3 == {
        name: manifest.digest for name, manifest in finished(disk, open_store(disk)).items()
    }
    assert len(on_s3) == len(steps_of(cfg))
    assert sorted(os.listdir(cfg.state_dir)) == [
        "delivered",
        "logs",
        "mlflow-artifacts",
        "mlflow.db",
        "params.yaml",
    ]
    # a clone with another MLflow gets everything from the bucket
    (tmp_path / "outputs").mkdir()
    for name, manifest in finished(cfg, open_store(cfg)).items():
        text = pointer(cfg, Outcome(steps_of(cfg)[name], manifest, "done"))
        (tmp_path / "outputs" / f"{name}.json").write_text(text)
    options = ["--params", str(params), "--set", f"tracking.uri=sqlite:///{tmp_path}/mine.db"]
    shutil.copy(empty_ledger, tmp_path / "mine.db")
    assert main(["stored", "--pointers", str(tmp_path / "outputs"), *options]) == 0
    assert main(["export", "stage-1", str(tmp_path / "model"), *options]) == 0
    assert (tmp_path / "model/model.safetensors").is_file()
    report = audit(cfg, num_episodes=8)
    assert report.ok, [(check.name, check.failures) for check in report.checks if not check.ok]
