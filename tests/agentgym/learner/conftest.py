"""Fixtures that several test files of the learner share."""

import pytest
import torch

from agentgym.algorithms.batch import Batch
from agentgym.config import LearnerConfig
from agentgym.learner.learner import LocalLearner
from agentgym.models import networks
from tests.agentgym.learner.learning import OPTIMIZER


@pytest.fixture(scope="session")
def batch_of():
    """Return a function of (lengths, vocabulary) that makes a batch with random rewards."""

    def make(lengths, vocabulary):
        generator = torch.Generator().manual_seed(3)
        starts = torch.cumsum(torch.tensor([0, *lengths]), 0)
        mask = torch.rand(int(starts[-1]), generator=generator) < 0.5
        mask[starts[:-1]], mask[starts[1:] - 1] = False, True
        rewards = torch.zeros(len(mask))
        rewards[starts[1:] - 1] = torch.randn(len(lengths), generator=generator)
        ids = torch.randint(vocabulary, (len(mask),), generator=generator)
        sequences = torch.arange(len(lengths))
        return Batch(
            ids,
            starts,
            mask,
            rewards,
            torch.zeros(len(mask)),
            sequences // 2,
            sequences % 2 == 1,
            1.0,
        )

    return make


@pytest.fixture
def make_whole(make_model):
    """Return a function that makes a learner with a nonzero critic and a different reference."""

    def make(**settings):
        critic = networks.ValueNet(make_model(7))
        with torch.no_grad():
            critic.head.weight.normal_(generator=torch.Generator().manual_seed(1))
        return LocalLearner(
            make_model(0),
            OPTIMIZER,
            total_steps=10,
            critic=critic,
            reference=make_model(3),
            settings=LearnerConfig(**settings),
        )

    return make
