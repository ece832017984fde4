"""Small models of common families, built from transformers' own configurations: computed as the
family computes itself, or refused by name."""

import pytest
import torch
import transformers

from agentgym.config import ModelConfig, OptimizerConfig
from agentgym.learner.plan import LearnerPlan
from agentgym.models.attention import RAGGED, PackedSequences
from agentgym.models.fidelity import differences, require_faithful
from agentgym.models.model import load_hub

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 7
# name -> (configuration class, its settings); each is one a plain causal attention computes wrongly
SUPPORTED = {
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW, "head_dim": 12}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": WINDOW,
            "head_dim": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 5,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": WINDOW, "head_dim": 12, "query_pre_attn_scalar": 5},
    ),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.3,
            "logits_scaling": 3.0,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
        },
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "phi": ("PhiConfig", {"attention_dropout": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2}),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "mixtral": ("MixtralConfig", {"sliding_window": WINDOW, "num_local_experts": 4}),
}
REFUSED = {
    "gpt-oss": (
        "GptOssConfig",
        {"sliding_window": WINDOW, "head_dim": 12, "num_local_experts": 4},
        "s_aux",
    ),
    "llama-dynamic": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "dynamic",
    ),
    "mamba": ("MambaConfig", {"state_size": 8}, "linear_attention"),
    "bert-like": (
        "Gemma3TextConfig",
        {"head_dim": 12, "use_bidirectional_attention": True},
        "causal",
    ),
}


def build(config_class, settings):
    config = getattr(transformers, config_class)(**{**SMALL, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=RAGGED)
        with torch.no_grad():
            for parameter in model.parameters():  # far from uniform; sinks and biases away from 0
                parameter.copy_(torch.randn_like(parameter) * (0.25 if parameter.ndim > 1 else 0.5))
    return model


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_family_is_computed_as_it_computes_itself(name):
    model = build(*SUPPORTED[name])
    found = differences(model)
    print(name, found)  # the table: pytest -rP
    assert max(found.values()) < 1e-4, found
    require_faithful(model)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_not_supported_is_refused_by_name(name):
    config_class, settings, why = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        require_faithful(build(config_class, settings))


def test_a_model_that_computes_something_else_never_starts():
    model = build(*SUPPORTED["llama"])
    require_faithful(model)
    own = model.forward

    def halved(*args, **options):  # a family's own idea between body and head
        output = own(*args, **options)
        output.logits = output.logits * 0.5
        return output

    model.forward = halved
    with pytest.raises(ValueError, match=r"learner's log-probabilities differ .* nats"):
        require_faithful(model)


def test_what_a_commit_would_lose_is_refused():
    model = build(*SUPPORTED["llama"])
    model.register_buffer("bias", torch.ones(3), persistent=False)
    require_faithful(model)
    model.register_buffer("bias", torch.ones(3))
    with pytest.raises(ValueError, match="its buffer bias is a part of its weights"):
        require_faithful(model)
    model = build(*SUPPORTED["llama"])
    model.get_decoder().norm.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"of several dtypes \(torch\.bfloat16, torch\.float32\)"):
        require_faithful(model)


def test_two_scores_of_one_batch_are_equal_in_a_model_with_dropout(stored):
    model = build(*SUPPORTED["phi"])
    learner = LearnerPlan(
        model.config.to_json_string(), stored(model), OptimizerConfig(), 1
    ).build()
    sequences = torch.arange(3, 40)
    layout = PackedSequences(torch.tensor([0, 20, 37]))

    def states():
        decoder = learner.model.get_decoder()
        return decoder(
            input_ids=sequences[None],
            position_ids=layout.position[None],
            use_cache=False,
            layout=layout,
        ).last_hidden_state

    assert torch.equal(states(), states())


def test_a_handed_over_model_is_checked_before_anything_starts(tmp_path, tokenizer):
    model = build(*REFUSED["gpt-oss"][:2])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="s_aux"):
        load_hub(ModelConfig(source="hub", name=str(tmp_path)))
