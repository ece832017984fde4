"""Fixture for a tiny model in the built-in engine."""

import pytest

from agentgym.rollouts.policies.torch import TorchPolicy


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture
def make_policy(make_model, tokenizer):
    def make(num_slots=4, context_tokens=64, seed=0):
        return TorchPolicy(
            make_model(seed),
            stop_ids=[tokenizer.eos_token_id],
            num_slots=num_slots,
            context_tokens=context_tokens,
        )

    return make
