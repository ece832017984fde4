"""`agentgym gc | export`: remove steps from the store, and export weights."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path

from agentgym.commands.parser import Commands, add_pointers
from agentgym.config import ConfigError, RunConfig
from agentgym.console.ending import say


def add(commands: Commands) -> None:
    gc = commands.add("gc", _gc, "steps of the store that are not needed, and why the rest is kept")
    gc.add_argument("--remove", action="store_true", help="remove them (default: only list them)")
    add_pointers(gc, ", which keep what they name")
    gc.add_argument("--json", action="store_true")

    about = "a step's weights as an ordinary Hugging Face model folder"
    option = commands.add("export", _export, about).add_argument
    run = "r... of a run of this store; default: the configured"
    option("of_run", metavar="run", nargs="?", default="", help=run)
    option("step", help="its newest commit is taken, for example stage-3")
    option("folder", type=Path, help="must not exist yet")
    best = "the commit that did best in validation, as store.keep_best kept it"
    option("--best", action="store_true", help=best)
    adapter = "a LoRA adapter alone, in peft's format (default: merged into the weights)"
    option("--adapter", action="store_true", help=adapter)


def _gc(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.pipeline.gc import collect, survey, told
    from agentgym.pipeline.plan import amount

    rows = survey(cfg, arguments.pointers)
    garbage = [row.head for row in rows if not row.reason]
    gone = {head.digest for head in collect(cfg, garbage)} if arguments.remove else set()
    if arguments.json:
        tree = [
            {
                "step": row.head.step,
                "key": row.head.key,
                "bytes": row.num_bytes,
                "created_at": row.head.created_at,
                "kept": row.reason or None,
                "collected": row.head.digest in gone,
            }
            for row in rows
        ]
        say(json.dumps({**told(rows), "collected": len(gone), "rows": tree}, indent=1))
        return 0
    for row in rows:
        day = time.strftime("%Y-%m-%d", time.localtime(row.head.created_at))
        verb = "keep" if row.reason else "gone" if row.head.digest in gone else "collect"
        name = f"{row.head.step}-{row.head.key[:12]}"
        size = amount(row.num_bytes)
        say(f"{verb:<8}{day}  {size:>9}  {name:<33} {row.reason}".rstrip(), indent=31)
    numbers = told(rows)
    size = amount(numbers["collectable_bytes"])
    outcome = (
        f"{len(gone)} of {len(garbage)} were removed"
        if arguments.remove
        else "`agentgym gc --remove` removes them"
        if garbage
        else "nothing to remove"
    )
    say(f"{len(garbage)} of {len(rows)} steps, {size}, are not needed; {outcome}")
    return 0 if len(gone) == len(garbage) or not arguments.remove else 1


def _export(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.pipeline.export import export
    from agentgym.pipeline.stored_config import config_of_run

    if arguments.of_run:
        # the settings of another version's run may be unknown here; the export does not need them
        with contextlib.suppress(ConfigError):
            cfg = config_of_run(arguments.of_run, cfg, arguments.params, arguments.set)
    choice = {"run": arguments.of_run, "best": arguments.best, "adapter": arguments.adapter}
    manifest = export(cfg, arguments.step, arguments.folder, **choice)
    say(f"{arguments.folder}: {manifest.step} commit {manifest.seq}, digest {manifest.digest[:12]}")
    return 0
