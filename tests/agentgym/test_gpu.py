"""Training on a CUDA device, in this process."""

import pytest
import torch

from agentgym.config import load_config
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store
from agentgym.steps.context import METRICS
from agentgym.tracking.points import decode_points

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_engine_and_learner_of_one_process_share_the_device(tiny_params, tmp_path, recipe):
    overrides = ["compute_device=cuda", f"algorithm.recipe={recipe}"]
    cfg = load_config(tiny_params(tmp_path / "run"), overrides)
    torch.cuda.reset_peak_memory_stats()
    for name in (
        "prepare",
        "demonstrate",
        "initialize",
        "warm-start",
        "stage-1",
        "evaluate-stage-1",
    ):
        run_step(name, cfg)
    assert torch.cuda.max_memory_allocated() > 0
    store = open_store(cfg)
    commits = store.history("stage-1", finished(cfg, store)["stage-1"].key)
    points = [point for c in commits for point in decode_points(store.read(c, METRICS))]
    assert all(0 <= point.metrics["sync/canary_rms"] < 1e-3 for point in points)
    assert any(point.metrics.get("actor/grad_norm", 0.0) > 0 for point in points)
