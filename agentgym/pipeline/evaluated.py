"""Results of evaluations: read from the store, written to files next to it, delivered to MLflow."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentgym.config import RunConfig
from agentgym.evaluation.page import render
from agentgym.evaluation.parquet import FILE as EPISODES
from agentgym.evaluation.parquet import write_episodes
from agentgym.evaluation.record import attempts_of, examples_of, find
from agentgym.evaluation.result import RESULT, Result
from agentgym.evaluation.stored import stored_result
from agentgym.pipeline.table import open_store
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import tracker_of
from agentgym.tracking.points import Point
from agentgym.tracking.reaching import LedgerUnavailable, reaching

logger = logging.getLogger(__name__)

How = Literal["done", "resumed", "ran"]


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation, and its files."""

    result: Result
    manifest: Manifest
    folder: Path  # with all files of the evaluation
    how: How
    stopped: str = ""  # why it ended before its last episode
    changed: Sequence[tuple[str, str, str]] = ()  # slots graded differently: slot, before, now

    @property
    def is_valid(self) -> bool:
        return bool(self.result.about["valid"])


def show(cfg: RunConfig, digest: str) -> Evaluated:
    """Return an evaluation as far as it has come, and write its files again. Another process may
    run it meanwhile.

    digest: the first digits of its key. No episode is played and MLflow is not changed.
    Errors: ConfigError if not exactly one evaluation has such a key.
    """
    store = open_store(cfg)
    return from_store(cfg, store, find(store, digest), tell=False)


def from_store(cfg: RunConfig, store: RunStore, head: Manifest, *, tell: bool = True) -> Evaluated:
    """Return a stored evaluation, with its files written again. tell: deliver it to MLflow, too."""
    return kept(cfg, store, head, stored_result(store, head), "done", "", tell=tell)


def kept(
    cfg: RunConfig,
    store: RunStore,
    manifest: Manifest,
    result: Result,
    how: How,
    stopped: str,
    *,
    tell: bool = True,
) -> Evaluated:
    """Write the files of an evaluation to the state folder, and return it with their folder.

    tell: deliver it to MLflow, too, if it has a committed result.
    """
    folder = cfg.state_dir / "evaluations" / manifest.key[:12]
    folder.mkdir(parents=True, exist_ok=True)
    result.save(folder)
    commits = store.history(manifest.step, manifest.key)
    write_episodes(folder / EPISODES, attempts_of(store, commits))
    for name, content in render(result, examples_of(store, commits)).items():
        (folder / name).write_bytes(content)
    if tell and RESULT in manifest.blobs:
        _deliver(cfg, manifest, result, folder)
    return Evaluated(result, manifest, folder, how, stopped)


def _deliver(cfg: RunConfig, manifest: Manifest, result: Result, folder: Path) -> None:
    """Write an evaluation to its MLflow run and end the run; repeating it changes nothing.

    folder: its artifacts. If MLflow cannot be reached, that is only logged.
    """
    about = result.about
    metrics = {"eval/coverage": result.coverage}
    for env, numbers in result.numbers.items():
        rows = {
            **numbers["summary"],
            **({"reward": numbers["reward"]} if numbers["reward"] else {}),
        }
        metrics |= {f"eval/{env}/{name}": float(row["mean"]) for name, row in rows.items()}
        metrics[f"eval/{env}/coverage"] = float(numbers["coverage"])
    try:
        with reaching(cfg.tracking_uri):
            tracker = tracker_of(cfg)
            run_id = tracker.evaluation_run(
                result.digest,
                f"evaluation of {about['policy']}"[:200],
                params={"policy": about["policy"], "protocol": about["protocol"]},
                tags={"digest": manifest.digest, "valid": str(about["valid"]).lower()},
            )
            tracker.deliver(run_id, [Point(0, int(manifest.created_at * 1000), metrics)])
            tracker.log_artifacts(run_id, folder)
            tracker.end_run(run_id)
    except LedgerUnavailable as error:
        logger.warning("MLflow does not have this evaluation yet: %s", error)
