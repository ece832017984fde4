"""Checks of a published model's configuration before loading it, without importing torch."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.config import ConfigError, ModelConfig
from agentgym.models.model_files import require_weights, require_whole

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# keys of a config.json that select code to run, on the Hub or in the model's folder; we choose the
# code ourselves
_NAMES_CODE = re.compile(r"_?(attn|experts)_implementation(_internal)?|auto_map|custom_pipelines")
_DTYPES = ("float32", "float16", "bfloat16")
LAYERS = ("full_attention", "sliding_attention")


def published_architecture(config: ModelConfig, *, local_only: bool = False) -> Any:
    """Read transformers' configuration of a published model, without its weights.

    local_only: read folders and the Hub's cache only, without network access.
    Errors: ConfigError if there is none, if a folder has no safetensors or a damaged file, if the
    architecture is not supported or has fewer positions than `config.context_tokens`; as
    `read_architecture`.
    """
    from transformers import PretrainedConfig

    folder = Path(config.name)
    if folder.is_dir():
        require_weights(folder, f"model.name {config.name}")
        require_whole(folder)
    try:
        text, _ = PretrainedConfig.get_config_dict(
            config.name, revision=config.revision, local_files_only=local_only
        )
        if not text:
            raise OSError("it has no config.json")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.name {config.name!r} is neither a folder with a model nor a repository that can"
            f" be read: {reason}"
        ) from None
    architecture = read_architecture(json.dumps(text))
    for reason in unsupported(architecture):
        raise ConfigError(f"model.name {config.name!r}: {reason}; use a model without it")
    require_positions(architecture, config.context_tokens, f"model.name {config.name!r}")
    return architecture


def require_positions(config: PretrainedConfig, context_tokens: int, name: str) -> None:
    """Raise ConfigError if an episode may become longer than the model's positions allow.
    name: of the model, for the error text.
    """
    limit = num_positions(config)
    if limit is not None and context_tokens > limit:
        raise ConfigError(
            f"context_tokens {context_tokens} is above the {limit} positions of {name}; lower"
            " model.context_tokens (agentgym evaluate: --context-tokens) or use a model with more"
        )


def num_positions(config: PretrainedConfig) -> int | None:
    """Return the number of tokens that a model's positions allow; None if unlimited.

    `max_position_embeddings` already includes the scaling of rotary positions, except for YaRN
    that a user adds to a config.json as Qwen's model cards describe: there `factor` extends the
    original number.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    extended = [
        int(rope["factor"] * rope["original_max_position_embeddings"])
        for rope in _ropes(text)
        if rope.get("rope_type") == "yarn" and rope.get("factor")
    ]
    return max([limit, *extended])


def read_architecture(text: str) -> Any:
    """Parse a config.json into transformers' object, without the keys that select code: attention
    implementations and Python files.

    Errors: ConfigError if it is no JSON object with a model_type, for quantized weights and for
    unknown dtypes; ValueError for a model_type that transformers does not know.
    """
    from transformers import AutoConfig

    try:
        tree = json.loads(text, object_pairs_hook=_without_code)
    except ValueError as error:
        raise ConfigError(f"the model's config.json is not JSON: {error}") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("model_type"), str):
        raise ConfigError(
            "the model's config.json names no model_type; expected that of an architecture"
            " transformers knows, such as qwen2"
        )
    if tree.get("quantization_config") is not None:
        raise ConfigError(
            "the model's config.json has a quantization_config; quantized weights are not trained"
            " here, name the original model"
        )
    for key in ("dtype", "torch_dtype"):
        if tree.get(key) is not None and str(tree[key]).removeprefix("torch.") not in _DTYPES:
            raise ConfigError(
                f"the model's config.json has {key} {str(tree[key])[:40]!r}; expected one of"
                f" {', '.join(_DTYPES)}"
            )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(tree), encoding="utf-8")
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _without_code(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if not _NAMES_CODE.fullmatch(key)}


def unsupported(config: PretrainedConfig) -> Iterator[str]:
    """Yield unsupported features, in words, that a comparison on short sequences would miss."""
    text = config.get_text_config(decoder=True)
    for kind in sorted(set(getattr(text, "layer_types", None) or ()) - set(LAYERS)):
        yield f"layers of type {kind!r} are not supported"
    if getattr(text, "attention_chunk_size", None):
        yield "attention in chunks (attention_chunk_size) is not supported"
    for rope in _ropes(text):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            yield (
                f"rope_type {rope['rope_type']!r} depends on the longest sequence of a batch, which"
                " learner and engine do not share"
            )


def _ropes(text: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield rotary position settings: of all layers, then of each type of layer, if they differ."""
    rope = getattr(text, "rope_parameters", None) or {}
    yield rope
    yield from (value for value in rope.values() if isinstance(value, dict))
