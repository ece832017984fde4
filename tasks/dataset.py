"""Prefect task that pulls the dataset at the version that the repository pins."""

from __future__ import annotations

import contextlib
from pathlib import Path

from agentgym.config import ConfigError
from agentgym.data.items import DataError
from agentgym.data.published import DvcError, check_pin, run_dvc
from tasks.retries import retried

PULL_TIMEOUT_S = 1700.0


def dataset_pointer(path: Path, setting: str = "data.path") -> Path | None:
    """Return the `.dvc` file next to the folder `path`; None for a folder without such a file.
    setting: named in the error. Errors: ConfigError if neither exists.
    """
    pointer = path.with_name(f"{path.name}.dvc")
    if pointer.is_file():
        return pointer
    if not path.is_dir():
        raise ConfigError(
            f"{setting} {path} does not exist, and there is no {pointer} to pull it by"
        )
    return None


@retried("pull data", run_name="pull data", delays_s=(2, 10), timeout_s=1800)
def pull_data(path: Path) -> str:
    """Restore the dataset that its `.dvc` file pins, with `dvc pull`. Return a summary.

    A folder that DVC does not track is your own data and stays as it is.
    Errors: DataError if the files differ from the pin; DvcError if they cannot be pulled;
    ConfigError if there are neither folder nor `.dvc` file.
    """
    pointer = dataset_pointer(path)
    if pointer is None:
        return f"{path} is not tracked by DVC"
    if path.is_dir():
        with contextlib.suppress(DataError):
            check_pin(path)
            return f"{path} is what {pointer} pins"
    try:
        output = run_dvc("pull", str(pointer), timeout_s=PULL_TIMEOUT_S)
    except DvcError as error:
        if path.is_dir():
            check_pin(path)
        raise DvcError(
            f"dataset not pulled: {error}; see that the remote can be reached and holds the files"
            " (`dvc push` on a machine that has them), or set data.path to a folder of your own"
        ) from None
    check_pin(path)
    return output
