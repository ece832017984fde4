"""`agentgym promote | rollback | history | lineage`: the registered models and their champion."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from agentgym.commands.parser import Commands
from agentgym.config import RunConfig
from agentgym.console.ending import say

if TYPE_CHECKING:
    from agentgym.evaluation.history import Entry, Version

HELD = 3  # exit code if the gate does not promote


def add(commands: Commands) -> None:
    promote = commands.add(
        "promote",
        _promote,
        "have the gate judge a version of the registered model: exit code 3 if it is held or"
        " rejected",
    )
    promote.add_argument("version", help="its number in the registry")
    promote.add_argument(
        "--force", action="store_true", help="move the alias without the gate's verdict"
    )
    promote.add_argument("--why", default="", help="of --force, for the history")

    rollback = commands.add("rollback", _rollback, "give the alias back to who held it before")
    rollback.add_argument("--to", metavar="VERSION", help="a version that had the alias earlier")
    rollback.add_argument("--why", default="by hand", help="for the history")

    history = commands.add("history", _history, "who held the alias, since when and why")
    lineage = commands.add(
        "lineage",
        _lineage,
        "inputs and judgments of a version; or the versions that contain a digest",
    )
    lineage.add_argument(
        "of",
        nargs="?",
        default="",
        metavar="VERSION | DIGEST",
        help="a version's number, or the beginning of a digest of a step, of data or of an"
        " evaluation (default: the version that holds the alias)",
    )
    for command in (promote, rollback, history, lineage):
        command.add_argument("--json", action="store_true")


def _promote(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.console.progress import Bars, PlainConsole
    from agentgym.pipeline.versions import force, promote

    if arguments.force:
        entry = force(cfg, arguments.version, arguments.why)
    else:
        with Bars(PlainConsole(stderr=True)) as bars:
            entry = promote(cfg, arguments.version, bars)
    _say_entry(entry, cfg, as_json=arguments.json)
    return 0 if entry.after is not None and entry.candidate.is_same(entry.after) else HELD


def _rollback(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.pipeline.versions import roll_back

    _say_entry(roll_back(cfg, arguments.to, arguments.why), cfg, as_json=arguments.json)
    return 0


def _history(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.pipeline.versions import champion_files, standing

    entries, now = standing(cfg)
    changed, files = champion_files(cfg, now)
    if arguments.json:
        tree = {"entries": [*map(_json, entries)], "standing": asdict(now), "files": files}
        say(json.dumps(tree, indent=1))
    else:
        for entry in entries:
            for line in _lines(entry):
                say(line, indent=6)
        if files:
            say(files)
        _say_holder(cfg, now.champion)
        if now.drift:
            say(now.drift)
    return 1 if now.drift or changed else 0


def _lineage(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.pipeline.versions import lineage, lines

    report = lineage(cfg, arguments.of)
    if arguments.json:
        say(json.dumps(report, indent=1))
    else:
        for line in lines(report):
            say(line, indent=4)
    return 1 if report.get("changed") else 0


def _say_entry(entry: Entry, cfg: RunConfig, *, as_json: bool) -> None:
    if as_json:
        say(json.dumps(_json(entry), indent=1))
        return
    for line in _lines(entry):
        say(line, indent=6)
    for rule in entry.decision.get("rules", []):
        say(f"  {rule['verdict']:<8}{rule['rule']:<15}{rule['why']}", indent=25)
    if needed := entry.decision.get("needed_items"):
        say(f"  {needed} items of each environment would do: evaluation.num_items, gate.protocol")
    _say_holder(cfg, entry.after)


def _say_holder(cfg: RunConfig, version: Version | None) -> None:
    holder = f"version {version.number}" if version else "not assigned"
    say(f"{cfg.registered_model}: {cfg.registry.alias} is {holder}")


def _lines(entry: Entry) -> list[str]:
    from agentgym.pages import moment

    when = moment(entry.at)
    before, after = (model.number if model else "-" for model in (entry.before, entry.after))
    moved = f"{before} -> {after}" if entry.moved else f"stays {after}"
    kind = entry.verdict or entry.kind
    return [
        f"{entry.number or '-':>4}  {when}  {kind:<12}version {entry.candidate.number:<5}{moved}",
        f"      {entry.why} ({entry.who})",
    ]


def _json(entry: Entry) -> dict[str, Any]:
    """Return an entry in JSON types, with `moved` and `verdict`, without single outcomes."""
    tree = asdict(entry)
    tree["decision"].get("evidence", {}).pop("pairs", None)
    return tree | {"moved": entry.moved, "verdict": entry.verdict}
