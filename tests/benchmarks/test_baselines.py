"""Expert and random baselines in the documents equal the measured results."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_documents_hold_the_baselines_of_the_result_file():
    found = json.loads((ROOT / "docs/results/baselines.json").read_text())["environments"]
    rows = []
    for env, row in found.items():
        expert, chance = row["expert"]["success"], row["random"]["success"]
        mean, low, high = (f"{100 * chance[name]:.1f}" for name in ("mean", "low", "high"))
        share = f"{100 * expert['mean']:.1f}"
        rows.append(f"| {env} | {expert['num_items']} | {share} | {mean} ({low} to {high}) |")
        assert len(row["expert"]["exceptions"]) == round((1 - expert["mean"]) * expert["num_items"])
        assert all("truncated" in each for each in row["expert"]["exceptions"])
        assert row["expert"]["coverage"] == row["random"]["coverage"] == 1.0
    assert sorted(found) == ["babyai", "sciworld", "searchqa", "textcraft", "webarena"]
    assert "\n".join(rows) in (ROOT / "docs/concepts/evaluation-and-intervals.md").read_text()
