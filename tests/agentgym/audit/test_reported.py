"""Reported numbers that do not follow from the stored episodes are found and named."""

import json

from agentgym.evaluation.result import RESULT


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
    assert f"evaluate-warm-start commit {final.seq}: results summary greedy" in said
    assert "'mean': 0.987" in said


def test_a_forged_result_contradicts_the_episodes(forger):
    seq = forger.commits("evaluate-warm-start")[-1].seq
    tree = json.loads(forger.blob("evaluate-warm-start", seq, RESULT).read_bytes())
    success = tree["columns"].index("success")
    tree["slots"][3][success] = not tree["slots"][3][success]
    forger.rewrite("evaluate-warm-start", seq, RESULT, json.dumps(tree).encode())
    assert "is not that of its episodes" in forger.caught("numbers")["numbers"]
