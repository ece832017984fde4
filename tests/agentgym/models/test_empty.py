"""Models that take no memory until they are spread."""

import json

import pytest
import torch
from torch import nn

from agentgym.models.empty import change_parameters, empty_model, materialize


@pytest.fixture
def config(make_model):
    return json.loads(make_model().config.to_json_string())


def test_parameters_take_no_memory_and_what_is_computed_is_there(config, make_model):
    model, real = empty_model(json.dumps(config), torch.bfloat16), make_model()
    assert {each.device.type for each in model.parameters()} == {"meta"}
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    buffers, expected = dict(model.named_buffers()), dict(real.named_buffers())
    assert buffers.keys() == expected.keys() != set()
    assert all(torch.equal(buffers[name], each) for name, each in expected.items())
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in real.named_parameters()]
    assert not model.training


def test_a_tied_weight_stays_one(config):
    model = empty_model(json.dumps({**config, "tie_word_embeddings": True}), torch.float32)
    materialize(model, torch.device("cpu"))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert all(not each.is_meta for each in model.parameters())


def test_what_has_memory_is_left_as_it_is():
    layer = nn.Linear(2, 2)
    weight = layer.weight
    materialize(layer, torch.device("cpu"))
    assert layer.weight is weight
    layer.bias.requires_grad_(False)
    change_parameters(layer, lambda each: each.to("meta"))
    assert layer.weight.is_meta
    assert (layer.weight.requires_grad, layer.bias.requires_grad) == (True, False)


def test_making_one_draws_nothing(config):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    empty_model(json.dumps(config), torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
