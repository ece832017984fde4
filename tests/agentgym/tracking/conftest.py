"""An MLflow database of each test's own."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from agentgym.tracking.mlflow import Tracker


@pytest.fixture(scope="session")
def migrated_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database; its migrations cost seconds, so tests copy it."""
    folder = tmp_path_factory.mktemp("mlflow")
    Tracker(
        f"sqlite:///{folder / 'mlflow.db'}", "unused", folder / "artifacts"
    ).client.search_experiments()
    with sqlite3.connect(folder / "mlflow.db") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return folder / "mlflow.db"


@pytest.fixture
def tracker(migrated_db: Path, tmp_path: Path) -> Tracker:
    shutil.copy(migrated_db, tmp_path / "mlflow.db")
    return Tracker(f"sqlite:///{tmp_path / 'mlflow.db'}", "tests", tmp_path / "artifacts")
