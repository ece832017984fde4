"""What learner and engine are compared on, and from which difference on a run stops."""

from types import SimpleNamespace

import pytest
import torch

from agentgym.rollouts.canary import Canary, canary_sequences
from agentgym.types import EngineMismatch


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
    """Scores of 512 tokens, before and after an update: ours, theirs, ours, theirs."""
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
    assert len(more.ours) == 187  # other sequences: nothing to compare with


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
    # what the learner changed by less than its own noise need not show, until it adds up
    seen = canary.compare(torch.tensor([0.0, 0.02]), [noise], 4, before=before)
    with pytest.raises(EngineMismatch, match=r"by up to 0\.04 nats"):
        canary.compare(torch.tensor([0.0, 0.04]), [noise], 5, before=seen)
