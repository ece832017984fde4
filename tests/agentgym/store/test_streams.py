"""Content is stored in pieces and read back in ranges."""

import tracemalloc
from pathlib import Path

import pytest

from agentgym.store import bucket
from agentgym.store.lease import digest_of
from agentgym.store.manifest import Blob, BlobMissing
from agentgym.store.posix import TEMP_PREFIX, StoreFull
from agentgym.store.runstore import RunStore, StorePlace

STEP, KEY = "stage-1", "ab" * 32


class Pieces:
    """Content in pieces of equal size; none of them is kept."""

    def __init__(self, num_pieces: int, num_bytes: int = 1000, fails: bool = False) -> None:
        self.num_pieces, self.num_bytes, self.fails = num_pieces, num_bytes, fails

    @property
    def size(self) -> int:
        return self.num_pieces * self.num_bytes

    def pieces(self):
        for number in range(self.num_pieces):
            if self.fails and number == 2:
                raise RuntimeError("a device was lost")
            yield memoryview(bytes([number % 251]) * self.num_bytes)

    def whole(self) -> bytes:
        return b"".join(self.pieces())


@pytest.fixture(params=["posix", pytest.param("s3", marks=pytest.mark.integration)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RunStore:
    root = request.getfixturevalue("s3_uri") if request.param == "s3" else str(tmp_path / "store")
    return StorePlace(root, 30.0).open()


def commit(writer, **blobs):
    names = ("state", "parents", "config", "results", "timings", "records")
    return writer.commit(done=False, blobs=blobs, **{name: {} for name in names})


def test_what_was_added_can_be_committed_by_whoever_holds_the_step(store):
    content = Pieces(7)
    with store.open(STEP, KEY) as writer:
        elsewhere = StorePlace.of(store).visit(STEP, KEY)  # as another process would
        blob = elsewhere.add(STEP, KEY, content)
        assert blob == Blob.of(content.whole())
        assert blob.digest == digest_of(content)
        manifest = commit(writer, model=blob)
    assert store.read(manifest, "model") == content.whole()
    store.verify(manifest)


@pytest.mark.parametrize(("start", "count"), [(0, 8), (999, 2), (3500, 3500), (0, 0), (7000, 0)])
def test_a_range_comes_back(store, start, count):
    content = Pieces(7)
    with store.open(STEP, KEY) as writer:
        manifest = commit(writer, model=store.add(STEP, KEY, content))
    buffer = bytearray(count)
    store.read_into(manifest, "model", start, memoryview(buffer))
    assert buffer == content.whole()[start : start + count]


def test_a_range_beyond_the_end_or_of_nothing_is_an_error(store):
    with store.open(STEP, KEY) as writer:
        manifest = commit(writer, model=store.add(STEP, KEY, Pieces(2)))
        with pytest.raises(EOFError, match="ends too early"):
            store.read_into(manifest, "model", 1990, memoryview(bytearray(20)))
        store._folder(STEP, KEY).remove(manifest.blobs["model"].digest)
        with pytest.raises(BlobMissing, match="model of step stage-1 commit 0 is not there"):
            store.read_into(manifest, "model", 0, memoryview(bytearray(20)))
        with pytest.raises(KeyError, match="has no 'other'"):
            store.read_into(manifest, "other", 0, memoryview(bytearray(20)))


def test_names_may_be_verified_alone(store):
    with store.open(STEP, KEY) as writer:
        manifest = commit(writer, model=store.add(STEP, KEY, Pieces(2)), other=b"small")
        store._folder(STEP, KEY).remove(manifest.blobs["model"].digest)
        store.verify(manifest, ["other"])
        with pytest.raises(BlobMissing):
            store.verify(manifest)


def test_content_that_breaks_off_leaves_nothing_that_counts(store):
    with store.open(STEP, KEY) as writer:
        commit(writer, model=b"before")
        with pytest.raises(RuntimeError, match="a device was lost"):
            store.add(STEP, KEY, Pieces(5, fails=True))
        after = commit(writer, model=b"after")
        assert writer.prune(1) >= 1
    assert store._folder(STEP, KEY).blobs() == {after.blobs["model"].digest}


def test_what_nobody_committed_is_pruned(store):
    with store.open(STEP, KEY) as writer:
        commit(writer, model=store.add(STEP, KEY, Pieces(3)))
        writer.prune(1)
        store.add(STEP, KEY, Pieces(4))  # a rank whose step was never committed
        second = commit(writer, model=store.add(STEP, KEY, Pieces(5)))
    with store.open(STEP, KEY) as writer:
        third = commit(writer, model=store.add(STEP, KEY, Pieces(6)))
        writer.prune(2)
    kept = {manifest.blobs["model"].digest for manifest in (second, third)}
    assert store._folder(STEP, KEY).blobs() == kept


def test_no_more_than_some_pieces_are_in_memory(store, monkeypatch):
    monkeypatch.setattr(bucket, "PART_BYTES", 5 << 20)  # S3's minimum
    content = Pieces(96, 1 << 20)
    with store.open(STEP, KEY) as writer:
        store.add(STEP, KEY, Pieces(6, 1 << 20))  # first use: loads lazy modules
        tracemalloc.start()
        try:
            blob = store.add(STEP, KEY, content)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        manifest = commit(writer, model=blob)
    assert peak < 0.8 * content.size
    store.verify(manifest)


def test_a_full_disk_is_told_and_costs_no_earlier_commit(tmp_path, monkeypatch):
    store = StorePlace(str(tmp_path), 30.0).open()
    with store.open(STEP, KEY) as writer:
        before = commit(writer, model=b"before")

        def full(handle):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("agentgym.store.posix.os.fsync", full)
        with pytest.raises(StoreFull, match=r"no space left for 3000 bytes .* stays valid"):
            store.add(STEP, KEY, Pieces(3))
        monkeypatch.undo()
        assert writer.head == before
    store.verify(before)
    assert [path.name for path in tmp_path.rglob(f"{TEMP_PREFIX}*")] == []
