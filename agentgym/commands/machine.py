"""`agentgym config | doctor | envs`: settings, this machine, servers on a cluster."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict

from agentgym.commands.parser import Commands
from agentgym.config import RunConfig, Setting, settings
from agentgym.console.ending import say

MEANINGS_AT = 40  # column of `agentgym config`


def add(commands: Commands) -> None:
    config = commands.add("config", _config, "every setting, its value, default and meaning")
    config.add_argument("--json", action="store_true")
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
    rows = list(settings(cfg))
    if arguments.json:
        say(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    say("* changes results; what has none changes where and how fast they are computed")
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            say(f"\n{section}")
        value, default = (json.dumps(item) for item in (row.value, row.default))
        changed = "" if value == default else f" (default {default})"
        mark = "*" if row.changes_results else " "
        shown = f"{mark} {row.name:<21}{value + changed}"
        if len(shown) >= MEANINGS_AT:
            say(shown)
            shown = ""
        say(f"{shown:<{MEANINGS_AT}}{_meaning(row)}")
    return 0


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
            say(f"{finding.name:<{width}}{finding.state:<9}{finding.text}")
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
