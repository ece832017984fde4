"""What must be equal between the CPU and a CUDA device, and smaller on the device."""

import copy

import pytest
import torch

from agentgym.algorithms.advantages import with_advantages
from agentgym.config import LearnerConfig, OptimizerConfig, algorithm_config
from agentgym.learner.learner import LocalLearner
from agentgym.learner.process_group import SingleProcess
from agentgym.models import attention
from agentgym.models.attention import PackedSequences, Variant
from agentgym.models.networks import PolicyNet, ValueNet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

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
            ranks=SingleProcess(device),
            critic=ValueNet(make_model(7).to(dtype)),
            reference=make_model(3).to(dtype),
            settings=LearnerConfig(**settings),
        )

    return make


def step(learner, batch, config):
    """(what is logged, gradients by name, on the CPU)"""
    if config is None:
        reference = learner.score_reference(batch)
        told = learner.dpo_step(batch, reference, beta=0.1, label_smoothing=0.0, step=1)
    else:
        batch.logprobs.copy_(learner.score(batch))
        experience = with_advantages(learner.prepare(batch, config, step=1), config)
        told = experience.metrics | learner.update(experience, config, step=1, seed=0)
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_and_gradients_are_those_of_the_cpu(learner_on, batch_of, recipe):
    told = [
        step(learner_on(device), batch_of(LENGTHS, 60), RECIPES[recipe])
        for device in ("cpu", "cuda")
    ]
    assert_alike(*told, tolerance=1e-4)


@pytest.mark.parametrize("recipe", ["ppo", "dpo"])
@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": True},
        {"compile": "inductor"},
        {"head_chunk_tokens": 3},
        {"micro_batch_tokens": 16},
    ],
    ids=str,
)
def test_no_setting_of_memory_or_speed_changes_them(learner_on, batch_of, recipe, settings):
    told = [
        step(learner_on("cuda", **each), batch_of(LENGTHS, 60), RECIPES[recipe])
        for each in ({}, settings)
    ]
    assert_alike(*told, tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_in_host_memory_step_to_the_bit_and_leave_the_device(
    learner_on, batch_of, content, dtype
):
    batch, held, written = batch_of(LENGTHS, 60), {}, {}
    for offload in (False, True):
        before = torch.cuda.memory_allocated()
        learner = learner_on("cuda", dtype, offload_optimizer=offload)
        for number in (1, 2):
            learner.sft_step(batch, step=number)
        learner._policy.zero_grad()
        held[offload] = torch.cuda.memory_allocated() - before
        written[offload] = content(learner)
        del learner
    assert written[True] == written[False]
    assert held[True] < 0.8 * held[False]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "variant", [Variant(), Variant(scaling=0.3), Variant(window=3), Variant(window=1)], ids=str
)
def test_attention_without_padding_equals_that_with_it(monkeypatch, variant, kv_heads):
    generator = torch.Generator().manual_seed(0)
    starts = torch.cumsum(torch.tensor([0, *LENGTHS]), 0)
    wide = [
        torch.randn(int(starts[-1]), n, 64, generator=generator) for n in (4, kv_heads, kv_heads)
    ]

    def attended(device, dtype, layout_device):
        tensors = [each.to(device, dtype).requires_grad_() for each in wide]
        result = PackedSequences(starts.to(layout_device)).attend(0, *tensors, variant)
        weight = torch.linspace(-1, 1, result.numel()).view(result.shape).to(result)
        (result * weight).sum().backward()
        return [each.float().cpu() for each in (result.detach(), *(t.grad for t in tensors))]

    packed = attended("cuda", torch.bfloat16, "cuda")
    exact = attended("cpu", torch.float32, "cpu")
    monkeypatch.setattr(attention, "has_kernel", lambda *_: False)
    padded = attended("cuda", torch.bfloat16, "cuda")
    for ours, theirs, true in zip(packed, padded, exact, strict=True):
        error = float((ours - true).norm() / true.norm())
        assert error < 0.02
        assert error < 2 * float((theirs - true).norm() / true.norm()) + 1e-3


def test_the_kernel_is_what_half_precision_runs_on(monkeypatch, learner_on, batch_of):
    from torch.nn.attention import varlen

    calls, real = [], varlen.varlen_attn

    def counted(*arguments, **named):
        calls.append(arguments[0].shape)
        return real(*arguments, **named)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    batch = batch_of(LENGTHS, 60)
    learner_on("cuda", torch.float32).score(batch)
    assert calls == []
    scores = learner_on("cuda", torch.bfloat16).score(batch)
    assert [shape[0] for shape in calls] == [batch.num_tokens] * 2  # layers
    plain = learner_on("cpu").score(batch)
    # weights of bfloat16 whose logits are large
    assert float((scores - plain).abs().mean()) < 0.1


def peak_of(network, batch):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    network(batch)[0].sum().backward()
    torch.cuda.synchronize()
    network.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated() - before


def test_chunks_of_the_head_and_checkpointed_blocks_take_less_memory(make_model, batch_of):
    from agentgym.models.blocks import checkpoint_blocks

    model = make_model(0).to("cuda")
    batch = batch_of([2048] * 4, 60).to(torch.device("cuda"))
    network = PolicyNet(model)
    network(batch)[0].sum().backward()  # libraries take their own once
    network.zero_grad(set_to_none=True)
    whole = peak_of(PolicyNet(model, 1 << 20), batch)
    chunked = peak_of(PolicyNet(model, 128), batch)
    again = copy.deepcopy(model)
    checkpoint_blocks(again)
    checkpointed = peak_of(PolicyNet(again, 128), batch)
    assert checkpointed < chunked < whole
