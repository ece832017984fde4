"""Writer of the embedded stand-in of AgentGym-RL-Data-ID, so that a clone runs without the network
and without the licensed lists.

Layout and schema are those of the data set on the Hub; the ids differ. From each environment's
index range it takes the ids whose sha256 sorts first, and each task once: if two ids name the same
task of the environment (with its default options), a later id replaces the second.
The output is equal on every machine and Python version.
Run `python data/make_standin.py` from anywhere (with names: only these environments), then `dvc
add`.
It also writes `textcraft-invented`, small enough for git: invented TextCraft goals for training,
the game's own for the test.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent / "AgentGym-RL-Data-ID"

# environment: (items, valid indices) of the train list, then of the eval list
SIZES = {
    # any index is valid; more items than published, for narrower intervals
    "babyai": (1536, range(10_000), 600, range(10_000)),
    "textcraft": (374, range(544), 100, range(544)),  # goals
    "sciworld": (2120, range(4_639), 200, range(4_639)),  # task variations
    # questions; fewer train items than published
    "searchqa": (512, range(51_713, 221_328), 400, range(51_713)),
    "webarena": (64, range(104), 40, range(104)),  # the embedded tasks, all of them
}

# TextCraft with max_depth 1 and recipes "invented:8000": 8,000 invented goals for training, the
# game's own 124 for the test
INVENTED = ROOT.with_name("textcraft-invented")
NUM_INVENTED = 8_000


def ids(env: str) -> tuple[list[str], list[str]]:
    """Train and eval ids of one environment: no task twice, ordered by hash, so that every prefix
    is a fair sample.
    """
    num_train, train_indices, num_eval, eval_indices = SIZES[env]
    for_train, for_eval = _in_hash_order(env, train_indices), _in_hash_order(env, eval_indices)
    first = for_train[:num_train]
    second = [item_id for item_id in for_eval if item_id not in set(first)][:num_eval]
    identity, seen_tasks = _identity(env), set()

    def new(item_ids: list[str], limit: int) -> list[str]:
        chosen: list[str] = []
        for item_id in item_ids:
            task = identity(int(item_id.rpartition("_")[2])) if len(chosen) < limit else None
            if task is not None and task not in seen_tasks:
                seen_tasks.add(task)
                chosen.append(item_id)
        return chosen

    # if a train and a test id are the same task, the test keeps it
    test, train = new(second, num_eval), new(first, num_train)
    rest = {*first, *second}
    test += new([item_id for item_id in for_eval if item_id not in rest], num_eval - len(test))
    train += new([item_id for item_id in for_train if item_id not in rest], num_train - len(train))
    return train, test


def _identity(env: str) -> Callable[[int], str]:
    """Return a function: task id -> identity of the task. It needs neither Java nor a browser."""
    from envs.registry import load_spec
    from envs.sciworld.tasks import PUBLISHED, find_task
    from envs.webarena.tasks import SITE_NAMES, identity, load

    if env == "sciworld":
        return lambda task_id: str(find_task(PUBLISHED, task_id))
    if env == "webarena":
        path = ROOT.parents[1] / "envs/webarena/tasks.json"
        return partial(
            identity,
            load(path, {site: f"http://{site}" for site in SITE_NAMES}, skip_missing=False),
        )
    identity_of = load_spec(env, {}).identity
    assert identity_of is not None
    return identity_of


def ids_invented() -> tuple[list[str], list[str]]:
    """Train ids (invented goals of one crafting level) and eval ids (the game's own goals)."""
    from envs.textcraft.recipes import load_book

    shipped, goals = (
        [goal for goal in book.goals if book.depth[goal] == 1]
        for book in (load_book(), load_book(f"invented:{NUM_INVENTED}"))
    )
    order = [
        int(item_id.rpartition("_")[2])
        for item_id in _in_hash_order("textcraft", range(len(goals)))
    ]
    return tuple(
        [f"textcraft_{goal}" for goal in order if (goals[goal] in shipped) is known]
        for known in (False, True)
    )


def _in_hash_order(env: str, indices: range) -> list[str]:
    return sorted(
        (f"{env}_{index}" for index in indices),
        key=lambda item_id: hashlib.sha256(item_id.encode()).digest(),
    )


def write(root: Path = ROOT, envs: Iterable[str] = SIZES) -> None:
    """Replace the two files of each environment under `root`."""
    for env in envs:
        _write(root, env, *ids(env))


def write_invented(root: Path = INVENTED) -> None:
    """Replace the two files under `root`."""
    _write(root, "textcraft", *ids_invented())


def _write(root: Path, env: str, train: list[str], test: list[str]) -> None:
    for name, item_ids in ((f"train/{env}_train.json", train), (f"eval/{env}_test.json", test)):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps([{"item_id": item_id} for item_id in item_ids], indent=0) + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    write(envs=sys.argv[1:] or SIZES)
    if not sys.argv[1:]:
        write_invented()
