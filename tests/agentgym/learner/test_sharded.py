"""Two and four processes with sharded weights learn what one does, and read its files."""

import json
from dataclasses import replace
from typing import get_args

import pytest
import torch

from agentgym.algorithms.recipe import RECIPES, Correction
from agentgym.config import (
    LearnerConfig,
    OptimizerConfig,
    PolicyGradientConfig,
    algorithm_config,
    family_of,
)
from agentgym.learner.start import LearnerPlan
from agentgym.models.architecture import WEIGHTS, files_of
from agentgym.models.checkpoint import CRITIC, CRITIC_OPTIMIZER, OPTIMIZER
from agentgym.models.tensorfiles import StoredTensors
from tests.agentgym.learner.learning import train
from tests.agentgym.learner.ranks import alone, kept_blobs, together

pytestmark = pytest.mark.integration

LR = 1e-3
CONFIG = algorithm_config(
    recipe="ppo",
    kl_coef=0.1,
    kl_place="loss",
    kl_estimator="k2",
    entropy_coef=0.01,
    minibatches=2,
    max_mismatch_kl=1.0,
    critic_warmup_steps=0,
)


def plan_from(plan, kept):
    """Return the plan that resumes from stored tensors."""
    states = {name: each for name, each in kept.items() if "optimizer" in name}
    return replace(plan, weights=kept[WEIGHTS], critic=kept[CRITIC], optimizer_states=states)


def keep(learner, like):
    """Store what a commit of the learner would hold in the store of `like`. Return the tensors."""
    manifest = like.manifest.model_copy(update={"blobs": kept_blobs(learner, like)})
    return {
        name: StoredTensors.of(like.place.open(), manifest, name)
        for name in (WEIGHTS, OPTIMIZER, CRITIC, CRITIC_OPTIMIZER)
        if files_of(manifest, name)
    }


def five_steps(learner, batch, config):
    """Return the metrics and clipped gradients of each step, and rank 0's final weights."""
    told, whole = [], learner.ranks.whole
    for step in range(1, 6):
        if config is None:
            reference = learner.score_reference(batch)
            metrics = learner.dpo_step(batch, reference, beta=0.1, label_smoothing=0.0, step=step)
        else:
            batch = replace(batch, logprobs=learner.score(batch))
            metrics = train(learner, batch, config, step=step, seed=0)
        networks = {"actor": learner._policy, "critic": learner._values}
        gradients = {
            f"{kind} {name}": whole(master.grad).clone()
            for kind, network in networks.items()
            for name, master in network._masters.items()
            if master.grad is not None
        }
        told.append((metrics, gradients))
    held = learner.weights_on_host()
    assert learner.ranks.rank == 0 or not held
    assert all(held[name].equal(each) for name, each in learner.weights().items() if held)
    return told, held


def all_of(plans, batches, config, others, five, build):
    """Return metrics and stored tensors of learners of all plans."""

    told, like, whole = {}, plans["new"].weights, batches["whole"]

    def two_steps(name, learner):
        told[f"{name} first"] = train(learner, whole, config, step=1, seed=0)
        learner.score(whole)  # the canary scores before each commit
        kept = keep(learner, like)
        told[f"{name} second"] = train(learner, whole, config, step=2, seed=0)
        return kept

    for name, recipe in [*(("plain", each) for each in five), ("small", "ppo"), ("small", "dpo")]:
        batch = batches["long pairs" if recipe == "dpo" else "long"]
        told[name, recipe] = five_steps(build(plans[name]), batch, five[recipe])
    learner = build(plans["new"])
    told["score"] = learner.score(whole)
    told["blobs"] = two_steps("new", learner)
    told["resumed"] = train(build(plans["resumed"]), whole, config, step=2, seed=0)
    lonely, pairs = build(plans["new"]), batches["pairs"]
    told["one sequence"] = lonely.sft_step(batches["one sequence"], step=1)
    reference = told["score"][: len(pairs.input_ids)]
    told["pairs"] = lonely.dpo_step(pairs, reference, beta=0.1, label_smoothing=0.0, step=2)
    told["after"] = keep(lonely, like)[WEIGHTS]
    for name in ("narrow", "narrow small"):
        narrow = build(plans[name])
        kept = two_steps(name, narrow)
        told[name] = keep(narrow, like)
        again = build(plan_from(plans[name], kept))
        train(again, whole, config, step=2, seed=0)
        told[f"{name} again"] = keep(again, like)
    for name, other in others.items():
        fresh = build(plans["new"])
        off = replace(whole, logprobs=batches["off"])
        told[name] = train(fresh, off, other, step=1, seed=0)
        told[f"{name} weights"] = keep(fresh, like)[WEIGHTS]
    return told


CORRECTIONS = get_args(Correction)
# every RL recipe and every correction, with log-probabilities that are slightly off
OTHERS = {
    **{
        name: algorithm_config(name, constant_length=9)
        for name in RECIPES
        if issubclass(family_of(name), PolicyGradientConfig)
    },
    **{
        each: algorithm_config("gspo", correction=each, importance_cap=1.02, aggregation="token")
        for each in CORRECTIONS
    },
}


# five optimizer steps each, covering all networks; dpo has no settings here
FIVE = {
    "grpo": algorithm_config("grpo", kl_coef=0.1, entropy_coef=0.01, max_mismatch_kl=1.0),
    "ppo": algorithm_config("ppo", max_mismatch_kl=1.0, critic_warmup_steps=0, minibatches=2),
    "gspo": algorithm_config("gspo", max_mismatch_kl=1.0, minibatches=2, epochs=2),
    "dpo": None,
}
# the memory settings of an update: micro-batches of one or two sequences, logits of three tokens
SMALL = LearnerConfig(
    micro_batch_tokens=16,
    head_chunk_tokens=3,
    activation_checkpointing=True,
    offload_optimizer=True,
)


@pytest.fixture(scope="module")
def said_alone(make_model, stored, batch_of):
    """Inputs and results of one process: (inputs, results)."""
    model = make_model()
    optimizer = OptimizerConfig(lr=LR, warmup_steps=0)
    new = LearnerPlan(
        model.config.to_json_string(),
        stored(model),
        optimizer,
        10,
        has_critic=True,
        critic_lr=LR,
        reference=stored(make_model(1)),
    )
    batches = {
        "whole": batch_of([7, 12, 5, 9, 3], 60),
        "one sequence": batch_of([8], 60),
        "pairs": batch_of([7, 12, 5, 9], 60),
        "long": batch_of([31, 4, 9, 18, 3, 12, 7], 60),
        "long pairs": batch_of([31, 4, 9, 18, 3, 12], 60),
    }
    scored = new.build().score(batches["whole"])
    batches["whole"].logprobs.copy_(scored)  # as if an engine with these weights had sampled it
    drift = 0.05 * torch.randn(len(scored), generator=torch.Generator().manual_seed(4))
    batches["off"] = scored + drift * batches["whole"].action_mask
    one = new.build()
    train(one, batches["whole"], CONFIG, step=1, seed=0)
    kept = keep(one, new.weights)
    narrow = replace(new, weights=stored(make_model().bfloat16()))
    plain = replace(new, optimizer=OptimizerConfig(lr=1e-4, warmup_steps=0), critic_lr=1e-4)
    plans = {
        "new": new,
        "resumed": plan_from(new, kept),
        "narrow": narrow,
        "plain": plain,
        "small": replace(plain, settings=SMALL),
        "narrow small": replace(narrow, settings=SMALL),
    }
    asked = (plans, batches, CONFIG, OTHERS, FIVE)
    return asked, alone(all_of, asked)


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids="{} ranks".format
)
def alone_and_together(request, said_alone, tmp_path_factory):
    """Results of one process and of several for the same plans and batches."""
    asked, told = said_alone
    plans, batches, *_ = asked
    said = together(all_of, asked, tmp_path_factory.mktemp("ranks"), request.param)
    return plans["new"], batches, told, said


@pytest.mark.parametrize(
    "part", ["new first", "new second", "resumed", "one sequence", "pairs", *OTHERS]
)
def test_losses_gradients_and_metrics_do_not_depend_on_the_number_of_ranks(
    alone_and_together, part
):
    _, _, alone, together = alone_and_together
    assert alone[part].keys() == together[part].keys()
    assert together[part] == pytest.approx(alone[part], rel=2e-4, abs=2e-5), json.dumps(
        [alone[part], together[part]], indent=1
    )


def test_scores_do_not_depend_on_the_number_of_ranks(alone_and_together):
    _, _, alone, together = alone_and_together
    torch.testing.assert_close(together["score"], alone["score"], rtol=1e-5, atol=1e-5)


def test_weights_after_an_update_are_those_of_one_process(alone_and_together):
    new, _, alone, together = alone_and_together
    before = new.weights.load()
    for ours, theirs in (
        (alone["blobs"][WEIGHTS], together["blobs"][WEIGHTS]),
        (alone["after"], together["after"]),
    ):
        mine, other = ours.load(), theirs.load()
        assert mine.keys() == other.keys() == before.keys()
        moved = torch.cat([(mine[name] - before[name]).flatten() for name in before])
        apart = torch.cat([(mine[name] - other[name]).flatten() for name in before])
        assert float(moved.abs().max()) > 0.5 * LR
        assert float(apart.norm()) < 1e-3 * float(moved.norm())


@pytest.mark.parametrize("name", [OPTIMIZER, CRITIC_OPTIMIZER])
def test_a_checkpoint_of_several_ranks_holds_the_optimizers_state_of_every_weight(
    alone_and_together, name
):
    _, _, alone, together = alone_and_together
    assert together["blobs"][name].load().keys() == alone["blobs"][name].load().keys()


@pytest.mark.parametrize("part", OTHERS)
def test_weights_after_every_recipe_and_correction_are_those_of_one_process(
    alone_and_together, part
):
    _, _, alone, together = alone_and_together
    mine, other = (told[f"{part} weights"].load() for told in (alone, together))
    before = alone_and_together[0].weights.load()
    moved = torch.cat([(mine[name] - before[name]).flatten() for name in before])
    apart = torch.cat([(mine[name] - other[name]).flatten() for name in before])
    assert float(apart.norm()) < 1e-3 * float(moved.norm()) + 1e-9


def test_a_checkpoint_of_several_ranks_goes_on_in_one_process(alone_and_together):
    new, batches, _, together = alone_and_together
    learner = plan_from(new, together["blobs"]).build()
    resumed = train(learner, batches["whole"], CONFIG, step=2, seed=0)
    assert resumed == pytest.approx(together["new second"], rel=2e-4, abs=2e-5)


def test_a_checkpoint_of_one_process_goes_on_at_several_ranks(alone_and_together):
    _, _, alone, together = alone_and_together
    assert together["resumed"] == pytest.approx(alone["new second"], rel=2e-4, abs=2e-5)


@pytest.mark.parametrize(
    ("plan", "recipe"), [*(("plain", each) for each in FIVE), ("small", "ppo"), ("small", "dpo")]
)
def test_five_steps_are_those_of_one_process(alone_and_together, plan, recipe):
    _, _, alone, together = alone_and_together
    expected, ours = alone["plain", recipe][0], together[plan, recipe][0]
    for (before, gradients), (metrics, theirs) in zip(expected, ours, strict=True):
        assert metrics == pytest.approx(before, rel=1e-5, abs=1e-5)
        assert theirs.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(theirs[name], gradient, atol=1e-5, rtol=1e-5, msg=name)
    weights, same = alone["plain", recipe][1], together[plan, recipe][1]
    before, moved = alone_and_together[0].weights.load(), 0.0
    for name, weight in weights.items():
        torch.testing.assert_close(same[name], weight, atol=1e-5, rtol=1e-5, msg=name)
        moved = max(moved, float((weight - before[name]).abs().max()))
    assert moved > 1e-4


@pytest.mark.parametrize("plan", ["narrow", "narrow small"])
def test_weights_in_bfloat16_have_masters_on_every_rank_and_go_on_to_the_bit(
    alone_and_together, plan
):
    _, _, alone, together = alone_and_together
    assert together[f"{plan} first"] == pytest.approx(alone[f"{plan} first"], rel=0.05, abs=0.02)
    assert together[f"{plan} again"] == together[plan]
    for published, own in ((WEIGHTS, OPTIMIZER), (CRITIC, CRITIC_OPTIMIZER)):
        weights, state = (together[plan][name].load() for name in (published, own))
        for name, tensor in weights.items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(state[f"{name}:master"].bfloat16(), tensor), name
    mine, other = (told[plan][OPTIMIZER].load() for told in (alone, together))
    apart = torch.cat(
        [(mine[name] - other[name]).flatten() for name in mine if name.endswith(":master")]
    )
    # two Adam steps; bfloat16 forwards differ with their shapes
    assert 0 < float(apart.norm()) / apart.numel() ** 0.5 < 2 * LR
