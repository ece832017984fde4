"""What learner and engine are compared on, and from which difference on a run stops."""

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
    ours, theirs = torch.zeros(4), [torch.tensor([0.0, 0.05]), torch.tensor([-0.0625, 0.0])]
    assert canary.compare(ours, theirs, 3).gap == 0.0625


@pytest.mark.parametrize("gap", [0.25, float("nan")])
def test_a_larger_one_or_none_at_all_names_version_and_engine(tokenizer, gap):
    with pytest.raises(EngineMismatch, match=r"weights version 3 did not reach engine 7: .*0\.1\)"):
        Canary(tokenizer, 0.1).compare(torch.zeros(1), [torch.tensor([gap])], 3, "engine 7")


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
