"""Content matches its digest; keys, commits and streams are consistent."""

import pytest

from agentgym.audit import audit
from agentgym.models.architecture import WEIGHTS
from agentgym.records import TRAJECTORIES
from agentgym.steps.context import METRICS


@pytest.mark.parametrize("name", [WEIGHTS, METRICS, TRAJECTORIES])
def test_a_flipped_byte_is_found_by_its_digest(forger, name):
    path = forger.blob("stage-1", 1, name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    report = audit(forger.cfg)
    content = next(check for check in report.checks if check.name == "content")
    assert f"{name} of step stage-1 commit 1 is damaged" in content.failures[0]


def test_a_changed_manifest_is_found_by_its_digest(forger):
    path = forger.folder("stage-2") / "manifests" / "000001.json"
    path.write_text(path.read_text().replace('"global_step": 4', '"global_step": 5'))
    assert (
        "it was changed"
        in next(check for check in audit(forger.cfg).checks if check.name == "content").failures[0]
    )


def test_a_lost_record_is_found_and_a_pruned_checkpoint_is_none(forger):
    forger.blob("stage-1", 0, TRAJECTORIES).unlink()
    content = next(check for check in audit(forger.cfg).checks if check.name == "content")
    assert content.num_failures == 1
    assert f"{TRAJECTORIES} of step stage-1 commit 0 is not there" in content.failures[0]
    assert content.skipped > 0


def test_an_item_trained_twice_contradicts_the_stream(forger):
    commit = forger.commits("stage-2")[0]
    twice = [*commit.state["consumed"][:-1], forger.commits("stage-1")[0].state["consumed"][0]]
    forger.replace(commit, state={**commit.state, "consumed": twice})
    assert "stage-2 commit 0: consumed" in forger.caught("lineage", "episodes")["lineage"]


def test_a_check_that_cannot_read_what_it_needs_fails_and_the_others_go_on(forger):
    commit = forger.commits("stage-2")[1]
    forger.replace(
        commit, state={name: value for name, value in commit.state.items() if name != "consumed"}
    )
    assert (
        "stage-2: cannot be checked: KeyError" in forger.caught("lineage", "episodes")["episodes"]
    )
