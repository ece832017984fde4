"""Fixtures of tests/projects.py, and a finished project per file that its tests may change."""

import pytest

from tests.projects import copied, finished_project, made_databases  # noqa: F401


@pytest.fixture(scope="module")
def finished(copied, once, tmp_path_factory):  # noqa: F811
    """Return a clone in which the pipeline ran once."""
    return finished_project(copied, once, tmp_path_factory.mktemp("finished"))
