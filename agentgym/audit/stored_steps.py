"""The steps of a run as the store has them, with their commits and logs, and the check that keys,
parents and commits follow from one another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from agentgym.audit.findings import Checks
from agentgym.config import RunConfig, max_refills
from agentgym.data.items import ItemStream, Splits, train_stream
from agentgym.models.checkpoint import Checkpoint, load_checkpoint
from agentgym.pipeline.table import key_of, semantic_of, steps_of
from agentgym.records import DEMOS, TRAJECTORIES, decode_trajectories
from agentgym.rollouts.collect import success_share
from agentgym.steps.context import METRICS
from agentgym.steps.step import Kind, Stage, Step, advance, max_turns
from agentgym.store.manifest import BlobMissing, DigestMismatch, Manifest, ManifestError
from agentgym.store.runstore import RunStore
from agentgym.tracking.points import Point, decode_points
from agentgym.training.ahead import horizon_state
from agentgym.training.offline import commits_at, explored_items
from agentgym.types import Trajectory


@dataclass
class StepRecord:
    """One step as it is in the store: its commits and the logs that can be read."""

    cfg: RunConfig
    store: RunStore
    step: Step
    key: str
    parents: dict[str, Manifest]
    commits: list[Manifest]
    points: dict[int, list[Point]] = field(default_factory=dict)  # by seq
    episodes: dict[int, list[Trajectory]] = field(default_factory=dict)  # by seq

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def final(self) -> Manifest | None:
        return self.commits[-1] if self.commits[-1].done else None

    @property
    def checkpoint(self) -> Manifest | None:
        """Commit of the parent whose weights the step starts from, evaluates or registers; None if
        it uses no weights.
        """
        return self.parents.get(self.step.checkpoint)

    @property
    def stage(self) -> Stage | None:
        """The stage of the curriculum that this step trains, if any."""
        return self.step.stage

    @property
    def logged(self) -> list[tuple[Manifest, Trajectory]]:
        """(commit, episode) for all readable episodes, in order."""
        return [
            (commit, episode)
            for commit in self.commits
            for episode in self.episodes.get(commit.seq, ())
        ]

    def at(self, commit: Manifest) -> str:
        return f"{self.name} commit {commit.seq}"


def read_steps(
    cfg: RunConfig, store: RunStore, content: Checks, lineage: Checks
) -> list[StepRecord]:
    """Return every step of the run that has a commit, in order, with its logs decoded.

    Content and keys are checked on the way; `content` and `lineage` receive the results. Logs that
    cannot be read are left out. So are steps with unreadable commits or with an unfinished parent.
    """
    finals: dict[str, Manifest] = {}
    steps: list[StepRecord] = []
    for name, step in steps_of(cfg).items():
        if any(parent not in finals for parent in step.parents):
            continue
        key = key_of(step, cfg, finals)
        try:
            commits = store.history(name, key)
        except (ManifestError, OSError) as error:
            content.counted += 1
            content.fail(f"{name}: {error}")
            continue
        if not commits:
            continue
        parents = {parent: finals[parent] for parent in step.parents}
        record = StepRecord(cfg, store, step, key, parents, commits)
        for commit in commits:
            _check_content(record, commit, content)
        steps.append(record)
        if commits[-1].done:
            finals[name] = commits[-1]
        for commit in commits:
            lineage.expect(record.at(commit), "recomputed key", key, commit.key)
    return steps


def _check_content(record: StepRecord, commit: Manifest, checks: Checks) -> None:
    for name in (*commit.blobs, *commit.records):
        checks.counted += 1
        try:
            data = record.store.read(commit, name)
        except BlobMissing as error:
            if name in commit.blobs and commit.seq < record.commits[-1].seq:
                checks.counted -= 1
                checks.skip("files of pruned weights", "store.keep_checkpoints keeps newer ones")
            else:
                checks.fail(str(error))
            continue
        except DigestMismatch as error:
            checks.fail(str(error))
            continue
        try:
            if name == METRICS:
                record.points[commit.seq] = decode_points(data)
            elif name in (TRAJECTORIES, DEMOS):
                record.episodes[commit.seq] = decode_trajectories(data)
        except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
            checks.fail(
                f"{record.at(commit)}: {name} cannot be read: {type(error).__name__}: {error}"
            )


def check_lineage(record: StepRecord, splits: Splits | None, checks: Checks) -> None:
    parents = {name: manifest.digest for name, manifest in record.parents.items()}
    cfg, stage = record.cfg, record.stage
    for index, commit in enumerate(record.commits):
        where = record.at(commit)
        checks.expect(where, "commit number", index, commit.seq)
        checks.expect(where, "done", commit is record.final, commit.done)
        checks.expect(where, "digests of its parents", parents, commit.parents)
        checks.expect(where, "configuration", semantic_of(record.step, cfg), commit.config)
        if stage is None or splits is None or not cfg.algorithm.loop.samples_every_step:
            continue
        step, items_per_step = stage.first_step + index, cfg.rollout.items_per_step
        before = record.commits[index - 1] if index else record.checkpoint
        assert before is not None
        stream = train_stream(cfg, splits, before.state)
        max_items = items_per_step * (1 + max_refills(cfg.algorithm))
        count = min(max(len(commit.state.get("consumed", ())), items_per_step), max_items)
        items = [item.item_id for item in stream.next(count)]
        horizon = horizon_state(before)
        played = record.episodes.get(commit.seq, ())
        success = success_share([episode for episode in played if episode.item.split == "train"])
        expected = {
            "global_step": step,
            "stream_position": stream.position,
            "consumed": items,
            "max_turns": max_turns(cfg.horizon, step, horizon),
            "horizon": json.loads(json.dumps(asdict(advance(cfg.horizon, horizon, success)))),
            "ahead": expected_ahead(cfg, commit, stream, stage.last_step - step),
        }
        for name, value in expected.items():
            checks.expect(where, name, value, commit.state.get(name))
        checks.expect(where, "done at the stage's last step", step == stage.last_step, commit.done)
    if stage is not None and splits is not None and not cfg.algorithm.loop.samples_every_step:
        _check_offline_stage(record, stage, splits, checks)
    if stage is not None and record.checkpoint is not None:
        start = int(record.checkpoint.state["global_step"])
        checks.expect(
            record.name, "first step, after its parent's last", start + 1, stage.first_step
        )


def expected_ahead(
    cfg: RunConfig, commit: Manifest, stream: ItemStream, num_left: int
) -> list[dict[str, Any]] | None:
    """Return the value that `ahead`, the rollouts begun for later steps, must have in a commit's
    state; None if `rollout.max_staleness` is 0. The number of rollouts is as recorded, but limited.

    Keys: global_step; items (ids, the next ones of the stream, as many as recorded); versions
    (those of the recorded versions of the weights that are not too old or too new).
    stream: as the commit leaves it; it is advanced. num_left: optimizer steps after the commit.
    """
    max_staleness, step = cfg.rollout.max_staleness, int(commit.state["global_step"])
    if not max_staleness:
        return None
    begun = commit.state["ahead"][: min(max_staleness + 1, num_left)]
    return [
        {
            "global_step": later,
            "items": [item.item_id for item in stream.next(len(rollouts["items"]))],
            "versions": [
                version
                for version in rollouts["versions"]
                if later - 1 - max_staleness <= version <= step
            ],
        }
        for later, rollouts in enumerate(begun, step + 1)
    ]


def _check_offline_stage(record: StepRecord, stage: Stage, splits: Splits, checks: Checks) -> None:
    """Check that the commits of an offline stage first play all its items in the stream's order,
    some in each commit, and then take the optimizer steps that must commit.
    """
    assert record.checkpoint is not None
    items = [item.item_id for item in explored_items(record.cfg, splits, record.checkpoint)]
    explored, step = 0, stage.first_step - 1
    for commit in record.commits:
        # empty once all were played
        chunk = items[explored : explored + max(1, len(commit.state.get("consumed", ())))]
        explored += len(chunk)
        if not chunk:
            step = min(step + 1, stage.last_step)
            while step < stage.last_step and not commits_at(record.cfg, stage, step):
                step += 1
        expected = {
            "global_step": step,
            "stream_position": int(record.checkpoint.state.get("stream_position", 0)) + explored,
            "consumed": chunk,
            "max_turns": stage.max_turns,
        }
        for name, value in expected.items():
            checks.expect(record.at(commit), name, value, commit.state.get(name))
        checks.expect(
            record.at(commit), "done at the stage's last step", step == stage.last_step, commit.done
        )


def final_of(steps: Sequence[StepRecord], kind: Kind) -> Manifest | None:
    """Return the last commit of the run's step of this kind; None if missing or unfinished."""
    return next((record.final for record in steps if record.step.kind is kind), None)


def draw(episodes: Sequence[Any], count: int | None, seed: int, step: str, seq: int) -> list[Any]:
    """Draw `count` episodes at random and return them in their order; None, or too few: all.

    step: name of the step; seq: number of the commit, or of the weights. Equal `seed`, `step` and
    `seq` give the same choice; without the seed it cannot be predicted.
    """
    salt = int.from_bytes(step.encode(), "little") % 2**63 + seq + 1
    order = np.random.Generator(np.random.Philox(key=[seed, salt])).permutation(len(episodes))
    return [episodes[index] for index in sorted(order[:count])]


def load(store: RunStore, manifest: Manifest | None, *, weights: bool = True) -> Checkpoint | None:
    """Load a checkpoint. None without a manifest, or if its blobs were pruned or damaged; the
    content check reports which. weights: read the weights now; False: on first use.
    """
    if manifest is None:
        return None
    try:
        checkpoint = load_checkpoint(store, manifest)
        if weights:
            checkpoint.model.eval()  # loads the weights, so that their errors are caught here
    except (LookupError, ValueError):
        return None
    return checkpoint


def place(where: str, episode: Trajectory) -> str:
    return f"{where} {episode.item.item_id} sample {episode.sample}"
