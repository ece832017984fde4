"""Sequences are dealt by their tokens, and go through the network as a budget has room."""

import pytest

from agentgym.learner.micro_batches import deal, micro_batches

LENGTHS = [6, 3, 8, 3, 5, 2]


def parts(sequences, tokens=12, unit=1, padded=False):
    return list(micro_batches(LENGTHS, sequences, tokens=tokens, unit=unit, padded=padded))


def test_micro_batches_hold_every_sequence_once_within_the_budget():
    # 6 + 3 fits, 8 more do not; 8 + 3 fits, 5 more do not; 5 + 2 fits
    assert parts(range(6)) == [[0, 1], [2, 3], [4, 5]]
    assert parts(range(6), tokens=27) == [[0, 1, 2, 3, 4, 5]]
    assert parts([2, 4]) == [[2], [4]]
    assert parts([]) == []


def test_where_attention_pads_each_counts_as_the_longest_beside_it():
    # 2 * 6 fits, 3 * 8 does not, 2 * 8 does not, 2 * 5 fits, 3 * 5 does not
    assert parts(range(6), padded=True) == [[0, 1], [2], [3, 4], [5]]


@pytest.mark.parametrize("padded", [False, True])
def test_tokens_that_the_one_before_has_too_count_once(padded):
    def shared(before, sequence):
        return 2 if sequence in (1, 3, 5) else 0

    def of(tokens):
        return list(
            micro_batches(LENGTHS, range(6), tokens=tokens, unit=1, padded=padded, shared=shared)
        )

    # 6 + 1 fits in 14, 8 more do not (nor 2 * 8 + 1); 8 + 1 + 5 fits, padded 2 * 8 + 1 does not
    assert of(14) == ([[0, 1], [2, 3], [4, 5]] if padded else [[0, 1], [2, 3, 4, 5]])
    # the first of a micro-batch shares nothing: 3 and not 1
    assert of(3) == [[0], [1], [2], [3], [4], [5]]


@pytest.mark.parametrize("padded", [False, True])
def test_one_that_is_longer_than_the_budget_is_alone_and_pairs_stay_together(padded):
    assert parts(range(6), tokens=1, padded=padded) == [[0], [1], [2], [3], [4], [5]]
    assert parts(range(6), tokens=1, unit=2, padded=padded) == [[0, 1], [2, 3], [4, 5]]
    # 9 + 11 fit in 20, 7 more do not; padded 2 * 6, 4 * 8, 4 * 8
    expected = [[0, 1], [2, 3], [4, 5]] if padded else [[0, 1, 2, 3], [4, 5]]
    assert parts(range(6), tokens=20, unit=2, padded=padded) == expected


def test_the_longest_are_dealt_first_each_to_the_rank_with_the_fewest_tokens():
    # 8 | 6 | 5: 3 to the third (8), 3 to the second (9), 2 to the first (10); in their order
    assert deal(LENGTHS, range(6), num_ranks=3, unit=1) == [[2, 5], [0, 3], [1, 4]]
    # pairs of 9, 11 and 7 tokens
    assert deal(LENGTHS, range(6), num_ranks=2, unit=2) == [[2, 3], [0, 1, 4, 5]]


def test_one_rank_takes_all_in_their_order_and_more_ranks_than_sequences_leave_some_empty():
    assert deal(LENGTHS, [4, 1, 3], num_ranks=1, unit=1) == [[4, 1, 3]]
    assert deal(LENGTHS, [4, 1], num_ranks=3, unit=1) == [[4], [1], []]


def test_ranks_have_about_as_many_tokens_where_one_after_the_other_gives_one_nearly_all():
    lengths = [100, 1] * 8
    tokens = [
        sum(lengths[each] for each in own) for own in deal(lengths, range(16), num_ranks=2, unit=1)
    ]
    assert tokens == [404, 404]
    # negative control
    assert [sum(lengths[rank::2]) for rank in range(2)] == [800, 8]
