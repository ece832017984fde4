"""Names of a model folder's files, and checks that they are complete. torch is not imported."""

from __future__ import annotations

import json
from pathlib import Path

from agentgym.config import ConfigError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
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


def require_whole(folder: Path) -> None:
    """Check the small files of a folder and the headers of its weights; files may be missing.

    Errors: ConfigError that names the first file that is a Git LFS pointer, cut off or damaged.
    """
    for name in sorted(SMALL_NAMES):
        if (folder / name).is_file():
            _require_text(folder / name)
    for path in weight_files(folder):
        _require_tensors(path)


def require_weights(folder: Path, setting: str) -> None:
    """Raise ConfigError if a folder has no safetensors that transformers would load.
    setting: names the folder in the error text.
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
    """Return the files that transformers loads weights from; [] if there are none.
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
