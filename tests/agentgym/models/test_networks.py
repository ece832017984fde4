"""The two trained networks compared with plain forwards, row by row."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentgym.models import networks
from agentgym.models.attention import PackedSequences
from agentgym.models.networks import PolicyNet, ValueNet, blocks, checkpoint_blocks, compile_blocks
from tests.agentgym.learner.learning import ROWS, assert_same, batch_of, gradients


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_a_plain_forward_of_each_row(make_learner, plain, temperature):
    learner = make_learner()
    batch = batch_of(temperature=temperature)
    twin = plain(learner.model)
    expected, shifted = [], []
    for ids, mask in ROWS:
        with torch.no_grad():
            logp = torch.log_softmax(twin(torch.tensor([ids])).logits[0] / temperature, -1)
        positions = [index for index, m in enumerate(mask) if m]
        expected += [float(logp[index - 1, ids[index]]) for index in positions]
        shifted += [float(logp[index, ids[index]]) for index in positions]  # off by one
    got = PolicyNet(learner.model)(batch)[0].tolist()
    assert got == pytest.approx(expected, abs=1e-4)
    assert got != pytest.approx(shifted, abs=1e-1)
    scores = learner.score(batch)
    assert scores[batch.action_mask].tolist() == pytest.approx(expected, abs=1e-4)
    assert not scores[~batch.action_mask].any()


def test_entropies_are_those_of_the_distributions(make_learner, plain):
    learner = make_learner()
    ids, mask = ROWS[1]
    with torch.no_grad():
        logp = torch.log_softmax(plain(learner.model)(torch.tensor([ids])).logits[0, 1], -1)
    entropy = PolicyNet(learner.model)(batch_of([(ids, mask)], [1.0], (0,)))[1]
    assert entropy.tolist() == pytest.approx([float(-(logp.exp() * logp).sum())], abs=1e-4)


def test_an_action_without_anything_before_it_is_a_bug(make_learner):
    with pytest.raises(AssertionError, match="a sequence's first token"):
        make_learner().score(batch_of([([5, 6], [1, 1])], [1.0], (0,)))


def test_the_critic_values_the_state_before_each_action_and_where_each_row_was_cut(
    make_model, plain
):
    model = make_model(0)
    critic = networks.ValueNet(model)
    with torch.no_grad():
        critic.head.weight.normal_(generator=torch.Generator().manual_seed(1))
        critic.head.bias.fill_(0.5)
    values, ends = critic(batch_of())
    expected, last = [], []
    for ids, mask in ROWS:
        hidden = plain(model).get_decoder()(torch.tensor([ids])).last_hidden_state[0]
        of = (hidden @ critic.head.weight[0] + 0.5).tolist()
        expected += [of[index - 1] for index, action in enumerate(mask) if action]
        # after a final action no value was trained
        last.append(of[-2] if mask[-1] else of[-1])
    assert values.tolist() == pytest.approx(expected, abs=1e-3)
    assert ends.tolist() == pytest.approx(last, abs=1e-3)


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_chunked_head_equals_the_whole(make_learner, chunk):
    whole, chunked = make_learner(), make_learner()
    batch = batch_of()
    expected = PolicyNet(whole.model)(batch)
    got = PolicyNet(chunked.model, chunk)(batch)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    (expected[0] ** 2).sum().backward()
    (got[0] ** 2).sum().backward()
    assert_same(gradients(whole), gradients(chunked), atol=1e-3, rtol=1e-4)


def test_shared_prefixes_change_neither_losses_nor_gradients(make_model):
    batch = batch_of()
    results = []
    for share in (False, True):
        policy, critic = make_model(0), networks.ValueNet(make_model(7), share_prefixes=share)
        with torch.no_grad():
            critic.head.weight.normal_(generator=torch.Generator().manual_seed(1))
        logprobs, entropies = PolicyNet(policy, share_prefixes=share)(batch, True)
        values, ends = critic(batch)
        ((logprobs**2).sum() + entropies.sum() + (values**2).sum() + ends.sum()).backward()
        of_critic = {f"critic {n}": p.grad for n, p in critic.named_parameters()}
        of_critic |= {n: p.grad for n, p in policy.named_parameters()}
        results.append(
            {"logp": logprobs, "entropy": entropies, "values": values, "ends": ends}
            | {name: grad for name, grad in of_critic.items() if grad is not None}
        )
    assert_same(*results, atol=1e-4, rtol=1e-4)
    assert len(results[0]) > 20


class Logits(TorchDispatchMode):
    """Records the largest number of rows of logits; the head's weight does not count."""

    def __init__(self, model):
        super().__init__()
        self.hidden, self.width, self.rows = model.config.hidden_size, model.config.vocab_size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            shape = tuple(each.shape) if isinstance(each, torch.Tensor) else ()
            if shape[-1:] == (self.width,) and shape != (self.hidden, self.width):
                self.rows = max(self.rows, each.numel() // self.width)
        return result


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("chunk", "rows"), [(4, 4), (100, 40)])
def test_no_more_logits_exist_than_of_one_chunk_forward_and_backward(
    make_model, entropy, chunk, rows
):
    """Use forty action tokens; observations never reach the head."""
    ids = [5 + place % 40 for place in range(81)]
    model, batch = make_model(), batch_of([(ids, [0, *([1, 0] * 40)])], [1.0], (0,))
    with Logits(model) as logits:
        logprobs, entropies = PolicyNet(model, chunk)(batch, entropy)
        (logprobs.sum() + entropies.sum()).backward()
    assert logits.rows == rows


STARTS, IDS = torch.tensor([0, 4, 5, 13]), torch.arange(5, 18)[None]


def loss_of(model, starts=STARTS):
    layout = PackedSequences(starts)
    states = model.get_decoder()(
        input_ids=IDS[:, : starts[-1]],
        position_ids=layout.position[None],
        use_cache=False,
        layout=layout,
    ).last_hidden_state
    return (states * torch.linspace(-1, 1, states.shape[-1])).sum()


def learned(model, starts=STARTS):
    model.zero_grad()
    loss = loss_of(model, starts)
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters()}


def kept_bytes(model):
    """Return the number of bytes that a forward keeps for its backward."""
    sizes = {}

    def keep(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(model)
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    return sum(size for place, size in sizes.items() if place not in own)


def test_the_blocks_of_both_networks_are_their_decoders_layers(make_model):
    model = make_model()
    assert blocks(model) == list(model.model.layers)
    assert blocks(ValueNet(model)) == list(model.model.layers)


def test_checkpointed_blocks_have_the_same_gradients_to_the_bit_and_keep_less(make_model):
    plain, again = make_model(), make_model()
    checkpoint_blocks(again)
    (loss, gradients), (same, theirs) = learned(plain), learned(again)
    assert torch.equal(loss, same)
    for name, gradient in gradients.items():
        if gradient is not None:
            assert torch.equal(gradient, theirs[name]), name
    assert kept_bytes(again) < 0.5 * kept_bytes(plain)


@pytest.mark.integration
@pytest.mark.parametrize("checkpointed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_blocks_have_the_same_gradients(make_model, checkpointed):
    plain, compiled = make_model(), make_model()
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    compile_blocks(compiled, backend)
    if checkpointed:
        checkpoint_blocks(compiled)
    (loss, gradients), (same, theirs) = learned(plain), learned(compiled)
    torch.testing.assert_close(same, loss, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        if gradient is not None:
            torch.testing.assert_close(theirs[name], gradient, atol=1e-4, rtol=1e-4, msg=name)
    assert seen


@pytest.mark.slow
def test_kernels_of_compiled_blocks_serve_any_number_of_tokens(make_model):
    from torch._dynamo.utils import counters

    plain, compiled = make_model(), make_model()
    compile_blocks(compiled, "inductor")
    checkpoint_blocks(compiled)
    made = []
    for starts in ([0, 4, 5, 13], [0, 9], [0, 2, 12], [0, 6, 7, 8, 10]):
        learned_from = torch.tensor(starts)
        loss, gradients = learned(plain, learned_from)
        same, theirs = learned(compiled, learned_from)
        torch.testing.assert_close(same, loss, atol=1e-5, rtol=1e-5)
        for name, gradient in gradients.items():
            if gradient is not None:
                torch.testing.assert_close(theirs[name], gradient, atol=1e-4, rtol=1e-4, msg=name)
        made.append(counters["stats"]["unique_graphs"])
    assert made[0] == made[-1]
