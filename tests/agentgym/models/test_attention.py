"""Ragged attention against Hugging Face's own, one sequence at a time."""

import pytest
import torch

from agentgym.models.attention import CachedRows, KeyValueCache, PackedSequences, require_ragged

ROWS = [[5, 9, 33, 12], [7], [4, 8, 15, 16, 23, 42, 4, 8], [11, 12]]


def logits_of(model, layout, ids, **options):
    return model(
        input_ids=torch.tensor(ids)[None],
        position_ids=layout.position[None],
        use_cache=False,
        layout=layout,
        **options,
    ).logits[0]


def cache_of(model, num_slots=8):
    config = model.config
    return KeyValueCache(
        num_layers=config.num_hidden_layers,
        num_slots=num_slots,
        context_tokens=32,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        like=next(model.parameters()),
    )


@pytest.fixture(scope="module")
def model(make_model):
    return make_model().eval()


@pytest.fixture(scope="module")
def expected(model, plain):
    with torch.no_grad():
        twin = plain(model)
        return [twin(torch.tensor([sequence])).logits[0] for sequence in ROWS]


@torch.no_grad()
def test_packed_rows_equal_each_row_alone(model, expected):
    layout = PackedSequences(torch.tensor([0, 4, 5, 13, 15]))
    packed = logits_of(model, layout, [token for sequence in ROWS for token in sequence])
    for part, alone in zip(packed.split([4, 1, 8, 2]), expected, strict=True):
        torch.testing.assert_close(part, alone, atol=1e-4, rtol=1e-4)
    # negative control: the sequences as one sequence are something else
    joined = logits_of(
        model,
        PackedSequences(torch.tensor([0, 15])),
        [token for sequence in ROWS for token in sequence],
    )
    assert (joined[5:] - packed[5:]).abs().max() > 0.1


@torch.no_grad()
def test_rows_grown_piece_by_piece_in_scattered_slots_equal_each_row_alone(model, expected):
    cache = cache_of(model)
    slots, held, got = [6, 1, 3, 0], [0, 0, 0, 0], [[], [], [], []]
    # (sequence, number of new tokens) of three forwards: mixed lengths, sequences in changing
    # order, some left out
    for wave in ([(2, 3), (0, 4)], [(1, 1), (2, 4), (3, 1)], [(3, 1), (2, 1)]):
        layout = CachedRows(
            cache,
            [slots[sequence] for sequence, _ in wave],
            [held[sequence] for sequence, _ in wave],
            [new for _, new in wave],
        )
        ids = [
            token
            for sequence, new in wave
            for token in ROWS[sequence][held[sequence] : held[sequence] + new]
        ]
        for (sequence, new), part in zip(
            wave, logits_of(model, layout, ids).split([new for _, new in wave]), strict=True
        ):
            got[sequence].append(part)
            held[sequence] += new
    assert held == [len(sequence) for sequence in ROWS]
    for parts, alone in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), alone, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_what_an_earlier_owner_left_in_a_slot_is_never_seen(model, expected):
    cache = cache_of(model)
    cache.keys.fill_(100.0)
    cache.values.fill_(100.0)
    fresh = logits_of(model, CachedRows(cache, [2], [0], [4]), ROWS[0])
    torch.testing.assert_close(fresh, expected[0], atol=1e-4, rtol=1e-4)


def test_a_model_that_would_ignore_the_layout_is_refused(model, plain):
    require_ragged(model)
    with pytest.raises(ValueError, match="the model attends by 'sdpa', expected 'agentgym_ragged'"):
        require_ragged(plain(model))


def test_the_last_token_of_each_row_is_pointed_at():
    cache = KeyValueCache(
        num_layers=1, num_slots=3, context_tokens=8, num_kv_heads=1, head_dim=2, like=torch.zeros(1)
    )
    layout = CachedRows(cache, [2, 0], [3, 0], [1, 4])
    assert layout.last.tolist() == [0, 4]
    assert layout.position.tolist() == [3, 0, 1, 2, 3]
