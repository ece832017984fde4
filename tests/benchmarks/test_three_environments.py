"""The committed comparison has one column per environment, and its text and JSON agree."""

import json
from pathlib import Path

from agentgym.comparison.described import load_comparison
from agentgym.comparison.tables import table_markdown

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_every_cell_is_in_the_table_and_its_text_is_made_of_it():
    table, described = (
        result("three-environments"),
        load_comparison(ROOT / "comparisons/three-environments.yaml"),
    )
    assert table["missing"] == []
    assert {(row["recipe"], row["environment"]) for row in table["rows"]} == {
        (recipe, env) for recipe in described.recipes for env in described.environments
    }
    assert table_markdown(table) == (RESULTS / "three-environments.md").read_text()
    for end in ("", "_turns", "_pass", "_curves"):
        assert (RESULTS / f"three-environments{end}.png").is_file()


def test_success_grows_with_the_turns_an_episode_may_have_and_ends_where_the_table_is():
    for row in result("three-environments")["rows"]:
        means = [each["mean"] for each in row["turns"]["success"]]
        assert means == sorted(means)
        assert abs(means[-1] - row["success"]["avg_at_4"]["mean"]) < 1e-4
