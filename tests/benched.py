"""Import benchmarks as modules in tests."""

import importlib
from pathlib import Path

import pytest


def benchmark(name):
    """Return the module benchmarks/{name}.py; it can import its sibling modules by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        return importlib.import_module(name)
