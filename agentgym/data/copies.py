"""Copies of a run's data in its store, by digest: for machines that have neither the folders nor a
DVC remote.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from agentgym.config import RunConfig
from agentgym.data.items import DataError
from agentgym.data.trajectories import FILE, input_digest
from agentgym.store.posix import write_whole
from agentgym.store.runstore import RunStore

logger = logging.getLogger(__name__)

STEP = "data"  # stored like the commits of a step
LISTS, RECORDED = "lists", "trajectories"
NAME = re.compile(rf"{LISTS}\.([\w-]+)\.(\w[\w.-]*)|{RECORDED}\.(\w[\w.-]*)")


def keep_data(cfg: RunConfig, store: RunStore) -> str:
    """Copy the data files that the run may read into the store, unless they are there.

    Result: their digest, for `data.digest`. Errors: DataError if a file is missing on this machine;
    LeaseHeld while another process copies them.
    """
    digest = input_digest(cfg)
    files = _files(cfg)
    if store.final(STEP, digest) is None:
        with store.open(STEP, digest) as writer:
            if writer.head is None:
                blobs = {name: path.read_bytes() for name, path in files.items()}
                writer.commit(done=True, config={}, blobs=blobs, results={"files": len(files)})
        logger.info("data %s: %d files are in the store", digest[:12], len(files))
    return digest


def fetch_data(cfg: RunConfig, store: RunStore) -> bool:
    """Copy the files of `data.digest` from the store to the run's data folders, unless all of these
    folders exist. Files that are missing in an existing folder are not noticed.

    Result: True if files were copied; False also if `data.digest` is empty. Errors: DataError if
    the store does not have the data or holds an unknown file, or if the copies' digest differs.
    """
    if not cfg.data.digest or all(folder.is_dir() for folder in cfg.data_folders.values()):
        return False
    manifest = store.final(STEP, cfg.data.digest)
    if manifest is None:
        raise DataError(
            f"data.digest {cfg.data.digest[:12]}: {store.root} has no such data; where the files"
            " are, `agentgym data keep` with this store puts them there"
        )
    for name in manifest.blobs:
        write_whole(_path_of(cfg, name), store.read(manifest, name))
    digest = input_digest(cfg)
    if digest != cfg.data.digest:
        raise DataError(
            f"data.digest {cfg.data.digest[:12]}: what came from {store.root} is {digest[:12]};"
            " remove those files there, and keep the data again"
        )
    logger.info("data %s came from %s", digest[:12], store.root)
    return True


def _files(cfg: RunConfig) -> dict[str, Path]:
    """Return name in the store -> path of every data file that the run may read."""
    lists = [path for env in cfg.env_weights for path in cfg.data.path.glob(f"*/{env}_*.json")]
    files = {f"{LISTS}.{path.parent.name}.{path.name}": path for path in lists}
    if cfg.warm_start.source == "trajectories":
        names = [FILE.format(env=env) for env in cfg.env_weights]
        files |= {f"{RECORDED}.{name}": cfg.data.trajectories / name for name in names}
    return files


def _path_of(cfg: RunConfig, name: str) -> Path:
    """Return the path to which a stored file is copied. Errors: DataError for an unknown name."""
    match = NAME.fullmatch(name)
    if match is None:
        raise DataError(f"data.digest {cfg.data.digest[:12]} in the store holds {name!r}, no list")
    folder, listed, recorded = match.groups()
    return cfg.data.trajectories / recorded if recorded else cfg.data.path / folder / listed
