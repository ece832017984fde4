"""Safetensors files that one process or several write, and any number of processes read."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load, save

from agentgym.models import tensorfiles
from agentgym.models.architecture import WEIGHTS, digest_of, file_name, files_of
from agentgym.models.tensorfiles import Part, Snapshot, StoredTensors, TensorFile, export_tensors
from agentgym.store.manifest import BlobMissing, DigestMismatch

TENSORS = {
    "b.weight": torch.arange(35.0).reshape(7, 5),
    "half": torch.arange(8).bfloat16(),
    "scalar": torch.tensor(3.0),
    "none": torch.zeros(0, 4),
    "ids": torch.arange(6).reshape(2, 3),
    "é": torch.ones(3, dtype=torch.float16),
}


def whole(file):
    return b"".join(file.pieces())


def rows(tensors, rank, size):
    """Return the rows of a rank as FSDP2 shards them: the last ranks may have fewer or none.
    Scalars belong to rank 0.
    """
    parts = {}
    for name, tensor in tensors.items():
        if not tensor.ndim:
            if not rank:
                parts[name] = Part(tensor, ())
            continue
        count = -(-len(tensor) // size)
        first = min(rank * count, len(tensor))
        parts[name] = Part(tensor[first : first + count], tuple(tensor.shape), first)
    return TensorFile(parts)


@pytest.fixture
def kept(keep):
    """Return a function of the number of ranks that stores their files: (store, manifest)."""
    return lambda size: keep(
        Snapshot(
            {file_name(WEIGHTS, rank, size): rows(TENSORS, rank, size) for rank in range(size)}
        )
    )


@pytest.fixture
def of(kept):
    """Return a function of the number of ranks that gives their StoredTensors."""
    return lambda size: StoredTensors.of(*kept(size), WEIGHTS)


def test_one_processs_file_is_what_the_library_writes_to_the_bit():
    file = TensorFile.of(TENSORS)
    assert whole(file) == save(TENSORS)
    assert file.size == len(save(TENSORS))
    assert whole(file) == whole(file)  # readable twice


@pytest.mark.parametrize("piece", [1, 7, 20, 1 << 24])
def test_pieces_are_small_and_make_up_the_file(monkeypatch, piece):
    monkeypatch.setattr(tensorfiles, "PIECE_BYTES", piece)
    header, *pieces = TensorFile.of(TENSORS).pieces()
    assert max(map(len, pieces)) <= piece
    assert b"".join([header, *pieces]) == save(TENSORS)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("piece", [3, 40, 1 << 24])
def test_any_number_of_files_gives_the_whole_tensors_back(of, monkeypatch, size, piece):
    monkeypatch.setattr(tensorfiles, "PIECE_BYTES", piece)
    stored = of(size)
    assert len(stored.files) == size
    found = stored.load()
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
        assert (
            b"".join(stored.pieces(name)) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("first", "last"), [(0, 1), (2, 6), (3, 7), (6, 7)])
def test_some_rows_are_read_into_what_is_there(of, size, first, last):
    rows = torch.full((last - first, 5), -1.0)
    of(size).read("b.weight", rows, first)
    assert torch.equal(rows, TENSORS["b.weight"][first:last])


def test_a_file_of_several_says_what_it_is_a_part_of_and_is_a_safetensors_file():
    data = whole(rows(TENSORS, 1, 2))
    assert torch.equal(load(data)["b.weight"], TENSORS["b.weight"][4:])
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert json.loads(header["__metadata__"]["parts"])["b.weight"] == [[7, 5], 4]


def test_only_dtypes_that_come_back_are_stored():
    with pytest.raises(ValueError, match=r"flags is torch\.bool; tensors are stored as one of"):
        TensorFile.of({"flags": torch.ones(2, dtype=torch.bool)})


def test_names_tell_one_file_from_several_and_a_lost_one_is_missed(kept):
    _, manifest = kept(3)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert list(files_of(manifest, WEIGHTS)) == names
    assert files_of(manifest, "optimizer.safetensors") == ()
    blobs = {name: manifest.blobs[name] for name in names[:2]}
    with pytest.raises(
        ValueError, match=r"has model-00001-of-00003.*, expected model-00001-of-00002"
    ):
        files_of(manifest.model_copy(update={"blobs": blobs}), WEIGHTS)
    _, alone = kept(1)
    assert files_of(alone, WEIGHTS) == (WEIGHTS,)
    assert digest_of(alone, WEIGHTS) == alone.blobs[WEIGHTS].digest != digest_of(manifest, WEIGHTS)


def test_rows_that_are_missing_or_of_another_tensor_are_never_read(keep):
    files = {rank: rows(TENSORS, rank, 2) for rank in range(2)}
    names = [file_name(WEIGHTS, rank, 2) for rank in range(2)]
    other = rows({**TENSORS, "b.weight": torch.zeros(9, 5)}, 1, 2)
    for second in (files[0], other):  # a repeated file, and another model's
        store, manifest = keep(Snapshot(dict(zip(names, (files[0], second), strict=True))))
        with pytest.raises(ValueError, match=r"the rows of .* do not make up one tensor"):
            StoredTensors.of(store, manifest, WEIGHTS).tensors  # noqa: B018


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def headed(entries, num_bytes, **parts):
    """Return a file with arbitrary header entries."""
    about = {"__metadata__": {"parts": json.dumps(parts)}} if parts else {}
    text = json.dumps({**about, **entries}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "ends too early"),
        (b"\xff" * 16, "a header of"),
        ((4).to_bytes(8, "little") + b"nope", "Expecting value"),
        (save({"a": torch.ones(3)})[:-1], "its tensors end at"),
        (headed({"a": ONE, "b": ONE}, 4), "byte 4 belongs to no tensor, or to several"),
        (headed({"a": {**ONE, "data_offsets": [-8, -4]}}, 4), "are no counts"),
        (headed({"a": {**ONE, "shape": [-1, -1]}}, 4), "are no counts"),
        (headed({"a": {**ONE, "shape": [True]}}, 4), "are no counts"),
        (headed({"a": ONE}, 4, a=[[3, 4], 0]), "is .*, no rows of"),
        (headed({"a": ONE}, 4, a=[[2], "0"]), "are no counts"),
        (headed({"a": ONE}, 4, a=[[2], 1e999]), "are no counts"),
        (save({"a": torch.ones(3)}).replace(b"[3]", b"[4]"), "a does not have the bytes"),
        (save({"a": torch.ones(3)}).replace(b"F32", b"Q32"), "Q32"),
    ],
)
def test_what_is_no_safetensors_file_is_bad_input(keep, data, problem):
    store, manifest = keep({WEIGHTS: data})
    with pytest.raises(ValueError, match=rf"model\.safetensors of .* is no .*: .*{problem}"):
        StoredTensors.of(store, manifest, WEIGHTS).load()


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        (torch.zeros(3, 5), 5),
        (torch.zeros(3, 5), -1),
        (torch.zeros(3, 4), 0),
        (torch.zeros(3, 5).half(), 0),
        (torch.zeros(3), 0),
    ],
)
def test_what_are_no_rows_of_a_tensor_is_never_filled(of, rows, first):
    with pytest.raises(ValueError, match=r"b\.weight is \S+ \(7, 5\), and not what rows"):
        of(2).read("b.weight", rows, first)


def test_a_file_without_tensors_has_no_dtype(keep):
    store, manifest = keep({WEIGHTS: save({})})
    with pytest.raises(ValueError, match=r"model\.safetensors holds no tensor"):
        StoredTensors.of(store, manifest, WEIGHTS).dtype  # noqa: B018


def test_a_place_travels_without_what_was_opened(of):
    stored = of(2)
    stored.load()
    sent = pickle.dumps(stored)
    assert len(sent) < 5_000
    again = pickle.loads(sent)
    assert again == stored
    assert again.load().keys() == TENSORS.keys()


def test_damage_is_found_by_the_rank_whose_share_it_is(kept, of):
    store, manifest = kept(2)
    stored = StoredTensors.of(store, manifest, WEIGHTS)
    damaged = manifest.blobs[stored.files[1]]
    folder = next((tensorfiles.Path(store.root) / "steps").iterdir())
    path = folder / "blobs" / damaged.digest
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    stored.verify(0, 2)
    for rank, size in ((1, 2), (0, 1)):
        with pytest.raises(DigestMismatch, match=r"model-00002-of-00002\.safetensors"):
            stored.verify(rank, size)
    path.unlink()
    with pytest.raises(BlobMissing, match=r"model-00002-of-00002\.safetensors"):
        StoredTensors.of(store, manifest, WEIGHTS).load()


def test_what_does_not_fit_is_named(of):
    stored = of(2)
    stored.require_fit(TENSORS)
    with pytest.raises(ValueError, match="do not fit: scalar are on one side only"):
        stored.require_fit({name: each for name, each in TENSORS.items() if name != "scalar"})
    with pytest.raises(
        ValueError, match=r"b\.weight is torch\.float32 \(7, 5\), expected .* \(5, 7\)"
    ):
        stored.require_fit({**TENSORS, "b.weight": torch.zeros(5, 7)})
    with pytest.raises(ValueError, match=r"half is torch\.bfloat16 .*, expected torch\.float32"):
        stored.require_fit({**TENSORS, "half": torch.zeros(8)})


@pytest.mark.parametrize("size", [1, 3])
def test_what_leaves_the_store_is_whole_in_one_file_or_several_with_their_index(of, tmp_path, size):
    (tmp_path / "one").mkdir()
    export_tensors(of(size), tmp_path / "one", 1000)
    assert load((tmp_path / "one/model.safetensors").read_bytes()).keys() == TENSORS.keys()
    (tmp_path / "several").mkdir()
    export_tensors(of(size), tmp_path / "several", 150)
    index = json.loads((tmp_path / "several/model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1
    found = {}
    for file in files:
        found |= load((tmp_path / "several" / file).read_bytes())
    assert {name: index["weight_map"][name] for name in found}.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)
