"""Errors about incomplete model files name the file."""

import json

import numpy as np
import pytest
from safetensors.numpy import save

from agentgym.config import ConfigError
from agentgym.models.architecture import require_weights, require_whole, weight_files

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1\n".encode()
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
TENSORS = save({"a": np.arange(6.0), "b": np.ones((2, 3), np.float16)}, {"format": "pt"})
SMALL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": '{"é": 1}'.encode(),
    "tokenizer_config.json": b"{}",
    "merges.txt": b"",
    "chat_template.jinja": b"{{ messages }}",
}
ONE_FILE = {**SMALL, "model.safetensors": TENSORS}
SHARDED = {
    **SMALL,
    **dict.fromkeys(SHARDS, TENSORS),
    INDEX: json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode(),
}


def written(folder, files):
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_whole_folders_pass_and_their_weights_are_found(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "more").mkdir()
    one, more = written(tmp_path / "one", ONE_FILE), written(tmp_path / "more", SHARDED)
    for folder in (one, more):
        require_weights(folder, "model.name")
        require_whole(folder)
    assert [path.name for path in weight_files(one)] == ["model.safetensors"]
    assert [path.name for path in weight_files(more)] == [*SHARDS]
    (more / "trainer_state.json").write_bytes(POINTER)  # not needed
    require_whole(more)


@pytest.mark.parametrize(
    ("files", "name"),
    [*((ONE_FILE, name) for name in ONE_FILE), *((SHARDED, name) for name in (SHARDS[1], INDEX))],
)
def test_a_git_lfs_pointer_is_refused_by_the_files_name(tmp_path, files, name):
    written(tmp_path, {**files, name: POINTER})
    with pytest.raises(ConfigError, match=rf"/{name} is a Git LFS pointer, not the file itself"):
        require_whole(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", b'{"model_type": "lla', "it is not JSON"),
        ("tokenizer.json", b"", r"it is not JSON \(Expecting value"),
        ("tokenizer.json", '{"é": 1}'.encode()[:3], "it is not JSON"),
        ("tokenizer.json", b"[" * 100_000, "it is not JSON"),
        ("model.safetensors", TENSORS[:-1], f"{len(TENSORS) - 1} bytes, expected {len(TENSORS)}"),
        ("model.safetensors", TENSORS + b"\0", f"{len(TENSORS) + 1} bytes, expected"),
        ("model.safetensors", TENSORS[:50], "50 bytes do not hold its header"),
        ("model.safetensors", b"", "0 bytes do not hold its header"),
        ("model.safetensors", b"<!DOCTYPE html><html>", "21 bytes do not hold its header"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]", "header is no JSON object"),
        (SHARDS[0], TENSORS[:-8], f"{len(TENSORS) - 8} bytes, expected {len(TENSORS)}"),
        (INDEX, b'{"weight_map": ', "it is not JSON"),
    ],
)
def test_a_file_that_is_cut_off_or_damaged_is_refused_by_name(tmp_path, name, content, reason):
    written(tmp_path, {**(SHARDED if name in SHARDED else ONE_FILE), name: content})
    with pytest.raises(ConfigError, match=rf"/{name} is cut off or damaged: .*{reason}") as refused:
        require_whole(tmp_path)
    assert "\n" not in str(refused.value)


def test_an_index_without_its_files_is_refused(tmp_path):
    written(tmp_path, SHARDED)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(ConfigError, match=f"names '{SHARDS[1]}', which is not in the folder"):
        require_whole(tmp_path)
    for text in (b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": {}}}'):
        (tmp_path / INDEX).write_bytes(text)
        with pytest.raises(ConfigError, match="has no weight_map of file names"):
            require_whole(tmp_path)


def test_weights_under_a_name_that_is_not_loaded_are_named(tmp_path):
    written(tmp_path, {"consolidated.safetensors": TENSORS})
    with pytest.raises(ConfigError, match=r"holds consolidated\.safetensors, neither model"):
        require_weights(tmp_path, "model.name x")
