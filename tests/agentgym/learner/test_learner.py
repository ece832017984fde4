"""The learner compared with plain Hugging Face, and with itself under other splits and packings."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from agentgym.algorithms import losses as losses_module
from agentgym.algorithms.advantages import with_advantages
from agentgym.algorithms.losses import clipped
from agentgym.algorithms.recipe import RECIPES, Correction
from agentgym.config import OptimizerConfig, PolicyGradientConfig, algorithm_config, family_of
from agentgym.learner.learner import LocalLearner
from agentgym.models import networks
from agentgym.types import EngineMismatch
from tests.agentgym.learner.learning import (
    OPTIMIZER,
    REWARDS,
    ROWS,
    assert_same,
    batch_of,
    everything,
    gradients,
    on_policy,
    train,
    weights,
)

ONE_UPDATE = algorithm_config(minibatches=1)
SPLIT = {"micro_batch_tokens": 7}  # sequences have up to 8 tokens
# recipes that sample at every optimizer step
SAMPLING = sorted(name for name in RECIPES if issubclass(family_of(name), PolicyGradientConfig))


def num_micro_batches(learner, batch):
    return len(learner.passes.deal(batch, torch.arange(batch.num_sequences)).ranks[0])


def all_gradients(learner):
    critic = {
        f"critic {name}": parameter.grad
        for name, parameter in learner._critic.named_parameters()
        if parameter.grad is not None
    }
    return gradients(learner) | {name: gradient.clone() for name, gradient in critic.items()}


@pytest.mark.parametrize("recipe", SAMPLING)
@pytest.mark.parametrize("how", ["micro-batches", "order"])
def test_loss_and_gradient_of_every_recipe_depend_neither_on_micro_batches_nor_on_packing(
    make_whole, recipe, how
):
    whole, other = make_whole(), make_whole(**({} if how == "order" else SPLIT))
    config = everything(recipe)
    batch = on_policy(whole, batch_of())
    metrics = train(whole, batch, config, step=1, seed=0)
    if how == "order":
        batch = batch.select(torch.tensor([4, 0, 5, 2, 3, 1]))
    else:
        assert num_micro_batches(other, batch) > 1
    assert train(other, batch, config, step=1, seed=0) == pytest.approx(metrics, abs=1e-4, rel=1e-5)
    assert_same(all_gradients(whole), all_gradients(other), atol=1e-4, rtol=1e-3)
    assert metrics["actor/grad_norm"] > 1e-2
    assert metrics["actor/reference_kl"] > 1e-2


@pytest.mark.parametrize("correction", get_args(Correction))
@pytest.mark.parametrize("recipe", ["grpo", "gspo", "cispo"])
def test_corrections_depend_neither_on_micro_batches_nor_on_packing(make_whole, recipe, correction):
    config = everything(recipe, correction=correction, importance_cap=1.02)
    off = 0.05 * torch.randn(29, generator=torch.Generator().manual_seed(5))
    whole, packed, split = make_whole(), make_whole(), make_whole(**SPLIT)
    batch = on_policy(whole, batch_of())
    batch = replace(batch, logprobs=batch.logprobs + off[: len(batch.logprobs)] * batch.action_mask)
    metrics = train(whole, batch, config, step=1, seed=0)
    twice = config.model_copy(update={"epochs": 2})  # two epochs need them before the update
    weights = whole.prepare(batch, twice, step=1).corrections
    assert torch.equal(weights, torch.ones_like(weights)) == (correction == "none")
    order = batch.select(torch.tensor([4, 0, 5, 2, 3, 1]))
    others = {"packed": train(packed, order, config, step=1, seed=0)}
    others["split"] = train(split, batch, config, step=1, seed=0)
    for other in others.values():
        assert other == pytest.approx(metrics, abs=1e-4, rel=1e-5)
    for learner in (packed, split):
        assert_same(gradients(whole), gradients(learner), atol=1e-4, rtol=1e-3)


def test_the_entropy_behind_each_action_token_is_known_before_the_update(make_whole):
    whole, split = make_whole(), make_whole(**SPLIT)
    batch = on_policy(whole, batch_of())
    with torch.no_grad():
        expected = networks.PolicyNet(whole.model)(batch)[1]
    assert expected.std() > 1e-2
    for learner in (whole, split):
        for epochs in (2, 1):  # with one epoch the update's own forward computes them
            config = everything("grpo").model_copy(update={"epochs": epochs})
            known = learner.prepare(batch, config, step=1)
            assert (known.entropies is None) == (epochs == 1)
            if epochs == 1:
                known, _ = learner.update(with_advantages(known, config), config, step=1, seed=0)
            torch.testing.assert_close(known.entropies, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("recipe", SAMPLING)
@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask"])
def test_one_forward_for_scores_and_update_changes_neither_metrics_nor_gradients(
    make_whole, monkeypatch, recipe, correction
):
    config = everything(recipe, correction=correction, importance_cap=1.02)
    config = config.model_copy(update={"minibatches": 1, "epochs": 1, "kl_place": "loss"})
    off = 0.05 * torch.randn(29, generator=torch.Generator().manual_seed(5))
    separate, merged = make_whole(share_prefixes=False, **SPLIT), make_whole(**SPLIT)
    assert merged._merges(config, 1)
    batch = on_policy(separate, batch_of(rewards=[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]))
    batch = replace(batch, logprobs=batch.logprobs + off[: len(batch.logprobs)] * batch.action_mask)
    expected = train(separate, batch, config, step=1, seed=0)
    metrics = train(merged, batch, config, step=1, seed=0)
    # shared prefixes are computed once
    assert metrics.pop("perf/update_tflop") < expected.pop("perf/update_tflop")
    assert metrics == pytest.approx(expected, abs=1e-4, rel=1e-5)
    assert_same(all_gradients(separate), all_gradients(merged), atol=1e-4, rtol=1e-3)


def test_an_engine_that_is_too_far_off_is_found_before_the_only_update_changes_a_weight(make_whole):
    learner, config = make_whole(), everything("grpo").model_copy(update={"max_mismatch_kl": 1e-6})
    batch = batch_of()  # its recorded log-probabilities are 0
    before = {name: each.clone() for name, each in learner.weights().items()}
    prepared = learner.prepare(batch, config, step=1)
    with pytest.raises(EngineMismatch, match="step 1: engine and learner differ by KL"):
        learner.update(with_advantages(prepared, config), config, step=1, seed=0)
    assert_same(before, learner.weights())


@pytest.mark.parametrize("recipe", SAMPLING)
def test_minibatches_share_out_the_loss_of_the_whole_batch(make_model, recipe):
    """Compare the mean over minibatches with the whole batch while weights are fixed.
    No token may count twice or be dropped, for any aggregation.
    """
    losses = []
    for minibatches in (1, 2, 3):
        critic = networks.ValueNet(make_model(7))
        with torch.no_grad():
            critic.head.weight.normal_(generator=torch.Generator().manual_seed(1))
        learner = LocalLearner(
            make_model(0),
            OptimizerConfig(lr=1e-20, warmup_steps=0),
            total_steps=10,
            critic=critic,
            reference=make_model(3),
        )
        config = everything(recipe, minibatches=minibatches)
        metrics = train(learner, on_policy(learner, batch_of()), config, step=1, seed=0)
        losses.append([value for name, value in metrics.items() if name.endswith("/loss")])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5, rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], abs=1e-5, rel=1e-5)
    assert any(abs(value) > 1e-3 for value in losses[0])


def test_what_a_recipe_needs_and_was_not_given_is_named(make_learner):
    learner = make_learner()
    batch = on_policy(learner, batch_of())
    with pytest.raises(ValueError, match="recipe ppo needs a critic"):
        train(learner, batch, algorithm_config(recipe="ppo"), step=1, seed=0)
    with pytest.raises(ValueError, match=r"algorithm\.kl_coef 0\.1 needs a reference model"):
        train(learner, batch, algorithm_config(kl_coef=0.1), step=1, seed=0)


def test_a_batch_without_action_tokens_reaches_no_loss(make_whole):
    learner = make_whole()
    before = weights(learner)
    batch = replace(
        batch_of(), action_mask=torch.zeros(len(batch_of().input_ids), dtype=torch.bool)
    )
    for recipe in ("grpo", "ppo"):
        with pytest.raises(ValueError, match="without a single action token"):
            train(learner, batch, algorithm_config(recipe=recipe), step=1, seed=0)
    assert_same(before, weights(learner))


def test_a_reference_is_scored_as_the_policy_and_dropped(make_whole, make_model):
    learner, batch = make_whole(), batch_of()
    alone = LocalLearner(make_model(3), OPTIMIZER, total_steps=1)
    assert torch.equal(learner.score_reference(batch), alone.score(batch))
    assert not torch.equal(learner.score_reference(batch), learner.score(batch))
    learner.drop_reference()
    with pytest.raises(ValueError, match="a reference model is needed; none was given"):
        learner.score_reference(batch)


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": True},
        {"offload_optimizer": True},
        {"activation_checkpointing": True, "offload_optimizer": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_what_is_in_no_key_changes_no_bit(make_whole, content, recipe, settings):
    plain, other = make_whole(), make_whole(**settings)
    batch = on_policy(plain, batch_of())
    for step in (1, 2):
        told = [
            train(each, batch, everything(recipe), step=step, seed=0) for each in (plain, other)
        ]
        assert told[0] == told[1]
    assert content(plain) == content(other)


@pytest.mark.parametrize("tokens", [1, 7, 20])
def test_gradients_and_metrics_do_not_depend_on_the_micro_batches(make_learner, tokens):
    whole, split = make_learner(), make_learner(micro_batch_tokens=tokens)
    batch = on_policy(whole, batch_of())
    metrics = train(whole, batch, ONE_UPDATE, step=1, seed=0)
    assert num_micro_batches(split, batch) > 1
    assert train(split, batch, ONE_UPDATE, step=1, seed=0) == pytest.approx(metrics, abs=1e-5)
    assert_same(gradients(whole), gradients(split), atol=1e-5, rtol=1e-4)
    assert metrics["actor/grad_norm"] > 1e-2


def test_supervised_gradients_do_not_depend_on_the_micro_batches(make_learner):
    whole, split = make_learner(), make_learner(**SPLIT)
    metrics = whole.sft_step(batch_of(), step=1)
    assert split.sft_step(batch_of(), step=1) == pytest.approx(metrics, abs=1e-5)
    assert_same(gradients(whole), gradients(split), atol=1e-5, rtol=1e-4)


def test_gradients_and_metrics_do_not_depend_on_the_order_of_the_rows(make_learner):
    one, other = make_learner(), make_learner()
    batch = on_policy(one, batch_of())
    metrics = train(one, batch, ONE_UPDATE, step=1, seed=0)
    assert train(
        other, batch.select(torch.tensor([4, 0, 5, 2, 3, 1])), ONE_UPDATE, step=1, seed=0
    ) == pytest.approx(metrics, abs=1e-5)
    assert_same(gradients(one), gradients(other), atol=1e-5, rtol=1e-4)


def test_observation_tokens_reach_no_loss(make_learner):
    one, other = make_learner(), make_learner()
    batch = on_policy(one, batch_of())
    noise = (
        torch.randn(len(batch.input_ids), generator=torch.Generator().manual_seed(0))
        * ~batch.action_mask
    )
    metrics = train(one, batch, ONE_UPDATE, step=1, seed=0)
    noisy = replace(batch, logprobs=batch.logprobs + noise, rewards=batch.rewards + noise)
    assert train(other, noisy, ONE_UPDATE, step=1, seed=0) == metrics
    assert_same(gradients(one), gradients(other))


def test_what_follows_the_last_action_changes_nothing(make_learner):
    one, other = make_learner(), make_learner()
    ids, mask = ROWS[2]
    shorter = [*ROWS[:2], (ids[:7], mask[:7]), *ROWS[3:]]
    train(one, on_policy(one, batch_of()), ONE_UPDATE, step=1, seed=0)
    train(other, on_policy(other, batch_of(shorter)), ONE_UPDATE, step=1, seed=0)
    assert_same(gradients(one), gradients(other), atol=1e-5, rtol=1e-4)


def test_the_first_update_follows_the_plain_policy_gradient(make_learner, plain):
    """Compare with the gradient of -mean over tokens of A log p.
    On-policy the ratio is 1 and nothing is clipped.
    """
    learner = make_learner(OptimizerConfig(lr=1e-2, warmup_steps=0, grad_clip=1e9))
    twin = plain(learner.model)
    # groups 1,0,0 and 1,1,0: advantages 1.154701, -0.577350 twice; 0.577350 twice, -1.154701
    advantages = [1.154701, -0.577350, -0.577350, 0.577350, 0.577350, -1.154701]
    total = sum(sum(mask) for _, mask in ROWS)
    for (ids, mask), advantage in zip(ROWS, advantages, strict=True):
        logp = torch.log_softmax(twin(torch.tensor([ids])).logits[0], -1)
        for index, action in enumerate(mask):
            if action:
                (-advantage * logp[index - 1, ids[index]] / total).backward(retain_graph=True)
    train(learner, on_policy(learner, batch_of()), ONE_UPDATE, step=1, seed=0)
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    assert_same(gradients(learner), expected, atol=1e-4, rtol=1e-3)


def test_a_supervised_batch_without_actions_is_refused(make_learner):
    learner = make_learner()
    before = weights(learner)
    batch = replace(
        batch_of(), action_mask=torch.zeros(len(batch_of().input_ids), dtype=torch.bool)
    )
    with pytest.raises(ValueError, match="without a single action token"):
        learner.sft_step(batch, step=1)
    assert_same(before, weights(learner))


def test_logged_probabilities_of_another_policy_stop_the_run(make_learner):
    learner, limited = make_learner(), ONE_UPDATE.model_copy(update={"max_mismatch_kl": 0.05})
    before = weights(learner)
    batch = on_policy(learner, batch_of())
    shifted = replace(batch, logprobs=batch.logprobs.roll(1) * batch.action_mask)
    with pytest.raises(
        EngineMismatch,
        match=r"step 7: engine and learner differ by KL .* \(limit 0.05, largest single difference",
    ):
        train(learner, shifted, limited, step=7, seed=0)
    with pytest.raises(EngineMismatch, match="KL nan"):
        train(learner, replace(batch, logprobs=batch.logprobs * math.nan), limited, step=7, seed=0)
    with pytest.raises(EngineMismatch):  # the recorded temperature differs
        train(learner, replace(batch, temperature=0.5), limited, step=7, seed=0)
    assert_same(before, weights(learner))


def test_weights_on_the_host_are_a_copy(make_learner):
    learner = make_learner()
    held = learner.weights_on_host()
    assert all(torch.equal(held[name], each) for name, each in learner.weights().items())
    for each in held.values():
        each.fill_(9.0)
    assert not any((each == 9.0).any() for each in learner.weights().values())


def test_an_update_raises_the_probability_of_what_won(make_learner):
    learner = make_learner(OptimizerConfig(lr=1e-3, warmup_steps=0))
    batch = on_policy(learner, batch_of())
    metrics = train(learner, batch, algorithm_config(minibatches=2, epochs=2), step=1, seed=0)
    gain = torch.zeros(6).index_add_(0, batch.sequence, learner.score(batch) - batch.logprobs)
    won = torch.tensor(REWARDS) == 1
    assert gain[won].mean() > 0 > gain[~won].mean()
    assert metrics["mismatch/kl"] == pytest.approx(0, abs=1e-8)
    assert metrics["actor/sequences_with_signal_frac"] == 1


def test_clip_fractions_of_an_update_count_only_where_clipping_binds(make_learner, monkeypatch):
    learner = make_learner(OptimizerConfig(lr=1e-2, warmup_steps=0))
    batch = on_policy(learner, batch_of())
    outside = []

    def count(actions, *, clip_low, clip_high):
        ratio = (actions.logprobs.detach() - actions.old_logprobs).exp()
        outside.append(float(((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).float().mean()))
        return clipped(actions, clip_low=clip_low, clip_high=clip_high)

    monkeypatch.setattr(losses_module, "clipped", count)
    config = algorithm_config(minibatches=1, epochs=4)
    metrics = train(learner, replace(batch, logprobs=batch.logprobs - 1e-3), config, step=1, seed=0)
    assert metrics["actor/clip_frac"] == pytest.approx(
        metrics["actor/clip_frac_low"] + metrics["actor/clip_frac_high"]
    )
    assert metrics["actor/clip_frac_low"] > 0
    assert metrics["actor/clip_frac_high"] > 0
    # negative control: ratios out of bounds, ignoring the sign of the advantage
    assert metrics["actor/clip_frac"] < sum(outside) / len(outside)
    assert metrics["mismatch/capped_frac"] == 0
    capped = train(
        learner,
        on_policy(learner, batch),
        config.model_copy(update={"importance_cap": 0.5}),
        step=2,
        seed=0,
    )
    assert capped["mismatch/capped_frac"] == 1


def test_groups_without_signal_thin_the_gradient_instead_of_vanishing_from_its_mean(make_learner):
    # both groups of ROWS have a signal: 12 action tokens, weight 1/12
    # a third group of equal rewards adds 7 tokens without signal: weight 1/19
    # the gradient shrinks by the same factor
    batch = batch_of()
    wider = batch_of(
        ROWS + ROWS[3:] + ROWS[3:4], [*REWARDS, 1.0, 1.0, 1.0, 1.0], (0, 0, 0, 1, 1, 1, 2, 2, 2, 2)
    )
    config = OptimizerConfig(lr=1e-2, warmup_steps=0, grad_clip=1e9)
    alone, beside = make_learner(config), make_learner(config)
    train(alone, on_policy(alone, batch), ONE_UPDATE, step=1, seed=0)
    train(beside, on_policy(beside, wider), ONE_UPDATE, step=1, seed=0)
    share = 12 / 19
    thinned = {name: gradient * share for name, gradient in gradients(alone).items()}
    assert_same(thinned, gradients(beside), atol=1e-6, rtol=1e-4)


def test_a_batch_of_equal_groups_changes_nothing_and_says_so(make_learner):
    learner = make_learner()
    before = weights(learner)
    metrics = train(
        learner,
        on_policy(learner, batch_of(rewards=[1.0] * 3 + [0.0] * 3)),
        ONE_UPDATE,
        step=1,
        seed=0,
    )
    assert metrics["actor/sequences_with_signal_frac"] == 0
    assert "actor/loss" not in metrics
    assert_same(before, weights(learner))


def test_minibatches_are_drawn_from_seed_and_step_alone(make_learner):
    results = []
    for seed in (3, 3, 4):
        learner = make_learner()
        train(
            learner,
            on_policy(learner, batch_of()),
            algorithm_config(minibatches=3),
            step=1,
            seed=seed,
        )
        results.append(weights(learner))
    assert_same(results[0], results[1])
    assert not torch.equal(results[0]["model.norm.weight"], results[2]["model.norm.weight"])
