"""`agentgym new`: packages whose tests pass, and bad names that write nothing."""

import os
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest

from agentgym.cli import main
from agentgym.commands import new
from agentgym.config import ConfigError, load_config
from agentgym.data.items import load_splits
from tests.completed import completed

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to a new project, a folder with a parameter file."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "params.yaml").write_text("seed: 1\n")
    monkeypatch.chdir(project)
    return project


def files(folder):
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and ".agentgym" not in path.parts
    )


def check_package(name):
    """Run the tests of a package, its linter and its formatter, as a reader in the project does."""
    run = partial(completed, sys.executable, "-m", env={**os.environ, "PYTHONPATH": str(ROOT)})
    tests = run("pytest", name, "-q", "-p", "no:cacheprovider")
    assert tests.returncode == 0, tests.stdout + tests.stderr
    settings = ("--no-cache", "--config", str(ROOT / "pyproject.toml"), name)
    # the order of imports depends on where the package is
    for words in (("check", "--ignore=I001", *settings), ("format", "--check", *settings)):
        checked = run("ruff", *words)
        assert checked.returncode == 0, checked.stdout


def test_a_written_environment_passes_its_own_tests(folder, capsys):
    assert main(["new", "environment", "grid-world"]) == 0
    assert files(folder / "grid-world") == [
        *("README.md", "data/eval/grid-world_test.json", "data/train/grid-world_train.json"),
        *("params.yaml", "pyproject.toml", "src/grid_world.py", "test_grid_world.py"),
    ]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-4:] == [
        "  pip install --no-build-isolation --editable grid-world",
        "  python -m pytest grid-world",
        "  agentgym evaluate expert --params grid-world/params.yaml",
        "  python -m flows.pipeline --params grid-world/params.yaml",
    ]
    check_package("grid-world")
    cfg = load_config("grid-world/params.yaml")
    assert (cfg.env.name, cfg.seed, cfg.data.path) == ("grid-world", 1, Path("grid-world/data"))
    splits = load_splits(cfg.data.path, "grid-world", validation_fraction=0.1, seed=1)
    # of 168 tasks, every third is a test item
    assert len(splits.test) == cfg.evaluation.num_items == 56
    assert len(splits.train) + len(splits.validation) == 112


def test_the_command_of_its_readme_writes_the_same_lists(folder, install, monkeypatch):
    assert main(["new", "environment", "robot"]) == 0
    source = Path("robot/src/robot.py").read_text()
    site = install("robot", source, "agentgym.envs", "robot", "robot:spec").parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT)]))
    (line,) = (x for x in Path("robot/README.md").read_text().splitlines() if "data make" in x)
    before = {path: path.read_bytes() for path in Path("robot/data").rglob("*.json")}
    for path in before:
        path.unlink()
    assert main(shlex.split(line)[1:]) == 0
    assert {path: path.read_bytes() for path in Path("robot/data").rglob("*.json")} == before


def test_a_written_recipe_passes_its_own_tests(folder):
    assert main(["new", "recipe", "max_median"]) == 0
    written = ["README.md", "pyproject.toml", "src/max_median.py", "test_max_median.py"]
    assert files(folder / "max_median") == written
    check_package("max_median")


def test_the_guide_shows_parts_of_what_is_written(folder):
    assert main(["new", "recipe", "median"]) == 0
    assert main(["new", "environment", "grid-world"]) == 0
    written = "".join(
        path.read_text() for name in ("median", "grid-world") for path in Path(name).rglob("*.*")
    )
    guide = (ROOT / "docs/how-to/package-a-plugin.md").read_text()
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    assert [block for block in blocks if block not in written] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("environment", "my_game"), "'my_game' is no name of a new environment: expected small"),
        (("environment", "2048"), "'2048' is no name of a new environment"),
        (("environment", "a-"), "'a-' is no name of a new environment"),
        (("environment", "../x"), "'../x' is no name of a new environment"),
        (("environment", "babyai"), "environment babyai exists already; choose another name"),
        (("environment", "json"), "module would be json, which is a word or a module of Python"),
        (("environment", "class"), "module would be class, which is a word or a module of Python"),
        (("environment", "there"), "there exists; give a new folder with --out"),
        (("environment", "x", "--out", "params.yaml/x"), "params.yaml/x cannot be written"),
        (("environment", "x", "--params", "no.yaml"), "no.yaml does not exist"),
        (("recipe", "grpo"), "recipe grpo exists already; choose another name"),
        (("recipe", "reinforce++"), "'reinforce++' is no name of a new recipe"),
        (("recipe", "torch"), "module would be torch"),
        (("recipe", "there"), "there exists; give a new folder with --out"),
    ],
)
def test_bad_input_is_one_error_and_writes_nothing(folder, capsys, words, expected):
    (folder / "there").mkdir()
    assert main(["new", *words]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 2  # the error, and its page
    assert files(folder) == ["params.yaml"]
    assert sorted(path.name for path in folder.iterdir()) in (
        [".agentgym", "params.yaml", "there"],
        ["params.yaml", "there"],
    )


def test_a_name_of_an_installed_package_is_taken(folder, install, capsys):
    install("robot", "", "agentgym.envs", "rover", "robot:spec")
    assert main(["new", "environment", "rover"]) == 2
    assert "environment rover exists already" in capsys.readouterr().err


def test_parameters_that_it_cannot_extend_leave_nothing_behind(folder, monkeypatch, capsys):
    def refuse(path):
        assert files(path.parent)  # all is written but for the name of the folder
        raise ConfigError("no such setting")

    monkeypatch.setattr(new, "load_config", refuse)
    assert main(["new", "environment", "robot"]) == 2
    assert capsys.readouterr().err.startswith("error: no such setting\nsee ")
    assert files(folder) == ["params.yaml"]
    assert not list(folder.glob("*robot*"))
