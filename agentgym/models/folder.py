"""Models in folders of the Hugging Face layout: exported, registered, or from the Hub."""

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
    """Load a folder in the format of `save_pretrained`, `agentgym export` or MLflow's transformers
    flavor. config: the dtype, and the chat settings if the folder has none.
    Errors: ConfigError if the folder has no such model; ValueError if it is not supported.
    """
    model_folder, tokenizer_folder = _parts(folder)
    if not (model_folder / "config.json").is_file() or not any(model_folder.glob(WEIGHTS)):
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
    for path in sorted(_parts(folder)[0].glob(WEIGHTS)):
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
    return digest.hexdigest()


def _parts(folder: Path) -> tuple[Path, Path]:
    """Return the folders of model and tokenizer; they differ only in MLflow's layout."""
    if (folder / MLFLOW_MODEL / "config.json").is_file():
        return folder / MLFLOW_MODEL, folder / MLFLOW_TOKENIZER
    return folder, folder
