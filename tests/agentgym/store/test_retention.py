"""Who is needed, by age, place in the order, name, and by those that build on it."""

from agentgym.store.manifest import Manifest
from agentgym.store.retention import DAY_S, connected, kept

NOW = 1_000 * DAY_S


def head(step, *parents, days=100.0):
    return Manifest(
        step=step,
        key="ab" * 32,
        seq=0,
        done=True,
        parents={parent.step: parent.digest for parent in parents},
        config={},
        state={},
        blobs={},
        results={},
        created_at=NOW - days * DAY_S,
    )


DATA = head("prepare", days=300)
WARM = head("warm-start", DATA, days=290)
OLD = head("stage-1", WARM, days=200)
NEW = head("stage-2", WARM, days=20)
OTHER_DATA = head("other-data", days=300)
OTHER = head("other-stage", OTHER_DATA, days=299)
ALL = (DATA, WARM, OLD, NEW, OTHER_DATA, OTHER)


def names(days=0.0, runs=0, pinned=(), live=()):
    found = kept(
        ALL,
        now=NOW,
        days=days,
        runs=runs,
        pinned={each.digest: "named" for each in pinned},
        live={each.digest for each in live},
    )
    return {each.step: found[each.digest] for each in ALL if each.digest in found}


def test_nothing_is_needed_that_nobody_names():
    assert names() == {}


def test_what_is_young_keeps_what_it_builds_on():
    assert names(days=30) == {
        "stage-2": "younger than 30 days",
        "warm-start": f"stage-2 ({'ab' * 6}) builds on it",
        "prepare": f"warm-start ({'ab' * 6}) builds on it",
    }


def test_the_newest_ends_of_runs_are_needed():
    assert names(runs=1).keys() == {"stage-2", "warm-start", "prepare"}
    assert names(runs=2).keys() == {"stage-1", "stage-2", "warm-start", "prepare"}
    assert names(runs=99).keys() == {each.step for each in ALL}


def test_what_is_named_is_needed_and_its_descendants_are_not():
    assert names(pinned=[WARM]).keys() == {"warm-start", "prepare"}
    assert names(pinned=[WARM])["warm-start"] == "named"


def test_what_a_running_step_builds_on_keeps_all_that_is_connected_with_it():
    assert names(live=[DATA]).keys() == {"prepare", "warm-start", "stage-1", "stage-2"}
    assert connected(ALL, ["nothing that is there"]) == set()


def test_what_was_committed_within_the_hour_keeps_all_that_is_connected_with_it():
    found = kept(
        [*ALL, head("stage-3", WARM, days=0.01)], now=NOW, days=0, runs=0, pinned={}, live=()
    )
    assert set(found) >= {each.digest for each in (DATA, WARM, OLD, NEW)}
    assert OTHER.digest not in found
