"""Decisions on registered models."""

import json

import pytest

from agentgym.evaluation.history import RECORD, STEP, Entry, Version
from agentgym.viewer.decisions import decided, judged
from tests.agentgym.viewer.conftest import episode

PLAYED = {"policy": {"kind": "weights"}, "protocol": {}}
ABOUT = {"model": "agentgym-babyai", "alias": "champion"}
OWN = {"step": "evaluate-stage-1", "key": "b" * 64, "digest": "0" * 64}


def decide(made, candidate, before=None, **evidence):
    """Commit the decision that `candidate` does not get the alias."""
    decision = {"verdict": "HOLD", "rules": [], "evidence": evidence}
    fields = ("judged", "asked", candidate, before, before, "somebody", 5.0, "too few items")
    record = {RECORD: Entry(*fields, decision=decision, number=4).to_bytes()}
    made.add([], step=STEP, key="d", config=ABOUT, records=record)


def test_a_decision_names_model_versions_checkpoints_and_environments(made, view):
    stage = made.add([episode(0)], done=True)
    made.add([episode(0)], step="evaluate-stage-1", key="b", parents={"stage-1": stage.digest})
    candidate = Version("3", stage.digest, OWN)
    decide(made, candidate, Version("2", "elsewhere", {}, run_key="9" * 64), pairs={"sciworld": 1})
    viewer = view()
    (row,) = decided(viewer.index.reader)
    assert (row.model, row.alias) == ("agentgym-babyai", "champion")
    assert (row.candidate, row.before) == (f"evaluate-stage-1-{'b' * 16}", "")
    assert row.entry.candidate == candidate
    assert (row.entry.verdict, row.entry.decision["envs"]) == ("HOLD", ["sciworld"])
    # MLflow has no name for this run
    name = f"stage-1 of evaluate-stage-1-{'b' * 12}, grpo, seed 7"
    assert viewer.names.version(row.entry.candidate) == name
    assert viewer.names.version(row.entry.before) == "of r999999999999"
    assert viewer.names.version(Version("1", "")) == ""


def test_a_decision_leads_to_the_evaluations_that_the_gate_played(made, view):
    for key in "ef":
        made.add([episode(0)], step="evaluation", key=key, config=PLAYED)
    made.add([episode(0)], step="evaluate-stage-1", key="b")
    decide(made, Version("3", "", OWN), Version("2", "", OWN), questions=["e" * 64, "f" * 64])
    viewer = view()
    (row,) = decided(viewer.index.reader)
    assert (row.candidate, row.before) == (f"evaluation-{'e' * 16}", f"evaluation-{'f' * 16}")
    assert judged(viewer.index.reader) == {"e" * 64, "f" * 64}


def test_an_evaluation_that_is_not_in_the_store_is_no_link(made, view):
    decide(made, Version("3", "", OWN), questions=["e" * 64, ""])
    (row,) = decided(view().index.reader)
    assert (row.candidate, row.before) == ("", "")


@pytest.mark.parametrize(
    "changes",
    [
        {"schema_version": 9},
        {"candidate": None},
        {"candidate": {"number": 3, "checkpoint": []}},
        {"decision": {"rules": [1]}},
        {"decision": {"evidence": {"questions": ["one"]}}},
        {"at": "yesterday"},
    ],
)
def test_a_record_that_is_no_decision_is_a_problem_and_no_row(made, view, changes):
    decide(made, Version("3", ""))
    tree = json.loads(Entry("judged", "", Version("3", ""), None, None, "", 5.0, "").to_bytes())
    record = json.dumps({**tree, **changes}).encode()
    made.add([], step=STEP, key="e", config=ABOUT, records={RECORD: record})
    reader = view().index.reader
    assert len(decided(reader)) == 1
    assert reader.execute("SELECT count(*) FROM problems").fetchone()[0] == 1
