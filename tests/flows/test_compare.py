"""A comparison as a user runs it: several cells, one that fails, and a repeated command."""

import json
import re
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from agentgym.algorithms.recipe import RECIPES
from agentgym.comparison.described import load_comparison
from agentgym.comparison.matrix import cells_of, contrast_rows
from flows.compare import main

SMALL = {
    "name": "small",
    "title": "Two recipes, two horizons",
    "params": "../params.yaml",
    "seeds": [0],
    "overrides": {
        "horizon": {"max_turns": [5, 8], "stage_steps": [1, 1]},
        "validation": {"every": 1},
    },
    "recipes": {"grpo": {"algorithm": {"recipe": "grpo"}}, "slow": {"optimizer": {"lr": 0.0001}}},
    "horizons": {
        "long": {"horizon": {"kind": "fixed", "max_turns": [8], "stage_steps": [2]}},
        "growing": {},
    },
    "contrasts": [["growing", "long"]],
}
BROKEN = {
    "name": "broken",
    "set": {"optimizer": {"lr": 0.0003}, "env": {"request_timeout_s": 1e-6}},
}  # the timeout is in no key: this cell shares the other cells' steps


WORDS = ("comparisons/small.yaml", "--out", "out")


def compare(project, *arguments):
    return project.run("python", "-m", "flows.compare", *WORDS, *arguments, timeout=800)


def steps_in(manifests):
    return sorted(path.parts[-3].rpartition("-")[0] for path in manifests)


@pytest.fixture(scope="module")
def compared(tmp_path_factory, make_clone, made_databases):
    """A clone with a finished comparison whose last cell fails.
    Two cells run at a time; they have one seed and share their first steps.
    """
    project = make_clone(tmp_path_factory.mktemp("compared"))
    made_databases(project)
    (project.folder / "comparisons/small.yaml").write_text(
        yaml.safe_dump({**SMALL, "cells": [BROKEN]}, sort_keys=False)
    )
    project.first = compare(project, "--parallel", "2")
    project.after_first = project.manifests()
    return project


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_failed_cell_is_named_and_the_others_are_in_the_table(compared):
    assert compared.first.returncode == 1, compared.first.stdout + compared.first.stderr
    assert "compare: 0 of 5 cells are done" in compared.first.stdout
    failure = compared.first.stderr[
        compared.first.stderr.index("failed: CellsFailed: 1 of 5 cells failed") :
    ]
    assert re.search(
        r"^  broken seed 0: .*its log is .*broken-seed-0-[0-9a-f]{8}\.log$", failure, re.MULTILINE
    )
    assert "Traceback" not in compared.first.stderr
    table = json.loads((compared.folder / "out/small.json").read_text())
    assert [row["name"] for row in table["rows"]] == [
        "grpo long",
        "grpo growing",
        "slow long",
        "slow growing",
    ]
    assert table["missing"] == ["broken seed 0"]
    assert [(c["a"], c["b"]) for c in table["contrasts"]] == [
        ("grpo growing", "grpo long"),
        ("slow growing", "slow long"),
    ]
    assert {path.name for path in (compared.folder / "out").iterdir()} == {
        *("small.json", "small.md", "small.csv", "small.tex"),
        *("small.png", "small.svg", "small_curves.png", "small_curves.svg"),
    }
    assert compared.processes() == []


@pytest.mark.slow
def test_cells_share_what_is_equal_and_run_no_step_their_table_does_not_need(compared):
    folders = {path.parts[-3] for path in compared.after_first}
    count = {
        name: sum(folder.rpartition("-")[0] == name for folder in folders)
        for name in steps_in(compared.after_first)
    }
    assert count == {
        "prepare": 1,
        "demonstrate": 1,
        "initialize": 1,
        "warm-start": 1,
        "evaluate-warm-start": 1,
        "stage-1": 4,
        "stage-2": 2,
        "evaluate-stage-1": 2,
        "evaluate-stage-2": 2,
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_command_runs_what_is_left_and_then_nothing(compared):
    mended = compare(compared, "env.request_timeout_s=60")
    assert mended.returncode == 0, mended.stdout + mended.stderr
    assert "compare: 4 of 5 cells are done" in mended.stdout
    manifests = compared.manifests()
    assert compared.after_first.items() <= manifests.items()
    assert set(steps_in(manifests.keys() - compared.after_first.keys())) == {
        "stage-1",
        "stage-2",
        "evaluate-stage-2",
    }
    client = MlflowClient(f"sqlite:///{compared.folder / '.agentgym/mlflow.db'}")
    before = ledger(client)
    files = {path.name: path.read_bytes() for path in (compared.folder / "out").iterdir()}
    again = compare(compared, "env.request_timeout_s=60")
    assert again.returncode == 0
    assert "compare: 5 of 5 cells are done" in again.stdout
    assert compared.manifests() == manifests
    assert {path.name: path.read_bytes() for path in (compared.folder / "out").iterdir()} == files
    assert ledger(client) == before
    shown = compared.run("agentgym", "compare", "comparisons/small.yaml", "--out", "again")
    assert (shown.returncode, shown.stdout) == (0, files["small.md"].decode())
    written = {path.name: path.read_bytes() for path in (compared.folder / "again").iterdir()}
    assert written == files


@pytest.mark.slow
def test_mlflow_holds_the_comparison_with_its_cells_below_and_each_run_once(compared):
    client = MlflowClient(f"sqlite:///{compared.folder / '.agentgym/mlflow.db'}")
    runs = client.search_runs(
        [client.get_experiment_by_name("agentgym-babyai").experiment_id], max_results=1000
    )
    kinds = {
        kind: [run for run in runs if run.data.tags["kind"] == kind]
        for kind in ("comparison", "cell", "pipeline")
    }
    comparison = min(kinds["comparison"], key=lambda run: run.info.start_time)
    assert {artifact.path for artifact in client.list_artifacts(comparison.info.run_id)} >= {
        "small.json",
        "small.md",
        "small.png",
        "rows_table.json",
        "contrasts_table.json",
    }
    assert "Two recipes, two horizons" in comparison.data.tags["mlflow.note.content"]
    cells = [
        run
        for run in kinds["cell"]
        if run.data.tags["mlflow.parentRunId"] == comparison.info.run_id
    ]
    names = {run.info.run_name for run in cells}
    assert len(cells) == len(names)
    assert names >= {
        "grpo long seed 0",
        "grpo growing seed 0",
        "slow long seed 0",
        "slow growing seed 0",
    }
    pipelines = {run.info.run_id: run for run in kinds["pipeline"]}
    for cell in cells:
        run = pipelines[cell.data.tags["run_id"]]
        assert run.data.tags["comparison.small"] == comparison.data.tags["comparison_key"][:12]
        for name in ("validation/success", "cost/turns", "cost/cpu_s"):
            assert sorted(
                point.step for point in client.get_metric_history(cell.info.run_id, name)
            ) == [1, 2]
        assert sorted(
            point.step for point in client.get_metric_history(cell.info.run_id, "eval/greedy")
        ) == [0, 2]
    assert all(run.info.status == "FINISHED" for run in (*cells, comparison))


def ledger(client):
    runs = client.search_runs(["1"], max_results=1000)
    return sorted(
        (
            run.info.run_id,
            run.info.end_time,
            len(client.get_metric_history(run.info.run_id, "cost/turns")),
        )
        for run in runs
    )


@pytest.mark.parametrize(
    ("changes", "arguments", "line"),
    [
        (
            {"recipies": {}},
            (),
            "comparisons/small.yaml: unknown key recipies; did you mean recipes?",
        ),
        ({"params": "nowhere.yaml"}, (), "parameter file comparisons/nowhere.yaml does not exist"),
        (
            {"recipes": {"grpo": {"algorithm": {"recipe": "gpro"}}}},
            (),
            "grpo long seed 0: algorithm.recipe 'gpro' is unknown",
        ),
        (
            {},
            ("optimizer.ler=1",),
            "grpo long seed 0: unknown key optimizer.ler; did you mean optimizer.lr?",
        ),
        (
            {},
            ("env.options.veiw=compact",),
            "env: babyai has no option 'veiw'; did you mean 'view'?",
        ),
        (
            {"contrasts": [["growing", "grwoing"]]},
            (),
            "contrasts: [growing, grwoing] names no two rows",
        ),
    ],
)
def test_a_wrong_comparison_is_one_line_and_starts_nothing(fresh, changes, arguments, line):
    (fresh.folder / "comparisons/small.yaml").write_text(
        yaml.safe_dump({**SMALL, **changes}, sort_keys=False)
    )
    ended = fresh.call(main, *WORDS, *arguments)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert line in ended.stderr
    _, page = ended.stderr.splitlines()
    assert page.startswith("see ")
    assert not (fresh.folder / ".agentgym/store").exists()


@pytest.mark.parametrize(
    ("words", "folder"), [((), ".agentgym/comparisons"), (("--out", "mine"), "mine")]
)
def test_a_table_of_ones_own_stays_out_of_the_repositorys_results(
    words, folder, fresh, monkeypatch, capsys
):
    written = []
    monkeypatch.chdir(fresh.folder)
    monkeypatch.setattr("flows.compare._waiting", lambda cells: [])
    monkeypatch.setattr("flows.compare.write_comparison", lambda _, __, out: written.append(out))
    monkeypatch.setattr("flows.compare.table_markdown", lambda result: "")
    (fresh.folder / "comparisons/small.yaml").write_text(yaml.safe_dump(SMALL, sort_keys=False))
    assert main(["comparisons/small.yaml", *words]) == 0
    assert written == [Path(folder)]
    assert (
        f"written to {folder}/small.json, .md, .csv, .tex, .png and .svg" in capsys.readouterr().out
    )


def test_comparisons_of_the_repository_are_valid(pulled):
    files = sorted((pulled.folder / "comparisons").glob("*.yaml"))
    assert files
    for file in files:
        named = {
            recipe["algorithm"]["recipe"]
            for recipe in yaml.safe_load(file.read_text())["recipes"].values()
        }
        shown = pulled.run("agentgym", "compare", str(file))
        if "dataset not imported" in shown.stderr:  # needs the published lists; the cells are valid
            cells = cells_of(load_comparison(file))
            assert {cell.protocol.name for cell in cells} == {"agentgym-rl"}
            assert contrast_rows(load_comparison(file), cells)
        elif named <= RECIPES.keys():
            assert shown.returncode == 0, shown.stderr
            assert "No cell is done." in shown.stdout
        else:  # benchmarks/learn.py skips such a file
            assert (shown.returncode, "is unknown" in shown.stderr) == (2, True)
