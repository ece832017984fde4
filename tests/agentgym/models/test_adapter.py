"""LoRA matrices on frozen weights: chosen layers, merging, and agreement with peft."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from agentgym.config import LoraConfig
from agentgym.models import tensorfiles
from agentgym.models.adapter import (
    NAME,
    UP,
    Adapter,
    chosen_modules,
    is_matrix,
    merged_weights,
    plain_name,
    without_adapter,
)
from agentgym.models.architecture import ADAPTER
from agentgym.models.attention import PackedSequences
from agentgym.models.checkpoint import save_adapter
from agentgym.models.model import empty_model, load_weights, materialize, weights_of
from agentgym.models.tensorfiles import Snapshot, TensorFile

ALL = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
IDS = torch.arange(3, 20)


def logits_of(model):
    layout = PackedSequences(torch.tensor([0, len(IDS)]))
    with torch.no_grad():
        return model.eval()(
            input_ids=IDS[None], position_ids=layout.position[None], use_cache=False, layout=layout
        ).logits[0]


def model_with(architecture, weights):
    """Return the loaded model; its buffers stay float32, as after loading a checkpoint."""
    model = empty_model(architecture, next(iter(weights.values())).dtype)
    materialize(model, torch.device("cpu"))
    load_weights(model, weights)
    return model


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def trained(request, make_model, stored):
    """(a model, a stored adapter of it, the model with that adapter's layers)."""
    drawn = make_model().to(request.param)
    model = model_with(drawn.config.to_json_string(), weights_of(drawn))
    adapter = Adapter(stored(model), 4, 8, ALL, seed=1)
    adapted = empty_model(model.config.to_json_string(), request.param)
    adapter.inject(adapted)
    materialize(adapted, torch.device("cpu"))
    weights, draw = weights_of(model), torch.Generator().manual_seed(2)
    matrices = {}
    for name, parameter in adapted.named_parameters():
        if is_matrix(name):
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=draw)
            matrices[name] = parameter.detach()
        else:
            parameter.data = weights[plain_name(name)].clone()
    own = stored(Snapshot({ADAPTER: TensorFile.of(matrices)}))[ADAPTER]
    return model, replace(adapter, stored=own), adapted


@pytest.fixture(scope="module")
def peft_model(trained, tmp_path_factory):
    """The exported adapter, loaded by peft on the same model."""
    model, adapter, _ = trained
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(folder, adapter, "somebody/model")
    assert load_file(folder / "adapter_model.safetensors").keys() == {
        f"base_model.model.{name.replace(f'.{NAME}.', '.')}" for name in adapter.stored.tensors
    }
    return PeftModel.from_pretrained(copy.deepcopy(model), folder)


def test_every_linear_layer_of_the_blocks_gets_an_adapter_unless_some_are_named(make_model):
    model = make_model()
    assert chosen_modules(model, LoraConfig(rank=4)) == ALL
    named = LoraConfig(rank=4, target_modules=("v_proj", "1.self_attn.q_proj"))
    assert chosen_modules(model, named) == ("1.self_attn.q_proj", "v_proj")


def test_only_the_matrices_are_trained_in_float32_and_are_drawn_from_the_seed(trained):
    model, adapter, _ = trained
    adapted = empty_model(model.config.to_json_string(), model.dtype)
    adapter.inject(adapted)
    parameters = dict(adapted.named_parameters())
    matrices = {name: each for name, each in parameters.items() if is_matrix(name)}
    assert len(matrices) == 2 * 2 * len(ALL)
    assert {each.dtype for each in matrices.values()} == {torch.float32}
    assert {name for name, each in parameters.items() if each.requires_grad} == matrices.keys()
    drawn = dict(adapter.new_matrices(matrices))
    assert drawn.keys() == matrices.keys()
    assert all(torch.equal(each, drawn[name]) for name, each in adapter.new_matrices(matrices))
    other = dict(replace(adapter, seed=9).new_matrices(matrices))
    for name, each in drawn.items():
        assert each.shape == matrices[name].shape
        if name.endswith(UP):
            assert not each.any()
        else:  # uniform, like peft's initialization
            bound = each.shape[1] ** -0.5
            assert 0.8 * bound < float(each.abs().max()) <= bound
            assert not torch.equal(each, other[name])


def test_the_merged_model_computes_what_the_adapter_computes(trained, peft_model):
    model, adapter, adapted = trained
    weights = dict(merged_weights(dict(adapted.named_parameters()), adapter.scale))
    merged = model_with(model.config.to_json_string(), weights)
    near = 1e-5 if model.dtype == torch.float32 else 0.1
    torch.testing.assert_close(logits_of(merged), logits_of(adapted), rtol=0, atol=near)
    assert float((logits_of(merged) - logits_of(model)).abs().max()) > 1.0
    # peft computes the same from the exported adapter
    torch.testing.assert_close(logits_of(peft_model), logits_of(adapted), rtol=0, atol=1e-6)


def test_merging_is_that_of_peft(trained, peft_model):
    model, adapter, adapted = trained
    ours = dict(merged_weights(dict(adapted.named_parameters()), adapter.scale))
    theirs = weights_of(copy.deepcopy(peft_model).merge_and_unload(safe_merge=True))
    assert ours.keys() == theirs.keys() == weights_of(model).keys()
    for name, each in ours.items():
        if model.dtype == torch.float32:
            assert torch.equal(each, theirs[name]), name
        else:  # bfloat16 rounds the product before adding it
            torch.testing.assert_close(each, theirs[name], rtol=2**-7, atol=2**-7)


def test_without_the_adapter_the_model_is_the_frozen_one_and_then_again_itself(trained):
    model, _, adapted = trained
    begun = logits_of(adapted)
    with without_adapter(adapted):
        torch.testing.assert_close(logits_of(adapted), logits_of(model), rtol=0, atol=0)
    torch.testing.assert_close(logits_of(adapted), begun, rtol=0, atol=0)


def test_stored_weights_are_merged_as_they_are_read(trained, tmp_path, monkeypatch):
    model, adapter, adapted = trained
    expected = dict(merged_weights(dict(adapted.named_parameters()), adapter.scale))
    policy = pickle.loads(pickle.dumps(adapter.policy))
    policy.require_fit(expected)
    assert policy.size == adapter.base.size + adapter.stored.size
    assert policy.dtype == model.dtype
    for name, each in policy.load().items():
        assert torch.equal(each, expected[name]), name
    name = "model.layers.1.mlp.up_proj.weight"
    rows = torch.empty(10, 64, dtype=model.dtype)
    policy.read(name, rows, 7)
    torch.testing.assert_close(rows, expected[name][7:17], rtol=0, atol=1e-6)
    monkeypatch.setattr(tensorfiles, "PIECE_BYTES", 1000)
    tensorfiles.export_tensors(policy, tmp_path, 10**9)
    for name, each in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(each, expected[name]), name
    assert adapter.base == replace(adapter, stored=None).policy != policy


def test_a_damaged_matrix_is_found_before_it_is_merged(trained):
    _, adapter, _ = trained
    store, manifest = adapter.stored.store, adapter.stored.manifest
    (found,) = store_files(store, manifest)
    data = bytearray(found.read_bytes())
    data[-1] ^= 1
    found.chmod(0o600)
    found.write_bytes(data)
    with pytest.raises(ValueError, match=r"adapter\.safetensors of step kept commit 0 is damaged"):
        adapter.policy.load()
    data[-1] ^= 1
    found.write_bytes(data)


def store_files(store, manifest):
    from pathlib import Path

    return list(Path(store.root).rglob(manifest.blobs[ADAPTER].digest))
