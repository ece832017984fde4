"""Lists of train and test items of an environment: read, checked, split, and drawn in a seeded
order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentgym.config import ConfigError, RunConfig, first_of
from agentgym.types import Item

# Items in the published AgentGym-RL-Data-ID, (train, eval); None if the count is not known exactly
PUBLISHED_COUNTS: dict[str, tuple[int | None, int | None]] = {
    "babyai": (810, 90),
    "textcraft": (374, 100),
    "sciworld": (2120, 200),
    "searchqa": (None, 400),
    "webarena": (372, 50),
}

# folder into which `agentgym data import` writes the published lists
PUBLISHED = Path("data/hub/AgentGym-RL-Data-ID")

_FILES = {"train": "train/{env}_train.json", "eval": "eval/{env}_test.json"}
SPLITS = ("train", "validation", "test")
HALF_PAIR = re.compile("[\ud800-\udfff]")  # half a surrogate pair, which no file or server takes
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class DataError(ConfigError):
    """Error of a dataset from which no run can start. The message has one line."""


@dataclass(frozen=True, slots=True)
class Splits:
    """The items of one or several environments. No item is in two splits."""

    train: tuple[Item, ...]  # in the order of the file, without the validation items
    validation: tuple[Item, ...]  # taken out of the train file
    test: tuple[Item, ...]  # the eval file
    # sha256 of both lists as data: the files' layout does not count, the order of items does
    digest: str
    warnings: tuple[str, ...]  # one line each

    def to_json(self) -> bytes:
        """Encode the splits; equal ones give equal bytes. `splits_from_json` inverts this."""
        row: dict[str, Any] = {
            name: [item.item_id for item in getattr(self, name)] for name in SPLITS
        }
        return json.dumps(
            {**row, "digest": self.digest, "warnings": self.warnings}, separators=(",", ":")
        ).encode()


def splits_from_json(data: bytes) -> Splits:
    """Invert `Splits.to_json`.
    Errors: ValueError, KeyError, TypeError or AttributeError for other data.
    """
    row = json.loads(data)
    train, validation, test = (
        tuple(Item(*parse_item_id(item_id), name) for item_id in row[name]) for name in SPLITS
    )
    return Splits(train, validation, test, row["digest"], tuple(row["warnings"]))


def data_digest(path: Path, *envs: str) -> str:
    """sha256 over the bytes of the environments' item lists in the dataset `path`, unparsed.
    Errors: DataError if a file is missing.
    """
    files = [file for env in envs for file in list_files(path, env)]
    for file in files:
        if not file.is_file():
            raise _not_there(path, file)
    return digest_of_files(files)


def digest_of_files(files: Iterable[Path]) -> str:
    """sha256 over the sha256 of each file's bytes, in the given order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _not_there(path: Path, file: Path) -> DataError:
    """Return the error for a missing `file`: the dataset `path` is missing, or lacks this list."""
    if path.is_dir():
        lists = path.glob("train/*_train.json")
        envs = sorted(train.name.removesuffix("_train.json") for train in lists)
        return DataError(
            f"{file} does not exist; {path} has lists for: {', '.join(envs) or 'no environment'}"
        )
    if Path(f"{path}.dvc").is_file():
        return DataError(
            f"dataset not pulled: {file} does not exist; run `dvc pull {path}.dvc`, or set"
            " data.path to its folder"
        )
    if path == PUBLISHED:
        return DataError(
            f"dataset not imported: {file} does not exist; run `agentgym data import --rev main`,"
            " or set data.path to a folder of lists"
        )
    return DataError(
        f"{path} does not exist, and there is no {path}.dvc to pull it by; set data.path to a"
        " folder of lists"
    )


def list_files(path: Path, env: str) -> list[Path]:
    """Return the files of an environment's lists in the dataset `path`: train, test."""
    return [path / pattern.format(env=env) for pattern in _FILES.values()]


def has_lists(path: Path, env: str) -> bool:
    """Return True if the dataset `path` has a train list for the environment."""
    return list_files(path, env)[0].is_file()


def mix_splits(weights: Mapping[str, float], parts: Sequence[Splits]) -> Splits:
    """Merge the splits of several environments, each split in turns by weight (see `interleave`).
    Warnings are joined. The digest is the sha256 of the joined digests, or that of a single part.
    """
    items = {
        name: tuple(interleave([item for part in parts for item in getattr(part, name)], weights))
        for name in SPLITS
    }
    digest = parts[0].digest
    if len(parts) > 1:
        digest = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()
    warnings = tuple(warning for part in parts for warning in part.warnings)
    return Splits(**items, digest=digest, warnings=warnings)


def interleave(items: Sequence[Item], weights: Mapping[str, float]) -> list[Item]:
    """Return all items in an order in which environments take turns by weight while they have any.
    The items of one environment keep their order.
    """
    waiting: dict[str, list[Item]] = {}
    for item in reversed(items):
        waiting.setdefault(item.env, []).append(item)
    result: list[Item] = []
    while waiting:
        for env in turns_of({env: weight for env, weight in weights.items() if env in waiting}):
            result.append(waiting[env].pop())
            if not waiting[env]:
                del waiting[env]
                break
    return result


def turns_of(weights: Mapping[str, float]) -> Iterator[str]:
    """Yield environment names forever (weighted round robin; ties in the order of `weights`).
    The next one is the environment furthest behind its share.
    """
    total, counts = sum(weights.values()), dict.fromkeys(weights, 0)
    for number in itertools.count(1):
        env = max(weights, key=lambda name: number * weights[name] / total - counts[name])
        counts[env] += 1
        yield env


def load_splits(path: Path, env: str, *, validation_fraction: float, seed: int) -> Splits:
    """Read `train/<env>_train.json` and `eval/<env>_test.json` under `path`, the Hub's layout.

    A train item is for validation if a hash of (seed, item) falls below `validation_fraction`, so
    adding items never moves old ones between splits.
    Errors: DataError if a list is missing, unreadable or faulty, or no item is left for
    train or validation.
    """
    if not path.is_dir():
        raise _not_there(path, path)
    ids = {split: _read_ids(path, pattern.format(env=env)) for split, pattern in _FILES.items()}
    rows = [(item_id, *parse_item_id(item_id), split) for split in _FILES for item_id in ids[split]]
    _validate(rows, env, path)

    items: dict[str, list[Item]] = {name: [] for name in SPLITS}
    for _, _, task_id, split in rows:
        is_set_aside = _share(seed, f"{env}_{task_id}") < validation_fraction
        name = "test" if split == "eval" else "validation" if is_set_aside else "train"
        items[name].append(Item(env, task_id, name))
    for name in ("train", "validation"):
        if not items[name]:
            raise DataError(
                f"{env}: no item is left for {name}: {len(ids['train'])} train items at"
                f" data.validation_fraction {validation_fraction}; add items or change the fraction"
            )
    canonical = json.dumps({"env": env, **ids}, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    warnings = tuple(
        f"{env}: {len(ids[split])} {split} items, published are {count}; results do not compare"
        for split, count in zip(_FILES, PUBLISHED_COUNTS.get(env, (None, None)), strict=True)
        if count is not None and count != len(ids[split])
    )
    parts = {name: tuple(part) for name, part in items.items()}
    return Splits(**parts, digest=digest, warnings=warnings)


def parse_item_id(item_id: str) -> tuple[str, int]:
    """Return (environment, index) of an item id: the text before the first `_`, and the number
    after the last; -1 unless that has 1 to 18 digits and nothing else. This is AgentGym's rule.
    """
    digits = item_id.rpartition("_")[2]
    return item_id.partition("_")[0], int(digits) if re.fullmatch("[0-9]{1,18}", digits) else -1


class ItemStream:
    """An endless, seeded order of items.
    Environments take turns by weight. Each epoch of an environment is a new shuffle of its items.

    `position` counts the items drawn and is the whole state: a stream built with another one's
    position continues the same sequence.
    Batches cross epochs without a gap, and a batch of at most `most_distinct()` items never has
    an item twice.
    """

    def __init__(
        self,
        items: Sequence[Item],
        *,
        seed: int,
        position: int = 0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """Build a stream. weights: share of each environment; None: equal ones. Items of other
        environments are left out.
        Errors: ValueError for a negative position, or if an environment has no item.
        """
        if position < 0:
            raise ValueError(f"stream position {position} must be >= 0")
        if weights is None:
            weights = dict.fromkeys((item.env for item in items), 1.0)
        by_env = {env: [item for item in items if item.env == env] for env in weights}
        if not by_env or not all(by_env.values()):
            empty = ", ".join(env for env in by_env if not by_env[env])
            raise ValueError(
                f"an item stream needs at least one item, got none{f' of {empty}' if empty else ''}"
            )
        self.position = position
        self._weights = weights
        self._turns = turns_of(weights)
        positions = Counter(itertools.islice(self._turns, position))
        self._streams = {
            env: _Epochs(env_items, seed=seed, position=positions[env])
            for env, env_items in by_env.items()
        }

    def most_distinct(self) -> int:
        """Return a lower bound of the largest `n` for which no `next(n)` has an item twice."""
        total, num = sum(self._weights.values()), len(self._weights)
        # each of k environments is less than 1 turn ahead of its share, so each is less than k - 1
        # behind it: two positions differ by less than k turns
        slack = num if num > 1 else 0
        bounds = [
            int((self._streams[env].num_items // 3 - slack) / (weight / total))
            for env, weight in self._weights.items()
        ]
        return max(0, min(bounds))

    def next(self, n: int) -> list[Item]:
        """Draw the next `n` items."""
        self.position += n
        return [self._streams[env].next() for env in itertools.islice(self._turns, n)]


def train_stream(cfg: RunConfig, splits: Splits, state: Mapping[str, Any]) -> ItemStream:
    """Return the stream of train items, begun at the state's `stream_position`; at 0 without it."""
    return ItemStream(
        splits.train,
        seed=cfg.seed,
        weights=cfg.env_weights,
        position=int(state.get("stream_position", 0)),
    )


class _Epochs:
    """Endless order of one environment's items: a new shuffle for every epoch."""

    def __init__(self, items: Sequence[Item], *, seed: int, position: int) -> None:
        self.position, self.num_items = position, len(items)
        self._items = tuple(items)
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def next(self) -> Item:
        epoch, index = divmod(self.position, len(self._items))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        self.position += 1
        return self._items[self._order[index]]

    def _order_of(self, epoch: int) -> list[int]:
        """Return the epoch's order of item indices. Its first third has none of the previous
        epoch's last third.
        """
        order = self._shuffle(epoch)
        # rearranging only the first two thirds keeps the last third independent of earlier epochs
        cut = len(order) - len(order) // 3
        recent = set(self._shuffle(epoch - 1)[cut:] if epoch else ())
        return sorted(order[:cut], key=recent.__contains__) + order[cut:]  # in order, recent last

    def _shuffle(self, epoch: int) -> list[int]:
        generator = np.random.Generator(
            np.random.Philox(np.random.SeedSequence((self._seed, epoch)))
        )
        return [int(index) for index in generator.permutation(len(self._items))]


def load_ids(path: Path, env: str) -> list[str]:
    """Read one environment's item ids from a JSON list of objects with `item_id`, in its order.
    Errors: DataError, also for an id of another environment, without a number or listed twice.
    """
    if not path.is_file():
        if PUBLISHED in path.parents:
            raise _not_there(PUBLISHED, path)
        raise DataError(
            f"{path} does not exist; items.file is read from where the command is typed"
        )
    ids = _read_ids(path.parent, path.name)
    if foreign := [name for name in ids if parse_item_id(name)[0] != env or "_" not in name]:
        raise DataError(
            f"{path}: {first_of(foreign)} are no items of {env}; expected {env}_17 or alike"
        )
    if wrong := [name for name in ids if parse_item_id(name)[1] < 0]:
        raise DataError(f"{path}: {first_of(wrong)} end in no number; expected {env}_17 or alike")
    if twice := [name for name, count in Counter(ids).items() if count > 1]:
        raise DataError(
            f"{path}: {first_of(twice)} stand there more than once; name each item once"
        )
    return ids


def read_json(path: Path, restore: str = "") -> Any:
    """Return the content of a JSON file, of any shape; a byte order mark is skipped.

    restore: advice for a broken file, in the error's text.
    Errors: FileNotFoundError; DataError for an unreadable file, a Git LFS pointer or invalid JSON.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if data.startswith(LFS_POINTER):
        raise DataError(
            f"{path} is a Git LFS pointer, not the file it stands for; fetch it with `git lfs pull`"
            " in its repository"
        )
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # bad JSON or bad UTF-8
        raise DataError(f"{path} is not valid JSON ({error}){restore}") from None


def _read_ids(root: Path, name: str) -> list[str]:
    """Return the item ids of one file, in its order, as they are written. Errors: DataError."""
    path = root / name
    pointer = Path(f"{root}.dvc")
    restore = f"; restore it with `dvc pull --force {pointer}`" if pointer.is_file() else ""
    try:
        rows = read_json(path, restore)
    except FileNotFoundError:
        raise _not_there(root, path) from None
    expected = f"{path} must hold a list of objects with the text field item_id"
    if not isinstance(rows, list):
        raise DataError(f"{expected}, got {type(rows).__name__}")
    for position, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("item_id"), str):
            raise DataError(f"{expected}; entry {position} is {json.dumps(row)[:80]}")
        if HALF_PAIR.search(row["item_id"]):
            raise DataError(
                f"{path}: the item_id of entry {position} holds half a surrogate pair"
                f" ({json.dumps(row['item_id'])[:80]}), which no file or server takes; correct it"
            )
    if not rows:
        raise DataError(f"{path} is an empty list; a run needs items in every split")
    return [row["item_id"] for row in rows]


def _validate(rows: Sequence[tuple[str, str, int, str]], env: str, path: Path) -> None:
    """Check rows (item_id, env, task_id, split) of both files: each is of `env`, has an index, is
    listed once, and is in one split. Errors: DataError for the first of these rules that fails.
    """
    first: dict[tuple[str, int, str], int] = {}
    repeated = [
        item_id
        for index, (item_id, name, task_id, split) in enumerate(rows)
        if first.setdefault((name, task_id, split), index) != index
    ]
    num_splits = Counter((name, task_id) for name, task_id, _ in first)
    rules = (
        (
            [item_id for item_id, name, _, _ in rows if name != env],
            f"belong to another environment; an item of {env} is `{env}_<index>`",
        ),
        (
            [item_id for item_id, _, task_id, _ in rows if task_id < 0],
            f"do not end in an index >= 0; write `{env}_<index>`",
        ),
        (repeated, "are listed more than once in one split; remove the repeated entries"),
        (
            [item_id for item_id, name, task_id, _ in rows if num_splits[name, task_id] > 1],
            "are in the train and in the eval list; remove them from one, or the test is not held"
            " out",
        ),
    )
    for culprits, advice in rules:
        if culprits:
            raise DataError(f"{path}, {env}: {first_of(list(dict.fromkeys(culprits)))} {advice}")


def _share(seed: int, item_id: str) -> float:
    """Return a number in [0, 1) that depends on seed and item alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{item_id}".encode()).digest()[:8], "big") / 2**64
