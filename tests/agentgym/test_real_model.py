"""SmolLM2-135M-Instruct in bfloat16 as published: evaluated, trained and audited."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from agentgym.audit import audit
from agentgym.audit.findings import Checks
from agentgym.audit.sampling import check_sampling
from agentgym.audit.stored_steps import read_steps
from agentgym.cli import main
from agentgym.config import ModelConfig, OptimizerConfig, RunConfig, load_config
from agentgym.learner.learner import LocalLearner
from agentgym.models.checkpoint import new_checkpoint
from agentgym.models.fidelity import HALF_KL, TORCH, differences, half_precision_kl
from agentgym.models.model import load_hub
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import open_store
from agentgym.rollouts.engine import LocalEngine, LoopThread
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.types import EngineMismatch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "smollm2-135m-instruct"
pytestmark = [pytest.mark.real, pytest.mark.integration, pytest.mark.timeout(900)]
SETTINGS = {
    "extends": str(ROOT / "profiles" / "textcraft-cpu.yaml"),
    "model": {"source": "hub", "name": str(FOLDER), "dtype": "auto", "context_tokens": 512},
    "warm_start": {"num_demos": 2, "steps": 1, "batch_size": 2},
    "rollout": {
        "items_per_step": 2,
        "group_size": 2,
        "max_new_tokens": 10,
        "concurrency": 4,
        "instructions": False,
    },
    "horizon": {"kind": "fixed", "max_turns": [2], "stage_steps": [3]},
    "optimizer": {"lr": 2e-5, "warmup_steps": 0},
    # two turns solve nothing: without this term no step would change a weight
    "algorithm": {"entropy_coef": 0.01, "minibatches": 1},
    "validation": {"every": 0},
    "evaluation": {"num_items": 2, "num_samples": 1, "k": [1], "max_turns": 2},
    "gate": {"min_success": 0.0},
    "tracking": {"traces": 0},
}
SETTINGS["warm_start"]["optimizer"] = {"lr": 2e-4, "warmup_steps": 0, "schedule": "constant"}


@pytest.fixture(scope="module", autouse=True)
def folder():
    if not (FOLDER / "model.safetensors").is_file():
        pytest.fail("the model's folder is not there; run `make real-model`")
    return FOLDER


@pytest.fixture
def params(tmp_path):
    tree = {**SETTINGS, "store": {"path": str(tmp_path / "state" / "store")}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "params.yaml"


def test_the_tokenizer_splits_digits_and_blanks_as_the_model_was_trained(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a  12 b")["input_ids"] == [81, 256, 33, 34, 278]
    assert tokenizer.decode(tokenizer("1 + 1 = ?\n<|im_end|>")["input_ids"]).endswith("<|im_end|>")


def test_its_architecture_is_judged_apart_from_its_rounding(folder):
    model, _ = load_hub(ModelConfig(source="hub", name=str(folder)))
    assert next(model.parameters()).dtype == torch.bfloat16
    assert max(differences(model).values()) < 2e-4
    rounding = half_precision_kl(model)
    assert all(0 < kl < HALF_KL / 4 for kl in rounding.values()), rounding


@pytest.mark.parametrize(
    "engine", ["torch", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])]
)
def test_the_folder_is_evaluated_trained_and_passes_its_audit(folder, params, engine, caplog):
    evaluate = ["evaluate", str(folder), "--env", "textcraft"]
    evaluate += ["--num-items", "4", "--concurrency", "4"]
    set_ = ["rollout.max_new_tokens=10", "evaluation.max_turns=1", f"rollout.engine={engine}"]
    options = [word for setting in set_ for word in ("--set", setting)]
    assert main([*evaluate, "--params", str(params), *options]) == 0
    cfg = load_config(params, [f"rollout.engine={engine}"])
    for name in ("prepare", "demonstrate", "initialize", "warm-start", "stage-1"):
        assert str(run_step(name, cfg)) == "ran"
    assert "changes no stored bit" not in caplog.text
    report = audit(cfg, num_episodes=4)
    failed = [check for check in report.checks if not check.ok]
    assert not failed, failed
    checks = {check.name: check for check in report.checks}
    assert checks["rescore"].counted >= 8  # weights between these are not kept
    if engine == "torch":
        assert checks["sampling"].counted >= 60
        refuse_forgeries(cfg)


def refuse_forgeries(cfg):
    """Refuse exchanged samples, and log-probabilities of a lower temperature."""
    store = open_store(cfg)
    steps = read_steps(cfg, store, Checks("content"), Checks("lineage"))
    record = next(record for record in steps if record.name == "stage-1")

    def checked(change):
        episodes = {
            seq: tuple(map(change, played)) for seq, played in record.episodes.items() if played
        }
        rescore, sampling = Checks("rescore"), Checks("sampling")
        forged = replace(record, episodes=episodes)
        check_sampling(forged, 1, 0, rescore, sampling)  # one episode per version
        return rescore.num_failures, sampling.num_failures

    assert checked(lambda episode: episode) == (0, 0)
    exchanged = checked(lambda episode: replace(episode, sample=1 - episode.sample))
    assert exchanged[0] == 0
    assert exchanged[1] > 0
    louder = checked(
        lambda episode: replace(episode, logprobs=tuple(0.85 * each for each in episode.logprobs))
    )
    assert louder[0] > 0


@pytest.fixture(scope="module")
def loaded(folder):
    model, tokenizer = load_hub(ModelConfig(source="hub", name=str(folder)))
    twin, _ = load_hub(ModelConfig(source="hub", name=str(folder)))
    return new_checkpoint(model, tokenizer), twin


@pytest.fixture
def pair(loaded):
    """(engine without environments, learner) with the same weights."""
    checkpoint, twin = loaded
    learner = LocalLearner(checkpoint.model, OptimizerConfig(), total_steps=10)
    kept = {name: each.clone() for name, each in learner.weights().items()}
    policy = TorchPolicy(
        twin, stop_ids=checkpoint.renderer.stop_ids, num_slots=2, context_tokens=64
    )
    loop = LoopThread()
    yield LocalEngine(RunConfig(), checkpoint, policy, None, loop, {}), learner
    loop.close()
    with torch.no_grad():
        for model in (checkpoint.model, twin):
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])


def train(learner, lr):
    """Move every weight by the learning rate, as Adam's first step does."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(lr * torch.randn(parameter.shape, generator=draw).sign())


def half(model, weights):
    """Load every second tensor only."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name in list(weights)[::2]:
            own[name].copy_(weights[name])


FAULTS = {"forgotten": lambda model, weights: None, "halved": half}


@pytest.mark.parametrize("lr", [1e-7, 1e-5, 1e-4])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_canary_alone_finds_a_publish_that_did_not_arrive(pair, monkeypatch, fault, lr):
    engine, learner = pair
    assert engine.publish(learner, 1) <= TORCH[torch.bfloat16].canary
    train(learner, lr)
    monkeypatch.setattr("agentgym.rollouts.policies.torch.load_weights", FAULTS[fault])
    with pytest.raises(EngineMismatch, match="weights version 2 did not reach the engine"):
        engine.publish(learner, 2)


def test_a_stale_delivery_is_found_by_the_transports_digest(pair, monkeypatch):
    engine, learner = pair
    stale = {name: each.clone() for name, each in learner.weights().items()}
    train(learner, 1e-7)
    publish = engine.policy.publish

    async def publish_stale(delivery):
        delivery.held = stale
        await publish(delivery)

    monkeypatch.setattr(engine.policy, "publish", publish_stale)
    with pytest.raises(EngineMismatch, match=r"arrived at the engine with digest .*, sent was"):
        engine.publish(learner, 1)


@pytest.mark.parametrize("times", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_honest_publishes_raise_nothing_and_one_without_a_change_is_named(pair, caplog, times):
    engine, learner = pair
    for version in range(1, times + 1):
        train(learner, 10.0 ** -(4 + version % 4))
        assert engine.publish(learner, version) <= TORCH[torch.bfloat16].canary
    assert not caplog.records
    train(learner, 1e-12)
    engine.publish(learner, times + 1)
    assert f"weights version {times + 1} changes no stored bit" in caplog.text
