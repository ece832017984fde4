"""What a handed-over model lacks, or is, is told before it is loaded."""

import json

import pytest
from transformers import BloomConfig, GPT2Config, LlamaConfig, MambaConfig

from agentgym.config import ConfigError
from agentgym.models.architecture import num_positions, read_architecture, unsupported

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
        # the scaling is in the number already
        (LlamaConfig(max_position_embeddings=1024, rope_parameters=rope("linear")), 1024),
        (LlamaConfig(max_position_embeddings=1024, rope_parameters=rope("llama3", **LLAMA3)), 1024),
        (
            LlamaConfig(
                max_position_embeddings=1024,
                rope_parameters=rope("yarn", original_max_position_embeddings=256),
            ),
            1024,
        ),
        # as Qwen's model cards say: 4 x 32768
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
