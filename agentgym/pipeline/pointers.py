"""Check that the store has what DVC's pointers name: git and `dvc pull` bring no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgym.config import ConfigError, RunConfig
from agentgym.pipeline.run import confirm
from agentgym.pipeline.stored_config import keep_run
from agentgym.pipeline.table import finished, open_store, steps_of
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore

SHOWN = 3  # results that an error names


def confirm_pointers(cfg: RunConfig, folder: Path) -> dict[str, str]:
    """Verify what the pointers in `folder` name, deliver it to MLflow and keep the configuration.

    Result: step -> digest. Errors: ConfigError if the store lacks some of it, with the ways to get
    it; DigestMismatch, BlobMissing, LedgerUnavailable.
    """
    store, table = open_store(cfg), steps_of(cfg)
    done = finished(cfg, store)
    pointers = {name: found for name in table if (found := _read(folder / f"{name}.json"))}
    lacking = {
        name: pointer
        for name, pointer in pointers.items()
        if not _is_there(store, done.get(name), pointer)
    }
    if lacking:
        raise ConfigError(_told(store, folder, lacking, done))
    keep_run(cfg, store)
    for name in pointers:
        confirm(cfg, store, table[name], done[name])
    return {name: str(pointer["digest"]) for name, pointer in pointers.items()}


def _read(path: Path) -> dict[str, Any]:
    """Return a pointer's digest and store; empty if there is no pointer. Errors: ConfigError."""
    if not path.is_file():
        return {}
    try:
        identity = json.loads(path.read_bytes())["manifest"][0]
        return {"digest": str(identity["digest"]), "store": str(identity.get("store", ""))}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no pointer ({type(error).__name__}); restore it with git, or remove it and"
            " run `dvc repro`"
        ) from None


def _is_there(store: RunStore, head: Manifest | None, pointer: Mapping[str, Any]) -> bool:
    return head is not None and head.digest == pointer["digest"] and store.has(head)


def _told(
    store: RunStore,
    folder: Path,
    lacking: Mapping[str, Mapping[str, Any]],
    done: Mapping[str, Manifest],
) -> str:
    """Return the error text: what is missing, and the ways to get it."""
    names = list(lacking)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    named = [f"{name} ({lacking[name]['digest'][:12]})" for name in names[:SHOWN]]
    roots = sorted({pointer["store"] for pointer in lacking.values()} - {"", store.root})
    shared = next((root for root in roots if root.startswith("s3://")), "")
    ways = [
        f"set store.uri to {shared}"
        if shared
        else "set store.uri to a store that you share with the person who made them",
    ]
    theirs = roots[0] if roots else store.root
    # a folder and a bucket have other layouts, so files cannot be copied from one to the other
    if not any(root.startswith("s3://") for root in (theirs, store.root)):
        here = store.root if roots else "the same place here"
        ways.append(f"copy that machine's {theirs} to {here}")
    if names[0] in done:
        ways.append("take this store's own run in their place: `dvc repro --force` trains nothing")
    else:
        ways.append("make them here: `dvc repro --force` trains, like the first time")
    return (
        f"{folder} has pointers to results that the store {store.root} lacks:"
        f" {', '.join(named)}{more}. Git and `dvc pull` bring pointers and data, no weights. To"
        f" have them, {', or '.join(ways)}"
    )
