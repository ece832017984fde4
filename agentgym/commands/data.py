"""`agentgym data ...`: make, import and check datasets."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.commands.parser import Commands
from agentgym.config import ConfigError, EnvConfig, RunConfig
from agentgym.console.ending import say

if TYPE_CHECKING:
    from agentgym.data.items import Splits


def add(commands: Commands) -> None:
    data = commands.group("data", "the dataset")
    importing = data.add(
        "import", _import, "import the published lists at a revision, with `dvc import`"
    )
    option = importing.add_argument
    option("--rev", required=True, help="commit id, tag or branch; the commit it means is pinned")
    option("--url", help="git repository (default: AgentGym-RL-Data-ID on the Hugging Face Hub)")
    option(
        "--out",
        type=Path,
        default=Path("data/hub/AgentGym-RL-Data-ID"),
        help="folder (default: %(default)s)",
    )
    others = data.add(
        "import-trajectories",
        _import_trajectories,
        "import trajectories of others, in AgentGym's published layout, under DVC",
    )
    option = others.add_argument
    option(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a JSON list of {item_id, conversations}",
    )
    option("--out", type=Path, help="folder, replaced if it exists (default: data.trajectories)")
    option(
        "--drop-refused",
        action="store_true",
        help="leave out rows that cannot be learned from, and list them",
    )
    making = data.add("make", _make, "write item lists of an environment from ranges of task ids")
    making.add_argument("name", metavar="NAME", help="an installed environment")
    for split in ("train", "test"):
        making.add_argument(
            f"--{split}",
            required=True,
            metavar="RANGES",
            help="task ids: 0..399, 0..399:4 for every fourth, 7, or several with commas",
        )
    making.add_argument("--out", type=Path, help="folder (default: data/NAME)")
    data.add("validate", _validate, "check files, schema, splits and leakage")
    data.add("keep", _keep, "put the files that a run reads into its store, found by data.digest")


def _keep(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.data.copies import keep_data
    from agentgym.pipeline.table import open_store

    store = open_store(cfg)
    digest = keep_data(cfg, store)
    say(f"{store.root} has them; elsewhere set data.digest to\n{digest}")
    return 0


def _make(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    """Write the lists and print counts and warnings. Return 1 if a task has several ids, else 0."""
    from agentgym.pipeline.item_lists import environment_of, make_lists

    env, out = environment_of(cfg, arguments.name), arguments.out or Path("data") / arguments.name
    made = make_lists(cfg, env, arguments.train, arguments.test, out)
    for warning in made.warnings:
        say(f"warning: {warning}", indent=4)
    say(f"{env.name}: {len(made.train)} train, {len(made.test)} test items")
    for file in made.files:
        say(f"  {file}")
    say(f"to use them: --set data.path={out}")
    return 1 if made.has_repeats else 0


def _import(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.data.items import PUBLISHED_COUNTS, DataError, load_splits
    from agentgym.data.published import HUB_URL, import_dataset

    imported = import_dataset(arguments.url or HUB_URL, arguments.rev, arguments.out)
    verb = "imported into" if imported.is_new else "was imported already into"
    say(f"{imported.url} at {imported.sha} {verb} {imported.path}")
    say(f"licence: {imported.licence or 'not known here; see its repository'}")
    for env in dict.fromkeys((*cfg.env_weights, *PUBLISHED_COUNTS)):
        try:
            splits = load_splits(
                imported.path, env, validation_fraction=cfg.data.validation_fraction, seed=cfg.seed
            )
        except DataError as error:
            if env in cfg.env_weights:
                raise
            say(f"warning: {error}", indent=4)
            continue
        _describe(env, splits)
    say(f"keep in git: {imported.pointer}; to train on it: --set data.path={imported.path}")
    return 0


def _import_trajectories(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.data.published import track_folder
    from agentgym.data.trajectories import FILE, read_files, write

    out = arguments.out or cfg.data.trajectories
    rows, left_out = read_files(arguments.files, cfg, drop_refused=arguments.drop_refused)
    for refusal in left_out:
        say(f"left out: {refusal}", indent=4)
    pointer, counts = track_folder(
        out, lambda folder: write(folder, rows), pattern=FILE.format(env="*")
    )
    for env, count in counts.items():
        say(f"{env}: {count} trajectories")
    say(
        f"keep in git: {pointer}; to learn from them: --set warm_start.source=trajectories --set"
        f" data.trajectories={out}"
    )
    return 0


def _validate(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    """Check the data and print counts and warnings. Return 1 if a task of the run's environments
    has several ids, else 0.
    Errors: ConfigError for the run's own data; errors in other published lists are warnings.
    """
    from agentgym.data.check import compare_tasks, load_recorded, require_enough, splits_by_env
    from agentgym.data.items import PUBLISHED_COUNTS, load_splits, mix_splits
    from agentgym.data.published import check_pin

    splits = mix_splits(cfg.env_weights, list(splits_by_env(cfg).values()))
    num_recorded = len(load_recorded(cfg))
    for folder in cfg.data_folders.values():
        check_pin(folder)
    tasks = compare_tasks(cfg.envs, splits)
    _describe(cfg.env_names, splits, *tasks.repeated, *tasks.unknown)
    if num_recorded:
        say(
            f"{cfg.env_names}: {num_recorded} trajectories of train items in"
            f" {cfg.data.trajectories}"
        )
    require_enough(cfg, splits)
    for name in PUBLISHED_COUNTS:
        if name in cfg.env_weights or not (cfg.data.path / "train" / f"{name}_train.json").exists():
            continue
        try:
            other = load_splits(
                cfg.data.path, name, validation_fraction=cfg.data.validation_fraction, seed=cfg.seed
            )
            other_tasks = compare_tasks((EnvConfig(name=name),), other)
            _describe(name, other, *other_tasks.repeated, *other_tasks.unknown)
        except ConfigError as error:
            say(f"warning: {error}", indent=4)
    return 1 if tasks.repeated else 0


def _describe(env: str, splits: Splits, *more_warnings: str) -> None:
    for warning in (*splits.warnings, *more_warnings):
        say(f"warning: {warning}", indent=4)
    say(
        f"{env}: {len(splits.train)} train, {len(splits.validation)} validation,"
        f" {len(splits.test)} test items, sha256 {splits.digest[:12]}"
    )
