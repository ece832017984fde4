"""Results of rollouts ahead of the updates, and the page that reports them."""

import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operations.md").read_text()


@pytest.fixture(scope="module")
def measured():
    return json.loads((ROOT / "docs/results/staleness.json").read_text())


def test_no_turn_was_older_than_may_be_and_with_a_slow_learner_some_were_as_old(measured):
    for cell in measured["cells"]:
        assert cell["staleness_max"] <= cell["max_staleness"]
        assert cell["optimizer_steps"] == 20
        if cell["case"] == "slow learner":
            assert cell["staleness_max"] == cell["max_staleness"]
            # a stage begins with the batches that the previous stage left
            assert cell["staleness_max_mean"] > 0.5 * cell["max_staleness"]


def test_the_summary_is_of_the_cells_and_the_page_has_its_rows(measured):
    rows = measured["summary"]
    assert [(row["case"], row["max_staleness"]) for row in rows] == [
        *(("as it is", most) for most in (0, 1, 4)),
        *(("slow learner", most) for most in (1, 4)),
    ]
    for row in rows:
        cells = [
            cell
            for cell in measured["cells"]
            if all(cell[name] == row[name] for name in ("case", "max_staleness"))
            and cell["seed"] in row["seeds"]
        ]
        assert len(cells) == len(row["seeds"]) >= 1
        for name in ("avg_at_4", "train_s", "train_cpu_s", "learner_idle_frac"):
            assert row[name] == round(statistics.mean(cell[name] for cell in cells), 4)
        largest_kl = max(cell["mismatch_kl_max"] for cell in cells)
        least_ess = min(cell["mismatch_ess_min"] for cell in cells)
        assert (
            f"| {row['case']} | {row['max_staleness']} | {row['staleness_max']} |"
            f" {100 * row['avg_at_4']:.1f} % | {row['train_cpu_s']:.1f} |"
            f" {100 * row['learner_idle_frac']:.0f} % | {largest_kl:.3f} | {least_ess:.2f} |"
        ) in PAGE


def test_killed_often_it_learned_from_every_item_once(measured):
    killed = measured["killed"]
    assert killed["kills"] >= 3
    # after every kill there were batches made ahead that no step had consumed
    assert len(killed["batches_ahead_at_each"]) == killed["kills"]
    assert max(killed["batches_ahead_at_each"]) > 1
    assert killed["items"] == killed["optimizer_steps"] * 8 == 128
    assert killed["each_item_once"]
    assert killed["audit"]
    assert killed["staleness_max"] <= 4
