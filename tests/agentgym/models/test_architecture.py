"""Unsupported or incomplete models are reported before their weights are loaded."""

import json

import pytest
from safetensors.numpy import save
from transformers import BloomConfig, GPT2Config, LlamaConfig, MambaConfig

from agentgym.config import ConfigError, LoraConfig, ModelConfig
from agentgym.models.architecture import num_positions, read_architecture, unsupported
from agentgym.pipeline.plan import check_model
from tests.agentgym.families import tokenizer_of

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def test_an_architecture_says_nothing_of_code_to_run():
    told = json.loads(LlamaConfig().to_json_string())
    named = {"auto_map": {"AutoModel": "evil.Model"}, "attn_implementation": "their/kernels"}
    read = read_architecture(json.dumps({**told, **named}))
    assert "evil" not in read.to_json_string()
    assert "their/kernels" not in read.to_json_string()
    assert read.hidden_size == LlamaConfig().hidden_size


@pytest.mark.parametrize(
    "text", ["{", '{"model_type": "llama", "quantization_config": {"bits": 4}}']
)
def test_what_is_no_architecture_or_of_quantized_weights_is_refused(text):
    with pytest.raises(ConfigError):
        read_architecture(text)


def test_what_packed_sequences_cannot_carry_is_named():
    assert list(unsupported(LlamaConfig())) == []
    assert "linear_attention" in next(iter(unsupported(MambaConfig())))
    (told,) = unsupported(LlamaConfig(rope_parameters=DYNAMIC))
    assert told.startswith("rope_type 'dynamic' depends on the longest sequence")


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(max_position_embeddings=1024), 1024),
        (GPT2Config(n_positions=96), 96),
        (BloomConfig(), None),  # alibi
        # the number already includes the scaling
        (LlamaConfig(max_position_embeddings=1024, rope_parameters=rope("linear")), 1024),
        (LlamaConfig(max_position_embeddings=1024, rope_parameters=rope("llama3", **LLAMA3)), 1024),
        (
            LlamaConfig(
                max_position_embeddings=1024,
                rope_parameters=rope("yarn", original_max_position_embeddings=256),
            ),
            1024,
        ),
        # as in Qwen's model cards: 4 x 32768
        (
            LlamaConfig(
                max_position_embeddings=40960,
                rope_parameters=rope("yarn", original_max_position_embeddings=32768),
            ),
            131072,
        ),
    ],
)
def test_positions_count_the_scaling_of_rotary_ones_once(config, expected):
    assert num_positions(read_architecture(config.to_json_string())) == expected


def test_what_is_missing_of_a_handed_over_model_is_told_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="it holds no weights"):
        check_model(ModelConfig(source="hub", name=str(tmp_path)), LoraConfig())
    (tmp_path / "model.safetensors").write_bytes(save({}))
    with pytest.raises(ConfigError, match="neither a folder with a model nor a repository"):
        check_model(ModelConfig(source="hub", name=str(tmp_path)), LoraConfig())
    LlamaConfig(rope_parameters=DYNAMIC).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="rope_type 'dynamic' depends on"):
        check_model(ModelConfig(source="hub", name=str(tmp_path)), LoraConfig())


def test_weights_that_could_run_a_program_are_refused_and_named(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"it holds pytorch_model\.bin, which are pickles"):
        check_model(ModelConfig(source="hub", name=str(tmp_path)), LoraConfig())


def test_a_file_that_is_not_whole_is_refused_before_anything_starts(tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(save({})[:-1])
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut off or damaged: "):
        check_model(ModelConfig(source="hub", name=str(tmp_path)), LoraConfig())


@pytest.mark.parametrize(
    "config", [LlamaConfig(max_position_embeddings=512), GPT2Config(n_positions=512)]
)
def test_a_context_above_the_models_positions_is_refused_before_anything_starts(tmp_path, config):
    config.save_pretrained(tmp_path)
    tokenizer_of("llama3").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(save({}))
    check_model(ModelConfig(source="hub", name=str(tmp_path), context_tokens=512), LoraConfig())
    longer = ModelConfig(source="hub", name=str(tmp_path), context_tokens=513)
    with pytest.raises(ConfigError, match="context_tokens 513 is above the 512 positions of model"):
        check_model(longer, LoraConfig())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"target_modules": ("lm_head",)}, "'lm_head' names lm_head in Qwen2ForCausalLM; expected"),
        ({"target_modules": ("q_proj", "query")}, "'query' names nothing in"),
        ({"target_modules": ("self_attn",)}, r"names model\.layers\.0\.self_attn, model"),
        ({"rank": 33}, "lora.rank 33 is above the width 32 of model.layers.0.self_attn.k_proj"),
    ],
)
def test_layers_that_cannot_have_one_are_refused_before_anything_starts(settings, told):
    with pytest.raises(ConfigError, match=told):
        check_model(ModelConfig(), LoraConfig(**{"rank": 4, **settings}))
    check_model(ModelConfig(), LoraConfig(rank=32))
