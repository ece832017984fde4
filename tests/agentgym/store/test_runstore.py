"""What every back end promises: commits survive what happens to processes, and damage to them is
seen.

Leases and kills are tried on real processes; S3 is a real server.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest

from agentgym.store import posix, s3
from agentgym.store.lease import Fenced, Holder, LeaseHeld
from agentgym.store.manifest import (
    NOT_IDENTITY,
    Blob,
    BlobMissing,
    DigestMismatch,
    Manifest,
    ManifestError,
    canonical_json,
    encode_commit,
    sha256,
)
from agentgym.store.posix import posix_store
from agentgym.store.runstore import RunStore, folder_name
from agentgym.store.s3 import s3_store
from agentgym.store.writer import Passed, StepWriter

KEY = "ab" * 32

# What every child process begins with.
CHILD = """
import os, signal, socket, sys, time
from pathlib import Path
from agentgym.store import posix, runstore, s3
from agentgym.store.lease import Fenced, LeaseHeld

KEY = "ab" * 32

def commit(writer, step, done=False):
    return writer.commit(done=done, state={"global_step": step}, parents={}, config={}, \
results={}, timings={},
        blobs={"model": b"weights %d" % step}, records={"metrics.jsonl": b"line %d\\n" % step})

def say(text):
    print(text, flush=True)

def wait_for(path):
    for _ in range(12000):
        if Path(path).exists():
            return
        time.sleep(0.005)
    sys.exit(f"waited in vain for {path}")

root, ttl_s, scratch = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
store = s3.s3_store(root, lease_ttl_s=ttl_s) if root.startswith("s3://") else \
posix.posix_store(Path(root), lease_ttl_s=ttl_s)
"""


@dataclass
class Place:
    """Where a store lies, and a way round it to what it wrote: what disks and people do to
    files.
    """

    root: str
    scratch: Path  # a folder that this test and its children share

    def store(self, ttl_s: float = 30.0) -> RunStore:
        if self.root.startswith("s3://"):
            return s3_store(self.root, lease_ttl_s=ttl_s)
        return posix_store(Path(self.root), lease_ttl_s=ttl_s)

    @property
    def folder(self) -> str:
        return f"{self.root}/steps/stage-1-{KEY[:16]}"

    @property
    def _bucket(self) -> tuple[object, str]:
        _, _, name, prefix = self.folder.split("/", 3)
        return boto3.resource("s3").Bucket(name), prefix

    def names(self) -> list[str]:
        """Of all files of the step, below its folder."""
        if self.root.startswith("s3://"):
            bucket, prefix = self._bucket
            return [
                found.key.removeprefix(f"{prefix}/")
                for found in bucket.objects.filter(Prefix=f"{prefix}/")
            ]
        return [
            path.relative_to(self.folder).as_posix()
            for path in Path(self.folder).rglob("*")
            if path.is_file()
        ]

    def blobs(self) -> list[str]:
        return [name for name in self.names() if name.startswith("blobs/")]

    def write(self, name: str, data: bytes) -> None:
        if self.root.startswith("s3://"):
            bucket, prefix = self._bucket
            bucket.put_object(Key=f"{prefix}/{name}", Body=data)
        else:
            Path(self.folder, name).write_bytes(data)

    def read(self, name: str) -> bytes:
        if self.root.startswith("s3://"):
            bucket, prefix = self._bucket
            return bucket.Object(f"{prefix}/{name}").get()["Body"].read()
        return Path(self.folder, name).read_bytes()

    def delete(self, name: str) -> None:
        if self.root.startswith("s3://"):
            bucket, prefix = self._bucket
            bucket.Object(f"{prefix}/{name}").delete()
        else:
            Path(self.folder, name).unlink()

    def start(self, script: str, ttl_s: float = 30.0) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-c", CHILD + script, self.root, str(ttl_s), str(self.scratch)]
        return subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def commit(
    writer: StepWriter,
    step: int,
    *,
    done: bool = False,
    blobs: dict[str, bytes | Blob] | None = None,
) -> Manifest:
    return writer.commit(
        done=done,
        state={"global_step": step},
        parents={},
        config={},
        blobs={"model": b"weights %d" % step} if blobs is None else blobs,
        records={"metrics.jsonl": b"line %d\n" % step},
        results={},
        timings={},
    )


@pytest.fixture(params=["posix", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    root = request.getfixturevalue("s3_uri") if request.param == "s3" else str(tmp_path / "store")
    return Place(root, tmp_path)


@pytest.fixture
def store(place: Place) -> RunStore:
    return place.store()


def test_nothing_is_known_of_a_step_nobody_began(store: RunStore) -> None:
    assert store.head("stage-1", KEY) is None
    assert store.final("stage-1", KEY) is None
    assert store.history("stage-1", KEY) == []
    assert store.heads() == []


def test_commits_are_read_back_in_order_and_the_last_is_the_head(store: RunStore) -> None:
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


def passed(step: int) -> Passed:
    return Passed({"global_step": step}, {"metrics.jsonl": b"line %d\n" % step})


def commit_several(writer: StepWriter, first: int, last: int) -> Manifest:
    """One commit of the optimizer steps `first` to `last`."""
    return writer.commit(
        done=False,
        state={"global_step": last},
        parents={},
        config={},
        blobs={"model": b"weights %d" % last},
        records={"metrics.jsonl": b"line %d\n" % last},
        results={},
        timings={},
        earlier=[passed(step) for step in range(first, last)],
    )


def test_a_commit_of_several_steps_has_a_manifest_of_each(place: Place, store: RunStore) -> None:
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


def test_how_many_steps_a_commit_makes_durable_changes_no_digest(
    place: Place, store: RunStore
) -> None:
    other = Place(f"{place.root}-other", place.scratch).store()
    with store.open("stage-1", KEY) as writer:
        for step in range(1, 5):
            one_by_one = commit_several(writer, step, step)
    with other.open("stage-1", KEY) as writer:
        assert commit_several(writer, 1, 4).digest == one_by_one.digest


def test_a_damaged_newest_commit_is_dropped_and_its_numbers_are_given_anew(
    place: Place, store: RunStore, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_commit_whose_content_is_damaged_can_be_dropped(place: Place, store: RunStore) -> None:
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


def test_a_newer_file_is_no_damage(place: Place, store: RunStore) -> None:
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
        commit(writer, 2)
    (name,) = [each for each in place.names() if re.match(r"manifests/000001\b", each)]
    place.write(name, b'{"schema_version": 3}')
    with pytest.raises(ManifestError, match="upgrade it"):
        store.head("stage-1", KEY)


def test_the_next_writer_continues_at_once_with_a_higher_epoch(store: RunStore) -> None:
    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1)
        assert writer.epoch == 1
    with store.open("stage-1", KEY) as writer:
        assert (writer.epoch, writer.head) == (2, head)
        assert commit(writer, 2).epoch == 2


def test_equal_results_have_equal_digests_whoever_reached_them(
    place: Place, store: RunStore
) -> None:
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


def test_keys_lists_every_key_of_one_step_name(store: RunStore) -> None:
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


def test_an_unchanged_blob_is_named_again_and_not_written_again(
    place: Place, store: RunStore
) -> None:
    with store.open("stage-1", KEY) as writer:
        first = commit(writer, 1)
        second = commit(writer, 2, blobs={"model": first.blobs["model"]})
        assert store.read(second, "model") == b"weights 1"
        assert len(place.blobs()) == 3  # one model, two logs
        with pytest.raises(BlobMissing, match="model was given as stored"):
            commit(writer, 3, blobs={"model": Blob.of(b"never stored")})
        assert writer.head == second


def test_a_tampered_blob_is_detected_and_named(place: Place, store: RunStore) -> None:
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


def test_committing_the_same_content_heals_a_damaged_blob(place: Place, store: RunStore) -> None:
    with store.open("stage-1", KEY) as writer:
        first = commit(writer, 1)
        place.write(f"blobs/{first.blobs['model'].digest}", b"weights X")
        commit(writer, 1)
    store.verify(first)


def test_pruning_keeps_the_newest_blobs_and_every_record(place: Place, store: RunStore) -> None:
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


def test_a_lost_blob_of_the_head_is_told_from_a_pruned_one(place: Place, store: RunStore) -> None:
    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1)
    place.delete(f"blobs/{head.blobs['model'].digest}")
    with pytest.raises(BlobMissing, match="restore that file, or delete"):
        store.read(head, "model")
    with pytest.raises(
        KeyError, match=r"commit 0 has no 'tokenizer'; it has model, metrics\.jsonl"
    ):
        store.read(head, "tokenizer")


def test_a_folder_of_another_key_is_refused(store: RunStore) -> None:
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
def test_a_name_that_would_be_a_path_is_refused_at_load(
    place: Place, store: RunStore, part: str, name: str
) -> None:
    """The digest is put right again, as whoever can write to the store would."""
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


def test_commits_that_were_given_each_others_places_are_refused(
    place: Place, store: RunStore
) -> None:
    with store.open("stage-1", KEY) as writer:
        for step in range(3):
            commit(writer, step)
    names = sorted(each for each in place.names() if each.startswith("manifests/"))
    first, second = (place.read(name) for name in names[:2])
    place.write(names[0], second)
    place.write(names[1], first)
    with pytest.raises(ManifestError, match="holds commit 1: commits were given other places"):
        store.history("stage-1", KEY)


def test_a_bad_step_name_or_key_is_refused_before_anything_is_made(store: RunStore) -> None:
    for step, key in (("../x", KEY), ("Stage", KEY), ("stage-1", "abc")):
        with pytest.raises(ValueError, match="must be"), store.open(step, key):
            pass
    assert store.heads() == []
    assert not Path(store.root).exists()


def hold_and_fail(store: RunStore) -> None:
    with store.open("stage-1", KEY):
        named = (
            rf"step stage-1 .* is held by process {os.getpid()} on .*, since \d{{4}}-.*; wait for"
            r" it or stop"
        )
        with pytest.raises(LeaseHeld, match=named):
            store.open("stage-1", KEY).__enter__()
        raise RuntimeError("boom")


def test_a_live_holder_is_named_and_an_error_inside_gives_the_lease_back(store: RunStore) -> None:
    with pytest.raises(RuntimeError, match="boom"):
        hold_and_fail(store)
    with store.open("stage-1", KEY) as writer:
        assert writer.epoch == 2


@pytest.mark.integration
def test_another_process_that_lives_keeps_its_lease_and_one_that_was_killed_loses_it_at_once(
    place: Place, store: RunStore
) -> None:
    child = place.start(
        "with store.open('stage-1', KEY) as w:\n    commit(w, 1)\n    say('open')\n   "
        " time.sleep(60)"
    )
    assert line(child) == "open"
    with pytest.raises(LeaseHeld, match=f"process {child.pid} "):
        store.open("stage-1", KEY).__enter__()
    child.kill()  # not reaped yet: a zombie holds nothing
    deadline = time.monotonic() + 60
    while True:
        try:
            with store.open("stage-1", KEY) as writer:
                assert writer.epoch == 2
                assert writer.head is not None
                break
        except LeaseHeld:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    child.communicate()


@pytest.mark.integration
@pytest.mark.parametrize(
    "where", ["before the blobs", "between the blobs", "before the manifest", "before it counts"]
)
def test_a_kill_before_the_last_write_leaves_the_previous_commit(
    place: Place, store: RunStore, where: str
) -> None:
    is_s3 = place.root.startswith("s3://")
    folder, lease = (
        ("s3.S3Folder", "s3.S3Lease") if is_s3 else ("posix.PosixFolder", "posix.PosixLease")
    )
    kill = "lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)"
    patch = {
        "before the blobs": f"{folder}.put = {kill}",
        "between the blobs": (
            f"put, kill = {folder}.put, {kill}\n{folder}.put = lambda f, b, d: (put if d[:1] =="
            " b'w' else kill)(f, b, d)"
        ),
        "before the manifest": f"{lease}.commit = {kill}",
        "before it counts": (
            f"s3.S3Lease._replace = {kill}" if is_s3 else f"posix.create_exclusively = {kill}"
        ),
    }[where]
    child = place.start(
        f"with store.open('stage-1', KEY) as w:\n    commit(w, 1)\n{_indent(patch)}\n    commit(w,"
        " 2)\n    say('alive')"
    )
    _, errors = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL, errors
    head = store.head("stage-1", KEY)
    assert head is not None
    assert (head.seq, head.state) == (0, {"global_step": 1})
    store.verify(head)
    with store.open("stage-1", KEY) as writer:
        assert writer.head == head
        # its blobs are named again and count; what else the killed writer left is swept
        assert commit(writer, 2).seq == 1
        writer.prune(keep=2)
    assert len(place.blobs()) == 4
    assert len([name for name in place.names() if name.startswith("manifests/")]) == 2
    assert not [name for name in place.names() if ".tmp-" in name]


@pytest.mark.integration
def test_of_eight_processes_that_race_for_a_step_one_wins(place: Place, store: RunStore) -> None:
    script = """
say("ready")
wait_for(scratch / "go")
try:
    with store.open("stage-1", KEY) as w:
        commit(w, 1)
        say("won")
        wait_for(scratch / "stop")
except LeaseHeld:
    say("held")
"""
    children = [place.start(script) for _ in range(8)]
    assert [line(child) for child in children] == ["ready"] * 8
    (place.scratch / "go").touch()
    said = [line(child) for child in children]
    (place.scratch / "stop").touch()
    errors = [child.communicate(timeout=60)[1] for child in children]
    assert sorted(said) == ["held"] * 7 + ["won"], errors
    assert [manifest.epoch for manifest in store.history("stage-1", KEY)] == [1]


@pytest.mark.integration
def test_a_holder_on_another_host_is_waited_for_while_its_heart_beats(place: Place) -> None:
    store = place.store(ttl_s=2.0)
    script = """
socket.gethostname = lambda: "elsewhere"
with store.open("stage-1", KEY) as w:
    commit(w, 1)
    say("open")
    wait_for(scratch / "go")
    try:
        commit(w, 2)
    except Fenced as error:
        say(error)
"""
    child = place.start(script, ttl_s=2.0)
    assert line(child) == "open"
    time.sleep(4)  # twice its time to live: the heartbeat alone keeps the lease
    with pytest.raises(
        LeaseHeld,
        match=rf"process {child.pid} on elsewhere, .* heard of .*s ago; .*store\.lease_ttl_s 2$",
    ):
        store.open("stage-1", KEY).__enter__()
    child.send_signal(signal.SIGSTOP)
    with _open_when_silent(store) as writer:
        assert writer.epoch == 2
        child.send_signal(signal.SIGCONT)
        (place.scratch / "go").touch()
        message = line(child)
        child.communicate(timeout=60)
        assert re.search(rf"was taken over by process {os.getpid()} on .*, since \d{{4}}-", message)
        assert "must stop" in message
        ours = commit(writer, 20)
    assert store.head("stage-1", KEY) == ours
    assert [manifest.state["global_step"] for manifest in store.history("stage-1", KEY)] == [1, 20]


@contextlib.contextmanager
def _open_when_silent(store: RunStore) -> Iterator[StepWriter]:
    deadline = time.monotonic() + 60
    while True:
        try:
            context = store.open("stage-1", KEY)
            writer = context.__enter__()
            break
        except LeaseHeld:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    with contextlib.ExitStack() as stack:
        stack.push(context)
        yield writer


def test_a_writer_that_was_taken_over_between_its_check_and_its_last_write_is_fenced(
    place: Place, store: RunStore
) -> None:
    """The newer holder has committed; what the older one still sends counts nowhere."""
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
        writer._lease.check = lambda: None  # it looked before it was taken over
        with _taken_over(store) as newer:
            theirs = commit(newer, 20)
            with pytest.raises(
                Fenced,
                match=(
                    r"commit 1 was already made under epoch 2|taken over by process \d+ on .* since"
                ),
            ):
                commit(writer, 2)
    assert store.history("stage-1", KEY)[1:] == [theirs]
    store.verify(theirs)


@contextlib.contextmanager
def _taken_over(store: RunStore) -> Iterator[StepWriter]:
    """A second writer, as a process that holds the first for dead would open one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Holder, "refuse_if_alive", lambda *_, **__: None)
        context = store.open("stage-1", KEY)
        writer = context.__enter__()
    try:
        yield writer
    finally:
        context.__exit__(None, None, None)


def test_pruning_is_fenced_too(store: RunStore) -> None:
    with store.open("stage-1", KEY) as writer:
        first = commit(writer, 1)
        commit(writer, 2)
        with _taken_over(store), pytest.raises(Fenced):
            writer.prune(keep=1)
    store.verify(first)


def test_pruning_looks_at_the_folder_once(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of thousands of commits prunes after each: later calls must not cost what the step
    ever wrote.
    """
    with store.open("stage-1", KEY) as writer:
        commit(writer, 0)
        writer.prune(keep=1)
        monkeypatch.setattr(writer._folder, "blobs", lambda: pytest.fail("listed again"))
        monkeypatch.setattr(writer._lease, "sweep", lambda: pytest.fail("swept again"))
        for step in range(1, 4):
            commit(writer, step)
            assert writer.prune(keep=1) == 1
        # content that was a log once stays, also when it was a checkpoint in between
        commit(writer, 4, blobs={"model": b"line 2\n"})
        assert writer.prune(keep=1) == 1
        commit(writer, 5, blobs={"model": b"line 6\n"})
        assert writer.prune(keep=1) == 0
        commit(writer, 6)
        assert writer.prune(keep=1) == 0
    for manifest in store.history("stage-1", KEY):
        store.read(manifest, "metrics.jsonl")


def _indent(code: str) -> str:
    return "\n".join("    " + row for row in code.splitlines())


def test_what_is_collected_is_gone_and_the_step_can_be_made_anew(
    place: Place, store: RunStore
) -> None:
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


def test_a_step_that_somebody_holds_or_that_went_on_is_not_collected(store: RunStore) -> None:
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


def test_why_a_step_was_given_up_is_left_with_its_lease(store: RunStore) -> None:
    assert store.tenures() == {}
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
        (tenure,) = store.tenures().values()
        assert tenure.alive
        assert str(tenure).startswith(f"held by process {os.getpid()} on ")
    (tenure,) = store.tenures().values()
    assert (tenure.alive, tenure.reason) == (False, "")
    for error, reason in (
        (ValueError("two\nlines at http://me:secret@host"), "ValueError: two lines at http://host"),
        (KeyboardInterrupt(), "interrupted (KeyboardInterrupt)"),
    ):
        with pytest.raises(type(error)), store.open("stage-1", KEY):
            raise error
        tenure = store.tenures([folder_name("stage-1", KEY)])[folder_name("stage-1", KEY)]
        assert str(tenure) == reason
        assert tenure.was_interrupted == (not isinstance(error, Exception))
    with store.open("stage-1", KEY):  # the next holder begins without it
        pass
    (tenure,) = store.tenures().values()
    assert tenure.reason == ""


def test_heads_are_found_by_the_beginning_of_a_key(store: RunStore) -> None:
    for key in (KEY, "ab" + "cd" * 31, "cd" * 32):
        with store.open("runs", key) as writer:
            commit(writer, 1)
    assert [head.key for head in store.heads("runs", KEY)] == [KEY]
    assert {head.key for head in store.heads("runs", "ab")} == {KEY, "ab" + "cd" * 31}
    assert store.heads("runs", "ee") == []


def collect_half(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit whose collection ends, as by a kill, before its files go."""
    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1)
    with monkeypatch.context() as patch:
        for lease in (posix.PosixLease, s3.S3Lease):
            patch.setattr(lease, "_empty", lambda _: None)
        store.collect(head)


def test_a_collection_that_was_killed_leaves_nothing_that_counts_and_is_finished(
    place: Place, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect_half(store, monkeypatch)
    assert store.head("stage-1", KEY) is None
    assert place.blobs()
    assert store.finish_collecting() == 1
    assert not place.blobs()
    assert store.finish_collecting() == 0


def test_a_step_made_anew_while_a_killed_collection_is_finished_stays(
    place: Place, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect_half(store, monkeypatch)
    made: list[Manifest] = []
    for kind in (posix.PosixFolder, s3.S3Folder):

        def has_content(self: object, has: object = kind.has_content) -> bool:
            found = has(self)  # type: ignore[operator]
            with store.open("stage-1", KEY) as writer:
                made.append(commit(writer, 5))
            return found

        monkeypatch.setattr(kind, "has_content", has_content)
    assert store.finish_collecting() == 0
    assert store.head("stage-1", KEY) == made[0]
    store.verify(made[0])


def test_a_step_that_begins_anew_ends_a_collection_that_was_killed(
    place: Place, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect_half(store, monkeypatch)
    with store.open("stage-1", KEY) as writer:
        assert writer.head is None
        again = commit(writer, 5)
    assert store.history("stage-1", KEY) == [again]
    assert len(place.blobs()) == 2
