"""Checks of a run's data against the run's settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentgym.config import (
    ConfigError,
    EnvConfig,
    ExplorationConfig,
    RunConfig,
    first_of,
    max_refills,
)
from agentgym.data.items import SPLITS, DataError, Splits, load_splits, mix_splits, train_stream
from agentgym.data.trajectories import Recorded, load_trajectories
from agentgym.types import Item

TASKS = "tasks.json"  # name of a blob of the data, see `tasks_json`


def load_data(cfg: RunConfig) -> Splits:
    """Return the items of the run's environments, mixed by their weights (see `mix_splits`).
    Errors: DataError for faulty lists, ConfigError for too few items.
    """
    splits = mix_splits(cfg.env_weights, list(splits_by_env(cfg).values()))
    require_enough(cfg, splits)
    return splits


def require_enough(cfg: RunConfig, splits: Splits) -> None:
    """Raise ConfigError if the run has too few items, or so few that one optimizer step could draw
    an item twice: both draws would sample the same episodes, token for token.
    """
    algorithm = cfg.algorithm
    if isinstance(algorithm, ExplorationConfig) and algorithm.num_items > len(splits.train) // 3:
        raise ConfigError(
            f"algorithm.num_items {algorithm.num_items} is more than a third of the"
            f" {len(splits.train)} train items of {cfg.env_names}, so that one stage could meet an"
            " item twice; lower it"
        )
    items_per_step, rounds = cfg.rollout.items_per_step, 1 + max_refills(algorithm)
    max_items = train_stream(cfg, splits, {}).most_distinct()
    if algorithm.loop.samples_every_step and items_per_step * rounds > max_items:
        refills = f" x {rounds} rounds (algorithm.max_refills)" if rounds > 1 else ""
        raise ConfigError(
            f"rollout.items_per_step {items_per_step}{refills} is more than the {max_items} items"
            f" that {len(splits.train)} train items of {cfg.env_names} give without one twice (a"
            " third of a pass): the same item twice in a step has the same samples, token for"
            f" token; lower it to {max_items // rounds}, or add items"
        )
    for key, num_items, name in (
        ("evaluation.num_items", cfg.evaluation.num_items, cfg.evaluation.split),
        ("rollout.items_per_step", cfg.rollout.items_per_step, "train"),
    ):
        if num_items > (num_there := len(getattr(splits, name))):
            raise ConfigError(
                f"{key} {num_items} is more than the {num_there} {name} items of {cfg.env_names};"
                " lower it"
            )


def splits_by_env(cfg: RunConfig) -> dict[str, Splits]:
    """Return the items of each environment of the run. Errors: DataError."""
    fraction = cfg.data.validation_fraction
    return {
        env: load_splits(cfg.data.path, env, validation_fraction=fraction, seed=cfg.seed)
        for env in cfg.env_weights
    }


def load_recorded(cfg: RunConfig) -> list[Recorded]:
    """Return the recorded trajectories that the run learns from; empty unless warm_start.source is
    `trajectories`. Errors: DataError.
    """
    if cfg.warm_start.source != "trajectories":
        return []
    return load_trajectories(cfg.data.trajectories, splits_by_env(cfg))


@dataclass(frozen=True)
class Tasks:
    """Digests of the tasks behind a run's items, and warnings about them."""

    digests: Mapping[str, str | None]  # item id -> task digest; None: unknown to the environment
    repeated: tuple[str, ...]  # warnings about tasks listed under several ids
    unknown: tuple[str, ...]  # warnings about environments without task digests


def tasks_json(tasks: Tasks, splits: Splits) -> bytes:
    """Return item id -> task digest of the validation and test items, as JSON."""
    ids = [item.item_id for item in (*splits.validation, *splits.test)]
    return json.dumps({name: tasks.digests[name] for name in ids}, indent=0).encode()


def compare_tasks(envs: Sequence[EnvConfig], splits: Splits) -> Tasks:
    """Return the digests of all items' tasks, with warnings about items of the same task.
    Each environment computes its own in a child process; if one cannot, they are None, with a
    warning.
    Errors: ConfigError if an item names no task, or the environment cannot run here as configured;
    RuntimeError if a child process fails.
    """
    from agentgym.deploy.local import IdentitiesUnknown, task_identities

    digests: dict[str, str | None] = {}
    repeated: list[str] = []
    unknown: list[str] = []
    for env in envs:
        items = [item for name in SPLITS for item in getattr(splits, name) if item.env == env.name]
        task_digests: Sequence[str | None] = [None] * len(items)
        try:
            task_digests = task_identities(env, [item.task_id for item in items])
            repeated += repeated_tasks(items, task_digests)
        except IdentitiesUnknown as reason:
            unknown.append(f"{env.name}: items were compared by their ids alone: {reason}")
        digests |= zip((item.item_id for item in items), task_digests, strict=True)
    return Tasks(digests, tuple(repeated), tuple(unknown))


def repeated_tasks(items: Sequence[Item], digests: Sequence[str | None]) -> tuple[str, ...]:
    """Return warnings about tasks listed under several ids, one line per pair of splits.

    items: of one environment, split by split; digests: of their tasks (see `task_identities`).
    Errors: DataError if an item names no task.
    """
    missing = [item.item_id for item, digest in zip(items, digests, strict=True) if digest is None]
    if missing:
        raise DataError(
            f"{items[0].env}: {first_of(missing)} name no task of the environment as it is set;"
            " correct the lists or its options"
        )
    first: dict[str | None, Item] = {}
    repeats: dict[tuple[str, str], list[str]] = {}
    for item, digest in zip(items, digests, strict=True):
        earlier = first.setdefault(digest, item)
        if earlier is not item:
            repeats.setdefault((item.split, earlier.split), []).append(
                f"{item.item_id} = {earlier.item_id}"
            )
    sizes = Counter(item.split for item in items)
    return tuple(
        f"{items[0].env}: {len(pairs)} of {sizes[split]} {split} items are the same task as"
        f" {'another' if split == other else 'a'} {other} item:"
        f" {first_of(pairs)}{'' if split == other else f'; {split} is not held out'}"
        for (split, other), pairs in repeats.items()
    )
