"""vLLM in a host process, and in a run that is killed."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from agentgym.audit import audit
from agentgym.config import LoraConfig, OptimizerConfig, load_config
from agentgym.config.operation import StoreConfig
from agentgym.learner.start import LearnerPlan
from agentgym.models import transport
from agentgym.models.adapter import Adapter, chosen_modules
from agentgym.models.architecture import ADAPTER
from agentgym.models.checkpoint import new_checkpoint
from agentgym.models.fidelity import VLLM
from agentgym.models.model import weights_of
from agentgym.models.tensorfiles import Snapshot, TensorFile
from agentgym.models.transport import InProcess, write_weights
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store
from agentgym.rollouts.engine import Canary, LoopThread, open_policy
from agentgym.rollouts.policies.hosts import one_engine
from agentgym.steps.context import METRICS
from agentgym.tracking.points import decode_points
from agentgym.types import EngineMismatch
from tests.agentgym.rollouts.policies.running import (
    NATS,
    PROMPT,
    Running,
    move,
    of_run,
    of_vllm,
    sampling,
    scores,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.integration]
ROOT = Path(__file__).parents[4]


class Session(Running):
    """`Running` whose engine is in a host process."""

    def __init__(self, checkpoint, cfg, version=0):
        self.loop = LoopThread()
        self.policy = open_policy(cfg, checkpoint, num_slots=16, version=version)


@pytest.mark.timeout(600)
def test_a_host_serves_sessions_with_the_weights_that_each_begins_with(
    make_model, tokenizer, stored, tmp_path, monkeypatch
):
    """Start the engine without weights; the first session brings them."""
    cfg = of_run().model_copy(update={"store": StoreConfig(path=tmp_path / "store")})
    canary, moved, harm = Canary(tokenizer, VLLM[torch.float32].canary), [], []

    def write(path, weights):
        moved.append(len(weights))
        write_weights(path, weights)
        if harm:
            with path.open("r+b") as file:
                file.seek(-5, 2)
                file.write(bytes([file.read(1)[0] ^ 1]))

    def check(opened, model, version):
        told = opened.run(opened.policy.score(canary.sequences))
        expected = scores(model, canary.sequences, tokenizer)
        assert canary.compare(expected, told, version).gap < NATS
        (said,) = opened.generate((PROMPT, sampling(1)))
        assert said.version == opened.policy.version == version
        again = opened.run(opened.policy.score([[*PROMPT, *said.ids]]))[0][len(PROMPT) - 1 :]
        assert torch.tensor(said.logprobs) == pytest.approx(again, abs=NATS)

    monkeypatch.setattr(transport, "write_weights", write)
    with one_engine(cfg):
        first = Session(new_checkpoint(make_model(0), tokenizer), cfg, version=5)
        processes = of_vllm(psutil.Process())
        check(first, make_model(0), 5)
        harm.append(True)
        with pytest.raises(EngineMismatch, match=r"version 6 arrived at vLLM on .* sent was"):
            first.run(first.policy.publish(InProcess(weights_of(make_model(1)), 6)))
        harm.clear()
        with pytest.raises(ValueError, match="versions must grow: engine holds 5, got 5"):
            first.run(first.policy.publish(InProcess(weights_of(make_model(1)), 5)))
        check(first, make_model(0), 5)
        first.run(first.policy.publish(InProcess(weights_of(make_model(1)), 6)))
        first.close()
        count = len(moved)
        kept = replace(new_checkpoint(make_model(1), tokenizer), weights=stored(make_model(1)))
        second = Session(kept, cfg, version=2)
        assert len(moved) == count
        check(second, make_model(1), 2)
        assert of_vllm(psutil.Process()) == processes  # one engine
        for each in processes:
            each.kill()
        with pytest.raises(RuntimeError, match="engine failed"):
            second.generate((PROMPT, sampling(1)))
        second.close()
        third = Session(new_checkpoint(make_model(2), tokenizer), cfg, version=1)
        check(third, make_model(2), 1)
        third.close()
        processes = of_vllm(psutil.Process())
        assert processes
    assert not psutil.wait_procs(processes, 30)[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_serves_adapters_and_begins_without_one_where_it_is_new(
    make_model, tokenizer, stored, tmp_path
):
    cfg = of_run().model_copy(update={"store": StoreConfig(path=tmp_path / "store")})
    model, canary = make_model(0), Canary(tokenizer, VLLM[torch.float32].canary)
    modules, base = chosen_modules(model, LoraConfig(rank=4)), stored(model)
    new = Adapter(base, 4, 8, modules, alone=True)
    architecture, draw = model.config.to_json_string(), torch.Generator().manual_seed(1)
    matrices = {
        name: 0.1 * torch.randn(each.shape, generator=draw)
        for name, each in new.shapes(architecture).items()
    }
    trained = replace(new, stored=stored(Snapshot({ADAPTER: TensorFile.of(matrices)}))[ADAPTER])
    plain = new_checkpoint(model, tokenizer)
    with one_engine(cfg):
        for adapter in (new, trained, trained, new):
            plan = LearnerPlan(architecture, adapter.policy, OptimizerConfig(), 10, adapter=adapter)
            learner = plan.build()
            opened = Session(replace(plain, weights=adapter.policy, adapter=adapter), cfg)
            for version in (0, 1):
                if version:
                    move(learner)
                    opened.run(opened.policy.publish(InProcess(learner.weights(), version)))
                told = opened.run(opened.policy.score(canary.sequences))
                assert canary.compare(canary.score(learner), told, version).gap < NATS
            opened.close()


RUN = """
import sys
from agentgym.config import load_config
from agentgym.pipeline.run import run_step
from agentgym.rollouts.policies.hosts import one_engine
if __name__ == "__main__":
    cfg = load_config(sys.argv[1], ["rollout.engine=vllm"])
    with one_engine(cfg):
        for name in sys.argv[2:]:
            run_step(name, cfg)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_leaves_no_engine_and_goes_on_to_the_end(tiny_params, tmp_path):
    path = tiny_params(tmp_path / "run")
    cfg, store = (found := load_config(path, ["rollout.engine=vllm"])), open_store(found)
    script = tmp_path / "run.py"
    script.write_text(RUN)
    command = [sys.executable, str(script), str(path)]
    for name in ("prepare", "demonstrate", "initialize", "warm-start"):
        run_step(name, cfg)
    process = subprocess.Popen([*command, "stage-1"], cwd=ROOT)
    try:
        wait_until(
            lambda: any(head.step == "stage-1" for head in store.heads()),
            200,
            process=process,
            why=lambda: "it ended before its first commit",
        )
        engine = of_vllm(psutil.Process(process.pid))
        assert engine
    finally:
        process.kill()
        process.wait(30)
    assert not psutil.wait_procs(engine, 30)[1]
    assert subprocess.run([*command, "stage-1", "stage-2"], cwd=ROOT, timeout=250).returncode == 0

    done = finished(cfg, store)
    commits = [c for name in ("stage-1", "stage-2") for c in store.history(name, done[name].key)]
    points = [point for c in commits for point in decode_points(store.read(c, METRICS))]
    assert [point.step for point in points if "actor/grad_norm" in point.metrics] == sorted(
        {point.step for point in points if "actor/grad_norm" in point.metrics}
    )
    assert any(point.metrics.get("actor/grad_norm", 0.0) > 0 for point in points)
    published = [point.metrics["sync/canary_rms"] for point in points]
    assert len(published) >= 3
    assert max(published) <= VLLM[torch.float32].canary
    assert all(0 < point.metrics["perf/engine_idle_frac"] < 1 for point in points)
    assert all(0 <= point.metrics["perf/prefix_cache_hit_frac"] < 1 for point in points)
    report = audit(cfg, num_episodes=4)
    assert report.ok, [check.failures for check in report.checks if not check.ok]
    told = {check.name: check for check in report.checks}
    assert "engine vllm does not repeat its draws" in told["sampling"].not_checked[0]
    assert told["rescore"].counted > 0
