"""AdamW on master weights: learning rates, state, and updates of bfloat16 weights."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save

from agentgym.config import LearnerConfig, OptimizerConfig
from agentgym.learner.learner import LocalLearner
from agentgym.learner.optimizer import HostMemory, learning_rate
from agentgym.learner.process_group import ProcessGroup
from agentgym.models import checkpoint, networks
from agentgym.models.architecture import WEIGHTS
from agentgym.models.model import load_weights, weights_of
from tests.agentgym.learner.learning import (
    OPTIMIZER,
    assert_same,
    batch_of,
    everything,
    on_policy,
    train,
    weights,
)


def test_a_saved_optimizer_continues_to_the_bit(make_learner, stored, content):
    whole, resumed = make_learner(), make_learner(seed=1)
    for step in (1, 2):
        whole.sft_step(batch_of(), step=step)
    blob = content(whole)[checkpoint.OPTIMIZER]
    for name, parameter in resumed.model.named_parameters():
        parameter.data.copy_(weights_of(whole.model)[name])
    forgetful = make_learner(seed=1)
    forgetful.model.load_state_dict(whole.model.state_dict())
    resumed.load_optimizers(stored({checkpoint.OPTIMIZER: blob}))
    assert content(resumed)[checkpoint.OPTIMIZER] == blob
    metrics = [learner.sft_step(batch_of(), step=3) for learner in (whole, resumed, forgetful)]
    assert metrics[0] == metrics[1]
    assert_same(weights(whole), weights(resumed))
    # negative control
    assert not torch.equal(
        weights(whole)["model.norm.weight"], weights(forgetful)["model.norm.weight"]
    )


def rounded(model):
    """Return the float32 model, rounded to weights that bfloat16 holds exactly."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def masters(learner):
    return {name: master.detach().clone() for name, master in learner._policy._masters.items()}


def distance(first, second):
    return math.sqrt(
        sum(
            float(((tensor.float() - second[name].float()) ** 2).sum())
            for name, tensor in first.items()
        )
    )


@pytest.mark.integration
def test_weights_in_bfloat16_move_at_a_small_rate_as_a_float32_twin_does(make_model):
    config = OptimizerConfig(lr=1e-6, warmup_steps=0)
    twin = LocalLearner(rounded(make_model()), config, total_steps=60)
    narrow = LocalLearner(rounded(make_model()).bfloat16(), config, total_steps=60)
    # negative control: AdamW on the bfloat16 weights directly
    plain = LocalLearner(rounded(make_model()).bfloat16(), config, total_steps=60)
    plain._policy._masters = dict(plain.model.named_parameters())
    before = weights(twin)
    for step in range(1, 61):
        for learner in (twin, narrow, plain):
            learner.sft_step(batch_of(), step=step)
    assert distance(masters(narrow), weights(twin)) < 0.15 * distance(weights(twin), before)
    assert distance(masters(narrow), before) == pytest.approx(
        distance(weights(twin), before), rel=0.02
    )
    assert distance(weights(plain), before) < 0.15 * distance(weights(twin), before)
    assert_same(
        weights(narrow), {name: master.bfloat16() for name, master in masters(narrow).items()}
    )

    def gain(moved):
        """Return the gain in log-probability of the actions, computed in float32."""
        scores = []
        for given in (before, moved):
            model = make_model()
            load_weights(model, given)
            scores.append(float(LocalLearner(model, config, total_steps=1).score(batch_of()).sum()))
        return scores[1] - scores[0]

    assert gain(masters(narrow)) == pytest.approx(gain(weights(twin)), rel=0.05)
    assert gain(weights(plain)) < 0.05 * gain(weights(twin))


def test_gradients_of_bfloat16_weights_add_up_in_float32(make_model):
    alone = LearnerConfig(micro_batch_tokens=1)
    learner = LocalLearner(make_model().bfloat16(), OPTIMIZER, total_steps=10, settings=alone)
    learner.sft_step(batch_of(), step=1)
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    assert {master.grad.dtype for master in learner._policy._masters.values()} == {torch.float32}
    sums = learner._policy._masters["model.norm.weight"].grad
    assert not torch.equal(sums, sums.bfloat16().float())


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_saved_learner_of_bfloat16_weights_continues_to_the_bit(
    make_model, stored, content, recipe
):
    def make():
        critic = networks.ValueNet(make_model(7).bfloat16())
        return LocalLearner(
            make_model().bfloat16(),
            OptimizerConfig(lr=1e-5, warmup_steps=0),
            total_steps=10,
            critic=critic,
        )

    config = everything(recipe, minibatches=2, kl_coef=0.0)
    whole, resumed, forgetful = make(), make(), make()
    batch = on_policy(whole, batch_of())
    train(whole, batch, config, step=1, seed=0)
    blobs = content(whole)
    assert {tensor.dtype for tensor in load_safetensors(blobs[WEIGHTS]).values()} == {
        torch.bfloat16
    }
    for learner in (resumed, forgetful):
        load_weights(learner.model, load_safetensors(blobs[WEIGHTS]))
        load_weights(learner._critic, load_safetensors(blobs[checkpoint.CRITIC]))
    resumed.load_optimizers(stored(blobs))
    assert content(resumed) == blobs
    for learner in (whole, resumed):
        train(learner, replace(batch, logprobs=learner.score(batch)), config, step=2, seed=0)
    assert content(resumed) == content(whole)
    # negative control
    assert content(forgetful)[checkpoint.OPTIMIZER] != blobs[checkpoint.OPTIMIZER]
    with pytest.raises(
        ValueError,
        match=r"master weight .* does not round to its weight; take both from one commit",
    ):
        forgetful.load_optimizers(stored(content(whole)))


def test_float32_weights_have_no_second_copy(make_learner, stored, content):
    learner = make_learner()
    learner.sft_step(batch_of(), step=1)
    assert all(
        learner._policy._masters[name] is parameter
        for name, parameter in learner.model.named_parameters()
    )
    keys = {
        name.rpartition(":")[2] for name in load_safetensors(content(learner)[checkpoint.OPTIMIZER])
    }
    assert keys == {"step", "exp_avg", "exp_avg_sq"}
    narrow = LocalLearner(learner.model.bfloat16(), OPTIMIZER, total_steps=10)
    with pytest.raises(
        ValueError, match=r"has no master weight of .*; it is of a model in float32"
    ):
        narrow.load_optimizers(stored(learner.snapshot()))


def test_the_state_of_another_optimizer_is_refused(make_learner, stored, content):
    learner = make_learner()
    learner.sft_step(batch_of(), step=1)
    state = load_safetensors(content(learner)[checkpoint.OPTIMIZER])
    name = next(iter(dict(learner.model.named_parameters())))
    lacking = {key: each for key, each in state.items() if key != f"{name}:exp_avg"}
    more = {**state, f"{name}:momentum": state[f"{name}:exp_avg"].clone()}
    unknown = {**state, "nobody:exp_avg": state[f"{name}:exp_avg"].clone()}
    for changed, problem in (
        (lacking, "it is of another optimizer"),
        (more, "it is of another optimizer"),
        (unknown, "of a parameter nobody that the model does not have"),
    ):
        with pytest.raises(ValueError, match=problem):
            make_learner().load_optimizers(stored({checkpoint.OPTIMIZER: save(changed)}))


def test_learning_rates_of_each_schedule():
    def rates(schedule, steps, warmup=2):
        config = OptimizerConfig(
            lr=1.0, warmup_steps=warmup, schedule=schedule, final_lr_fraction=0.1
        )
        return [learning_rate(config, step, 10) for step in steps]

    assert rates("constant", [1, 2, 3, 10, 99]) == pytest.approx([0.5, 1, 1, 1, 1])
    # progress of step 6 of 2 .. 10 is one half: 0.1 + 0.9 * 0.5
    assert rates("linear", [1, 2, 6, 10, 99]) == pytest.approx([0.5, 1, 0.55, 0.1, 0.1])
    # progress 1/4: 0.5 * (1 + cos(pi / 4)) = 0.853553, 0.1 + 0.9 * 0.853553
    assert rates("cosine", [1, 2, 4, 6, 10]) == pytest.approx([0.5, 1, 0.868198, 0.55, 0.1])
    assert rates("constant", [1], warmup=0) == [1]


def test_the_rate_of_the_step_is_the_one_applied(make_learner):
    slow, fast = (
        make_learner(OptimizerConfig(lr=1e-2, warmup_steps=warmup, weight_decay=0.0))
        for warmup in (10, 0)
    )
    before = weights(slow)
    metrics = [learner.sft_step(batch_of(), step=1) for learner in (slow, fast)]
    assert [m["sft/lr"] for m in metrics] == pytest.approx([1e-3, 1e-2])
    # Adam's first step moves each weight by the rate, for any gradient
    moved = [
        (weights(learner)["model.norm.weight"] - before["model.norm.weight"]).abs().max()
        for learner in (slow, fast)
    ]
    assert [float(distance) for distance in moved] == pytest.approx([1e-3, 1e-2], rel=1e-2)


def test_a_gradient_that_is_not_finite_leaves_the_weights_unchanged(make_learner):
    learner = make_learner()
    before = weights(learner)
    hook = learner.model.model.layers[0].mlp.up_proj.weight.register_hook(
        lambda gradient: gradient * math.nan
    )
    with pytest.raises(
        FloatingPointError, match="gradient norm nan is not finite; the weights were not changed"
    ):
        learner.sft_step(batch_of(), step=1)
    assert_same(before, weights(learner))
    hook.remove()
    learner.sft_step(batch_of(), step=1)  # a failed step leaves no state behind
    assert all(torch.isfinite(tensor).all() for tensor in weights(learner).values())


@pytest.fixture
def offloading(make_model):
    def make(offload, dtype=torch.float32, seed=0):
        return LocalLearner(
            make_model(seed).to(dtype),
            OPTIMIZER,
            total_steps=10,
            settings=LearnerConfig(offload_optimizer=offload),
        )

    return make


def test_a_tensor_that_waits_keeps_its_values_and_no_memory():
    tensor, host = torch.arange(12.0).view(3, 4), HostMemory(ProcessGroup())
    host.put(tensor)
    assert tensor.untyped_storage().nbytes() == 0
    assert tensor.shape == (3, 4)
    assert torch.equal(host[tensor], torch.arange(12.0).view(3, 4))
    waiting = host[tensor]
    for expected in (torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4) + 1):
        host.fetch(tensor)
        assert torch.equal(tensor, expected)
        tensor += 1
        host.put(tensor)
    assert host[tensor] is waiting  # host memory is allocated once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_is_that_of_states_on_the_device_to_the_bit(offloading, content, batch_of, dtype):
    batch = batch_of([7, 12, 5], 60)
    plain, offloaded = offloading(False, dtype), offloading(True, dtype)
    for step in (1, 2, 3):
        metrics = [each.sft_step(batch, step=step) for each in (plain, offloaded)]
        assert metrics[0] == metrics[1]
    assert content(plain) == content(offloaded)
    kept = offloaded._policy._host._hosts
    keys = 4 if dtype == torch.bfloat16 else 3  # step, two moments, and a master weight
    assert len(kept) == keys * len(weights_of(plain.model))
    assert all(each.untyped_storage().nbytes() == 0 for each in kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["from the host", "from the device"])
def test_a_commit_goes_on_with_and_without(offloading, stored, content, batch_of, dtype, first):
    batch = batch_of([7, 12, 5], 60)
    whole, resumed = offloading(first, dtype), offloading(not first, dtype, seed=1)
    whole.sft_step(batch, step=1)
    saved = stored(whole.snapshot())
    load_weights(resumed.model, saved[WEIGHTS].load())
    resumed.load_optimizers(saved)
    assert content(resumed) == content(whole)
    for each in (whole, resumed):
        each.sft_step(batch, step=2)
    assert content(resumed) == content(whole)
