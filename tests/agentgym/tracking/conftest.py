"""Fixture for an MLflow database per test."""

import shutil
from pathlib import Path

import pytest

from agentgym.tracking.mlflow import Tracker


@pytest.fixture
def tracker(empty_ledger: Path, tmp_path: Path) -> Tracker:
    shutil.copy(empty_ledger, tmp_path / "mlflow.db")
    return Tracker(f"sqlite:///{tmp_path / 'mlflow.db'}", "tests", tmp_path / "artifacts")
