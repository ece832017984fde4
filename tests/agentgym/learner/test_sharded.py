"""Two processes that hold the weights together learn what one learns alone, and read what it
wrote.
"""

import json
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load as load_safetensors

from agentgym.algorithms.batch import Batch
from agentgym.config import AlgorithmConfig, OptimizerConfig
from agentgym.learner.plan import LearnerPlan
from agentgym.models.checkpoint import CRITIC, CRITIC_OPTIMIZER, OPTIMIZER, WEIGHTS
from agentgym.models.model import weights_blob

LR = 1e-3
CONFIG = AlgorithmConfig(
    recipe="ppo",
    kl_coef=0.1,
    kl_place="loss",
    kl_estimator="k2",
    entropy_coef=0.01,
    minibatches=2,
    max_mismatch_kl=1.0,
    critic_warmup_steps=0,
)
RANK = """
import datetime, pickle, sys
import torch, torch.distributed as dist
from agentgym.models.model import set_threads
from agentgym.learner.sharded import Sharded

folder, rank = sys.argv[1], int(sys.argv[2])
set_threads()
wait = datetime.timedelta(seconds=120)
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, \
timeout=wait)
plans, batches, config = pickle.load(open(folder + "/asked", "rb"))
learn = pickle.load(open(folder + "/learn", "rb"))
exec(learn)
told = all_of(plans, batches, config, lambda plan: plan.build(Sharded(torch.device("cpu"))))
if rank == 0:
    pickle.dump(told, open(folder + "/told", "wb"))
dist.destroy_process_group()
"""
LEARN = """
from dataclasses import replace

def plan_from(plan, blobs):
    states = {name: blob for name, blob in blobs.items() if "optimizer" in name}
    return replace(plan, weights=blobs["model.safetensors"], critic=blobs["critic.safetensors"], \
optimizer_states=states)

def all_of(plans, batches, config, build):
    told = {}
    learner = build(plans["new"])
    told["score"] = learner.score(batches["whole"])
    told["first"] = learner.update(batches["whole"], config, step=1, seed=0)
    learner.score(batches["whole"])  # as the canary does before each commit
    told["blobs"] = learner.blobs()
    told["second"] = learner.update(batches["whole"], config, step=2, seed=0)
    told["resumed"] = build(plans["resumed"]).update(batches["whole"], config, step=2, seed=0)
    lonely = build(plans["new"])
    told["one sequence"] = lonely.sft_step(batches["one sequence"], step=1)
    told["pairs"] = lonely.dpo_step(batches["pairs"], told["score"][: \
len(batches["pairs"].input_ids)], beta=0.1, label_smoothing=0.0, step=2)
    told["after"] = lonely.weights_blob()
    narrow = build(plans["narrow"])
    told["narrow first"] = narrow.update(batches["whole"], config, step=1, seed=0)
    blobs = narrow.blobs()
    told["narrow second"] = narrow.update(batches["whole"], config, step=2, seed=0)
    told["narrow"] = narrow.blobs()
    again = build(plan_from(plans["narrow"], blobs))
    again.update(batches["whole"], config, step=2, seed=0)
    told["narrow again"] = again.blobs()
    return told
"""


def batch_of(lengths, vocabulary):
    generator = torch.Generator().manual_seed(3)
    starts = torch.cumsum(torch.tensor([0, *lengths]), 0)
    mask = torch.rand(int(starts[-1]), generator=generator) < 0.5
    mask[starts[:-1]], mask[starts[1:] - 1] = False, True
    rewards = torch.zeros(len(mask))
    rewards[starts[1:] - 1] = torch.randn(len(lengths), generator=generator)
    ids = torch.randint(vocabulary, (len(mask),), generator=generator)
    sequences = torch.arange(len(lengths))
    return Batch(
        ids, starts, mask, rewards, torch.zeros(len(mask)), sequences // 2, sequences % 2 == 1, 1.0
    )


@pytest.fixture(scope="module")
def alone_and_together(make_model, tmp_path_factory):
    """What one process and what two say about the same plans and batches."""
    model, folder = make_model(), tmp_path_factory.mktemp("ranks")
    optimizer = OptimizerConfig(lr=LR, warmup_steps=0)
    new = LearnerPlan(
        model.config.to_json_string(),
        weights_blob(model),
        optimizer,
        10,
        critic=b"",
        critic_lr=LR,
        reference=weights_blob(make_model(1)),
    )
    batches = {
        "whole": batch_of([7, 12, 5, 9, 3], 60),
        "one sequence": batch_of([8], 60),
        "pairs": batch_of([7, 12, 5, 9], 60),
    }
    scored = new.build().score(batches["whole"])
    batches["whole"].logprobs.copy_(scored)  # as if an engine with these weights had sampled it
    one = new.build()
    one.update(batches["whole"], CONFIG, step=1, seed=0)
    blobs = one.blobs()
    scope = {}
    exec(LEARN, scope)
    narrow = replace(new, weights=weights_blob(make_model().bfloat16()))
    plans = {"new": new, "resumed": scope["plan_from"](new, blobs), "narrow": narrow}
    alone = scope["all_of"](plans, batches, CONFIG, lambda plan: plan.build())
    (folder / "asked").write_bytes(pickle.dumps((plans, batches, CONFIG)))
    (folder / "learn").write_bytes(pickle.dumps(LEARN))
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(folder), str(rank)]) for rank in range(2)
    ]
    try:
        assert [rank.wait(240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return new, batches, alone, pickle.loads((folder / "told").read_bytes())


@pytest.mark.parametrize("part", ["first", "second", "resumed", "one sequence", "pairs"])
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
    before = load_safetensors(new.weights)
    for ours, theirs in (
        (alone["blobs"][WEIGHTS], together["blobs"][WEIGHTS]),
        (alone["after"], together["after"]),
    ):
        mine, other = load_safetensors(ours), load_safetensors(theirs)
        assert mine.keys() == other.keys() == before.keys()
        moved = torch.cat([(mine[name] - before[name]).flatten() for name in before])
        apart = torch.cat([(mine[name] - other[name]).flatten() for name in before])
        assert float(moved.abs().max()) > 0.5 * LR
        assert float(apart.norm()) < 1e-3 * float(moved.norm())


@pytest.mark.parametrize("name", [OPTIMIZER, CRITIC_OPTIMIZER])
def test_a_checkpoint_of_two_ranks_holds_the_optimizers_state_of_every_weight(
    alone_and_together, name
):
    _, _, alone, together = alone_and_together
    assert (
        load_safetensors(together["blobs"][name]).keys()
        == load_safetensors(alone["blobs"][name]).keys()
    )


def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(alone_and_together):
    new, batches, _, together = alone_and_together
    scope = {}
    exec(LEARN, scope)
    resumed = (
        scope["plan_from"](new, together["blobs"])
        .build()
        .update(batches["whole"], CONFIG, step=2, seed=0)
    )
    assert resumed == pytest.approx(together["second"], rel=2e-4, abs=2e-5)


def test_a_checkpoint_of_one_process_goes_on_at_two_ranks(alone_and_together):
    _, _, alone, together = alone_and_together
    assert together["resumed"] == pytest.approx(alone["second"], rel=2e-4, abs=2e-5)


def test_weights_in_bfloat16_have_masters_on_every_rank_and_go_on_to_the_bit(alone_and_together):
    _, _, alone, together = alone_and_together
    assert together["narrow first"] == pytest.approx(alone["narrow first"], rel=0.05, abs=0.02)
    assert together["narrow again"] == together["narrow"]
    for published, own in ((WEIGHTS, OPTIMIZER), (CRITIC, CRITIC_OPTIMIZER)):
        weights, state = (load_safetensors(together["narrow"][name]) for name in (published, own))
        for name, tensor in weights.items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(state[f"{name}:master"].bfloat16(), tensor), name
    mine, other = (load_safetensors(told["narrow"][OPTIMIZER]) for told in (alone, together))
    apart = torch.cat(
        [(mine[name] - other[name]).flatten() for name in mine if name.endswith(":master")]
    )
    # two steps of Adam; forwards in bfloat16 differ by their shapes
    assert 0 < float(apart.norm()) / apart.numel() ** 0.5 < 2 * LR
