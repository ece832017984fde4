"""Decisions on registered models."""

import json

from agentgym.viewer.decisions import DecidedVersion, decided, judged
from tests.agentgym.viewer.conftest import episode

PLAYED = {"policy": {"kind": "weights"}, "protocol": {}}


def decide(made, **entry):
    record = {"decision.json": json.dumps(entry).encode()}
    about = {"model": "agentgym-babyai", "alias": "champion"}
    made.add([], step="promotions", key="d", config=about, records=record)


def version(number, **told):
    return {"number": number, "checkpoint": "", "evaluation": {}, "run_key": "", **told}


def test_a_decision_names_model_versions_checkpoints_and_environments(made, view):
    stage = made.add([episode(0)], done=True)
    own = {"step": "evaluate-stage-1", "key": "b" * 64}
    made.add([episode(0)], step="evaluate-stage-1", key="b", parents={"stage-1": stage.digest})
    decide(
        made,
        kind="judged",
        number=4,
        candidate=version("3", checkpoint=stage.digest, evaluation=own),
        before=version("2", checkpoint="elsewhere", run_key="9" * 64, evaluation=own),
        after=None,
        decision={"verdict": "HOLD", "evidence": {"pairs": {"textcraft": {}, "babyai": {}}}},
    )
    viewer = view()
    (row,) = decided(viewer.index.reader, viewer.names)
    assert (row.number, row.verdict, row.model, row.alias) == (
        *(4, "HOLD"),
        *("agentgym-babyai", "champion"),
    )
    assert row.envs == ["babyai", "textcraft"]
    name = f"stage-1 of evaluate-stage-1-{'b' * 12}, grpo, seed 7"  # MLflow has no name for it
    assert row.candidate == DecidedVersion("3", name, f"evaluate-stage-1-{'b' * 16}")
    assert row.before.name == "of r999999999999"
    assert row.after is None


def test_a_decision_leads_to_the_evaluations_that_the_gate_played(made, view):
    for key in "ef":
        made.add([episode(0)], step="evaluation", key=key, config=PLAYED)
    own = {"step": "evaluate-stage-1", "key": "b" * 64}
    decide(
        made,
        candidate=version("3", evaluation=own),
        before=version("2", evaluation=own),
        decision={"evidence": {"questions": ["e" * 64, "f" * 64], "pairs": {}}},
    )
    viewer = view()
    (row,) = decided(viewer.index.reader, viewer.names)
    assert row.candidate.evaluation == f"evaluation-{'e' * 16}"
    assert row.before.evaluation == f"evaluation-{'f' * 16}"
    assert judged(viewer.index.reader) >= {"e" * 64, "f" * 64}


def test_an_evaluation_that_is_not_in_the_store_is_no_link(made, view):
    own = {"step": "evaluate-stage-1", "key": "b" * 64}
    decide(made, candidate=version("3", evaluation=own), decision={})
    viewer = view()
    (row,) = decided(viewer.index.reader, viewer.names)
    assert row.candidate == DecidedVersion("3", "", "")


def test_a_record_that_is_no_decision_is_a_row_with_the_reason(made, view):
    decide(made, candidate="text", decision={"verdict": "HOLD"})
    for content in (b"[]", b"{", b'{"decision": [1]}'):
        made.add([], step="promotions", key="e", records={"decision.json": content})
    viewer = view()
    rows = decided(viewer.index.reader, viewer.names)
    assert {row.verdict for row in rows} == {"not readable here"}
    assert len(rows) == 4
