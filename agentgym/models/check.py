"""Checks of a model before anything starts; torch is imported only for adapters."""

from __future__ import annotations

from agentgym.config import LoraConfig, ModelConfig
from agentgym.models.architecture import published_architecture


def check_model(config: ModelConfig, lora: LoraConfig) -> None:
    """Raise ConfigError if a published model is missing or not supported, or if the model lacks
    the layers that `lora` names.
    """
    published = published_architecture(config) if config.source == "hub" else None
    if lora.rank:
        from agentgym.models.adapter import chosen_modules
        from agentgym.models.empty import empty_model
        from agentgym.models.model import tiny_architecture

        architecture = published or tiny_architecture(config, vocab_size=config.vocab_size)
        chosen_modules(empty_model(architecture.to_json_string()), lora)
