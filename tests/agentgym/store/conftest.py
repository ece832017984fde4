"""Fixtures for a store on each back end."""

import pytest

from tests.agentgym.store.steps import Place


@pytest.fixture(params=["posix", pytest.param("s3", marks=pytest.mark.integration)])
def place(request, tmp_path):
    root = request.getfixturevalue("s3_uri") if request.param == "s3" else str(tmp_path / "store")
    return Place(root, tmp_path)


@pytest.fixture
def store(place):
    return place.store()
