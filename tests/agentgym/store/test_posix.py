"""What the file system alone can do to a store: be full, keep temporary files, be written to by
hand.
"""

import errno
import os
import time
from pathlib import Path

import pytest

from agentgym.store.files import StoreFull, full_disk_told
from agentgym.store.lease import Fenced
from agentgym.store.posix import PosixFolder, posix_store
from agentgym.store.runstore import RunStore, StepWriter

KEY = "ab" * 32


def commit(writer: StepWriter, step: int, model: bytes = b""):
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
def store(tmp_path: Path) -> RunStore:
    return posix_store(tmp_path / "store", lease_ttl_s=30.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store" / "steps" / f"stage-1-{KEY[:16]}"


def test_a_full_disk_leaves_the_head_valid_and_no_litter(
    store: RunStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
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


def test_a_commit_whose_number_is_taken_is_fenced(store: RunStore, folder: Path) -> None:
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
        late = (folder / "manifests" / "000000.json").read_bytes()
        (folder / "manifests" / "000001.json").write_bytes(late)
        with pytest.raises(Fenced, match="commit 1 was already made under epoch 1"):
            commit(writer, 2)


def test_twelve_small_manifests_are_verified_in_well_under_a_second(store: RunStore) -> None:
    with store.open("stage-1", KEY) as writer:
        commits = [commit(writer, step, model=os.urandom(500_000)) for step in range(12)]
    began = time.process_time()
    for manifest in commits:
        store.verify(manifest)
    assert time.process_time() - began < 0.5


def test_temporary_files_of_killed_writers_are_swept_once(store: RunStore, folder: Path) -> None:
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
        for name in ("blobs", "manifests", "leases"):
            (folder / name / ".tmp-left-by-a-kill").write_bytes(b"half")
        assert writer.prune(keep=1) == 3
        assert writer.prune(keep=1) == 0
    assert not list(folder.rglob(".tmp-*"))


def test_commits_are_in_the_order_of_their_numbers_not_of_their_names(folder: Path) -> None:
    (folder / "manifests").mkdir(parents=True)
    for name in ("1000000.json", "999999.json", ".tmp-half", "000002.json"):
        (folder / "manifests" / name).touch()
    assert list(PosixFolder(folder).commits()) == [2, 999999, 1000000]


def test_a_failure_on_a_full_disk_is_told_as_such_and_any_other_as_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
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
