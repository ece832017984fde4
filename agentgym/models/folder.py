"""A model that is a folder of the Hugging Face layout: exported, registered, or of the Hub."""

from __future__ import annotations

import hashlib
from pathlib import Path

from agentgym.config import ChatConfig, ConfigError, ModelConfig
from agentgym.models.chat import DEFAULT_CHAT
from agentgym.models.checkpoint import Checkpoint, new_checkpoint
from agentgym.models.files import CHAT
from agentgym.models.model import load_hub

WEIGHTS = "*.safetensors"
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
    path = tokenizer_folder / CHAT
    chat = ChatConfig.model_validate_json(path.read_bytes()) if path.is_file() else config.chat
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
