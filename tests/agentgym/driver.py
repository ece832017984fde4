"""A process that runs every step of a params file and kills itself at a chosen moment."""

import os
import signal
import tempfile
import threading
from pathlib import Path

import agentgym.pipeline.run as steps
from agentgym.config import load_config
from agentgym.defaults import set_process_defaults
from agentgym.models.model import set_threads
from agentgym.rollouts.engine import LocalEngine
from agentgym.rollouts.env_client import EnvSession
from agentgym.steps.context import StepContext
from agentgym.store import posix

MOMENTS = {  # in the order in which a run reaches them
    "rollout": "inside the rollouts of stage 1's second step",
    "manifest": "after the weights and before the manifest of stage 1's second commit",
    "evaluation": "inside the second chunk of the evaluation of stage 1",
    "ledger": "after the manifest and before the delivery of stage 2's first commit",
}


def drive(params: Path, moment: str, environment: dict[str, str], output) -> None:
    """Run the steps; the target of a new process. moment: one of MOMENTS, or "never".

    output: connection that gets a text per commit and per step. stderr goes to driver.log.
    """
    with (params.parent / "driver.log").open("ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    os.environ |= environment
    tempfile.tempdir = None  # read TMPDIR again
    set_process_defaults(params.parent / "home")
    set_threads()
    collect, act, create = LocalEngine.collect, EnvSession.step, posix.create_exclusively
    deliver, write = steps.deliver, StepContext._write
    has_commit = threading.Event()  # of stage 1
    # acts of the present collection, collections and commits of the present step
    now = {"step": None, "name": "", "acts": 0, "collections": 0, "commits": 0}

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def counted_collect(self, request, **progress):
        now.update(step=request.step, acts=0, collections=now["collections"] + 1)
        return collect(self, request, **progress)

    async def fatal_act(self, action):
        now["acts"] += 1
        here = now["name"], now["step"], now["collections"], now["acts"]
        if here[:2] == ("stage-1", 2) and moment == "rollout":
            assert has_commit.wait(60)  # a background thread writes it
        if moment == "rollout" and here == ("stage-1", 2, 2, 20):
            die()
        if moment == "evaluation" and (now["name"], now["commits"]) == ("evaluate-stage-1", 2):
            die()  # its plan and a chunk are durable
        return await act(self, action)

    def fatal_create(temp, path):
        is_second = path.parent.name == "manifests" and path.stem == "000001"
        if moment == "manifest" and now["name"] == "stage-1" and is_second:
            die()
        return create(temp, path)

    def fatal_deliver(cfg, store, step, manifest):
        if moment == "ledger" and (manifest.step, manifest.seq) == ("stage-2", 0):
            die()
        deliver(cfg, store, step, manifest)

    def reported_write(self, *content):
        manifest = write(self, *content)
        now["commits"] += 1
        output.send(f"commit {manifest.step} {manifest.seq}")
        if manifest.step == "stage-1":
            has_commit.set()
        return manifest

    LocalEngine.collect, EnvSession.step = counted_collect, fatal_act
    posix.create_exclusively = fatal_create
    steps.deliver, StepContext._write = fatal_deliver, reported_write
    cfg = load_config(params)
    for name in steps.steps_of(cfg):
        now.update(name=name, collections=0, commits=0)
        output.send(f"{name} is {steps.run_step(name, cfg)}")
