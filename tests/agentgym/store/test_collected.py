"""A collected step is deleted, even if the collection was killed, and can be run again."""

import pytest

from agentgym.store import posix, s3
from agentgym.store.lease import LeaseHeld
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import BlobMissing
from tests.agentgym.store.steps import KEY, commit


def test_what_is_collected_is_gone_and_the_step_can_be_made_anew(place, store):
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
        head = commit(writer, 2, done=True)
    assert not store.is_collected("stage-1", KEY)
    before = store.num_bytes(head)
    store.collect(head)
    assert store.num_bytes(head) < before
    assert store.is_collected("stage-1", KEY)
    assert store.head("stage-1", KEY) is None
    assert store.heads() == []
    assert not [name for name in place.names() if name.startswith(("blobs/", "manifests/"))]
    with pytest.raises(BlobMissing, match=r"`agentgym gc` collected it; run the step again"):
        store.read(head, "model")
    with store.open("stage-1", KEY) as writer:
        assert writer.head is None
        again = commit(writer, 1)
        writer.prune(keep=1)
    assert not store.is_collected("stage-1", KEY)
    assert store.history("stage-1", KEY) == [again]
    store.verify(again)


def test_a_step_that_somebody_holds_or_that_went_on_is_not_collected(store):
    with store.open("stage-1", KEY, ["cd" * 32]) as writer:
        first = commit(writer, 1)
        (holder,) = store.holders()
        assert holder.parents == ("cd" * 32,)
        with pytest.raises(LeaseHeld):
            store.collect(first)
        second = commit(writer, 2)
    assert store.holders() == []
    with pytest.raises(ValueError, match="has another commit now"):
        store.collect(first)
    store.verify(second)


def collect_half(store, monkeypatch):
    """Commit, then kill the collection before it deletes files."""
    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1)
    with monkeypatch.context() as patch:
        for lease in (posix.PosixLease, s3.S3Lease):
            patch.setattr(lease, "_empty", lambda _: None)
        store.collect(head)


def test_a_collection_that_was_killed_leaves_nothing_that_counts_and_is_finished(
    place, store, monkeypatch
):
    collect_half(store, monkeypatch)
    assert store.head("stage-1", KEY) is None
    assert place.blobs()
    assert store.finish_collecting() == 1
    assert not place.blobs()
    assert store.finish_collecting() == 0


def test_a_step_made_anew_while_a_killed_collection_is_finished_stays(place, store, monkeypatch):
    collect_half(store, monkeypatch)
    made: list[Manifest] = []
    for kind in (posix.PosixFolder, s3.S3Folder):

        def has_content(self, has: object = kind.has_content):
            found = has(self)
            with store.open("stage-1", KEY) as writer:
                made.append(commit(writer, 5))
            return found

        monkeypatch.setattr(kind, "has_content", has_content)
    assert store.finish_collecting() == 0
    assert store.head("stage-1", KEY) == made[0]
    store.verify(made[0])


def test_a_step_that_begins_anew_ends_a_collection_that_was_killed(place, store, monkeypatch):
    collect_half(store, monkeypatch)
    with store.open("stage-1", KEY) as writer:
        assert writer.head is None
        again = commit(writer, 5)
    assert store.history("stage-1", KEY) == [again]
    assert len(place.blobs()) == 2
