"""Fixtures of tests/projects.py, and a finished project for each file: its commands change it."""

import pytest

from tests.projects import (  # noqa: F401
    copied,
    finished_project,
    made_databases,
)


@pytest.fixture(scope="module")
def finished(copied, once, tmp_path_factory):  # noqa: F811
    """A clone in which the pipeline ran once."""
    return finished_project(copied, once, tmp_path_factory.mktemp("finished"))
