"""docs/reference/reproduce*.md: our numbers equal the result files, the published tables agree
with their totals, every command's arguments are valid, and every named file exists.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

import agentgym.cli
from agentgym.comparison.described import load_comparison
from agentgym.comparison.matrix import cells_of, contrast_rows
from agentgym.config import load_config
from agentgym.evaluation.protocol import load_protocol

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
PAGE = "\n".join(
    (ROOT / f"docs/reference/{name}.md").read_text()
    for name in ("reproduce", "reproduce-tables", "reproduce-figures")
)
NOT_RUN = "not run"


def tables():
    """Return (header, rows) of every table, cells as text."""
    lines = [line.strip() for line in PAGE.splitlines()]
    found = []
    for index, line in enumerate(lines):
        if re.fullmatch(r"\|(-+\|)+", line):
            rows = []
            for row in lines[index + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(cells(row))
            found.append((cells(lines[index - 1]), rows))
    return found


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def commands():
    typed = [
        line
        for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    named = re.findall(r"`((?:agentgym|python) [^`]+)`", PAGE)
    return list(dict.fromkeys([*typed, *named]))


def of_ours():
    """{label of a row in the two tables of small models: expected other cells, from the files}."""
    (learn,) = (each for each in result("learn")["tables"] if each["name"] == "learn")
    unlock = result("unlock")
    pairs = {
        "GRPO over REINFORCE++, long fixed horizon": (learn, "grpo long", "reinforce++ long"),
        "GRPO over REINFORCE++, ScalingInter": (
            learn,
            "grpo ScalingInter",
            "reinforce++ ScalingInter",
        ),
        "ScalingInter over a long fixed horizon, PPO": (learn, "ppo ScalingInter", "ppo long"),
        "ScalingInter over a long fixed horizon, REINFORCE++": (
            learn,
            "reinforce++ ScalingInter",
            "reinforce++ long",
        ),
        "ScalingInter over a long fixed horizon, GRPO": (learn, "grpo ScalingInter", "grpo long"),
        "ScalingInter over a short fixed horizon, GRPO, locked door": (
            unlock,
            "grpo ScalingInter, locked door",
            "grpo short, locked door",
        ),
        "ScalingInter over a long fixed horizon, GRPO, locked door": (
            unlock,
            "grpo ScalingInter, locked door",
            "grpo long, locked door",
        ),
    }
    found = {label: difference(*pair) for label, pair in pairs.items()}
    found["BabyAI, two levels"] = course("pipeline", "stage-3")
    found["TextCraft, depth 1"] = course("textcraft", "stage-2")
    return found


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def difference(table, a, b):
    """Return [points with their interval, whether it excludes 0]."""
    (found,) = (
        contrast["difference"]["avg_at_4"]
        for contrast in table["contrasts"]
        if (contrast["a"], contrast["b"]) == (a, b)
    )
    mean, low, high = (f"{100 * found[key]:+.1f}" for key in ("mean", "low", "high"))
    return [f"{mean} ({low} to {high})", "yes" if found["low"] > 0 else "no"]


def course(name, last):
    """Return [untrained, warm start, after the last stage] of seed 0."""
    (run,) = (each for each in result(name)["runs"] if each["seed"] == 0)
    evaluations = run["evaluations"]
    return [
        f"{100 * evaluations[step]['summary']['avg_at_4']['mean']:.1f}"
        for step in (next(iter(evaluations)), "warm-start", last)
    ]


def test_what_was_measured_stands_there_as_in_its_file():
    shown = {row[0]: row for header, rows in tables() for row in rows if NOT_RUN not in row}
    for label, values in of_ours().items():
        row = shown[label]
        at = 2 if len(values) == 2 else 1  # after the published value
        assert row[at : at + len(values)] == values, label


def test_nothing_else_claims_to_be_measured():
    claims = [
        row
        for header, rows in tables()
        for row in rows
        if header[-1] == "ours" and row[-1] != NOT_RUN and row[0] != "items"
    ]
    assert claims == []
    assert sum(row[-1] == NOT_RUN for _, rows in tables() for row in rows) > 50
    bound = of_ours()
    measured = [rows for header, rows in tables() if {"shows", "after RL"} & set(header)]
    assert {row[0] for rows in measured for row in rows} == set(bound)


def by_kind():
    """Return tables 1 to 5: success by kind of task, with the number of items of each kind."""
    return [(rows[0], rows[1:]) for _, rows in tables() if rows[0][0] == "items"]


def test_the_published_totals_are_those_of_their_parts():
    assert len(by_kind()) == 5
    for (_, *counts, total, _), rows in by_kind():
        numbers = [int(count) for count in counts]
        assert sum(numbers) == int(total)
        for model, *shares, published, _ in rows:
            if (model, published) == ("Qwen2.5-7B", "9.76"):  # 2 of 14, 1 of 15, 0 of 6, 1 of 6
                continue
            solved = [
                float(share) / 100 * number for share, number in zip(shares, numbers, strict=True)
            ]
            assert all(abs(each - round(each)) < 0.01 for each in solved), (model, shares)
            assert abs(100 * sum(map(round, solved)) / int(total) - float(published)) < 0.01, model


def test_the_ranges_that_were_published_are_those_of_the_tables():
    two_recipes = next(rows for header, rows in tables() if header[:2] == ["model", "recipe"])
    gains = [
        float(grpo) - float(other)
        for first, second in (two_recipes[:2], two_recipes[2:])
        for grpo, other in zip(first[2:-1], second[2:-1], strict=True)
    ]
    growing = next(rows for header, rows in tables() if header[:2] == ["recipe", "horizon"])
    ranges = {
        "GRPO over REINFORCE++, long fixed horizon": gains,
        "GRPO over REINFORCE++, ScalingInter": gains,
        "ScalingInter over a long fixed horizon, PPO": gained(growing[1], growing[2]),
        "ScalingInter over a long fixed horizon, REINFORCE++": gained(growing[3], growing[4]),
        "ScalingInter over a long fixed horizon, GRPO": [
            float(growing[-2]) - float(fixed[-2])
            for fixed, growing in (rows[-2:] for _, rows in by_kind())
        ],
    }
    (claims,) = (rows for header, rows in tables() if "shows" in header)
    for claim, published, *_ in claims:
        if claim in ranges:
            low, high = min(ranges[claim]), max(ranges[claim])
            assert published == f"{low:+.2f} to {high:+.2f}", claim


def gained(fixed, growing):
    return [float(b) - float(a) for a, b in zip(fixed[2:-1], growing[2:-1], strict=True)]


@pytest.mark.parametrize("command", commands())
def test_a_command_is_understood(command, monkeypatch):
    """The program parses the arguments, and the parameters are valid; the command does not run."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    if words[0] == "agentgym":
        monkeypatch.setattr(agentgym.cli, "guarded", lambda *_, **__: 0)
        assert agentgym.cli.main(words[1:]) == 0
        if "--params" in words:
            load_config(words[words.index("--params") + 1])
        if "--protocol" in words:
            load_protocol(words[words.index("--protocol") + 1])
    elif words[:3] == ["python", "-m", "flows.pipeline"]:
        from flows import shell

        def run(flow, wanted, arguments, console):
            return len(load_config(arguments.params, arguments.overrides).envs)

        monkeypatch.setattr(shell, "_run", run)
        monkeypatch.setattr(shell, "guarded", lambda work: work())
        assert shell.main("flows.pipeline", NamedFlow, None, words[3:]) == 1
    elif words[:3] == ["python", "-m", "flows.compare"]:
        described = load_comparison(words[3])
        assert contrast_rows(described, cells := cells_of(described))
        assert {cell.environment for cell in cells} == set(described.environments)
    else:
        assert words[0] == "python"
        assert (ROOT / words[1]).is_file()


class NamedFlow:
    description = "a flow whose arguments are looked at alone"


def test_every_file_named_is_there():
    named = set(
        re.findall(r"(?:profiles|comparisons|benchmarks|tests)/[\w./-]+\.(?:yaml|py)", PAGE)
    )
    assert len(named) > 15
    envs = ("webarena", "searchqa", "textcraft", "babyai", "sciworld")
    paths = {name.replace("ENV", env) for name in named for env in envs}
    assert sorted(name for name in paths if not (ROOT / name).is_file()) == []
    profiles = {f"profiles/train/{path.name}" for path in (ROOT / "profiles/train").glob("*.yaml")}
    assert profiles <= paths
    assert {f"profiles/eval/{path.name}" for path in published_evaluations()} <= paths


def published_evaluations():
    return (ROOT / "profiles/eval").glob("agentgym-rl*.yaml")
