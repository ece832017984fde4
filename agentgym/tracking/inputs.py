"""The data of a step as MLflow shows it: name, digest, split and revision."""

from __future__ import annotations

import contextlib
import functools
import getpass
import importlib.metadata
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentgym.config import RunConfig
from agentgym.data.items import SPLITS, Splits, splits_from_json
from agentgym.store.manifest import Manifest, canonical_json, sha256
from agentgym.store.runstore import RunStore

DIGEST_CHARS = 36  # MLflow's limit
LISTS = "splits.json"


@dataclass(frozen=True, slots=True)
class DatasetInput:
    """The items of one split that a step read."""

    name: str
    digest: str  # of the items' ids, in order
    split: str
    num_items: int
    source: str  # JSON: path and revision


def inputs_of(cfg: RunConfig, store: RunStore, manifest: Manifest) -> list[DatasetInput]:
    """Return the data that a step read, by the splits its run prepared; empty for none."""
    prepared = prepared_by(store, manifest)
    if prepared is None:
        return []
    splits = splits_from_json(store.read(prepared, LISTS))
    return [_input(cfg, splits, name, num) for name, num in _read(manifest)]


def prepared_by(store: RunStore, manifest: Manifest) -> Manifest | None:
    """Return this manifest, or its parent, that has the lists of splits; None if neither has."""
    if LISTS in manifest.blobs:
        return manifest
    for name, digest in manifest.parents.items():
        parent = next(
            (candidate for candidate in store.heads(name) if candidate.digest == digest), None
        )
        if parent is not None and LISTS in parent.blobs:
            return parent
    return None


def _read(manifest: Manifest) -> Sequence[tuple[str, int | None]]:
    """Return (split, number of items read; None: all) for a step's settings."""
    config = manifest.config
    if LISTS in manifest.blobs:
        return [(name, None) for name in SPLITS]
    if "evaluation" in config:
        settings = config["evaluation"]
        return [(str(settings["split"]), int(settings["num_items"]))]
    if "validation" in config:
        return [("train", None), ("validation", int(config["validation"]["num_items"]))]
    return [("train", None)]


def _input(cfg: RunConfig, splits: Splits, name: str, num: int | None) -> DatasetInput:
    ids = [item.item_id for item in getattr(splits, name)[:num]]
    path = cfg.data.path
    source = {"uri": str(path), **({"dvc": rev} if (rev := dvc_revision(path)) else {})}
    return DatasetInput(
        f"{'-'.join(env.name for env in cfg.envs)} {name}",
        sha256(canonical_json(ids))[:DIGEST_CHARS],
        name,
        len(ids),
        json.dumps(source, sort_keys=True),
    )


def dvc_revision(path: Path) -> str:
    """Return the digest in a folder's DVC pointer file; empty if there is none."""
    pointer = path.with_name(f"{path.name}.dvc")
    try:
        tree: Any = yaml.safe_load(pointer.read_text(encoding="utf-8"))
        return str(tree["outs"][0]["md5"])
    except (OSError, yaml.YAMLError, LookupError, TypeError):
        return ""


ROOT = Path(__file__).resolve().parents[2]
GIT_TIMEOUT_S = 5.0
OURS = {"mlflow.source.name": "agentgym-flow", "mlflow.source.type": "PROJECT"}
OF_MACHINE = ("mlflow.source.git.commit", "mlflow.user", "source")  # tags not in any store


@functools.cache
def source_tags() -> dict[str, str]:
    """Return the tags that MLflow shows as source and author; without git, the package."""
    tags = dict(OURS)
    commit = _git("rev-parse", "HEAD")
    if commit:
        changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
        tags["mlflow.source.git.commit"] = commit
        tags["source"] = f"{commit[:12]}{' with changes' if changed else ''}"
    with contextlib.suppress(OSError, KeyError):
        tags["mlflow.user"] = getpass.getuser()
    return tags


@functools.cache
def packages() -> bytes:
    """Return a line `name==version` for each installed package."""
    versions = {
        distribution.metadata["Name"].lower(): distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.metadata["Name"]
    }
    return "".join(f"{name}=={versions[name]}\n" for name in sorted(versions)).encode()


def _git(*arguments: str) -> str:
    """Return a git command's output in our own repository; empty if git fails or is missing."""
    if not (ROOT / ".git").exists():
        return ""
    try:
        completed = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
            encoding="utf-8",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""
