"""Tests for the critic: learning, rows it evaluates, and resuming."""

from dataclasses import replace

import pytest
import torch

from agentgym.algorithms import advantages as advantages_module
from agentgym.config import algorithm_config
from agentgym.learner.learner import LocalLearner
from agentgym.models import checkpoint, networks
from agentgym.models.architecture import WEIGHTS
from agentgym.models.model import load_weights
from tests.agentgym.learner.learning import (
    OPTIMIZER,
    assert_same,
    batch_of,
    everything,
    on_policy,
    train,
    weights,
)


def test_a_row_cut_before_its_observation_is_bootstrapped_from_a_state_the_critic_knows(
    make_model, monkeypatch
):
    """Cut row 4, which always won, after its next action and before any reward.

    With gamma 1, lambda 1 and no reward, the target of each of its tokens is V(s_end), which should
    be 1.
    """
    critic = networks.ValueNet(make_model(0))
    learner = LocalLearner(make_model(0), OPTIMIZER, total_steps=99, critic=critic, critic_lr=3e-3)
    config = algorithm_config(
        recipe="ppo", minibatches=1, critic_warmup_steps=99, truncated="bootstrap"
    )
    outcomes = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    ended = on_policy(learner, batch_of(rewards=outcomes))
    for step in range(1, 61):
        train(learner, ended, config, step=step, seed=0)
    rewards = batch_of(rewards=[*outcomes[:4], 0.0, 0.0]).rewards
    cut = replace(ended, rewards=rewards, truncated=torch.arange(6) == 4)
    with torch.no_grad():
        everywhere = critic.head(networks._states(critic.body, cut, share=False)[0])[:, 0]
    given = []
    gae = advantages_module.ADVANTAGES["gae"]
    monkeypatch.setitem(
        advantages_module.ADVANTAGES, "gae", lambda *of: given.append(gae(*of)) or given[0]
    )
    train(learner, cut, config, step=61, seed=0)
    targets = given[0][1][cut.sequence[cut.action_mask] == 4]
    assert targets.tolist() == pytest.approx([1.0, 1.0], abs=0.05)
    # negative control: the critic gives 0.18 at the last token, a position never trained
    assert float(everywhere[cut.starts[5] - 1]) < 0.5


def test_only_cut_rows_are_bootstrapped_and_only_where_asked(make_whole):
    cut = torch.tensor([False, True, False, False, False, True])
    values = {}
    for truncated in ("zero", "bootstrap"):
        learner = make_whole()
        batch = replace(on_policy(learner, batch_of()), truncated=cut)
        values[truncated] = train(
            learner, batch, everything("ppo", kl_coef=0.0, truncated=truncated), step=1, seed=0
        )["critic/loss"]
    learner = make_whole()
    batch = on_policy(learner, batch_of())  # no row is cut
    uncut = train(
        learner, batch, everything("ppo", kl_coef=0.0, truncated="bootstrap"), step=1, seed=0
    )["critic/loss"]
    assert values["zero"] == pytest.approx(uncut, rel=1e-5)
    assert values["bootstrap"] != pytest.approx(uncut, rel=1e-3)


@pytest.mark.integration
def test_the_critic_learns_the_outcome(make_model):
    learner = LocalLearner(
        make_model(0),
        OPTIMIZER,
        total_steps=99,
        critic=networks.ValueNet(make_model(0)),
        critic_lr=3e-3,
    )
    config = algorithm_config(recipe="ppo", minibatches=1, critic_warmup_steps=99)
    before = weights(learner)
    batch = on_policy(learner, batch_of())
    logs = [train(learner, batch, config, step=step, seed=0) for step in range(1, 81)]
    # half of the outcomes are 1 and the head is zero: 0.5 * mean of r
    assert logs[0]["critic/loss"] == pytest.approx(0.25, abs=0.1)
    # 3 of the 12 states start sequences with outcomes 1, 0, 0, and 3 with 1, 1, 0
    # each of these 6 has variance 2 / 9, which no critic can predict
    # loss 0.5 * 6 * (2 / 9) / 12 = 1 / 18
    assert logs[-1]["critic/loss"] == pytest.approx(1 / 18, abs=1e-3)
    assert_same(before, weights(learner))  # frozen during the critic's warm-up
    assert "actor/loss" not in logs[-1]


def test_a_saved_critic_continues_to_the_bit(make_whole, stored, content):
    config = everything("ppo")
    whole, resumed = make_whole(), make_whole()
    batch = on_policy(whole, batch_of())
    train(whole, batch, config, step=1, seed=0)
    saved = stored(whole.snapshot())
    load_weights(resumed.model, saved[WEIGHTS].load())
    load_weights(resumed._critic, saved[checkpoint.CRITIC].load())
    resumed.load_optimizers(saved)
    assert stored(resumed.snapshot()).keys() == saved.keys()
    assert content(resumed) == content(whole)
    for learner in (whole, resumed):
        train(learner, replace(batch, logprobs=learner.score(batch)), config, step=2, seed=0)
    assert content(resumed) == content(whole)
