"""Statements on training on the same items match the measurement."""

import json
import re
import statistics
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"
RUNS = json.loads((RESULTS / "same_items.json").read_text())["runs"]
EVERY = 8  # optimizer steps per column


def means(success):
    return [
        statistics.fmean(success[start : start + EVERY]) for start in range(0, len(success), EVERY)
    ]


def test_the_table_shows_what_was_measured():
    told = {
        ("same" if items.startswith("the same") else "new", float(rate)): cells.split(" | ")
        for items, rate, cells in re.findall(
            r"^\| (the same 8|new ones) \| (0\.\d+) \| (.*) \|$",
            (RESULTS / "textcraft.md").read_text(),
            re.MULTILINE,
        )
    }
    assert told == {
        (run["items"], run["lr"]): [f"{mean:.2f}"[1:] for mean in means(run["success"])]
        for run in RUNS
    }


def test_the_same_items_are_learned_and_new_ones_are_not():
    gained = {"same": [], "new": []}
    for run in RUNS:
        first, *_, last = means(run["success"])
        gained[run["items"]].append(last - first)
    assert min(gained["same"]) > 0.1
    assert max(gained["new"]) < 0.05
