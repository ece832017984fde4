"""What must hold of a model before anything starts; torch is imported for adapters alone."""

from __future__ import annotations

from agentgym.config import LoraConfig, ModelConfig
from agentgym.models.architecture import published_architecture


def check_model(config: ModelConfig, lora: LoraConfig) -> None:
    """Errors: ConfigError where a handed-over model is not there or not supported, or the model
    has no such layers as `lora` asks for.
    """
    published = published_architecture(config) if config.source == "hub" else None
    if lora.rank:
        from agentgym.models.adapter import chosen_modules
        from agentgym.models.empty import empty_model
        from agentgym.models.model import tiny_architecture

        architecture = published or tiny_architecture(config, vocab_size=config.vocab_size)
        chosen_modules(empty_model(architecture.to_json_string()), lora)
