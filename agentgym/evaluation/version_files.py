"""Check of a registered version's files against the stores' records."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from agentgym.evaluation.history import HistoryElsewhere
from agentgym.evaluation.promotion import Promotions
from agentgym.store.manifest import sha256
from agentgym.tracking.registry import (
    FILES,
    ModelChanged,
    created_ms,
    fetch_version,
    registered_files,
    unregistered,
    version_tags,
)


def fetch_registered(promotions: Promotions, number: str, folder: Path) -> tuple[Path, str]:
    """Copy a version's files below `folder` and compare them with the commit that registered it, or
    with the last decision on it.

    Result: their path, and the reason if they could not be compared; empty: they were.
    Errors: LookupError if there is no such version; ModelChanged.
    """
    tracker, model = promotions.tracker, promotions.model
    stores = [promotions.own.store]
    entries = promotions.own.entries()
    with contextlib.suppress(HistoryElsewhere):
        stores.append(promotions.history.store)
        entries = promotions.history.entries()
    wanted = next(filter(None, (registered_files(store, model, number) for store in stores)), None)
    path = fetch_version(tracker, model, number, folder, committed=wanted)
    if wanted is not None:
        return path, ""
    for entry in reversed(entries):
        version = entry.candidate
        if version.number != number or not version.files:
            continue
        if entry.at * 1000 < created_ms(tracker, model):
            break  # the registry was recreated since and numbers its versions anew
        if sha256(version_tags(tracker, model, number).get(FILES, "").encode()) != version.files:
            raise ModelChanged(
                f"{model} version {number}: the digests of its files (tag {FILES}) are not those"
                f" of decision {entry.number} on it; do not use it, register the checkpoint again"
            )
        return path, ""
    return path, unregistered(model, number)


def told_of_files(promotions: Promotions, number: str) -> tuple[bool, str]:
    """Compare a version's files with the commit that registered them, or with the last decision.

    Result: (True if they were changed or are gone, a line to print). If they cannot be compared:
    (False, "not checked: " and the reason).
    """
    with tempfile.TemporaryDirectory(prefix="agentgym-model-") as folder:
        try:
            left_out = fetch_registered(promotions, number, Path(folder))[1]
        except (LookupError, ModelChanged) as error:
            return True, str(error)
    return False, f"not checked: {left_out}" if left_out else "files as they were registered"
