"""The alias moves only by recorded decisions, tested on a real MLflow server.
Decisions are serialized, survive every kill, and changes by hand are reported.
"""

import json
import os
import signal
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from agentgym.config import ConfigError, GateConfig
from agentgym.evaluation.gate import judged_again
from agentgym.evaluation.history import DECISION, RECORD, History, OpenHistory, sentence, summary
from agentgym.evaluation.registry import Promotions
from agentgym.store.runstore import store_at
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.registry import version_tags
from tests.forked import FORKS
from tests.registries import RULES, Registry

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def tracker(tmp_path_factory, empty_ledger, mlflow_server):
    """A server with its own artifacts, as a team would share it."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "mlflow.db").write_bytes(empty_ledger.read_bytes())
    artifacts = f"--artifacts-destination={folder / 'artifacts'}"
    with mlflow_server(folder, artifacts) as address:
        yield Tracker(address, "tests", folder / "unused")


@pytest.fixture
def registry(tracker, tmp_path, request):
    name = request.node.name.replace("[", " ").replace("]", "")[:80]
    return Registry(tracker, tmp_path, name)


def test_the_alias_moves_to_the_first_model_and_to_better_ones_alone(registry):
    first = registry.consider(registry.version(100))
    assert (first.verdict, registry.holder) == ("PROMOTE", "1")
    assert first.why == "the first model of this name"
    worse = registry.consider(registry.version(60))
    assert (worse.verdict, registry.holder) == ("REJECT", "1")
    equal = registry.consider(registry.version(100))
    assert (equal.verdict, registry.holder) == ("REJECT", "1")
    better = registry.consider(registry.version(140))
    assert (better.verdict, registry.holder) == ("PROMOTE", "4")
    assert [each.verdict for each in registry.entries] == ["PROMOTE", "REJECT", "REJECT", "PROMOTE"]
    assert [each.decision["evidence"]["num_looks"] for each in registry.entries] == [0, 0, 1, 2]
    said = sentence({"version": "4", "champion": summary(better)})
    assert said.startswith("moves to version 4: +20.0 points")


@pytest.mark.parametrize(
    ("known", "verdict"),
    [
        ({"obstacle": "items: 200 and 100"}, "HOLD"),
        ({"audit": "failed", "audit_note": "numbers"}, "REJECT"),
    ],
)
def test_what_forbids_it_keeps_the_champion_and_is_on_record(registry, known, verdict):
    registry.consider(registry.version(100))
    found = registry.consider(registry.version(190), **known)
    assert (found.verdict, registry.holder) == (verdict, "1")
    assert version_tags(registry.tracker, registry.name, "2")["gate.verdict"] == verdict


def test_a_decision_is_an_artifact_of_its_run_from_which_it_follows(registry):
    registry.consider(registry.version(100))
    registry.consider(registry.version(140))
    client = registry.tracker.client
    run_id = client.get_model_version(registry.name, "2").run_id
    (history,) = client.list_artifacts(run_id, "decisions")
    (shown,) = client.list_artifacts(run_id, history.path)
    text = Path(client.download_artifacts(run_id, shown.path)).read_bytes()
    assert text == registry.entries[1].to_bytes()
    data = json.loads(text)
    assert data["decision"]["evidence"]["pairs"]["babyai"]["items"][0] == "babyai_0"
    assert json.loads(json.dumps(judged_again(data["decision"]))) == data["decision"]


def test_asked_again_what_was_decided_stands(registry):
    registry.consider(registry.version(100))
    candidate = registry.version(140)
    found = registry.consider(candidate)
    assert registry.consider(candidate) == found
    assert registry.consider(candidate, asked="anew").why == "it is this model, evaluated anew"
    assert len(registry.entries) == 2


def promote(uri, folder, name, evidence, where=None):
    """Judge version 2 with this evidence, as another process; die with SIGKILL at `where`."""
    tracker = Tracker(uri, "tests", folder / "unused")
    promotions = Promotions(store_at(folder / "store", lease_ttl_s=30.0), tracker, name, "champion")
    places = {
        "history": (OpenHistory, "add"),
        "decision": (tracker, "log_artifacts"),
        "tags": (tracker.client, "set_model_version_tag"),
        "alias": (tracker.client, "set_registered_model_alias"),
        "settled": (OpenHistory, "settle"),
    }
    if where is not None:
        setattr(*places[where], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    candidate = promotions.version("2")
    return promotions.consider(candidate, GateConfig(), lambda _: evidence, candidate.checkpoint)


@pytest.mark.parametrize(
    ("where", "moved_before"),
    [("history", False), ("decision", False), ("tags", False), ("alias", False), ("settled", True)],
)
def test_a_kill_anywhere_ends_in_what_the_same_command_ends_in(
    registry, tmp_path, where, moved_before
):
    """Kill the process between any two writes: version, history, decision, alias, history.
    Its lease is left behind.
    """
    registry.consider(registry.version(100))
    candidate = registry.version(140)
    evidence = registry.evidence(candidate, registry.promotions().version("1"))
    asked = (registry.tracker.uri, tmp_path, registry.name, evidence)
    killed = FORKS.Process(target=promote, args=(*asked, where))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert (registry.holder == "2") is moved_before
    assert registry.promotions().history.is_owed is (where != "history")
    again = promote(*asked)
    assert (again.verdict, again.moved) == ("PROMOTE", True)
    assert registry.holder == "2"
    assert [each.number for each in registry.entries] == [1, 2]
    assert not registry.promotions().history.is_owed
    assert DECISION in version_tags(registry.tracker, registry.name, "2")


def test_two_pipelines_at_once_end_in_one_consistent_champion(registry):
    """Let both beat the first champion; the weaker one does not replace the stronger one."""
    registry.consider(registry.version(60))
    candidates = [registry.version(150), registry.version(110)]
    together = threading.Barrier(2)

    def decide(candidate):
        promotions, met = registry.promotions(), []

        def evidence_for(champion):
            if not met:
                met.append(together.wait(30))  # both compare with the first champion
            return registry.evidence(candidate, champion)

        found.append(promotions.consider(candidate, RULES, evidence_for, candidate.checkpoint))

    found = []
    threads = [threading.Thread(target=decide, args=(each,)) for each in candidates]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2
    entries = registry.entries
    assert registry.holder == entries[-1].after.number == "2"
    for before, after in pairwise(entries):
        assert after.before == before.after
    assert entries[-1].before is not None


def test_an_alias_that_was_moved_by_hand_is_named_and_nothing_moves_until_it_is_settled(registry):
    registry.consider(registry.version(100))
    registry.consider(registry.version(50))
    registry.tracker.client.set_registered_model_alias(registry.name, "champion", "2")
    found = registry.consider(registry.version(190))
    assert (found.verdict, registry.holder) == ("HOLD", "2")
    assert "moved by hand: MLflow has it at version 2, the history at version 1" in found.why
    back = registry.promotions().roll_back("1", "put back")
    assert (back.kind, registry.holder) == ("rolled back", "1")
    assert registry.consider(registry.version(190)).verdict == "PROMOTE"
    registry.tracker.client.delete_registered_model_alias(registry.name, "champion")
    promotions = registry.promotions()
    assert "no version" in promotions.standing(promotions.history.entries()).drift
    promotions.restore()
    assert registry.holder is None  # removed on purpose by its user


def test_rollback_restores_the_one_before_and_is_in_the_history(registry):
    for solved in (60, 100, 160):
        registry.consider(registry.version(solved))
    assert registry.holder == "3"
    promotions = registry.promotions()
    back = promotions.roll_back(None, "it loops")
    assert (back.before.number, back.after.number, registry.holder) == ("3", "2", "2")
    assert promotions.roll_back("1", "still").after.number == registry.holder == "1"
    assert [each.kind for each in registry.entries] == [*["judged"] * 3, *["rolled back"] * 2]
    assert registry.entries[-2].why == "it loops"
    with pytest.raises(ConfigError, match="version 9 never held champion; those that did: 1, 2, 3"):
        promotions.roll_back("9", "")


def test_a_person_may_pass_over_the_gate_and_the_history_says_so(registry):
    registry.consider(registry.version(100))
    worse = registry.version(50)
    assert registry.consider(worse).verdict == "REJECT"
    found = registry.promotions().force(worse, "the other one leaks")
    assert (found.kind, found.why, registry.holder) == ("forced", "the other one leaks", "2")


def test_a_registry_that_is_older_than_its_history_keeps_its_champion(registry):
    registry.version(100)
    registry.tracker.client.set_registered_model_alias(registry.name, "champion", "1")
    assert registry.consider(registry.version(60)).verdict == "REJECT"
    assert [each.kind for each in registry.entries] == ["found", "judged"]
    assert registry.holder == "1"


def test_the_history_is_a_chain_of_commits_whose_records_stay(registry):
    for solved in (60, 100):
        registry.consider(registry.version(solved))
    commits = History(registry.store, registry.name, "champion").commits()
    assert [RECORD in commit.records for commit in commits] == [True, False, True, False]
    before = ""
    for commit in commits:
        assert commit.follows == before
        before = commit.records_digest
    assert [entry.number for entry in registry.entries] == [1, 2]
