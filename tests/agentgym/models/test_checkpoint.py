"""An inconsistent model folder ends a command with one line and exit code 2."""

import json

import pytest
from safetensors.torch import load_file, save_file

from agentgym.cli import main
from agentgym.config import ModelConfig, load_config
from agentgym.models.architecture import CHAT
from agentgym.models.checkpoint import load_folder, new_checkpoint, save_pretrained
from agentgym.pipeline.run import run_step

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1\n"


@pytest.fixture
def folder(tmp_path, make_model, tokenizer, keep):
    made = new_checkpoint(make_model(), tokenizer)
    save_pretrained(tmp_path / "model", *keep(made.snapshot(), made.files()))
    return tmp_path / "model"


def lfs_tokenizer(folder):
    (folder / "tokenizer.json").write_text(POINTER)


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def missing_layer(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def changed_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


BROKEN = {
    "lfs_tokenizer": (lfs_tokenizer, "tokenizer.json is a Git LFS pointer"),
    "cut_weights": (cut_weights, "model.safetensors is cut off"),
    "missing_layer": (missing_layer, "model.layers.1.mlp.up_proj.weight missing"),
    "small_embedding": (changed_config(vocab_size=90), "has more ids than its embedding has rows"),
    "few_positions": (
        changed_config(max_position_embeddings=64),
        "context_tokens 512 is above the 64 positions",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_evaluation_of_a_broken_folder_ends_in_one_line_and_code_2(
    folder, name, tmp_path, tiny_params, capsys
):
    damage, told = BROKEN[name]
    damage(folder)
    params = tiny_params(tmp_path / "run")
    code = main(["evaluate", str(folder), "--params", str(params)])
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "error: " in each]
    assert line.startswith("error: ")
    assert told in line, line
    assert code == 2


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tiny_params):
    """Params file of a run whose first step is done; its model does not exist."""
    model = {"source": "hub", "name": "somebody/model", "context_tokens": 512}
    changes = {"model": model, "warm_start": {"enabled": False}}
    params = tiny_params(tmp_path_factory.mktemp("prepared"), **changes)
    run_step("prepare", load_config(params))
    return params


@pytest.mark.integration
@pytest.mark.parametrize("name", BROKEN)
def test_a_run_of_a_broken_folder_ends_in_one_line_and_code_2(folder, name, prepared, capsys):
    damage, told = BROKEN[name]
    damage(folder)
    model = f"model.name={folder}"
    code = main(["step", "initialize", "--params", str(prepared), "--set", model])
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "error: " in each]
    assert line.startswith("error: ")
    assert told in line, line
    assert code == 2


def test_a_folder_of_mlflows_layout_is_loaded_with_its_own_chat(folder, tmp_path):
    (tmp_path / "registered/components").mkdir(parents=True)
    folder.rename(tmp_path / "registered/model")
    tokenizer = tmp_path / "registered/components/tokenizer"
    tokenizer.mkdir()
    for path in sorted((tmp_path / "registered/model").iterdir()):
        if path.name not in ("config.json", "model.safetensors"):
            path.rename(tokenizer / path.name)
    (tokenizer / CHAT).write_text('{"history": "append"}')
    loaded = load_folder(tmp_path / "registered", ModelConfig())
    assert json.loads(json.loads(loaded.tokenizer_json)[CHAT])["history"] == "append"
    lfs_tokenizer(tokenizer)
    with pytest.raises(ValueError, match=r"components/tokenizer/tokenizer\.json is a Git LFS"):
        load_folder(tmp_path / "registered", ModelConfig())
