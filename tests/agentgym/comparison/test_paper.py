"""The table of a comparison as CSV and LaTeX."""

import csv
import re

from agentgym.comparison.paper import table_csv, table_latex
from tests.agentgym.comparison.test_tables import row, table

HOSTILE = r"=cmd|' /C calc'!A1 & 5_% \input{x} $y$ #~^<>"


def lines_of(comparison):
    return [*csv.DictReader(table_csv(comparison).decode().splitlines())]


def test_csv_has_every_number_with_its_interval_and_seeds():
    lines = lines_of(table([row("grpo", "long", 0.9)]))
    success = [line for line in lines if line["kind"] == "success"]
    assert [line["metric"] for line in success] == ["greedy", "avg_at_4", "pass_at_4"]
    assert {name: success[0][name] for name in ("name", "mean", "low", "high", "sd")} == {
        "name": "grpo long",
        "mean": "0.9",
        "low": "0.88",
        "high": "0.92",
        "sd": "0.01",
    }
    assert success[0]["per_seed"] == "0.89 0.91"
    assert {line["kind"] for line in lines} == {"success", "start", "gain", "difference"}


def test_a_name_is_no_formula_of_a_spreadsheet():
    (line, *_) = lines_of(table([row("grpo", "long", 0.9, name=HOSTILE)]))
    assert line["name"] == f"'{HOSTILE}"


def test_latex_is_a_table_of_equal_rows_and_one_of_contrasts():
    comparison = table([row("grpo", "long", 0.9), row("ppo", "long", 0.8, start=None)])
    text = table_latex(comparison).decode()
    columns, of_contrasts = re.findall(r"\\begin\{tabular\}\{(\w+)\}", text)
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert (columns, of_contrasts) == ("lrrrr", "lrrr")
    assert [line.count(" & ") for line in rows] == [4, 4, 4, *[3] * (len(rows) - 3)]
    assert rows[3] == r"difference & greedy, points & avg@4, points & pass@4, points \\"
    assert len(rows) == 4 + len(comparison["contrasts"]) > 4
    assert rows[0] == (
        r"recipe and horizon & greedy, \% & avg@4, \% & pass@4, \% & avg@4 gain, points \\"
    )
    assert rows[1].startswith(r"grpo long & 90.0 $\pm$ 1.0 & 85.0 $\pm$ 1.0 & 92.0 $\pm$ 1.0 & ")
    assert rows[2].endswith(r"82.0 $\pm$ 1.0 &  \\")
    for part in ("toprule", "midrule", "bottomrule", "end{tabular}"):
        assert text.count(f"\\{part}") == 2


def test_a_name_is_no_command_of_latex():
    text = table_latex(table([row("grpo", "long", 0.9, name=HOSTILE)])).decode()
    assert r"\textbackslash{}input\{x\} \$y\$ \#\textasciitilde{}\textasciicircum{}" in text
    assert r"\& 5\_\%" in text
