"""Drawing a token from logits and a uniform number, and the distance of other tokens."""

import pytest
import torch

from agentgym.rollouts.policies.torch import Distribution, sample, uniforms
from agentgym.rollouts.policies.vllm import seed_of
from agentgym.types import SampleKey


def key(sample=0, turn=0):
    return SampleKey(0, 1, "babyai_3", sample, turn)


def test_draws_follow_the_softmax():
    """Test by chi-square over 5 classes: 20,000 evenly spread quantiles, and 20,000 random ones.
    With 4 degrees of freedom 18.5 has p = 0.001.
    """
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, -3.0])
    count = 20_000
    for temperature in (1.0, 0.5):
        expected = torch.softmax(logits / temperature, -1)
        uniform = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        tokens, logprobs = sample(
            logits.expand(count, 5), torch.full((count,), temperature), uniform
        )
        seen = torch.bincount(tokens, minlength=5)
        assert float(((seen - count * expected) ** 2 / (count * expected)).sum()) < 18.5
        assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-5)
        other = torch.softmax(logits, -1) if temperature != 1 else torch.softmax(logits / 0.5, -1)
        # negative control
        assert float(((seen - count * other) ** 2 / (count * other)).sum()) > 1000


def test_a_draw_inverts_the_distribution_and_never_leaves_it():
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log().expand(6, 3)
    tokens, _ = sample(
        logits,
        torch.ones(6),
        torch.tensor([0.0, 0.2, 0.3, 0.7, 0.8, 1 - 2**-53], dtype=torch.float64),
    )
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]


def test_temperature_zero_takes_the_largest_logit_whatever_the_draw():
    tokens, logprobs = sample(
        torch.tensor([[0.0, 3.0, 1.0]] * 2), torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.999])
    )
    assert tokens.tolist() == [1, 1]
    # 3 - ln(1 + e^3 + e) = 3 - 3.16985
    assert logprobs.tolist() == pytest.approx([-0.169846] * 2, abs=1e-5)


def test_the_numbers_of_a_key_are_even_and_do_not_depend_on_how_many_are_asked():
    few, many = uniforms(key(), 3), uniforms(key(), 20_000)
    assert (few == many[:3]).all()
    assert len(set(many)) == len(many)
    assert many.min() >= 0
    assert many.max() < 1
    counts = [((many >= tenth / 10) & (many < (tenth + 1) / 10)).sum() for tenth in range(10)]
    assert all(1_800 < count < 2_200 for count in counts)
    assert not set(many) & set(uniforms(key(turn=1), 20_000))


def test_the_distance_to_a_draw_is_what_lies_between_the_uniform_and_the_tokens_interval():
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]] * 6))
    uniform = torch.tensor([0.1, 0.1, 0.1, 0.9, 0.9, 0.45], dtype=torch.float64)
    outside, below = Distribution(logits, torch.ones(6)).distance(
        uniform, torch.tensor([0, 1, 2, 0, 2, 1])
    )
    assert outside.tolist() == pytest.approx([0.0, 0.1, 0.6, 0.7, 0.0, 0.0], abs=1e-6)
    assert below.tolist() == [0.0] * 6
    drawn, _ = sample(logits, torch.ones(6), uniform)
    assert Distribution(logits, torch.ones(6)).distance(uniform, drawn)[0].tolist() == [0.0] * 6


def test_the_distance_of_a_greedy_token_is_how_far_it_lies_below_the_largest():
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 3)
    outside, below = Distribution(logits, torch.zeros(3)).distance(
        torch.full((3,), 0.5, dtype=torch.float64), torch.tensor([1, 2, 0])
    )
    assert outside.tolist() == [0.0] * 3
    assert below.tolist() == pytest.approx([0.0, 2.0, 3.0])


def test_seeds_are_64_bits_of_the_key_alone():
    keys = [SampleKey(0, 1, "babyai_3", sample, turn) for sample in range(40) for turn in range(40)]
    seeds = [seed_of(key) for key in keys]
    assert seeds == [seed_of(key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert -(2**63) <= min(seeds) < -(2**62)
    assert 2**62 < max(seeds) < 2**63
