"""Training on one device in this process: on a CUDA device, and on the CPU for comparison."""

import pytest
import torch

from agentgym.config import load_config
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store
from agentgym.steps.context import METRICS
from agentgym.tracking.points import decode_points

pytestmark = pytest.mark.integration
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPES = {
    "grpo": ["algorithm.recipe=grpo"],
    # during critic warm-up the policy would not change
    "ppo": ["algorithm.recipe=ppo", "algorithm.critic_warmup_steps=0"],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_engine_and_learner_of_one_process_share_the_device(
    tiny_params, tmp_path, tiny_endpoint, recipe, device
):
    overrides = [f"compute_device={device}", *RECIPES[recipe]]
    cfg = load_config(tiny_params(tmp_path / "run", endpoint=tiny_endpoint), overrides)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for name in (
        "prepare",
        "demonstrate",
        "initialize",
        "warm-start",
        "evaluate-warm-start",
        "stage-1",
        "evaluate-stage-1",
    ):
        run_step(name, cfg)
    if device == "cuda":
        assert torch.cuda.max_memory_allocated() > 0
    store = open_store(cfg)
    commits = store.history("stage-1", finished(cfg, store)["stage-1"].key)
    points = [point for c in commits for point in decode_points(store.read(c, METRICS))]
    assert all(0 <= point.metrics["sync/canary_rms"] < 1e-3 for point in points)
    assert any(point.metrics.get("actor/grad_norm", 0.0) > 0 for point in points)
