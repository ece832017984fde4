"""Tensors as safetensors files of a store, written and read piece by piece: by one process, or by
several processes with some rows of every tensor each.

If several processes write, each file contains rows of the tensors, and its header records the
whole shape and the first row. The file of a single process is an ordinary safetensors file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from agentgym.models.architecture import INDEX, MAX_HEADER_BYTES, files_of
from agentgym.store.manifest import Blob, Manifest
from agentgym.store.runstore import RunStore, StorePlace

PIECE_BYTES = 16 << 20  # largest part of a file in memory at one time
PARTS = "parts"  # key of a header's metadata: {tensor: [shape of the whole, first row]}
# errors that reading an untrusted header can raise
ERRORS = (ValueError, KeyError, TypeError, AttributeError, EOFError, OverflowError, RecursionError)
# in the order in which the safetensors library writes them, widest first
DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: index for index, dtype in enumerate(DTYPES.values())}


@dataclass(frozen=True)
class Part:
    """Some rows of a tensor, or all of it."""

    tensor: Tensor  # [rows, ...] in host memory
    shape: tuple[int, ...]  # of the whole
    first_row: int = 0


class TensorFile:
    """A safetensors file to be written: header and tensors, in memory. A `Content` for a store."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        """Order the parts, without a copy, and build the header. parts: by tensor name.
        Errors: ValueError for a dtype that is not in DTYPES.
        """
        for name, part in parts.items():
            if part.tensor.dtype not in DTYPE_NAMES:
                raise ValueError(
                    f"{name} is {part.tensor.dtype}; tensors are stored as one of"
                    f" {', '.join(map(str, _ORDER))}"
                )
        ordered = sorted(parts.items(), key=lambda entry: (_ORDER[entry[1].tensor.dtype], entry[0]))
        self.names = [name for name, _ in ordered]
        self._tensors = [part.tensor for _, part in ordered]
        self.header = _header(dict(ordered))

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Make a file of whole tensors."""
        return cls({name: Part(tensor, tuple(tensor.shape)) for name, tensor in tensors.items()})

    @property
    def size(self) -> int:
        """Size in bytes, header included."""
        return len(self.header) + sum(tensor.nbytes for tensor in self._tensors)

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(self.header)
        for tensor in self._tensors:
            yield from pieces_of(tensor)


def pieces_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes, in order, in pieces of at most PIECE_BYTES."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    for start in range(0, len(flat), PIECE_BYTES):
        yield flat[start : start + PIECE_BYTES].data


def _header(parts: Mapping[str, Part]) -> bytes:
    """Return the bytes before a file's tensors: the length of the JSON header (8 bytes, little
    endian), then the header, padded with spaces to a multiple of 8 bytes. parts: name -> part, in
    the order in which the file has their values.
    """
    tree: dict[str, Any] = {}
    if split := {
        name: [part.shape, part.first_row]
        for name, part in parts.items()
        if part.tensor.shape != part.shape
    }:  # metadata is text, so this is JSON inside JSON
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


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Location of some rows of a tensor."""

    file: str  # name in the manifest
    start: int  # byte in it
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor and the locations of its rows, in order. A scalar has one row."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


Shaped = Tensor | StoredTensor


@dataclass(frozen=True)
class StoredTensors:
    """References to a commit's tensors: small to send to a process, which then reads the store."""

    place: StorePlace
    manifest: Manifest
    files: tuple[str, ...]  # names in the manifest

    @classmethod
    def of(cls, store: RunStore, manifest: Manifest, name: str) -> Self:
        """Refer to one kind of a commit's tensors, for example name `model.safetensors`, which may
        be split into several files. Errors: KeyError if the commit has none; as `files_of`.
        """
        files = files_of(manifest, name)
        if not files:
            raise KeyError(f"step {manifest.step} commit {manifest.seq} has no {name!r}")
        return cls(StorePlace.of(store), manifest, files)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the references, without an opened store and without what was read."""
        return type(self), (self.place, self.manifest, self.files)

    @cached_property
    def store(self) -> RunStore:
        """The store, opened on first use. Errors: StoreNotHere."""
        return self.place.visit(self.manifest.step, self.manifest.key)

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Name -> dtype, shape and locations of each tensor, read from the files' headers.
        Errors: ValueError if a file is no safetensors file, or rows are missing; BlobMissing.
        """
        parts_of: dict[str, list[tuple[torch.dtype, tuple[int, ...], StoredPart]]] = {}
        for file in self.files:
            for name, dtype, shape, part in self._headed(file):
                parts_of.setdefault(name, []).append((dtype, shape, part))
        return {name: self._whole(name, parts) for name, parts in sorted(parts_of.items())}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first tensor by name. Errors: ValueError if there is none; as `tensors`."""
        if not self.tensors:
            raise ValueError(f"{self._what}: {', '.join(self.files)} holds no tensor")
        return next(iter(self.tensors.values())).dtype

    @property
    def size(self) -> int:
        """Size of the files in bytes."""
        return sum(self.manifest.blobs[file].size for file in self.files)

    def verify(self, rank: int = 0, size: int = 1) -> None:
        """Read the files and verify their digests; with `size` processes only those whose index
        is `rank` modulo `size`. Errors: DigestMismatch, BlobMissing.
        """
        self.store.verify(self.manifest, self.files[rank::size])

    def require_fit(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError naming a tensor that is missing, unknown, of another shape or dtype."""
        require_fit(self.tensors, tensors, self._what)

    def read(self, name: str, rows: Tensor, first_row: int = 0) -> None:
        """Fill `rows` [n, ...] in place, on any device, with a tensor's rows from `first_row` on.
        The digest is not verified. Errors: BlobMissing; EOFError if a file is cut off; KeyError for
        an unknown name; ValueError if shape or dtype do not match or rows are out of range.
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
        """Yield a tensor's bytes, in order, unverified, in pieces of at most PIECE_BYTES."""
        stored = self.tensors[name]
        for part in stored.parts:
            end = part.start + part.num_rows * stored.row_bytes
            for start in range(part.start, end, PIECE_BYTES):
                piece = memoryview(bytearray(min(PIECE_BYTES, end - start)))
                self.store.read_into(self.manifest, part.file, start, piece)
                yield piece

    def load(self) -> dict[str, Tensor]:
        """Return name -> whole tensor, verified, in memory. Errors: DigestMismatch, BlobMissing."""
        tensors = {
            name: torch.empty(stored.shape, dtype=stored.dtype)
            for name, stored in self.tensors.items()
        }
        self.fill(tensors)
        return tensors

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Verify the files, then fill whole tensors in place, on any device.
        Errors: as `load`; ValueError for another shape or dtype; KeyError for an unknown name.
        """
        self.verify()
        for name, tensor in tensors.items():
            self.read(name, tensor.detach())

    def _fill(self, file: str, start: int, target: Tensor) -> None:
        """Read a file from byte `start` on into `target` [rows, ...]."""
        row_bytes = target[0].nbytes
        step = max(1, PIECE_BYTES // row_bytes)
        buffer = torch.empty(min(step, len(target)) * row_bytes, dtype=torch.uint8)
        for row in range(0, len(target), step):
            into = target[row : row + step]
            chunk = buffer[: into.nbytes]
            piece = chunk.numpy().data
            self.store.read_into(self.manifest, file, start + row * row_bytes, piece)
            into.copy_(chunk.view(target.dtype).view(into.shape))

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
            ranges = []
            for name, entry in tree.items():
                begin, end = _numbers(entry["data_offsets"])
                part_shape, dtype = _numbers(entry["shape"]), DTYPES[entry["dtype"]]
                whole, first_row = split.get(name, (part_shape, 0))
                shape, rows = _numbers(whole), part_shape[0] if part_shape else 1
                (first_row,) = _numbers([first_row])
                if end - begin != math.prod(part_shape) * dtype.itemsize:
                    raise ValueError(f"{name} does not have the bytes of its shape")
                if len(part_shape) != len(shape) or part_shape[1:] != shape[1:]:
                    raise ValueError(f"{name} is {part_shape}, no rows of {shape}")
                ranges.append((begin, end))
                part = StoredPart(file, 8 + count + begin, first_row, rows)
                yield name, dtype, shape, part
            position = 0
            for begin, end in sorted(ranges):  # contiguous up to the end of the file
                if begin != position:
                    raise ValueError(f"byte {position} belongs to no tensor, or to several")
                position = end
            if 8 + count + position != size:
                raise ValueError(f"it has {size} bytes, its tensors end at {8 + count + position}")
        except ERRORS as error:
            raise ValueError(f"{file} of {self._what} is no safetensors file: {error}") from None

    def _whole(
        self, name: str, entries: Sequence[tuple[torch.dtype, tuple[int, ...], StoredPart]]
    ) -> StoredTensor:
        dtype, shape, _ = entries[0]
        parts = sorted((part for _, _, part in entries), key=lambda part: part.first_row)
        rows = 0
        for part in parts:  # each begins at the end of the previous one
            if part.num_rows and part.first_row == rows:
                rows += part.num_rows
        if {entry[:2] for entry in entries} != {(dtype, shape)} or (
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
    """Write whole tensors into an existing folder: as `model.safetensors` if that has at most
    `max_bytes`, else as several files and their index, named as on the Hugging Face Hub. The
    digests are not verified.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    shapes = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in stored.tensors.items()
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
        (folder / INDEX).write_text(text, encoding="utf-8")


def require_fit(given: Mapping[str, Shaped], expected: Mapping[str, Shaped], what: str) -> None:
    """Raise ValueError unless both have the same names, shapes and dtypes.
    what: text that stands for `given` in the error.
    """
    if unmatched := sorted(given.keys() ^ expected.keys()):
        raise ValueError(
            f"{what} do not fit: {', '.join(unmatched[:3])} are on one side only; take them from a"
            " commit of the same model"
        )
    for name, wanted in expected.items():
        actual = given[name]
        if (tuple(actual.shape), actual.dtype) != (tuple(wanted.shape), wanted.dtype):
            raise ValueError(
                f"{what} do not fit: {name} is {actual.dtype} {tuple(actual.shape)}, expected"
                f" {wanted.dtype} {tuple(wanted.shape)}"
            )


def _numbers(values: Any) -> tuple[int, ...]:
    """Return an untrusted header's numbers. Errors: ValueError unless all are integers >= 0."""
    numbers = tuple(values)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers} are no counts")
    return numbers


@dataclass(frozen=True)
class Snapshot:
    """The state of a learner, or of its part in one process, on its way into a store."""

    files: Mapping[str, TensorFile]  # by name in the manifest to come

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size for file in self.files.values())

    def write(self, place: StorePlace, step: str, key: str) -> dict[str, Blob]:
        """Write the files into a step's folder, for a commit by the holder of the step's lease.
        place: the store. step, key: of the step. Return file -> blob.
        Errors: StoreFull, StoreNotHere.
        """
        store = place.visit(step, key)
        return {name: store.add(step, key, file) for name, file in self.files.items()}
