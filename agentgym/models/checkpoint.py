"""A policy as blobs of a manifest: architecture, weights, tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentgym.config import ChatConfig
from agentgym.models.chat import DEFAULT_CHAT, ChatRenderer
from agentgym.models.empty import empty_model, materialize
from agentgym.models.fidelity import require_faithful
from agentgym.models.model import (
    CHAT,
    TokenizerFiles,
    listed,
    tokenizer_files,
    tokenizer_from_files,
    weights_of,
    write_tokenizer,
)
from agentgym.models.tensorfiles import (
    Snapshot,
    StoredTensors,
    TensorFile,
    export_tensors,
    files_of,
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
SHARD_BYTES = 5 * 10**9  # of one file of weights that leave the store
CRITIC, CRITIC_OPTIMIZER = "critic.safetensors", "critic_optimizer.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A policy: what is small of it is here, its model is loaded where it is asked for."""

    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer
    architecture: str  # config.json
    tokenizer_json: bytes
    weights: PreTrainedModel | StoredTensors

    @cached_property
    def model(self) -> PreTrainedModel:
        """One of its own. Errors: BlobMissing, DigestMismatch; ValueError where the model is not
        supported here.
        """
        if not isinstance(self.weights, StoredTensors):
            return self.weights
        model = empty_model(self.architecture, self.dtype)
        materialize(model, torch.device("cpu"))
        tensors = weights_of(model)
        self.weights.require_fit(tensors)
        self.weights.fill(tensors)
        require_faithful(model)
        return model

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        if isinstance(self.weights, StoredTensors):
            return self.weights.dtype
        weight: torch.Tensor = next(self.weights.parameters())
        return weight.dtype

    def files(self) -> dict[str, bytes]:
        """What a commit holds beside the weights."""
        return {ARCHITECTURE: self.architecture.encode(), TOKENIZER: self.tokenizer_json}

    def snapshot(self) -> Snapshot:
        """The weights of a model that was made here."""
        return Snapshot({WEIGHTS: TensorFile.of(weights_of(self.model))})


def new_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatConfig = DEFAULT_CHAT,
) -> Checkpoint:
    """Wrap a model and its tokenizer.
    Errors: ValueError where the chat template cannot be extended turn by turn.
    """
    files = tokenizer_files(tokenizer)
    if chat != DEFAULT_CHAT:
        files[CHAT] = chat.model_dump_json()
    text = json.dumps(files, sort_keys=True).encode()
    architecture = model.config.to_json_string()
    return Checkpoint(
        tokenizer, _renderer(tokenizer, files, architecture), architecture, text, model
    )


def _renderer(
    tokenizer: PreTrainedTokenizerBase, files: TokenizerFiles, architecture: str
) -> ChatRenderer:
    chat = ChatConfig.model_validate_json(files.get(CHAT, "{}"))
    return ChatRenderer(tokenizer, chat, listed(json.loads(architecture).get("eos_token_id")))


def load_checkpoint(store: RunStore, manifest: Manifest) -> Checkpoint:
    """Errors: BlobMissing, DigestMismatch; ValueError where the tokenizer is not supported here."""
    return stored_checkpoint(
        store.read(manifest, ARCHITECTURE).decode(),
        store.read(manifest, TOKENIZER),
        StoredTensors.of(store, manifest, WEIGHTS),
    )


def stored_checkpoint(
    architecture: str, tokenizer_json: bytes, weights: StoredTensors
) -> Checkpoint:
    """Errors: ValueError where the tokenizer is not supported here."""
    files: TokenizerFiles = json.loads(tokenizer_json)
    tokenizer = tokenizer_from_files(files)
    renderer = _renderer(tokenizer, files, architecture)
    return Checkpoint(tokenizer, renderer, architecture, tokenizer_json, weights)


def has_weights(manifest: Manifest) -> bool:
    """Whether a commit holds a policy."""
    return bool(files_of(manifest, WEIGHTS))


def save_pretrained(folder: Path, store: RunStore, manifest: Manifest) -> None:
    """Write a commit's policy as an ordinary Hugging Face model folder: what vLLM, transformers
    and the registry load; large weights in several files and their index.
    Errors: BlobMissing, DigestMismatch.
    """
    weights = StoredTensors.of(store, manifest, WEIGHTS)
    weights.verify()
    tokenizer: TokenizerFiles = json.loads(store.read(manifest, TOKENIZER))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ARCHITECTURE).write_bytes(store.read(manifest, ARCHITECTURE))
    write_tokenizer(folder, tokenizer)
    export_tensors(weights, folder, SHARD_BYTES)
