"""Engines of installed packages train like the built-in one, within their stated tolerances."""

import pytest
import torch

from agentgym.audit import audit
from agentgym.cli import main
from agentgym.config import ConfigError, RunConfig, load_config
from agentgym.models.adapter import Adapter
from agentgym.models.fidelity import TORCH
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store, steps_of
from agentgym.rollouts.engine import open_policy
from agentgym.rollouts.policies import engines
from agentgym.rollouts.policies.engines import (
    Meter,
    engine_class,
    engine_module,
    tolerance_of,
    why_merged,
)
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.steps.context import METRICS
from agentgym.store.keys import package_folders, source_digest, source_files
from agentgym.tracking.points import decode_points
from agentgym.types import EngineMismatch, EngineUsage

pytestmark = pytest.mark.integration

SLOW = '''
import torch
from agentgym.models.attention import PackedSequences
from agentgym.models.model import load_weights
from agentgym.models.fidelity import Tolerance
from agentgym.types import Completion, EngineUsage

class Slow:
    """The whole sequence again for every token."""

    repeats_draws = False
    tolerances = {torch.float32: Tolerance(1e-3, canary=5e-4, mismatch_kl=0.1, nats=2e-3, mass=1.0)}

    def __init__(self, model, stop_ids, version):
        self._model, self._stop_ids, self.version = model.eval(), stop_ids, version

    @classmethod
    def open(cls, cfg, checkpoint, *, num_slots, version):
        return cls(checkpoint.model, checkpoint.renderer.stop_ids, version)

    @torch.inference_mode()
    def _logp(self, ids):
        layout = PackedSequences(torch.tensor([0, len(ids)]))
        given = {"input_ids": torch.tensor([ids]), "position_ids": layout.position[None]}
        logits = self._model(**given, use_cache=False, layout=layout).logits[0].float()
        return torch.log_softmax(logits, -1)

    async def generate(self, prompt_ids, sampling):
        ids, logprobs = [], []
        while len(ids) < sampling.max_new_tokens and not {*ids} & {*self._stop_ids}:
            logp = self._logp(prompt_ids + ids)[-1] / (sampling.temperature or 1.0)
            logp = torch.log_softmax(logp, -1)
            drawn = logp.exp().multinomial(1) if sampling.temperature else logp.argmax()[None]
            ids.append(int(drawn))
            logprobs.append(float(logp[drawn]))
        stop = "stop" if ids[-1] in self._stop_ids else "length"
        return Completion(tuple(ids), tuple(logprobs), stop, self.version)

    async def score(self, sequences):
        following = [torch.tensor(ids)[1:, None] for ids in sequences]
        scores = [self._logp(ids)[:-1] for ids in sequences]
        return [each.gather(1, ids)[:, 0] for each, ids in zip(scores, following, strict=True)]

    async def publish(self, delivery):
        load_weights(self._model, await delivery.weights())
        self.version = delivery.version

    async def usage(self):
        return EngineUsage()

    async def sleep(self): ...
    async def wake(self): ...
    async def close(self): ...
'''


@pytest.fixture
def slow(install):
    return install("slow_engine", SLOW, "agentgym.engines", "slow", "slow_engine:Slow")


@pytest.mark.slow
def test_an_installed_engine_trains_and_is_audited_by_its_own_tolerance(
    slow, tiny_params, tmp_path
):
    cfg = load_config(tiny_params(tmp_path / "run"), ["rollout.engine=slow"])
    assert tolerance_of(cfg, torch.float32).canary == 5e-4
    for name in ("prepare", "demonstrate", "initialize", "warm-start", "stage-1", "stage-2"):
        run_step(name, cfg)
    store = open_store(cfg)
    done = finished(cfg, store)
    commits = [c for name in ("stage-1", "stage-2") for c in store.history(name, done[name].key)]
    points = [point for c in commits for point in decode_points(store.read(c, METRICS))]
    assert len(points) >= 3
    assert any(point.metrics.get("actor/grad_norm", 0.0) > 0 for point in points)
    assert all(0 <= point.metrics["sync/canary_rms"] <= 5e-4 for point in points)
    # the engine reports no usage of its own
    assert all(point.metrics["perf/generated_tokens_per_s"] > 0 for point in points)
    assert not any("perf/engine_idle_frac" in point.metrics for point in points)
    report = audit(cfg, num_episodes=4)
    assert report.ok, [check.failures for check in report.checks if not check.ok]
    told = {check.name: check for check in report.checks}
    assert "engine slow does not repeat its draws" in told["sampling"].not_checked[0]
    assert told["rescore"].counted > 0


@pytest.mark.slow
def test_a_forgotten_publish_of_an_installed_engine_is_found(slow, tiny_params, tmp_path):
    slow.write_text(SLOW.replace("load_weights(self._model, await delivery.weights())", "pass"))
    cfg = load_config(tiny_params(tmp_path / "run"), ["rollout.engine=slow", "optimizer.lr=0.01"])
    for name in ("prepare", "demonstrate", "initialize", "warm-start"):
        run_step(name, cfg)
    with pytest.raises(EngineMismatch, match=r"did not reach the engine.*limit 0.0005"):
        run_step("stage-1", cfg)


def test_an_engine_that_does_not_tell_its_usage_is_refused_when_it_is_opened(slow):
    slow.write_text(SLOW.replace("async def usage", "async def used"))
    with pytest.raises(ConfigError, match=r"engine slow: slow_engine:Slow has no method `usage`"):
        open_policy(RunConfig(rollout={"engine": "slow"}), None, num_slots=1, version=0)


@pytest.mark.parametrize(
    ("engine", "rank", "module", "model", "reason"),
    [
        ("vllm", 4, "q_proj", "qwen2", ""),
        ("vllm", 512, "1.self_attn.q_proj", "qwen2", ""),
        ("vllm", 513, "q_proj", "qwen2", "rank 513 is above 512, vLLM's largest"),
        ("vllm", 4, "gate", "qwen2", "vLLM is not known to adapt gate"),
        ("vllm", 4, "q_proj", "other", "vLLM is not known to adapt a model of type other"),
        ("torch", 4, "q_proj", "qwen2", "engine torch takes no adapter"),
    ],
)
def test_an_adapter_is_published_alone_where_the_engine_can_take_it(
    engine, rank, module, model, reason
):
    cfg = RunConfig(rollout={"engine": engine})
    adapter = Adapter(None, rank, 8, (module,))
    assert why_merged(cfg, adapter, f'{{"model_type": "{model}"}}') == reason


def test_an_engine_and_its_source_are_in_the_keys_of_what_it_samples(slow, tiny_params, tmp_path):
    path = tiny_params(tmp_path / "run")
    assert engine_module("slow") == "slow_engine"
    for name in ("stage-1", "evaluate-stage-1"):
        modules = steps_of(load_config(path, ["rollout.engine=slow"]))[name].modules
        assert "slow_engine" in modules
        before = source_digest(modules)
        slow.write_text(slow.read_text() + "\n# another\n")
        source_digest.__globals__["_digest_once"].cache_clear()
        assert source_digest(modules) != before
        assert "agentgym.rollouts.policies.torch" in steps_of(load_config(path))[name].modules


def test_an_unknown_engine_is_one_line_before_anything_starts(slow, tiny_params, tmp_path, capsys):
    path = tiny_params(tmp_path / "run")
    assert main(["plan", "--params", str(path), "--set", "rollout.engine=slov"]) == 2
    assert "rollout.engine: unknown engine 'slov'; did you mean 'slow'?" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="known: slow, torch"):
        engine_class("zzz")


def test_weights_of_a_dtype_without_a_tolerance_are_refused(slow):
    for dtype, weights in (("auto", torch.bfloat16), ("bfloat16", torch.float32)):
        cfg = RunConfig(rollout={"engine": "slow", "engine_dtype": dtype})
        with pytest.raises(ConfigError, match=r"'slow' states no tolerance .* torch\.bfloat16"):
            tolerance_of(cfg, weights)
    with pytest.raises(ValueError, match="the built-in engine computes in the weights' own"):
        RunConfig(rollout={"engine_dtype": "bfloat16"})
    assert engine_class("torch") is TorchPolicy
    assert set(TORCH) == {torch.float32, torch.float16, torch.bfloat16}


def test_the_device_is_in_the_keys_and_cuda_is_not_promised_to_the_bit():
    assert RunConfig().compute_device == "cpu"
    assert {"compute_device"} <= set(steps_of(RunConfig())["stage-1"].sections)
    with pytest.raises(ValueError, match="deterministic is promised on the CPU alone"):
        RunConfig(deterministic=True, compute_device="cuda")
    with pytest.raises(ValueError, match="every worker and rank needs a share of a GPU"):
        RunConfig.model_validate({"compute": "ray", "compute_device": "cuda"})
    with pytest.raises(ValueError, match="with cpu it would hold one and not use it"):
        RunConfig.model_validate({"compute": "ray", "ray": {"worker_gpus": 1}})


def test_vllm_is_asked_for_before_anything_starts_where_it_would_run_here(
    tiny_params, tmp_path, monkeypatch
):
    path = tiny_params(tmp_path / "run")
    monkeypatch.setattr(engines, "find_spec", lambda _: None)
    engine = ["rollout.engine=vllm"]
    with pytest.raises(ConfigError, match=r"vllm, which is not installed here; `make vllm`"):
        engines.check_engine(load_config(path, engine))
    there = ["compute=ray-job", "ray.address=http://127.0.0.1:8265"]
    engines.check_engine(load_config(path, [*engine, *there]))
    engines.check_engine(load_config(path))


def test_nothing_deterministic_is_sampled_with_vllm(tiny_params, tmp_path):
    path = tiny_params(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"use rollout\.engine torch with deterministic"):
        load_config(path, ["rollout.engine=vllm", "deterministic=true"])
    modules = steps_of(load_config(path, ["rollout.engine=vllm"]))["stage-1"].modules
    assert "agentgym.rollouts.policies.vllm" in modules
    sources = source_files(modules, package_folders())
    assert "agentgym.rollouts.policies.vllm_worker" in sources


def test_time_counts_as_what_was_in_work_and_what_waited_meanwhile():
    now = [10.0]
    meter = Meter(lambda: now[0])
    now[0] = 12.0  # 2 s idle
    meter.requests(running=2, waiting=1)
    now[0] = 15.0  # 3 s of work with one waiting
    meter.requests(running=0, waiting=4)
    now[0] = 16.0  # 1 s with four waiting for new weights
    meter.requests(running=4, waiting=0)
    meter.prompt(30, 20)
    meter.prompt(10, 0)
    now[0] = 20.0  # 4 s of work until usage is read
    first = meter.usage()
    assert first == EngineUsage(40, 20, busy_s=7.0, depth_s={0: 6.0, 1: 3.0, 4: 1.0})
    assert (first.total_s, first.busy_frac, first.mean_depth) == (10.0, 0.7, 0.7)
    now[0] = 22.0
    meter.requests(running=0, waiting=0)
    now[0] = 24.0
    since = meter.usage() - first
    assert since == EngineUsage(0, 0, busy_s=2.0, depth_s={0: 4.0})
    assert (since.busy_frac, max(since.depth_s)) == (0.5, 0)


def test_several_engines_are_added_up():
    one = EngineUsage(10, 5, 1.0, {0: 2.0})
    other = EngineUsage(30, 0, 2.0, {0: 1.0, 2: 1.0})
    assert one + other == EngineUsage(40, 5, 3.0, {0: 3.0, 2: 1.0})
    assert (one + other).busy_frac == 0.75
    assert one + other - one == other
    assert EngineUsage().busy_frac == 1.0
    assert EngineUsage().mean_depth == 0.0
