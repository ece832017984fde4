"""Verdicts and claims follow from the numbers: other numbers give the opposite text."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from agentgym.comparison.described import Comparison, load_comparison
from agentgym.comparison.matrix import Cell, cells_of
from agentgym.comparison.results import CellResult, Checkpoint, Row, table
from agentgym.config import RunConfig
from tests.benchmarks.conftest import imported

FOLDER = Path(__file__).parents[2] / "benchmarks"


learn = imported("learn")


def row(
    name,
    success,
    start=0.5,
    *,
    recipe="grpo",
    horizon="ScalingInter",
    group="",
    curve=(0.5, 0.9),
    cpu=50.0,
    **evaluation,
):
    """Return a row of five equal seeds with 100 items each; a fraction `success` of the items is
    solved, and at the start the first fraction `start`.
    """
    results = []
    for seed in range(5):
        cfg = RunConfig.model_validate(
            {
                "seed": seed,
                "algorithm": {"recipe": recipe},
                "evaluation": {"num_items": 512, **evaluation},
            }
        )
        tables = [
            (
                None
                if share is None
                else {
                    key: (np.arange(100) < 100 * share).astype(float)
                    for key in ("greedy", "avg_at_4")
                }
            )
            for share in (success, start)
        ]
        checkpoints = tuple(
            Checkpoint({"step": 5.0 * (n + 1)}, value) for n, value in enumerate(curve)
        )
        cell = Cell(name, recipe if horizon else "", horizon, group, seed, "evaluate-stage-3", cfg)
        results.append(CellResult(cell, tables[0], tables[1], checkpoints, {"cpu_s": cpu}, (), ()))
    return Row(name, tuple(results))


def verdict(learn, rows, beginning):
    found = [each for each in learn.judge(rows) if each.what.startswith(beginning)]
    assert len(found) == 1, [each.what for each in learn.judge(rows)]
    return found[0]


@pytest.mark.parametrize(
    ("success", "curve", "ends", "near"),
    [(0.9, (0.5, 0.9), True, True), (0.8, (0.95, 0.8), False, False)],
)
def test_a_recipe_is_judged_by_its_end_and_by_its_own_best(learn, success, curve, ends, near):
    rows = [row("grpo ScalingInter", success, curve=curve)]
    assert verdict(learn, rows, "grpo ends at").ok is ends
    assert verdict(learn, rows, "grpo ends near").ok is near
    assert (
        f"{100 * (max(curve) - curve[-1]):.1f} points below"
        in verdict(learn, rows, "grpo ends near").figures
    )


def test_a_verdict_names_its_worst_seed_and_every_seed_must_pass(learn):
    good = row("grpo ScalingInter", 0.95)
    worse = CellResult(
        good.cells[1].cell,
        row("", 0.7).cells[1].after,
        *[getattr(good.cells[1], f) for f in ("start", "curve", "cost")],
        (),
        (),
    )
    found = verdict(learn, [Row(good.name, (good.cells[0], worse, good.cells[2]))], "grpo ends at")
    assert found.ok is False  # the mean is 86.7 %
    assert "worst: seed 1 with 70.0 %" in found.figures


def test_a_claim_says_where_both_rows_are_at_a_ceiling(learn):
    rows = [
        row("ppo ScalingInter", 0.97, recipe="ppo"),
        row("ppo long", 0.96, recipe="ppo", horizon="long"),
    ]
    assert learn.published(rows)[0].endswith("Both rows are at the ceiling: little could show.")


def test_a_result_is_computed_again_from_what_it_left(learn, tmp_path, monkeypatch):
    monkeypatch.setattr(Cell, "run_key", "0" * 64)  # its data is not pulled here
    rows = [
        row("grpo ScalingInter", 0.9),
        row("T 0.4", 0.7, start=None, horizon="", group="temperature"),
    ]
    cells = [cell.cell for each in rows for cell in each.cells]
    comparison = Comparison(name="learn", recipes={}, horizons={})
    for each in rows:
        for cell in each.cells:
            if cell.start is not None:
                cell.cost.update(dict.fromkeys(("step", "turns", "tokens"), 1.0))
    before = table(comparison, cells, rows, [])
    learn.save_items(rows, tmp_path)
    (tmp_path / "learn.json").write_text(json.dumps({"tables": [before]}))
    again, missing = learn.saved_rows(cells, tmp_path)
    assert table(comparison, cells, again, missing) == before
    # a third of the rows come from the other result; the order of the cells is kept
    first, rest = learn.saved_rows(cells[::3], tmp_path)[0], learn.saved_rows(cells, tmp_path)[0]
    found = learn.merged(cells, rest, first)
    assert [each.cell for part in found for each in part.cells] == cells


def test_the_rest_of_a_comparison_is_made_of_the_same_cells(learn, tmp_path):
    cells = cells_of(load_comparison(FOLDER.parent / "comparisons/learn.yaml"))
    missing = [cell for cell in cells if (cell.row, cell.seed) != ("ppo long", 2)][7::9]
    assert len(missing) > 10
    (tmp_path / "rest.yaml").write_text(
        yaml.safe_dump(learn.only("comparisons/learn.yaml", missing))
    )
    again = cells_of(load_comparison(tmp_path / "rest.yaml"))
    assert {cell.title: cell.cfg for cell in again} == {cell.title: cell.cfg for cell in missing}
    assert {cell.until for cell in again} == {cell.until for cell in missing}


def test_the_horizon_is_chosen_by_validation_not_by_the_test(learn):
    rows = [
        row("grpo short", 0.99, horizon="short", curve=(0.5, 0.8)),
        row("grpo long", 0.86, horizon="long", curve=(0.5, 0.9)),
    ]
    assert "86.0 % sampled" in verdict(learn, rows, "grpo ends at").figures


def test_the_temperature_is_chosen_by_validation_not_by_the_test(learn):
    rows = [row("grpo ScalingInter", 0.9)]
    for temperature, test, validation in ((0.4, 0.95, 0.6), (0.8, 0.7, 0.65)):
        shared = {"start": None, "horizon": "", "group": "temperature", "temperature": temperature}
        rows.append(row(f"T {temperature}", test, **shared))
        rows.append(row(f"T {temperature}, validation", validation, split="validation", **shared))
    found = verdict(learn, rows, "control (a)")
    assert found.ok is True
    assert found.figures.startswith(
        "temperature 0.8 of [0.4, 0.8] by validation, 70.0 % sampled on test items"
    )
    assert "+20.0 [" in found.figures
    lower = [row("grpo ScalingInter", 0.7), *rows[1:]]
    assert verdict(learn, lower, "control (a)").ok is False


@pytest.mark.parametrize(
    ("cpu", "success", "ok"), [(55.0, 0.6, True), (20.0, 0.6, False), (55.0, 0.95, False)]
)
def test_supervised_learning_must_have_had_the_time_and_must_be_beaten(learn, cpu, success, ok):
    rows = [
        row("grpo ScalingInter", 0.9),
        row("sft", success, recipe="grpo", horizon="same CPU time", group="sft", cpu=cpu),
    ]
    found = verdict(learn, rows, "control (b)")
    assert found.ok is ok
    assert f"CPU-seconds of training 50 and {cpu:.0f}" in found.figures


@pytest.mark.parametrize(("success", "ok"), [(0.3, True), (0.95, False)])
def test_the_locked_door_has_a_verdict_of_its_own(learn, success, ok):
    rows = [
        row("grpo ScalingInter", 0.9),
        row("grpo ScalingInter, locked door", 0.6, group="unlock"),
        row("sft, locked door", success, recipe="sft", group="unlock", cpu=60.0),
    ]
    assert verdict(learn, rows, "locked door").ok is ok
    assert verdict(learn, rows, "control (b)").ok is None
    rows.append(row("grpo long, locked door", 0.5, horizon="long", group="unlock"))
    (claim,) = (each for each in learn.published(rows) if "locked door" in each)
    assert claim.startswith("ScalingInter over fixed long with grpo, locked door")
    assert ": shows, +10.0 [" in claim


@pytest.mark.parametrize(("success", "ok"), [(0.5, True), (0.3, True), (0.7, False)])
def test_shuffled_rewards_may_not_gain(learn, success, ok):
    assert (
        verdict(learn, [row("shuffled rewards", success, group="shuffled")], "control (c)").ok is ok
    )


def test_what_did_not_run_is_neither_passed_nor_failed(learn):
    verdicts = learn.judge([row("grpo ScalingInter", 0.9)])
    open_points = [each.what for each in verdicts if each.ok is None]
    assert len(open_points) == 8
    assert str(verdicts[-1]).startswith("not run ")


def test_items_and_seeds_are_counted(learn):
    assert verdict(learn, [row("grpo long", 0.9)], "test items").ok is True
    assert (
        verdict(
            learn, [row("grpo long", 0.9), row("grpo short", 0.9, max_turns=5)], "test items"
        ).ok
        is False
    )
    assert verdict(learn, [row("grpo long", 0.9, num_items=256)], "test items").ok is False


@pytest.mark.parametrize(
    ("growing", "fixed", "word"),
    [
        (0.9, 0.8, "shows"),
        (0.8, 0.9, "the opposite shows"),
        (0.9, 0.9, "does not show, the interval includes 0"),
    ],
)
def test_a_published_claim_is_worded_by_its_interval(learn, growing, fixed, word):
    rows = [
        row("ppo ScalingInter", growing, recipe="ppo", cpu=40.0),
        row("ppo long", fixed, recipe="ppo", horizon="long", cpu=50.0),
    ]
    claim = learn.published(rows)[0]
    assert claim.startswith(
        "ScalingInter over fixed long with ppo (paper: +3.0 to +14.9 points over a fixed horizon): "
    )
    assert f": {word}, {100 * (growing - fixed):+.1f} [" in claim
    assert claim.endswith("for 0.80 times the CPU-seconds.")


def test_a_collapse_is_the_furthest_fall_of_a_seed(learn):
    fallen = [
        claim
        for claim in learn.published([row("grpo long", 0.7, horizon="long", curve=(0.9, 0.7))])
        if "collapses" in claim
    ]
    assert "shows with grpo" in fallen[0]
    assert "20.0 points below" in fallen[0]
    steady = [
        claim
        for claim in learn.published([row("grpo long", 0.9, horizon="long", curve=(0.7, 0.9))])
        if "collapses" in claim
    ]
    assert "does not show with grpo" in steady[0]
