"""An evaluation of any policy in MLflow: its numbers, its files, what was asked."""

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
    """Bring an evaluation there, once however often it is tried. at_ms: of its last commit, so
    that equal points are one. Result: whether MLflow could be reached; the result stands anyhow.
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
