"""Tests for expanding recipes, horizons and seeds into cells, and for refused inputs."""

import os
import threading
import time

import pytest
import yaml

from agentgym.comparison.described import file_and_overrides, load_comparison
from agentgym.comparison.matrix import cells_of, comparison_key, contrast_rows, run_cell
from agentgym.config import ConfigError, load_config
from agentgym.pipeline.child import Stopped
from agentgym.pipeline.run import run_step, run_with_parents
from agentgym.pipeline.table import finished, open_store, with_parents
from agentgym.store.lease import LeaseHeld

BASE = {
    "name": "two",
    "seeds": [3, 7],
    "recipes": {"grpo": {"algorithm": {"recipe": "grpo"}}, "slow": {"optimizer": {"lr": 0.0001}}},
    "horizons": {
        "short": {"horizon": {"kind": "fixed", "max_turns": [5], "stage_steps": [2]}},
        "growing": {},
    },
}


@pytest.fixture
def described(tmp_path, tiny_params):
    """Return a function that writes a changed comparison into the folder of a tiny run's file."""
    tiny_params(tmp_path)

    def write(**changes):
        (tmp_path / "two.yaml").write_text(yaml.safe_dump({**BASE, **changes}, sort_keys=False))
        return load_comparison(tmp_path / "two.yaml")

    return write


def test_every_recipe_meets_every_horizon_and_every_seed(described):
    cells = cells_of(described())
    assert [cell.title for cell in cells] == [
        f"{recipe} {horizon} seed {seed}"
        for recipe in ("grpo", "slow")
        for horizon in ("short", "growing")
        for seed in (3, 7)
    ]
    last = cells[-1]
    assert (last.cfg.seed, last.cfg.optimizer.lr, last.cfg.horizon.max_turns) == (7, 0.0001, (5, 7))
    assert (cells[0].cfg.optimizer.lr, cells[0].cfg.horizon.max_turns) == (0.0005, (5,))
    assert (cells[0].evaluation, last.evaluation) == ("evaluate-stage-1", "evaluate-stage-2")


def test_a_cell_runs_no_step_that_its_table_does_not_need(described):
    cell = cells_of(described())[-1]
    assert cell.steps == (
        "prepare",
        "demonstrate",
        "initialize",
        "warm-start",
        "evaluate-warm-start",
        "stage-1",
        "stage-2",
        "evaluate-stage-2",
    )
    registered = cells_of(described(until="register"))[-1]
    assert registered.steps == (*cell.steps, "register")
    assert registered.evaluation == cell.evaluation


def test_the_matrix_may_be_a_part_and_cells_add_to_it(described):
    extra = [
        {"name": "hot", "recipe": "slow", "set": {"rollout": {"temperature": 1.3}}, "seeds": [9]},
        {
            "name": "start",
            "until": "evaluate-warm-start",
            "group": "control",
            "set": {"evaluation": {"temperature": 0.3}},
        },
    ]
    cells = cells_of(described(matrix={"recipes": ["grpo"], "horizons": ["short"]}, cells=extra))
    assert [cell.title for cell in cells] == [
        "grpo short seed 3",
        "grpo short seed 7",
        "hot seed 9",
        "start seed 3",
        "start seed 7",
    ]
    assert (cells[2].cfg.rollout.temperature, cells[2].cfg.optimizer.lr) == (1.3, 0.0001)
    assert (cells[3].steps[-1], cells[3].evaluation, cells[3].group) == (
        "evaluate-warm-start",
        "evaluate-warm-start",
        "control",
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"recipies": {}}, "unknown key recipies; did you mean recipes?"),
        (
            {"cells": [{"recipe": "grpo", "horizn": "short"}]},
            "unknown key cells.0.horizn; did you mean cells.0.horizon?",
        ),
        (
            {"matrix": {"recipe": ["grpo"]}},
            "unknown key matrix.recipe; did you mean matrix.recipes?",
        ),
        ({"cells": [{"set": {}}]}, "neither name, recipe nor horizon"),
        ({"name": "../x"}, "name: string should match pattern"),
        ({"seeds": []}, "seeds: tuple should have at least 1 item"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(described, changes, line):
    with pytest.raises(ConfigError, match=r"two\.yaml: ") as error:
        described(**changes)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "overrides", "line"),
    [
        (
            {"matrix": {"recipes": ["gpro"]}},
            [],
            "matrix.recipes: unknown recipe 'gpro'; known: grpo, slow",
        ),
        (
            {"cells": [{"recipe": "grpo", "horizon": "huge"}]},
            [],
            "unknown horizon 'huge'; known: short, growing",
        ),
        (
            {"recipes": {"a": {"optimizer": {"ler": 1}}}},
            [],
            "a short seed 3: unknown key optimizer.ler; did you mean optimizer.lr?",
        ),
        (
            {"cells": [{"recipe": "grpo", "horizon": "short"}]},
            [],
            "two rows are called 'grpo short'",
        ),
        (
            {"cells": [{"name": "same", "horizon": "short"}]},
            [],
            "grpo short seed 3 and same seed 3 are the same run",
        ),
        (
            {"cells": [{"name": "same", "until": "stage-1"}]},
            [],
            "same seed 3: it ends with stage-1 and evaluates nothing",
        ),
        (
            {"cells": [{"name": "same", "until": "stage-9"}]},
            [],
            "same seed 3: unknown step 'stage-9'",
        ),
        (
            {},
            ["seed=5"],
            "grpo short seed 3: seed is overridden by 5; name the seeds in the comparison's file",
        ),
        ({"matrix": {"recipes": []}}, [], "the comparison has no cell"),
        (
            {"cells": [{"name": 'it\'s "x"', "horizon": "short"}]},
            [],
            "it's \"x\": MLflow finds no name with both ' and",
        ),
    ],
)
def test_cells_that_cannot_be_are_refused_by_name(described, changes, overrides, line):
    if line.startswith(("grpo short seed 3 and", "same")):
        changes = {**changes, "recipes": {"grpo": {"algorithm": {"recipe": "grpo"}}}}
    with pytest.raises(ConfigError) as error:
        cells_of(described(**changes), overrides)
    assert line in str(error.value)


def test_overrides_lie_over_every_cell(described):
    assert {
        cell.cfg.rollout.temperature for cell in cells_of(described(), ["rollout.temperature=0.5"])
    } == {0.5}


def test_contrasts_name_rows_horizons_or_recipes(described):
    comparison = described(
        contrasts=[["growing", "short"], ["slow", "grpo"], ["slow growing", "grpo short"]]
    )
    assert contrast_rows(comparison, cells_of(comparison)) == [
        ("grpo growing", "grpo short"),
        ("slow growing", "slow short"),
        ("slow short", "grpo short"),
        ("slow growing", "grpo growing"),
        ("slow growing", "grpo short"),
    ]


@pytest.mark.parametrize(
    ("contrast", "line"),
    [
        (["growing", "grpo"], r"\[growing, grpo\] names no two rows"),
        (["fewer", "grpo short"], "fewer and grpo short differ in evaluation.num_items"),
        (["held out", "grpo short"], "held out and grpo short differ in evaluation.split"),
        (["other level", "grpo short"], "other level and grpo short differ in env.options"),
    ],
)
def test_rows_that_were_evaluated_differently_are_not_compared(described, contrast, line):
    cells = [
        {"name": "fewer", "set": {"evaluation": {"num_items": 4}}},
        {"name": "held out", "set": {"evaluation": {"split": "validation"}}},
        {"name": "other level", "set": {"env": {"options": {"levels": ["GoToObj"]}}}},
    ]
    comparison = described(contrasts=[contrast], cells=cells)
    with pytest.raises(ConfigError, match=line):
        contrast_rows(comparison, cells_of(comparison))


def test_the_key_names_what_changes_the_table_and_not_its_title(described):
    keys = [
        comparison_key(comparison, cells_of(comparison))
        for comparison in (
            described(),
            described(title="another"),
            described(seeds=[3]),
            described(contrasts=[["slow", "grpo"]]),
        )
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


@pytest.mark.integration
def test_a_step_with_its_parents_waits_for_the_process_that_runs_a_shared_one(
    tmp_path, tiny_params
):
    cfg = load_config(
        tiny_params(tmp_path),
        ["warm_start.num_demos=20", "warm_start.steps=2", "warm_start.batch_size=4"],
    )
    run_step("prepare", cfg)
    store = open_store(cfg)
    key = "0" * 64
    from agentgym.pipeline.table import key_of, steps_of

    key = key_of(steps_of(cfg)["demonstrate"], cfg, finished(cfg, store))
    with store.open("demonstrate", key), pytest.raises(LeaseHeld):
        run_with_parents("warm-start", cfg)
    held, released = threading.Event(), threading.Event()

    def hold():
        with store.open("demonstrate", key):
            held.set()
            released.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)
    threading.Timer(1.5, released.set).start()
    began = time.monotonic()
    outcomes = run_with_parents("warm-start", cfg, wait_s=60)
    holder.join(30)
    assert time.monotonic() - began >= 1.0
    assert [(outcome.step.name, str(outcome)) for outcome in outcomes] == [
        ("prepare", "done"),
        ("demonstrate", "ran"),
        ("initialize", "ran"),
        ("warm-start", "ran"),
    ]


def test_steps_of_a_run_are_those_asked_for_and_what_they_need(tmp_path, tiny_params):
    cfg = load_config(tiny_params(tmp_path))
    assert with_parents(cfg, "stage-1", "evaluate-warm-start") == (
        "prepare",
        "demonstrate",
        "initialize",
        "warm-start",
        "evaluate-warm-start",
        "stage-1",
    )
    with pytest.raises(ConfigError, match="unknown step 'nothing'"):
        with_parents(cfg, "stage-1", "nothing")


@pytest.mark.integration
@pytest.mark.slow
def test_a_cell_that_fails_is_named_with_its_last_words_and_its_log(described):
    cell = cells_of(described(overrides={"rollout": {"episode_timeout_s": 1e-6}}))[0]
    with pytest.raises(
        RuntimeError,
        match=r"^grpo short seed 3: .*; its log is .*grpo-short-seed-3-[0-9a-f]{8}\.log$",
    ):
        run_cell(cell, wait_s=1)


@pytest.mark.integration
def test_a_stopped_cell_leaves_no_process(described):
    cell = cells_of(described())[0]
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    with pytest.raises(Stopped, match="grpo short seed 3 was stopped"):
        run_cell(cell, wait_s=1, stop=stop)
    running = [line for line in os.popen("ps -eo args").read().splitlines() if cell.slug in line]
    assert running == []


def test_both_command_lines_tell_the_file_from_the_overrides():
    assert file_and_overrides([]) == ("comparisons/default.yaml", ())
    assert file_and_overrides(["a=1", "mine.yaml", "b=2"]) == ("mine.yaml", ("a=1", "b=2"))
    with pytest.raises(ConfigError, match="expected one comparison file, got a, b"):
        file_and_overrides(["a", "b"])


COLUMNS = {
    "one level": {"set": {"env": {"options": {"levels": ["GoToObj"]}}, "optimizer": {"lr": 0.01}}},
    "two levels": {
        "set": {"env": {"options": {"levels": ["GoToObj", "GoToRedBall"]}}},
        "recipes": {"slow": {"optimizer": {"lr": 0.0002}}},
        "horizons": {"short": {"horizon": {"max_turns": [4]}}},
    },
}


def test_every_row_stands_in_the_column_of_every_environment(described):
    cells = cells_of(described(environments=COLUMNS, seeds=[3], changes={"num_samples": 3}))
    assert [cell.title for cell in cells] == [
        f"{method} in {column} seed 3"
        for method in ("grpo short", "grpo growing", "slow short", "slow growing")
        for column in COLUMNS
    ]
    found = {(cell.method, cell.environment): cell for cell in cells}
    levels = [found["grpo short", name].cfg.env.options["levels"] for name in COLUMNS]
    assert levels == [["GoToObj"], ["GoToObj", "GoToRedBall"]]
    # a recipe overrides its column; the column's settings for that recipe override both
    rates = {place: cell.cfg.optimizer.lr for place, cell in found.items()}
    assert [rates["grpo short", "one level"], rates["slow short", "one level"]] == [0.01, 0.0001]
    assert rates["slow short", "two levels"] == 0.0002
    assert found["grpo short", "two levels"].cfg.horizon.max_turns == (4,)
    cell = found["grpo growing", "two levels"]
    assert (cell.until, cell.judged) == ("stage-2", ("warm-start", "stage-2"))
    assert not any(step.startswith("evaluate") for step in cell.steps)
    (asked,) = cell.protocol.envs
    assert (asked.env.name, asked.num_samples, asked.max_turns) == ("babyai", 3, 7)
    assert cell.answers() is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"protocol": "agentgym-rl"}, "protocol and changes are of comparisons with environments"),
        (
            {"environments": {"x": {"recipes": {"ppo": {}}}}},
            r"environments.x.recipes: 'ppo' is none of grpo, slow",
        ),
        (
            {"environments": {"x": {"set": {"mix": [{"name": "textcraft"}]}}}},
            "grpo short in x seed 3: its run has the environments babyai",
        ),
        ({"environments": {"x": {}}, "until": "report"}, "ends with report, which has no"),
        ({"environments": {"x": {}}, "protocol": "nothing"}, "there is no protocol 'nothing'"),
    ],
)
def test_a_column_that_cannot_be_evaluated_is_refused_before_anything_starts(
    described, changes, line
):
    with pytest.raises(ConfigError, match=line):
        cells_of(described(**changes))


def test_methods_are_contrasted_in_every_column(described):
    both = {"environments": COLUMNS}
    for pair, rows in (
        (["slow", "grpo"], [("slow", "short"), ("slow", "growing")]),
        (["slow short", "grpo short"], [("slow", "short")]),
    ):
        comparison = described(**both, contrasts=[pair])
        assert sorted(contrast_rows(comparison, cells_of(comparison))) == sorted(
            (f"{recipe} {horizon} in {column}", f"grpo {horizon} in {column}")
            for recipe, horizon in rows
            for column in COLUMNS
        )
    other = described(**both, contrasts=[["grpo short in one level", "grpo short in two levels"]])
    with pytest.raises(ConfigError, match="evaluated by different protocols"):
        contrast_rows(other, cells_of(other))


def test_a_protocol_is_part_of_what_names_the_table(described):
    keys = [
        comparison_key(each, cells_of(each))
        for each in (
            described(environments=COLUMNS),
            described(environments=COLUMNS, changes={"num_samples": 5}),
            described(environments=COLUMNS, changes={"concurrency": 3}),
        )
    ]
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]  # this setting changes no result


def test_a_layer_of_a_column_may_extend_a_parameter_file(described, tmp_path):
    (tmp_path / "longer.yaml").write_text(yaml.safe_dump({"horizon": {"max_turns": [3, 6]}}))
    column = {"horizons": {"growing": {"extends": "longer.yaml", "validation": {"max_turns": 9}}}}
    cells = cells_of(described(environments={"there": column}, seeds=[3]))
    (growing,) = (cell for cell in cells if (cell.recipe, cell.horizon) == ("grpo", "growing"))
    assert (growing.cfg.horizon.max_turns, growing.cfg.validation.max_turns) == ((3, 6), 9)
    assert {cell.cfg.validation.max_turns for cell in cells if cell.horizon == "short"} == {7}
    column["horizons"]["growing"]["extends"] = "nowhere.yaml"
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        described(environments={"there": column})
