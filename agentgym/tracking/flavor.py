"""A model in MLflow's transformers flavor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

CARD = ("algorithm", "step_key", "weights.sha256")  # tags shown on a model's card
TASK = "llm/v1/chat"  # one of MLflow's tasks for transformers


def save_flavor(
    model_dir: Path,
    path: Path,
    record: Any,
    *,
    name: str,
    tags: Mapping[str, str],
    task: str = TASK,
) -> None:
    """Save a model's folder at `path` in MLflow's transformers format, without the hub."""
    import mlflow.transformers
    from huggingface_hub import ModelCard
    from mlflow.utils import requirements_utils
    from transformers import AutoModelForCausalLM

    from agentgym.models.model import no_progress_bar

    # an empty cache makes MLflow scan all installed packages, only for a version warning
    requirements_utils._MODULES_TO_PACKAGES = requirements_utils._MODULES_TO_PACKAGES or {}
    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(
            model_dir,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="sdpa",
        )
        # MLflow would look for a license in a repository of this name
        model.name_or_path = f"models:/{name}"
        card = [
            "---",
            "library_name: transformers",
            "---",
            "",
            f"# {name}",
            "",
            *(f"- {key}: {tags[key]}" for key in CARD if key in tags),
            "",
        ]
        mlflow.transformers.save_model(
            {"model": model, "tokenizer": _load_tokenizer(model_dir)},
            path=str(path),
            task=task,
            mlflow_model=record,
            pip_requirements=[
                f"{package}=={installed_version(package).partition('+')[0]}"
                for package in ("torch", "transformers")
            ],
            model_card=ModelCard("\n".join(card)),
        )
        # MLflow's guess links to a page that does not exist
        (path / "LICENSE.txt").unlink(missing_ok=True)


def _load_tokenizer(model_dir: Path) -> Any:
    """Load a tokenizer as it was trained.

    AutoTokenizer prefers the model family's class over the one the folder declares, and that class
    rebuilds its own splitting of text: our own tokenizer would return other ids.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = model_dir / "tokenizer_config.json"
    declared = json.loads(path.read_bytes()).get("tokenizer_class") if path.is_file() else None
    generic = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(
        model_dir, local_files_only=True, trust_remote_code=False
    )
