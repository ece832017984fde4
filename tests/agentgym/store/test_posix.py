"""Store errors specific to file systems: full disks, temporary files, and edits by hand."""

import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from agentgym.store.lease import Fenced
from agentgym.store.manifest import Blob, DigestMismatch
from agentgym.store.posix import SHARED_BYTES, PosixFolder, StoreFull, full_disk_told
from agentgym.store.runstore import store_at

KEY = "ab" * 32


def commit(writer, step, model=b""):
    return writer.commit(
        done=False,
        state={"global_step": step},
        parents={},
        config={},
        blobs={"model": model or b"weights %d" % step},
        records={},
        results={},
        timings={},
    )


@pytest.fixture
def store(tmp_path):
    return store_at(tmp_path / "store", lease_ttl_s=30.0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store" / "steps" / f"stage-1-{KEY[:16]}"


def test_a_full_disk_leaves_the_head_valid_and_no_litter(store, folder, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(
                StoreFull,
                match=r"no space left for 9 bytes .*the last commit stays valid, make room",
            ):
                commit(writer, 2)
        assert writer.head == store.head("stage-1", KEY) == head
        assert not list(folder.rglob(".tmp-*"))
        assert commit(writer, 2).seq == 1


def test_a_commit_whose_number_is_taken_is_fenced(store, folder):
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
        late = (folder / "manifests" / "000000.json").read_bytes()
        (folder / "manifests" / "000001.json").write_bytes(late)
        with pytest.raises(Fenced, match="commit 1 was already made under epoch 1"):
            commit(writer, 2)


def test_twelve_small_manifests_are_verified_in_well_under_a_second(store):
    with store.open("stage-1", KEY) as writer:
        commits = [commit(writer, step, model=os.urandom(500_000)) for step in range(12)]
    began = time.process_time()
    for manifest in commits:
        store.verify(manifest)
    assert time.process_time() - began < 0.5


def test_temporary_files_of_killed_writers_are_swept_once(store, folder):
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
        for name in ("blobs", "manifests", "leases"):
            (folder / name / ".tmp-left-by-a-kill").write_bytes(b"half")
        assert writer.prune(keep=1) == 3
        assert writer.prune(keep=1) == 0
    assert not list(folder.rglob(".tmp-*"))


def test_commits_are_in_the_order_of_their_numbers_not_of_their_names(folder):
    (folder / "manifests").mkdir(parents=True)
    for name in ("1000000.json", "999999.json", ".tmp-half", "000002.json"):
        (folder / "manifests" / name).touch()
    assert list(PosixFolder(folder).commits()) == [2, 999999, 1000000]


def test_a_failure_on_a_full_disk_is_told_as_such_and_any_other_as_itself(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(KeyError, match="other"), full_disk_told(tmp_path):
        raise KeyError("other")
    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(StoreFull, match=r"no space left .* make room") as told,
        full_disk_told(tmp_path),
    ):
        raise RuntimeError("500 Internal Server Error")
    assert isinstance(told.value.__cause__, RuntimeError)


OTHER = "cd" * 32
LARGE = bytes(SHARED_BYTES)


class Streamed:
    """Content in two pieces."""

    def __init__(self, data):
        self._data = memoryview(data)

    @property
    def size(self):
        return len(self._data)

    def pieces(self):
        yield self._data[:1000]
        yield self._data[1000:]


def of_key(folder, key):
    return folder.with_name(f"stage-1-{key[:16]}") / "blobs" / Blob.of(LARGE).digest


@pytest.fixture(params=["put", "stream"])
def commit_large(request, store):
    """Commit the same large content under a key, whole or in pieces."""

    def made(key):
        with store.open("stage-1", key) as writer:
            if request.param == "put":
                return commit(writer, 1, LARGE)
            return commit(writer, 1, store.add("stage-1", key, Streamed(LARGE)))

    return made


def test_large_content_that_two_keys_have_is_stored_once_and_outlives_either(
    store, folder, commit_large
):
    first, second = commit_large(KEY), commit_large(OTHER)
    assert of_key(folder, KEY).samefile(of_key(folder, OTHER))
    assert not list(folder.parent.rglob(".tmp-*"))
    assert SHARED_BYTES // 2 <= store.num_bytes(first) < SHARED_BYTES
    store.collect(first)
    assert store.read(second, "model") == LARGE
    assert store.num_bytes(second) > SHARED_BYTES
    assert commit_large(KEY).blobs == first.blobs  # a repeated commit shares its blobs again
    assert of_key(folder, KEY).samefile(of_key(folder, OTHER))


def test_small_content_and_content_of_another_step_are_stored_beside(store, folder):
    for step, key, content in (
        ("stage-1", KEY, LARGE[1:]),
        ("stage-1", OTHER, LARGE[1:]),
        ("stage-2", KEY, LARGE[1:]),
        ("stage-2", KEY, LARGE),
        ("stage-1", KEY, LARGE),
    ):
        with store.open(step, key) as writer:
            commit(writer, 1, content)
    found = list(folder.parent.glob("*/blobs/*"))
    assert [path.stat().st_nlink for path in found] == [1] * 5


def test_damaged_content_of_another_key_is_not_shared(store, folder, commit_large):
    first = commit_large(KEY)
    of_key(folder, KEY).write_bytes(LARGE[1:] + b"X")
    second = commit_large(OTHER)
    store.verify(second)
    with pytest.raises(DigestMismatch):
        store.verify(first)


def test_damage_of_shared_content_is_found_in_both_and_either_is_made_whole_alone(
    store, folder, commit_large
):
    first, second = commit_large(KEY), commit_large(OTHER)
    of_key(folder, KEY).write_bytes(LARGE[1:] + b"X")
    for manifest in (first, second):
        with pytest.raises(DigestMismatch):
            store.verify(manifest)
    shutil.rmtree(of_key(folder, OTHER).parents[1])  # the message's advice
    store.verify(commit_large(OTHER))
    with pytest.raises(DigestMismatch):
        store.verify(first)


def test_content_that_cannot_have_another_name_is_stored_twice(
    store, folder, commit_large, monkeypatch
):
    commit_large(KEY)
    link = os.link

    def refuses(source, target):
        if "blobs" in Path(source).parts:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
        link(source, target)

    monkeypatch.setattr(os, "link", refuses)
    store.verify(commit_large(OTHER))
    assert not of_key(folder, KEY).samefile(of_key(folder, OTHER))
    assert not list(folder.parent.rglob(".tmp-*"))
