"""Small models of common families, built from transformers' configurations.
Each is computed as transformers computes it, or refused by name.
"""

import pytest
import torch
import transformers

from agentgym.config import ModelConfig, OptimizerConfig
from agentgym.learner.start import LearnerPlan
from agentgym.models.attention import PackedSequences
from agentgym.models.fidelity import differences, require_faithful, require_faithful_once
from agentgym.models.model import from_config, load_hub
from agentgym.models.networks import Prefixes

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
# name -> (configuration class, settings); plain causal attention would compute each one wrongly
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
# model types of transformers that need no further settings
PLAIN = [
    "arcee",
    "aria_text",
    "bitnet",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "ernie4_5",
    "exaone4",
    "flex_olmo",
    "gemma",
    "gemma3_text",
    "glm",
    "glm4",
    "granitemoe",
    "granitemoeshared",
    "hyperclovax",
    "jais2",
    "lfm2",
    "ministral3",
    "nanochat",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phimoe",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "vaultgemma",
]
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 32}
WIDE = {"num_key_value_heads": 4}  # for families without shared heads
TYPES = {  # name -> (model type, settings) where settings are needed
    **{name: (name, {}) for name in PLAIN},
    "biogpt": ("biogpt", WIDE),
    "gpt2": ("gpt2", WIDE),
    "gpt_neox": ("gpt_neox", WIDE),
    "qwen2_moe": ("qwen2_moe", SHARED_EXPERT),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 12}),
}
TYPES_REFUSED = {  # name -> (model type, settings, reason)
    # only the mask has the window, and neither learner nor engine reads it; the window is longer
    # than the compared sequences
    "qwen2_moe-window": (
        "qwen2_moe",
        {**SHARED_EXPERT, "use_sliding_window": True, "sliding_window": 48, "max_window_layers": 2},
        "differ from the model's own by",
    ),
    "phimoe-window": ("phimoe", {"sliding_window": 48}, "differ from the model's own by"),
    "apertus": ("apertus", {}, "its buffer .*beta is a part of its weights"),
    "bert": ("bert", {}, "is_causal=False"),
    "big_bird": ("big_bird", {}, "differ from the model's own by"),
    "bloom": ("bloom", {}, "differ from the model's own by"),
    "codegen": ("codegen", {}, "cannot run on packed sequences"),
    "cpmant": ("cpmant", {}, "differ from the model's own by"),
    "ctrl": ("ctrl", {}, "cannot run on packed sequences"),
    "diffllama": ("diffllama", {}, "differ from the model's own by"),
    "doge": ("doge", {}, "attends with attention_mask"),
    "electra": ("electra", {}, "is_causal=False"),
    "exaone_moe": ("exaone_moe", {}, "its buffer .* is a part of its weights"),
    "falcon": ("falcon", {}, "does not call transformers' attention interface"),
    "falcon_h1": ("falcon_h1", {}, "layers of type 'hybrid'"),
    "falcon_mamba": ("falcon_mamba", {}, "layers of type 'linear_attention'"),
    "gemma4_unified_text": ("gemma4_unified_text", {}, "its buffer .*layer_scalar"),
    "gptj": ("gptj", {}, "does not call transformers' attention interface"),
    "granite_swa": ("granite_swa", {}, "attends with s_aux"),
    "helium": ("helium", {}, "cannot run on packed sequences"),
    "jamba": ("jamba", {}, "layers of type 'linear_attention'"),
    "megatron-bert": ("megatron-bert", {}, "differ from the model's own by"),
    "minimax": ("minimax", {}, "layers of type 'linear_attention'"),
    "minimax_m2": ("minimax_m2", {}, "its buffer .* is a part of its weights"),
    "mpt": ("mpt", {}, "cannot run on packed sequences"),
    "nemotron": ("nemotron", {}, "cannot run on packed sequences"),
    "nemotron_h": ("nemotron_h", {}, "layers of type 'linear_attention'"),
    "olmo_hybrid": ("olmo_hybrid", {}, "layers of type 'linear_attention'"),
    "openai-gpt": ("openai-gpt", {}, "differ from the model's own by"),
    "qwen3_5_text": ("qwen3_5_text", {}, "layers of type 'linear_attention'"),
    "recurrent_gemma": ("recurrent_gemma", {}, "differ from the model's own by"),
    "roberta": ("roberta", {}, "is_causal=False"),
    "rwkv": ("rwkv", {}, "differ from the model's own by"),
    "stablelm": ("stablelm", {}, "cannot run on packed sequences"),
    "xglm": ("xglm", {}, "differ from the model's own by"),
    "xlm": ("xlm", {}, "differ from the model's own by"),
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


def slowly(name):
    return pytest.param(name, marks=pytest.mark.integration)


def build(config_class, settings):
    return drawn(getattr(transformers, config_class), settings)


def build_type(model_type, settings):
    return drawn(transformers.CONFIG_MAPPING[model_type], settings)


def drawn(config_class, settings):
    config = config_class(**{**SMALL, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = from_config(config, torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # far from uniform, with nonzero sinks and biases
                parameter.copy_(torch.randn_like(parameter) * (0.25 if parameter.ndim > 1 else 0.5))
    return model


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_family_is_computed_as_it_computes_itself(name):
    model = build(*SUPPORTED[name])
    found = differences(model)
    print(name, found)  # shown by pytest -rP
    assert max(found.values()) < 1e-4, found
    require_faithful(model)


@torch.no_grad()
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_family_computes_what_sequences_share_as_it_computes_each(name):
    model = build(*SUPPORTED[name]).eval()
    first = torch.arange(1, 2 * WINDOW + 9)
    ids = torch.cat([first, first[:-4], torch.tensor([7, 8, 9]), first[: WINDOW + 1]])
    starts = torch.tensor([0, len(first), 2 * len(first) - 1, len(ids)])
    whole = PackedSequences(starts)
    shared = PackedSequences(starts, Prefixes(ids, starts).of(range(3)))
    assert len(shared.computed) == len(first) + 3

    def hidden(layout, tokens):
        return layout.whole(
            model.get_decoder()(
                input_ids=tokens[None],
                position_ids=layout.position[None],
                use_cache=False,
                layout=layout,
            ).last_hidden_state[0]
        )

    expected = hidden(whole, ids)
    torch.testing.assert_close(hidden(shared, ids[shared.computed]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.integration
@pytest.mark.parametrize("name", TYPES)
def test_a_family_with_its_own_settings_is_computed_as_it_computes_itself(name):
    require_faithful(build_type(*TYPES[name]))


@pytest.mark.parametrize("name", [*SUPPORTED, *(slowly(name) for name in TYPES)])
def test_a_family_in_half_precision_is_judged_by_its_architecture_not_by_rounding(name):
    model = build(*SUPPORTED[name]) if name in SUPPORTED else build_type(*TYPES[name])
    before = dict(differences(model))
    for dtype in (torch.bfloat16, torch.float16):
        narrow = model.to(dtype)
        weights = {name: each.clone() for name, each in narrow.named_parameters()}
        assert max(differences(narrow).values()) < 1e-4, before
        require_faithful(narrow)
        assert all(torch.equal(each, weights[name]) for name, each in narrow.named_parameters())


@pytest.mark.integration
@pytest.mark.parametrize("name", TYPES_REFUSED)
def test_a_family_that_learner_or_engine_would_compute_otherwise_is_refused(name):
    model_type, settings, why = TYPES_REFUSED[name]
    with pytest.raises(ValueError, match=why) as refusal:
        require_faithful(build_type(model_type, settings))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_not_supported_is_refused_by_name(name):
    config_class, settings, why = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        require_faithful(build(config_class, settings))


def test_a_model_that_computes_something_else_never_starts():
    model = build(*SUPPORTED["llama"])
    require_faithful(model)
    own = model.forward

    def halved(*args, **options):  # a change between body and head
        output = own(*args, **options)
        output.logits = output.logits * 0.5
        return output

    model.forward = halved
    with pytest.raises(ValueError, match=r"learner's log-probabilities differ .* nats"):
        require_faithful(model)


def test_an_architecture_that_passed_is_not_checked_again_for_other_weights():
    require_faithful_once(build(*SUPPORTED["llama"]))
    model = build(*SUPPORTED["llama"])
    model.forward = None  # a check would call it
    require_faithful_once(model)
    config_class, settings, why = REFUSED["llama-dynamic"]
    for _ in range(2):  # refused models are checked again
        with pytest.raises(ValueError, match=why):
            require_faithful_once(build(config_class, settings))


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
    kind, settings, _ = REFUSED["gpt-oss"]
    rows = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    build(kind, {**settings, **rows}).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="s_aux"):
        load_hub(ModelConfig(source="hub", name=str(tmp_path)))
