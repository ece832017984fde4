"""What a server needs is its own extra and the one of all servers."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    told = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "envs/requirements.py"), "sciworld"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "scienceworld==1.2.3" in told.stdout.splitlines()
