"""Guarantees of every back end: commits survive killed processes, and damage is detected.

Leases and kills are tested with real processes; S3 is a real server.
"""

import itertools
import json
import re
from pathlib import Path

import pytest

from agentgym.store.manifest import (
    NOT_IDENTITY,
    Blob,
    BlobMissing,
    DigestMismatch,
    ManifestError,
    canonical_json,
    encode_commit,
    sha256,
)
from tests.agentgym.store.steps import KEY, Place, commit, commit_several


def test_nothing_is_known_of_a_step_nobody_began(store):
    assert store.head("stage-1", KEY) is None
    assert store.final("stage-1", KEY) is None
    assert store.history("stage-1", KEY) == []
    assert store.heads() == []


def test_commits_are_read_back_in_order_and_the_last_is_the_head(store):
    with store.open("stage-1", KEY) as writer:
        assert writer.head is None
        first = commit(writer, 1)
        assert store.final("stage-1", KEY) is None
        second = commit(writer, 2, done=True)
    assert [manifest.seq for manifest in (first, second)] == [0, 1]
    assert store.history("stage-1", KEY) == [first, second]
    assert store.history("stage-1", KEY, after=0) == [second]
    assert store.final("stage-1", KEY) == second
    assert store.read(second, "model") == b"weights 2"
    assert (
        b"".join(
            store.read(manifest, "metrics.jsonl") for manifest in store.history("stage-1", KEY)
        )
        == b"line 1\nline 2\n"
    )
    store.verify(second)


def test_a_commit_of_several_steps_has_a_manifest_of_each(place, store):
    with store.open("stage-1", KEY) as writer:
        commit_several(writer, 1, 3)
        commit_several(writer, 4, 4)
    with store.open("stage-1", KEY) as writer:
        assert writer.head is not None
        assert writer.head.state == {"global_step": 4}
        last = commit_several(writer, 5, 9)
        writer.prune(keep=1)
    history = store.history("stage-1", KEY)
    assert [each.seq for each in history] == list(range(9))
    assert [each.state["global_step"] for each in history] == list(range(1, 10))
    assert [bool(each.blobs) for each in history] == [step in (3, 4, 9) for step in range(1, 10)]
    for before, each in itertools.pairwise(history):
        assert each.follows == before.records_digest
    assert len([name for name in place.names() if name.startswith("manifests/")]) == 3
    for after in range(-1, 10):
        assert store.history("stage-1", KEY, after=after) == history[after + 1 :]
    assert store.head("stage-1", KEY) == last
    assert [store.read(each, "metrics.jsonl") for each in history] == [
        b"line %d\n" % step for step in range(1, 10)
    ]


def test_how_many_steps_a_commit_makes_durable_changes_no_digest(place, store):
    other = Place(f"{place.root}-other", place.scratch).store()
    with store.open("stage-1", KEY) as writer:
        for step in range(1, 5):
            one_by_one = commit_several(writer, step, step)
    with other.open("stage-1", KEY) as writer:
        assert commit_several(writer, 1, 4).digest == one_by_one.digest


def test_a_damaged_newest_commit_is_dropped_and_its_numbers_are_given_anew(place, store, caplog):
    with store.open("stage-1", KEY) as writer:
        first = commit_several(writer, 1, 2)
        commit_several(writer, 3, 5)
    (name,) = [each for each in place.names() if re.match(r"manifests/000002\b", each)]
    place.write(name, place.read(name).replace(b'"global_step": 5', b'"global_step": 6'))
    assert store.head("stage-1", KEY) == first
    assert "its content has" in caplog.text
    assert "going by the commit before, 0" in caplog.text
    with store.open("stage-1", KEY) as writer:
        assert writer.head == first
        commit_several(writer, 3, 3)
        again = commit_several(writer, 4, 4)
    assert [each.seq for each in store.history("stage-1", KEY)] == [0, 1, 2, 3]
    assert store.head("stage-1", KEY) == again


def test_a_commit_whose_content_is_damaged_can_be_dropped(place, store):
    with store.open("stage-1", KEY) as writer:
        first = commit_several(writer, 1, 2)
        second = commit_several(writer, 3, 5)
    place.write(f"blobs/{second.blobs['model'].digest}", b"weights X")
    with store.open("stage-1", KEY) as writer:
        assert writer.fall_back() == first
        third = commit_several(writer, 3, 5)
    store.verify(third)
    assert store.history("stage-1", KEY)[2:] != [second]
    assert [each.seq for each in store.history("stage-1", KEY)] == [0, 1, 2, 3, 4]


def test_a_newer_file_is_no_damage(place, store):
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
        commit(writer, 2)
    (name,) = [each for each in place.names() if re.match(r"manifests/000001\b", each)]
    place.write(name, b'{"schema_version": 3}')
    with pytest.raises(ManifestError, match="upgrade it"):
        store.head("stage-1", KEY)


def test_the_next_writer_continues_at_once_with_a_higher_epoch(store):
    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1)
        assert writer.epoch == 1
    with store.open("stage-1", KEY) as writer:
        assert (writer.epoch, writer.head) == (2, head)
        assert commit(writer, 2).epoch == 2


def test_equal_results_have_equal_digests_whoever_reached_them(place, store):
    other = Place(f"{place.root}-other", place.scratch).store()
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
    with store.open("stage-1", KEY) as writer:
        resumed = commit(writer, 2, done=True)
    with other.open("stage-1", KEY) as writer:
        commit(writer, 1)
        straight = commit(writer, 2, done=True)
    assert resumed.digest == straight.digest
    assert resumed.epoch != straight.epoch


def test_keys_lists_every_key_of_one_step_name(store):
    for step, key in (
        ("stage-1", KEY),
        ("stage-1", "cd" * 32),
        ("stage-1-b", KEY),
        ("evaluate", KEY),
    ):
        with store.open(step, key) as writer:
            commit(writer, 1)
    assert [(head.step, head.key) for head in store.heads("stage-1")] == [
        ("stage-1", KEY),
        ("stage-1", "cd" * 32),
    ]
    assert len(store.heads()) == 4


def test_an_unchanged_blob_is_named_again_and_not_written_again(place, store):
    with store.open("stage-1", KEY) as writer:
        first = commit(writer, 1)
        second = commit(writer, 2, blobs={"model": first.blobs["model"]})
        assert store.read(second, "model") == b"weights 1"
        assert len(place.blobs()) == 3  # the model once, and two logs
        with pytest.raises(BlobMissing, match="model was given as stored"):
            commit(writer, 3, blobs={"model": Blob.of(b"never stored")})
        assert writer.head == second


def test_a_tampered_blob_is_detected_and_named(place, store):
    with store.open("stage-1", KEY) as writer:
        manifest = commit(writer, 1, blobs={"model": b"weights", "optimizer": b"moments"})
    name = f"blobs/{manifest.blobs['model'].digest}"
    place.write(name, b"weightz")
    message = (
        rf"model of step stage-1 commit 0 is damaged: {place.folder}/{name}: "
        rf"expected sha256 {name[6:]}, got sha256 [0-9a-f]{{64}}; restore"
    )
    with pytest.raises(DigestMismatch, match=message):
        store.read(manifest, "model")
    with pytest.raises(DigestMismatch, match=message):
        store.verify(manifest)
    place.write(name, b"weigh")
    with pytest.raises(DigestMismatch, match="expected 7 bytes, got 5 bytes"):
        store.verify(manifest)
    assert store.read(manifest, "optimizer") == b"moments"


def test_committing_the_same_content_heals_a_damaged_blob(place, store):
    with store.open("stage-1", KEY) as writer:
        first = commit(writer, 1)
        place.write(f"blobs/{first.blobs['model'].digest}", b"weights X")
        commit(writer, 1)
    store.verify(first)


def test_pruning_keeps_the_newest_blobs_and_every_record(place, store):
    with store.open("stage-1", KEY) as writer:
        commits = [commit(writer, step) for step in range(5)]
        place.write(f"blobs/{'cd' * 32}", b"of a commit that a kill prevented")
        assert writer.prune(keep=2) == 4
        assert writer.prune(keep=2) == 0
        assert commit(writer, 5).seq == 5
    assert [store.read(manifest, "metrics.jsonl") for manifest in commits] == [
        b"line %d\n" % step for step in range(5)
    ]
    store.verify(commits[3])
    store.verify(commits[4])
    with pytest.raises(
        BlobMissing,
        match=(
            r"model of step stage-1 commit 2 is not there: .* only the newest commits keep their"
            r" blobs .*use commit 5"
        ),
    ):
        store.read(commits[2], "model")
    with pytest.raises(BlobMissing):
        store.verify(commits[0])


def test_a_lost_blob_of_the_head_is_told_from_a_pruned_one(place, store):
    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1)
    place.delete(f"blobs/{head.blobs['model'].digest}")
    with pytest.raises(BlobMissing, match="restore that file, or delete"):
        store.read(head, "model")
    with pytest.raises(
        KeyError, match=r"commit 0 has no 'tokenizer'; it has model, metrics\.jsonl"
    ):
        store.read(head, "tokenizer")


def test_a_folder_of_another_key_is_refused(store):
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
    with pytest.raises(ManifestError, match="expected stage-1-abababab"):
        store.head("stage-1", KEY[:16] + "0" * 48)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("records", "../../../.bashrc"),
        ("blobs", "../authorized_keys"),
        ("records", "/etc/cron.d/x"),
        ("records", ".ssh"),
        ("records", "a/b"),
        ("blobs", "a\\b"),
        ("blobs", "a\nb"),
        ("blobs", ""),
        ("records", "x" * 101),
        ("records", "model"),
        ("parents", "../x"),
        ("step", "../../stage-1"),
    ],
)
def test_a_name_that_would_be_a_path_is_refused_at_load(place, store, part, name):
    """Recompute the digest, as a writer of the store could."""
    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1, done=True)
    tree = json.loads(encode_commit([head]))
    if part == "step":
        tree["step"] = name
    else:
        tree[part][name] = KEY if part == "parents" else tree["records"]["metrics.jsonl"]
    tree["digest"] = sha256(
        canonical_json({key: tree[key] for key in tree.keys() - NOT_IDENTITY - {"digest"}})
    )
    manifest = next(each for each in place.names() if each.startswith("manifests/"))
    place.write(manifest, json.dumps(tree).encode())
    refused = (
        re.escape(f"{place.folder}/{manifest}: ")
        + f"(step )?.*{re.escape(repr(name))} is .*; restore it from a copy"
    )
    for read in (store.head, store.final, store.history):
        with pytest.raises(ManifestError, match=refused):
            read("stage-1", KEY)
    with pytest.raises(ManifestError, match=refused):
        store.heads()


def test_commits_that_were_given_each_others_places_are_refused(place, store):
    with store.open("stage-1", KEY) as writer:
        for step in range(3):
            commit(writer, step)
    names = sorted(each for each in place.names() if each.startswith("manifests/"))
    first, second = (place.read(name) for name in names[:2])
    place.write(names[0], second)
    place.write(names[1], first)
    with pytest.raises(ManifestError, match="holds commit 1: commits were given other places"):
        store.history("stage-1", KEY)


def test_a_bad_step_name_or_key_is_refused_before_anything_is_made(store):
    for step, key in (("../x", KEY), ("Stage", KEY), ("stage-1", "abc")):
        with pytest.raises(ValueError, match="must be"), store.open(step, key):
            pass
    assert store.heads() == []
    assert not Path(store.root).exists()


def test_pruning_looks_at_the_folder_once(store, monkeypatch):
    """Keep later calls cheap: a run of thousands of commits prunes after each one."""
    with store.open("stage-1", KEY) as writer:
        commit(writer, 0)
        writer.prune(keep=1)
        monkeypatch.setattr(writer._folder, "blobs", lambda: pytest.fail("listed again"))
        monkeypatch.setattr(writer._lease, "sweep", lambda: pytest.fail("swept again"))
        for step in range(1, 4):
            commit(writer, step)
            assert writer.prune(keep=1) == 1
        # content that was once a log is kept, even if a checkpoint had it meanwhile
        commit(writer, 4, blobs={"model": b"line 2\n"})
        assert writer.prune(keep=1) == 1
        commit(writer, 5, blobs={"model": b"line 6\n"})
        assert writer.prune(keep=1) == 0
        commit(writer, 6)
        assert writer.prune(keep=1) == 0
    for manifest in store.history("stage-1", KEY):
        store.read(manifest, "metrics.jsonl")


def test_heads_are_found_by_the_beginning_of_a_key(store):
    for key in (KEY, "ab" + "cd" * 31, "cd" * 32):
        with store.open("runs", key) as writer:
            commit(writer, 1)
    assert [head.key for head in store.heads("runs", KEY)] == [KEY]
    assert {head.key for head in store.heads("runs", "ab")} == {KEY, "ab" + "cd" * 31}
    assert store.heads("runs", "ee") == []
