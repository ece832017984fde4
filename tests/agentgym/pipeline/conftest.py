"""Fixtures: servers of two environments, a run that uses one of them, a model's
folder, and the starter environment, installed."""

import json
import os

import pytest

from agentgym.config import load_config
from tests.agentgym.pipeline.vendor import OPTIONS
from tests.starters import GAME


@pytest.fixture(scope="module")
def endpoints(serving):
    with (
        serving("babyai", OPTIONS) as (babyai, _),
        serving("textcraft", {"goals": ["paper", "melon seeds"], "distractors": 0}) as (
            textcraft,
            _,
        ),
    ):
        yield {"babyai": babyai, "textcraft": textcraft}


@pytest.fixture
def cfg(tmp_path, tiny_params, endpoints):
    return load_config(
        tiny_params(tmp_path, endpoint=endpoints["babyai"]),
        [f"env.options.{name}={json.dumps(value)}" for name, value in OPTIONS.items()],
    )


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, make_model, tokenizer, keep):
    from agentgym.models.checkpoint import new_checkpoint, save_pretrained

    folder = tmp_path_factory.mktemp("model") / "tiny"
    checkpoint = new_checkpoint(make_model(), tokenizer)
    save_pretrained(folder, *keep(checkpoint.snapshot(), checkpoint.files()))
    return folder


@pytest.fixture
def robot(install, tmp_path, monkeypatch):
    """Install the environment that `agentgym new environment robot` writes; return its file."""
    file = install("robot", GAME.substitute(name="robot"), "agentgym.envs", "robot", "robot:spec")
    path = os.pathsep.join([str(file.parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/params.yaml").write_text("seed: 1\n")
    monkeypatch.chdir(tmp_path / "work")
    return file
