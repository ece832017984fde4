"""Files of a model, without torch: names in a commit, and checks of a published folder."""

from __future__ import annotations

import fnmatch
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.config import ConfigError, ModelConfig
from agentgym.store.manifest import Manifest, sha256

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER, ADAPTER_RECORD = "adapter.safetensors", "adapter.json"
CHAT = "chat.json"  # the ChatConfig of the model's conversations, unless it is the default
TOKENIZER_NAMES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "chat_template.jinja",
        CHAT,
    }
)
# files that are read in a folder, in addition to its weights
SMALL_NAMES = TOKENIZER_NAMES | {"config.json", "generation_config.json", "tokenizer.model"}
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer headers
# keys of a config.json that select code to run, on the Hub or in the model's folder; we choose the
# code ourselves
_NAMES_CODE = re.compile(r"_?(attn|experts)_implementation(_internal)?|auto_map|custom_pipelines")
_DTYPES = ("float32", "float16", "bfloat16")
LAYERS = ("full_attention", "sliding_attention")


def published_architecture(config: ModelConfig, *, local_only: bool = False) -> Any:
    """Return transformers' configuration of a published model, without loading its weights.

    local_only: read folders and the Hub's cache only, without network access.
    Errors: ConfigError if there is none, if a folder has no safetensors or a damaged file, if the
    architecture is not supported or has fewer positions than `config.context_tokens`; those of
    `read_architecture`.
    """
    from transformers import PretrainedConfig

    folder = Path(config.name)
    if folder.is_dir():
        require_weights(folder, f"model.name {config.name}")
        require_whole(folder)
    try:
        text, _ = PretrainedConfig.get_config_dict(
            config.name, revision=config.revision, local_files_only=local_only
        )
        if not text:
            raise OSError("it has no config.json")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.name {config.name!r} is neither a folder with a model nor a repository that can"
            f" be read: {reason}"
        ) from None
    architecture = read_architecture(json.dumps(text))
    for reason in unsupported(architecture):
        raise ConfigError(f"model.name {config.name!r}: {reason}; use a model without it")
    require_positions(architecture, config.context_tokens, f"model.name {config.name!r}")
    return architecture


def require_positions(config: PretrainedConfig, context_tokens: int, name: str) -> None:
    """Raise ConfigError if `context_tokens` is above the number of positions of the model.
    name: text that stands for the model in the error.
    """
    limit = num_positions(config)
    if limit is not None and context_tokens > limit:
        raise ConfigError(
            f"context_tokens {context_tokens} is above the {limit} positions of {name}; lower"
            " model.context_tokens (agentgym evaluate: --context-tokens) or use a model with more"
        )


def num_positions(config: PretrainedConfig) -> int | None:
    """Return the number of tokens that a model's positions allow; None if it states no limit.

    `max_position_embeddings` already includes the scaling of rotary positions, except for YaRN
    that a user adds as Qwen's model cards describe: there `factor` extends the original number.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    extended = [
        int(rope["factor"] * rope["original_max_position_embeddings"])
        for rope in _ropes(text)
        if rope.get("rope_type") == "yarn" and rope.get("factor")
    ]
    return max([limit, *extended])


def read_architecture(text: str) -> Any:
    """Return transformers' configuration of a config.json text. Keys that select code (attention
    implementations, Python files) are dropped.

    Errors: ConfigError if it is no JSON object with a model_type, for quantized weights and for
    unknown dtypes; ValueError for a model_type that transformers does not know.
    """
    from transformers import AutoConfig

    try:
        tree = json.loads(text, object_pairs_hook=_without_code)
    except ValueError as error:
        raise ConfigError(f"the model's config.json is not JSON: {error}") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("model_type"), str):
        raise ConfigError(
            "the model's config.json names no model_type; expected that of an architecture"
            " transformers knows, such as qwen2"
        )
    if tree.get("quantization_config") is not None:
        raise ConfigError(
            "the model's config.json has a quantization_config; quantized weights are not trained"
            " here, name the original model"
        )
    for key in ("dtype", "torch_dtype"):
        if tree.get(key) is not None and str(tree[key]).removeprefix("torch.") not in _DTYPES:
            raise ConfigError(
                f"the model's config.json has {key} {str(tree[key])[:40]!r}; expected one of"
                f" {', '.join(_DTYPES)}"
            )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(tree), encoding="utf-8")
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _without_code(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if not _NAMES_CODE.fullmatch(key)}


def unsupported(config: PretrainedConfig) -> Iterator[str]:
    """Yield an error text for each unsupported feature that a test with short sequences misses."""
    text = config.get_text_config(decoder=True)
    for kind in sorted(set(getattr(text, "layer_types", None) or ()) - set(LAYERS)):
        yield f"layers of type {kind!r} are not supported"
    if getattr(text, "attention_chunk_size", None):
        yield "attention in chunks (attention_chunk_size) is not supported"
    for rope in _ropes(text):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            yield (
                f"rope_type {rope['rope_type']!r} depends on the longest sequence of a batch, which"
                " learner and engine do not share"
            )


def _ropes(text: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield rotary position settings: the configuration's `rope_parameters` ({} if it has none),
    then each dict in it, which holds the settings of one type of layer.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    yield rope
    yield from (value for value in rope.values() if isinstance(value, dict))


def require_whole(folder: Path) -> None:
    """Check the small files of a folder and the headers of its weights, as far as they are there.
    Errors: ConfigError for a Git LFS pointer, a damaged file, or a missing one named by the index.
    """
    for name in sorted(SMALL_NAMES):
        if (folder / name).is_file():
            _require_text(folder / name)
    for path in weight_files(folder):
        _require_tensors(path)


def require_weights(folder: Path, setting: str) -> None:
    """Raise ConfigError if a folder has no safetensors that transformers would load.
    setting: text that stands for the folder in the error.
    """
    if (folder / WEIGHTS).is_file() or (folder / INDEX).is_file():
        return
    names = sorted(path.name for path in folder.iterdir())
    if others := [name for name in names if name.endswith(".safetensors")]:
        finding = f"it holds {', '.join(others[:3])}, neither {WEIGHTS} nor {INDEX}; name them so"
    elif pickles := [name for name in names if name.endswith(PICKLES)]:
        finding = (
            f"it holds {', '.join(pickles)}, which are pickles and could run any program; convert"
            " them where you trust them"
        )
    else:
        finding = "it holds no weights; name a folder that `save_pretrained` wrote"
    raise ConfigError(f"{setting}: expected weights in *.safetensors; {finding}")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers loads weights from; [] if there are none.
    Errors: ConfigError for an index that is damaged or names a missing file.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        return []
    _require_text(index)
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{index} is damaged: it has no weight_map of file names; copy it again"
        ) from None
    for name in names:
        if not (folder / str(name)).is_file():
            raise ConfigError(
                f"{index} names {str(name)[:80]!r}, which is not in the folder; copy it there"
            )
    return [folder / name for name in names]


def _require_text(path: Path) -> None:
    """Raise ConfigError if a small file is a Git LFS pointer, or a .json file that is no JSON."""
    content = path.read_bytes()
    _refuse_pointer(path, content)
    if path.suffix != ".json":
        return
    try:
        json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{path} is cut off or damaged: it is not JSON ({reason}); copy it again"
        ) from None


def _require_tensors(path: Path) -> None:
    """Raise ConfigError if a safetensors file is a Git LFS pointer, cut off or damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
        _refuse_pointer(path, start)
        length = int.from_bytes(start[:8], "little")
        file.seek(8)
        header = file.read(length) if length <= MAX_HEADER_BYTES else b""
    try:
        if len(header) < length or size < 8:
            raise ValueError(f"{size} bytes do not hold its header")
        tensors = json.loads(header.decode())
        if not isinstance(tensors, dict):
            raise ValueError("its header is no JSON object")
        tensors.pop("__metadata__", None)
        ends = [int(tensor["data_offsets"][1]) for tensor in tensors.values()]
        expected = 8 + length + max(ends, default=0)
        if size != expected:
            raise ValueError(f"it has {size} bytes, expected {expected}")
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is cut off or damaged: {error}; copy it again") from None


def _refuse_pointer(path: Path, content: bytes) -> None:
    """Raise ConfigError if a file's content is a Git LFS pointer."""
    if content.startswith(LFS_POINTER):
        raise ConfigError(
            f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its clone,"
            " or download it"
        )


def file_name(name: str, rank: int, size: int) -> str:
    """Name of a rank's file: `model.safetensors` or, of two, `model-00001-of-00002.safetensors`."""
    stem, dot, suffix = name.rpartition(".")
    return name if size == 1 else f"{stem}-{rank + 1:05d}-of-{size:05d}{dot}{suffix}"


def files_of(manifest: Manifest, name: str) -> tuple[str, ...]:
    """Return the files of one kind of tensors, in the order of ranks; () if the commit has none.
    name: for example `model.safetensors`. Errors: ValueError if one of several files is missing.
    """
    if name in manifest.blobs:
        return (name,)
    stem, dot, suffix = name.rpartition(".")
    names = sorted(fnmatch.filter(manifest.blobs, f"{stem}-0*{dot}{suffix}"))
    wanted = [file_name(name, rank, len(names)) for rank in range(len(names))]
    if names != wanted:
        raise ValueError(
            f"step {manifest.step} commit {manifest.seq} has {', '.join(names)}, expected"
            f" {', '.join(wanted)}"
        )
    return tuple(names)


def digest_of(manifest: Manifest, name: str) -> str:
    """sha256 that identifies one kind of tensors: of the file, or of its several files' digests.
    Errors: as `files_of`.
    """
    digests = [manifest.blobs[file].digest for file in files_of(manifest, name)]
    return digests[0] if len(digests) == 1 else sha256("\n".join(digests).encode())


def has_weights(manifest: Manifest) -> bool:
    """Return True if a commit has a policy, as whole weights or as an adapter."""
    return bool(files_of(manifest, WEIGHTS) or files_of(manifest, ADAPTER))


def policy_digest(manifest: Manifest) -> str:
    """Return the sha256 that identifies a commit's policy: of its weights, or of an adapter's
    matrices and record, which names the base weights.
    """
    if not files_of(manifest, ADAPTER):
        return digest_of(manifest, WEIGHTS)
    digests = (digest_of(manifest, ADAPTER), manifest.blobs[ADAPTER_RECORD].digest)
    return sha256("\n".join(digests).encode())
