"""Operations of an update counted by hand, and peaks of devices by the names they have."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentgym.learner.flops import TrainingFlops, device_peak_tflops, peak_tflops


def model(*, tied):
    config = Qwen2Config(
        vocab_size=100,
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config)


# a layer: query and output 8 x 8, key and value 4 x 8, biases 8 + 4 + 4, three 8 x 16, two norms
BLOCKS = 3 * (2 * 64 + 2 * 32 + 16 + 3 * 128 + 16) + 8


@pytest.mark.parametrize("tied", [True, False])
def test_blocks_and_head_count_and_an_embedding_that_is_no_head_does_not(tied):
    network = model(tied=tied)
    flops = TrainingFlops.of(network, network)
    assert flops == TrainingFlops(weights=BLOCKS + 100 * 8, attention=3 * 8)
    tokens, pairs = 3 + 5, 9 + 25
    expected = 6 * (BLOCKS + 800) * tokens + 6 * 24 * pairs
    assert flops.tflop(torch.tensor([3, 5])) == pytest.approx(expected / 1e12)
    # two of the five were computed for the three: three queries see 3 + 4 + 5 keys, twice 25 - 4
    computed = 6 * (BLOCKS + 800) * (tokens - 2) + 6 * 24 * (pairs - 4)
    shared = flops.tflop(torch.tensor([3, 5]), torch.tensor([0, 2]))
    assert shared == pytest.approx(computed / 1e12)


def test_of_a_body_without_a_head_its_own_head_counts_alone():
    body, head = model(tied=False).get_decoder(), torch.nn.Linear(8, 1)
    flops = TrainingFlops.of(torch.nn.ModuleList([body, head]), body)
    assert flops.weights == BLOCKS + 8 + 1


def test_the_published_count_of_a_model_of_1_5_billion():
    # Qwen2.5-1.5B, tied: 1.310e9 in blocks, 0.233e9 in the head
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        network = Qwen2ForCausalLM(config)
    flops = TrainingFlops.of(network, network)
    assert flops.weights == pytest.approx(1.310e9 + 0.233e9, rel=1e-3)
    assert flops.attention == 28 * 1536


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_a_device_has_the_peak_of_its_data_sheet(name, peak):
    assert peak_tflops(name) == peak


def test_a_cpu_has_no_peak():
    assert device_peak_tflops(torch.device("cpu")) is None
