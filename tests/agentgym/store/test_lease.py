"""A lease's holder is judged by its process if visible, otherwise by heartbeats.
test_runstore.py tests with real processes and both back ends that writers respect leases.
"""

import logging
import os
import subprocess
import threading
from dataclasses import replace

import pytest

from agentgym.store.lease import Fenced, Holder, Lease, LeaseHeld, pid_space, process_start


@pytest.fixture
def ended():
    """(pid, start time) of a process that has ended."""
    process = subprocess.Popen(["sleep", "60"])
    started = process_start(process.pid)
    process.kill()
    process.wait()
    return process.pid, started


def refuse(holder, silent_s=0.0):
    holder.refuse_if_alive(silent_s, ttl_s=30.0, what="step x")


def test_a_live_process_of_this_machine_holds_however_silent_it_is():
    me = Holder.me(3)
    assert (me.pid, me.space) == (os.getpid(), pid_space())
    with pytest.raises(LeaseHeld, match=rf"step x is held by process {me.pid} on .*\(epoch 3\)"):
        refuse(me, silent_s=1e9)


def test_a_dead_one_holds_nothing_and_neither_does_a_later_process_of_its_number(ended):
    pid, started = ended
    assert process_start(pid) is None
    refuse(replace(Holder.me(1), pid=pid, started=started))
    refuse(replace(Holder.me(1), started="1"))  # our process now has that pid


def test_without_proc_a_number_that_is_taken_counts_as_alive(ended):
    with pytest.raises(LeaseHeld):
        refuse(replace(Holder.me(1), started=None))
    refuse(replace(Holder.me(1), pid=ended[0], started=None))


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"space": "another container"}])
def test_a_holder_out_of_sight_is_waited_for_until_it_was_silent_for_long(change):
    theirs = replace(Holder.me(1), **change)
    with pytest.raises(LeaseHeld, match=r"heard of 29\.0s ago; .* store\.lease_ttl_s 30"):
        refuse(theirs, silent_s=29.0)
    refuse(theirs, silent_s=30.0)


class Beating(Lease):
    """Lease without storage that counts its heartbeats."""

    def __init__(self, failures=()):
        self.beats, self.enough, self._failures = 0, threading.Event(), list(failures)
        super().__init__(Holder.me(1), 0.04, "step x")

    def check(self): ...

    def commit(self, first, last, data): ...

    def drop(self, first):
        raise AssertionError

    def collect(self):
        raise AssertionError

    def begin_anew(self):
        raise AssertionError

    def sweep(self):
        return 0

    def _beat(self):
        self.beats += 1
        if self.beats >= 3:
            self.enough.set()
        if self._failures:
            raise self._failures.pop(0)

    def _give_back(self, reason):
        raise OSError("the disk is gone")


def test_the_heart_beats_on_after_a_disk_that_failed_and_stops_with_the_lease(caplog):
    lease = Beating([OSError("the disk is gone")])
    assert lease.enough.wait(10)
    with caplog.at_level(logging.WARNING):
        lease.release()
    beats = lease.beats
    assert not lease._thread.is_alive()
    assert lease.beats == beats
    assert "no heartbeat for the lease on step x: the disk is gone" in caplog.text
    assert "could not be marked as released, it ends with this process" in caplog.text


def test_who_was_fenced_beats_no_more(caplog):
    lease = Beating([Fenced("taken over")])
    lease._thread.join(10)
    assert (lease._thread.is_alive(), lease.beats) == (False, 1)
    assert "taken over" in caplog.text
    newer = replace(Holder.me(2), host="elsewhere")
    assert "taken over by process" in str(lease._fenced_by(newer))
