"""The data of a run, checked against what the run asks of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentgym.config import ConfigError, EnvConfig, ExplorationConfig, RunConfig, max_refills
from agentgym.data.items import (
    SPLITS,
    Splits,
    load_splits,
    mix_splits,
    repeated_tasks,
    train_stream,
)
from agentgym.data.trajectories import Recorded, load_trajectories

TASKS = "tasks.json"  # among the blobs of the data, see `tasks_json`


def load_data(cfg: RunConfig) -> Splits:
    """The configured items, checked, also against what the run asks of them.
    Errors: ConfigError.
    """
    splits = mix_splits(cfg.env_weights, list(splits_by_env(cfg).values()))
    if (
        isinstance(cfg.algorithm, ExplorationConfig)
        and cfg.algorithm.num_items > len(splits.train) // 3
    ):
        raise ConfigError(
            f"algorithm.num_items {cfg.algorithm.num_items} is more than a third of the"
            f" {len(splits.train)} train items of {cfg.env_names}, so that one stage could meet an"
            " item twice; lower it"
        )
    for key, asked, name, items in (
        (
            "evaluation.num_items",
            cfg.evaluation.num_items,
            cfg.evaluation.split,
            getattr(splits, cfg.evaluation.split),
        ),
        ("rollout.items_per_step", cfg.rollout.items_per_step, "train", splits.train),
    ):
        if asked > len(items):
            raise ConfigError(
                f"{key} {asked} is more than the {len(items)} {name} items of {cfg.env_names};"
                " lower it"
            )
    _check_draws(cfg, splits)
    return splits


def splits_by_env(cfg: RunConfig) -> dict[str, Splits]:
    """The items of each environment of the run. Errors: DataError."""
    fraction = cfg.data.validation_fraction
    return {
        env: load_splits(cfg.data.path, env, validation_fraction=fraction, seed=cfg.seed)
        for env in cfg.env_weights
    }


def load_recorded(cfg: RunConfig) -> list[Recorded]:
    """The trajectories of others that the run learns from; none where it does not.
    Errors: DataError.
    """
    if cfg.warm_start.source != "trajectories":
        return []
    return load_trajectories(cfg.data.trajectories, splits_by_env(cfg))


@dataclass(frozen=True)
class Tasks:
    """The tasks behind the items of a run."""

    digests: Mapping[str, str | None]  # of each item's task; None: its environment cannot say
    repeated: tuple[str, ...]  # warnings about tasks that stand there under several ids
    unknown: tuple[str, ...]  # warnings about environments that cannot say


def tasks_json(tasks: Tasks, splits: Splits) -> bytes:
    """Digests of the tasks that evaluations may play, by item id."""
    ids = [item.item_id for item in (*splits.validation, *splits.test)]
    return json.dumps({name: tasks.digests[name] for name in ids}, indent=0).encode()


def compare_tasks(envs: Sequence[EnvConfig], splits: Splits) -> Tasks:
    """Errors: ConfigError where an item names no task, or the environment cannot be had here as it
    is set.
    """
    from agentgym.deploy.local import IdentitiesUnknown, task_identities

    digests: dict[str, str | None] = {}
    repeated: list[str] = []
    unknown: list[str] = []
    for env in envs:
        items = [item for name in SPLITS for item in getattr(splits, name) if item.env == env.name]
        found: Sequence[str | None] = [None] * len(items)
        try:
            found = task_identities(env, [item.task_id for item in items])
            repeated += repeated_tasks(items, found)
        except IdentitiesUnknown as reason:
            unknown.append(f"{env.name}: items were compared by their ids alone: {reason}")
        digests |= zip((item.item_id for item in items), found, strict=True)
    return Tasks(digests, tuple(repeated), tuple(unknown))


def _check_draws(cfg: RunConfig, splits: Splits) -> None:
    """Errors: ConfigError where one optimizer step could draw an item twice: equal keys give
    equal samples.
    """
    asked = cfg.rollout.items_per_step
    rounds = 1 + max_refills(cfg.algorithm)
    most = train_stream(cfg, splits, {}).most_distinct()
    if cfg.algorithm.loop.samples_every_step and asked * rounds > most:
        refills = f" x {rounds} rounds (algorithm.max_refills)" if rounds > 1 else ""
        raise ConfigError(
            f"rollout.items_per_step {asked}{refills} is more than the {most} items that"
            f" {len(splits.train)} train items of {cfg.env_names} give without one twice (a third"
            " of a pass): the same item twice in a step has the same samples, token for token;"
            f" lower it to {most // rounds}, or add items"
        )
