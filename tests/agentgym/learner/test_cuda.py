"""Results equal on the CPU and a CUDA device, and memory use on the device.
Tests that can also run on the CPU do so.
"""

import copy
from itertools import pairwise

import pytest
import torch

from agentgym.algorithms.advantages import with_advantages
from agentgym.config import LearnerConfig, ModelConfig, OptimizerConfig, algorithm_config
from agentgym.learner.learner import LocalLearner
from agentgym.learner.process_group import ProcessGroup
from agentgym.models import attention
from agentgym.models.architecture import WEIGHTS
from agentgym.models.attention import PackedSequences, Variant
from agentgym.models.model import load_weights, new_model
from agentgym.models.networks import PolicyNet, ValueNet, checkpoint_blocks

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_cuda = pytest.mark.parametrize("device", [CUDA])
on_each_device = pytest.mark.parametrize("device", ["cpu", CUDA])

OPTIMIZER = OptimizerConfig(lr=1e-4, warmup_steps=0)
LENGTHS = [31, 4, 9, 18, 3, 12]
RECIPES = {
    "grpo": algorithm_config("grpo", kl_coef=0.1, entropy_coef=0.01, max_mismatch_kl=1.0),
    "ppo": algorithm_config("ppo", max_mismatch_kl=1.0, critic_warmup_steps=0),
    "gspo": algorithm_config("gspo", max_mismatch_kl=1.0),
    "dpo": None,
}


@pytest.fixture
def learner_on(make_model):
    def make(device, dtype=torch.float32, **settings):
        return LocalLearner(
            make_model(0).to(dtype),
            OPTIMIZER,
            total_steps=10,
            ranks=ProcessGroup(device),
            critic=ValueNet(make_model(7).to(dtype)),
            reference=make_model(3).to(dtype),
            settings=LearnerConfig(**settings),
        )

    return make


def step(learner, batch, config):
    """Return (metrics, {name: gradient on the CPU})."""
    if config is None:
        reference = learner.score_reference(batch)
        told = learner.dpo_step(batch, reference, beta=0.1, label_smoothing=0.0, step=1)
    else:
        batch.logprobs.copy_(learner.score(batch))
        experience = with_advantages(learner.prepare(batch, config, step=1), config)
        experience, updated = learner.update(experience, config, step=1, seed=0)
        told = experience.metrics | updated
    networks = {"actor": learner._policy, "critic": learner._values}
    gradients = {
        f"{kind} {name}": master.grad.cpu()
        for kind, network in networks.items()
        for name, master in network._masters.items()
        if master.grad is not None
    }
    return told, gradients


def assert_alike(one, other, *, tolerance):
    assert one[0] == pytest.approx(other[0], rel=tolerance, abs=tolerance)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=tolerance, atol=tolerance)


@on_cuda
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_and_gradients_are_those_of_the_cpu(learner_on, batch_of, recipe, device):
    told = [
        step(learner_on(where), batch_of(LENGTHS, 60), RECIPES[recipe]) for where in ("cpu", device)
    ]
    assert_alike(*told, tolerance=1e-4)


@on_cuda
def test_weights_step_as_those_of_the_cpu(learner_on, batch_of, device):
    stepped = []
    for where in ("cpu", device):
        learner = learner_on(where)
        for step_number in (1, 2, 3):
            learner.sft_step(batch_of(LENGTHS, 60), step=step_number)
        stepped.append({name: each.cpu() for name, each in learner.weights().items()})
    for name, weight in stepped[0].items():
        torch.testing.assert_close(stepped[1][name], weight, rtol=1e-4, atol=1e-6)


@on_each_device
@pytest.mark.parametrize("settings", [{}, {"offload_optimizer": True}], ids=str)
def test_a_learner_goes_on_from_its_snapshot(
    learner_on, batch_of, content, stored, settings, device
):
    batch, whole = batch_of(LENGTHS, 60), learner_on(device, **settings)
    whole.sft_step(batch, step=1)
    saved, resumed = stored(whole.snapshot()), learner_on(device, **settings)
    load_weights(resumed.model, saved[WEIGHTS].load())
    resumed.load_optimizers(saved)
    for learner in (whole, resumed):
        learner.sft_step(batch, step=2)
    assert content(resumed) == content(whole)


@on_each_device
@pytest.mark.parametrize("recipe", ["ppo", "dpo"])
@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": True},
        pytest.param({"compile": "aot_eager"}, marks=pytest.mark.integration),
        pytest.param({"compile": "inductor"}, marks=pytest.mark.gpu),
        {"head_chunk_tokens": 3},
        {"micro_batch_tokens": 16},
        {"micro_batch_tokens": "auto", "head_chunk_tokens": "auto"},
    ],
    ids=str,
)
def test_no_setting_of_memory_or_speed_changes_them(learner_on, batch_of, recipe, settings, device):
    told = [
        step(learner_on(device, **each), batch_of(LENGTHS, 60), RECIPES[recipe])
        for each in ({}, settings)
    ]
    assert_alike(*told, tolerance=1e-4)


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_in_host_memory_step_to_the_bit_and_leave_the_device(
    learner_on, batch_of, content, dtype, device
):
    batch, held, written = batch_of(LENGTHS, 60), {}, {}
    for offload in (False, True):
        before = torch.cuda.memory_allocated()
        learner = learner_on(device, dtype, offload_optimizer=offload)
        for number in (1, 2):
            learner.sft_step(batch, step=number)
        learner._policy.zero_grad()
        held[offload] = torch.cuda.memory_allocated() - before
        written[offload] = content(learner)
        del learner
    assert written[True] == written[False]
    assert held[True] < 0.8 * held[False]


@on_cuda
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(
    "variant", [Variant(), Variant(scaling=0.3), Variant(window=3), Variant(window=1)], ids=str
)
def test_attention_without_padding_equals_that_with_it(
    monkeypatch, variant, is_shared, kv_heads, device
):
    generator = torch.Generator().manual_seed(0)
    starts = torch.cumsum(torch.tensor([0, *LENGTHS]), 0)
    shared = [0, *(min(pair) // 2 for pair in pairwise(LENGTHS))] if is_shared else None
    computed = int(starts[-1]) - sum(shared or [])
    wide = [torch.randn(computed, n, 64, generator=generator) for n in (4, kv_heads, kv_heads)]

    def attended(where, dtype, layout):
        tensors = [each.to(where, dtype, copy=True).requires_grad_() for each in wide]
        result = PackedSequences(starts.to(layout), shared).attend(0, *tensors, variant)
        weight = torch.linspace(-1, 1, result.numel()).view(result.shape).to(result)
        (result * weight).sum().backward()
        return [each.float().cpu() for each in (result.detach(), *(t.grad for t in tensors))]

    packed = attended(device, torch.bfloat16, device)
    exact = attended("cpu", torch.float32, "cpu")
    monkeypatch.setattr(attention, "has_kernel", lambda *_: False)
    padded = attended(device, torch.bfloat16, device)
    for ours, theirs, true in zip(packed, padded, exact, strict=True):
        error = float((ours - true).norm() / true.norm())
        assert error < 0.02
        assert error < 2 * float((theirs - true).norm() / true.norm()) + 1e-3


@on_cuda
def test_the_kernel_is_what_half_precision_runs_on(monkeypatch, learner_on, batch_of, device):
    from torch.nn.attention import varlen

    calls, real = [], varlen.varlen_attn

    def counted(*arguments, **named):
        calls.append(arguments[0].shape)
        return real(*arguments, **named)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    batch = batch_of(LENGTHS, 60)
    learner_on(device, torch.float32).score(batch)
    assert calls == []
    scores = learner_on(device, torch.bfloat16).score(batch)
    assert [shape[0] for shape in calls] == [batch.num_tokens] * 2  # one call per layer
    plain = learner_on("cpu").score(batch)
    # bfloat16 weights with large logits
    assert float((scores - plain).abs().mean()) < 0.1


def peak_of(network, batch):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    network(batch)[0].sum().backward()
    torch.cuda.synchronize()
    network.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated() - before


@on_cuda
def test_chunks_of_the_head_and_checkpointed_blocks_take_less_memory(batch_of, device):
    config = ModelConfig(
        hidden_size=64, num_layers=4, num_heads=2, num_kv_heads=1, mlp_size=96, context_tokens=64
    )
    # full logits take 0.5 GB, all blocks together about 0.1 GB
    model = new_model(config, vocab_size=16_384, eos_id=1, pad_id=0, seed=0).to(device)
    batch = batch_of([64] * 128, 60).to(torch.device(device))
    network = PolicyNet(model)
    network(batch)[0].sum().backward()  # warm-up: libraries allocate their own memory once
    network.zero_grad(set_to_none=True)
    whole = peak_of(PolicyNet(model, 1 << 20), batch)
    chunked = peak_of(PolicyNet(model, 128), batch)
    again = copy.deepcopy(model)
    checkpoint_blocks(again)
    checkpointed = peak_of(PolicyNet(again, 128), batch)
    assert checkpointed < chunked < whole
