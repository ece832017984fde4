"""The dataset, at the version the repository pins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from agentgym.config import ConfigError
from tasks.retries import may_help


def dataset_pointer(path: Path) -> Path | None:
    """The `.dvc` file beside the dataset; None for a folder of one's own. Errors: ConfigError where there is neither."""
    pointer = path.with_name(f"{path.name}.dvc")
    if pointer.is_file():
        return pointer
    if not path.is_dir():
        raise ConfigError(f"data.path {path} does not exist, and there is no {pointer} to pull it by")
    return None


@task(
    name="pull data",
    task_run_name="pull data",
    retries=2,
    retry_delay_seconds=[2, 10],
    retry_condition_fn=may_help,
    timeout_seconds=1800,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def pull_data(path: Path) -> str:
    """`dvc pull` of the dataset. Result: what DVC said.

    A folder that DVC does not track is somebody's own data and is left as it is.
    Errors: RuntimeError with DVC's last words.
    """
    pointer = dataset_pointer(path)
    if pointer is None:
        return f"{path} is not tracked by DVC"
    done = subprocess.run([sys.executable, "-m", "dvc", "pull", str(pointer)], capture_output=True, text=True, timeout=1700, check=False)
    if done.returncode:
        raise RuntimeError(f"dvc pull {pointer} failed ({done.returncode}): {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout.strip()
