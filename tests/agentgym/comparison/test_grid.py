"""Tables with environments as columns, as text and figures, from hand-written numbers."""

import copy

import pytest

from agentgym.comparison.tables import result_files, table_markdown


def estimate(mean, seeds=(0,)):
    own = [mean for _ in seeds]
    sd = 0.0 if len(seeds) > 1 else None
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "per_seed": own, "sd": sd}


def row(method, env, mean, *, turns=True):
    curve = {"budgets": [1, 2, 3], "success": [estimate(mean * share) for share in (0, 0.5, 1)]}
    cost = {"step": [4.0], "turns": [100.0], "sampled_tokens": [2000.0], "cpu_s": [12.5]}
    training = {name: [values[0] / 2, values[0]] for name, values in cost.items()}
    return {
        "name": f"{method} in {env}",
        "recipe": method,
        "horizon": "",
        "group": "",
        "environment": env,
        "method": method,
        "seeds": [0],
        "evaluation": {
            "split": "test",
            "num_items": 50,
            "num_samples": 4,
            "max_turns": 3,
            "temperature": 1.0,
        },
        "success": {"avg_at_4": estimate(mean), "pass_at_4": estimate(mean + 0.05)},
        "start": {"avg_at_4": estimate(0.25), "pass_at_4": estimate(0.3)},
        "gain": {"avg_at_4": estimate(mean - 0.25), "pass_at_4": estimate(mean - 0.25)},
        "cost": cost,
        "validation": {"best": [mean], "last": [mean]},
        "curves": [{**training, "success": [0.3, mean]}],
        "turns": curve if turns else None,
        "no_turns_curve": "" if turns else "the policy is told its horizon",
        "pass_at": [estimate(mean), estimate(mean + 0.05)],
    }


TABLE = {
    "name": "few",
    "title": "A few",
    "confidence": 0.95,
    "environments": ["babyai", "textcraft"],
    "rows": [row("grpo", "babyai", 0.5), row("grpo", "textcraft", 0.4), row("ppo", "babyai", 0.6)],
    "contrasts": [
        {
            "environment": "babyai",
            "a": "ppo babyai",
            "b": "grpo babyai",
            "of": ["ppo", "grpo"],
            "difference": {"avg_at_4": {"mean": 0.1, "low": 0.05, "high": 0.15, "per_seed": [0.1]}},
            "limit": {"avg_at_4": ""},
            "shown": {"avg_at_4": True},
        }
    ],
    "missing": ["ppo in textcraft seed 0"],
}


def test_methods_are_lines_and_environments_columns():
    text = table_markdown(TABLE)
    avg = text.split("\n\n")[2].splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in avg] == [
        ["recipe", "horizon", "babyai", "textcraft"],
        ["-------", "-------", "----------------:", "----------------:"],
        ["*start*", "", "25.0 [15.0, 35.0]", "25.0 [15.0, 35.0]"],
        ["grpo", "", "50.0 [40.0, 60.0]", "40.0 [30.0, 50.0]"],
        ["ppo", "", "60.0 [50.0, 70.0]", ""],
    ]
    assert "| ppo − grpo | +10.0 [+5.0, +15.0] * |" in text
    assert "2,000 tokens sampled, 12.5 CPU-s" in text
    assert "babyai: 50 test items x 4 samples at temperature 1, 3 turns" in text
    assert "Not in the table, because not done: ppo in textcraft seed 0." in text
    nothing = {**TABLE, "rows": [], "contrasts": []}
    assert table_markdown(nothing) == "# A few\n\nNo cell is done.\n"
    assert set(result_files(nothing)) == {f"few.{end}" for end in ("json", "md", "csv", "tex")}


def test_starts_that_differ_are_in_no_line_of_their_own():
    other = copy.deepcopy(TABLE)
    other["rows"][2]["start"]["avg_at_4"] = estimate(0.1)
    parts = table_markdown(other).split("\n\n")
    assert "*start*" not in parts[2]
    assert "*start*" in parts[4]  # all rows share their pass@4 at the start


@pytest.mark.integration
def test_figures_are_drawn_where_there_is_something_to_draw_and_are_the_same_every_time():
    files = result_files(TABLE)
    assert set(files) == {
        *(f"few.{end}" for end in ("json", "md", "csv", "tex")),
        *(f"few{end}.png" for end in ("", "_turns", "_pass", "_curves")),
        *(f"few{end}.svg" for end in ("", "_turns", "_pass", "_curves")),
    }
    assert all(files[name].startswith(b"\x89PNG") for name in files if name.endswith(".png"))
    assert files == result_files(TABLE)
    blind = {**TABLE, "rows": [row("grpo", "babyai", 0.5, turns=False)]}
    assert "few_turns.png" not in result_files(blind)
    assert "No success against turns in babyai: the policy is told" in table_markdown(blind)
