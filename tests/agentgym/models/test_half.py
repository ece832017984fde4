"""Linear layers in half precision on a processor without instructions for it."""

import gc
import weakref

import pytest
import torch
from torch import nn

from agentgym.models.half import keep_wide_weights, widen_linear_layers


@pytest.fixture
def layer(monkeypatch):
    """A bfloat16 linear layer that computes in float32 on any processor."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    layer = nn.Linear(3, 2).to(torch.bfloat16)
    widen_linear_layers(layer)
    return layer


def exact(layer, hidden):
    """Return the products, summed in float64 and rounded to bfloat16 once."""
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    return (hidden.double() @ weight.T + bias).to(torch.bfloat16)


HIDDEN = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]], dtype=torch.bfloat16)


def test_products_are_summed_in_float32_and_rounded_once(layer):
    assert torch.equal(layer(HIDDEN), exact(layer, HIDDEN))


@torch.inference_mode()
def test_kept_weights_compute_the_same_and_change_when_they_are_kept_anew(layer):
    plain = layer(HIDDEN)
    keep_wide_weights(layer)
    assert torch.equal(layer(HIDDEN), plain)
    layer.weight.copy_(2 * layer.weight)
    assert torch.equal(layer(HIDDEN), plain)  # still the kept weights
    keep_wide_weights(layer)
    assert torch.equal(layer(HIDDEN), exact(layer, HIDDEN))


def test_gradients_reach_the_weights_whether_copies_are_kept_or_not(layer):
    keep_wide_weights(layer)
    with torch.no_grad():
        layer(HIDDEN)
    layer(HIDDEN).sum().backward()
    assert torch.equal(layer.weight.grad, HIDDEN.sum(0).expand(2, 3))


def test_gradients_are_those_of_autograd_and_no_float32_copy_waits_for_them(layer):
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 3, dtype=torch.bfloat16, requires_grad=True)
    scale = torch.randn(2, 5, 2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, id):
        layer(hidden)
    assert [each.dtype for each in kept] == [torch.bfloat16] * 2
    (layer(hidden).float() * scale).sum().backward()
    found = [hidden.grad, layer.weight.grad, layer.bias.grad]

    wide = [each.detach().clone().requires_grad_() for each in (hidden, layer.weight, layer.bias)]
    states, weight, bias = (each.float() for each in wide)
    product = nn.functional.linear(states, weight, bias).to(torch.bfloat16)
    (product.float() * scale).sum().backward()
    for one, other in zip(found, wide, strict=True):
        assert torch.equal(one, other.grad)


def test_a_models_memory_is_free_as_soon_as_nobody_has_the_model(monkeypatch):
    """Free memory by reference counting: an engine excludes its objects from garbage collection."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    layer = nn.Linear(3, 2).to(torch.bfloat16)
    widen_linear_layers(layer)
    keep_wide_weights(layer)
    weight = weakref.ref(layer.weight)
    gc.disable()
    try:
        del layer
        assert weight() is None
    finally:
        gc.enable()


def test_a_processor_with_fast_half_precision_keeps_nothing(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    layer = nn.Linear(3, 2).to(torch.bfloat16)
    widen_linear_layers(layer)
    keep_wide_weights(layer)
    with torch.no_grad():
        layer(HIDDEN)
        layer.weight.zero_()
        assert torch.equal(layer(HIDDEN), layer.bias.expand(2, 2))
