"""Commits survive what happens to processes, and damage to them is seen. Leases and kills are tried on real processes."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentgym.store.files import StoreFull
from agentgym.store.lease import Fenced, LeaseHeld
from agentgym.store.manifest import Blob, Manifest, ManifestError
from agentgym.store.posix import BlobMissing, DigestMismatch, RunStore, StepWriter

KEY = "ab" * 32

# What every child process begins with.
CHILD = """
import os, signal, socket, sys, time
from pathlib import Path
from agentgym.store import posix
from agentgym.store.lease import Fenced, LeaseHeld
from agentgym.store.posix import RunStore

KEY = "ab" * 32

def commit(writer, step, done=False):
    return writer.commit(done=done, state={"global_step": step}, parents={}, config={}, results={}, timings={},
        blobs={"model": b"weights %d" % step}, records={"metrics.jsonl": b"line %d\\n" % step})

def say(text):
    print(text, flush=True)

def wait_for(path):
    for _ in range(6000):
        if Path(path).exists():
            return
        time.sleep(0.005)
    sys.exit(f"waited in vain for {path}")

root = Path(sys.argv[1])
store = RunStore(root, lease_ttl_s=float(sys.argv[2]))
"""


def start(root: Path, script: str, ttl_s: float = 30.0) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", CHILD + script, str(root), str(ttl_s)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def commit(writer: StepWriter, step: int, *, done: bool = False, blobs: dict[str, bytes | Blob] | None = None) -> Manifest:
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


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "store", lease_ttl_s=30.0)


@pytest.fixture
def folder(store: RunStore) -> Path:
    return store.root / "steps" / f"stage-1-{KEY[:16]}"


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
    assert b"".join(store.read(manifest, "metrics.jsonl") for manifest in store.history("stage-1", KEY)) == b"line 1\nline 2\n"
    store.verify(second)


def test_the_next_writer_continues_at_once_with_a_higher_epoch(store: RunStore) -> None:
    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1)
        assert writer.epoch == 1
    with store.open("stage-1", KEY) as writer:
        assert (writer.epoch, writer.head) == (2, head)
        assert commit(writer, 2).epoch == 2


def test_equal_results_have_equal_digests_whoever_reached_them(store: RunStore, tmp_path: Path) -> None:
    other = RunStore(tmp_path / "other", lease_ttl_s=30.0)
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
    for step, key in (("stage-1", KEY), ("stage-1", "cd" * 32), ("stage-1-b", KEY), ("evaluate", KEY)):
        with store.open(step, key) as writer:
            commit(writer, 1)
    assert [(head.step, head.key) for head in store.keys("stage-1")] == [("stage-1", KEY), ("stage-1", "cd" * 32)]
    assert len(store.heads()) == 4


def test_an_unchanged_blob_is_named_again_and_not_written_again(store: RunStore, folder: Path) -> None:
    with store.open("stage-1", KEY) as writer:
        first = commit(writer, 1)
        second = commit(writer, 2, blobs={"model": first.blobs["model"]})
        assert store.read(second, "model") == b"weights 1"
        assert len(list((folder / "blobs").iterdir())) == 3  # one model, two logs
        with pytest.raises(BlobMissing, match="model was given as unchanged"):
            commit(writer, 3, blobs={"model": Blob.of(b"never stored")})
        assert writer.head == second


def test_a_tampered_blob_is_detected_and_named(store: RunStore, folder: Path) -> None:
    with store.open("stage-1", KEY) as writer:
        manifest = commit(writer, 1, blobs={"model": b"weights", "optimizer": b"moments"})
    path = folder / "blobs" / manifest.blobs["model"].digest
    path.write_bytes(b"weightz")
    message = rf"model of step stage-1 commit 0 is damaged: {path}: expected sha256 {path.name}, got sha256 [0-9a-f]{{64}}; restore"
    with pytest.raises(DigestMismatch, match=message):
        store.read(manifest, "model")
    with pytest.raises(DigestMismatch, match=message):
        store.verify(manifest)
    path.write_bytes(b"weigh")
    with pytest.raises(DigestMismatch, match="expected 7 bytes, got 5 bytes"):
        store.verify(manifest)
    assert store.read(manifest, "optimizer") == b"moments"


def test_committing_the_same_content_heals_a_damaged_blob(store: RunStore, folder: Path) -> None:
    with store.open("stage-1", KEY) as writer:
        first = commit(writer, 1)
        (folder / "blobs" / first.blobs["model"].digest).write_bytes(b"weights X")
        commit(writer, 1)
    store.verify(first)


def test_pruning_keeps_the_newest_blobs_and_every_record(store: RunStore, folder: Path) -> None:
    with store.open("stage-1", KEY) as writer:
        commits = [commit(writer, step) for step in range(5)]
        (folder / "blobs" / ".tmp-left-by-a-kill").write_bytes(b"half")
        (folder / "manifests" / ".tmp-left-by-a-kill").write_bytes(b"half")
        (folder / "leases" / ".tmp-left-by-a-kill").write_bytes(b"half")
        assert writer.prune(keep=2) == 6
        assert writer.prune(keep=2) == 0
        assert commit(writer, 5).seq == 5
    assert [store.read(manifest, "metrics.jsonl") for manifest in commits] == [b"line %d\n" % step for step in range(5)]
    store.verify(commits[3])
    store.verify(commits[4])
    with pytest.raises(
        BlobMissing, match=r"model of step stage-1 commit 2 is not there: .* only the newest commits keep their blobs .*use commit 5"
    ):
        store.read(commits[2], "model")
    with pytest.raises(BlobMissing):
        store.verify(commits[0])


def test_a_lost_blob_of_the_head_is_told_from_a_pruned_one(store: RunStore, folder: Path) -> None:
    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1)
    (folder / "blobs" / head.blobs["model"].digest).unlink()
    with pytest.raises(BlobMissing, match="restore that file, or delete"):
        store.read(head, "model")
    with pytest.raises(KeyError, match=r"commit 0 has no 'tokenizer'; it has model, metrics\.jsonl"):
        store.read(head, "tokenizer")


def test_a_folder_of_another_key_is_refused(store: RunStore) -> None:
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
    with pytest.raises(ManifestError, match="expected stage-1 with"):
        store.head("stage-1", KEY[:16] + "0" * 48)


def test_a_full_disk_leaves_the_head_valid_and_no_litter(store: RunStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with store.open("stage-1", KEY) as writer:
        head = commit(writer, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(StoreFull, match=r"no space left for 9 bytes .*the last commit stays valid, make room"):
                commit(writer, 2)
        assert writer.head == store.head("stage-1", KEY) == head
        assert not list(folder.rglob(".tmp-*"))
        assert commit(writer, 2).seq == 1


def test_a_bad_step_name_or_key_is_refused_before_anything_is_made(store: RunStore) -> None:
    for step, key in (("../x", KEY), ("Stage", KEY), ("stage-1", "abc")):
        with pytest.raises(ValueError, match="must be"), store.open(step, key):
            pass
    assert not store.root.exists()


def hold_and_fail(store: RunStore) -> None:
    with store.open("stage-1", KEY):
        named = rf"step stage-1 .* is held by process {os.getpid()} on .*, since \d{{4}}-.*; wait for it or stop"
        with pytest.raises(LeaseHeld, match=named):
            store.open("stage-1", KEY).__enter__()
        raise RuntimeError("boom")


def test_a_live_holder_is_named_and_an_error_inside_gives_the_lease_back(store: RunStore) -> None:
    with pytest.raises(RuntimeError, match="boom"):
        hold_and_fail(store)
    with store.open("stage-1", KEY) as writer:
        assert writer.epoch == 2


def test_another_process_that_lives_keeps_its_lease_and_one_that_was_killed_loses_it_at_once(store: RunStore) -> None:
    child = start(store.root, "with store.open('stage-1', KEY) as w:\n    commit(w, 1)\n    say('open')\n    time.sleep(60)")
    assert line(child) == "open"
    with pytest.raises(LeaseHeld, match=f"process {child.pid} "):
        store.open("stage-1", KEY).__enter__()
    child.kill()  # not reaped yet: a zombie holds nothing
    deadline = time.monotonic() + 5
    while True:
        try:
            with store.open("stage-1", KEY) as writer:
                assert writer.epoch == 2
                assert writer.head is not None
                break
        except LeaseHeld:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    child.communicate()


@pytest.mark.parametrize("where", ["before the blobs", "between the blobs", "before the manifest", "before its name"])
def test_a_kill_before_the_manifest_leaves_the_previous_commit(store: RunStore, folder: Path, where: str) -> None:
    kill = "lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)"
    patch = {
        "before the blobs": f"posix.StepWriter._put = {kill}",
        "between the blobs": f"put, kill = posix.StepWriter._put, {kill}\n"
        "posix.StepWriter._put = lambda w, d: (put if d[:1] == b'w' else kill)(w, d)",
        "before the manifest": f"posix.sync_folder = {kill}",
        "before its name": f"posix.create_exclusively = {kill}",
    }[where]
    child = start(
        store.root, f"with store.open('stage-1', KEY) as w:\n    commit(w, 1)\n{_indent(patch)}\n    commit(w, 2)\n    say('alive')"
    )
    _, errors = child.communicate(timeout=30)
    assert child.returncode == -signal.SIGKILL, errors
    head = store.head("stage-1", KEY)
    assert head is not None
    assert (head.seq, head.state) == (0, {"global_step": 1})
    store.verify(head)
    with store.open("stage-1", KEY) as writer:
        assert writer.head == head
        assert commit(writer, 2).seq == 1
        writer.prune(keep=2)
    assert not list(folder.rglob(".tmp-*"))


def test_of_eight_processes_that_race_for_a_step_one_wins(store: RunStore, tmp_path: Path) -> None:
    script = """
say("ready")
wait_for(root.parent / "go")
try:
    with store.open("stage-1", KEY) as w:
        commit(w, 1)
        say("won")
        wait_for(root.parent / "stop")
except LeaseHeld:
    say("held")
"""
    children = [start(store.root, script) for _ in range(8)]
    assert [line(child) for child in children] == ["ready"] * 8
    (tmp_path / "go").touch()
    said = [line(child) for child in children]
    (tmp_path / "stop").touch()
    errors = [child.communicate(timeout=30)[1] for child in children]
    assert sorted(said) == ["held"] * 7 + ["won"], errors
    assert [manifest.epoch for manifest in store.history("stage-1", KEY)] == [1]


def test_a_holder_on_another_host_is_waited_for_while_its_heart_beats(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "store", lease_ttl_s=1.0)
    script = """
socket.gethostname = lambda: "elsewhere"
with store.open("stage-1", KEY) as w:
    commit(w, 1)
    say("open")
    wait_for(root.parent / "go")
    try:
        commit(w, 2)
    except Fenced as error:
        say(error)
"""
    child = start(store.root, script, ttl_s=1.0)
    assert line(child) == "open"
    time.sleep(1.5)  # more than its time to live: the heartbeat alone keeps the lease
    with pytest.raises(LeaseHeld, match=rf"process {child.pid} on elsewhere, .* heard of .*s ago; .*store\.lease_ttl_s 1$"):
        store.open("stage-1", KEY).__enter__()
    child.send_signal(signal.SIGSTOP)
    time.sleep(1.3)
    with store.open("stage-1", KEY) as writer:
        assert writer.epoch == 2
        child.send_signal(signal.SIGCONT)
        (tmp_path / "go").touch()
        message = line(child)
        child.communicate(timeout=30)
        assert f"was taken over by process {os.getpid()} on " in message
        assert "must stop" in message
        ours = commit(writer, 20)
    assert store.head("stage-1", KEY) == ours
    assert [manifest.state["global_step"] for manifest in store.history("stage-1", KEY)] == [1, 20]


def test_a_commit_whose_number_is_taken_is_fenced(store: RunStore, folder: Path) -> None:
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
        late = (folder / "manifests" / "000000.json").read_bytes()
        (folder / "manifests" / "000001.json").write_bytes(late)
        with pytest.raises(Fenced, match="commit 1 was already made under epoch 1"):
            commit(writer, 2)


def test_pruning_is_fenced_too(store: RunStore, folder: Path) -> None:
    with store.open("stage-1", KEY) as writer:
        first = commit(writer, 1)
        commit(writer, 2)
        newer = (folder / "leases" / "000001.json").read_text().replace('"epoch": 1', '"epoch": 2')
        (folder / "leases" / "000002.json").write_text(newer)
        with pytest.raises(Fenced):
            writer.prune(keep=1)
    store.verify(first)


def test_twelve_small_manifests_are_verified_in_well_under_a_second(store: RunStore) -> None:
    with store.open("stage-1", KEY) as writer:
        commits = [commit(writer, step, blobs={"model": os.urandom(500_000)}) for step in range(12)]
    began = time.perf_counter()
    for manifest in commits:
        store.verify(manifest)
    assert time.perf_counter() - began < 0.5


def _indent(code: str) -> str:
    return "\n".join("    " + row for row in code.splitlines())
