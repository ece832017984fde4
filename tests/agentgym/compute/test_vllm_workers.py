"""vLLM in rollout workers: two workers, two ranks, and one worker that dies."""

import re

import psutil
import pytest

from agentgym.config import load_config
from agentgym.models.fidelity import VLLM
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store
from agentgym.steps.context import METRICS
from agentgym.tracking.points import decode_points

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.slow]


def of_vllm():
    return {each for each in psutil.process_iter(["name"]) if "VLLM::" in each.info["name"]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 4])
def test_a_stage_goes_on_when_a_worker_with_vllm_dies(
    warm, kill_worker_at, assert_whole, caplog, rank
):
    caplog.set_level("INFO", "agentgym.compute.placement")
    ours = ["rollout.engine=vllm", f"lora.rank={rank}"]
    local = load_config(warm, ours)
    cfg = load_config(warm, [*ours, "compute=ray", "ray.transport=broadcast"])
    for name in (
        "prepare",
        "demonstrate",
        "initialize",
        "warm-start",
    ):  # the engine is part of the key
        run_step(name, local)
    others = of_vllm()
    killed = kill_worker_at(step=2, count=3)
    assert str(run_step("stage-1", cfg)) == "ran"
    assert ("publishes the adapter alone" in caplog.text) == bool(rank)
    lost = rf"rollout worker [01] \({killed[0]}\) is lost: .*; its unfinished episodes are played"
    assert re.search(lost, caplog.text)
    assert not psutil.wait_procs(of_vllm() - others, 30)[1]
    told = {check.name: check for check in assert_whole(cfg, "stage-1").checks}
    assert "engine vllm does not repeat its draws" in told["sampling"].not_checked[0]

    store = open_store(cfg)
    commits = store.history("stage-1", finished(cfg, store)["stage-1"].key)
    points = [point for commit in commits for point in decode_points(store.read(commit, METRICS))]
    gaps = [gap for point in points if (gap := point.metrics.get("sync/canary_rms")) is not None]
    assert gaps
    assert 0 <= max(gaps) <= max(each.canary for each in VLLM.values())
