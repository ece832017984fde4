"""What an evaluation has come to: read from the store, its files written beside it, MLflow told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentgym.config import RunConfig
from agentgym.evaluation.episodes import FILE as EPISODES
from agentgym.evaluation.episodes import write_episodes
from agentgym.evaluation.numbers import numbers_of
from agentgym.evaluation.page import render
from agentgym.evaluation.protocol import EvaluationProtocol
from agentgym.evaluation.record import RESULT, STEP, attempts_of, find, stored_slots
from agentgym.evaluation.report import EpisodeExample
from agentgym.evaluation.result import CLOCK, Result, coverage_of
from agentgym.pipeline.table import open_store
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.tracking.evaluations import deliver_evaluation

How = Literal["done", "resumed", "ran"]


@dataclass(frozen=True)
class Evaluated:
    """What came of it."""

    result: Result
    manifest: Manifest
    folder: Path  # with all its files
    how: How
    stopped: str = ""  # why it ended before its last episode
    changed: Sequence[tuple[str, str, str]] = ()  # by another grading: slot, before, now

    @property
    def is_valid(self) -> bool:
        return bool(self.result.about["valid"])


def show(cfg: RunConfig, digest: str) -> Evaluated:
    """An evaluation as far as it is, also while another process is at it; nothing is played.
    Errors: ConfigError.
    """
    store = open_store(cfg)
    return from_store(cfg, store, find(store, digest), "done", tell=False)


def from_store(
    cfg: RunConfig, store: RunStore, head: Manifest, how: How, *, tell: bool = True
) -> Evaluated:
    """tell: MLflow, too."""
    if RESULT in head.blobs:
        result = Result.from_bytes(store.read(head, RESULT), store.read(head, CLOCK))
    else:
        slots, about = stored_slots(store, head)
        protocol = EvaluationProtocol.model_validate(about["settings"])
        numbers = numbers_of(slots, protocol)
        valid = coverage_of(slots) >= protocol.min_coverage - 1e-9
        result = Result(head.config, slots, numbers, {**about, "valid": valid})
    return kept(cfg, store, head, result, how, "", tell=tell)


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
    """Its files written beside the store; MLflow gets them, too, where there is a result."""
    folder = cfg.state_dir / "evaluations" / manifest.key[:12]
    folder.mkdir(parents=True, exist_ok=True)
    result.save(folder)
    commits = store.history(STEP, manifest.key)
    write_episodes(folder / EPISODES, attempts_of(store, commits))
    for name, content in render(result, list(_examples(store, commits, result))).items():
        (folder / name).write_bytes(content)
    if tell and RESULT in manifest.blobs:
        _deliver(cfg, manifest, result, folder)
    return Evaluated(result, manifest, folder, how, stopped)


def _deliver(cfg: RunConfig, manifest: Manifest, result: Result, folder: Path) -> None:
    about = result.about
    metrics = {"eval/coverage": result.coverage}
    for env, own in result.numbers.items():
        found = {**own["summary"], **({"reward": own["reward"]} if own["reward"] else {})}
        metrics |= {f"eval/{env}/{name}": float(row["mean"]) for name, row in found.items()}
        metrics[f"eval/{env}/coverage"] = float(own["coverage"])
    deliver_evaluation(
        cfg,
        result.digest,
        f"evaluation of {about['policy']}"[:200],
        params={"policy": about["policy"], "protocol": about["protocol"]},
        tags={"digest": manifest.digest, "valid": str(about["valid"]).lower()},
        metrics=metrics,
        at_ms=int(manifest.created_at * 1000),
        folder=folder,
    )


def _examples(
    store: RunStore, commits: Sequence[Manifest], result: Result
) -> Iterator[EpisodeExample]:
    """Of each environment one success and one failure, where there are both."""
    wanted = {(slot.env, slot.success) for slot in result.slots if slot.counts}
    with contextlib.closing(attempts_of(store, commits)) as attempts:  # type: ignore[type-var]
        for trajectory in attempts:
            kind = (trajectory.item.env, trajectory.success)
            if trajectory.status.is_valid and kind in wanted:
                wanted.discard(kind)
                yield EpisodeExample.from_trajectory(trajectory.item.env, trajectory)
            if not wanted:
                return
