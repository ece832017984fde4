"""Micro-batches and chunks of logits grow with the memory of a GPU, whose counters are set here."""

from types import SimpleNamespace

import pytest
import torch

from agentgym.config import LearnerConfig
from agentgym.learner.budget import TokenBudget, head_chunk_tokens

AUTO = LearnerConfig(micro_batch_tokens="auto", head_chunk_tokens="auto")
GIB = 1 << 30


@pytest.fixture
def memory(monkeypatch):
    """Bytes of a GPU: 40 GiB, 10 of them weights and optimizer, 2 more kept by the allocator."""
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
    """A process group on GPUs; `all_sum` adds what the other ranks computed."""

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
    memory.peak = 14 * GIB  # 4 GiB for 4,096 tokens, 1 MiB a token
    budget.end(4_096)
    assert budget.tokens == int(0.8 * 30 * 1024)  # 40 - 10 GiB are free, reserved blocks included
    budget.begin()
    memory.peak = 50 * GIB  # 40 GiB for 4,096 tokens: what fits is less than the least
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
    # 4 GiB of three float32 copies of 50,000 logits
    assert head_chunk_tokens(AUTO, cuda, 50_000) == int(0.1 * 40 * GIB) // 600_000
    assert head_chunk_tokens(AUTO, cuda, 1_000_000) == 4_096
    assert head_chunk_tokens(AUTO, cpu, 50_000) == 4_096
    assert head_chunk_tokens(LearnerConfig(head_chunk_tokens=9), cuda, 50_000) == 9
