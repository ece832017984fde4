"""A pretrained model in a folder that transformers wrote: trained, exported, loaded by
transformers; a damaged folder is refused with one line.
"""

import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.agentgym.families import save_tiny_llama, tokenizer_of
from tests.projects import SHORT_RUN

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
]  # may first have to make the finished project

# random weights solve no item
SHORT = ("warm_start.enabled=false", "alarms.no_success=off", *SHORT_RUN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a folder with `save_pretrained`: a Llama of 2 layers, Llama 3's chat template."""
    made = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny_llama(made)
    return made


def test_a_model_folder_is_trained_and_exported_as_a_folder_that_transformers_loads(
    finished, folder, tmp_path
):
    words = ("model.source=hub", f"model.name={folder}", *SHORT)
    ran = finished.pipeline(*words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    assert "gain: paired, over initial model" in said
    assert "time initial model " in said
    assert "model agentgym-babyai version 2 alias champion stays with version 1: HOLD: " in said
    *_, check = ran.stdout.splitlines()
    assert check.startswith("check    agentgym audit r")
    assert ran.stderr.strip() == ""

    out = tmp_path / "exported"
    options = [word for each in words for word in ("--set", each)]
    exported = finished.run("agentgym", "export", "stage-1", str(out), *options)
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout.startswith(f"{out}: stage-1 commit 0, digest ")
    before, after = map(AutoModelForCausalLM.from_pretrained, (folder, out))
    assert type(after) is LlamaForCausalLM
    assert after.state_dict().keys() == before.state_dict().keys()
    loaded = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "go to the red ball"}]
    assert loaded.apply_chat_template(chat) == tokenizer_of("llama3").apply_chat_template(chat)


def test_an_evaluation_of_a_pointer_to_a_tokenizer_ends_in_one_line_and_code_2(
    finished, folder, tmp_path
):
    broken = shutil.copytree(folder, tmp_path / "broken")
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1\n"
    (broken / "tokenizer.json").write_text(pointer)
    ended = finished.run("agentgym", "evaluate", str(broken))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"error: {broken}/tokenizer.json is a Git LFS pointer, not the file itself; run `git lfs"
        " pull` in its clone, or download it\n"
        "see docs/reference/errors-configuration.md#configerror\n"
    )


def test_a_run_of_a_folder_that_lacks_a_tensor_ends_in_one_line_and_code_2(
    finished, folder, tmp_path
):
    broken = shutil.copytree(folder, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    ended = finished.pipeline("model.source=hub", f"model.name={broken}", *SHORT)
    assert ended.returncode == 2, ended.stdout
    assert ended.stderr == (
        f"error: the weights of {broken} are not those of its config.json:"
        " model.layers.1.mlp.up_proj.weight missing; use a folder whose weights and config.json"
        " were saved together\n"
        "see docs/reference/errors-configuration.md#configerror\n"
    )
