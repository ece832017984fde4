"""A model that is a folder of the Hugging Face layout: exported, registered, or of the Hub."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from agentgym.config import ChatConfig, ConfigError, ModelConfig
from agentgym.models.chat import DEFAULT_CHAT
from agentgym.models.checkpoint import Checkpoint, new_checkpoint
from agentgym.models.model import (
    CHAT,
    TOKENIZER_NAMES,
    load_hub,
    tokenizer_from_files,
)

WEIGHTS = "*.safetensors"
# classes that rebuild nothing: such a tokenizer is what its own files say, whatever model it is of
GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
MLFLOW_MODEL, MLFLOW_TOKENIZER = "model", "components/tokenizer"
PIECE = 1 << 20


def load_folder(folder: Path, config: ModelConfig) -> Checkpoint:
    """A folder as `save_pretrained`, `agentgym export` or MLflow's transformers flavor write it.
    config: the dtype and the chat, where the folder says none of its own.
    Errors: ConfigError where it holds no such model; ValueError where it is not supported here.
    """
    model_folder, tokenizer_folder = _parts(folder)
    if not (model_folder / "config.json").is_file() or not any(model_folder.glob(WEIGHTS)):
        raise ConfigError(
            f"{folder} holds no config.json with safetensors beside it; name a folder that"
            " `save_pretrained` or `agentgym export` wrote"
        )
    named = config.model_copy(update={"source": "hub", "name": str(model_folder), "revision": None})
    model, tokenizer = load_hub(named, tokenizer_folder)
    files = {
        name: (tokenizer_folder / name).read_text(encoding="utf-8")
        for name in TOKENIZER_NAMES
        if (tokenizer_folder / name).is_file()
    }
    declared = json.loads(files.get("tokenizer_config.json", "{}")).get("tokenizer_class")
    if declared in GENERIC:
        tokenizer = tokenizer_from_files(files)
    chat = ChatConfig.model_validate_json(files[CHAT]) if CHAT in files else config.chat
    return new_checkpoint(model, tokenizer, chat or DEFAULT_CHAT)


def is_of_ours(folder: Path) -> bool:
    """Return True for a checkpoint that was trained here: it says how conversations are written."""
    return (_parts(folder)[1] / CHAT).is_file() or (folder / MLFLOW_MODEL).is_dir()


def folder_digest(folder: Path) -> str:
    """Of the weights, whichever place they lie in."""
    digest = hashlib.sha256()
    for path in sorted(_parts(folder)[0].glob(WEIGHTS)):
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
    return digest.hexdigest()


def _parts(folder: Path) -> tuple[Path, Path]:
    """Where model and tokenizer lie."""
    if (folder / MLFLOW_MODEL / "config.json").is_file():
        return folder / MLFLOW_MODEL, folder / MLFLOW_TOKENIZER
    return folder, folder
