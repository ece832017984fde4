"""What is known of a batch before an update: which sequence and turn each action token is of."""

import torch

from agentgym.algorithms.batch import Batch
from agentgym.algorithms.experience import Experience


def batch():
    """Two sequences: o a a o a and o a."""
    mask = torch.tensor([False, True, True, False, True, False, True])
    zeros = torch.zeros(7)
    return Batch(
        torch.arange(7),
        torch.tensor([0, 5, 7]),
        mask,
        zeros,
        zeros,
        torch.tensor([0, 0]),
        torch.tensor([False, False]),
        1.0,
    )


def experience(**changes):
    nothing = torch.zeros(4)
    given = {"logprobs": nothing, "entropies": nothing, "corrections": torch.ones(4)}
    given["rewards"] = torch.tensor([0.5, 0.0, 1.0, 2.0])
    return Experience(batch(), **{**given, **changes})


def test_action_tokens_know_their_sequence_and_their_turn():
    known = experience()
    assert known.sequence.tolist() == [0, 0, 0, 1]
    assert known.turn.tolist() == [0, 0, 1, 2]


def test_a_return_is_the_plain_sum_of_a_sequences_rewards():
    assert experience().returns.tolist() == [1.5, 2.0]


def test_what_moves_moves_whole_and_what_is_not_there_stays_away():
    there = experience(values=torch.ones(4)).to(torch.device("meta"))
    assert {there.logprobs.device.type, there.values.device.type} == {"meta"}
    assert there.batch.input_ids.device.type == "meta"
    assert there.reference is None
    assert there.metrics == {}
