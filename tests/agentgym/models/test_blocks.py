"""Blocks that are computed again or compiled give what plain ones give."""

import pytest
import torch

from agentgym.models.attention import PackedSequences
from agentgym.models.blocks import blocks, checkpoint_blocks, compile_blocks
from agentgym.models.networks import ValueNet

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
    """Of what a forward keeps for its backward."""
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
