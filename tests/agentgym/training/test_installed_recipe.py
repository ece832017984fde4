"""The recipe that `agentgym new recipe` writes, installed, trains like a built-in one, with its own
settings.
"""

import shutil

import pytest

from agentgym.algorithms.recipe import known_recipes, recipe_modules
from agentgym.cli import main
from agentgym.config import ConfigError, load_config
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store, steps_of
from agentgym.steps.context import METRICS
from agentgym.store.keys import source_digest
from agentgym.tracking.points import decode_points
from tests.starters import RECIPE

pytestmark = pytest.mark.integration

MEDIAN = RECIPE.substitute(name="median", module="median_recipe")


@pytest.fixture
def median(install):
    return install("median_recipe", MEDIAN, "agentgym.recipes", "median", "median_recipe:recipe")


def test_an_installed_recipe_trains_with_its_own_functions_and_settings(
    median, started, tiny_params, tmp_path
):
    shutil.copytree(started, tmp_path / "run")
    assert "median" in known_recipes()
    algorithm = {"recipe": "median", "scale": 2.0}
    cfg = load_config(tiny_params(tmp_path / "run", algorithm=algorithm))
    for name in ("prepare", "demonstrate", "initialize", "warm-start", "stage-1", "stage-2"):
        run_step(name, cfg)
    store = open_store(cfg)
    done = finished(cfg, store)
    commits = [c for name in ("stage-1", "stage-2") for c in store.history(name, done[name].key)]
    rows = [point.metrics for c in commits for point in decode_points(store.read(c, METRICS))]
    assert len(rows) >= 3
    assert any(row.get("actor/grad_norm", 0.0) > 0 for row in rows)
    assert any("actor/ratio" in row for row in rows)


def test_a_setting_that_it_has_not_is_refused_with_its_own_list(
    median, tiny_params, tmp_path, capsys
):
    path = str(tiny_params(tmp_path / "run", algorithm={"recipe": "median"}))
    assert main(["plan", "--params", path, "--set", "algorithm.gamma=0.9"]) == 2
    said = capsys.readouterr().err
    assert "algorithm.gamma means nothing to recipe median; its settings: " in said
    assert "scale" in said
    with pytest.raises(ConfigError, match=r"algorithm\.scale: input should be greater than 0"):
        load_config(path, ["algorithm.scale=-1"])


def test_its_source_is_in_the_keys_of_what_it_trains(median, tiny_params, tmp_path):
    path = tiny_params(tmp_path / "run", algorithm={"recipe": "median"})
    assert recipe_modules("median") == ("median_recipe",)
    steps = steps_of(load_config(path))
    assert "median_recipe" in steps["stage-1"].modules
    assert "median_recipe" not in steps["evaluate-stage-1"].modules
    before = source_digest(steps["stage-1"].modules)
    median.write_text(MEDIAN + "\n# another\n")
    source_digest.__globals__["_digest_once"].cache_clear()
    assert source_digest(steps["stage-1"].modules) != before


def test_an_entry_point_that_is_no_recipe_is_named(median, tiny_params, tmp_path):
    median.write_text("recipe = 7")
    with pytest.raises(ConfigError, match=r"median_recipe:recipe is int, expected an agentgym"):
        load_config(tiny_params(tmp_path / "run"), ["algorithm.recipe=median"])
