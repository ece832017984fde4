"""A batch of two groups, and helpers to train a learner on it."""

from dataclasses import replace

import torch

from agentgym.algorithms.advantages import with_advantages
from agentgym.algorithms.batch import Batch
from agentgym.config import ActorCriticConfig, OptimizerConfig, algorithm_config
from agentgym.models.model import weights_of

OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=0)
# two groups of three; actions at scattered positions, with observations between and after them
ROWS = [
    ([5, 9, 33, 12, 40, 41], [0, 0, 1, 1, 0, 1]),
    ([5, 9, 12], [0, 0, 1]),
    ([5, 9, 18, 19, 20, 21, 22, 23], [0, 0, 1, 0, 0, 1, 1, 0]),
    ([6, 30, 31], [0, 1, 1]),
    ([6, 30, 7, 8, 50], [0, 1, 0, 0, 1]),
    ([6, 35], [0, 1]),
]
REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def batch_of(rows=ROWS, rewards=REWARDS, groups=(0, 0, 0, 1, 1, 1), temperature=1.0):
    starts = torch.cumsum(torch.tensor([0, *(len(ids) for ids, _ in rows)]), 0)
    mask = torch.tensor([bool(m) for _, masks in rows for m in masks])
    placed = torch.zeros(len(mask))
    for row, (_, masks) in enumerate(rows):
        placed[int(starts[row]) + max(index for index, m in enumerate(masks) if m)] = rewards[row]
    ids = torch.tensor([token for ids, _ in rows for token in ids])
    return Batch(
        ids,
        starts,
        mask,
        placed,
        torch.zeros(len(mask)),
        torch.tensor(groups),
        torch.zeros(len(rows), dtype=torch.bool),
        temperature,
    )


def train(learner, batch, config, *, step, seed):
    """Run prepare, advantages and update. Return all metrics."""
    experience = with_advantages(learner.prepare(batch, config, step=step), config)
    experience, metrics = learner.update(experience, config, step=step, seed=seed)
    return experience.metrics | metrics


def on_policy(learner, batch):
    return replace(batch, logprobs=learner.score(batch))


def gradients(learner):
    return {name: parameter.grad.clone() for name, parameter in learner.model.named_parameters()}


def weights(learner):
    return {name: tensor.clone() for name, tensor in weights_of(learner.model).items()}


def assert_same(first, second, **tolerance):
    for name, tensor in first.items():
        torch.testing.assert_close(
            tensor, second[name], **(tolerance or {"atol": 0, "rtol": 0}), msg=name
        )


EVERYTHING = {"kl_coef": 0.1, "entropy_coef": 0.05, "minibatches": 1, "constant_length": 6}


def everything(recipe, **more):
    """Return the recipe's settings with every term of the loss, and without critic warm-up."""
    config = algorithm_config(recipe, **EVERYTHING | more)
    has_critic = isinstance(config, ActorCriticConfig)
    return config.model_copy(update={"critic_warmup_steps": 0}) if has_critic else config
