"""`agentgym config | doctor | envs`: settings, this machine, servers on a cluster."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from agentgym.algorithms.recipe import recipe_of
from agentgym.commands.parser import Commands
from agentgym.config import ConfigError, RunConfig, Setting, settings
from agentgym.config.section import unknown_key
from agentgym.console.ending import say

# settings that most runs change
MAIN = (
    *("model.name", "env.name", "env.options", "rollout.engine", "algorithm.recipe"),
    *("horizon.max_turns", "horizon.stage_steps", "rollout.items_per_step", "rollout.group_size"),
    *("optimizer.lr", "evaluation.num_items", "compute"),
)
MIN_COLUMN = 16  # characters of a column in a narrow terminal
LEGEND = "* changes results; what has none changes where and how fast they are computed"


def add(commands: Commands) -> None:
    config = commands.add(
        "config", _config, "settings with value, default and meaning: what matters, or all"
    )
    option = config.add_argument
    option(
        "section",
        nargs="?",
        metavar="SECTION",
        help="all of a section or one setting, for example rollout or optimizer.lr (default: those"
        " that matter most, and what differs from the defaults)",
    )
    option("--all", action="store_true", help="every setting")
    option("--search", metavar="WORD", help="settings whose path, meaning or example contains it")
    option("--json", action="store_true")
    option("--out", type=Path, help="write the settings that change results to this file, for DVC")
    doctor = commands.add("doctor", _doctor, "what is missing on this machine")
    doctor.add_argument("--json", action="store_true")
    envs = commands.group("envs", "environment servers on Kubernetes")
    shown = envs.add("list", _list_envs, "which runs have servers in kubernetes.namespace")
    shown.add_argument("--json", action="store_true")
    gc = envs.add("gc", _gc_envs, "servers of runs that died, and kept ones whose time is over")
    gc.add_argument(
        "--remove", action="store_true", help="take them down (default: only list them)"
    )
    gc.add_argument("--json", action="store_true")


def _config(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    rows, recipe = list(settings(cfg)), recipe_of(cfg.algorithm.recipe)
    for i, row in enumerate(rows):
        if row.section == "algorithm" and (value := getattr(recipe, row.name, None)):
            meaning = row.description.replace("the recipe's own", f"the recipe's own, {value}")
            rows[i] = replace(row, description=meaning)
    if arguments.section:
        known = {row.section or row.name for row in rows}
        rows = [row for row in rows if f"{row.path}.".startswith(f"{arguments.section}.")]
        if not rows:
            raise ConfigError(unknown_key((), arguments.section, known))
    if arguments.search:
        word = arguments.search.casefold()
        texts = [f"{row.path} {_meaning(row)} {json.dumps(row.example)}" for row in rows]
        rows = [row for row, text in zip(rows, texts, strict=True) if word in text.casefold()]
        if not rows:
            raise ConfigError(f"no setting's path, meaning or example contains {arguments.search}")
    if arguments.out is not None:
        from agentgym.pipeline.dvc import require_current
        from agentgym.store.posix import write_whole

        require_current(cfg, arguments.params)
        tree = json.dumps(cfg.semantic(), indent=1, sort_keys=True)
        write_whole(arguments.out, f"{tree}\n".encode())
    elif arguments.json:
        say(json.dumps([asdict(row) for row in rows], indent=1))
    elif arguments.all or arguments.section or arguments.search:
        say(LEGEND)
        for section, group in itertools.groupby(rows, lambda row: row.section):
            say(f"\n{section}" if section else "")
            _print_table(list(group), is_short=False)
    else:
        _print_overview(rows)
    return 0


def _print_overview(rows: Sequence[Setting]) -> None:
    by_path = {row.path: row for row in rows}
    others = [row for row in rows if row.value != row.default and row.path not in MAIN]
    say(LEGEND)
    say("\nthe settings that matter most")
    _print_table([by_path[path] for path in MAIN], is_short=True)
    say("\nothers that are not the default" if others else "\nall others have their defaults")
    _print_table(others, is_short=True)
    say("\nagentgym config SECTION, --all or --search WORD prints more, with whole meanings")


def _print_table(rows: Sequence[Setting], *, is_short: bool) -> None:
    """Print a line or more for each setting, in columns: name, value, meaning.
    is_short: paths for names, and one line of a meaning; else all of a meaning.
    """
    cells = [(row.path if is_short else row.name, json.dumps(row.value)) for row in rows]
    value_at = 4 + _width([name for name, _ in cells], 26)
    meaning_at = value_at + 2 + _width([value for _, value in cells], 16)
    num_columns = shutil.get_terminal_size().columns
    for row, (name, value) in zip(rows, cells, strict=True):
        meaning = re.split("[;.] ", row.description)[0] if is_short else _meaning(row)
        if row.value != row.default:
            meaning = f"(default {json.dumps(row.default)}) {meaning}"
        line = f"{'*' if row.changes_results else ' '} {name}"
        for at, text, most in ((value_at, value, None), (meaning_at, meaning, 1)):
            parts = textwrap.wrap(
                text,
                max(num_columns - at, MIN_COLUMN),
                max_lines=most if is_short else None,
                placeholder=" …",
                break_on_hyphens=False,
            )
            for part in parts:
                if len(line) > at - 2:
                    say(line)
                    line = ""
                line = f"{line:<{at}}{part}"
        say(line)


def _width(texts: Sequence[str], most: int) -> int:
    """Length of the longest text of at most `most` characters; longer ones get their own lines."""
    return max((len(text) for text in texts if len(text) <= most), default=0)


def _meaning(row: Setting) -> str:
    """Return a setting's description, with the choices if it omits one, else with an example.
    The example is left out if it is the default.
    """
    missing = [choice for choice in row.choices if str(choice) not in row.description]
    choices = f"; one of {', '.join(map(str, row.choices))}" if missing else ""
    shows = row.example != row.default and not choices
    example = f"; for example {json.dumps(row.example)}" if shows else ""
    return f"{row.description}{choices}{example}"


def _doctor(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.console.doctor import examine

    findings = examine(cfg)
    if arguments.json:
        say(json.dumps([asdict(finding) for finding in findings]))
    else:
        width = max(12, *(len(finding.name) + 1 for finding in findings))
        for finding in findings:
            say(f"{finding.name:<{width}}{finding.state:<9}{finding.text}", indent=width + 9)
    return 0 if all(finding.ok for finding in findings if finding.needed) else 1


def _list_envs(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.deploy.fleets.fleet_lease import groups
    from agentgym.deploy.fleets.startup import num_live
    from agentgym.deploy.kubernetes import connected

    with contextlib.closing(connected(cfg.kubernetes)) as kube:
        rows = [
            {
                "run": group.run,
                "held_by": "kept" if group.is_kept else str(group.holder or "unknown"),
                "is_alive": group.is_alive(),
                "renewed": group.renewed,
                "pods": num_live(kube, group.run),
            }
            for group in groups(kube)
        ]
    if arguments.json:
        say(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        state = "alive" if row["is_alive"] else "silent"
        say(f"{row['run']:<24}{state:<8}{row['pods']:>3} pods  {row['held_by']}")
    if not rows:
        say(f"no run has servers in namespace {cfg.kubernetes.namespace}")
    return 0


def _gc_envs(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.deploy.fleets.startup import take_down
    from agentgym.deploy.kubernetes import connected, observation_s, orphans

    with contextlib.closing(connected(cfg.kubernetes)) as kube:
        orphan_groups = orphans(kube, observe_s=observation_s(cfg))
        if arguments.remove:
            for group in orphan_groups:
                take_down(kube, group.run, timeout_s=cfg.kubernetes.down_timeout_s)
    if arguments.json:
        rows = [
            {"run": group.run, "why": group.why, "removed": arguments.remove}
            for group in orphan_groups
        ]
        say(json.dumps(rows, indent=1))
        return 0
    for group in orphan_groups:
        say(f"{'gone' if arguments.remove else 'dead':<8}{group.run:<24}{group.why}")
    if orphan_groups and not arguments.remove:
        say("agentgym envs gc --remove takes them down")
    if not orphan_groups:
        say(f"nothing in namespace {cfg.kubernetes.namespace} is left over")
    return 0
