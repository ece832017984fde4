"""Benchmarks as modules of tests."""

import importlib
from pathlib import Path

import pytest


def benchmark(name):
    """Return the module benchmarks/{name}.py, which imports those beside it by their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        return importlib.import_module(name)
