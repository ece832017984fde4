"""Leases and commits of a step whose process is killed, silent or taken over."""

import contextlib
import os
import re
import signal
import time

import pytest

from agentgym.store.lease import Fenced, Holder, LeaseHeld
from agentgym.store.runstore import folder_name
from tests.agentgym.store.steps import KEY, commit, line


def hold_and_fail(store):
    with store.open("stage-1", KEY):
        named = (
            rf"step stage-1 .* is held by process {os.getpid()} on .*, since \d{{4}}-.*; wait for"
            r" it or stop"
        )
        with pytest.raises(LeaseHeld, match=named):
            store.open("stage-1", KEY).__enter__()
        raise RuntimeError("boom")


def test_a_live_holder_is_named_and_an_error_inside_gives_the_lease_back(store):
    with pytest.raises(RuntimeError, match="boom"):
        hold_and_fail(store)
    with store.open("stage-1", KEY) as writer:
        assert writer.epoch == 2


@pytest.mark.integration
def test_another_process_that_lives_keeps_its_lease_and_one_that_was_killed_loses_it_at_once(
    place, store
):
    child = place.start(
        "with store.open('stage-1', KEY) as w:\n    commit(w, 1)\n    say('open')\n   "
        " time.sleep(60)"
    )
    assert line(child) == "open"
    with pytest.raises(LeaseHeld, match=f"process {child.pid} "):
        store.open("stage-1", KEY).__enter__()
    child.kill()  # not reaped yet: zombies hold no lease
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
def test_a_kill_before_the_last_write_leaves_the_previous_commit(place, store, where):
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
        # its blobs are valid and reused; other files of the killed writer are deleted
        assert commit(writer, 2).seq == 1
        writer.prune(keep=2)
    assert len(place.blobs()) == 4
    assert len([name for name in place.names() if name.startswith("manifests/")]) == 2
    assert not [name for name in place.names() if ".tmp-" in name]


@pytest.mark.integration
def test_of_eight_processes_that_race_for_a_step_one_wins(place, store):
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
def test_a_holder_on_another_host_is_waited_for_while_its_heart_beats(place):
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
    time.sleep(4)  # twice the time to live: only the heartbeat keeps the lease
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
def _open_when_silent(store):
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


def test_a_writer_that_was_taken_over_between_its_check_and_its_last_write_is_fenced(place, store):
    """Let a newer holder commit first; writes of the older one are void."""
    with store.open("stage-1", KEY) as writer:
        commit(writer, 1)
        writer._lease.check = lambda: None  # it checked before the takeover
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
def _taken_over(store):
    """Open a second writer, as a process would that takes the first for dead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Holder, "refuse_if_alive", lambda *_, **__: None)
        context = store.open("stage-1", KEY)
        writer = context.__enter__()
    try:
        yield writer
    finally:
        context.__exit__(None, None, None)


def test_pruning_is_fenced_too(store):
    with store.open("stage-1", KEY) as writer:
        first = commit(writer, 1)
        commit(writer, 2)
        with _taken_over(store), pytest.raises(Fenced):
            writer.prune(keep=1)
    store.verify(first)


def _indent(code):
    return "\n".join("    " + row for row in code.splitlines())


def test_why_a_step_was_given_up_is_left_with_its_lease(store):
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
    with store.open("stage-1", KEY):  # the next holder clears it
        pass
    (tenure,) = store.tenures().values()
    assert tenure.reason == ""
