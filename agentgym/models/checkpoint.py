"""Policies as files of a commit: architecture, weights, tokenizer, adapter."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt

from agentgym.config import ChatConfig, ConfigError, LoraConfig, ModelConfig
from agentgym.models.adapter import Adapter, chosen_modules, write_adapter
from agentgym.models.architecture import ADAPTER, ADAPTER_RECORD, CHAT, WEIGHTS, digest_of, files_of
from agentgym.models.chat import DEFAULT_CHAT, ChatRenderer
from agentgym.models.fidelity import require_faithful_once
from agentgym.models.model import (
    TokenizerFiles,
    empty_model,
    listed,
    load_hub,
    materialize,
    tokenizer_files,
    tokenizer_from_files,
    weights_of,
    write_tokenizer,
)
from agentgym.models.tensorfiles import Snapshot, StoredTensors, TensorFile, export_tensors
from agentgym.store.manifest import BlobMissing, Digest, Manifest
from agentgym.store.runstore import RunStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ARCHITECTURE, TOKENIZER = "config.json", "tokenizer.json"
OPTIMIZER = "optimizer.safetensors"
SHARD_BYTES = 5 * 10**9  # maximum size of one exported file of weights
CRITIC, CRITIC_OPTIMIZER = "critic.safetensors", "critic_optimizer.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A policy: tokenizer and configuration are in memory, the model is loaded on demand."""

    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer
    architecture: str  # config.json
    tokenizer_json: bytes
    weights: PreTrainedModel | StoredTensors
    # the adapter that turns its base into `weights`; engines then get only the adapter.
    # None: they get whole weights
    adapter: Adapter | None = None

    @cached_property
    def model(self) -> PreTrainedModel:
        """Model with these weights, loaded once per checkpoint.
        Errors: BlobMissing, DigestMismatch; ValueError if the model is not supported.
        """
        if not isinstance(self.weights, StoredTensors):
            return self.weights
        model = empty_model(self.architecture, self.dtype)
        materialize(model, torch.device("cpu"))
        tensors = weights_of(model)
        self.weights.require_fit(tensors)
        self.weights.fill(tensors)
        require_faithful_once(model)
        return model

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        if isinstance(self.weights, StoredTensors):
            return self.weights.dtype
        weight: torch.Tensor = next(self.weights.parameters())
        return weight.dtype

    def files(self) -> dict[str, bytes]:
        """Return name -> content of the policy's files other than the weights, for a commit."""
        return {ARCHITECTURE: self.architecture.encode(), TOKENIZER: self.tokenizer_json}

    def snapshot(self) -> Snapshot:
        """Return the model's weights, whole, not copied, as `model.safetensors` of a new commit."""
        return Snapshot({WEIGHTS: TensorFile.of(weights_of(self.model))})


def new_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig = DEFAULT_CHAT
) -> Checkpoint:
    """Make a checkpoint of a model and tokenizer, not copied. chat: stored with the tokenizer.
    Errors: ValueError if the chat template cannot be extended turn by turn.
    """
    files = tokenizer_files(tokenizer)
    if chat != DEFAULT_CHAT:
        files[CHAT] = chat.model_dump_json()
    text, architecture = json.dumps(files, sort_keys=True).encode(), model.config.to_json_string()
    renderer = _renderer(tokenizer, files, architecture)
    return Checkpoint(tokenizer, renderer, architecture, text, model)


def _renderer(
    tokenizer: PreTrainedTokenizerBase, files: TokenizerFiles, architecture: str
) -> ChatRenderer:
    chat = ChatConfig.model_validate_json(files.get(CHAT, "{}"))
    return ChatRenderer(tokenizer, chat, listed(json.loads(architecture).get("eos_token_id")))


def load_checkpoint(store: RunStore, manifest: Manifest) -> Checkpoint:
    """Return a commit's policy; its weights are read when `model` is first used.
    Errors: as `policy_of`; BlobMissing, DigestMismatch; ValueError for an unsupported tokenizer.
    """
    return stored_checkpoint(
        store.read(manifest, ARCHITECTURE).decode(),
        store.read(manifest, TOKENIZER),
        policy_of(store, manifest),
    )


def stored_checkpoint(
    architecture: str, tokenizer_json: bytes, weights: StoredTensors, adapter: Adapter | None = None
) -> Checkpoint:
    """Make a checkpoint of stored weights. architecture, adapter: see `Checkpoint`.
    tokenizer_json: all files of the tokenizer, as JSON {name: text}.
    Errors: ValueError if the tokenizer is not supported.
    """
    files, tokenizer = _stored_tokenizer(tokenizer_json)
    renderer = _renderer(tokenizer, files, architecture)
    return Checkpoint(tokenizer, renderer, architecture, tokenizer_json, weights, adapter)


@lru_cache(maxsize=1)  # an audit reads many commits with one tokenizer, which may load for seconds
def _stored_tokenizer(tokenizer_json: bytes) -> tuple[TokenizerFiles, PreTrainedTokenizerBase]:
    files: TokenizerFiles = json.loads(tokenizer_json)
    return files, tokenizer_from_files(files)


def policy_of(store: RunStore, manifest: Manifest) -> StoredTensors:
    """Return references to the weights of a commit's policy; an adapter is merged while reading.
    Errors: KeyError if the commit has none; as `adapter_of`.
    """
    adapter = adapter_of(store, manifest)
    return StoredTensors.of(store, manifest, WEIGHTS) if adapter is None else adapter.policy


class AdapterRecord(BaseModel):
    """A commit's record of its adapter: the base weights and the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_step: str
    base_key: Digest
    base_weights: Digest  # sha256, see `digest_of`
    rank: PositiveInt
    alpha: PositiveInt
    target_modules: tuple[str, ...]

    @classmethod
    def of(cls, adapter: Adapter) -> Self:
        base = adapter.base.manifest
        return cls(
            base_step=base.step,
            base_key=base.key,
            base_weights=digest_of(base, WEIGHTS),
            rank=adapter.rank,
            alpha=adapter.alpha,
            target_modules=adapter.target_modules,
        )


def adapter_of(store: RunStore, manifest: Manifest) -> Adapter | None:
    """Return the adapter in a commit, None if it has none.
    Errors: BlobMissing, also of the base; DigestMismatch; ValueError for an unreadable record.
    """
    if not files_of(manifest, ADAPTER):
        return None
    record = AdapterRecord.model_validate_json(store.read(manifest, ADAPTER_RECORD))
    base = store.final(record.base_step, record.base_key)
    if base is None or digest_of(base, WEIGHTS) != record.base_weights:
        raise BlobMissing(
            f"step {manifest.step} commit {manifest.seq} is an adapter of the weights"
            f" {record.base_weights[:12]} of step {record.base_step} ({record.base_key[:12]}),"
            " which are not in the store; run that step again"
        )
    weights = StoredTensors.of(store, base, WEIGHTS)
    stored = StoredTensors.of(store, manifest, ADAPTER)
    return Adapter(weights, record.rank, record.alpha, record.target_modules, stored=stored)


def adapter_for(store: RunStore, manifest: Manifest, lora: LoraConfig, seed: int) -> Adapter:
    """Return the adapter in a commit, whatever `lora` is; without one, a new adapter on top of the
    commit's weights, drawn from `seed`. Errors: as `adapter_of`; ConfigError as `chosen_modules`.
    """
    adapter = adapter_of(store, manifest)
    if adapter is not None:
        return adapter
    base = StoredTensors.of(store, manifest, WEIGHTS)
    model = empty_model(store.read(manifest, ARCHITECTURE).decode(), base.dtype)
    return Adapter(base, lora.rank, lora.alpha, chosen_modules(model, lora), seed)


def save_pretrained(folder: Path, store: RunStore, manifest: Manifest) -> None:
    """Write a commit's policy as an ordinary Hugging Face model folder, which vLLM, transformers
    and the registry load. Large weights are split into several files with an index.
    Errors: BlobMissing, DigestMismatch.
    """
    weights = policy_of(store, manifest)
    weights.verify()
    tokenizer: TokenizerFiles = json.loads(store.read(manifest, TOKENIZER))
    folder.mkdir(parents=True, exist_ok=True)
    architecture = store.read(manifest, ARCHITECTURE).decode()
    # TRL and others load a model by its class; transformers itself uses model_type
    named = {"architectures": [type(empty_model(architecture)).__name__]}
    text = json.dumps({**json.loads(architecture), **named}, indent=2, sort_keys=True)
    (folder / ARCHITECTURE).write_text(f"{text}\n", encoding="utf-8")
    # always with chat settings: they mark a folder that was trained here
    write_tokenizer(folder, {CHAT: DEFAULT_CHAT.model_dump_json(), **tokenizer})
    export_tensors(weights, folder, SHARD_BYTES)


def save_adapter(folder: Path, adapter: Adapter, base_name: str | None) -> None:
    """Write an adapter, whose matrices must be stored, as `write_adapter` does.
    Errors: BlobMissing, DigestMismatch.
    """
    assert adapter.stored is not None
    write_adapter(folder, adapter.settings, adapter.stored.load(), base_name)


SAFETENSORS = "*.safetensors"
MLFLOW_MODEL, MLFLOW_TOKENIZER = "model", "components/tokenizer"
PIECE = 1 << 20


def load_folder(folder: Path, config: ModelConfig) -> Checkpoint:
    """Load a folder in the format of `save_pretrained`, `agentgym export` or MLflow's transformers
    flavor. config: gives the dtype, the context, and the chat settings if the folder has none.
    Errors: ConfigError if the folder has no such model; ValueError if it is not supported.
    """
    model_folder, tokenizer_folder = _parts(folder)
    if not (model_folder / "config.json").is_file() or not any(model_folder.glob(SAFETENSORS)):
        raise ConfigError(
            f"{folder} holds no config.json with safetensors next to it; name a folder that"
            " `save_pretrained` or `agentgym export` wrote"
        )
    named = config.model_copy(update={"source": "hub", "name": str(model_folder), "revision": None})
    model, tokenizer = load_hub(named, tokenizer_folder)
    path = tokenizer_folder / CHAT
    chat = ChatConfig.model_validate_json(path.read_bytes()) if path.is_file() else config.chat
    return new_checkpoint(model, tokenizer, chat or DEFAULT_CHAT)


def is_of_ours(folder: Path) -> bool:
    """Return True for a model that was trained here: it has chat settings or MLflow's layout."""
    return (_parts(folder)[1] / CHAT).is_file() or (folder / MLFLOW_MODEL).is_dir()


def folder_digest(folder: Path) -> str:
    """sha256 of the contents of the safetensors files, in order of their names."""
    digest = hashlib.sha256()
    for path in sorted(_parts(folder)[0].glob(SAFETENSORS)):
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
    return digest.hexdigest()


def _parts(folder: Path) -> tuple[Path, Path]:
    """Return the folders of model and tokenizer; they differ only in MLflow's layout."""
    if (folder / MLFLOW_MODEL / "config.json").is_file():
        return folder / MLFLOW_MODEL, folder / MLFLOW_TOKENIZER
    return folder, folder
