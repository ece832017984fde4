"""Fixture for short parameter files."""

import pytest


@pytest.fixture
def write(tmp_path):
    def write(text, name="params.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write
