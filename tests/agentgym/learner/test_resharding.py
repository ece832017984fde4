"""Tensors stored by two processes resume in one, three and four with the same results."""

import pytest
import torch

from agentgym.algorithms.advantages import with_advantages
from agentgym.config import OptimizerConfig, algorithm_config
from agentgym.learner.start import LearnerPlan
from agentgym.models.architecture import WEIGHTS
from agentgym.models.checkpoint import CRITIC, CRITIC_OPTIMIZER, OPTIMIZER
from agentgym.models.tensorfiles import StoredTensors
from tests.agentgym.learner.ranks import kept_blobs, together

pytestmark = pytest.mark.integration

KINDS = (WEIGHTS, OPTIMIZER, CRITIC, CRITIC_OPTIMIZER)
# 10 times the published learning rate. The gradient of a key's bias is rounding only, since the
# softmax ignores it; Adam turns it into steps of up to a hundredth of this.
LR = 1e-5
CONFIG = algorithm_config(
    recipe="ppo", minibatches=2, max_mismatch_kl=1.0, critic_warmup_steps=0, epochs=1
)


def learn(plan, batch, config, steps, build):
    """Return the metrics of these steps, and the stored tensors: before, after step 2, after."""
    learner, like, told = build(plan), plan.weights, {"metrics": []}
    told["begun"] = kept_blobs(learner, like)
    for step in steps:
        batch.logprobs.copy_(learner.score(batch))
        experience = with_advantages(learner.prepare(batch, config, step=step), config)
        told["metrics"].append(learner.update(experience, config, step=step, seed=0)[1])
        if step == 2:
            told["kept"] = kept_blobs(learner, like)
    return {**told, "ended": kept_blobs(learner, like)}


def tensors(plan, blobs):
    """Return {kind: {name: whole tensor}}."""
    weights = plan.weights
    manifest = weights.manifest.model_copy(update={"blobs": blobs})
    return {kind: StoredTensors.of(weights.store, manifest, kind).load() for kind in KINDS}


@pytest.fixture(scope="module")
def two(make_model, stored, batch_of, tmp_path_factory):
    """Five steps on two processes: (plan, batch, results)."""
    batch = batch_of([7, 12, 5, 9, 3, 8], 60)
    model = make_model()
    optimizer = OptimizerConfig(lr=LR, warmup_steps=0)
    plan = LearnerPlan(
        model.config.to_json_string(), stored(model), optimizer, 10, has_critic=True, critic_lr=LR
    )
    asked = (plan, batch, CONFIG, [1, 2, 3, 4, 5])
    return plan, batch, together(learn, asked, tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize(
    "size", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))]
)
def test_a_commit_of_two_ranks_goes_on_at_another_number_of_them(two, tmp_path, size):
    plan, batch, before = two
    manifest = plan.weights.manifest.model_copy(update={"blobs": before["kept"]})
    assert len(before["kept"]) == 2 * len(KINDS)
    held = {kind: StoredTensors.of(plan.weights.store, manifest, kind) for kind in KINDS}
    resumed = LearnerPlan(
        plan.architecture,
        held[WEIGHTS],
        plan.optimizer,
        10,
        has_critic=True,
        critic=held[CRITIC],
        critic_lr=LR,
        optimizer_states={kind: held[kind] for kind in (OPTIMIZER, CRITIC_OPTIMIZER)},
    )
    again = together(learn, (resumed, batch, CONFIG, [3, 4, 5]), tmp_path, size)
    # equal to the bit before training; one file of each kind per process
    assert len(again["begun"]) == size * len(KINDS)
    kept, begun = tensors(plan, before["kept"]), tensors(plan, again["begun"])
    for kind in KINDS:
        assert kept[kind].keys() == begun[kind].keys()
        for name, tensor in kept[kind].items():
            assert torch.equal(tensor, begun[kind][name]), name
    ours, theirs = tensors(plan, again["ended"]), tensors(plan, before["ended"])
    moved = 0.0
    for kind in KINDS:
        for name, tensor in theirs[kind].items():
            assert torch.allclose(ours[kind][name], tensor, atol=1e-6, rtol=1e-6), name
            moved = max(moved, float((tensor - kept[kind][name]).abs().max()))
    assert moved > LR
    for ours, theirs in zip(again["metrics"], before["metrics"][2:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
