"""Result tables as text and figures."""

import json
import re

import pytest

from agentgym.comparison.tables import logged_tables, result_files, table_markdown

TEXTS = ["few.json", "few.md", "few.csv", "few.tex"]


def estimate(mean, spread=0.02, sd=0.01):
    return {
        "mean": mean,
        "low": mean - spread,
        "high": mean + spread,
        "num_items": 100,
        "per_seed": [mean - 0.01, mean + 0.01],
        "sd": sd,
    }


def row(recipe, horizon, after, start=0.5, name=None, group="", curves=True):
    found = {
        "name": name or f"{recipe} {horizon}",
        "recipe": recipe,
        "horizon": horizon,
        "group": group,
        "seeds": [0, 1],
        "evaluation": {
            "split": "test",
            "num_items": 100,
            "num_samples": 4,
            "max_turns": 12,
            "temperature": 1.0,
        },
        "success": {
            "greedy": estimate(after),
            "avg_at_4": estimate(after - 0.05),
            "pass_at_4": estimate(after + 0.02),
        },
    }
    if start is None:
        return found
    curve = {
        "step": [5, 10],
        "turns": [1000, 2000],
        "tokens": [9000, 18000],
        "cpu_s": [10.0, 20.0],
        "success": [start, after],
    }
    return found | {
        "start": {key: estimate(start) for key in found["success"]},
        "gain": {key: estimate(value["mean"] - start) for key, value in found["success"].items()},
        "cost": {
            "step": [10, 10],
            "turns": [2000, 2000],
            "tokens": [18000, 18000],
            "cpu_s": [20.0, 22.0],
        },
        "validation": {"best": [after, after], "last": [after, after - 0.1]},
        "curves": [curve, curve] if curves else [{**curve, "success": []}] * 2,
    }


def table(rows, missing=()):
    contrast = (
        {
            "a": "grpo growing",
            "b": "grpo long",
            "difference": {key: estimate(-0.03) for key in rows[0]["success"]},
        }
        if rows
        else None
    )
    return {
        "name": "few",
        "title": "A few",
        "key": "0" * 64,
        "confidence": 0.95,
        "rows": rows,
        "contrasts": [contrast] if rows else [],
        "missing": list(missing),
    }


ROWS = [
    row("grpo", "long", 0.9),
    row("grpo", "growing", 0.87),
    row("ppo", "long", 0.8),
    row("", "", 0.6, None, name="start at T 0.4", group="temperature"),
]


def cells(line):
    return [cell.strip() for cell in line.strip("| ").split("|")]


def test_the_table_has_a_row_per_recipe_and_horizon_and_its_start_once():
    lines = [
        cells(line) for line in table_markdown(table(ROWS)).splitlines() if line.startswith("|")
    ]
    expected = [
        "recipe",
        "horizon",
        "greedy",
        "avg@4",
        "pass@4",
        "gain avg@4",
        "gain greedy",
        "validation: last (best)",
        "CPU-s",
    ]
    assert lines[0] == expected
    assert lines[2][:5] == ["*start*", "", "50.0 ± 1.0", "50.0 ± 1.0", "50.0 ± 1.0"]
    gains = ["+35.0 [+33.0, +37.0]", "+40.0 [+38.0, +42.0]"]
    assert lines[3] == [
        "grpo",
        "long",
        "90.0 ± 1.0",
        "85.0 ± 1.0",
        "92.0 ± 1.0",
        *gains,
        "85.0 (90.0)",
        "21",
    ]
    assert [line[:2] for line in lines[4:7]] == [
        ["grpo", "growing"],
        ["ppo", "long"],
        ["start at T 0.4", ""],
    ]
    assert lines[9] == ["grpo growing − grpo long", *["−3.0 [−5.0, −1.0]"] * 3, "−4.0, −2.0"]


def test_one_seed_has_no_spread_and_what_is_not_done_is_named():
    alone = row("grpo", "long", 0.9)
    alone["success"]["greedy"]["sd"] = None
    text = table_markdown(table([alone], missing=["ppo long seed 1"]))
    assert [cells(line)[2] for line in text.splitlines() if line.startswith("| grpo  ")] == ["90.0"]
    assert text.endswith("Not in the table, because not done: ppo long seed 1.\n")
    assert "No cell is done" in table_markdown(table([]))


@pytest.mark.integration
def test_a_folder_gets_the_table_twice_and_its_figures():
    files = result_files(table(ROWS))
    figures = ["few.png", "few.svg", "few_curves.png", "few_curves.svg"]
    assert list(files) == [*TEXTS, *figures]
    assert all(b"<svg" in files[name] for name in files if name.endswith("svg"))
    assert json.loads(files["few.json"]) == table(ROWS)
    assert all(files[name].startswith(b"\x89PNG") for name in files if name.endswith("png"))
    assert list(result_files(table([]))) == TEXTS


@pytest.mark.integration
def test_figures_depend_on_nothing_but_the_table():
    assert result_files(table(ROWS)) == result_files(table(ROWS))
    without = table([row("grpo", "long", 0.9, curves=False)])
    assert list(result_files(without)) == [*TEXTS, "few.png", "few.svg"]


def test_names_from_a_file_are_no_markup_of_the_table():
    evil = "<img src=x onerror=alert(1)> | [link](http://evil)\n# head"
    text = table_markdown(
        table([row(evil, "long", 0.9, name=evil)], missing=[evil]) | {"title": evil}
    )
    assert "<img" not in text
    assert "](" not in text
    assert [line for line in text.splitlines() if line.startswith("#")] == [text.splitlines()[0]]

    def cells_in(text):
        return {
            len(re.findall(r"(?<!\\)\|", line))
            for line in text.splitlines()
            if line.startswith("|")
        }

    assert cells_in(text) == cells_in(table_markdown(table([row("grpo", "long", 0.9)])))


def test_mlflow_gets_a_line_per_row_and_per_contrast():
    found = logged_tables(table(ROWS))
    rows, contrasts = (json.loads(found[f"{what}_table.json"]) for what in ("rows", "contrasts"))
    long, *_, start = (dict(zip(rows["columns"], line, strict=True)) for line in rows["data"])
    assert (long["row"], long["seeds"]) == ("grpo long", 2)
    assert [long[f"greedy{end}"] for end in ("", " low", " high")] == [0.9, 0.88, 0.92]
    assert (long["gain greedy"], start["gain greedy"]) == (0.4, None)  # not trained yet
    (line,) = contrasts["data"]
    assert dict(zip(contrasts["columns"], line, strict=True))["greedy high"] == -0.01
    assert line[0] == "grpo growing - grpo long"
    assert logged_tables(table([])) == {}
