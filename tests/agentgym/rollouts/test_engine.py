"""The canary: weights that arrived, and weights that did not."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from agentgym.config import OptimizerConfig, RunConfig
from agentgym.learner.learner import LocalLearner
from agentgym.models.checkpoint import new_checkpoint
from agentgym.models.fidelity import TORCH
from agentgym.models.model import weights_of
from agentgym.rollouts.engine import Canary, LocalEngine, LoopThread, canary_sequences
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.types import EngineMismatch

LR = 1e-5  # a typical rate for large models: one step changes little


@pytest.fixture
def pair(make_model, tokenizer):
    """(engine without environments, learner) with the same weights."""
    checkpoint = new_checkpoint(make_model(), tokenizer)
    learner = LocalLearner(checkpoint.model, OptimizerConfig(lr=LR, warmup_steps=0), total_steps=10)
    policy = TorchPolicy(
        make_model(), stop_ids=checkpoint.renderer.stop_ids, num_slots=2, context_tokens=64
    )
    loop = LoopThread()
    yield LocalEngine(RunConfig(), checkpoint, policy, None, loop, ""), learner
    loop.close()


def train(learner):
    """Move every weight by the learning rate, as Adam's first step does."""
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(
                LR
                * torch.sign(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
                )
            )


def test_weights_that_arrived_pass_the_canary(pair):
    engine, learner = pair
    train(learner)
    assert engine.publish(learner, 1) < TORCH[torch.float32].canary / 5
    assert engine.policy.version == 1
    assert all(
        torch.equal(tensor, weights_of(learner.model)[name])
        for name, tensor in weights_of(engine.policy._model).items()
    )


def test_a_forgotten_publish_of_one_small_step_is_seen(pair, monkeypatch):
    engine, learner = pair
    train(learner)
    monkeypatch.setattr(
        "agentgym.rollouts.policies.torch.load_weights", lambda model, weights: None
    )
    with pytest.raises(
        EngineMismatch, match="weights version 1 did not reach the engine: canary prompts differ by"
    ):
        engine.publish(learner, 1)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
    ],
)
def test_one_damaged_tensor_is_seen(pair, monkeypatch, name):
    engine, learner = pair
    publish = engine.policy.publish

    async def damaging(delivery):
        await publish(delivery)
        with torch.no_grad():
            dict(engine.policy._model.named_parameters())[name].mul_(1.01)

    monkeypatch.setattr(engine.policy, "publish", damaging)
    with pytest.raises(EngineMismatch, match="did not reach the engine"):
        engine.publish(learner, 1)


@pytest.fixture
def loop():
    loop = LoopThread()
    yield loop
    loop.close()


def test_several_threads_run_coroutines_in_one_other_thread(loop):
    async def where():
        await asyncio.sleep(0)
        return threading.current_thread().name

    found = []
    threads = [threading.Thread(target=lambda: found.append(loop.run(where()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == ["engine"] * 4


def test_an_error_reaches_whoever_waits(loop):
    async def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        loop.run(fail())


def test_what_still_runs_is_ended_and_who_waits_for_it_hears_of_it(loop):
    began, ended = threading.Event(), []

    async def endless():
        began.set()
        await asyncio.sleep(3600)

    def wait():
        try:
            loop.run(endless())
        except BaseException as error:
            ended.append(type(error).__name__)

    thread = threading.Thread(target=wait)
    thread.start()
    assert began.wait(10)
    loop.cancel()
    thread.join(10)
    assert ended == ["CancelledError"]


def test_closing_ends_the_thread():
    before = threading.active_count()
    loop = LoopThread()
    loop.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_canary_sequences_are_fixed_and_inside_the_vocabulary(tokenizer):
    rows = canary_sequences(tokenizer)
    assert rows == canary_sequences(tokenizer)
    assert all(0 <= token < len(tokenizer) for row in rows for token in row)
    assert len({tuple(row) for row in rows}) == 4


def test_every_token_but_the_first_of_each_sequence_is_scored(tokenizer):
    class Learner:
        def score(self, batch):
            self.batch = batch
            return batch.input_ids.float()

    learner = Learner()
    canary = Canary(tokenizer, 0.1)
    expected = [float(token) for row in canary.sequences for token in row[1:]]
    assert canary.score(learner).tolist() == expected
    assert learner.batch.temperature == 1.0


def test_a_difference_up_to_the_limit_passes_and_is_told(tokenizer):
    canary = Canary(tokenizer, 0.1)
    ours, theirs = torch.zeros(4), [torch.tensor([0.0, 0.125]), torch.tensor([-0.125, 0.0])]
    assert canary.compare(ours, theirs, 3).gap == pytest.approx(0.125 / 2**0.5)


@pytest.mark.parametrize("gap", [0.25, float("nan")])
def test_a_larger_one_or_none_at_all_names_version_and_engine(tokenizer, gap):
    with pytest.raises(EngineMismatch, match=r"weights version 3 did not reach engine 7: .*0\.1\)"):
        Canary(tokenizer, 0.1).compare(torch.zeros(1), [torch.tensor([gap])], 3, "engine 7")


NOISE = 0.09  # nats, of SmolLM2 in bfloat16 between two kernels


def scores(change, share, seed=0):
    """Return scores of 512 tokens: ours and theirs before an update, then after it."""
    draw = torch.Generator().manual_seed(seed)
    noise = NOISE * torch.randn(2, 512, generator=draw)
    old, moved = torch.randn(2, 512, generator=draw)
    return old, old + noise[0], old + change * moved, old + share * change * moved + noise[1]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.66])
def test_an_engine_that_took_a_part_of_an_update_is_seen_through_the_noise(tokenizer, share):
    canary = Canary(tokenizer, 0.5)
    old, heard, ours, theirs = scores(0.5, share)
    before = canary.compare(old, [heard], 3)
    with pytest.raises(EngineMismatch, match=r"did not reach the engine as a whole: .* moved by"):
        canary.compare(ours, [theirs], 4, before=before)


@pytest.mark.parametrize("change", [1e-3, 0.05, 0.5, 2.0])
def test_an_update_that_arrived_passes_however_small_it_is(tokenizer, change):
    canary = Canary(tokenizer, 0.5)
    for seed in range(20):
        old, heard, ours, theirs = scores(change, 1.0, seed)
        canary.compare(ours, [theirs], 4, before=canary.compare(old, [heard], 3))


def test_the_runs_own_text_is_scored_from_its_first_rollouts_on(tokenizer):
    played = [SimpleNamespace(input_ids=tuple(range(200))), SimpleNamespace(input_ids=(1,))]
    plain, reading = Canary(tokenizer, 0.1), Canary(tokenizer, 0.1, takes_text=True)
    for canary in (plain, reading):
        canary.take([])
        canary.take(played)
        canary.take(played)
    assert plain.sequences == canary_sequences(tokenizer)
    assert reading.sequences == [*canary_sequences(tokenizer), list(range(128))]
    before = reading.compare(torch.zeros(60), [torch.ones(60) * 0.01], 3)
    more = reading.compare(torch.zeros(187), [torch.ones(187) * 0.01], 4, before=before)
    assert len(more.ours) == 187  # other sequences: not comparable


def test_an_update_that_changes_no_stored_bit_is_named(tokenizer, caplog):
    canary = Canary(tokenizer, 0.1, takes_text=True)
    canary.sent("a", 1)
    canary.sent("b", 2)
    assert not caplog.records
    canary.sent("b", 3)
    assert "weights version 3 changes no stored bit" in caplog.text


def test_an_engine_that_scores_as_before_to_the_bit_has_not_heard_of_an_update(tokenizer):
    canary, noise = Canary(tokenizer, 0.3), torch.tensor([0.01, -0.02])
    before = canary.compare(torch.zeros(2), [noise], 3)
    moved = torch.tensor([0.0, 0.05])  # far below the limit
    with pytest.raises(
        EngineMismatch,
        match=r"weights version 4 did not reach the engine: it scores .* by up to 0\.05 nats",
    ):
        canary.compare(moved, [noise], 4, before=before)
    assert canary.compare(moved, [noise + 0.001], 4, before=before).ours is moved
    # changes smaller than the learner's noise need not be visible until they add up
    seen = canary.compare(torch.tensor([0.0, 0.02]), [noise], 4, before=before)
    with pytest.raises(EngineMismatch, match=r"by up to 0\.04 nats"):
        canary.compare(torch.tensor([0.0, 0.04]), [noise], 5, before=seen)
