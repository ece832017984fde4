"""A server needs only its environment's extra and the extra of all servers."""

import sys
from pathlib import Path

import pytest

from tests.completed import completed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def requirements(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "envs"))
    from requirements import requirements

    return requirements


def test_an_environment_adds_its_own_extra(requirements, tmp_path):
    project = tmp_path / "pyproject.toml"
    project.write_text('[project.optional-dependencies]\nenvs = ["a"]\nb = ["c>=1"]\n')
    assert requirements("b", project) == ["a", "c>=1"]
    assert requirements("without", project) == ["a"]


def test_it_runs_with_the_standard_library_alone():
    told = completed(
        sys.executable, "-I", "-S", ROOT / "envs/requirements.py", "sciworld", check=True
    )
    assert "scienceworld==1.2.3" in told.stdout.splitlines()
