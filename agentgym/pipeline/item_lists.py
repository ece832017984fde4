"""Item lists written from ranges of task ids, checked with the environment that has the tasks."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentgym.config import ConfigError, EnvConfig, RunConfig, first_of
from agentgym.data.check import compare_tasks
from agentgym.data.items import DataError, Splits, list_files
from agentgym.deploy.environment import environment_servers
from agentgym.deploy.local import check_local_env
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.pools import EnvPools
from agentgym.store.posix import write_whole
from agentgym.types import Item

MAX_TASKS = 1_000_000  # of one list
RANGE = re.compile(r"([0-9]{1,15})(?:\.\.([0-9]{1,15})(?::([0-9]{1,15}))?)?")


@dataclass(frozen=True)
class MadeLists:
    """Written lists. warnings: tasks that have several ids, and checks that were not possible."""

    train: tuple[int, ...]  # task ids
    test: tuple[int, ...]
    files: tuple[Path, ...]
    warnings: tuple[str, ...]
    has_repeats: bool  # a task has several ids


def parse_tasks(text: str) -> tuple[int, ...]:
    """Return the task ids of `0..99`, `0..99:4` (every fourth), `7`, or several, with commas.
    Errors: ConfigError, also for an id that occurs twice.
    """
    spans: list[range] = []
    for part in text.split(","):
        match = RANGE.fullmatch(part.strip())
        first, last, step = (match[1], match[2] or match[1], match[3] or "1") if match else "000"
        spans.append(range(int(first), int(last) + 1, int(step) or 1))
        if match is None or not int(step) or not spans[-1]:
            raise ConfigError(
                f"{part!r} of {text!r} is no range of task ids; expected FIRST..LAST, for example"
                " 0..99, with :4 after it for every fourth, or one id; several have commas between"
            )
    if sum(map(len, spans)) > MAX_TASKS:
        raise ConfigError(f"{text} has more than {MAX_TASKS} task ids; name fewer")
    tasks = tuple(task for span in spans for task in span)
    if twice := [str(task) for task, count in Counter(tasks).items() if count > 1]:
        raise ConfigError(f"{text} has {first_of(twice)} more than once; name each task once")
    return tasks


def environment_of(cfg: RunConfig, name: str) -> EnvConfig:
    """Return the run's settings of an environment; of others, those by default.
    Errors: ConfigError for a name that no environment can have.
    """
    try:
        return next((env for env in cfg.envs if env.name == name), None) or EnvConfig(name=name)
    except ValueError as error:
        raise ConfigError(
            f"{name!r} is no name of an environment; `python -m envs list` prints those that are"
            " installed"
        ) from error


def make_lists(cfg: RunConfig, env: EnvConfig, train: str, test: str, folder: Path) -> MadeLists:
    """Check the tasks and write their lists under `folder`.
    train, test: see `parse_tasks`. Errors: DataError for tasks in both lists or unknown to the
    environment, and those of `parse_tasks`, `write_lists` and `compare_tasks`.
    """
    ids = {"train": parse_tasks(train), "test": parse_tasks(test)}
    if both := sorted(set(ids["train"]) & set(ids["test"])):
        raise DataError(
            f"--train {train} and --test {test} both have {first_of([str(task) for task in both])};"
            " a test must be held out, so name each task in one of them"
        )
    check_lists(folder, env.name, ids["train"], ids["test"])
    items = {name: [Item(env.name, task, name) for task in tasks] for name, tasks in ids.items()}
    tasks = compare_tasks([env], Splits(tuple(items["train"]), (), tuple(items["test"]), "", ()))
    if tasks.unknown:
        ends = [
            end(part, key=lambda item: item.task_id)
            for part in items.values()
            for end in (min, max)
        ]
        _open(cfg, env, list(dict.fromkeys(ends)))
    files = write_lists(folder, env.name, ids["train"], ids["test"])
    warnings = (*tasks.repeated, *tasks.unknown)
    return MadeLists(ids["train"], ids["test"], files, warnings, bool(tasks.repeated))


def check_lists(
    folder: Path, env: str, train: Sequence[int], test: Sequence[int]
) -> dict[Path, bytes]:
    """Return file -> content of the lists. Errors: DataError if one exists with other content."""
    rows = ([{"item_id": f"{env}_{task}"} for task in tasks] for tasks in (train, test))
    texts = (f"{json.dumps(lines, indent=0)}\n".encode() for lines in rows)
    contents = dict(zip(list_files(folder, env), texts, strict=True))
    for file, data in contents.items():
        if file.exists() and (not file.is_file() or file.read_bytes() != data):
            raise DataError(
                f"{file} exists with other content; remove it, or give another folder with --out"
            )
    return contents


def write_lists(
    folder: Path, env: str, train: Sequence[int], test: Sequence[int]
) -> tuple[Path, ...]:
    """Write the train and the test list of an environment in the published layout; return the
    files. Errors: see `check_lists`.
    """
    contents = check_lists(folder, env, train, test)
    for file, data in contents.items():
        write_whole(file, data)
    return tuple(contents)


def _open(cfg: RunConfig, env: EnvConfig, items: Sequence[Item]) -> None:
    """Open a session on each item. Errors: DataError if one names no task of the environment."""
    check_local_env(env)
    playing = cfg.model_copy(update={"env": env, "mix": ()})

    async def ask() -> None:
        async with EnvPools.of([env], endpoints) as pools:
            for item in items:
                async with pools.session(item, secrets.token_hex(8)):
                    pass

    with environment_servers(playing, expert=False) as endpoints:
        try:
            asyncio.run(ask())
        except EnvError as error:
            raise DataError(f"{env.name} opens no such task: {error.message}") from error
