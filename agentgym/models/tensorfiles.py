"""Tensors as safetensors files of a store: written and read piece by piece, by one process or by
several that hold a part of each tensor.

A file of several processes holds rows of its tensors, and says in its header of which whole tensor
and from which row on. One process's file is an ordinary safetensors file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from agentgym.store.manifest import Blob, Manifest, sha256
from agentgym.store.place import StorePlace
from agentgym.store.runstore import RunStore

PIECE_BYTES = 16 << 20  # of a file that are in memory at one time
PARTS = "parts"  # key of a header's metadata: {tensor: [shape of the whole, first row]}
MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
# in the order in which the library writes them, widest first
DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: place for place, dtype in enumerate(DTYPES.values())}


@dataclass(frozen=True)
class Part:
    """Some rows of a tensor, or all of it."""

    tensor: Tensor  # [rows, ...] in host memory
    shape: tuple[int, ...]  # of the whole
    first_row: int = 0


class TensorFile:
    """One safetensors file on its way into a store; `Content` of it."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        """Errors: ValueError for a dtype that is not stored."""
        for name, part in parts.items():
            if part.tensor.dtype not in DTYPE_NAMES:
                raise ValueError(
                    f"{name} is {part.tensor.dtype}; tensors are stored as one of"
                    f" {', '.join(map(str, _ORDER))}"
                )
        ordered = sorted(parts.items(), key=lambda each: (_ORDER[each[1].tensor.dtype], each[0]))
        self.names = [name for name, _ in ordered]
        self._tensors = [part.tensor for _, part in ordered]
        self.header = _header(dict(ordered))

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Of whole tensors."""
        return cls({name: Part(each, tuple(each.shape)) for name, each in tensors.items()})

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.header) + sum(each.nbytes for each in self._tensors)

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self.header)
        for tensor in self._tensors:
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            for start in range(0, len(flat), PIECE_BYTES):
                yield flat[start : start + PIECE_BYTES].data


def _header(parts: Mapping[str, Part]) -> bytes:
    """parts: in the order of their bytes."""
    tree: dict[str, Any] = {}
    split = {
        name: [part.shape, part.first_row]
        for name, part in parts.items()
        if tuple(part.tensor.shape) != part.shape
    }
    if split:  # metadata is text, so this is JSON inside JSON
        tree["__metadata__"] = {PARTS: json.dumps(split, separators=(",", ":"))}
    end = 0
    for name, part in parts.items():
        begin, end = end, end + part.tensor.nbytes
        tree[name] = {
            "dtype": DTYPE_NAMES[part.tensor.dtype],
            "shape": list(part.tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Shaped(Protocol):
    """A tensor, or what is known of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Where rows of a tensor lie."""

    file: str  # name in the manifest
    start: int  # byte in it
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor, and where its rows lie, in order. One without dimensions has one row."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredTensors:
    """Tensors of a commit, by where they are: small, and opened by whoever it is sent to."""

    place: StorePlace
    manifest: Manifest
    files: tuple[str, ...]  # names in the manifest

    @classmethod
    def of(cls, store: RunStore, manifest: Manifest, name: str) -> Self:
        """name: of a kind of tensors, for example `model.safetensors`.
        Errors: KeyError where the commit has none.
        """
        files = files_of(manifest, name)
        if not files:
            raise KeyError(f"step {manifest.step} commit {manifest.seq} has no {name!r}")
        return cls(StorePlace.of(store), manifest, files)

    def __reduce__(self) -> tuple[Any, ...]:
        """What was opened stays here."""
        return type(self), (self.place, self.manifest, self.files)

    @cached_property
    def store(self) -> RunStore:
        """Opened where it is asked for."""
        return self.place.visit(self.manifest.step, self.manifest.key)

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """By name, from the files' headers.
        Errors: ValueError where a file is no safetensors file, or rows are missing; BlobMissing.
        """
        found: dict[str, list[tuple[torch.dtype, tuple[int, ...], StoredPart]]] = {}
        for file in self.files:
            for name, dtype, shape, part in self._headed(file):
                found.setdefault(name, []).append((dtype, shape, part))
        return {name: self._whole(name, parts) for name, parts in sorted(found.items())}

    @property
    def dtype(self) -> torch.dtype:
        """Of the first. Errors: ValueError where there is none."""
        if not self.tensors:
            raise ValueError(f"{self._what}: {', '.join(self.files)} holds no tensor")
        return next(iter(self.tensors.values())).dtype

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(self.manifest.blobs[file].size for file in self.files)

    def verify(self, rank: int = 0, size: int = 1) -> None:
        """That the files are what was committed; of several processes each reads its share.
        Errors: DigestMismatch, BlobMissing.
        """
        self.store.verify(self.manifest, self.files[rank::size])

    def require_fit(self, tensors: Mapping[str, Tensor]) -> None:
        """Errors: ValueError naming the first one that is missing, unknown, or of another shape
        or dtype.
        """
        require_fit(self.tensors, tensors, self._what)

    def read(self, name: str, rows: Tensor, first_row: int = 0) -> None:
        """Fill [rows, ...] of a tensor, from this row on; in place, wherever it is.
        Errors: BlobMissing; ValueError where these are no rows of it.
        """
        stored = self.tensors[name]
        target = rows.reshape(1) if rows.ndim == 0 else rows
        end = stored.shape[0] if stored.shape else 1
        if (rows.dtype, tuple(rows.shape[1:])) != (stored.dtype, stored.shape[1:]) or not (
            0 <= first_row <= first_row + len(target) <= end
        ):
            raise ValueError(
                f"{self._what}: {name} is {stored.dtype} {stored.shape}, and not what rows"
                f" {first_row} to {first_row + len(target)} of {rows.dtype} {tuple(rows.shape)} are"
            )
        for part in stored.parts:
            begin = max(first_row, part.first_row)
            end = min(first_row + len(target), part.first_row + part.num_rows)
            if begin < end and stored.row_bytes:
                start = part.start + (begin - part.first_row) * stored.row_bytes
                self._fill(part.file, start, target[begin - first_row : end - first_row])

    def pieces(self, name: str) -> Iterator[memoryview]:
        """The bytes of a whole tensor, in order."""
        stored = self.tensors[name]
        for part in stored.parts:
            end = part.start + part.num_rows * stored.row_bytes
            for start in range(part.start, end, PIECE_BYTES):
                piece = memoryview(bytearray(min(PIECE_BYTES, end - start)))
                self.store.read_into(self.manifest, part.file, start, piece)
                yield piece

    def load(self) -> dict[str, Tensor]:
        """Whole tensors by name, for who needs all of them. Errors: DigestMismatch, BlobMissing."""
        found = {
            name: torch.empty(each.shape, dtype=each.dtype) for name, each in self.tensors.items()
        }
        self.fill(found)
        return found

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Whole tensors, in place, wherever they are. Errors: as `load`; ValueError for one of
        another shape or dtype.
        """
        self.verify()
        for name, tensor in tensors.items():
            self.read(name, tensor.detach())

    def _fill(self, file: str, start: int, target: Tensor) -> None:
        """target: [rows, ...]"""
        row_bytes = target[0].nbytes
        step = max(1, PIECE_BYTES // row_bytes)
        buffer = torch.empty(min(step, len(target)) * row_bytes, dtype=torch.uint8)
        for row in range(0, len(target), step):
            into = target[row : row + step]
            held = buffer[: into.nbytes]
            piece = held.numpy().data
            self.store.read_into(self.manifest, file, start + row * row_bytes, piece)
            into.copy_(held.view(target.dtype).view(into.shape))

    def _headed(self, file: str) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], StoredPart]]:
        size, length = self.manifest.blobs[file].size, memoryview(bytearray(8))
        try:
            self.store.read_into(self.manifest, file, 0, length)
            count = int.from_bytes(length, "little")
            if count > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {count} bytes")
            text = memoryview(bytearray(count))
            self.store.read_into(self.manifest, file, 8, text)
            tree = json.loads(bytes(text))
            split = json.loads(tree.pop("__metadata__", {}).get(PARTS, "{}"))
            found = []
            for name, entry in tree.items():
                begin, end = _numbers(entry["data_offsets"])
                own, dtype = _numbers(entry["shape"]), DTYPES[entry["dtype"]]
                whole, first_row = split.get(name, (own, 0))
                shape, rows = _numbers(whole), own[0] if own else 1
                (first_row,) = _numbers([first_row])
                if end - begin != math.prod(own) * dtype.itemsize:
                    raise ValueError(f"{name} does not have the bytes of its shape")
                if len(own) != len(shape) or own[1:] != shape[1:]:
                    raise ValueError(f"{name} is {own}, no rows of {shape}")
                found.append((begin, end))
                part = StoredPart(file, 8 + count + begin, first_row, rows)
                yield name, dtype, shape, part
            place = 0
            for begin, end in sorted(found):  # one after the other, to the end of the file
                if begin != place:
                    raise ValueError(f"byte {place} belongs to no tensor, or to several")
                place = end
            if 8 + count + place != size:
                raise ValueError(f"it has {size} bytes, its tensors end at {8 + count + place}")
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            EOFError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ValueError(f"{file} of {self._what} is no safetensors file: {error}") from None

    def _whole(
        self, name: str, found: Sequence[tuple[torch.dtype, tuple[int, ...], StoredPart]]
    ) -> StoredTensor:
        dtype, shape, _ = found[0]
        parts = sorted((part for _, _, part in found), key=lambda part: part.first_row)
        rows = 0
        for part in parts:  # each begins where the one before ends
            if part.num_rows and part.first_row == rows:
                rows += part.num_rows
        if {each[:2] for each in found} != {(dtype, shape)} or (
            sum(part.num_rows for part in parts),
            rows,
        ) != (shape[0] if shape else 1,) * 2:
            raise ValueError(
                f"{self._what}: the rows of {name} do not make up one tensor {shape}; files are"
                " missing or of several commits"
            )
        return StoredTensor(dtype, shape, tuple(parts))

    @property
    def _what(self) -> str:
        return f"tensors of step {self.manifest.step} commit {self.manifest.seq}"


def export_tensors(stored: StoredTensors, folder: Path, max_bytes: int) -> None:
    """Whole tensors as `model.safetensors` where that has at most so many bytes, else as several
    files and their index, named as the Hugging Face Hub names them.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    shapes = {
        name: torch.empty(each.shape, dtype=each.dtype, device="meta")
        for name, each in stored.tensors.items()
    }
    plan = split_torch_state_dict_into_shards(shapes, max_shard_size=max_bytes)
    for file, names in plan.filename_to_tensors.items():
        whole = TensorFile.of({name: shapes[name] for name in names})
        with (folder / file).open("wb") as out:
            out.write(whole.header)
            for name in whole.names:
                out.writelines(stored.pieces(name))
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def require_fit(given: Mapping[str, Shaped], expected: Mapping[str, Shaped], what: str) -> None:
    """what: the given ones are. Errors: ValueError as `StoredTensors.require_fit`."""
    if odd := sorted(given.keys() ^ expected.keys()):
        raise ValueError(
            f"{what} do not fit: {', '.join(odd[:3])} are on one side only; take them from a commit"
            " of the same model"
        )
    for name, each in expected.items():
        found = given[name]
        if (tuple(found.shape), found.dtype) != (tuple(each.shape), each.dtype):
            raise ValueError(
                f"{what} do not fit: {name} is {found.dtype} {tuple(found.shape)}, expected"
                f" {each.dtype} {tuple(each.shape)}"
            )


def _numbers(found: Any) -> tuple[int, ...]:
    """Counts from somebody else's header. Errors: ValueError."""
    numbers = tuple(found)
    if not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError(f"{numbers} are no counts")
    return numbers


def file_name(name: str, rank: int, size: int) -> str:
    """Of one process's file: `model.safetensors`, or `model-00001-of-00002.safetensors`."""
    stem, dot, suffix = name.rpartition(".")
    return name if size == 1 else f"{stem}-{rank + 1:05d}-of-{size:05d}{dot}{suffix}"


def files_of(manifest: Manifest, name: str) -> tuple[str, ...]:
    """The names of one kind of tensors in a manifest, in order; none where it has none.
    Errors: ValueError where a file is not among them.
    """
    if name in manifest.blobs:
        return (name,)
    stem, dot, suffix = name.rpartition(".")
    found = sorted(
        each
        for each in manifest.blobs
        if each.startswith(f"{stem}-0") and each.endswith(dot + suffix)
    )
    wanted = [file_name(name, rank, len(found)) for rank in range(len(found))]
    if found != wanted:
        raise ValueError(
            f"step {manifest.step} commit {manifest.seq} has {', '.join(found)}, expected"
            f" {', '.join(wanted)}"
        )
    return tuple(found)


def digest_of(manifest: Manifest, name: str) -> str:
    """sha256 that names one kind of tensors: of the file, or of the files' digests."""
    blobs = [manifest.blobs[each] for each in files_of(manifest, name)]
    if len(blobs) == 1:
        return blobs[0].digest
    return sha256("\n".join(blob.digest for blob in blobs).encode())


@dataclass(frozen=True)
class Snapshot:
    """What a learner, or its part in one process, held at one moment; on its way into a store."""

    files: Mapping[str, TensorFile]  # by name in the manifest to come

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(each.size for each in self.files.values())

    def write(self, place: StorePlace, step: str, key: str) -> dict[str, Blob]:
        """Into the folder of a step whose lease somebody holds. Errors: StoreFull, StoreNotHere."""
        store = place.visit(step, key)
        return {name: store.add(step, key, file) for name, file in self.files.items()}
