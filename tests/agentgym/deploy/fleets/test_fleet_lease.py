"""Leases on a real API server: they show which run holds servers and whether that run is alive."""

import json
import secrets
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta

import pytest

from agentgym.deploy.fleets import fleet_lease
from agentgym.deploy.fleets.fleet_lease import (
    Group,
    acquire,
    acquire_free,
    dead_groups,
    groups,
    renew,
)
from agentgym.deploy.kube.client import LEASE
from agentgym.store.lease import Holder, LeaseHeld

DEAD = replace(Holder.me(0), pid=2**22 + 1, started="1")  # above the highest pid
FAR = replace(Holder.me(0), host="elsewhere", space="another boot")
NOW = 1_800_000_000.0


def stamp(seconds):
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def group(holder, renewed, ttl_s=60.0, kept=False):
    return Group("r1", "uid", holder, kept, stamp(renewed), ttl_s)


def test_a_holder_in_sight_lives_by_its_process_another_by_its_renewals():
    assert group(Holder.me(0), NOW - 3600.0).is_alive(NOW)
    assert not group(DEAD, NOW).is_alive(NOW)
    assert group(FAR, NOW - 59.0).is_alive(NOW)
    assert not group(FAR, NOW - 61.0).is_alive(NOW)
    assert group(None, NOW - 59.0, kept=True).is_alive(NOW)
    assert not group(FAR, NOW + 3600.0).is_alive(NOW)  # a wrong clock proves nothing


def test_a_lease_that_says_nonsense_is_of_nobody():
    said = {"metadata": {"uid": "u", "annotations": {fleet_lease.HOLDER: "[1]"}}, "spec": {}}
    found = Group.of(said)
    assert found.holder is None
    assert not found.is_alive(NOW)
    assert str(found) == " (holder unknown)"


pytest_kubernetes = pytest.mark.kubernetes


@pytest.fixture
def run(admin):
    name = f"r{secrets.token_hex(6)}"
    yield name
    for each in groups(admin):
        if each.run.startswith(name):
            admin.delete(LEASE, f"agentgym-{each.run}")


def held_by(admin, run, holder, renewed):
    admin.patch(
        LEASE,
        f"agentgym-{run}",
        {
            "metadata": {"annotations": {fleet_lease.HOLDER: json.dumps(asdict(holder))}},
            "spec": {"renewTime": renewed},
        },
    )


def ago(seconds):
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@pytest_kubernetes
def test_a_group_that_is_held_is_left_alone_and_one_of_the_dead_is_taken_over(admin, run):
    first = acquire(admin, run, ttl_s=60.0)
    with pytest.raises(LeaseHeld, match=f"the servers of {run} are held by process"):
        acquire(admin, run, ttl_s=60.0)
    assert acquire_free(admin, run, ttl_s=60.0).run == f"{run}-2"
    held_by(admin, run, FAR, ago(10))
    with pytest.raises(LeaseHeld):
        acquire(admin, run, ttl_s=60.0)
    held_by(admin, run, FAR, ago(120))
    again = acquire(admin, run, ttl_s=60.0)
    assert (again.uid, again.run) == (first.uid, run)  # the servers are kept, with a new holder
    held_by(admin, run, DEAD, ago(0))
    assert acquire(admin, run, ttl_s=60.0).uid == first.uid


@pytest_kubernetes
def test_a_renewal_is_told_from_a_group_that_was_lost(admin, run):
    mine = acquire(admin, run, ttl_s=60.0)
    assert renew(admin, mine)
    (found,) = [each for each in groups(admin) if each.run == run]
    assert found.renewed > mine.renewed
    held_by(admin, run, FAR, ago(0))
    assert not renew(admin, mine)
    admin.delete(LEASE, f"agentgym-{run}")
    assert not renew(admin, mine)


@pytest_kubernetes
def test_a_kept_group_is_shared(admin, run):
    first = acquire(admin, run, ttl_s=3600.0, kept=True)
    assert acquire(admin, run, ttl_s=3600.0, kept=True).uid == first.uid
    assert renew(admin, first)


@pytest_kubernetes
def test_the_dead_are_found_and_a_run_whose_clock_is_wrong_is_not_among_them(admin, run):
    names = [run, f"{run}-dead", f"{run}-silent", f"{run}-late"]
    for name in names:
        acquire(admin, name, ttl_s=60.0)
    held_by(admin, names[1], DEAD, ago(0))
    held_by(admin, names[2], FAR, ago(3600))
    held_by(admin, names[3], FAR, ago(3600))  # alive, its clock an hour behind

    def while_it_watches(seconds):
        assert seconds == 5.0
        held_by(admin, names[3], FAR, ago(3595))

    found = dead_groups(admin, observe_s=5.0, sleep=while_it_watches)
    assert {each.run for each in found if each.run in names} == {names[1], names[2]}
