"""Prefect artifacts of a step: progress while it runs; numbers and MLflow run at the end."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Iterator
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from agentgym.config import RunConfig
from agentgym.defaults import VIEWER_PORT
from agentgym.evaluation.intervals import FAILED
from agentgym.pipeline.table import open_store, run_key
from agentgym.private import STATE, without_login
from agentgym.steps.context import Progress
from agentgym.steps.step import Outcome
from agentgym.store.manifest import Manifest
from agentgym.tracking.deliver import committed_alarms, curve, episodes_page, step_run
from agentgym.tracking.reaching import LedgerUnavailable
from envs.plain import plain
from services.state import running

logger = logging.getLogger(__name__)

VIEWER = f"http://127.0.0.1:{VIEWER_PORT}"
EVERY_S = 5.0  # between two updates: each is a request to the server
LAST_UPDATE_S = 10.0


class _Watched:
    """A Progress that forwards every call to `inner` and keeps the last state for `shown`."""

    def __init__(self, inner: Progress) -> None:
        self._inner = inner
        self._what, self._total, self._count, self._note = "", 0, 0, ""

    def start(self, what: str, total: int) -> None:
        self._what, self._total, self._count, self._note = what, total, 0, ""
        self._inner.start(what, total)

    def advance(self, count: int = 1, note: str = "") -> None:
        self._count += count
        self._note = note or self._note
        self._inner.advance(count, note)

    def shown(self) -> tuple[float, str] | None:
        """Return (percent from 0 to 100, text); None before the first start."""
        if not self._what:
            return None
        percent = min(100.0, 100.0 * self._count / self._total) if self._total else 100.0
        return percent, plain(f"{self._what}: {self._count}/{self._total} {self._note}".strip())


@contextlib.contextmanager
def progress_artifact(step: str, inner: Progress) -> Iterator[Progress]:
    """Yield a Progress that forwards to `inner`. A thread copies its state to a Prefect artifact,
    at most every EVERY_S seconds and once more at the end; errors of Prefect are only logged.
    """
    watched, stop = _Watched(inner), threading.Event()
    # a thread, because coroutines report progress and would have to await Prefect's calls; the
    # context names the task run
    run, key = contextvars.copy_context().run, f"progress-{step}"
    arguments = (_publish, key, watched, stop)
    thread = threading.Thread(target=run, args=arguments, name=key, daemon=True)
    thread.start()
    try:
        yield watched
    finally:
        stop.set()
        thread.join(LAST_UPDATE_S)


def _publish(key: str, watched: _Watched, stop: threading.Event) -> None:
    artifact: UUID | None = None
    published: tuple[float, str] | None = None
    while not stop.wait(EVERY_S) or watched.shown() != published:
        shown = watched.shown()
        if shown is None or shown == published:
            continue
        published = shown
        try:
            if artifact is None:
                created = create_progress_artifact(shown[0], key=key, description=shown[1])
                artifact = cast(UUID, created)
            else:
                update_progress_artifact(artifact, progress=shown[0], description=shown[1])
        except Exception as error:
            # a step must not fail because the Prefect server does
            step, kind = key.removeprefix("progress-"), type(error).__name__
            logger.warning("progress of %s is not shown in Prefect: %s: %s", step, kind, error)


def result_artifact(cfg: RunConfig, outcome: Outcome) -> None:
    """Create a Prefect table of the step's numbers and its MLflow run; an error is only logged."""
    try:
        _create_table(cfg, outcome)
    except Exception as error:
        # the step is done and must not fail because Prefect or MLflow is unavailable
        name, kind = outcome.step.name, type(error).__name__
        logger.warning("%s is done but has no table in Prefect: %s: %s", name, kind, error)


def _create_table(cfg: RunConfig, outcome: Outcome) -> None:
    name, manifest = outcome.step.name, outcome.manifest
    try:
        experiment, run = step_run(cfg, run_key(cfg), manifest, outcome.step.title)
        where = f"MLflow run {run} (`make up` or `make ui` shows it)"
        if server := mlflow_server(cfg):
            where = f"[MLflow run {run[:8]}]({server}/#/experiments/{experiment}/runs/{run})"
    except LedgerUnavailable:
        where = "MLflow is out of reach"
    create_table_artifact(
        table=step_table(cfg, manifest),
        key=f"step-{name}",
        description=plain(
            f"**{outcome.step.title}**: {outcome} · {where} · manifest `{manifest.digest[:12]}` · "
            f"{manifest.timings.get('wall_s', 0.0):.1f} s · {_episodes(cfg, name)}"
            + "".join(f"\n\n{alarm}" for alarm in committed_alarms(open_store(cfg), [manifest]))
        ),
    )


def _episodes(cfg: RunConfig, step: str) -> str:
    """Return a Markdown link to the page of the step's episodes."""
    key, services = run_key(cfg), running(STATE)
    page = episodes_page(key, step)
    if services is not None and services.viewer:
        page = f"{services.viewer}{page.removeprefix(VIEWER)}"
        return f"[episodes]({page})"
    return f"[episodes]({page}) (`agentgym view`)"


def mlflow_server(cfg: RunConfig) -> str | None:
    """Return the address of the MLflow UI, without a login: the configured server or that of
    `make up`; None if there is neither.
    """
    if cfg.tracking.uri.startswith("http"):
        return without_login(cfg.tracking.uri).rstrip("/")
    services = running(STATE)
    return services.mlflow if services else None


def step_table(cfg: RunConfig, manifest: Manifest) -> list[dict[str, Any]]:
    """Return table rows: an evaluation's metrics (keys metric, mean, low, high, perhaps gain), else
    the training curve (a key per measured column), else the results (keys result and value).
    If episodes failed, an evaluation also has its metrics with these as failures, and its coverage.
    """
    if "summary" in manifest.results:
        gains, failed = (manifest.results.get(name, {}) for name in ("paired", FAILED))
        rows = [{"metric": k, **_interval(v)} for k, v in manifest.results["summary"].items()]
        for row in rows:
            if row["metric"] in gains:
                row["gain"] = _interval(gains[row["metric"]])["mean"]
        if (coverage := manifest.results["coverage"]) < 1:
            failures = {f"{metric}, failed as failures": value for metric, value in failed.items()}
            rows += [{"metric": metric, **_interval(value)} for metric, value in failures.items()]
            rows.append({"metric": "coverage", "mean": float(f"{coverage:.4g}")})
        return rows
    rows = curve(open_store(cfg), manifest)
    if rows:
        measured = [key for key in rows[0] if any(row[key] is not None for row in rows)]
        return [{key: "" if row[key] is None else row[key] for key in measured} for row in rows]
    return [{"result": key, "value": plain(str(value))} for key, value in manifest.results.items()]


def _interval(value: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value[name]:.4g}") for name in ("mean", "low", "high")}
