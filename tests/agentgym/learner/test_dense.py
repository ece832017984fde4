"""Gradients of whole updates compared with separately written losses.
These use Hugging Face's dense attention, one sequence at a time.
"""

from dataclasses import replace

import pytest
import torch

from agentgym.algorithms.advantages import with_advantages
from agentgym.algorithms.batch import Batch
from agentgym.config import LearnerConfig, OptimizerConfig, algorithm_config
from agentgym.learner.learner import LocalLearner

# (ids, which of them are actions, reward): two groups of two
SEQUENCES = [
    ([5, 9, 33, 12, 40, 41], [0, 0, 1, 1, 0, 1], 1.0),
    ([5, 9, 12], [0, 0, 1], 0.0),
    ([6, 30, 7, 8, 50], [0, 1, 0, 0, 1], 0.25),
    ([6, 35, 36], [0, 1, 1], 1.0),
]
GROUPS = [0, 0, 1, 1]
NO_CLIPPING = OptimizerConfig(lr=1e-3, warmup_steps=0, grad_clip=1e9)


def batch_of(rewards=True):
    starts = torch.cumsum(torch.tensor([0, *(len(ids) for ids, _, _ in SEQUENCES)]), 0)
    mask = torch.tensor([bool(each) for _, acts, _ in SEQUENCES for each in acts])
    placed = torch.zeros(len(mask))
    for (_, acts, reward), start in zip(SEQUENCES, starts.tolist(), strict=False):
        placed[start + max(place for place, act in enumerate(acts) if act)] = reward
    ids = torch.tensor([token for ids, _, _ in SEQUENCES for token in ids])
    none = torch.zeros(len(SEQUENCES), dtype=torch.bool)
    return Batch(ids, starts, mask, placed, torch.zeros(len(mask)), torch.tensor(GROUPS), none, 1.0)


def dense_logprobs(model, ids, acts):
    """Return the log-probabilities of the actions, [A], from a forward of one sequence."""
    logp = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    return torch.stack([logp[place - 1, ids[place]] for place, act in enumerate(acts) if act])


def standardized(returns):
    mean = sum(returns) / len(returns)
    variance = sum((each - mean) ** 2 for each in returns) / (len(returns) - 1)
    return [(each - mean) / (variance**0.5 + 1e-6) for each in returns]


def dense_loss(recipe, model, olds):
    """Return the published loss of four sequences, written out. olds: log-probabilities before."""
    news = [dense_logprobs(model, ids, acts) for ids, acts, _ in SEQUENCES]
    if recipe == "dpo":  # beta 0.3; sequence 2i is preferred to 2i + 1, reference: the old policy
        gains = [(new - old).sum() for new, old in zip(news, olds, strict=True)]
        margins = [0.3 * (gains[0] - gains[1]), 0.3 * (gains[2] - gains[3])]
        return sum(-torch.nn.functional.logsigmoid(each) for each in margins) / 2
    rewards = [reward for _, _, reward in SEQUENCES]
    gains = standardized(rewards[:2]) + standardized(rewards[2:])
    ratios = [(new - old).exp() for new, old in zip(news, olds, strict=True)]
    if recipe == "gspo":
        whole = [each.log().mean().exp() for each in ratios]
        terms = [
            torch.minimum(s * gain, s.clamp(1 - 0.1, 1 + 0.2) * gain)
            for s, gain in zip(whole, gains, strict=True)
        ]
        return -sum(terms) / 4
    tokens = [
        torch.minimum(r * gain, r.clamp(1 - 0.1, 1 + 0.2) * gain)
        for ratio, gain in zip(ratios, gains, strict=True)
        for r in ratio
    ]
    return -sum(tokens) / len(tokens)


@pytest.mark.parametrize("recipe", ["grpo", "gspo", "dpo"])
def test_the_gradient_is_that_of_a_dense_forward_of_the_published_loss(make_model, plain, recipe):
    model, before = make_model(0), make_model(1)  # the policy after some updates, and before
    # float64: compares formulas, not kernels
    twin, former = plain(model).double(), plain(before).double()
    with torch.no_grad():
        olds = [dense_logprobs(former, ids, acts) for ids, acts, _ in SEQUENCES]
    # close to the new policy, so that only some tokens are clipped
    with torch.no_grad():
        now = [dense_logprobs(twin, ids, acts) for ids, acts, _ in SEQUENCES]
    olds = [new + 0.1 * (old - new) for old, new in zip(olds, now, strict=True)]
    dense_loss(recipe, twin, olds).backward()

    learner = LocalLearner(
        model.double(), NO_CLIPPING, total_steps=10, settings=LearnerConfig(share_prefixes=False)
    )
    batch = batch_of()
    placed = torch.zeros(len(batch.input_ids), dtype=torch.float64)
    placed[batch.action_mask] = torch.cat(olds)
    if recipe == "dpo":
        learner.dpo_step(batch, placed, beta=0.3, label_smoothing=0.0, step=1)
    else:
        config = algorithm_config(recipe, clip_low=0.1, clip_high=0.2, minibatches=1)
        experience = learner.prepare(replace(batch, logprobs=learner.score(batch)), config, step=1)
        experience = replace(experience, logprobs=torch.cat(olds))
        learner.update(with_advantages(experience, config), config, step=1, seed=0)
    expected = dict(twin.named_parameters())
    largest = max(float(each.grad.abs().max()) for each in expected.values())
    assert largest > 1e-3
    for name, parameter in learner.model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(), expected[name].grad, atol=1e-6 * largest, rtol=1e-6, msg=name
        )
