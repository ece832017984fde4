"""A registered model and a vLLM server with its weights give the same results."""

import os
import socket
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest

from agentgym.config import load_config
from agentgym.deploy.owned import owned_process, tail
from agentgym.evaluation.protocol import EvaluationRequest
from agentgym.pipeline.export import export
from agentgym.pipeline.policy_evaluation import evaluate_policy
from agentgym.rollouts.policies.engine_settings import ENVIRONMENT

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.integration),
    *(pytest.mark.slow, pytest.mark.timeout(1500)),
]
CONTEXT = 512


@contextmanager
def vllm_server(folder, log):
    """URL of vLLM's own OpenAI-compatible server, its CPU build, on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder)),
        "--served-model-name",
        "tiny",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        str(CONTEXT),
        "--max-num-seqs",
        "16",
        "--enforce-eager",
        "--generation-config",
        "vllm",
        "--no-enable-chunked-prefill",
        "--max-num-batched-tokens",
        "2048",
    ]
    told = {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with owned_process(command, log_path=log, env={**os.environ, **told}) as process:
        deadline = time.monotonic() + 900
        while True:
            assert process.poll() is None, tail(log)
            assert time.monotonic() < deadline, tail(log)
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"


def test_a_registered_model_by_both_engines_and_a_vllm_server_of_the_same_weights_agree(
    copy_run, tmp_path, tiny_params, tiny_endpoint
):
    cfg = load_config(tiny_params(copy_run(tmp_path), endpoint=tiny_endpoint, deterministic=True))
    changes = {"deterministic": False, "num_samples": 4, "temperature": 0.7, "concurrency": 8}
    name = f"models:/{cfg.registered_model}/1"
    ours = evaluate_policy(cfg, EvaluationRequest(policy=name, changes=changes)).result
    inside = evaluate_policy(
        cfg, EvaluationRequest(policy=name, changes=changes, engine="vllm")
    ).result
    assert [each.identity["policy"]["engine"] for each in (ours, inside)] == ["torch", "vllm"]
    export(cfg, "stage-2", tmp_path / "model")
    with vllm_server(tmp_path / "model", tmp_path / "vllm.log") as url:
        # endpoints get the rules by default; this model was trained without them
        asked = changes | {
            "instructions": False,
            "max_new_tokens": cfg.rollout.max_new_tokens,
            "context_tokens": cfg.model.context_tokens,
        }
        theirs = evaluate_policy(cfg, EvaluationRequest(policy=url, changes=asked)).result
    agree(ours, inside)
    agree(ours, theirs)
    assert inside.usage.known["output"] > 0
    assert theirs.usage.known["input"] > 0
    assert theirs.usage.known["output"] > 0


def agree(ours, theirs):
    """Check that both means lie in the other's interval; greedy results differ by ties only."""
    assert (ours.coverage, theirs.coverage) == (1.0, 1.0)
    for key in ("greedy", "avg_at_4"):
        a, b = (each.numbers["babyai"]["summary"][key] for each in (ours, theirs))
        assert a["low"] <= b["mean"] <= a["high"], (key, a, b)
        assert b["low"] <= a["mean"] <= b["high"], (key, a, b)
    same = [
        (one.success, one.num_turns) == (other.success, other.num_turns)
        for one, other in zip(ours.slots, theirs.slots, strict=True)
        if one.sample == 0
    ]
    assert sum(same) >= 0.9 * len(same)
