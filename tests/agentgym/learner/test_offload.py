"""What waits in host memory comes back to the bit, and has no memory on the device meanwhile."""

import pytest
import torch

from agentgym.config import LearnerConfig, OptimizerConfig
from agentgym.learner.learner import LocalLearner
from agentgym.learner.offload import HostMemory
from agentgym.learner.process_group import SingleProcess
from agentgym.models import checkpoint
from agentgym.models.model import load_weights, weights_of

OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=0)


@pytest.fixture
def make_learner(make_model):
    def make(offload, dtype=torch.float32, seed=0):
        return LocalLearner(
            make_model(seed).to(dtype),
            OPTIMIZER,
            total_steps=10,
            settings=LearnerConfig(offload_optimizer=offload),
        )

    return make


def test_a_tensor_that_waits_keeps_its_values_and_no_memory():
    tensor, host = torch.arange(12.0).view(3, 4), HostMemory(SingleProcess())
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
    assert host[tensor] is waiting  # no memory is asked for twice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_is_that_of_states_on_the_device_to_the_bit(
    make_learner, content, batch_of, dtype
):
    batch = batch_of([7, 12, 5], 60)
    plain, offloaded = make_learner(False, dtype), make_learner(True, dtype)
    for step in (1, 2, 3):
        metrics = [each.sft_step(batch, step=step) for each in (plain, offloaded)]
        assert metrics[0] == metrics[1]
    assert content(plain) == content(offloaded)
    kept = offloaded._policy._host._hosts
    keys = 4 if dtype == torch.bfloat16 else 3  # step and moments, and the master weight
    assert len(kept) == keys * len(weights_of(plain.model))
    assert all(each.untyped_storage().nbytes() == 0 for each in kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["from the host", "from the device"])
def test_a_commit_goes_on_with_and_without(make_learner, stored, content, batch_of, dtype, first):
    batch = batch_of([7, 12, 5], 60)
    whole, resumed = make_learner(first, dtype), make_learner(not first, dtype, seed=1)
    whole.sft_step(batch, step=1)
    saved = stored(whole.snapshot())
    load_weights(resumed.model, saved[checkpoint.WEIGHTS].load())
    resumed.load_optimizers(saved)
    assert content(resumed) == content(whole)
    for each in (whole, resumed):
        each.sft_step(batch, step=2)
    assert content(resumed) == content(whole)
