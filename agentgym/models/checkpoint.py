"""A policy as blobs of a manifest: architecture, weights, tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agentgym.models.chat import ChatRenderer
from agentgym.models.fidelity import require_faithful
from agentgym.models.model import (
    TokenizerFiles,
    model_from_blobs,
    tokenizer_files,
    tokenizer_from_files,
    weights_blob,
)
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


ARCHITECTURE, WEIGHTS, TOKENIZER, OPTIMIZER = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "optimizer.safetensors",
)
CRITIC, CRITIC_OPTIMIZER = "critic.safetensors", "critic_optimizer.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A loaded policy."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer
    architecture: str  # config.json
    tokenizer_json: bytes

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        weight: torch.Tensor = next(self.model.parameters())
        return weight.dtype

    def files(self) -> dict[str, bytes]:
        """What a commit holds beside the weights."""
        return {ARCHITECTURE: self.architecture.encode(), TOKENIZER: self.tokenizer_json}

    def blobs(self) -> dict[str, bytes]:
        """What a commit of the present weights holds."""
        return {**self.files(), WEIGHTS: weights_blob(self.model)}


def new_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Checkpoint:
    """Wrap a model and its tokenizer.
    Errors: ValueError where the chat template cannot be extended turn by turn.
    """
    files = json.dumps(tokenizer_files(tokenizer), sort_keys=True).encode()
    return Checkpoint(
        model, tokenizer, ChatRenderer(tokenizer), model.config.to_json_string(), files
    )


def checkpoint_from_blobs(architecture: str, tokenizer_json: bytes, weights: bytes) -> Checkpoint:
    """Errors: ValueError where the model is not supported here."""
    files: TokenizerFiles = json.loads(tokenizer_json)
    tokenizer = tokenizer_from_files(files)
    model = model_from_blobs(architecture, weights)
    return Checkpoint(model, tokenizer, ChatRenderer(tokenizer), architecture, tokenizer_json)


def load_checkpoint(store: RunStore, manifest: Manifest) -> Checkpoint:
    """Errors: BlobMissing, DigestMismatch; ValueError where the model is not supported here."""
    checkpoint = checkpoint_from_blobs(
        store.read(manifest, ARCHITECTURE).decode(),
        store.read(manifest, TOKENIZER),
        store.read(manifest, WEIGHTS),
    )
    require_faithful(checkpoint.model)
    return checkpoint
