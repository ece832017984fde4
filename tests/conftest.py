"""A tiny tokenizer and tiny models: real ones, small enough for every test."""

import copy

import pytest

TEXTS = ["you see a red ball", "turn left", "turn right", "move forward", "task: go to the red ball 2 steps ahead", "invalid action"] * 3


@pytest.fixture(scope="session")
def tokenizer():
    from agentgym.training.model import set_threads, train_tokenizer

    set_threads()
    return train_tokenizer(TEXTS, 300)


@pytest.fixture(scope="session")
def make_model(tokenizer):
    """make_model(seed) -> a Qwen2 of 2 layers whose distributions are far from uniform."""
    import torch

    from agentgym.config import ModelConfig
    from agentgym.training.model import new_model

    def make(seed=0):
        config = ModelConfig(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, mlp_size=96, context_tokens=256)
        model = new_model(config, vocab_size=len(tokenizer), eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id, seed=seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(5)  # initial weights of 0.02 would hide a wrong mask or position
        return model

    return make


@pytest.fixture(scope="session")
def plain():
    """plain(model) -> the same weights under Hugging Face's own attention."""
    import torch
    from transformers import AutoModelForCausalLM

    from agentgym.training.model import load_weights, weights_of

    def make(model):
        with torch.random.fork_rng():
            config = copy.deepcopy(model.config)  # from_config writes the attention into it
            twin = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        load_weights(twin, weights_of(model))
        return twin

    return make
