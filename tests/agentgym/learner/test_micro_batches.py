"""Sequences are distributed by token count and batched within a token budget."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentgym.config import LearnerConfig
from agentgym.learner.micro_batches import (
    TokenBudget,
    TrainingFlops,
    deal,
    device_peak_tflops,
    head_chunk_tokens,
    micro_batches,
    peak_tflops,
)


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


# one layer: query and output 8 x 8, key and value 4 x 8, biases 8 + 4 + 4, three 8 x 16, two norms
BLOCKS = 3 * (2 * 64 + 2 * 32 + 16 + 3 * 128 + 16) + 8


@pytest.mark.parametrize("tied", [True, False])
def test_blocks_and_head_count_and_an_embedding_that_is_no_head_does_not(tied):
    network = model(tied=tied)
    flops = TrainingFlops.of(network, network)
    assert flops == TrainingFlops(weights=BLOCKS + 100 * 8, attention=3 * 8)
    tokens, pairs = 3 + 5, 9 + 25
    expected = 6 * (BLOCKS + 800) * tokens + 6 * 24 * pairs
    assert flops.tflop(torch.tensor([3, 5])) == pytest.approx(expected / 1e12)
    # two of five tokens are shared: three queries see 3 + 4 + 5 keys, twice 25 - 4
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


LENGTHS = [6, 3, 8, 3, 5, 2]


def parts(sequences, tokens=12, unit=1, padded=False):
    return list(micro_batches(LENGTHS, sequences, tokens=tokens, unit=unit, padded=padded))


def test_micro_batches_hold_every_sequence_once_within_the_budget():
    # 6 + 3 fits, 8 more do not; 8 + 3 fits, 5 more do not; 5 + 2 fits
    assert parts(range(6)) == [[0, 1], [2, 3], [4, 5]]
    assert parts(range(6), tokens=27) == [[0, 1, 2, 3, 4, 5]]
    assert parts([2, 4]) == [[2], [4]]
    assert parts([]) == []


def test_where_attention_pads_each_counts_as_the_longest_beside_it():
    # 2 * 6 fits, 3 * 8 does not, 2 * 8 does not, 2 * 5 fits, 3 * 5 does not
    assert parts(range(6), padded=True) == [[0, 1], [2], [3, 4], [5]]


@pytest.mark.parametrize("padded", [False, True])
def test_tokens_that_the_one_before_has_too_count_once(padded):
    def shared(before, sequence):
        return 2 if sequence in (1, 3, 5) else 0

    def of(tokens):
        return list(
            micro_batches(LENGTHS, range(6), tokens=tokens, unit=1, padded=padded, shared=shared)
        )

    # 6 + 1 fits in 14, 8 more do not (nor 2 * 8 + 1); 8 + 1 + 5 fits, padded 2 * 8 + 1 does not
    assert of(14) == ([[0, 1], [2, 3], [4, 5]] if padded else [[0, 1], [2, 3, 4, 5]])
    # the first of a micro-batch shares nothing: 3 tokens and not 1
    assert of(3) == [[0], [1], [2], [3], [4], [5]]


@pytest.mark.parametrize("padded", [False, True])
def test_one_that_is_longer_than_the_budget_is_alone_and_pairs_stay_together(padded):
    assert parts(range(6), tokens=1, padded=padded) == [[0], [1], [2], [3], [4], [5]]
    assert parts(range(6), tokens=1, unit=2, padded=padded) == [[0, 1], [2, 3], [4, 5]]
    # 9 + 11 fit in 20, 7 more do not; padded 2 * 6, 4 * 8, 4 * 8
    expected = [[0, 1], [2, 3], [4, 5]] if padded else [[0, 1, 2, 3], [4, 5]]
    assert parts(range(6), tokens=20, unit=2, padded=padded) == expected


def test_the_longest_are_dealt_first_each_to_the_rank_with_the_fewest_tokens():
    # 8 | 6 | 5: 3 to the third (8), 3 to the second (9), 2 to the first (10); order kept
    assert deal(LENGTHS, range(6), num_ranks=3, unit=1) == [[2, 5], [0, 3], [1, 4]]
    # pairs of 9, 11 and 7 tokens
    assert deal(LENGTHS, range(6), num_ranks=2, unit=2) == [[2, 3], [0, 1, 4, 5]]


def test_one_rank_takes_all_in_their_order_and_more_ranks_than_sequences_leave_some_empty():
    assert deal(LENGTHS, [4, 1, 3], num_ranks=1, unit=1) == [[4, 1, 3]]
    assert deal(LENGTHS, [4, 1], num_ranks=3, unit=1) == [[4], [1], []]


def test_ranks_have_about_as_many_tokens_where_one_after_the_other_gives_one_nearly_all():
    lengths = [100, 1] * 8
    tokens = [
        sum(lengths[each] for each in own) for own in deal(lengths, range(16), num_ranks=2, unit=1)
    ]
    assert tokens == [404, 404]
    # negative control
    assert [sum(lengths[rank::2]) for rank in range(2)] == [800, 8]


AUTO = LearnerConfig(micro_batch_tokens="auto", head_chunk_tokens="auto")
GIB = 1 << 30


@pytest.fixture
def memory(monkeypatch):
    """Memory of a 40 GiB GPU: 10 hold weights and optimizer, the allocator reserves 2 more."""
    held = SimpleNamespace(total=40 * GIB, allocated=10 * GIB, peak=10 * GIB, reserved=12 * GIB)
    counters = {
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: held.allocated,
        "max_memory_allocated": lambda device: held.peak,
        "memory_reserved": lambda device: held.reserved,
        "mem_get_info": lambda device: (held.total - held.reserved, held.total),
        "get_device_properties": lambda device: SimpleNamespace(total_memory=held.total),
    }
    for name, counter in counters.items():
        monkeypatch.setattr(torch.cuda, name, counter)
    return held


class Ranks:
    """Process group on GPUs; `all_sum` adds the other ranks' values."""

    device, rank = torch.device("cuda"), 0

    def __init__(self, *others):
        self.size = 1 + len(others)
        self._others = others

    def all_sum(self, tensor):
        return tensor + torch.tensor([0.0, *self._others], dtype=tensor.dtype)


def test_the_budget_fills_the_free_memory_by_what_an_update_took(memory):
    budget = TokenBudget(AUTO, Ranks())
    assert budget.tokens == 4_096
    budget.begin()
    memory.peak = 14 * GIB  # 4 GiB for 4,096 tokens: 1 MiB per token
    budget.end(4_096)
    assert budget.tokens == int(0.8 * 30 * 1024)  # 40 - 10 GiB are free, reserved blocks included
    budget.begin()
    memory.peak = 50 * GIB  # 40 GiB for 4,096 tokens: less than the minimum fits
    budget.end(4_096)
    assert budget.tokens == 4_096


def test_all_ranks_have_the_budget_of_the_one_with_the_least_memory(memory, monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **kind: zeros(*size, **kind))
    budget = TokenBudget(AUTO, Ranks(9_000.0, 20_000.0))
    budget.begin()
    memory.peak = 14 * GIB
    budget.end(4_096)
    assert budget.tokens == 9_000


def test_a_number_stays_and_a_cpu_has_the_usual_one(memory):
    fixed = TokenBudget(LearnerConfig(micro_batch_tokens=512), Ranks())
    on_cpu = TokenBudget(AUTO, SimpleNamespace(device=torch.device("cpu"), rank=0, size=1))
    for budget in (fixed, on_cpu):
        budget.begin()
        memory.peak = 14 * GIB
        budget.end(100)
    assert (fixed.tokens, on_cpu.tokens) == (512, 16_384)


def test_a_tenth_of_the_memory_holds_the_logits(memory):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    # 4 GiB hold three float32 copies of 50,000 logits
    assert head_chunk_tokens(AUTO, cuda, 50_000) == int(0.1 * 40 * GIB) // 600_000
    assert head_chunk_tokens(AUTO, cuda, 1_000_000) == 4_096
    assert head_chunk_tokens(AUTO, cpu, 50_000) == 4_096
    assert head_chunk_tokens(LearnerConfig(head_chunk_tokens=9), cuda, 50_000) == 9
