"""Models and tokenizers are reproducible and portable, and refused if they do not match."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save, save_file
from torch import nn

from agentgym.config import ChatConfig, ConfigError, ModelConfig, OptimizerConfig
from agentgym.learner.start import LearnerPlan
from agentgym.models.architecture import CHAT
from agentgym.models.attention import RAGGED, PackedSequences
from agentgym.models.checkpoint import (
    load_checkpoint,
    new_checkpoint,
    save_pretrained,
    stored_checkpoint,
)
from agentgym.models.model import (
    change_parameters,
    empty_model,
    load_hub,
    load_weights,
    materialize,
    new_model,
    tokenizer_files,
    tokenizer_from_files,
    train_tokenizer,
    weights_of,
)

SMALL = ModelConfig(
    hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, mlp_size=32, context_tokens=64
)


def small(seed):
    return new_model(SMALL, vocab_size=300, eos_id=3, pad_id=0, seed=seed)


def weights_blob(model):
    return save(weights_of(model))


def rebuilt(model, tokenizer, stored):
    made = new_checkpoint(model, tokenizer)
    return stored_checkpoint(made.architecture, made.tokenizer_json, stored(model)).model


def logits_of(model, ids):
    layout = PackedSequences(torch.tensor([0, len(ids)]))
    with torch.no_grad():
        return model.eval()(
            input_ids=torch.tensor([ids]),
            position_ids=layout.position[None],
            use_cache=False,
            layout=layout,
        ).logits[0]


def test_a_new_model_is_a_function_of_its_seed_alone():
    torch.manual_seed(1)
    first = weights_blob(small(7))
    torch.manual_seed(2)
    assert weights_blob(small(7)) == first
    assert weights_blob(small(8)) != first


def test_making_and_rebuilding_a_model_leave_the_global_generator_alone(tokenizer, stored):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = small(7)
    rebuilt(model, tokenizer, stored)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_survive_the_way_through_a_store(tokenizer, stored):
    model = small(7)
    again = rebuilt(model, tokenizer, stored)
    assert weights_blob(again) == weights_blob(model)
    assert torch.equal(logits_of(again, [5, 6, 7]), logits_of(model, [5, 6, 7]))
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight  # still tied
    assert again.config._attn_implementation == RAGGED


def test_weights_that_do_not_fit_are_named_and_change_nothing():
    model, other = small(7), weights_of(small(8))
    before = weights_blob(model)
    with pytest.raises(
        ValueError, match=r"parameters \['model.norm.weight'\] are on one side only"
    ):
        load_weights(
            model, {name: tensor for name, tensor in other.items() if name != "model.norm.weight"}
        )
    with pytest.raises(ValueError, match=r"parameters \['extra'\] are on one side only"):
        load_weights(model, {**other, "extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"model.norm.weight is \(5,\), expected \(32,\)"):
        load_weights(model, {**other, "model.norm.weight": torch.zeros(5)})
    assert weights_blob(model) == before


def test_a_saved_folder_is_an_ordinary_hugging_face_model(tmp_path, make_model, tokenizer, keep):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = new_checkpoint(make_model(), tokenizer)
    save_pretrained(tmp_path / "m", *keep(checkpoint.snapshot(), checkpoint.files()))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="sdpa").eval()
    ids = [5, 6, 7, 80]
    with torch.no_grad():
        torch.testing.assert_close(
            model(torch.tensor([ids])).logits[0],
            logits_of(checkpoint.model, ids),
            atol=1e-4,
            rtol=1e-4,
        )
    loaded = AutoTokenizer.from_pretrained(tmp_path / "m")
    messages = [{"role": "user", "content": "go to the red ball"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == tokenizer.apply_chat_template(
        messages, tokenize=False
    )
    assert loaded("turn left 2")["input_ids"] == tokenizer("turn left 2")["input_ids"]


def test_a_saved_folder_loads_as_trl_peft_and_pipelines_load_one(
    tmp_path, make_model, tokenizer, keep
):
    import peft
    import transformers

    source = make_model()
    checkpoint = new_checkpoint(source, tokenizer)
    save_pretrained(tmp_path / "ours", *keep(checkpoint.snapshot(), checkpoint.files()))
    source.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        json.loads((tmp_path / each / "config.json").read_text()) for each in ("ours", "theirs")
    )
    del theirs["transformers_version"]
    assert {name: ours.get(name) for name in theirs} == theirs
    # TRL loads the class that config.json names
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    model = getattr(transformers, config.architectures[0]).from_pretrained(tmp_path / "ours")
    assert weights_blob(model) == weights_blob(source)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
    generate = transformers.pipeline("text-generation", model=str(tmp_path / "ours"))
    (answer,) = generate("go to", max_new_tokens=2, do_sample=False)
    assert answer["generated_text"].startswith("go to")


def test_a_local_folder_loads_like_a_hub_repository(tmp_path, make_model, tokenizer, keep):
    source = make_model()
    made = new_checkpoint(source, tokenizer)
    save_pretrained(tmp_path, *keep(made.snapshot(), made.files()))
    model, loaded = load_hub(ModelConfig(source="hub", name=str(tmp_path)))
    assert torch.equal(logits_of(model, [5, 6, 7]), logits_of(source, [5, 6, 7]))
    assert weights_blob(model) == weights_blob(source)
    new_checkpoint(model, loaded)  # its chat template is usable


def test_stop_tokens_and_chat_settings_of_a_model_stay_with_its_checkpoints(
    tmp_path, make_model, tokenizer, keep
):
    source = make_model()
    made = new_checkpoint(source, tokenizer)
    assert CHAT not in json.loads(made.tokenizer_json)  # defaults are not written
    save_pretrained(tmp_path / "a", *keep(made.snapshot(), made.files()))
    more = [tokenizer.pad_token_id, tokenizer.eos_token_id]
    (tmp_path / "a" / "generation_config.json").write_text(json.dumps({"eos_token_id": more}))
    chat = ChatConfig(history="append")
    hub = new_checkpoint(*load_hub(ModelConfig(source="hub", name=str(tmp_path / "a"))), chat)
    kept = load_checkpoint(*keep(hub.snapshot(), hub.files()))
    assert kept.renderer.stop_ids == hub.renderer.stop_ids == (more[1], more[0])
    assert json.loads(kept.tokenizer_json)[CHAT] == '{"history":"append","thinking":"auto"}'
    broken = json.dumps({**json.loads(kept.tokenizer_json), CHAT: '{"history": "x"}'}).encode()
    with pytest.raises(ValueError, match="Input should be 'exact' or 'append'"):
        stored_checkpoint(kept.architecture, broken, kept.weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_in_the_dtype_that_is_asked_for(tmp_path, tokenizer, keep, dtype):
    names = {"vocab_size": len(tokenizer), "eos_id": 1, "pad_id": 0, "seed": 0}
    made = new_checkpoint(new_model(ModelConfig(dtype="bfloat16"), **names), tokenizer)
    save_pretrained(tmp_path / "a", *keep(made.snapshot(), made.files()))
    for asked, expected in ((dtype, getattr(torch, dtype)), ("auto", torch.bfloat16)):
        config = ModelConfig(source="hub", name=str(tmp_path / "a"), dtype=asked)
        loaded = new_checkpoint(*load_hub(config))
        assert loaded.dtype == expected
        assert load_checkpoint(*keep(loaded.snapshot(), loaded.files())).dtype == expected
    drawn, asked = (new_model(ModelConfig(dtype=each), **names) for each in ("auto", dtype))
    assert drawn.dtype == torch.float32
    assert asked.dtype == getattr(torch, dtype)
    for name, weight in drawn.named_parameters():
        assert torch.equal(asked.get_parameter(name), weight.to(asked.dtype))


def test_the_learners_weights_share_no_memory_with_the_engines(make_model, tokenizer, stored):
    checkpoint = new_checkpoint(make_model(), tokenizer)
    before = weights_blob(checkpoint.model)
    weights = stored(checkpoint.model)
    learner = LearnerPlan(checkpoint.architecture, weights, OptimizerConfig(), 1).build()
    assert weights_blob(learner.model) == before
    with torch.no_grad():
        next(learner.model.parameters()).add_(1)
    assert weights_blob(checkpoint.model) == before != weights_blob(learner.model)


def test_a_tokenizer_survives_the_way_through_text(tokenizer):
    files = tokenizer_files(tokenizer)
    again = tokenizer_from_files(files)
    assert tokenizer_files(again)["tokenizer.json"] == files["tokenizer.json"]
    assert tokenizer_files(tokenizer_from_files(tokenizer_files(again))) == tokenizer_files(again)
    assert (again.chat_template, again.eos_token_id, again.pad_token_id) == (
        tokenizer.chat_template,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    for text in ("turn left", "22 red\n\nballs", "it's <|end|>"):
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_the_tokenizer_spells_any_text_and_digits_one_by_one():
    tokenizer = train_tokenizer(["step 12 12 12 12", "go"], 400)
    for text in ("déjà vu 😀\n\t x", "12", " go  go"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert len(tokenizer("1212", add_special_tokens=False)["input_ids"]) == 4


SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen2 tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "llama untied": ("LlamaConfig", {"tie_word_embeddings": False}),
    "gpt2 tied": ("GPT2Config", {}),
    "gemma2 tied": ("Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "phi with biases": ("PhiConfig", {}),
}


def saved(folder, tokenizer, kind, more):
    """Save a model of that family. Return {name: tensor} of its file."""
    config = getattr(transformers, kind)(**{**SIZES, **more, "vocab_size": len(tokenizer)})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_without_one_of_its_tensors_is_refused_by_the_tensors_name(
    tmp_path, tokenizer, family
):
    tensors = saved(tmp_path, tokenizer, *FAMILIES[family])
    config = ModelConfig(source="hub", name=str(tmp_path))
    load_hub(config)  # tied embeddings are not missing
    left_out = max(name for name in tensors if ".0." in name)  # a tensor of the first layer
    whole = {name: tensor for name, tensor in tensors.items() if name != left_out}
    save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError) as refused:
        load_hub(config)
    told = f"the weights of {tmp_path} are not those of its config.json: {left_out} missing; use a"
    assert str(refused.value).startswith(told)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"v_head.weight": torch.ones(1, 32)}, "v_head.weight unexpected"),
        ({"model.norm.weight": torch.ones(31)}, "model.norm.weight of another shape"),
        (
            {"lm_head.weight": torch.ones(300, 32)},
            "lm_head.weight not equal to the tensor that tie_word_embeddings ties it to",
        ),
        (
            {f"model.layers.1.mlp.{name}_proj.weight": None for name in ("up", "gate", "down")}
            | {"model.norm.weight": None},
            "model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj.weight,"
            " model.layers.1.mlp.up_proj.weight and 1 more missing",
        ),
    ],
)
def test_tensors_that_are_not_those_of_the_architecture_are_refused_by_name(
    tmp_path, tokenizer, changes, told, capfd
):
    tensors = saved(tmp_path, tokenizer, "Qwen2Config", {"tie_word_embeddings": True})
    rows = len(tensors["model.embed_tokens.weight"])
    tensors |= {name: None if each is None else each[:rows] for name, each in changes.items()}
    kept = {name: each for name, each in tensors.items() if each is not None}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError) as refused:
        load_hub(ModelConfig(source="hub", name=str(tmp_path)))
    assert f"not those of its config.json: {told}; use" in str(refused.value)
    assert "LOAD REPORT" not in capfd.readouterr().err  # transformers' report of many lines


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        ("experts.1.w3", "model.layers.0.mlp.experts.gate_up_proj not made of the tensors that"),
        ("experts.0.w2", "model.layers.0.mlp.experts.down_proj of another shape"),
    ],
)
def test_experts_that_are_stored_one_by_one_are_all_there_or_the_folder_is_refused(
    tmp_path, tokenizer, stored, told
):
    tensors = saved(tmp_path, tokenizer, "MixtralConfig", {"num_local_experts": 2})
    config = ModelConfig(source="hub", name=str(tmp_path))
    load_hub(config)
    del tensors[f"model.layers.0.block_sparse_moe.{stored}.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError) as refused:
        load_hub(config)
    assert f"not those of its config.json: {told}" in str(refused.value)


def test_a_tied_head_that_is_stored_and_equal_is_loaded_as_tied(tmp_path, tokenizer):
    tensors = saved(tmp_path, tokenizer, "Qwen2Config", {"tie_word_embeddings": True})
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model, _ = load_hub(ModelConfig(source="hub", name=str(tmp_path)))
    assert "lm_head.weight" not in weights_of(model)


def test_a_model_whose_tokenizer_has_more_ids_than_rows_is_refused(tmp_path, tokenizer):
    saved(tmp_path, tokenizer, "Qwen2Config", {})
    config = json.loads((tmp_path / "config.json").read_text())
    config["vocab_size"] -= 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has more ids than its embedding has rows"):
        load_hub(ModelConfig(source="hub", name=str(tmp_path)))


def test_weights_in_float16_are_trained_in_float32_and_it_is_said(
    tmp_path, make_model, tokenizer, caplog
):
    stored = make_model().to(torch.float16)
    stored.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = load_hub(ModelConfig(source="hub", name=str(tmp_path)))
    assert "has float16 weights; they become float32" in caplog.text
    assert json.loads(model.config.to_json_string())["dtype"] == "float32"
    narrow = dict(stored.named_parameters())
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, narrow[name].float())


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
