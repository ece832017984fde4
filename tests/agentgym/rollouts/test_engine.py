"""What the canary sees: weights that arrived, and weights that did not."""

import pytest
import torch

from agentgym.config import OptimizerConfig, RunConfig
from agentgym.learner.learner import LocalLearner
from agentgym.models.checkpoint import new_checkpoint
from agentgym.models.model import weights_of
from agentgym.models.tolerance import TORCH
from agentgym.rollouts.engine import LocalEngine
from agentgym.rollouts.loop import LoopThread
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.types import EngineMismatch

LR = 1e-5  # a typical rate of a large model: what one step changes is small


@pytest.fixture
def pair(make_model, tokenizer):
    """(engine without environments, learner) that start from the same weights."""
    checkpoint = new_checkpoint(make_model(), tokenizer)
    learner = LocalLearner(checkpoint.model, OptimizerConfig(lr=LR, warmup_steps=0), total_steps=10)
    policy = TorchPolicy(
        make_model(), stop_ids=checkpoint.renderer.stop_ids, num_slots=2, context_tokens=64
    )
    loop = LoopThread()
    yield LocalEngine(RunConfig(), checkpoint, policy, None, loop, ""), learner
    loop.close()


def train(learner):
    """Every weight moves by the learning rate, as in Adam's first step."""
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(
                LR
                * torch.sign(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
                )
            )


def test_weights_that_arrived_pass_the_canary(pair):
    engine, learner = pair
    train(learner)
    assert engine.publish(learner, 1) < TORCH[torch.float32].canary / 5
    assert engine.policy.version == 1
    assert all(
        torch.equal(tensor, weights_of(learner.model)[name])
        for name, tensor in weights_of(engine.policy._model).items()
    )


def test_a_forgotten_publish_of_one_small_step_is_seen(pair, monkeypatch):
    engine, learner = pair
    train(learner)
    monkeypatch.setattr(
        "agentgym.rollouts.policies.torch.load_weights", lambda model, weights: None
    )
    with pytest.raises(
        EngineMismatch, match="weights version 1 did not reach the engine: canary prompts differ by"
    ):
        engine.publish(learner, 1)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
    ],
)
def test_one_damaged_tensor_is_seen(pair, monkeypatch, name):
    engine, learner = pair
    publish = engine.policy.publish

    async def damaging(delivery):
        await publish(delivery)
        with torch.no_grad():
            dict(engine.policy._model.named_parameters())[name].mul_(1.01)

    monkeypatch.setattr(engine.policy, "publish", damaging)
    with pytest.raises(EngineMismatch, match="did not reach the engine"):
        engine.publish(learner, 1)
