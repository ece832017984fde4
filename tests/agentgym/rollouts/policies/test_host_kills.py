"""A run with an engine in a host process continues after any part of it is killed."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from agentgym.audit import audit
from agentgym.config import load_config
from agentgym.pipeline.table import finished, open_store, steps_of
from agentgym.rollouts.policies import engines
from tests.agentgym.rollouts.policies.hosting import ENGINE, ROOT, is_host, left_in
from tests.waiting import wait_until

RUN = """
import sys
from agentgym.config import load_config
from agentgym.pipeline.run import run_step, run_with_parents
from agentgym.pipeline.table import finished, open_store, steps_of
from agentgym.rollouts.policies import engines
from tests.agentgym.rollouts.policies.hosting import ENGINE

engines.BUILT_IN["vllm"] = ENGINE
cfg = load_config(sys.argv[1], ["rollout.engine=vllm"])
if sys.argv[2] == "run":
    run_with_parents("report", cfg)
else:  # as `agentgym step` does
    done = finished(cfg, open_store(cfg))
    run_step(next(name for name in steps_of(cfg) if name not in done), cfg)
"""
KILLS = 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", ["host", "step", "run"])
def test_a_run_continues_after_random_kills_of_any_part_and_nothing_is_left(
    tiny_params, tmp_path, part, monkeypatch
):
    """Ten times, the engine's host, a step of its own or the whole run is killed."""
    rng, starts = random.Random(f"kills of {part}"), tmp_path / "starts"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    environment["TEST_STARTS"] = str(starts)
    monkeypatch.setitem(engines.BUILT_IN, "vllm", ENGINE)  # as in the commands: it is in the keys

    def new_run(number):
        path = tiny_params(tmp_path / f"run-{number}")
        return path, load_config(path, ["rollout.engine=vllm"])

    def started(what):
        command = [sys.executable, "-c", RUN, str(path), what]
        return subprocess.Popen(command, cwd=ROOT, env=environment)

    def count():
        return len(starts.read_text().split()) if starts.exists() else 0

    kills, numbers = 0, itertools.count()
    path, cfg = new_run(next(numbers))
    while kills < KILLS:
        if len(finished(cfg, open_store(cfg))) == len(steps_of(cfg)):
            path, cfg = new_run(next(numbers))
        before, process = count(), started("step" if part == "step" else "run")
        try:
            wait_until(lambda was=before, of=process: count() > was or of.poll() is not None, 400)
            time.sleep(rng.uniform(0, 2))
            below = [] if process.poll() is not None else children(process.pid)
            hosts_below = [each for each in below if is_host(each)]
            stand_ins = [each for holds in hosts_below for each in children(holds.pid)]
            victims = hosts_below if part == "host" else [process]
            for victim in victims:
                victim.kill()
            code = process.wait(400)
            if part == "host":  # between two steps the run replaces it and ends well
                assert code == 0 or victims
                kills += len(victims)
            else:
                assert code in (0, -signal.SIGKILL)
                kills += code != 0
        finally:
            process.kill()
        for stand_in in stand_ins if part == "host" else ():
            stand_in.kill()
        assert not psutil.wait_procs(below, 15)[1]
    before = count()
    assert started("run").wait(600) == 0
    assert count() <= before + 1  # one engine for all steps that were left
    assert not left_in(tmp_path)
    report = audit(cfg, num_episodes=4)
    assert report.ok, [check.failures for check in report.checks if not check.ok]


def children(process_id):
    try:
        return psutil.Process(process_id).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
