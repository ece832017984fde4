"""With LoRA only the adapter is trained, stored and resumed, in one process and in several."""

from dataclasses import replace

import pytest
import torch

from agentgym.config import LearnerConfig, OptimizerConfig, algorithm_config
from agentgym.learner.start import LearnerPlan
from agentgym.models.adapter import DOWN, Adapter, is_matrix
from agentgym.models.architecture import ADAPTER
from agentgym.models.checkpoint import CRITIC, CRITIC_OPTIMIZER, OPTIMIZER
from agentgym.models.model import load_weights
from agentgym.models.networks import PolicyNet
from agentgym.models.tensorfiles import StoredTensors
from tests.agentgym.learner.learning import train
from tests.agentgym.learner.ranks import alone, kept_blobs, together

RANK, MODULES = 4, ("down_proj", "q_proj", "v_proj")
LR = 1e-3
CONFIG = algorithm_config(
    "ppo",
    kl_coef=0.1,
    kl_place="loss",
    kl_estimator="k2",
    minibatches=1,
    max_mismatch_kl=1.0,
    critic_warmup_steps=0,
)
KINDS = (ADAPTER, OPTIMIZER, CRITIC, CRITIC_OPTIMIZER)


def learn(plan, batch, config, steps, build):
    """Return a learner's metrics, stored tensors (before, after step 2, after), and weights."""
    learner, like = build(plan), plan.adapter.base
    told = {"metrics": [], "gradients": [], "begun": kept_blobs(learner, like)}
    for step in steps:
        batch.logprobs.copy_(learner.score(batch))
        told["metrics"].append(train(learner, batch, config, step=step, seed=0))
        told["gradients"].append(
            {
                name: learner.ranks.whole(master.grad).clone()
                for optimized in (learner._policy, learner._values)
                for name, master in optimized._masters.items()
            }
        )
        if step == 2:
            told["kept"] = kept_blobs(learner, like)
    told["reference"] = learner.score_reference(batch)
    told["weights"] = learner.weights_on_host()
    assert learner.ranks.rank == 0 or not told["weights"]
    return {**told, "ended": kept_blobs(learner, like)}


def more(plans, batch, build):
    """Return results of learners with a trained adapter, and with bfloat16 weights."""
    later, narrow = (build(plan) for plan in plans)
    critic = {name: later.ranks.whole(each) for name, each in later._values.weights().items()}
    told = {"reference": later.score_reference(batch), "critic": critic}
    told["narrow"] = [narrow.sft_step(batch, step=step) for step in (1, 2)]
    return told | {"narrow score": narrow.score(batch)}


def learn_and_more(plan, batch, config, steps, plans, build):
    return learn(plan, batch, config, steps, build) | {"more": more(plans, batch, build)}


@pytest.fixture(scope="module")
def plan(make_model, stored):
    """A plan with a new adapter, a critic, and the base as the reference."""
    model = make_model()
    base = stored(model)
    return LearnerPlan(
        model.config.to_json_string(),
        base,
        OptimizerConfig(lr=LR, warmup_steps=0),
        10,
        has_critic=True,
        critic_lr=LR,
        reference=base,
        adapter=Adapter(base, RANK, 8, MODULES, seed=5),
    )


@pytest.fixture
def batch(batch_of):
    return batch_of([7, 12, 5, 9, 3, 8], 60)


@pytest.fixture(scope="module")
def learned(plan, batch_of):
    """Results of five steps in one process."""
    return alone(learn, (plan, batch_of([7, 12, 5, 9, 3, 8], 60), CONFIG, [1, 2, 3, 4, 5]))


def resumed(plan, blobs):
    """Return the plan that resumes from stored tensors."""
    base = plan.adapter.base
    manifest = base.manifest.model_copy(update={"blobs": blobs})
    held = {kind: StoredTensors.of(base.store, manifest, kind) for kind in KINDS}
    adapter = replace(plan.adapter, stored=held[ADAPTER])
    return replace(
        plan,
        weights=adapter.policy,
        adapter=adapter,
        critic=held[CRITIC],
        optimizer_states={kind: held[kind] for kind in (OPTIMIZER, CRITIC_OPTIMIZER)},
    )


@pytest.fixture(scope="module")
def further(plan, learned, batch_of, make_model, stored):
    """Two more plans and their results in one process: (plans, results).
    The first has a trained adapter, whose merged weights are the reference and the body of a new
    critic; the second has frozen bfloat16 weights.
    """
    later = resumed(plan, learned["ended"])
    later = replace(later, critic=None, reference=later.weights, optimizer_states={})
    base = stored(make_model().bfloat16())
    adapter = replace(plan.adapter, base=base)
    narrow = replace(plan, weights=base, reference=None, has_critic=False, adapter=adapter)
    return (later, narrow), alone(more, ((later, narrow), batch_of([7, 12, 5, 9, 3, 8], 60)))


def tensors(plan, blobs, kind):
    manifest = plan.adapter.base.manifest.model_copy(update={"blobs": blobs})
    return StoredTensors.of(plan.adapter.base.store, manifest, kind).load()


def test_a_learner_holds_trains_and_keeps_the_matrices_alone(plan, batch):
    learner = replace(plan, has_critic=False).build()
    before = plan.adapter.base.load()
    for step in (1, 2):
        learner.sft_step(batch, step=step)
    files = learner.snapshot().files
    assert files.keys() == {ADAPTER, OPTIMIZER}
    matrices = set(files[ADAPTER].names)
    assert len(matrices) == 2 * len(MODULES) * 2  # in two layers
    assert all(is_matrix(name) for name in matrices)
    assert {name.rpartition(":")[0] for name in files[OPTIMIZER].names} == matrices
    # two moments of each matrix, and a step count
    trained = sum(each.numel() for each in learner.model.parameters() if each.requires_grad)
    kept = files[OPTIMIZER].size - len(files[OPTIMIZER].header)
    assert kept == 4 * (2 * trained + len(matrices))
    assert trained < 0.15 * sum(each.numel() for each in before.values())
    held = learner.model.state_dict()
    for name, tensor in before.items():
        layer, _, kind = name.rpartition(".")
        frozen = held.get(name, held.get(f"{layer}.base_layer.{kind}"))
        assert torch.equal(frozen, tensor), name


def test_the_weights_that_are_published_compute_what_the_learner_computes(plan, batch, make_model):
    learner = replace(plan, has_critic=False).build()
    begun = learner.weights()
    assert all(torch.equal(begun[name], each) for name, each in plan.weights.load().items())
    for step in range(1, 6):
        learner.sft_step(batch, step=step)
        published = learner.weights()
    model = make_model(1)
    load_weights(model, published)
    theirs = PolicyNet(model)(batch)[0]
    torch.testing.assert_close(learner.score(batch)[batch.action_mask], theirs, rtol=0, atol=1e-5)
    moved = max(float((published[name] - begun[name]).abs().max()) for name in begun)
    assert moved > LR
    # merged from the frozen weights each time: publishing twice adds nothing
    assert all(torch.equal(each, published[name]) for name, each in learner.weights().items())


def test_an_adapter_that_is_published_alone_is_its_matrices(plan, batch):
    adapter = replace(plan.adapter, alone=True)
    learner = replace(plan, has_critic=False, adapter=adapter).build()
    learner.sft_step(batch, step=1)
    published = learner.weights()
    matrices = {name: each for name, each in learner.model.named_parameters() if is_matrix(name)}
    assert published.keys() == matrices.keys() == adapter.shapes(plan.architecture).keys()
    assert all(torch.equal(each, matrices[name]) for name, each in published.items())


def test_the_reference_is_the_frozen_weights_without_a_second_copy(
    plan, learned, make_model, batch
):
    learner = plan.build()
    learner.sft_step(batch, step=1)
    mine = learner.score_reference(batch)
    expected = PolicyNet(make_model())(batch)[0]
    torch.testing.assert_close(mine[batch.action_mask], expected, rtol=0, atol=1e-6)
    assert float((learner.score(batch) - mine).abs().max()) > 1e-3
    assert learner._reference is learner._net
    torch.testing.assert_close(learned["reference"], mine, rtol=0, atol=0)


def test_a_reference_that_was_trained_is_a_copy_of_its_own(plan, learned, batch):
    later = resumed(plan, learned["ended"])
    learner = replace(later, reference=later.weights, has_critic=False, optimizer_states={}).build()
    begun = learner.score_reference(batch)
    torch.testing.assert_close(begun, learner.score(batch), rtol=0, atol=1e-5)
    learner.sft_step(batch, step=1)
    torch.testing.assert_close(begun, learner.score_reference(batch), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_commit_goes_on_to_the_bit(plan, batch, make_model, stored, content, dtype):
    base = stored(make_model().to(dtype))
    begun = replace(
        plan,
        weights=base,
        has_critic=False,
        reference=None,
        adapter=replace(plan.adapter, base=base),
    )
    whole = begun.build()
    whole.sft_step(batch, step=1)
    kept = stored(whole.snapshot())
    assert {each.dtype for each in kept[ADAPTER].tensors.values()} == {torch.float32}
    adapter = replace(begun.adapter, stored=kept[ADAPTER])
    states = {OPTIMIZER: kept[OPTIMIZER]}
    again = replace(begun, weights=adapter.policy, adapter=adapter, optimizer_states=states).build()
    assert content(again) == content(whole)
    for each in (whole, again):
        each.sft_step(batch, step=2)
    assert content(again) == content(whole)
    published = again.weights()
    stored_weights = replace(adapter, stored=stored(again.snapshot())[ADAPTER]).policy.load()
    assert published.keys() == stored_weights.keys()
    for name, each in published.items():
        assert each.dtype == dtype
        assert torch.equal(each, stored_weights[name]), name


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": True},
        pytest.param({"compile": "aot_eager"}, marks=pytest.mark.slow),
        {"offload_optimizer": True},
    ],
    ids=lambda each: next(iter(each)),
)
def test_what_saves_memory_changes_no_adapter(plan, batch, settings):
    plain = replace(plan, has_critic=False)
    saving = replace(plain, settings=LearnerConfig(**settings))
    told = []
    for each in (plain.build(), saving.build()):
        metrics = [each.sft_step(batch, step=step) for step in (1, 2)]
        told.append((metrics, each.score_reference(batch), each.weights()))
    (first, reference, weights), (second, other, theirs) = told
    assert second == [pytest.approx(each, rel=1e-5) for each in first]
    torch.testing.assert_close(other, reference, rtol=0, atol=1e-6)
    for name, each in weights.items():
        torch.testing.assert_close(theirs[name], each, rtol=0, atol=1e-6)


@pytest.mark.integration
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_ranks_learn_what_one_learns(plan, learned, batch, further, tmp_path, size):
    plans, expected = further
    asked = (plan, batch, CONFIG, [1, 2, 3, 4, 5], plans)
    told = together(learn_and_more, asked, tmp_path, size)
    assert len(told["kept"]) == size * len(KINDS)
    for ours, theirs in zip(told["metrics"], learned["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    for ours, theirs in zip(told["gradients"], learned["gradients"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, each in theirs.items():
            torch.testing.assert_close(ours[name], each, rtol=1e-5, atol=1e-5, msg=name)
    torch.testing.assert_close(told["reference"], learned["reference"], rtol=0, atol=1e-5)
    begun = plan.weights.load()
    moved = 0.0
    for name, each in learned["weights"].items():
        torch.testing.assert_close(told["weights"][name], each, rtol=0, atol=1e-5)
        moved = max(moved, float((each - begun[name]).abs().max()))
    assert moved > LR
    # the initial matrices depend on the seed, not on the number of ranks
    first, other = (tensors(plan, each["begun"], ADAPTER) for each in (learned, told))
    assert any(float(each.abs().max()) for name, each in first.items() if name.endswith(DOWN))
    assert all(torch.equal(other[name], each) for name, each in first.items())
    # merging works by rows, and bfloat16 forwards differ with their shapes
    more = told["more"]
    for name, near in (("reference", 1e-5), ("critic", 1e-6), ("narrow score", 0.1)):
        torch.testing.assert_close(more[name], expected[name], rtol=0, atol=near)
    for ours, theirs in zip(more["narrow"], expected["narrow"], strict=True):
        assert ours == pytest.approx(theirs, rel=0.05)
    # one process resumes from tensors that several stored
    again = alone(learn, (resumed(plan, told["kept"]), batch, CONFIG, [3, 4, 5]))
    for ours, theirs in zip(again["metrics"], learned["metrics"][2:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
