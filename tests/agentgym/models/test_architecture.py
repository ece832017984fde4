"""What a handed-over model lacks, or is, is told before it is loaded."""

import json

import pytest
from transformers import LlamaConfig, MambaConfig

from agentgym.config import ConfigError
from agentgym.models.architecture import read_architecture, unsupported

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
