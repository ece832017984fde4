"""Fixtures that import a benchmark at its first use."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def benchmarks_on_the_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        yield


def imported(name):
    """Return a fixture that yields the benchmark with this name."""
    return pytest.fixture(scope="session")(lambda: importlib.import_module(name))
