"""Ragged attention compared with Hugging Face's, one sequence at a time."""

from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import varlen

from agentgym.models import attention
from agentgym.models.attention import PackedSequences, Variant, has_kernel, require_ragged
from agentgym.models.cache import CachedRows, KeyValueCache
from agentgym.models.networks import Prefixes

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


@pytest.mark.parametrize("mask", [None, torch.ones(3, 3, dtype=torch.bool).tril()])
def test_attention_without_instructions_for_its_dtype_is_rounded_once(monkeypatch, mask):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 3, 8).bfloat16() for heads in (4, 2, 2))
    found = attention.attend_padded(query, key, value, mask, Variant())
    wide = attention.attend_padded(query.float(), key.float(), value.float(), mask, Variant())
    assert torch.equal(found, wide.bfloat16())


@torch.no_grad()
def test_packed_rows_equal_each_row_alone(model, expected):
    layout = PackedSequences(torch.tensor([0, 4, 5, 13, 15]))
    packed = logits_of(model, layout, [token for sequence in ROWS for token in sequence])
    for part, alone in zip(packed.split([4, 1, 8, 2]), expected, strict=True):
        torch.testing.assert_close(part, alone, atol=1e-4, rtol=1e-4)
    # negative control: attention across the joined sequences differs
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
    # (sequence, number of new tokens) of three forwards: mixed lengths, sequences in
    # changing order, some left out
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
    cache.reserve(8, 32)
    for layer in (*cache.keys, *cache.values):
        layer.fill_(100.0)
    fresh = logits_of(model, CachedRows(cache, [2], [0], [4]), ROWS[0])
    torch.testing.assert_close(fresh, expected[0], atol=1e-4, rtol=1e-4)


def test_a_cache_holds_what_was_used_and_keeps_it_as_it_grows():
    cache = KeyValueCache(
        num_layers=2, num_slots=9, context_tokens=40, num_kv_heads=1, head_dim=2, like=torch.ones(1)
    )
    assert (cache.size, cache.num_bytes) == ((0, 0), 0)
    sizes, kept = [], None
    for slots, tokens in ((1, 3), (1, 2), (2, 7), (3, 8), (8, 20), (9, 40)):
        cache.reserve(slots, tokens)
        sizes.append(cache.size)
        if kept is None:
            kept = [layer.fill_(number).clone() for number, layer in enumerate(cache.keys)]
    assert sizes == [(1, 3), (1, 3), (2, 7), (4, 14), (8, 28), (9, 40)]
    assert cache.num_bytes == 2 * 2 * 9 * 40 * 2 * 4
    for layer, before in zip(cache.keys, kept, strict=True):
        assert torch.equal(layer[:1, :3], before)
        assert layer.sum() == before.sum()
    cache.free()
    assert (cache.size, cache.num_bytes) == ((0, 0), 0)


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


STARTS = torch.tensor([0, 4, 5, 13, 15])
VARIANTS = {
    "plain": Variant(),
    "scaled": Variant(scaling=0.3),
    "window": Variant(window=3),
    "window of one": Variant(window=1),
}


def qkv(heads=4, kv_heads=2, dim=8, **kind):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(15, each, dim, generator=generator) for each in (heads, kv_heads)]
    tensors.append(torch.randn(15, kv_heads, dim, generator=generator))
    return [each.to(**kind).requires_grad_() for each in tensors]


def as_documented(
    query, key, value, begins, starts, most, longest, *, scale, window_size, enable_gqa
):
    """Compute torch.nn.attention.varlen.varlen_attn from its documentation, by sequence.
    The last query is aligned with the last key.
    """
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert begins.dtype == starts.dtype == torch.int32
    assert longest == int((starts[1:] - starts[:-1]).max())
    assert most == int((begins[1:] - begins[:-1]).max())
    times = query.shape[1] // key.shape[1]
    before, after = window_size
    assert after == 0
    parts = []
    for (begin, stop), (first, end) in zip(
        pairwise(begins.tolist()), pairwise(starts.tolist()), strict=True
    ):
        q = query[begin:stop].transpose(0, 1)
        k, v = (
            each[first:end].transpose(0, 1).repeat_interleave(times, 0) for each in (key, value)
        )
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        held = (end - first) - (stop - begin)
        distance = torch.arange(held, end - first)[:, None] - torch.arange(end - first)
        seen = (distance >= 0) & ((distance <= before) | (before < 0))
        scores = scores.masked_fill(~seen, float("-inf"))
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_attention_without_padding_equals_that_with_it(monkeypatch, name, kv_heads):
    ours, theirs = qkv(kv_heads=kv_heads), qkv(kv_heads=kv_heads)
    padded = PackedSequences(STARTS).attend(0, *ours, VARIANTS[name])
    monkeypatch.setattr(varlen, "varlen_attn", as_documented)
    monkeypatch.setattr(attention, "has_kernel", lambda query, variant: True)
    layout = PackedSequences(STARTS)
    packed = layout.attend(0, *theirs, VARIANTS[name])
    assert "_padding" not in vars(layout)
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)
    for each in (packed, padded):
        (each * torch.linspace(-1, 1, each.numel()).view_as(each)).sum().backward()
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-5)
    # negative control
    plain = PackedSequences(STARTS)._attend_packed(*theirs, Variant(scaling=0.9, window=2))
    assert (plain - padded).abs().max() > 1e-2


# a group of three with a repeated member, a second group, and a sequence that shares nothing
SHARING = [
    [5, 9, 33, 12, 40, 41],
    [5, 9, 33, 12, 7],
    [5, 9, 33, 12, 7],
    [5, 9, 33, 50, 51, 52, 53, 54],
    [8, 15, 16],
    [8, 15, 16, 23, 42],
    [11],
]


def shared_layout():
    starts = torch.tensor([0, *accumulate(map(len, SHARING))])
    ids = torch.tensor([token for each in SHARING for token in each])
    shared = Prefixes(ids, starts).of(range(len(SHARING)))
    return ids, starts, PackedSequences(starts, shared)


def test_what_sequences_begin_with_in_common_is_computed_once():
    ids, starts, layout = shared_layout()
    assert Prefixes(ids, starts).of(range(len(SHARING))) == [0, 4, 5, 3, 0, 3, 0]
    assert len(layout.computed) == len(layout.position) == len(ids) - 15
    assert torch.equal(layout.whole(ids[layout.computed]), ids)
    places = torch.cat([torch.arange(len(each)) for each in SHARING])
    assert torch.equal(layout.whole(layout.position), places)
    # sharing one token of twelve does not pay
    few = torch.tensor([5, *range(20, 31), 5, *range(40, 51)])
    assert Prefixes(few, torch.tensor([0, 12, 24])).of([0, 1]) == [0, 0]


PADDED = [*VARIANTS.values(), Variant(softcap=2.0)]


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(
    ("is_packed", "dtype", "variant"),
    [
        *((False, torch.float32, each) for each in PADDED),
        *((False, torch.bfloat16, each) for each in PADDED),
        *((True, torch.float32, each) for each in VARIANTS.values()),
    ],
    ids=str,
)
def test_attention_over_shared_tokens_equals_that_over_each_sequence(
    monkeypatch, variant, kv_heads, is_packed, dtype
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    ids, starts, layout = shared_layout()
    draw = torch.Generator().manual_seed(0)
    tables = [torch.randn(60, n, 8, generator=draw).to(dtype) for n in (4, kv_heads, kv_heads)]
    weight = torch.linspace(-1, 1, len(ids) * 32).view(len(ids), 4, 8)

    def attended(layout, tokens):
        leaves = [table.clone().requires_grad_() for table in tables]
        result = layout.whole(layout.attend(0, *(leaf[tokens] for leaf in leaves), variant))
        (result * weight).sum().backward()
        return [result.detach(), *(leaf.grad for leaf in leaves)]

    expected = attended(PackedSequences(starts), ids)
    if is_packed:
        monkeypatch.setattr(varlen, "varlen_attn", as_documented)
        monkeypatch.setattr(attention, "has_kernel", lambda query, variant: True)
    # queries and keys depend on the token only, so a table's row gets what its tokens get
    found = attended(layout, ids[layout.computed])
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    assert float(expected[0].abs().max()) > 0.1


def test_the_installed_kernel_takes_the_call_and_its_gradient():
    tensors = qkv(device="meta", dtype=torch.bfloat16)
    attended = PackedSequences(STARTS)._attend_packed(*tensors, Variant(0.3, window=3))
    assert attended.shape == (15, 4, 8)
    attended.sum().backward()
    assert [each.grad.shape for each in tensors] == [each.shape for each in tensors]


def test_what_the_kernel_cannot_is_padded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def able(dim=64, dtype=torch.bfloat16, variant=VARIANTS["window"], device="cuda"):
        query = SimpleNamespace(
            is_cuda=device == "cuda", device=device, dtype=dtype, shape=(15, 4, dim)
        )
        return has_kernel(query, variant)

    assert able()
    assert able(dtype=torch.float16)
    assert not able(device="cpu")
    assert not able(dtype=torch.float32)
    assert not able(dim=36)
    assert not able(dim=512)
    assert not able(variant=Variant(softcap=30.0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not able()
