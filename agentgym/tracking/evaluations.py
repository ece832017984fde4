"""Delivery of an evaluation of any policy to MLflow: its numbers, its files, its settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgym.config import RunConfig
from agentgym.tracking.deliver import tracker_of
from agentgym.tracking.mlflow import LedgerUnavailable, reaching
from agentgym.tracking.points import Point

logger = logging.getLogger(__name__)


def deliver_evaluation(
    cfg: RunConfig,
    digest: str,
    title: str,
    *,
    params: Mapping[str, Any],
    tags: Mapping[str, str],
    metrics: Mapping[str, float],
    at_ms: int,
    folder: Path,
) -> bool:
    """Write an evaluation to its MLflow run and end the run; repeating it changes nothing.

    digest: identifies the run.
    folder: its artifacts.
    at_ms: time of the evaluation's last commit.
    Result: False if MLflow could not be reached; the evaluation is complete either way.
    """
    try:
        with reaching(cfg.tracking_uri):
            tracker = tracker_of(cfg)
            run_id = tracker.evaluation_run(digest, title, params=params, tags=tags)
            tracker.deliver(run_id, [Point(0, at_ms, dict(metrics))])
            tracker.log_artifacts(run_id, folder)
            tracker.end_run(run_id)
    except LedgerUnavailable as error:
        logger.warning("MLflow does not have this evaluation yet: %s", error)
        return False
    return True
