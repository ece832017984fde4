"""The data of a step as MLflow shows it: name, digest, split and revision."""

from __future__ import annotations

import json
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
    """The items of one split, as a step read them."""

    name: str
    digest: str  # of their ids, in order
    split: str
    num_items: int
    source: str  # JSON: where they lie, and their revision


def inputs_of(cfg: RunConfig, store: RunStore, manifest: Manifest) -> list[DatasetInput]:
    """Of a step that has data: those it read, by the lists its run prepared."""
    prepared = prepared_by(store, manifest)
    if prepared is None:
        return []
    splits = splits_from_json(store.read(prepared, LISTS))
    return [_input(cfg, splits, name, num) for name, num in _read(manifest)]


def prepared_by(store: RunStore, manifest: Manifest) -> Manifest | None:
    """The step that prepared its items; itself, where it did."""
    if LISTS in manifest.blobs:
        return manifest
    for name, digest in manifest.parents.items():
        found = next((each for each in store.keys(name) if each.digest == digest), None)
        if found is not None and LISTS in found.blobs:
            return found
    return None


def _read(manifest: Manifest) -> Sequence[tuple[str, int | None]]:
    """(split, how many of it; None: all)."""
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
    """The digest that DVC pins a folder by; empty where it does not. The pointer is a text."""
    pointer = path.with_name(f"{path.name}.dvc")
    try:
        tree: Any = yaml.safe_load(pointer.read_text(encoding="utf-8"))
        return str(tree["outs"][0]["md5"])
    except (OSError, yaml.YAMLError, LookupError, TypeError):
        return ""
