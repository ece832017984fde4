"""A number that does not follow from the stored episodes is found and named."""

import json

from agentgym.steps.context import OUTCOMES


def test_a_forged_metric_contradicts_the_episodes_even_where_the_ledger_agrees(forger):
    forger.metric("stage-1", 1, **{"rollout/success": 0.987})
    assert "stage-1 commit 1: rollout/success: expected 0." in forger.caught("numbers")["numbers"]


def test_a_forged_evaluation_contradicts_the_episodes(forger):
    final = forger.commits("evaluate-warm-start")[-1]
    results = json.loads(json.dumps(final.results))
    results["summary"]["greedy"]["mean"] = 0.987
    forger.replace(final, results=results)
    report = forger.commits("report")[-1]
    forger.replace(report, results={**report.results, "before": results})
    said = forger.caught("numbers")["numbers"]
    assert "evaluate-warm-start commit 1: results summary greedy" in said
    assert "'mean': 0.987" in said


def test_forged_outcomes_contradict_the_episodes(forger):
    outcomes = json.loads(forger.blob("evaluate-warm-start", 1, OUTCOMES).read_bytes())
    outcomes["greedy"][3] = 1.0 - outcomes["greedy"][3]
    forger.rewrite("evaluate-warm-start", 1, OUTCOMES, json.dumps(outcomes).encode())
    assert "outcomes.json greedy" in forger.caught("numbers")["numbers"]
