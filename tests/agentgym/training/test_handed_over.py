"""Model folders from others: numbers and text are used, programs never run."""

import json
import pickle
import sys

import pytest
from transformers import AutoModelForCausalLM

from agentgym.config import ConfigError, ModelConfig
from agentgym.models.architecture import read_architecture
from agentgym.models.attention import RAGGED
from agentgym.models.checkpoint import ARCHITECTURE, new_checkpoint, save_pretrained
from agentgym.models.model import load_hub, tokenizer_files, tokenizer_from_files, write_tokenizer

NAMING_CODE = {
    "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    "_attn_implementation": "somebody/kernel",
    "attn_implementation": "somebody/kernel",
    "_attn_implementation_internal": "somebody/kernel",
    "_experts_implementation": "somebody/kernel",
    "custom_pipelines": {"text-generation": {"impl": "evil.Pipeline"}},
}


class Evil:
    def __reduce__(self):
        return (exec, ("import sys; sys.evil = True",))


@pytest.fixture
def folder(tmp_path, make_model, tokenizer, keep, monkeypatch):
    monkeypatch.delattr(sys, "evil", raising=False)
    model = make_model()
    architecture = {**model.config.to_dict(), **NAMING_CODE}
    made = new_checkpoint(model, tokenizer)
    files = {**made.files(), ARCHITECTURE: json.dumps(architecture).encode()}
    save_pretrained(tmp_path, *keep(made.snapshot(), files))
    declared = json.loads((tmp_path / "tokenizer_config.json").read_text())
    declared["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    (tmp_path / "evil.py").write_text(
        "import sys\nsys.evil = True\nclass Config: pass\nclass Model: pass\nclass Tokenizer:"
        " pass\n"
    )
    return tmp_path


def test_what_a_config_says_about_code_is_ignored_and_not_handed_on(folder):
    model, _ = load_hub(ModelConfig(source="hub", name=str(folder)))
    assert model.config._attn_implementation == RAGGED
    assert not hasattr(sys, "evil")
    written = model.config.to_json_string()
    assert "somebody" not in written
    assert "evil" not in written


def test_a_checkpoints_config_is_read_alike():
    text = json.dumps(
        {
            "model_type": "qwen2",
            "hidden_size": 64,
            **NAMING_CODE,
            "text_config": {"_attn_implementation": "somebody/kernel"},
        }
    )
    config = read_architecture(text)
    assert config.hidden_size == 64
    assert "somebody" not in str(vars(config))
    model = AutoModelForCausalLM.from_config(
        read_architecture(
            json.dumps(
                {
                    "model_type": "qwen2",
                    "hidden_size": 32,
                    "num_hidden_layers": 1,
                    "vocab_size": 8,
                    **NAMING_CODE,
                }
            )
        )
    )
    assert model.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "has a quantization_config; quantized weights are not trained here",
        ),
        ({"dtype": "save"}, "has dtype 'save'; expected one of float32, float16, bfloat16"),
        ({"torch_dtype": {"": "evil"}}, "has torch_dtype .*; expected one of float32"),
        ({"model_type": None}, "names no model_type"),
    ],
)
def test_what_is_no_architecture_of_ours_is_bad_input(changes, message):
    with pytest.raises(ConfigError, match=message):
        read_architecture(json.dumps({"model_type": "qwen2", **changes}))
    with pytest.raises(ConfigError, match="is not JSON"):
        read_architecture("{")


def test_a_model_type_only_its_own_code_knows_is_refused_without_asking():
    with pytest.raises(ValueError, match="evil_model"):
        read_architecture(
            json.dumps({"model_type": "evil_model", "auto_map": {"AutoConfig": "evil.Config"}})
        )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_refused_by_name(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(
        ConfigError,
        match=rf"expected weights in \*\.safetensors; it holds {name}, which are pickles",
    ):
        load_hub(ModelConfig(source="hub", name=str(folder)))
    assert not hasattr(sys, "evil")


@pytest.mark.parametrize(
    "name", ["evil.py", "config.json", "../tokenizer.json", "", "tokenizer.json/.."]
)
def test_a_tokenizers_files_have_known_names(tokenizer, tmp_path, name):
    files = {**tokenizer_files(tokenizer), name: "{}"}
    for use in (tokenizer_from_files, lambda files: write_tokenizer(tmp_path, files)):
        with pytest.raises(ValueError, match="a tokenizer has no file"):
            use(files)
